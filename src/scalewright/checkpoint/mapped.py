"""Weights that lie in mapped files: they become memory when they are read, and that memory can be given back.

transformers maps the safetensors files of a model that is loaded in its own dtype. What it has to compute (the experts
of a layer in one tensor, another dtype) is written to a file without a name, and mapped from there. So a model is a
description of files, whatever its size, and what is in memory is what was touched last.

Linux only: elsewhere nobody tells what is mapped, and a model is loaded whole.
"""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from scalewright.calibration.scratch import Scratch, can_give_back, give_back, num_bytes
from scalewright.checkpoint.shards import TensorAt, tensors_in

_MAPS = Path("/proc/self/maps")
_SUFFIX = ".safetensors"
_BLOBS = "/blobs/"  # where the hub's cache has them, by their digests; what has a suffix are links
_SMALL = 1 << 16  # bytes of a tensor that may stay where it is
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"


def can_map() -> bool:
    """Whether the system tells what is mapped, and takes memory back."""
    return _MAPS.exists() and can_give_back()


@dataclass(frozen=True, order=True)
class _Range:
    """Where a part of a file lies in memory."""

    start: int
    end: int
    offset: int
    file: Path


@dataclass
class MappedFiles:
    """The files that the weights of one model lie in.

    A file is known from the first parameter that lies in it, and stays mapped from then on: giving back memory that
    has meanwhile become somebody else's would wipe that out.
    """

    scratch: Scratch
    _ranges: list[_Range] = field(default_factory=list)
    _tensors: list[Tensor] = field(default_factory=list)
    """One in each range, which keeps it mapped."""
    _own: dict[int, Tensor] = field(default_factory=dict)
    _headers: dict[Path, dict[tuple[int, int], TensorAt]] = field(default_factory=dict)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """While inside, parameters that modules are given come to lie in files."""
        others = set(mapped_now()).difference(self._ranges)  # by whom ever

        def put_away(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or parameter.device.type != "cpu" or not parameter.numel() or self.has(parameter):
                return None
            now = set(mapped_now())
            if self._keep(parameter, now) or num_bytes(parameter) < _SMALL:
                return None
            for each in now - others:  # it was computed from what lies there
                give_back(each.start, each.end - each.start)
            mapped = self.scratch.place(parameter, is_shared=False)
            self._own[mapped.data_ptr()] = mapped
            give_back(mapped.data_ptr(), num_bytes(mapped))
            flags = {key: value for key, value in vars(parameter).items() if key.startswith("_is_hf")}
            placed = nn.Parameter(mapped, requires_grad=parameter.requires_grad)
            vars(placed).update(flags)
            return placed

        before = os.environ.get(_ASYNC)
        os.environ[_ASYNC] = "1"  # its threads would run ahead, and have the whole model in memory
        hook = register_module_parameter_registration_hook(put_away)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()
            if before is None:
                del os.environ[_ASYNC]
            else:
                os.environ[_ASYNC] = before

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the files."""
        pointer = tensor.data_ptr()
        is_own = any(start <= pointer < start + num_bytes(each) for start, each in self._own.items())
        return is_own or self._range(pointer) is not None

    def place_of(self, tensor: Tensor) -> TensorAt | None:
        """Where the bytes of a tensor are, if it is one of a file as it is."""
        found = self._range(tensor.data_ptr()) if tensor.device.type == "cpu" and tensor.is_contiguous() else None
        if found is None:
            return None
        if found.file not in self._headers:
            inside = tensors_in(found.file).values()
            self._headers[found.file] = {(each.start, each.num_bytes): each for each in inside}
        start = tensor.data_ptr() - found.start + found.offset
        place = self._headers[found.file].get((start, num_bytes(tensor)))
        return place if place is not None and place.shape == tuple(tensor.shape) else None

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of tensors that lie in the files; what was written to them meanwhile is forgotten."""
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.numel() and self.has(tensor):
                give_back(tensor.data_ptr(), num_bytes(tensor))

    def give_back_all(self) -> None:
        """The same with all that lies in the files."""
        for each in self._ranges:
            give_back(each.start, each.end - each.start)
        for start, own in self._own.items():
            give_back(start, num_bytes(own))

    def _keep(self, tensor: Tensor, mapped: Iterable[_Range]) -> bool:
        """Take note of the file among those that are `mapped` which a tensor lies in, if there is one."""
        found = next((each for each in mapped if each.start <= tensor.data_ptr() < each.end), None)
        if found is None:
            return False
        insort(self._ranges, found)
        self._tensors.append(tensor.detach())
        return True

    def _range(self, pointer: int) -> _Range | None:
        place = bisect_right(self._ranges, pointer, key=lambda each: each.start) - 1
        return self._ranges[place] if place >= 0 and pointer < self._ranges[place].end else None


def mapped_now() -> Iterator[_Range]:
    """The safetensors files that the process has mapped."""
    # Not splitlines(): names may have line separators of Unicode in them. A new line is told as \012.
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        if line.endswith(_SUFFIX) or _BLOBS in line:
            between, _, offset, _, _, file = line.split(maxsplit=5)
            start, _, end = between.partition("-")
            yield _Range(int(start, 16), int(end, 16), int(offset, 16), Path(file.replace("\\012", "\n")))
