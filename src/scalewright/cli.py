"""The command line: it parses, prints and sets exit codes; the work is done elsewhere.

Exit codes: 0 all went well, 1 something broke, 2 what was asked for cannot be done. Results go to stdout; progress,
errors and nothing else to stderr.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from scalewright.errors import RecipeError, ScalewrightError
from scalewright.observers.catalog import COLUMNS, observer_rows

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds the scales that lose least when a language model is written in few bits.",
)
_out = Console(width=None if Console().is_terminal else 140)
_err = Console(stderr=True)

# ---- options ---------------------------------------------------------------------------------------------------------

_recipe_option = partial(typer.Option, rich_help_panel="What to do")
_data_option = partial(typer.Option, rich_help_panel="Calibration data")
_run_option = partial(typer.Option, rich_help_panel="How to run")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Ignore = Annotated[
    list[str] | None,
    _recipe_option(help="Modules to leave as they are; may be repeated.", show_default="lm_head"),
]
Data = Annotated[
    str | None, _data_option(help="A .txt, .jsonl, .json, .csv or .parquet file, or the name of a dataset.")
]
NumSamples = Annotated[int, _data_option(min=1, help="How many samples to calibrate with.")]
SeqLen = Annotated[
    int | None, _data_option(min=1, help="Tokens of a sample at most.", show_default="2048, or the model's context")
]
BatchSize = Annotated[int | None, _data_option(min=1, help="Samples at a time.", show_default="as the memory allows")]
DataColumn = Annotated[str | None, _data_option(help="The column that has the text, messages or ids.")]
Split = Annotated[str, _data_option(help="The split of a dataset.")]
Pack = Annotated[
    bool | None,
    _data_option(
        "--pack/--no-pack",
        help="Whether to join samples and cut them into full sequences.",
        show_default="where a text file has lines",
    ),
]
Tokenizer = Annotated[
    str | None, _data_option(help="A folder or hub name to take it from.", show_default="the model's")
]
Seed = Annotated[int, _data_option(help="For the choice of samples.")]
AllExperts = Annotated[
    bool,
    _run_option(
        "--moe-calibrate-all-experts/--no-moe-calibrate-all-experts",
        help="Whether each expert of a mixture sees every token.",
        show_default="it does",
    ),
]
Device = Annotated[str | None, _run_option(help="Where to run: cpu, cuda, ...", show_default="cpu")]
Dtype = Annotated[str, _run_option(help="auto keeps the model's own; float32, bfloat16, float16.")]
Strict = Annotated[bool, _run_option("--strict", help="Notes are errors.")]
TrustRemoteCode = Annotated[bool, _run_option("--trust-remote-code", help="Run code that comes with the model.")]


@dataclass(frozen=True)
class Job:
    """What `quantize` does and `plan` tells: the options that both have."""

    model: Annotated[str, typer.Argument(help="A folder with a model, or its name on the hub.")]
    scheme: Annotated[
        str | None, _recipe_option(help="The scheme: W4A16, FP8_DYNAMIC, NVFP4, ... (see `schemes`).")
    ] = None
    quality: Annotated[str | None, _recipe_option(help="fast, balanced or best.", show_default="balanced")] = None
    positive_scales: Annotated[bool, _recipe_option("--positive-scales", help="Let best have no negative scales.")] = (
        False
    )
    recipe: Annotated[Path | None, _recipe_option(help="A recipe, in YAML or JSON, instead of a scheme.")] = None
    group_size: Annotated[
        int | None, _recipe_option(help="Weights that share a scale.", show_default="the scheme's number")
    ] = None
    observer: Annotated[
        str | None, _recipe_option(help="The observer of weights (see `observers`).", show_default="the best")
    ] = None
    ignore: Ignore = None
    importance: Annotated[
        Path | None, _recipe_option(help="A file that `importance` has written: it weighs the errors of weights.")
    ] = None
    data: Data = None
    samples: NumSamples = 512
    seq_len: SeqLen = None
    batch_size: BatchSize = None
    pipeline: Annotated[str, _run_option(help="auto, data_free, basic or sequential.")] = "auto"
    sequential_targets: Annotated[
        list[str] | None,
        _run_option(
            "--sequential-targets",
            help="Modules that sequential goes through one by one; may be repeated.",
            show_default="the model's blocks",
        ),
    ] = None
    dtype: Dtype = "auto"
    strict: Strict = False
    trust_remote_code: TrustRemoteCode = False

    def parsed_recipe(self) -> Any:
        """The recipe that the options stand for."""
        from scalewright.quality import recipe_for

        if (self.scheme is None) == (self.recipe is None):
            raise RecipeError("give either --scheme or --recipe.")
        if self.scheme is not None:
            return recipe_for(
                self.quality or "balanced",
                self.scheme,
                group_size=self.group_size,
                observer=self.observer,
                ignore=self.ignore,
                importance=self.importance,
                positive_scales=self.positive_scales,
            )
        said = ("quality", "positive_scales", "group_size", "observer", "ignore", "importance")
        given = [f"--{name.replace('_', '-')}" for name in said if getattr(self, name)]
        if given:
            raise RecipeError(f"{', '.join(given)}: the recipe says that. Leave it out, or change the recipe.")
        return self.recipe


def _with_job(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its first argument, a `Job`, as options of its own."""
    shared = inspect.signature(Job, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def run(**given: Any) -> None:
        command(Job(**{name: given.pop(name) for name in shared}), **given)

    every = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared.values(), *own)]
    vars(run)["__signature__"] = inspect.Signature(every)
    run.__annotations__ = {each.name: each.annotation for each in every}
    return run


def _given(context: typer.Context, *, besides: Sequence[str]) -> list[str]:
    """The options that stand on the command line."""
    names = [name for name in context.params if name not in besides]
    return [f"--{name.replace('_', '-')}" for name in names if _is_said(context, name)]


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command()
@_with_job
def quantize(
    job: Job,
    out: Annotated[Path | None, typer.Option(help="The folder for the checkpoint.", show_default="required")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, and forget what a stopped run has left in OUT.partial.")
    ] = False,
    column: DataColumn = None,
    split: Split = "train",
    pack: Pack = None,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    moe_calibrate_all_experts: AllExperts = True,
    device: Device = None,
    print_recipe: Annotated[
        bool, _recipe_option("--print-recipe", help="Print the recipe that the options stand for, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantise a model and write the checkpoint."""
    from scalewright.oneshot import oneshot
    from scalewright.recipe import Recipe

    if print_recipe:
        with _failing_politely():
            recipe = Recipe.of(job.parsed_recipe())
        print(json.dumps(recipe.to_dict()) if as_json else recipe.to_yaml(), end="\n" if as_json else "")
        return
    with _failing_politely(out), _progress(quiet=as_json) as on_step:
        if out is None:
            raise RecipeError("--out: nothing says where to write the checkpoint. Give a folder.")
        result = oneshot(
            job.model,
            recipe=job.parsed_recipe(),
            dataset=job.data,
            output_dir=out,
            tokenizer=tokenizer,
            num_calibration_samples=job.samples,
            max_seq_length=job.seq_len,
            batch_size=job.batch_size,
            column=column,
            pack=pack,
            split=split,
            pipeline=job.pipeline,
            sequential_targets=job.sequential_targets or None,
            moe_calibrate_all_experts=moe_calibrate_all_experts,
            device=device,
            dtype=job.dtype,
            trust_remote_code=job.trust_remote_code,
            strict=job.strict,
            overwrite=overwrite,
            restart=restart,
            seed=seed,
            on_step=on_step,
        )
    if as_json:
        print(json.dumps({**result.to_dict(), "out": str(out)}))
        return
    _out.print(layers_table(result.to_dict()["layers"]))
    _tell(result.notes)
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items())
    _say(f"{out} is written ({result.pipeline}: {result.why}; {seconds}).")


@app.command()
@_with_job
def plan(job: Job, as_json: AsJson = False) -> None:
    """Say what `quantize` would do: layers, observers, bits, size, memory, time. Writes nothing."""
    from scalewright.planning import plan_of

    with _failing_politely():
        found = plan_of(
            job.model,
            job.parsed_recipe(),
            has_data=job.data is not None,
            num_samples=job.samples,
            max_seq_length=job.seq_len,
            batch_size=job.batch_size,
            pipeline=job.pipeline,
            sequential_targets=job.sequential_targets or None,
            dtype=job.dtype,
            trust_remote_code=job.trust_remote_code,
            strict=job.strict,
        )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    table = _table(f"{job.model}: the plan", "such as", "layers", "weights", "activations", "observers", "bits")
    for row in found.groups:
        table.add_row(row.example, str(row.count), row.weights, row.activations, row.observers, f"{row.bits:.2f}")
    _out.print(table)
    _tell(found.notes)
    for line in found.summary():
        _say(line)


@app.command()
def importance(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|FILE", help="A model: its folder, or its name on the hub. Files, to merge."),
    ],
    out: Annotated[Path, typer.Option(help="The file for the importance, in safetensors.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge FILEs that were gathered from one model and different data.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    ignore: Ignore = None,
    data: Data = None,
    samples: NumSamples = 512,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    column: DataColumn = None,
    split: Split = "train",
    pack: Pack = None,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    moe_calibrate_all_experts: AllExperts = True,
    device: Device = None,
    dtype: Dtype = "auto",
    strict: Strict = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Gather how strongly the inputs of a model's layers are driven, into a file for `quantize --importance`."""
    from scalewright.calibration.plan import LM_HEAD
    from scalewright.importance import gather_importance, merge_files

    with _failing_politely(), _progress(quiet=as_json) as on_step:
        if merge:
            odd = _given(context, besides=("names", "out", "merge", "overwrite", "strict", "as_json"))
            if odd:
                raise RecipeError(f"{', '.join(odd)}: files are merged, and no model is run. Leave it out, or --merge.")
            found = merge_files(names, out, strict=strict, overwrite=overwrite)
        else:
            if len(names) > 1:
                raise RecipeError(f"{len(names)} models were given. Give one, or files and --merge.")
            found = gather_importance(
                names[0],
                data,
                ignore=ignore or [LM_HEAD],
                output_file=out,
                tokenizer=tokenizer,
                num_calibration_samples=samples,
                max_seq_length=seq_len,
                batch_size=batch_size,
                column=column,
                pack=pack,
                split=split,
                moe_calibrate_all_experts=moe_calibrate_all_experts,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                strict=strict,
                overwrite=overwrite,
                seed=seed,
                on_step=on_step,
            )
    if as_json:
        print(json.dumps({**found.to_dict(), "out": str(out)}))
        return
    _tell(found.notes)
    _say(f"{out} is written ({len(found)} layers of {found.model}; {found.num_tokens:,} tokens).")


@app.command()
def schemes(as_json: AsJson = False) -> None:
    """Show all schemes."""
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


# ---- what is shown ---------------------------------------------------------------------------------------------------


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
    shown = [each for each in _FIGURES if any(row[_FIGURES[each][0]] is not None for row in rows)]
    table = _table(f"{len(rows)} layers; {common}" if common else f"{len(rows)} layers", "layer", *varying, *shown)
    for row, in_words in zip(rows, words, strict=True):
        figures = ("" if row[key] is None else form.format(row[key]) for key, form, _ in (_FIGURES[i] for i in shown))
        table.add_row(row["name"], *(in_words[key] for key in varying), *figures)
    table.caption = "\n".join(f"{each}: {_FIGURES[each][2]}" for each in shown)
    return table


_FIGURES = {
    "weight dB": ("weight_db", "{:.1f}", "signal to noise of the weight"),
    "gain": ("gain_db", "{:+.2f}", "what the weight gains over min-max, errors weighted as in the search"),
    "output dB": ("output_db", "{:.1f}", "signal to noise of the layer's output, on calibration data"),
    "above best": ("above_optimum", "{:.2%}", "how much more the weight loses than the least possible"),
}


def _table(title: str, first: str, *others: str) -> Table:
    """A table whose first column is never cut."""
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name in _FIGURES else "left")
    return table


def _tell(notes: list[str]) -> None:
    for note in notes:
        _say(note, "note ", style="yellow")


def _say(text: str, head: str = "", *, style: str = "", console: Console = _out) -> None:
    """Print a line as it is: brackets in it are no markup. Without a terminal it stays one line."""
    console.print(Text.assemble((head, style), text), soft_wrap=not console.is_terminal)


@contextmanager
def _failing_politely(out: Path | None = None) -> Iterator[None]:
    """A user's mistake is one line and exit code 2. Who stops a run that writes to `out` is told how to go on."""
    try:
        yield
    except ScalewrightError as error:
        _say(str(error), "error ", style="bold red", console=_err)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        partial_folder = None if out is None else out.with_name(f"{out.name}.partial")
        if partial_folder is not None and partial_folder.exists():
            _say(
                f"stopped; finished layers are in {partial_folder}. The same command goes on from there.", console=_err
            )
        else:
            _say("stopped; nothing was written.", console=_err)
        raise typer.Exit(1) from None


# ---- progress --------------------------------------------------------------------------------------------------------

_UNITS = {"gathering": "tokens", "calibrating": "tokens", "quantising": "layers"}


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """Shows how far each phase is, how fast it goes, and the time left; nothing when not on a terminal."""
    if quiet or not _err.is_terminal:
        yield lambda phase, what, done, total: None
        return
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    name = TextColumn("{task.fields[what]}", markup=False, table_column=rest)
    columns = (TextColumn("{task.description:11}"), BarColumn(10), _Pace(Column(no_wrap=True)), name)
    room = max(12, _err.width - 56)
    with Progress(*columns, console=_err, transient=True, expand=True) as progress:
        tasks: dict[str, TaskID] = {}

        def on_step(phase: str, what: str, done: int, total: int) -> None:
            what = what if len(what) <= room else f"…{what[1 - room :]}"  # the end of a layer's name says most
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total if phase in _UNITS else None, what=what)
            progress.update(tasks[phase], what=what, completed=done, total=total if done or phase in _UNITS else None)

        yield on_step


class _Pace(ProgressColumn):
    """`25 %, 2,310 tokens/s, 3 s left`; seconds alone where nothing is counted."""

    @override
    def render(self, task: Task) -> Text:
        unit = _UNITS.get(task.description)
        seconds = task.finished_time or task.elapsed or 0.0
        if unit is None or task.total is None:
            return Text(in_time(seconds))
        parts = [f"{task.percentage:3.0f} %"]
        if task.completed and seconds:
            speed = task.completed / seconds
            left = (task.total - task.completed) / speed
            parts.append(f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.1f} {unit}/s")
            parts.append(in_time(seconds) if task.finished else f"{in_time(left)} left")
        return Text(", ".join(parts))


def in_time(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 10 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def main() -> None:
    """What `scalewright` and `python -m scalewright` run."""
    app()
