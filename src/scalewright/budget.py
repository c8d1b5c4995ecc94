"""Chooses a scheme for each layer, so that a budget of bits is kept and the least is lost.

What layers lose is `sensitivity`'s to say. Losses add up, so this is a knapsack with one choice for each group of
layers: an integer program, which HiGHS solves exactly.

Bits are counted over the layers that the recipe means, and those alone: all tensors that take the place of a weight in
the checkpoint (codes, scales, zero points, global scales), divided by the number of weights. What does not belong to a
weight (scales of inputs, biases), and `weight_shape`, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, gcd
from pathlib import Path
from typing import Any

import numpy as np

from scalewright.errors import RecipeError
from scalewright.modifiers import IMatrixGatherer, Modifier, SmoothQuantModifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.quality import recipe_for
from scalewright.recipe import Recipe
from scalewright.sensitivity import LayerGroup, Sensitivity
from scalewright.sensitivity.sizes import check_bits, takes_group_size

_SCALE = 1e4  # of the losses in the program: HiGHS is content when it is 1e-6 away from the best


@dataclass(frozen=True)
class Allocation:
    """A scheme for each group of layers, what that takes, and the recipe that says so."""

    schemes: dict[str, str]
    """By the name of the group."""
    bits: float
    """For each weight, all told."""
    loss: float
    """The KL that is to be expected."""
    recipe: Recipe

    def summary(self) -> str:
        """`4.490 bits for each weight (W4A16 for 20, W8A16 for 4 of 24 groups of layers)`."""
        used = list(dict.fromkeys(self.schemes.values()))
        counts = {scheme: sum(each == scheme for each in self.schemes.values()) for scheme in sorted(used)}
        said = ", ".join(f"{scheme} for {count}" for scheme, count in counts.items())
        return f"{self.bits:.3f} bits for each weight ({said} of {len(self.schemes)} groups of layers)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"bits": self.bits, "loss": self.loss, "schemes": self.schemes, "recipe": self.recipe.to_dict()}


def share_out(found: Sensitivity, bits: float, *, importance: str | Path | None = None) -> Allocation:
    """The schemes that lose least, of those that were measured, with at most `bits` for each weight on average.

    The recipe rounds weights as they were rounded when sensitivity was measured, by GPTQ if its quality is best.
    """
    if len(found.schemes) < 2:
        raise RecipeError(f"schemes: {found.schemes[0]} alone leaves nothing to choose. Name two or more.")
    allowed = check_bits(bits, {scheme: found.bits_of(scheme) for scheme in found.schemes})
    num_weights = sum(group.num_weights for group in found.groups)
    chosen = solve(found.groups, floor(allowed * num_weights * (1 + 1e-12)))
    recipe = _recipe(found, chosen, importance=importance)
    return Allocation(chosen, found.bits_per_weight(chosen), found.loss(chosen), recipe)


def solve(groups: tuple[LayerGroup, ...], stored_bits: int) -> dict[str, str]:
    """The scheme of each group, by its name, that lose least in all and store at most so many bits."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (it takes half a second)

    pairs = [(place, scheme) for place, group in enumerate(groups) for scheme in group.losses]
    unit = gcd(*(groups[place].stored_bits[scheme] for place, scheme in pairs))
    losses = np.array([groups[place].losses[scheme] for place, scheme in pairs])
    sizes = np.array([[groups[place].stored_bits[scheme] // unit for place, scheme in pairs]], dtype=np.float64)
    one_each = np.array([[float(place == other) for other, _ in pairs] for place in range(len(groups))])
    found = milp(
        losses * (_SCALE / max(float(losses.max()), 1e-300)),
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        # Sizes are whole numbers: half of one more lets nothing in, and forgives the solver its last digits.
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes, -np.inf, stored_bits // unit + 0.5)],
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, found.message
    taken = [pair for pair, share in zip(pairs, found.x, strict=True) if share > 0.5]
    chosen = {groups[place].name: scheme for place, scheme in taken}
    assert len(chosen) == len(taken) == len(groups)
    assert sum(groups[place].stored_bits[scheme] for place, scheme in taken) <= stored_bits
    return chosen


def _recipe(found: Sensitivity, chosen: dict[str, str], *, importance: str | Path | None) -> Recipe:
    """One modifier for all schemes that are treated alike.

    Layers are named one by one: vLLM asks a target that is a class before it looks at the names of fused layers.
    """
    ignored = list(found.ignore or LEFT_ALONE)
    modifiers: list[Modifier] = []
    smoothed: list[str] = []
    for scheme in found.schemes:
        names = [name for group in found.groups if chosen[group.name] == scheme for name in group.layers]
        if names:
            size = found.group_size if takes_group_size(scheme) else None
            of_quality = recipe_for(
                found.quality,
                scheme,
                group_size=size,
                observer=found.observer,
                targets=names,
                ignore=ignored,
                positive_scales=found.positive_scales,
            )
            *before, modifier = of_quality.modifiers
            smoothed += names if any(isinstance(each, SmoothQuantModifier) for each in before) else []
            modifiers = _joined(modifiers, modifier)
    smoothers = [SmoothQuantModifier(targets=smoothed)] if smoothed else []
    gatherers = [] if importance is None else [IMatrixGatherer(file=importance, ignore=ignored)]
    return Recipe.of([*smoothers, *gatherers, *modifiers])


def _joined(modifiers: list[Modifier], new: Modifier) -> list[Modifier]:
    """The modifiers with one more, or with its scheme in one of them that says the same otherwise."""
    own = {"scheme", "targets"}
    scheme = {new.given["scheme"]: new.given["targets"]}
    rest = {name: value for name, value in new.given.items() if name not in own}
    for i, each in enumerate(modifiers):
        if type(each) is type(new) and {name: value for name, value in each.given.items() if name not in own} == rest:
            joined = type(new)(scheme={**each.given["scheme"], **scheme}, **rest)
            return [*modifiers[:i], joined, *modifiers[i + 1 :]]
    return [*modifiers, type(new)(scheme=scheme, **rest)]
