"""Observers that shrink or widen the range to where quantisation loses least. The search itself is in numerics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.numerics import layout
from scalewright.numerics.scales import global_scale_of, stored_dtype
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers.base import Observer
from scalewright.observers.knobs import Knob, with_defaults
from scalewright.observers.merging import Rule
from scalewright.observers.minmax import Memoryless, MovingAverage, Range

# N observations, Q qparam positions, G elements that share one scale.

SEARCH_KNOBS = (
    Knob("maxshrink", 0.20, "how far the range may shrink, as a share of it", low=0, high=1),
    Knob(
        "patience",
        5,
        "candidates without improvement after which a position may stop early; it stops only where no later one "
        "can be better. 0: never",
        low=0,
        changes="time",
    ),
    Knob("grid", 100.0, "steps that the whole range is cut into", above=0),
    Knob("norm", 2.4, "power of the error that is summed", above=0),
    Knob("expand", 1.0, "factor on the range that the search begins from", low=1),
)


@dataclass(frozen=True)
class _Searched:
    """A weight under TENSOR_GROUP, kept to be searched again when a fused partner changes the global scale."""

    observed: Tensor
    weights: Tensor | None
    before: Range | None
    global_scale: Tensor


class RangeSearchObserver(Observer):
    """The range with the least `sum |dequantised - x| ** norm` of a grid of candidates.

    What is measured is what will be stored, with its rounded scale. Under TENSOR_GROUP the scale depends on the
    global scale, which comes from true maxima, those of fused partners included. Partners may be seen later, so the
    weight is remembered by reference (until `reset` or `detach`) and searched again if the global scale has changed.
    """

    knobs: ClassVar[tuple[Knob, ...]] = SEARCH_KNOBS
    merge_rules: ClassVar[Mapping[str, Rule]] = {**Observer.merge_rules, "true_absmax": "max"}

    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float

    @override
    def reset(self) -> None:
        super().reset()
        self.true_absmax: Tensor | None = None
        self._found: tuple[Tensor | None, ...] = ()  # min_vals, max_vals and true_absmax as we put them
        self._searched: _Searched | None = None

    @override
    def detach(self, module: torch.nn.Module) -> None:
        super().detach(module)
        self._searched = None

    @override
    def statistics_replaced(self, *, unchanged: bool) -> None:
        super().statistics_replaced(unchanged=unchanged)
        self._found = (self.min_vals, self.max_vals, self.true_absmax)
        if not unchanged:
            self._searched = None

    @override
    def absmax(self) -> Tensor:
        # Our maximum says nothing of ranges that a user has set since; one that the user has set is obeyed.
        is_stale = not self._is_ours and bool(self._found) and self._found[2] is self.true_absmax
        return super().absmax() if self.true_absmax is None or is_stale else self.true_absmax

    @property
    def _is_ours(self) -> bool:
        """Whether the ranges are those that were found here or merged, and not such as a user has set."""
        return bool(self._found) and self._found[0] is self.min_vals and self._found[1] is self.max_vals

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        lo_Q, hi_Q = self.range_of(observed)
        absmax = torch.maximum(-lo_Q.min(), hi_Q.max()).clamp(min=0)
        # A batch is searched under its own global scale: under that of all batches so far, their order would matter.
        is_grouped = layout.strategy_of(self.args) == "tensor_group"
        global_scale = global_scale_of(absmax) if is_grouped else None
        if self.true_absmax is not None and self.remembers:
            absmax = torch.maximum(absmax, self.true_absmax.to(absmax.device))
        before = self.current_range()
        weights = self.importance_for(observed)
        result = self.fold(before, *self.search(observed, global_scale, weights))
        self.min_vals, self.max_vals, self.true_absmax = self._found = (*result, absmax)
        if global_scale is not None and self.base_name == "weight":
            self._searched = _Searched(observed, weights, before, global_scale)

    @override
    def chosen_range(self, global_scale: Tensor | None) -> Range:
        searched = self._searched
        # Ranges that a user has set are obeyed.
        if (
            searched is None
            or not self._is_ours
            or global_scale is None
            or torch.equal(global_scale, searched.global_scale)
        ):
            return super().chosen_range(global_scale)
        return self.fold(searched.before, *self.search(searched.observed, global_scale, searched.weights))

    def search(self, observed: Tensor, global_scale: Tensor | None, weights: Tensor | None) -> Range:
        """The best range of one value at each qparam position, if it is stored under `global_scale`."""
        lo_Q, hi_Q = self.range_of(observed)
        found = search_range(
            observed,
            lo_Q,
            hi_Q,
            self.args,
            candidates_K2=shrink_candidates(maxshrink=self.maxshrink, grid=self.grid, expand=self.expand),
            norm=self.norm,
            weights_NQG=weights,
            global_scale=global_scale,
            dtype=stored_dtype(observed.dtype, self.args),
            patience=self.patience,
        )
        return found.lo_Q, found.hi_Q

    @abstractmethod
    def fold(self, before: Range | None, lo_Q: Tensor, hi_Q: Tensor) -> Range:
        """How a range joins what was seen before: `Memoryless` or `MovingAverage` say so."""
        raise NotImplementedError

    def importance_for(self, observed: Tensor) -> Tensor | None:
        """Weights on the errors, broadcasting against `observed`; None for equal ones."""
        return None


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(Memoryless, RangeSearchObserver):
    """The range that loses least for the tensor seen last; the widest such range of all batches, for activations."""


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverage, RangeSearchObserver):
    """The range that loses least for each batch, smoothed by a moving average."""

    knobs: ClassVar[tuple[Knob, ...]] = (*MovingAverage.knobs, *SEARCH_KNOBS)
    merge_rules: ClassVar[Mapping[str, Rule]] = {**MovingAverage.merge_rules, "true_absmax": "max"}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """`memoryless_mse` with a search from 1.8 times the range down to 0.8 of it, as NVFP4's coarse top end wants."""

    knobs: ClassVar[tuple[Knob, ...]] = with_defaults(
        SEARCH_KNOBS, expand=1.8, maxshrink=1 - 0.8 / 1.8, grid=200.0, patience=1000
    )
