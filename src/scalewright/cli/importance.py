"""`scalewright importance`: how strongly the inputs of layers are driven, into a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from scalewright.cli.app import app
from scalewright.cli.options import (
    AllExperts,
    AsJson,
    Ignore,
    NumSamples,
    Reading,
    Strict,
    given_options,
    one_model,
    out_option,
    with_options,
)
from scalewright.cli.progress import progress_shown
from scalewright.cli.ranks import RankTimeout, shared_by_ranks
from scalewright.cli.shown import say, tell
from scalewright.errors import RecipeError


@app.command()
@with_options
def importance(
    *,
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|FILE", help="A model: its folder, or its name on the hub. Files, to merge."),
    ],
    out: Annotated[Path, out_option(help="The file for the importance, in safetensors.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge FILEs that were gathered from one model and different data.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    ignore: Ignore = None,
    reading: Reading,
    samples: NumSamples = 512,
    moe_calibrate_all_experts: AllExperts = True,
    rank_timeout: RankTimeout = 1800.0,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Gather how strongly the inputs of a model's layers are driven, into a file for `quantize --importance`."""
    from scalewright.importance import gather_importance, merge_files
    from scalewright.modifiers.base import LEFT_ALONE

    with (
        shared_by_ranks(None, timeout=rank_timeout, device=reading.device) as ranks,
        progress_shown(quiet=as_json or not ranks.is_first) as on_step,
    ):
        if merge:
            odd = given_options(context, besides=("names", "out", "merge", "overwrite", "strict", "as_json"))
            if odd:
                raise RecipeError(f"{', '.join(odd)}: files are merged, and no model is run. Leave it out, or --merge.")
            if ranks.count > 1:
                raise RecipeError("--merge: there is nothing to share out to ranks. Run it without torchrun.")
            found = merge_files(names, out, strict=strict, overwrite=overwrite)
        else:
            found = gather_importance(
                one_model(names, "importance"),
                reading.data,
                ignore=ignore or LEFT_ALONE,
                output_file=out,
                num_calibration_samples=samples,
                moe_calibrate_all_experts=moe_calibrate_all_experts,
                strict=strict,
                overwrite=overwrite,
                on_step=on_step,
                **reading.keywords(),
                ranks=ranks,
            )
    if not ranks.is_first:
        return
    if as_json:
        print(json.dumps({**found.to_dict(), "out": str(out)}))
        return
    tell(found.notes)
    say(f"{out} is written ({len(found)} layers of {found.model}; {found.num_tokens:,} tokens).")
