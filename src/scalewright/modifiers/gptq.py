"""GPTQModifier: rounding that makes up for its errors, layer by layer, in lock step with the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from compressed_tensors.quantization import ActivationOrdering
from typing_extensions import override

from scalewright.errors import RecipeError, did_you_mean
from scalewright.modifiers.quantization import QuantizationModifier

_ORDERS = ("static", "weight", "none")


@dataclass(frozen=True)
class Rounding:
    """How a weight is rounded: the knobs of GPTQ."""

    block_size: int = 128
    damping: float = 0.01
    is_ordered: bool = True
    refinements: int = 0
    correction: float = 0.0


class GPTQModifier(QuantizationModifier):
    """`QuantizationModifier`, with each column of a weight rounded so that it makes up for the errors before it."""

    fields: ClassVar[Mapping[str, str]] = {
        **QuantizationModifier.fields,
        "block_size": "columns that are rounded before the rest of the weight hears of their errors (128)",
        "dampening_frac": "what is added to the diagonal of the Hessian, as a share of its mean (0.01)",
        "actorder": "static: columns with strong inputs are rounded first; none: in their order (static)",
        "refinements": "times that scales are fitted to the codes, and each code is chosen again given all others (0)",
        "correction": "share of what earlier layers have lost that a weight makes up for, from 0 to 1 (0)",
    }
    orders_columns: ClassVar[bool] = True

    def __init__(self, **given: Any) -> None:
        if "actorder" in given and given["actorder"] is None:  # what others call none
            given["actorder"] = "none"
        super().__init__(**given)
        order = self.given.get("actorder", "none" if self._is_order_refused else "static")
        if order not in _ORDERS:
            raise RecipeError(
                f"actorder: there is no {order!r}.{did_you_mean(str(order), _ORDERS)} Choices: {', '.join(_ORDERS)}.",
                key=("actorder",),
            )
        stated = [weights.actorder for group in self.groups if (weights := group.scheme.weights) is not None]
        inside = next((each for each in stated if each is not None), None)
        if order == "none" and inside is not None:
            other = "other weights false" if self._is_order_refused else "the modifier none"
            raise RecipeError(
                f"actorder: weights say '{ActivationOrdering(inside).value}', and {other}. Keep one of them.",
                key=("actorder",),
            )
        if order != "none" and self._is_order_refused:
            raise RecipeError(
                f"actorder: weights say false, and the modifier '{order}'. Keep one of them.", key=("actorder",)
            )
        if not stated:
            raise RecipeError(
                f"{type(self).__name__}: there are no weights to round. Give weights, or use QuantizationModifier."
            )
        self.rounding = Rounding(
            self._number("block_size", 128, low=1, whole=True),
            self._number("dampening_frac", 0.01, low=0, whole=False),
            order != "none",
            self._number("refinements", 0, low=0, whole=True),
            self._number("correction", 0.0, low=0, high=1, whole=False),
        )

    @property
    @override
    def data(self) -> Literal["needed", "useful", "none"]:
        return "needed"

    @property
    def _is_order_refused(self) -> bool:
        """Whether weights say `actorder: false`, which is not the same as saying nothing."""
        groups = self.given.get("config_groups", {}).values()
        parts = [group.get("weights") for group in (self.given, *groups) if isinstance(group, Mapping)]
        return any(isinstance(part, Mapping) and part.get("actorder") is False for part in parts)

    def _number(self, name: str, default: Any, *, low: float, high: float | None = None, whole: bool) -> Any:
        value = self.given.get(name, default)
        kinds = (int,) if whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < low or (high is not None and value > high):
            what = "whole number" if whole else "number"
            until = "on" if high is None else f"to {high:g}"
            raise RecipeError(f"{name}: expected a {what} from {low:g} {until}, got {value!r}.", key=(name,))
        return value
