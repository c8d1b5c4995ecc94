"""What `oneshot` would do, without doing it: layers, observers, pipeline, size, memory, time.

The model is built without its weights, and data is looked at as far as a run would take it: whatever a run would say no
to is said here. What it would take is reckoned in `costs`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.pipelines import check_pipeline
from scalewright.calibration.plan import Plan, bytes_after, largest_block
from scalewright.calibration.sources import DataOptions, other_split
from scalewright.calibration.stages import notes_on, plan_stages
from scalewright.checkpoint.loading import (
    check_dtype,
    empty_model,
    load_companions,
    positions_of,
    samples_for,
    sequence_length,
)
from scalewright.checkpoint.mapped import can_map
from scalewright.checkpoint.memory import in_bytes, in_units, room_for_activations
from scalewright.costs import Rates, Run, peak_bytes, seconds, spilt_bytes
from scalewright.errors import StrictError
from scalewright.importance import files_of
from scalewright.modifiers import IMatrixGatherer, Modifier, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import bits_per_weight, in_words
from scalewright.recipe import Recipe

_LENGTH = 2048


@dataclass(frozen=True)
class PlannedGroup:
    """Layers that are treated alike."""

    count: int
    example: str
    weights: str
    activations: str
    observers: str
    bits: float


@dataclass(frozen=True)
class PlanReport:
    """What would be done, and what it would take."""

    groups: list[PlannedGroup]
    pipeline: str
    why: str
    blocks: int
    ignored: list[str]
    notes: list[str]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    disk_bytes: int
    """What is on the disk at the most, the model itself left out."""
    peak_bytes: int
    seconds: float
    shared_seconds: float
    """Of the work that ranks share, as long as one of them takes for it."""
    num_samples: int | None = None
    """Of the data, where it was looked at; so, too, its tokens."""
    num_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def summary(self) -> list[str]:
        """The rest of the plan in a few lines."""
        data = [] if self.num_samples is None else [f"data       {_data(self.num_samples, self.num_tokens or 0)}"]
        return [
            f"pipeline   {self.pipeline}: {self.why}",
            *data,
            f"weights    {self.bits_per_weight:.2f} bits each in these layers; {_count(self.ignored)} ignored",
            f"size       {in_units(self.bytes_before)} now, about {in_units(self.bytes_after)} then; "
            f"{in_units(self.disk_bytes)} of disk on the way",
            f"memory     about {in_units(self.peak_bytes)} at the most",
            f"time       about {self.seconds:.0f} s on this machine",
        ]


def plan_of(
    model: str | Path | nn.Module,
    recipe: Any,
    *,
    has_data: bool = False,
    dataset: str | Path | None = None,
    num_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    seed: int = 0,
    tokenizer: Any = None,
    pipeline: str = "auto",
    sequential_targets: str | Sequence[str] | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    max_memory: int | str | None = None,
    num_ranks: int = 1,
) -> PlanReport:
    """The plan for a model, given by its path, hub name, or as an object (which is not changed if it is on meta).

    Time is that of `num_ranks` ranks, each as fast as this process; memory is that of one of them. `has_data` stands
    for data that will be given later; a `dataset` that is a file or a folder is read, one on the hub is not fetched.
    """
    parsed = Recipe.of(recipe)
    check_pipeline(pipeline)
    check_dtype(dtype)
    files = files_of(parsed.modifiers)
    built = model if isinstance(model, nn.Module) else empty_model(model, trust_remote_code=trust_remote_code)
    if dtype != "auto":
        built.to(getattr(torch, dtype))
    length = min(max_seq_length or _LENGTH, positions_of(built) or _LENGTH)
    # Where data is needed it will be given; where it is only useful it may be.
    has_data, will_have = has_data or dataset is not None, any(map(_needs_data, parsed.modifiers))
    stages = plan_stages(
        built,
        [stage.modifiers for stage in parsed.stages],
        files=files,
        making=nullcontext(),
        blocks=sequential_targets,
        pipeline=pipeline,
        has_data=has_data or will_have,
    )
    plans, runs_data = [stage.plan for stage in stages], any(stage.runs_data for stage in stages)
    for_data = {"max_seq_length": max_seq_length, "batch_size": batch_size, "column": column, "pack": pack}
    for_data |= other_split(split)
    told = notes_on(stages, has_data=has_data, blocks=sequential_targets, for_data=None if will_have else for_data)
    tokens_per_batch = min(plan.tokens_per_batch() for plan in plans)
    samples = None
    if dataset is not None and os.path.exists(dataset) and runs_data:
        cut = sequence_length(built, max_seq_length)
        options = DataOptions(num_samples, cut, batch_size, column, pack, split, seed, tokens_per_batch)
        companions = load_companions(model, tokenizer, trust_remote_code=trust_remote_code)
        samples = samples_for(built, dataset, options, companions)
        told += samples.notes
    notes = list(dict.fromkeys(told))
    if strict and notes:
        raise StrictError(notes[0])
    layers = [layer for plan in plans for layer in plan.layers]
    num_tokens, batch_tokens = num_samples * length, length * (batch_size or max(1, tokens_per_batch // length))
    if samples is not None:
        num_tokens, batch_tokens = samples.num_tokens, max(map(_tokens_in, samples.batches))
    kinds: dict[str, list[WatchedLayer]] = {}
    for layer in layers:
        kinds.setdefault(repr((layer.scheme.weights, layer.scheme.input_activations)), []).append(layer)
    quantised = [layer for layer in layers if layer.scheme.weights is not None]
    before, (after, kept) = plans[-1].bytes_before(), bytes_after(plans)
    chosen = plans[-1].pipeline
    is_streamed = not isinstance(model, nn.Module) and can_map()
    room = room_for_activations(in_bytes(max_memory), largest_block(plans)) if is_streamed else None
    run = Run(
        plans,
        num_tokens,
        batch_tokens,
        _hidden_size(built),
        sum(stage.passes_before for stage in stages),
        is_streamed,
        room,
    )
    shared, own = seconds(run, Rates.measured(next((each.dtype for each in built.parameters()), torch.float32)))
    return PlanReport(
        [_group(some) for some in kinds.values()],
        chosen,
        plans[-1].why,
        len(plans[-1].blocks),
        _ignored(plans),
        notes,
        _bits(quantised) if quantised else 0.0,
        before,
        after,
        after + kept + spilt_bytes(run),
        peak_bytes(run),
        shared / num_ranks + own,
        shared,
        None if samples is None else samples.num_samples,
        None if samples is None else samples.num_tokens,
    )


def _needs_data(modifier: Modifier) -> bool:
    if isinstance(modifier, IMatrixGatherer):
        return modifier.file is None
    is_needed = isinstance(modifier, QuantizationModifier) and modifier.data == "needed"
    return is_needed or isinstance(modifier, SmoothQuantModifier)


def _group(layers: Sequence[WatchedLayer]) -> PlannedGroup:
    scheme = layers[0].scheme
    return PlannedGroup(
        len(layers),
        layers[0].name,
        in_words(scheme.weights),
        in_words(scheme.input_activations),
        ", ".join(f"{base_name}: {each.observer_name}" for base_name, each in layers[0].new_observers().items()),
        _bits(layers) if scheme.weights is not None else 0.0,
    )


def _bits(layers: Sequence[WatchedLayer]) -> float:
    weights = [each.weight for each in layers]
    total = sum(
        bits_per_weight(each.scheme.weights, weight.shape, each.scheme.input_activations, dtype=weight.dtype)
        * weight.numel()
        for each, weight in zip(layers, weights, strict=True)
    )
    return total / sum(weight.numel() for weight in weights)


def _hidden_size(model: nn.Module) -> int:
    """Of what flows between the blocks of a model; 0 if it does not say."""
    config = getattr(model, "config", None)
    find = (getattr(each, "hidden_size", 0) for each in (config, getattr(config, "text_config", None)))
    return next((int(each) for each in find if each), 0)


def _tokens_in(batch: Mapping[str, Any]) -> int:
    """Of a batch, padding included."""
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def _data(num_samples: int, num_tokens: int) -> str:
    return f"{num_samples:,} {'sample' if num_samples == 1 else 'samples'}, {num_tokens:,} tokens"


def _ignored(plans: Sequence[Plan]) -> list[str]:
    """The layers that some stage was told to leave alone, and that no other stage means; each once."""
    meant = {layer.name for plan in plans for layer in plan.layers}
    return [name for name in dict.fromkeys(name for plan in plans for name in plan.ignored) if name not in meant]


def _count(names: Sequence[str]) -> str:
    return "1 layer is" if len(names) == 1 else f"{len(names)} layers are"
