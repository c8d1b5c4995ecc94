"""The command line: it parses, prints and sets exit codes; the work is done elsewhere. A file for each command.

Exit codes: 0 all went well, 1 something broke, 2 what was asked for cannot be done. Results go to stdout; progress,
errors and nothing else to stderr.
"""

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

__all__ = ["app", "catalog", "evaluate", "importance", "main", "observe", "plan", "quantize", "report", "verify"]


def main() -> None:
    """What `scalewright` and `python -m scalewright` run."""
    app()
