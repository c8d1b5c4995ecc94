"""Where the parts meet: a model, a recipe and data go in; a quantised model, a checkpoint and a `Result` come out."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.distributed import Ranks, with_ranks
from scalewright.calibration.experts import showing_all_tokens
from scalewright.calibration.pipelines import Batch, Calibration, OnStep, check_pipeline, silent
from scalewright.calibration.plan import Plan, bytes_after, largest_block
from scalewright.calibration.scratch import Scratch, WaitingRoom
from scalewright.calibration.smoothing import Smoothing, smooth
from scalewright.calibration.sources import DataOptions, check_file, check_seed, other_split
from scalewright.calibration.stages import Stage, notes_on, plan_stages
from scalewright.checkpoint.beside import written_files
from scalewright.checkpoint.cut_files import outliving_cuts
from scalewright.checkpoint.fingerprint import SourceFiles, fingerprint_of, versions
from scalewright.checkpoint.journal import Journal, journal_for
from scalewright.checkpoint.loading import (
    check_device,
    check_dtype,
    check_model,
    load_all,
    samples_for,
    sequence_length,
)
from scalewright.checkpoint.mapped import MappedFiles, can_map
from scalewright.checkpoint.memory import in_bytes, room_for_activations
from scalewright.checkpoint.parts import Part
from scalewright.checkpoint.reading import load_checkpoint
from scalewright.checkpoint.saving import check_output, disk_of, names_of, save_checkpoint
from scalewright.checkpoint.settings import written_settings
from scalewright.checkpoint.shelf import Shelf
from scalewright.checkpoint.smoothed import record_of
from scalewright.checkpoint.verifying import check_draft
from scalewright.errors import OutputError, RecipeError, StrictError
from scalewright.importance import files_of
from scalewright.modifiers.layers import QuantizedLayer
from scalewright.modifiers.schemes import in_words
from scalewright.quality import recipe_for
from scalewright.recipe import Recipe
from scalewright.report.files import PICTURES_FILE, RUN_FILE, pictures_text


@dataclass
class Result:
    """What a run has done: the quantised model, its layers, and what the user should know."""

    in_memory: nn.Module = field(repr=False)
    recipe: Recipe
    pipeline: str
    why: str
    layers: list[QuantizedLayer]
    notes: list[str]
    seconds: dict[str, float]
    num_samples: int
    num_tokens: int
    seed: int
    versions: dict[str, str]
    bytes_before: int
    """What the model's parameters took before."""
    output_dir: Path | None = None
    companions: list[Any] = field(default_factory=list, repr=False)
    """The tokenizer or processor that is saved with the model."""
    files: MappedFiles | None = field(default=None, repr=False)
    """Where the weights lie if they are not in memory: then the model is what was written, and is read if asked for."""
    is_first_rank: bool = True
    """Whether this is the rank that writes."""
    smoothing: Smoothing = field(default_factory=Smoothing, repr=False)
    """By which powers of two weights were multiplied before they were quantised."""

    @property
    def model(self) -> nn.Module:
        """The quantised model. One that was not in memory is loaded from where it was written."""
        if self.files is not None and self.output_dir is not None:
            (self.in_memory, _), self.files = load_checkpoint(self.output_dir), None
        return self.in_memory

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the checkpoint to a folder; one that was written already is copied.

        Where ranks share the work the first one writes. The others may call this, too, and do not wait for it.
        """
        folder = Path(path)
        if not self.is_first_rank:
            return folder
        check_output(folder, overwrite=overwrite)
        source = self.output_dir
        if source is not None and not source.is_dir():
            raise OutputError(
                f"{path}: the checkpoint was written to {source}, and is not there any more. Run again to write it "
                "here."
            )
        with journal_for(folder, {"model": "in memory"}, restart=True) as journal:
            if source is None:
                self._write(journal, SourceFiles.of(self.in_memory), overwrite=overwrite)
            else:
                with journal.checkpoint() as draft:
                    shutil.copytree(source, draft, dirs_exist_ok=True)
                    check_draft(draft, journal.out)
                    check_output(folder, overwrite=overwrite)
        return folder

    def _write(self, journal: Journal, source: SourceFiles, *, overwrite: bool) -> None:
        parts = {
            each.name: found if isinstance(found := each.compressed, Part) else journal.keep(each.name, found, {})
            for each in self.layers
            if each.compressed
        }
        told = {key: value for key, value in self.to_dict().items() if key != "seconds"}  # the same in every run
        rows = {row["name"]: row for row in told["layers"]}
        told["layers"] = [{**rows[layer], "name": name} for name, layer in names_of(self.in_memory, rows).items()]
        files = {"recipe.yaml": self.recipe.to_yaml(), PICTURES_FILE: pictures_text(self.layers)}
        source.check_unchanged()  # before parts of it are copied, and afterwards
        with journal.checkpoint() as draft:
            told["digests"] = save_checkpoint(
                self.in_memory,
                parts,
                draft,
                files=files,
                companions=self.companions,
                place_of=(lambda tensor: None) if self.files is None else self.files.place_of,
            )
            told["settings"] = written_settings(draft)
            if self.smoothing.inputs:
                told["smoothing"] = record_of(self.smoothing, self.in_memory, rows)
            told["files"] = written_files(draft)
            (draft / RUN_FILE).write_text(json.dumps(told, indent=2), encoding="utf-8")
            source.check_unchanged()
            check_draft(draft, journal.out)
            check_output(journal.out, overwrite=overwrite)  # somebody may have put something there meanwhile

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as plain data."""
        return {
            "pipeline": self.pipeline,
            "why": self.why,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "seed": self.seed,
            "bytes_before": self.bytes_before,
            "versions": self.versions,
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
            "notes": self.notes,
            "recipe": self.recipe.to_dict(),
            "layers": [_row(each) for each in self.layers],
        }

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2)


@with_ranks
@outliving_cuts()
def oneshot(
    model: nn.Module | str | Path,
    *,
    recipe: Any = None,
    scheme: str | None = None,
    quality: str | None = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    pipeline: str = "auto",
    sequential_targets: str | Sequence[str] | None = None,
    moe_calibrate_all_experts: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    max_memory: int | str | None = None,
    seed: int = 0,
    on_step: OnStep = silent,
    ranks: Ranks | None = None,
) -> Result:
    """Quantise a model, given as an object or by its path or hub name, as a recipe (or the name of a scheme) says.

    With a scheme, `quality` is `fast`, `balanced` or `best`; balanced if it is left out.

    A model object is quantised in place. With `output_dir` the checkpoint is written there. Nothing is skipped in
    silence: what could not be done as asked is a note of the result, or an error if `strict`. `max_seq_length` is 2048,
    or as many positions as the model has if these are fewer.

    A model that is given by its path, with an `output_dir`, is never in memory as a whole: blocks are read when their
    turn comes, and given up when they are written. What flows between them is kept in memory up to `max_memory` for
    all together ("8GB", or bytes; nine tenths of what is free if it is left out), and beyond that in a file.

    A run that was stopped goes on when it is called again with the same model, recipe, data and output_dir: finished
    layers are in `OUT.partial`. With `restart` it begins anew.

    Where a process group of torch.distributed is there, its ranks share the work: all of them call this with the same
    arguments and have the same result, and the first one writes and shows progress.
    """
    ranks, clock = ranks or Ranks(), _Clock()
    on_step = on_step if ranks.is_first else silent
    parsed = _recipe_from(recipe, scheme, quality)
    _check_given(model, dataset, pipeline, dtype, device, seed, output_dir)
    limit = in_bytes(max_memory)
    files, out = files_of(parsed.modifiers), None if output_dir is None else Path(output_dir)
    ranks.on_first(partial(_check_output, out, source=model, overwrite=overwrite))
    mapped, source = _files_for(model, out, device), SourceFiles.of(model)
    with clock("load"), _lying_in(mapped):
        loaded, companions, told = load_all(
            model, tokenizer, on_step, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    torch.manual_seed(seed)
    notes, layers, samples, bytes_before = _Notes(strict, told), list[QuantizedLayer](), None, _bytes_of(loaded)
    stages = plan_stages(
        loaded,
        [stage.modifiers for stage in parsed.stages],
        files=files,
        making=_lying_in(mapped),
        blocks=sequential_targets,
        pipeline=pipeline,
        has_data=dataset is not None,
    )
    plans = [stage.plan for stage in stages]
    for_data = {
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "column": column,
        "pack": pack,
        **other_split(split),
    }
    notes.add(notes_on(stages, has_data=dataset is not None, blocks=sequential_targets, for_data=for_data))
    options = DataOptions(
        num_calibration_samples,
        sequence_length(loaded, max_seq_length),
        batch_size,
        column,
        pack,
        split,
        seed,
        tokens_per_batch=min(plan.tokens_per_batch() for plan in plans),
    )
    if any(stage.runs_data for stage in stages):
        with clock("data"):
            samples = samples_for(loaded, dataset, options, companions)
        notes.add(samples.notes)
    batches = [] if samples is None else samples.batches
    with ExitStack() as stack:
        settings = [pipeline, sequential_targets, moe_calibrate_all_experts, seed]
        print_of = partial(fingerprint_of, source, loaded, parsed, batches, files, settings)
        ranks.on_first(partial(_check_output, out, plans, source=model, overwrite=overwrite))
        journal = stack.enter_context(_journal(ranks, out, print_of, is_object=loaded is model, restart=restart))
        keeper = None if out is None else ranks.keeper(journal)
        streaming = {} if mapped is None else _streaming(loaded, plans, mapped, source, limit)
        smoothing, running = Smoothing(), {"on_step": on_step, "ranks": ranks, **streaming}
        for stage in stages:
            with showing_all_tokens(loaded, on=moe_calibrate_all_experts):
                smoothing.add(now := _smoothed(stage, loaded, batches, clock, mapped, running))
                notes.add(now.notes)
                if stage.gathering.names:
                    with clock("gather"):
                        gathered = stage.gathering.standing(loaded, batches, blocks=stage.plan.blocks, **running)
                        notes.add(stack.enter_context(gathered))
                with clock("calibrate"):
                    calibration = Calibration(
                        loaded, stage.plan.layers, batches, stage.plan.blocks, journal=keeper, **running
                    )
                    done = calibration.run(stage.plan.pipeline)
            layers += done
            notes.add(_gathered(note for layer in done for note in layer.notes))
        result = Result(
            loaded,
            parsed,
            stages[-1].plan.pipeline,
            stages[-1].plan.why,
            layers,
            notes.all,
            clock.seconds,
            0 if samples is None else samples.num_samples,
            0 if samples is None else samples.num_tokens,
            seed,
            versions(),
            bytes_before,
            out,
            companions=companions,
            files=mapped,
            is_first_rank=ranks.is_first,
            smoothing=smoothing,
        )
        if journal is not None:
            with clock("save"):
                on_step("writing", str(out), 0, 1)
                result._write(journal, source, overwrite=overwrite)
        ranks.meet()
    return result


# ---- parts -----------------------------------------------------------------------------------------------------------


def _recipe_from(recipe: Any, scheme: str | None, quality: str | None) -> Recipe:
    if recipe is not None and scheme is not None:
        raise RecipeError("a recipe and a scheme both say what to do. Keep one of them.")
    if recipe is None and scheme is None:
        raise RecipeError("nothing says what to do. Give a recipe or a scheme.")
    if scheme is not None:
        return recipe_for(quality or "balanced", scheme)
    if quality is not None:
        raise RecipeError("quality goes with a scheme; a recipe says it all. Leave it out.")
    return Recipe.of(recipe)


def _check_given(model: Any, dataset: Any, pipeline: str, dtype: Any, device: Any, seed: Any, output_dir: Any) -> None:
    check_model(model)
    check_file(dataset)
    check_pipeline(pipeline)
    check_dtype(dtype)
    check_device(device)
    check_seed(seed)
    if output_dir == "" or (output_dir is not None and not isinstance(output_dir, str | os.PathLike)):
        raise OutputError(f"output_dir: {output_dir!r} is no path. Give the folder that the checkpoint is to go to.")


def _check_output(out: Path | None, plans: Sequence[Plan] = (), *, source: Any, overwrite: bool) -> None:
    if out is not None:
        size, kept = bytes_after(plans) if plans else (0, 0)
        check_output(out, overwrite=overwrite, source=source, num_bytes=size, kept_bytes=kept)


def _files_for(
    model: nn.Module | str | Path, out: Path | None, device: str | torch.device | None
) -> MappedFiles | None:
    """Where the weights will lie if the model is not to be in memory: it is read from files, and written to others."""
    if out is None or isinstance(model, nn.Module) or not can_map() or torch.device(device or "cpu").type != "cpu":
        return None
    return MappedFiles(Scratch(disk_of(out.resolve())))


def _lying_in(files: MappedFiles | None) -> AbstractContextManager[None]:
    """While inside, parameters that modules are given come to lie in files."""
    return nullcontext() if files is None else files.catching()


def _streaming(
    model: nn.Module, plans: Sequence[Plan], files: MappedFiles, source: SourceFiles, max_memory: int | None
) -> dict[str, Any]:
    """What a run needs whose model is not in memory."""
    room = room_for_activations(max_memory, largest_block(plans))
    return {"weights": Shelf(model, files, source.check_unchanged), "waiting_room": WaitingRoom(files.scratch, room)}


def _smoothed(
    stage: Stage, model: nn.Module, batches: Sequence[Batch], clock: _Clock, files: MappedFiles | None, running: Any
) -> Smoothing:
    """What is done to a model before a stage gathers or quantises anything."""
    found = Smoothing()
    for smoother in stage.smoothers:
        with clock("smooth"), _lying_in(files):
            found.add(smooth(model, stage.plan, smoother, batches, **running))
    stage.gathering.smoothed(found.inputs)
    return found


def _bytes_of(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


@contextmanager
def _journal(
    ranks: Ranks, out: Path | None, print_of: Callable[[], dict[str, str]], *, is_object: bool, restart: bool
) -> Iterator[Journal | None]:
    """The journal of a run that is to write `out`, for the first rank; all ranks must have been given the same."""
    if out is None and ranks.count == 1:
        yield None
        return
    found = print_of()
    ranks.check_same({name: each for name, each in found.items() if name != "model" or is_object})
    if out is None or not ranks.is_first:
        yield None
        return
    with journal_for(out, found, restart=restart) as journal:
        yield journal


def _gathered(notes: Iterator[str]) -> list[str]:
    """Notes that say the same of several layers become one."""
    by_text: dict[str, list[str]] = {}
    for note in notes:
        where, _, text = note.partition(": ")
        by_text.setdefault(text, []).append(where)
    return [
        f"{wheres[0]}{f' and {len(wheres) - 1} more' if len(wheres) > 1 else ''}: {text}"
        for text, wheres in by_text.items()
    ]


def _row(layer: QuantizedLayer) -> dict[str, Any]:
    """A layer as one row of the table."""
    return {
        "name": layer.name,
        "weights": in_words(layer.scheme.weights),
        "activations": in_words(layer.scheme.input_activations),
        "observers": layer.observers,
        "shape": list(layer.shape),
        "weight_db": layer.weight_db,
        "gain_db": layer.gain_db,
        "output_db": layer.output_db,
        "dynamic_db": layer.dynamic_db,
        "above_optimum": layer.above_optimum,
        "num_tokens": layer.num_tokens,
    }


class _Notes:
    """What the user should know; errors if `strict`."""

    def __init__(self, strict: bool, first: Sequence[str]) -> None:
        self.all: list[str] = []
        self._strict = strict
        self.add(first)

    def add(self, notes: Sequence[str]) -> None:
        if self._strict and notes:
            raise StrictError(notes[0])
        self.all += [note for note in notes if note not in self.all]


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
