"""How the range of a new value joins what was seen before: the two ways that observers choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.observers.base import Observer, Range
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import Rule

# Q: qparam positions.


class Widening(Observer):
    """The range of a new value and that of all before it become the range that holds both."""

    def fold(self, before: Range | None, lo_Q: Tensor, hi_Q: Tensor) -> Range:
        """The range after `[lo, hi]` was seen, given the one before it."""
        if before is None or not self.remembers:
            return lo_Q, hi_Q
        return torch.minimum(before[0].to(lo_Q), lo_Q), torch.maximum(before[1].to(hi_Q), hi_Q)


class Memoryless(Widening):
    """For weights a new value takes the place of the one before.

    A batch of activations is only part of what is to be quantised, so there the range widens over all batches and
    ranks: keeping just the last batch would make the scale a matter of luck. Merging always takes the range of both.
    """

    @property
    @override
    def remembers(self) -> bool:
        return self.base_name != "weight"


class MovingAverage(Observer):
    """Ranges join as `old * (1 - c) + new * c`, the first as it is. Their order matters.

    In calibration each sample is a value of its own, so the size of batches does not matter.

    Computed in fp32 or better whatever the dtype of the values, so a long run does not freeze. Two sides merge as
    their mean, weighted by how many tokens each saw (for weights: how many tensors).
    """

    ordered: ClassVar[bool] = True
    merge_rules: ClassVar[Mapping[str, Rule]] = {"min_vals": "mean", "max_vals": "mean"}
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(
            "averaging_constant",
            0.01,
            "share of the newest sample in the moving average; 1 keeps the newest alone",
            above=0,
            high=1,
        ),
    )
    averaging_constant: float

    @property
    def avg_constant(self) -> float:
        """Another name for `averaging_constant`."""
        return self.averaging_constant

    def fold(self, before: Range | None, lo_Q: Tensor, hi_Q: Tensor) -> Range:
        """The range after `[lo, hi]` was seen, given the one before it."""
        if before is None:
            return lo_Q, hi_Q
        return self._average(before[0], lo_Q), self._average(before[1], hi_Q)

    def _average(self, old: Tensor, new: Tensor) -> Tensor:
        # In float64 a constant stays exactly what it is, and the difference of huge values does not overflow.
        share = self.averaging_constant
        return (old.to(new.device).double() * (1 - share) + new.double() * share).float()
