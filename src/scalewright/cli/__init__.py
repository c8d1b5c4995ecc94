"""The command line: it parses, prints and sets exit codes; the work is done elsewhere. A file for each command.

Exit codes: 0 all went well, 1 something broke, 2 what was asked for cannot be done. Results go to stdout; progress,
errors and nothing else to stderr.
"""

import os
import re
import sys
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from io import TextIOWrapper

from scalewright.cli import (  # their import registers them
    catalog,
    evaluate,
    importance,
    observe,
    plan,
    quantize,
    report,
    verify,
)
from scalewright.cli.app import app
from scalewright.cli.shown import say_failed, say_stopped

__all__ = ["app", "catalog", "evaluate", "importance", "main", "observe", "plan", "quantize", "report", "verify"]


_ORDER = ("plan", "quantize", "eval", "report", "verify", "observe", "importance", "schemes", "observers")
"""In which `--help` shows them: as they are needed."""
app.registered_commands.sort(key=lambda each: _ORDER.index(each.name or getattr(each.callback, "__name__", "")))

_HOME = re.compile(r"(--[a-z-]+=)?(~(?:/.*)?)", re.DOTALL)
_FULL = (EDQUOT, EFBIG, EIO, ENOSPC)
_STOPPED = 130  # how typer ends when it is stopped before a command has begun


def main() -> None:
    """What `scalewright` and `python -m scalewright` run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # what it has no letters for must not end a command that has done its work
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app([_at_home(each) for each in sys.argv[1:]])
        finally:
            if sys.stdout is not None:  # as it is when it was closed
                sys.stdout.flush()
    except SystemExit as end:
        if end.code != _STOPPED:
            raise
        say_stopped()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try once more, and complain
        say_failed(f"the output cannot be written ({error.strerror}). Make room, or send it somewhere else.")
        sys.exit(1)


def _at_home(word: str) -> str:
    """`--out=~/x` as a user means it: a shell leaves that as it is, and a folder called `~` is a trap."""
    found = _HOME.fullmatch(word)
    return word if found is None else f"{found[1] or ''}{os.path.expanduser(found[2])}"
