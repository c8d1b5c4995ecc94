"""The command line: it parses, prints and sets exit codes; the work is done elsewhere. A file for each command.

Exit codes: 0 all went well, 1 something broke, 2 what was asked for cannot be done. Results go to stdout; progress,
errors and nothing else to stderr.
"""

import re
import sys
from os.path import expanduser

from scalewright.cli import (  # their import registers them, in the order of `--help`
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
from scalewright.cli.shown import say_stopped

__all__ = ["app", "catalog", "evaluate", "importance", "main", "observe", "plan", "quantize", "report", "verify"]


_HOME = re.compile(r"(--[a-z-]+=)?(~(?:/.*)?)", re.DOTALL)
_STOPPED = 130  # how typer ends when it is stopped before a command has begun


def main() -> None:
    """What `scalewright` and `python -m scalewright` run."""
    try:
        app([_at_home(each) for each in sys.argv[1:]])
    except SystemExit as end:
        if end.code != _STOPPED:
            raise
        say_stopped()
        sys.exit(1)


def _at_home(word: str) -> str:
    """`--out=~/x` as a user means it: a shell leaves that as it is, and a folder called `~` is a trap."""
    found = _HOME.fullmatch(word)
    return word if found is None else f"{found[1] or ''}{expanduser(found[2])}"
