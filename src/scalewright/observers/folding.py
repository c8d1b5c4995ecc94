"""How the range of a new value joins what was seen before: the two ways that observers choose from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.observers.base import Observer, Range
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import Rule

# Q: qparam positions.

Folded = dict[str, Tensor]
"""Statistics by their names: `min_vals` and `max_vals`, and what is needed to go on from there."""


class Folding(Observer):
    """An observer that finds a range in each value, and joins it with those before."""

    def so_far(self) -> Folded | None:
        """What the next range joins; None when nothing was seen."""
        current = self.current_range()
        return None if current is None else _as_folded(current)

    @abstractmethod
    def fold(self, before: Folded | None, lo_Q: Tensor, hi_Q: Tensor) -> Folded:
        """The statistics after `[lo, hi]` was found, given those before it; changes nothing."""
        raise NotImplementedError

    def take(self, folded: Folded) -> None:
        """Make these the statistics of this observer."""
        for name, value in folded.items():
            setattr(self, name, value)


class Widening(Folding):
    """The range of a new value and that of all before it become the range that holds both."""

    @override
    def so_far(self) -> Folded | None:
        return super().so_far() if self.remembers else None

    @override
    def fold(self, before: Folded | None, lo_Q: Tensor, hi_Q: Tensor) -> Folded:
        if before is None:
            return _as_folded((lo_Q, hi_Q))
        least_Q, largest_Q = before["min_vals"].to(lo_Q), before["max_vals"].to(hi_Q)
        return _as_folded((torch.minimum(least_Q, lo_Q), torch.maximum(largest_Q, hi_Q)))


class Memoryless(Widening):
    """For weights a new value takes the place of the one before.

    A batch of activations is only part of what is to be quantised, so there the range widens over all batches and
    ranks: keeping just the last batch would make the scale a matter of luck. Merging always takes the range of both.
    """

    @property
    @override
    def remembers(self) -> bool:
        return self.base_name != "weight"


class MovingAverage(Folding):
    """Ranges join as `old * (1 - c) + new * c`, the first as it is. Their order matters.

    In calibration each sample is a value of its own, so the size of batches does not matter.

    After k values y_1 ... y_k the average is `(1 - c)^k * y_1 + sum_i c * (1 - c)^(k - i) * y_i`. `first_*` is y_1 and
    `added_*` the sum, both float64 whatever the dtype of the values, so a long run does not freeze; `num_averaged` is
    k. The sum and k are all that matters of values that come after others, so sides merge exactly: values that were
    seen here and then there, or by ranks in their order, have the average that one observer finds who sees them in
    that order. In float64 it is equal but for rounding, so `min_vals` and `max_vals`, which are fp32, are equal; seldom
    (a rounding that falls the other way) but for their last bit.

    A range that a user has set is a sequence of one value.
    """

    ordered: ClassVar[bool] = True
    merge_rules: ClassVar[Mapping[str, Rule]] = {
        "min_vals": "derived",
        "max_vals": "derived",
        "first_min": "first",
        "first_max": "first",
        "added_min": "decayed",
        "added_max": "decayed",
        "num_averaged": "sum",
    }
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

    @override
    def reset(self) -> None:
        super().reset()
        self.first_min: Tensor | None = None
        self.first_max: Tensor | None = None
        self.added_min: Tensor | None = None
        self.added_max: Tensor | None = None
        self.num_averaged: Tensor | None = None
        self._averaged: tuple[Tensor | None, Tensor | None] = (None, None)

    @override
    def so_far(self) -> Folded | None:
        self.settle()
        return None if self.num_averaged is None else {name: getattr(self, name) for name in _PARTS}

    @override
    def fold(self, before: Folded | None, lo_Q: Tensor, hi_Q: Tensor) -> Folded:
        share = self.averaging_constant
        joined: Folded = {}
        for end, new_Q in (("min", lo_Q.double()), ("max", hi_Q.double())):
            if before is None:
                joined |= {f"first_{end}": new_Q, f"added_{end}": new_Q * share}
            else:
                first_Q, added_Q = (before[f"{part}_{end}"].to(new_Q.device) for part in ("first", "added"))
                joined |= {f"first_{end}": first_Q, f"added_{end}": added_Q * (1 - share) + new_Q * share}
        joined["num_averaged"] = torch.tensor(1 if before is None else 1 + int(before["num_averaged"]), device="cpu")
        return {**joined, **self.derived(joined)}

    @override
    def take(self, folded: Folded) -> None:
        super().take(folded)
        self._averaged = (self.min_vals, self.max_vals)

    @override
    def settle(self) -> None:
        num_synced = int(self._synced.get("num_averaged", 0))
        is_own = self._averaged[0] is self.min_vals and self._averaged[1] is self.max_vals
        if is_own and (self.num_averaged is None or int(self.num_averaged) >= num_synced):
            return
        # What was set, or searched again, is new: no rank has told of it yet.
        current = self.current_range()
        one = {} if current is None else self.fold(None, *current)
        for name in _PARTS:
            setattr(self, name, one.get(name))
            self._synced.pop(name, None)
        self._averaged = (self.min_vals, self.max_vals)

    @override
    def decay_by(self, statistics: Mapping[str, Tensor]) -> float:
        return float((1 - self.averaging_constant) ** int(statistics.get("num_averaged", 0)))

    @override
    def derived(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if "num_averaged" not in statistics:
            return {}
        # In float64 a constant stays exactly what it is, and sums of huge values do not overflow.
        left = self.decay_by(statistics)
        return {
            f"{end}_vals": (statistics[f"first_{end}"] * left + statistics[f"added_{end}"]).float()
            for end in ("min", "max")
        }

    @override
    def statistics_replaced(self, *, unchanged: bool) -> None:
        super().statistics_replaced(unchanged=unchanged)
        self._averaged = (self.min_vals, self.max_vals)


_PARTS = tuple(name for name, rule in MovingAverage.merge_rules.items() if rule != "derived")


def _as_folded(found: Range) -> Folded:
    return {"min_vals": found[0], "max_vals": found[1]}
