"""Single files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from scalewright.errors import OutputError

_MAX_NAME = 240  # bytes: file systems take 255, and a draft has a longer one


def check_output_file(path: Path, *, overwrite: bool) -> None:
    """Say no, before any work, to a place that a file cannot be written to."""
    if os.path.isdir(path):  # unlike Path, it bears a name that is too long
        raise OutputError(f"{path}: is a folder. Give the name of a file.")
    if len(os.fsencode(path.name)) > _MAX_NAME:
        raise OutputError(f"{path}: has a name that is too long. Give another name.")
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
    draft = path.absolute().parent / f".{path.name}.incomplete"
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}). Give another file.") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return path
