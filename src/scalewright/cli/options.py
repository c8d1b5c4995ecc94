"""Options that several commands have."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from scalewright.cli.shown import failing_politely
from scalewright.errors import ModelError, OutputError, RecipeError


def _named_path(text: str) -> Path:
    """The path that was given; `--out ""`, as an unset variable of a shell leaves it, would be the folder one is in."""
    with failing_politely():
        if not text:
            raise OutputError("--out: '' is no name. Say where to write.")
    return Path(text)


out_option = partial(typer.Option, "--out", parser=_named_path, metavar="PATH")
recipe_option = partial(typer.Option, rich_help_panel="What to do")
data_option = partial(typer.Option, rich_help_panel="Data")
run_option = partial(typer.Option, rich_help_panel="How to run")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Ignore = Annotated[
    list[str] | None,
    recipe_option(help="Modules to leave as they are; may be repeated.", show_default="the output head, and routers"),
]
Data = Annotated[
    str | None,
    data_option(help="A .txt, .jsonl, .json, .csv or .parquet file, a folder of them, or a dataset's name on the hub."),
]
NumSamples = Annotated[int, data_option(min=1, help="How many samples to calibrate with.")]
SeqLen = Annotated[
    int | None, data_option(min=1, help="Tokens of a sample at most.", show_default="2048, or the model's context")
]
BatchSize = Annotated[int | None, data_option(min=1, help="Samples at a time.", show_default="as the memory allows")]
DataColumn = Annotated[str | None, data_option(help="The column that has the text, messages or ids.")]
Split = Annotated[str, data_option(help="The split of a dataset.")]
Pack = Annotated[
    bool | None,
    data_option(
        "--pack/--no-pack",
        help="Whether to join samples and cut them into full sequences.",
        show_default="where a text file has lines",
    ),
]
Tokenizer = Annotated[str | None, data_option(help="A folder or hub name to take it from.", show_default="the model's")]
Seed = Annotated[int, data_option(min=-(2**63), max=2**64 - 1, help="For the choice of samples.")]
AllExperts = Annotated[
    bool,
    run_option(
        "--moe-calibrate-all-experts/--no-moe-calibrate-all-experts",
        help="Whether each expert of a mixture sees every token.",
        show_default="it does",
    ),
]
Device = Annotated[str | None, run_option(help="Where to run: cpu, cuda, ...", show_default="cpu")]
Dtype = Annotated[str, run_option(help="auto keeps the model's own; float32, bfloat16, float16.")]
Strict = Annotated[bool, run_option("--strict", help="Notes are errors.")]
TrustRemoteCode = Annotated[bool, run_option("--trust-remote-code", help="Run code that comes with the model.")]


@dataclass(frozen=True)
class Reading:
    """How a model is read, and the text that is run through it: the options of all commands that do so."""

    data: Data = None
    seq_len: SeqLen = None
    batch_size: BatchSize = None
    column: DataColumn = None
    split: Split = "train"
    pack: Pack = None
    tokenizer: Tokenizer = None
    seed: Seed = 0
    device: Device = None
    dtype: Dtype = "auto"
    trust_remote_code: TrustRemoteCode = False

    def keywords(self) -> dict[str, Any]:
        """All but the data, as the functions call it that the commands stand for."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("data", "seq_len")}
        return {"max_seq_length": self.seq_len, **given}


@dataclass(frozen=True)
class Job:
    """What `quantize` does and `plan` tells: the options that both have."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model, or its name on the hub.")]
    scheme: Annotated[str | None, recipe_option(help="The scheme: W4A16, FP8_DYNAMIC, NVFP4, ... (see `schemes`).")] = (
        None
    )
    quality: Annotated[str | None, recipe_option(help="fast, balanced or best.", show_default="balanced")] = None
    positive_scales: Annotated[bool, recipe_option("--positive-scales", help="Let no scale be negative.")] = False
    bits: Annotated[
        float | None,
        recipe_option(
            help="Bits for each weight, scales included: each layer gets the one of --schemes that pays best."
        ),
    ] = None
    schemes: Annotated[str | None, recipe_option(help="Schemes to choose from: W4A16,W8A16.")] = None
    recipe: Annotated[Path | None, recipe_option(help="A recipe, in YAML or JSON, instead of a scheme.")] = None
    group_size: Annotated[
        int | None, recipe_option(help="Weights that share a scale.", show_default="the scheme's number")
    ] = None
    observer: Annotated[
        str | None, recipe_option(help="The observer of weights (see `observers`).", show_default="the best")
    ] = None
    ignore: Ignore = None
    importance: Annotated[
        Path | None, recipe_option(help="A file that `importance` has written: it weighs the errors of weights.")
    ] = None
    samples: NumSamples = 512
    pipeline: Annotated[str, run_option(help="auto, data_free, basic or sequential.")] = "auto"
    sequential_targets: Annotated[
        list[str] | None,
        run_option(
            "--sequential-targets",
            help="Modules that sequential goes through one by one; may be repeated.",
            show_default="the model's blocks",
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        run_option(help="Memory that the run may take, such as 8GB.", show_default="nine tenths of what is free"),
    ] = None
    strict: Strict = False

    def parsed_recipe(self) -> Any:
        """The recipe that the options stand for, where no layer has to be measured for it."""
        from scalewright.quality import recipe_for

        assert self.bits is None
        self._check_schemes()
        if self.schemes is not None:
            raise RecipeError("--schemes: nothing says how many bits there are to share out. Give --bits.")
        if (self.scheme is None) == (self.recipe is None):
            raise RecipeError("give either --scheme or --recipe.")
        if self.scheme is not None:
            return recipe_for(
                _BALANCED if self.quality is None else self.quality,
                self.scheme,
                group_size=self.group_size,
                observer=self.observer,
                ignore=self.ignore,
                importance=self.importance,
                positive_scales=self.positive_scales,
            )
        said = ("quality", "positive_scales", "group_size", "observer", "ignore", "importance")
        given = [f"--{name.replace('_', '-')}" for name in said if not _is_left_out(getattr(self, name))]
        if given:
            raise RecipeError(f"{', '.join(given)}: the recipe says that. Leave it out, or change the recipe.")
        return self.recipe

    def sensitivity(self, reading: Reading, on_step: Any) -> Any:
        """What each layer loses under each of the schemes."""
        from scalewright.sensitivity import measure_sensitivity

        self._check_schemes()
        self._check_measurement()
        keywords = reading.keywords()
        del keywords["batch_size"]  # samples are measured one by one
        schemes = _SCHEMES if self.schemes is None else self.schemes
        return measure_sensitivity(
            self.model,
            reading.data,
            schemes=[each.strip() for each in schemes.split(",") if each.strip()],
            bits=self.bits,
            quality=_BALANCED if self.quality is None else self.quality,
            group_size=self.group_size,
            observer=self.observer,
            ignore=self.ignore,
            positive_scales=self.positive_scales,
            num_calibration_samples=self.samples,
            strict=self.strict,
            on_step=on_step,
            **keywords,
        )

    def shared_out(self, found: Any) -> Any:
        """The schemes that --bits are best spent on, with their recipe."""
        from scalewright.budget import share_out

        return share_out(found, self.bits or 0.0, importance=self.importance)

    def _check_schemes(self) -> None:
        """Say no to options that do not go with a choice of schemes."""
        if self.bits is None and self.schemes is None:
            return
        other = self._other_way()
        if other is not None:
            raise RecipeError(f"{other}: goes with neither --bits nor --schemes. Keep one way to say what to do.")
        if self.bits is not None and self.schemes is None:
            raise RecipeError("--bits: nothing says which schemes to choose from. Give --schemes, such as W4A16,W8A16.")

    def _check_measurement(self) -> None:
        """Say no, before layers are measured, to what would do nothing then, or fail afterwards."""
        from scalewright.calibration.pipelines import check_pipeline
        from scalewright.checkpoint.memory import in_bytes
        from scalewright.importance import load_importance

        other = self._other_way()
        if other is not None:
            raise RecipeError(f"{other}: what layers lose is measured for --schemes, such as {_SCHEMES}. Give those.")
        if self.bits is None and self.importance is not None:
            raise RecipeError("--importance: no scheme is chosen without --bits. Give those, or leave it out.")
        check_pipeline(self.pipeline)
        in_bytes(self.max_memory)
        if self.importance is not None:
            load_importance(self.importance)

    def _other_way(self) -> str | None:
        """The option that says what to do without a choice of schemes."""
        return next((f"--{name}" for name in ("scheme", "recipe") if getattr(self, name) is not None), None)


_BALANCED = "balanced"
_SCHEMES = "W4A16,W8A16"  # what `plan --sensitivity` measures unless it is told


def _is_left_out(value: Any) -> bool:
    """Whether it is what an option is without the user; an empty word, and zero, are not."""
    return value is None or value is False or value == []


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of those of its arguments that are dataclasses, such as `Job`, as options."""
    own = inspect.signature(command, eval_str=True).parameters
    held = {
        name: inspect.signature(each.annotation, eval_str=True).parameters for name, each in own.items() if _holds(each)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: own[name].annotation(**{each: given.pop(each) for each in some}) for name, some in held.items()}
        command(**made, **given)

    every = [each for name, one in own.items() for each in (held[name].values() if name in held else [one])]
    every = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in every]
    vars(run)["__signature__"] = inspect.Signature(every)
    run.__annotations__ = {each.name: each.annotation for each in every}
    return run


def _holds(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)


def one_model(names: Sequence[str], command: str) -> str:
    """The model that a command is to run, which takes files, too, when it merges them."""
    if len(names) > 1:
        raise RecipeError(f"{len(names)} models were given. Give one, or files and --merge.")
    if os.path.isfile(names[0]):
        raise ModelError(f"{names[0]}: is a file, and no model. Give --merge for files that {command} has written.")
    return names[0]


def given_options(context: typer.Context, *, besides: Sequence[str]) -> list[str]:
    """The options that stand on the command line."""
    names = [name for name in context.params if name not in besides]
    return [f"--{name.replace('_', '-')}" for name in names if _is_said(context, name)]


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
