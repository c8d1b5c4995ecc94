"""SmoothQuantModifier: loud input channels are made quieter before they are rounded, and their weights larger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from scalewright.errors import RecipeError
from scalewright.modifiers.base import Modifier
from scalewright.modifiers.quantization import parse_names, parse_targets

_STRENGTH = 0.8


class SmoothQuantModifier(Modifier):
    """Even out the input channels of layers whose inputs the recipe rounds to integers.

    What a channel is made quieter by goes into the norm or layer in front, and the opposite into the layer's weight.
    All factors are powers of two, and only what leaves the model's answers as they are, bit for bit, is done. It takes
    a pass over the data, and comes first in its stage.
    """

    fields: ClassVar[Mapping[str, str]] = {
        "smoothing_strength": f"0 to 1: how even inputs become, at the cost of weights ({_STRENGTH})",
        "targets": "class names, module names, wildcards or re: patterns of layers whose inputs are meant (Linear)",
        "ignore": "the same, of layers to leave out",
        "mappings": "pairs of layers and what is in front of them, [[layers], module]: only these (all that hold)",
    }

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        strength = self.given.get("smoothing_strength", _STRENGTH)
        if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength <= 1:
            raise RecipeError(
                f"smoothing_strength: expected a number from 0 to 1, got {strength!r}.", key=("smoothing_strength",)
            )
        self.strength = float(strength)
        self.targets = parse_targets(self.given.get("targets", ["Linear"]), ("targets",))
        self.ignore = parse_names(self.given.get("ignore", []), ("ignore",))
        self.mappings = [_mapping(each, number) for number, each in enumerate(_listed(self.given.get("mappings")))]


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list) or not given:
        raise RecipeError(
            f"mappings: expected a list of [[layers], module in front of them], got {given!r}.", key=("mappings",)
        )
    return given


def _mapping(given: Any, number: int) -> tuple[list[str], list[str]]:
    """Layers, and what is in front of them, as patterns."""
    key = ("mappings", str(number))
    if not isinstance(given, list) or len(given) != 2:
        raise RecipeError(f"mappings[{number}]: expected [[layers], module in front of them], got {given!r}.", key=key)
    layers, giver = given
    return parse_names(layers, key), parse_names(giver, key)
