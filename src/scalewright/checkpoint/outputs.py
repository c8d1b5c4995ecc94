"""Single files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from scalewright.errors import OutputError


def check_output_file(path: Path, *, overwrite: bool) -> None:
    """Say no, before any work, to a place that a file cannot be written to."""
    if path.is_dir():
        raise OutputError(f"{path}: is a folder. Give the name of a file.")
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already. Give another name, or overwrite.")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: {parent} cannot be written to.")


def write_file(path: Path, content: bytes, *, overwrite: bool = False) -> Path:
    """Write a file, under a temporary name until it is complete, and give its path."""
    check_output_file(path, overwrite=overwrite)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    draft = path.absolute().parent / f".{path.name}.incomplete"
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
