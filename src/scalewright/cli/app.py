"""The one application that every command is registered with."""

from __future__ import annotations

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds the scales that lose least when a language model is written in few bits.",
)
