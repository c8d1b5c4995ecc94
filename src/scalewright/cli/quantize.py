"""`scalewright quantize`: a model, a recipe and data become a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scalewright.cli.app import app
from scalewright.cli.options import (
    AllExperts,
    AsJson,
    Job,
    Reading,
    out_option,
    recipe_option,
    with_options,
)
from scalewright.cli.progress import progress_shown
from scalewright.cli.ranks import RankTimeout, shared_by_ranks
from scalewright.cli.shown import failing_politely, say, tell
from scalewright.cli.tables import layers_table, show_table
from scalewright.errors import RecipeError

if TYPE_CHECKING:
    from scalewright.oneshot import Result


@app.command()
@with_options
def quantize(
    job: Job,
    reading: Reading,
    out: Annotated[Path | None, out_option(help="The folder for the checkpoint; not needed to --print-recipe.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, and forget what a stopped run has left in OUT.partial.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write report.html, too: where the error lives.")] = False,
    moe_calibrate_all_experts: AllExperts = True,
    rank_timeout: RankTimeout = 1800.0,
    print_recipe: Annotated[
        bool, recipe_option("--print-recipe", help="Print the recipe that the options stand for, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantise a model and write the checkpoint."""
    from scalewright.checkpoint.saving import check_output
    from scalewright.oneshot import oneshot
    from scalewright.recipe import Recipe

    allocation = None
    if print_recipe:
        with failing_politely(), progress_shown(quiet=as_json) as on_step:
            if job.bits is None:
                recipe = Recipe.of(job.parsed_recipe())
            else:
                recipe = job.shared_out(job.sensitivity(reading, on_step)).recipe
        print(json.dumps(recipe.to_dict()) if as_json else recipe.to_yaml(), end="\n" if as_json else "")
        return
    with (
        shared_by_ranks(out, timeout=rank_timeout, device=reading.device) as ranks,
        progress_shown(quiet=as_json or not ranks.is_first) as on_step,
    ):
        if out is None:
            raise RecipeError("--out: nothing says where to write the checkpoint. Give a folder.")
        if job.bits is not None:
            check_output(out, overwrite=overwrite, source=job.model)
            allocation = job.shared_out(job.sensitivity(reading, on_step))
        result = oneshot(
            job.model,
            recipe=job.parsed_recipe() if allocation is None else allocation.recipe,
            dataset=reading.data,
            output_dir=out,
            num_calibration_samples=job.samples,
            pipeline=job.pipeline,
            sequential_targets=job.sequential_targets or None,
            moe_calibrate_all_experts=moe_calibrate_all_experts,
            strict=job.strict,
            overwrite=overwrite,
            restart=restart,
            max_memory=job.max_memory,
            on_step=on_step,
            ranks=ranks,
            **reading.keywords(),
        )
        page = _report_on(out, result) if report and ranks.is_first else None
    if not ranks.is_first:
        return
    if as_json:
        also = {} if page is None else {"report": str(page)}
        if allocation is not None:
            also |= {"bits": allocation.bits, "expected_loss": allocation.loss}
        print(json.dumps({**result.to_dict(), "out": str(out), **also}))
        return
    show_table(layers_table(result.to_dict()["layers"]))
    tell(result.notes)
    if allocation is not None:
        say(allocation.summary())
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items())
    say(f"{out} is written ({result.pipeline}: {result.why}; {seconds}).")
    if page is not None:
        say(f"{page} is written.")


def _report_on(out: Path, result: Result) -> Path:
    from scalewright.report.page import write_report

    return write_report(out, seconds=result.seconds)
