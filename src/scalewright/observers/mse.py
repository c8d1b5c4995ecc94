"""Observers that shrink or widen the range to where quantisation loses least. The search itself is in numerics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.errors import StaleWeightError
from scalewright.numerics import layout
from scalewright.numerics.scales import global_scale_of, stored_dtype
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers.base import Observer, Range
from scalewright.observers.folding import Memoryless, MovingAverage
from scalewright.observers.knobs import Knob, with_defaults
from scalewright.observers.merging import Rule

# N observations, Q qparam positions, G elements that share one scale.

SEARCH_KNOBS = (
    Knob("maxshrink", 0.20, "how far the range may shrink, as a share of it", low=0, high=1),
    Knob(
        "patience",
        5,
        "candidates without improvement after which a position may stop early, in symmetric formats without "
        "importance; it stops only where no later one can be better. 0: never",
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
    version: int
    weights: Tensor | None
    before: Range | None
    results: dict[float, Range]
    """What was found under each global scale that was asked for."""


class RangeSearchObserver(Observer):
    """The range with the least `sum |dequantised - x| ** norm` of a grid of candidates.

    What is measured is what will be stored, with its rounded scale. Under TENSOR_GROUP the scale depends on the
    global scale, which comes from true maxima, those of fused partners included. Partners may be seen later, so the
    weight is remembered by reference, and searched again if the global scale has changed: leave it as it is until its
    qparams were read, or `detach` was called, with all partners seen.
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
        self._own_absmax: Tensor | None = None
        self._searched: _Searched | None = None

    @override
    def detach(self, module: torch.nn.Module) -> None:
        super().detach(module)
        if self._searched is not None and all(each.has_statistics for each in self._fused_observers):
            if self.has_own_range:
                self.min_vals, self.max_vals = self._own_range = self.chosen_range(self.get_global_scale())
            self._searched = None

    @override
    def statistics_replaced(self, *, unchanged: bool) -> None:
        super().statistics_replaced(unchanged=unchanged)
        self._own_absmax = self.true_absmax
        if not unchanged:
            self._searched = None

    @override
    def absmax(self) -> Tensor:
        # Our maximum says nothing of ranges that a user has set since; one that the user has set is obeyed.
        is_stale = not self.has_own_range and self._own_absmax is self.true_absmax
        if self.true_absmax is None or is_stale:
            return super().absmax()
        return torch.as_tensor(self.true_absmax).float()

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        lo_Q, hi_Q = self.range_of(observed)
        absmax = torch.maximum(-lo_Q.min(), hi_Q.max()).clamp(min=0)
        # A batch is searched under its own global scale: under that of all batches so far, their order would matter.
        is_grouped = layout.strategy_of(self.args) == "tensor_group"
        global_scale = global_scale_of(absmax) if is_grouped else None
        if self.true_absmax is not None and self.remembers:
            absmax = torch.maximum(absmax, torch.as_tensor(self.true_absmax).to(absmax))
        before = self.current_range()
        weights = self.importance_for(observed)
        result = self.fold(before, *self.search(observed, global_scale, weights))
        self.min_vals, self.max_vals = result
        self.true_absmax = self._own_absmax = absmax
        if global_scale is not None and self.base_name == "weight":
            self._searched = _Searched(observed, _version(observed), weights, before, {_key(global_scale): result})

    @override
    def chosen_range(self, global_scale: Tensor | None) -> Range:
        searched = self._searched
        # Ranges that a user has set are obeyed.
        if searched is None or not self.has_own_range or global_scale is None:
            return super().chosen_range(global_scale)
        if _key(global_scale) not in searched.results:
            if _version(searched.observed) != searched.version:
                raise StaleWeightError(
                    f"{self._where}: the weight was changed after it was observed, and a fused partner has changed the "
                    "global scale since, so it must be searched again. Read the qparams of all partners before "
                    "changing weights, or observe it once more."
                )
            found = self.search(searched.observed, global_scale, searched.weights)
            searched.results[_key(global_scale)] = self.fold(searched.before, *found)
        return searched.results[_key(global_scale)]

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


def _key(global_scale: Tensor) -> float:
    return float(global_scale)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
