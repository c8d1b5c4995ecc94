"""The schemes that are compared, what a checkpoint stores under each, and whether a budget of bits can be kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.utils import get_direct_state_dict
from torch import nn

from scalewright.calibration.loaders import settle_formats
from scalewright.calibration.targets import Target, check_layers
from scalewright.errors import RecipeError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.modifiers.storing import store
from scalewright.numerics.layout import strategy_of
from scalewright.quality import recipe_for

_NOT_COUNTED = "weight_shape"  # two numbers that loaders could do without


def candidate_schemes(
    names: Sequence[str],
    *,
    quality: str = "balanced",
    group_size: int | None = None,
    observer: str | None = None,
    positive_scales: bool = False,
) -> dict[str, QuantizationScheme]:
    """The schemes of those names as `quality` has them, by their names in capitals.

    `group_size` is for those that have groups of a size which may be chosen.
    """
    names = [name.upper() for name in names]
    if not names:
        raise RecipeError("schemes: there is none. Name some, such as W4A16 and W8A16.")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RecipeError(f"schemes: {twice} is named twice. Name it once.")
    idle = next((name for name in names if scheme_named(name).weights is None), None)
    if idle is not None:
        raise RecipeError(f"schemes: {idle} leaves weights as they are. Name another, or ignore layers.")
    if group_size is not None and not any(map(takes_group_size, names)):
        raise RecipeError(f"group_size: none of {', '.join(names)} has groups of another size. Leave it out.")
    candidates = {}
    for name in names:
        size = group_size if takes_group_size(name) else None
        recipe = recipe_for(
            "fast" if quality == "fast" else "balanced",
            name,
            group_size=size,
            observer=observer,
            positive_scales=positive_scales,
        )
        modifier = recipe.modifiers[-1]  # before which inputs may be smoothed
        assert isinstance(modifier, QuantizationModifier)
        candidates[name] = modifier.groups[0].scheme
    recipe_for(quality, names[0])  # says no to a quality that there is not
    return candidates


def takes_group_size(name: str) -> bool:
    """Whether the weights of a scheme have groups of a size which may be chosen."""
    weights = scheme_named(name).weights
    return weights is not None and strategy_of(weights) == "group" and weights.scale_dtype is None


def check_bits(bits: float, by_scheme: Mapping[str, float]) -> float:
    """What may be spent of a budget; an error if no choice of schemes fits it, or all of them do.

    One that is the least scheme's to two digits stands for it: NVFP4 takes a little more than 4.5 bits.
    """
    least, largest = (find(by_scheme, key=by_scheme.__getitem__) for find in (min, max))
    if math.isnan(bits):
        raise RecipeError(f"bits: {bits:g} is no number. Give {by_scheme[least]:.2f}, which {least} takes, or more.")
    if round(by_scheme[least], 2) > bits:
        raise RecipeError(
            f"bits: {bits:g} for each weight is less than {least} takes, {by_scheme[least]:.2f} with its scales. Give "
            "more, or name a smaller scheme."
        )
    if by_scheme[largest] < bits and round(by_scheme[largest], 2) < bits:
        raise RecipeError(
            f"bits: {bits:g} for each weight is more than {largest} takes, {by_scheme[largest]:.2f} with its scales. "
            f"Give less, or use scheme {largest} for all layers."
        )
    return max(bits, by_scheme[least])


def checked_sizes(
    model: nn.Module, layers: Mapping[str, nn.Linear], name: str, scheme: QuantizationScheme
) -> dict[str, int]:
    """The bits that a scheme stores for each layer. Says no to layers that it does not fit, or no loader could read."""
    check_layers(Target(each, module, name, scheme) for each, module in layers.items())
    watched = [WatchedLayer(each, module, scheme) for each, module in layers.items()]
    settle_formats(model, watched)
    known: dict[tuple[Any, ...], int] = {}
    sizes = {}
    for layer in watched:
        key = (*layer.weight.shape, layer.weight.dtype, layer.format)
        if key not in known:
            known[key] = stored_bits(layer.scheme, tuple(layer.weight.shape), layer.weight.dtype, layer.format)
        sizes[layer.name] = known[key]
    return sizes


def stored_bits(
    scheme: QuantizationScheme, shape: tuple[int, ...], dtype: torch.dtype, stored_as: CompressionFormat
) -> int:
    """What a checkpoint stores for a weight: all tensors that take its place. Nothing is computed but shapes."""
    rows, columns = shape
    module = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    tensors = store(dict(get_direct_state_dict(module)), scheme, stored_as, lambda rows, weight, loss: None)
    point = tensors.get("weight_zero_point")
    if point is not None and point.dtype == torch.int8 and "weight_packed" in tensors:
        # compressed-tensors packs them by columns, but not where there are only shapes.
        assert scheme.weights is not None
        words = -(-point.shape[0] * int(scheme.weights.num_bits) // 32)
        tensors["weight_zero_point"] = point.new_empty(words, *point.shape[1:], dtype=torch.int32)
    counted = (each for name, each in tensors.items() if name.startswith("weight") and name != _NOT_COUNTED)
    return sum(8 * each.numel() * each.element_size() for each in counted)
