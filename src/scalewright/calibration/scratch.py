"""Tensors in files without a name: what waits there takes no memory until it is read again.

Such a file is gone when nobody has its tensor any more, even if the process is killed.
"""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scalewright.errors import OutputError

_SMALL = 1 << 16  # bytes of a tensor that may stay where it is


def num_bytes(tensor: Tensor) -> int:
    """What a tensor takes."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Scratch:
    """A folder, on whose disk such files are."""

    folder: Path

    def place(self, tensor: Tensor, *, is_shared: bool) -> tuple[Tensor, mmap.mmap]:
        """The same tensor in a file. What is written to it later goes to the file only if it `is_shared`."""
        raw: Any = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                while raw:
                    raw = raw[file.write(raw) :]
                mapped = mmap.mmap(file.fileno(), num_bytes(tensor), flags=flags)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: what waits in files there cannot be written ({error.strerror or error}). Make room, "
                "give more memory, or another OUT."
            ) from error
        return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape), mapped


@dataclass
class WaitingRoom:
    """Where passes leave what they need later: in memory while there is room, in files beyond that."""

    scratch: Scratch
    room: int
    """Bytes of memory."""
    num_placed: int = 0
    """How many tensors went to files."""
    _inside: dict[int, int] = field(default_factory=dict)
    _placed: dict[int, mmap.mmap] = field(default_factory=dict)

    def take(self, values: Any) -> None:
        """Tensors, in whatever they are, that nobody will look at for a while. They are the same ones afterwards."""
        for value in tree_leaves(values):
            if not isinstance(value, Tensor) or not _can_move(value):
                continue
            key, size = id(value), num_bytes(value)
            if key in self._placed:
                self._placed[key].madvise(mmap.MADV_DONTNEED)  # what was read meanwhile
            elif key in self._inside:
                continue
            elif sum(self._inside.values()) + size <= self.room:
                self._inside[key] = size
                finalize(value, self._inside.pop, key, None)
            else:
                placed, file = self.scratch.place(value, is_shared=True)
                value.data = placed
                self._placed[key] = file
                self.num_placed += 1
                finalize(value, self._placed.pop, key, None)


def _can_move(tensor: Tensor) -> bool:
    """Whether it is large, and nobody else can have its memory; an inference tensor's cannot be replaced."""
    size = num_bytes(tensor)
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not isinstance(tensor, torch.nn.Parameter)
        and not tensor.requires_grad
        and not tensor.is_inference()
        and size >= _SMALL
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == size
    )
