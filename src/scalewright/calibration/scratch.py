"""Tensors in files without a name: what waits there takes no memory until it is read again.

Such a file is gone when nobody has its tensor any more, even if the process is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scalewright.errors import OutputError

_SMALL = 1 << 16  # bytes of a tensor that may stay where it is
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as glibc's malloc.h has them
_MUCH = 32 << 20  # bytes
_FREED = 31 << 20  # with what the allocator adds, just below what it minds


def num_bytes(tensor: Tensor) -> int:
    """What a tensor takes."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Scratch:
    """A folder, on whose disk such files are."""

    folder: Path

    def place(self, tensor: Tensor, *, is_shared: bool) -> Tensor:
        """The same tensor in a file. What is written to it later goes to the file only if it `is_shared`.

        The file is not open: there may be many thousands of them, and a process may have about a thousand open.
        """
        raw: Any = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                while raw:
                    raw = raw[file.write(raw) :]
                mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", is_shared, num_bytes(tensor))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise OutputError(
                f"{self.folder}: what waits in files there cannot be written ({reason}). Make room, give more memory, "
                "or another OUT."
            ) from error
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            placed: Tensor = torch.empty(0, dtype=tensor.dtype).set_(mapped, 0, tensor.shape)  # type: ignore[call-overload]
        return placed


def give_back(start: int, size: int) -> None:
    """Give back the memory of a part of a mapped file; whole pages only: what shares a page with others stays.

    The file must be mapped still, or whatever has come to lie there is wiped out.
    """
    begin, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and _LIBC is not None:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def can_give_back() -> bool:
    """Whether the system takes memory back."""
    return hasattr(mmap, "MADV_DONTNEED")


_LIBC = ctypes.CDLL(None) if can_give_back() else None


def give_back_freed() -> None:
    """Give the system what the allocator keeps of freed memory: what fits into none of the holes adds up otherwise.

    (NVFP4A16, 10 layers of 2048 columns: a process of 329 MB behind the first and 433 behind the last; with this, and
    without cycles, 319 behind each.) glibc alone can do it.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> None:
    """Let the allocator keep some of what is freed for what comes next, until it is given back.

    glibc takes the largest piece that was ever freed, up to 32 MB, for a measure of what comes and goes, and returns
    what is above twice of it to the system at once: tensors of some MB, freed and made again, would get new pages each
    time, which takes longer than filling them. So such a piece is freed. (6 layers of 1024, W4A16 min-max: 97,000 page
    faults and 1.2 s of processor time, and with this 10,000 and 0.8 s.) Other allocators do not mind.
    """
    torch.empty(_FREED, dtype=torch.uint8)


@contextmanager
def with_pages_of_their_own() -> Iterator[None]:
    """While inside, tensors of 4 MB and more lie in pages of their own, which go back to the system with them.

    Where many tensors wait, those that come and go between them leave gaps that nothing fits into. (2 layers of 1024,
    GPTQ: 352 MB in use at most, 490 taken for them without this, and 391 to 398 with it; with tensors of 1 MB and more
    367, at a tenth more time.) glibc alone needs it.
    """
    change = getattr(_LIBC, "mallopt", None)
    if change is None:
        yield
        return
    change(_MMAP_THRESHOLD, 4 << 20)
    try:
        yield
    finally:  # what `keep_freed` led to
        change(_MMAP_THRESHOLD, 32 << 20)
        change(_TRIM_THRESHOLD, 64 << 20)


@dataclass
class Thrift:
    """Gives freed memory back whenever the process has grown by so many bytes since it last did.

    What stays, however small, lies between what comes and goes, and glibc (2.36, at least) then needs a hundred bytes
    more than a gap has that was left by a tensor of the same size. So the process may grow by the tensors of each batch
    anew, or by none: that is chance. Where little was freed, looking takes a tenth of a millisecond.
    """

    step: int = 48 << 20
    _mark: int | None = None

    def make_room(self, size: int) -> None:
        """To be called before so many bytes are taken at once: gaps are no room for what is large."""
        if size >= _MUCH:
            give_back_freed()
            self._mark = None

    def look(self) -> None:
        """To be called now and then, where few tensors that come and go are there."""
        now = _resident()
        if self._mark is None or now < self._mark:
            self._mark = now
        elif now > self._mark + self.step:
            give_back_freed()
            self._mark = None  # what comes and goes all the time comes back


def _resident() -> int:
    """Bytes of memory that the process has; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as told:
            return int(told.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@dataclass
class WaitingRoom:
    """Where passes leave what they need later: in memory while there is room, in files beyond that."""

    scratch: Scratch
    room: int
    """Bytes of memory."""
    num_placed: int = 0
    """How many tensors went to files."""
    _inside: dict[int, int] = field(default_factory=dict)
    _placed: dict[int, Tensor] = field(default_factory=dict)

    def take(self, values: Any) -> None:
        """Tensors, in whatever they are, that nobody will look at for a while. They are the same ones afterwards."""
        for value in tree_leaves(values):
            if not isinstance(value, Tensor):
                continue
            key, size = id(value), num_bytes(value)
            if key in self._placed:
                give_back(self._placed[key].data_ptr(), size)  # what was read meanwhile
            elif key in self._inside or not _can_move(value):
                continue
            elif sum(self._inside.values()) + size <= self.room:
                self._inside[key] = size
                finalize(value, self._inside.pop, key, None)
            else:
                self._placed[key] = value.data = self.scratch.place(value, is_shared=True)
                self.num_placed += 1
                finalize(value, self._placed.pop, key, None)


def _can_move(tensor: Tensor) -> bool:
    """Whether it is large, and nobody else can have its memory; an inference tensor's cannot be replaced."""
    size = num_bytes(tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or size < _SMALL:
        return False
    storage = tensor.untyped_storage()
    num_owners: int = torch._C._storage_Use_Count(storage._cdata)
    return (
        not isinstance(tensor, torch.nn.Parameter)
        and not tensor.requires_grad
        and not tensor.is_inference()
        and tensor.is_contiguous()
        and storage.nbytes() == size
        and num_owners <= 2  # the tensor, and `storage`; a view of it would be another
    )
