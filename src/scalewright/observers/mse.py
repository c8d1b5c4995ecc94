"""Observers that shrink or widen the range to where quantisation loses least. The search itself is in numerics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from scalewright.numerics.scales import stored_dtype
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers.base import Observer, Range
from scalewright.observers.folding import Memoryless, MovingAverage
from scalewright.observers.knobs import Knob, with_defaults
from scalewright.observers.merging import Rule
from scalewright.observers.searching import SearchObserver

SEARCH_KNOBS = (
    Knob("maxshrink", 0.20, "how far the range may shrink, as a share of it", low=0, high=1),
    Knob(
        "patience",
        5,
        "candidates without improvement after which a position may stop early, in symmetric formats; "
        "it stops only where no later one can be better. 0: never. Up to 4 bits all candidates cost as much as a few, "
        "and it has no effect",
        low=0,
        changes="time",
    ),
    Knob("grid", 100.0, "steps that the whole range is cut into", above=0),
    Knob("norm", 2.4, "power of the error that is summed", above=0, high=16),
    Knob("expand", 1.0, "factor on the range that the search begins from", low=1),
)


class RangeSearchObserver(SearchObserver):
    """The range with the least `sum |dequantised - x| ** norm` of a grid of candidates."""

    knobs: ClassVar[tuple[Knob, ...]] = SEARCH_KNOBS

    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float

    @override
    def search(self, observed: Tensor, global_scale: Tensor | None, weights: Tensor | None) -> Range:
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


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(Memoryless, RangeSearchObserver):
    """The range that loses least for the tensor seen last; the widest such range of all batches, for activations."""


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverage, RangeSearchObserver):
    """The range that loses least for each sample, smoothed by a moving average."""

    knobs: ClassVar[tuple[Knob, ...]] = (*MovingAverage.knobs, *SEARCH_KNOBS)
    merge_rules: ClassVar[Mapping[str, Rule]] = {**MovingAverage.merge_rules, "true_absmax": "max"}


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """`memoryless_mse` with a search from 1.8 times the range down to 0.8 of it, as NVFP4's coarse top end wants."""

    knobs: ClassVar[tuple[Knob, ...]] = with_defaults(
        SEARCH_KNOBS, expand=1.8, maxshrink=1 - 0.8 / 1.8, grid=200.0, patience=1000
    )
