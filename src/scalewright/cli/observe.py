"""`scalewright observe`: what flows through a model, and what observers would make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from scalewright.cli.app import app
from scalewright.cli.options import (
    AsJson,
    Ignore,
    NumSamples,
    Reading,
    Strict,
    given_options,
    one_model,
    out_option,
    recipe_option,
    with_options,
)
from scalewright.cli.progress import progress_shown
from scalewright.cli.shown import failing_politely, say, tell
from scalewright.cli.tables import add_numbers, new_table, show_table
from scalewright.errors import OutputError, RecipeError

if TYPE_CHECKING:
    from scalewright.observing import Observations

_NUM_NOTES = 12  # the worst come first; --json and files have all


@app.command()
@with_options
def observe(
    *,
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|FILE", help="A model: its folder, or its name on the hub. Files, to merge."),
    ],
    scheme: Annotated[str, recipe_option(help="What losses are told for (see `schemes`).")] = "W8A8",
    observer: Annotated[
        list[str] | None,
        recipe_option(
            help="Who is asked what it would choose (see `observers`); may be repeated.",
            show_default="static_minmax, percentile, histogram_mse, balanced_mse, optimal",
        ),
    ] = None,
    ignore: Ignore = None,
    out: Annotated[
        Path | None, out_option(help="A file for all of it: .json, which can be merged, or .html, a page to look at.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge .json FILEs of one model and different data.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    worst_first: Annotated[bool, typer.Option("--worst-first", help="Show the layers that lose most first.")] = False,
    reading: Reading,
    samples: NumSamples = 512,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Watch data flow through a model: ranges, outliers, dead channels, what observers would choose and lose."""
    from scalewright.checkpoint.outputs import check_output_file
    from scalewright.modifiers.base import LEFT_ALONE
    from scalewright.observing import merge_files
    from scalewright.observing import observe as run

    with failing_politely(), progress_shown(quiet=as_json) as on_step:
        if out is not None:
            if out.suffix not in (".json", ".html"):
                raise OutputError(f"{out}: is neither .json nor .html. Give a file that ends in one of them.")
            check_output_file(out, overwrite=overwrite)
        if merge:
            odd = given_options(context, besides=("names", "out", "merge", "overwrite", "worst_first", "as_json"))
            if odd:
                raise RecipeError(f"{', '.join(odd)}: files are merged, and no model is run. Leave it out, or --merge.")
            found = merge_files(names)
        else:
            found = run(
                one_model(names, "observe"),
                reading.data,
                observers=observer or (),
                scheme=scheme,
                ignore=ignore or LEFT_ALONE,
                num_calibration_samples=samples,
                strict=strict,
                on_step=on_step,
                **reading.keywords(),
            )
        _write(found, out, overwrite=overwrite)
    if as_json:
        print(json.dumps({**found.to_dict(), "out": None if out is None else str(out)}))
        return
    show_table(_table(found, worst_first=worst_first))
    tell(found.notes[:_NUM_NOTES])
    if len(found.notes) > _NUM_NOTES:
        say(f"{len(found.notes) - _NUM_NOTES} more notes are in --json, and in files.", "note ", style="yellow")
    if out is not None:
        say(f"{out} is written ({len(found)} layers of {found.model}; {found.num_tokens:,} tokens).")


def _write(found: Observations, out: Path | None, *, overwrite: bool) -> None:
    if out is None:
        return
    if out.suffix == ".json":
        found.save(out, overwrite=overwrite)
        return
    from scalewright.checkpoint.outputs import write_file
    from scalewright.report.observations import observations_page

    write_file(out, observations_page(found).encode(), overwrite=overwrite)


def _table(found: Observations, *, worst_first: bool) -> Table:
    """A line for each layer. Columns that say nothing are left out."""
    from scalewright.observing.figures import worst_first as sorted_by_loss

    layers = sorted_by_loss(found.layers) if worst_first else found.layers
    columns = _columns(found)
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    by_name = {each.name: i for i, each in enumerate(found.layers)}
    what = f"{found.model}: {len(found)} layers, {found.num_tokens:,} tokens"
    table = new_table(f"{what}; dB of signal to noise under {found.scheme}", "layer")
    table.padding = (0, 0, 0, 0)  # a space stands between columns all the same
    for head in shown:
        add_numbers(table, head)
    for layer in layers:
        table.add_row(layer.name, *(cells[by_name[layer.name]] for cells in shown.values()))
    table.caption = (
        "times median: the largest channel beside the middle one; kurtosis: 3 is normal; dB: of all values together, "
        "or of the mean token if that is less; each token: with scales that are found while the model runs"
    )
    return table


def _columns(found: Observations) -> dict[str, list[str]]:
    """All columns; the cells of those that say nothing are empty."""
    layers = found.layers
    inputs = [each.input for each in layers]
    is_even = len({each.tokens for each in layers}) == 1
    columns = {
        "tokens": ["" if is_even else f"{each.tokens:,}" for each in layers],
        "absmax": ["" if each is None else _short(max(-each.min, each.max)) for each in inputs],
        "times\nmedian": ["" if each is None else _short(each.channels.ratio) for each in inputs],
        "out-\nliers": ["" if each is None else str(len(each.channels.outliers) or "") for each in inputs],
        "dead\nchannels": ["" if each is None else str(len(each.channels.dead) or "") for each in inputs],
        "kurt-\nosis": ["" if each is None else _short(each.kurtosis) for each in inputs],
    }
    for name in found.observers:
        chosen = [None if each is None else each.choices.get(name) for each in inputs]
        kept = [None if each is None else each.kept for each in chosen]
        columns[name.replace("_", "\n")] = [_db(None if each is None else each.least) for each in kept]
    dynamic = [None if each is None else each.dynamic for each in inputs]
    columns["each\ntoken"] = [_db(None if each is None else each.least) for each in dynamic]
    columns["weight\nout-\nliers"] = [str(len(each.weight.channels.outliers) or "") for each in layers]
    columns["weight\nkurt-\nosis"] = [_short(each.weight.kurtosis) for each in layers]
    for name in found.observers:
        taken = [each.weight.choices.get(name) for each in layers]
        columns["weight\n" + name.replace("_", "\n")] = ["" if each is None else _db(each.db) for each in taken]
    return columns


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.1e}"


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if math.isfinite(value) else "∞"
