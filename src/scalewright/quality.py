"""`fast`, `balanced`, `best`: the words by which users say how much work a scheme is worth. Each is a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from scalewright.errors import RecipeError, did_you_mean
from scalewright.modifiers import GPTQModifier, IMatrixGatherer, Modifier, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.modifiers.schemes import scheme_named
from scalewright.recipe import Recipe

QUALITIES = {
    "fast": "weights are searched without data",
    "balanced": "errors of weights are weighted by how strong their inputs are; inputs that are rounded to integers "
    "under one scale are smoothed",
    "best": "GPTQ that makes up for what earlier layers lost, with scales and codes refined; inputs that are rounded "
    "to integers are smoothed",
}
_FEW_BITS = 4  # up to which refining is worth its time
_MANY_BITS = 8  # of weights that mind little if some columns grow
_CORRECTION = 0.5
_REFINEMENTS = 2


def recipe_for(
    quality: str,
    scheme: str,
    *,
    group_size: int | None = None,
    observer: str | None = None,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] | None = None,
    importance: str | Path | None = None,
    positive_scales: bool = False,
) -> Recipe:
    """The recipe that a quality stands for.

    `importance` is a file to take it from. With `positive_scales` no scale is negative; others may be where integers
    are packed.
    """
    if quality not in QUALITIES:
        raise RecipeError(
            f"there is no quality '{quality}'.{did_you_mean(quality, QUALITIES)} Use {', '.join(QUALITIES)}."
        )
    if importance is not None and quality == "fast":
        raise RecipeError("importance: fast weighs all errors alike. Leave it out, or use balanced.")
    ignored = list(ignore or LEFT_ALONE)
    given: dict[str, Any] = {"targets": list(targets), "scheme": scheme, "ignore": ignored}
    given |= {} if group_size is None else {"group_size": group_size}
    given |= {} if observer is None else {"weight_observer": observer}
    arguments = scheme_named(scheme)
    modifiers: list[Modifier] = [_modifier(quality, arguments, given, positive_scales=positive_scales)]
    if importance is not None:
        modifiers.insert(0, IMatrixGatherer(file=importance, ignore=ignored))
    if _is_smoothed(quality, arguments):
        modifiers.insert(0, SmoothQuantModifier(**({} if list(targets) == ["Linear"] else {"targets": list(targets)})))
    return Recipe.of(modifiers)


def _is_smoothed(quality: str, scheme: QuantizationScheme) -> bool:
    """Whether inputs are integers, and weights have bits enough to take what is loud about them."""
    inputs = scheme.input_activations
    if inputs is None or inputs.type != "int" or scheme.weights is None or scheme.weights.num_bits < _MANY_BITS:
        return False
    return quality == "best" or (quality == "balanced" and not inputs.dynamic)


def _modifier(
    quality: str, scheme: QuantizationScheme, given: dict[str, Any], *, positive_scales: bool
) -> QuantizationModifier:
    weights = scheme.weights
    if weights is None:
        return QuantizationModifier(**given)
    is_packed = weights.type == "int" and weights.symmetric and scheme.input_activations is None
    knobs: dict[str, Any] = {"signed": True} if is_packed and not positive_scales else {}
    knobs |= {"importance": "off"} if quality == "fast" else {}
    if knobs:
        given = {"weight_observer": {"name": "optimal", **knobs}, **given}
    if quality != "best":
        return QuantizationModifier(**given)
    refinements = _REFINEMENTS if weights.num_bits <= _FEW_BITS else 0
    return GPTQModifier(**given, correction=_CORRECTION, refinements=refinements)
