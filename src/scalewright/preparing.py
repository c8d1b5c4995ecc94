"""A model, some layers of it, and data to run through them, where a model is watched and stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.experts import unfuse_experts
from scalewright.calibration.pipelines import Batch, OnStep, silent
from scalewright.calibration.plan import Plan
from scalewright.calibration.sources import DataOptions, check_file
from scalewright.checkpoint.loading import (
    check_device,
    check_dtype,
    load_all,
    samples_for,
    sequence_length,
)
from scalewright.errors import RecipeError, StrictError
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_named

Find = Callable[[nn.Module], tuple[dict[str, nn.Module], list[str]]]
"""Gives the layers of a model that are meant, by name, and notes."""


@dataclass(frozen=True)
class Ready:
    """What can be run."""

    model: nn.Module
    layers: dict[str, nn.Module]
    batches: Sequence[Batch]
    num_tokens: int
    """Of the data; padding does not count."""
    notes: list[str]


@contextmanager
def layers_and_data(
    model: nn.Module | str | Path,
    dataset: Any,
    find: Find,
    options: DataOptions,
    *,
    max_seq_length: int | None = None,
    longest: int | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    on_step: OnStep = silent,
) -> Iterator[Ready]:
    """While inside, the model is there, its fused experts are single layers, and data is cut into batches for it.

    No sequence is longer than `longest`, whatever was asked for.
    """
    check_dtype(dtype)
    check_device(device)
    check_file(dataset)
    loaded, companions, told = load_all(
        model, tokenizer, on_step, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    torch.manual_seed(options.seed)
    length = sequence_length(loaded, max_seq_length)
    options = replace(options, max_seq_length=length if longest is None else min(length, longest))
    with _experts_apart(loaded) as of_experts:
        layers, of_layers = find(loaded)
        notes = [*told, *of_experts, *of_layers]
        if not layers:
            raise RecipeError(
                " ".join(["no layer of this model is meant. Name linear layers in targets, or ignore less.", *notes])
            )
        options = replace(options, tokens_per_batch=_tokens_per_batch(loaded, layers))
        samples = samples_for(loaded, dataset, options, companions)
        notes += samples.notes
        refuse_if_strict(notes, strict=strict)
        yield Ready(loaded, layers, samples.batches, samples.num_tokens, notes)


def refuse_if_strict(notes: Sequence[str], *, strict: bool) -> None:
    """Make an error of the first note, if notes are errors."""
    if strict and notes:
        raise StrictError(notes[0])


def name_of(model: nn.Module | str | Path) -> str:
    """What the model is called; of a folder the last part, for the rest says something of a machine alone."""
    name = str(model)
    if isinstance(model, nn.Module):
        name = str(getattr(getattr(model, "config", None), "_name_or_path", None) or type(model).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name


@contextmanager
def _experts_apart(model: nn.Module) -> Iterator[list[str]]:
    """While inside, fused experts are single layers; afterwards they are what they were. Gives notes."""
    fused, notes = unfuse_experts(model)
    try:
        yield notes
    finally:
        for name, module in fused.items():
            model.set_submodule(name, module)


def _tokens_per_batch(model: nn.Module, modules: dict[str, nn.Module]) -> int:
    """As many as when the layers are quantised."""
    layers = [WatchedLayer(name, module, scheme_named("W8A16")) for name, module in modules.items()]
    return Plan(model, layers, [], "basic", "", [], []).tokens_per_batch()
