"""Memory of its own for what stays while much else comes and goes.

glibc lays tensors of less than 32 MB side by side. One that stays where activations were breaks up room that the next
ones would have fitted into, and the process grows by as much again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 1 << 16  # bytes that break nothing up


def zeros_apart(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """`torch.zeros`, in memory that nothing else shares and that goes back to the system with the tensor."""
    count = torch.Size(shape).numel()
    num_bytes = count * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < _SMALL or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def copied_apart(tensor: Tensor) -> Tensor:
    """`tensor.clone()`, in such memory."""
    return zeros_apart(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
