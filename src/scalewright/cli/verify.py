"""`scalewright verify`: whether a checkpoint is whole, and what it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from scalewright.cli.app import app
from scalewright.cli.options import AsJson
from scalewright.cli.shown import failing_politely, say, tell


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a quantised checkpoint.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="The original, to hold the weights against: its folder, or its name on the hub if it is in the cache.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for anything wrong in a checkpoint: files, shapes, scales, codes. Exits with 1 if there is."""
    from scalewright.checkpoint.verifying import examine

    with failing_politely():
        found = examine(out, against=against)
    if as_json:
        print(json.dumps({**found.to_dict(), "out": str(out)}))
    else:
        for problem in found.problems:
            say(str(problem), "problem ", style="bold red")
        tell(found.notes)
        if not found.problems:
            say(f"{out}: {found.num_tensors} tensors, {found.num_layers} quantised layers, no problem found.")
    if found.problems:
        raise typer.Exit(1)
