"""The command line: it parses, prints and sets exit codes; the work is done elsewhere.

Exit codes: 0 all went well, 1 something broke, 2 what was asked for cannot be done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from scalewright.errors import ScalewrightError
from scalewright.observers.catalog import COLUMNS, observer_rows

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds the scales that lose least when a language model is written in few bits.",
)
_out = Console(width=None if Console().is_terminal else 140)
_err = Console(stderr=True)

Model = Annotated[str, typer.Argument(help="A folder with a model, or its name on the hub.")]
Scheme = Annotated[str | None, typer.Option(help="The scheme: W4A16, FP8_DYNAMIC, NVFP4, ... (see `schemes`).")]
RecipeFile = Annotated[Path | None, typer.Option(help="A recipe, in YAML or JSON, instead of a scheme.")]
GroupSize = Annotated[int | None, typer.Option(help="Weights that share a scale, instead of the scheme's number.")]
WeightObserver = Annotated[str | None, typer.Option("--observer", help="The observer of weights (see `observers`).")]
Ignore = Annotated[list[str] | None, typer.Option(help="Modules to leave as they are; may be repeated. [lm_head]")]
Data = Annotated[
    str | None, typer.Option(help="Calibration data: a .txt, .jsonl, .json, .csv or .parquet file, or a hub name.")
]
Column = Annotated[str | None, typer.Option(help="The column of the data that has the text, messages or ids.")]
NumSamples = Annotated[int, typer.Option("--samples", min=1, help="How many samples to calibrate with.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample at most. [2048, or the model's context]")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples at a time. [about 2048 tokens]")]
Pipeline = Annotated[str, typer.Option(help="auto, data_free, basic or sequential.")]
Device = Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, ...")]
Dtype = Annotated[str, typer.Option(help="auto keeps the model's own; float32, bfloat16, float16.")]
Seed = Annotated[int, typer.Option(help="For the choice of samples.")]
Strict = Annotated[bool, typer.Option("--strict", help="Notes are errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Option(help="The folder for the checkpoint.")],
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    group_size: GroupSize = None,
    observer: WeightObserver = None,
    ignore: Ignore = None,
    data: Data = None,
    column: Column = None,
    samples: NumSamples = 512,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    pipeline: Pipeline = "auto",
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    strict: Strict = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Quantise a model and write the checkpoint."""
    from scalewright.oneshot import oneshot

    with _failing_politely(), _progress(quiet=as_json) as on_step:
        result = oneshot(
            model,
            recipe=_recipe(scheme, recipe, group_size, observer, ignore),
            dataset=data,
            output_dir=out,
            num_calibration_samples=samples,
            max_seq_length=seq_len,
            batch_size=batch_size,
            column=column,
            pipeline=pipeline,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            strict=strict,
            overwrite=overwrite,
            seed=seed,
            on_step=on_step,
        )
    if as_json:
        print(json.dumps({**result.to_dict(), "out": str(out)}))
        return
    _out.print(layers_table(result.to_dict()["layers"]))
    for note in result.notes:
        _out.print(f"[yellow]note[/] {note}", highlight=False)
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items())
    _out.print(f"{out} is written ({result.pipeline}: {result.why}; {seconds}).", highlight=False)


@app.command()
def plan(
    model: Model,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    group_size: GroupSize = None,
    observer: WeightObserver = None,
    ignore: Ignore = None,
    data: Data = None,
    samples: NumSamples = 512,
    seq_len: SeqLen = None,
    pipeline: Pipeline = "auto",
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say what `quantize` would do: layers, observers, bits, size, memory, time. Writes nothing."""
    from scalewright.planning import plan_of

    with _failing_politely():
        found = plan_of(
            model,
            _recipe(scheme, recipe, group_size, observer, ignore),
            has_data=data is not None,
            num_tokens=samples * (seq_len or 2048),
            pipeline=pipeline,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    table = _table(f"{model}: the plan", "such as", "layers", "weights", "activations", "observers", "bits")
    for row in found.groups:
        table.add_row(str(row.count), row.example, row.weights, row.activations, row.observers, f"{row.bits:.2f}")
    _out.print(table)
    for note in found.notes:
        _out.print(f"[yellow]note[/] {note}", highlight=False)
    for line in found.summary():
        _out.print(line, highlight=False)


@app.command()
def schemes(as_json: AsJson = False) -> None:
    """Show all schemes."""
    from dataclasses import asdict

    from scalewright.modifiers.schemes import scheme_rows

    rows = scheme_rows()
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = _table("Schemes", "scheme", "weights", "activations", "bits", "needs data")
    for row in rows:
        table.add_row(row.name, row.weights, row.activations, f"{row.bits:.2f}", "yes" if row.needs_data else "no")
    _out.print(table)


@app.command()
def observers(as_json: AsJson = False) -> None:
    """Show all observers."""
    if as_json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in observer_rows()]))
        return
    table = _table("Observers", "name", "what it finds", "watches", "knobs (defaults)")
    for name, what, watches, _, knobs, *_ in observer_rows():
        table.add_row(name, what, watches, knobs)
    _out.print(table)


def layers_table(rows: list[dict[str, Any]]) -> Table:
    """The table of layers that `quantize` prints; what all of them have in common stands above it."""
    words = [
        {
            "weights": row["weights"],
            "activations": row["activations"],
            "observers": ", ".join(row["observers"].values()),
        }
        for row in rows
    ]
    varying = [key for key in words[0] if len({row[key] for row in words}) > 1]
    common = "; ".join(f"{key}: {words[0][key]}" for key in words[0] if key not in varying)
    table = _table(f"{len(rows)} layers; {common}" if common else f"{len(rows)} layers", "layer", *varying, *_FIGURES)
    for row, in_words in zip(rows, words, strict=True):
        figures = ("" if row[key] is None else form.format(row[key]) for key, form in _FIGURES.values())
        table.add_row(row["name"], *(in_words[key] for key in varying), *figures)
    table.caption = (
        "dB: signal to noise of the weight, its gain over min-max, and of the layer's output on calibration data. "
        "above best: how much more the weight loses than the least possible."
    )
    return table


_FIGURES = {
    "weight dB": ("weight_db", "{:.1f}"),
    "gain": ("gain_db", "{:+.2f}"),
    "output dB": ("output_db", "{:.1f}"),
    "above best": ("above_optimum", "{:.2%}"),
}


def _table(title: str, first: str, *others: str) -> Table:
    """A table whose first column is never cut."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name in _FIGURES else "left")
    return table


def _recipe(
    scheme: str | None, recipe: Path | None, group_size: int | None, observer: str | None, ignore: list[str] | None
) -> Any:
    from scalewright.calibration.plan import LM_HEAD
    from scalewright.errors import RecipeError
    from scalewright.modifiers import QuantizationModifier

    if (scheme is None) == (recipe is None):
        raise RecipeError("give either --scheme or --recipe.")
    if recipe is not None:
        given = [
            name
            for name, value in (("--group-size", group_size), ("--observer", observer), ("--ignore", ignore))
            if value
        ]
        if given:
            raise RecipeError(f"{', '.join(given)}: the recipe says that. Leave it out, or change the recipe.")
        return recipe
    return QuantizationModifier(
        targets=["Linear"],
        scheme=scheme,
        group_size=group_size,
        weight_observer=observer,
        ignore=ignore or [LM_HEAD],
    )


@contextmanager
def _failing_politely() -> Iterator[None]:
    """A user's mistake is one line and exit code 2."""
    try:
        yield
    except ScalewrightError as error:
        _err.print(f"[bold red]error[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _err.print("stopped.")
        raise typer.Exit(1) from None


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """Shows each step with its name and the time left; nothing when not on a terminal."""
    if quiet or not _err.is_terminal:
        yield lambda phase, what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=_err, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def on_step(phase: str, what: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], description=f"{phase} {what}", completed=done, total=total)

        yield on_step


def main() -> None:
    """What `scalewright` and `python -m scalewright` run."""
    app()
