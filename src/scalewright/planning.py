"""What `oneshot` would do, without doing it: layers, observers, pipeline, size, memory, time.

The model is built without its weights. What it would take is reckoned in `costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.gathering import notes_on_idle, plan_gatherings, without_gatherers
from scalewright.calibration.pipelines import check_pipeline
from scalewright.calibration.plan import bytes_after, largest_block, make_plans
from scalewright.checkpoint.loading import check_dtype, empty_model, positions_of
from scalewright.checkpoint.mapped import can_map
from scalewright.checkpoint.memory import in_bytes, in_units, room_for_activations
from scalewright.costs import Rates, Run, peak_bytes, seconds, spilt_bytes
from scalewright.errors import StrictError
from scalewright.importance import files_of
from scalewright.modifiers import IMatrixGatherer, Modifier, QuantizationModifier
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def summary(self) -> list[str]:
        """The rest of the plan in a few lines."""
        return [
            f"pipeline   {self.pipeline}: {self.why}",
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
    num_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    pipeline: str = "auto",
    sequential_targets: str | Sequence[str] | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    max_memory: int | str | None = None,
    num_ranks: int = 1,
) -> PlanReport:
    """The plan for a model, given by its path, hub name, or as an object (which is not changed if it is on meta).

    Time is that of `num_ranks` ranks, each as fast as this process; memory is that of one of them.
    """
    parsed = Recipe.of(recipe)
    check_pipeline(pipeline)
    check_dtype(dtype)
    files = files_of(parsed.modifiers)
    built = model if isinstance(model, nn.Module) else empty_model(model, trust_remote_code=trust_remote_code)
    if dtype != "auto":
        built.to(getattr(torch, dtype))
    length = min(max_seq_length or _LENGTH, positions_of(built) or _LENGTH)
    num_tokens = num_samples * length
    # Where data is needed it will be given; where it is only useful it may be.
    stages = [stage.modifiers for stage in parsed.stages]
    asked: dict[str, Any] = {"pipeline": pipeline, "has_data": has_data or any(map(_needs_data, parsed.modifiers))}
    plans = make_plans(built, without_gatherers(stages), blocks=sequential_targets, **asked)
    gatherings = plan_gatherings(built, stages, plans, files=files, **asked)
    told = [each.notes for each in gatherings] + [plan.notes for plan in plans]
    told.append(notes_on_idle(plans, gatherings, has_data=has_data, blocks=sequential_targets))
    notes = list(dict.fromkeys(note for some in told for note in some))
    if strict and notes:
        raise StrictError(notes[0])
    layers = [layer for plan in plans for layer in plan.layers]
    batch_tokens = length * (batch_size or max(1, min(plan.tokens_per_batch() for plan in plans) // length))
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
        sum(bool(each.modules) for each in gatherings),
        is_streamed,
        room,
    )
    shared, own = seconds(run, Rates.measured(next((each.dtype for each in built.parameters()), torch.float32)))
    return PlanReport(
        [_group(some) for some in kinds.values()],
        chosen,
        plans[-1].why,
        len(plans[-1].blocks),
        [name for plan in plans for name in plan.ignored],
        notes,
        _bits(quantised) if quantised else 0.0,
        before,
        after,
        after + kept + spilt_bytes(run),
        peak_bytes(run),
        shared / num_ranks + own,
        shared,
    )


def _needs_data(modifier: Modifier) -> bool:
    if isinstance(modifier, IMatrixGatherer):
        return modifier.file is None
    return isinstance(modifier, QuantizationModifier) and modifier.data == "needed"


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


def _count(names: Sequence[str]) -> str:
    return "1 layer is" if len(names) == 1 else f"{len(names)} layers are"
