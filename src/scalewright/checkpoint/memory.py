"""How much memory there is, and how much of it what flows between blocks may have."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from scalewright.errors import RecipeError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SHARE = 0.9  # of what is free
_WORK = 200 * 2**20  # what rounding a layer takes besides


def in_bytes(size: int | str | None) -> int | None:
    """`"8GB"`, `"512MiB"` or a number, in bytes; None if nothing is said."""
    if size is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    unit = None if found is None else found[2] if found[2].endswith("B") or not found[2] else f"{found[2]}B"
    if found is None or unit not in _UNITS:
        raise RecipeError(f"max_memory: '{size}' is no size. Write it as 8GB or 512MiB.")
    return round(float(found[1]) * _UNITS[unit])


def in_units(num_bytes: float) -> str:
    """`12.3 MB` and the like."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} bytes"


def room_for_activations(max_memory: int | None, largest_block: int) -> int:
    """Bytes of memory for what flows between blocks. `max_memory` is for all that the process has."""
    used = int(psutil.Process().memory_info().rss)
    limit = used + _SHARE * _free(used) if max_memory is None else max_memory
    return max(0, round(limit - used - 2 * largest_block - _WORK))


def _free(used: int) -> int:
    """What the machine has, or what a container leaves of it."""
    free = int(psutil.virtual_memory().available)
    for file in _CGROUP:
        if file.exists() and (text := file.read_text().strip()).isdigit():
            free = min(free, max(0, int(text) - used))
    return int(free)
