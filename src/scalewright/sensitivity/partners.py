"""Layers that belong together: those that must have one scheme, and those that are given one input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from scalewright.calibration.experts import UnfusedExperts
from scalewright.observers import FUSED_LAYER_NAMES


def layers_together(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """The layers in groups that must have one scheme, in the order of the model."""
    experts = [f"{name}." for name, module in model.named_modules() if isinstance(module, UnfusedExperts)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parent, _, short = name.rpartition(".")
        prefix = next((each for each in experts if name.startswith(each)), None)
        partners = next((each for each in FUSED_LAYER_NAMES if short in each), (short,))
        groups.setdefault((parent, *partners) if prefix is None else (prefix,), []).append(name)
    return list(groups.values())


def name_of(names: Sequence[str]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`; of experts what they have in common."""
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) == 1:
        (parent,) = parents
        shorts = "+".join(name.rpartition(".")[2] for name in names)
        return f"{parent}.{shorts}" if parent else shorts
    parts = [name.split(".") for name in names]
    common = [each[0] for each in zip(*parts, strict=False) if len(set(each)) == 1]
    return f"{'.'.join(common)} ({len(names)} layers)"


def given_one_input(names: Sequence[str]) -> list[list[str]]:
    """The layers of a group in sets that are given the same input: of experts, those of one expert."""
    sets: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parent, _, short = name.rpartition(".")
        sets.setdefault((parent, *next((each for each in FUSED_LAYER_NAMES if short in each), (short,))), []).append(
            name
        )
    return list(sets.values())
