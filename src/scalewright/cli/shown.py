"""What the commands print: lines and errors. Results go to stdout; errors to stderr. Tables are in tables.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENAMETOOLONG
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from scalewright.errors import RankError, ScalewrightError

out_console = Console(width=None if Console().is_terminal else 140)
err_console = Console(stderr=True)


def tell(notes: list[str]) -> None:
    """Print the notes of a run."""
    for note in notes:
        say(note, "note ", style="yellow")


def say(text: str, head: str = "", *, style: str = "", console: Console = out_console) -> None:
    """Print a line as it is: brackets in it are no markup. Without a terminal it stays one line."""
    console.print(Text.assemble((head, style), text), soft_wrap=not console.is_terminal)


@contextmanager
def failing_politely(out: Path | None = None, *, is_quiet: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A user's mistake is one line and exit code 2. Who stops a run that writes to `out` is told how to go on.

    `is_quiet` is asked whether somebody else says it.
    """
    try:
        yield
    except ScalewrightError as error:
        if not is_quiet():
            say_failed(str(error))
        raise typer.Exit(1 if isinstance(error, RankError) else 2) from None
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            raise
        say_failed(f"{error.filename}: is too long for a name.")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if is_quiet():
            raise typer.Exit(1) from None
        say_stopped(out)
        raise typer.Exit(1) from None


def say_failed(why: str) -> None:
    """The one line of an error."""
    say(why, "error ", style="bold red", console=err_console)


def say_stopped(out: Path | None = None) -> None:
    """Tell who has stopped a run that writes to `out` what is left of it."""
    where = None if out is None else out.resolve()
    partial_folder = None if where is None else where.parent / f"{where.name}.partial"
    if partial_folder is not None and partial_folder.exists():
        say(
            f"stopped; finished layers are in {partial_folder}. The same command goes on from there.",
            console=err_console,
        )
    else:
        say("stopped; nothing was written.", console=err_console)
