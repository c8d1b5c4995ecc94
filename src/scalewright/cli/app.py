"""The one application that every command is registered with."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds the scales that lose least when a language model is written in few bits.",
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"scalewright {version('scalewright')}")
        raise typer.Exit


@app.callback(help=app.info.help)
def _all_commands(
    is_asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""
