"""Mapped files that somebody cuts short while they are read: an error in words.

Reading behind the end of a mapped file has the system end the process (SIGBUS), wherever it happens to be: in the
middle of a matrix multiplication, say. While `outliving_cuts` is on, zeros are put there instead, so that what is
computing comes to its end. `check_not_cut` says no then, and is to be asked before anything is kept.

Linux on 64 bits only: elsewhere things stay as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scalewright.checkpoint.mapped import mapped_now
from scalewright.errors import ModelError

_SA_SIGINFO, _MAP_FIXED = 4, 0x10
_ADDRESS_AT = 16  # where the address lies in siginfo_t
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Guard:
    """What the process does about SIGBUS: there is but one such thing, so there is one of these."""

    def __init__(self) -> None:
        self.cut: set[Path] = set()
        self._zeros: list[range] = []
        self._depth = 0
        self._before = _Action()
        self._libc: ctypes.CDLL | None = None
        if sys.platform == "linux" and struct.calcsize("P") == 8:
            try:
                self._handler = _Handler(self._on_fault)
            except (MemoryError, OSError):  # hardened systems do not let code be made
                return
            self._libc = ctypes.CDLL(None)
            self._libc.mmap.restype = ctypes.c_void_p

    def enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.cut.clear()
            self._zeros.clear()
        if self._depth == 1 and self._libc is not None:
            ours = _Action(handler=ctypes.cast(self._handler, ctypes.c_void_p), flags=_SA_SIGINFO)
            self._set(ours, self._before)

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._set(self._before, None)

    def _set(self, action: _Action, before: _Action | None) -> None:
        if self._libc is not None:
            self._libc.sigaction(signal.SIGBUS, ctypes.byref(action), None if before is None else ctypes.byref(before))

    def _on_fault(self, number: int, info: int, context: int) -> None:
        """Runs in the thread that has read; torch's threads may wait for the interpreter, which is free meanwhile."""
        address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
        if not self._put_zeros(address):
            self._set(self._before, None)  # not ours: it happens again, and ends as it would have

    def _put_zeros(self, address: int) -> bool:
        found = next((each for each in mapped_now() if each.start <= address < each.end), None)
        if found is None or self._libc is None:
            return any(address in each for each in self._zeros)  # another thread has come here first, with its fault
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        self._zeros.append(range(start, found.end))
        placed = self._libc.mmap(
            ctypes.c_void_p(start),
            ctypes.c_size_t(found.end - start),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED,
            -1,
            ctypes.c_long(0),
        )
        self.cut.add(found.file)
        return bool(placed == start)


_guard = _Guard()


@contextmanager
def outliving_cuts() -> Iterator[None]:
    """While inside, a mapped safetensors file that is cut short does not end the process; ModelError at the end.

    Whatever went wrong after zeros were read in its place went wrong because of them.
    """
    _guard.enter()
    try:
        yield
    except Exception as error:
        check_not_cut(error)
        raise
    else:
        check_not_cut()
    finally:
        _guard.leave()


def check_not_cut(cause: Exception | None = None) -> None:
    """Say no if a file was cut short since `outliving_cuts` began."""
    for file in sorted(_guard.cut):
        size = os.path.getsize(file) if file.exists() else 0
        raise ModelError(
            f"{file}: was cut short, to {size:,} bytes, while it was read, so nobody knows which weights were read. "
            "Put the file back, with its time (cp -p), and run the same again: a run into a folder goes on with what "
            "it had finished, or begins anew with restart."
        ) from cause
