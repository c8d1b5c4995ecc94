"""`scalewright report`: one page on a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalewright.cli.app import app
from scalewright.cli.options import out_option
from scalewright.cli.shown import failing_politely, say


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a checkpoint.")],
    out: Annotated[Path | None, out_option(help="The file for the page.", show_default="report.html in OUT")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="What `eval --json` has printed: KL, perplexity and agreement go into the page.")
    ] = None,
) -> None:
    """Write one page that shows where the error of a checkpoint lives, and what to do about it."""
    from scalewright.report.evaluated import read_evaluation
    from scalewright.report.page import write_report

    with failing_politely():
        found = None if evaluation is None else read_evaluation(evaluation)
        page = write_report(folder, out, evaluation=found)
    say(f"{page} is written.")
