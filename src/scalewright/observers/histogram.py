"""Observers of activations over one lossless record of all values: how often each bf16 code was seen.

They are order-free, merge exactly over batches and ranks, and need the same memory however many tokens pass. The
range is chosen when qparams are asked for; `min_vals` and `max_vals` are the true extremes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.numerics.blocks import power_of_two_below
from scalewright.numerics.grids import grid_of
from scalewright.numerics.histogram import (
    code_values,
    count_codes,
    entropy_threshold,
    evening_weights,
    range_holding,
)
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers.base import Observer, Range
from scalewright.observers.folding import Widening
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import Rule

# Q qparam positions, C codes in order of their value.

_FAINTEST = 2.0**64


class HistogramObserver(Widening):
    """`counts` (*qparam_shape, 65536), int64: how often each bf16 value was seen, in ascending order of the values."""

    watches: ClassVar[tuple[str, ...]] = ("activations", "attention states")
    strategies: ClassVar[tuple[str, ...]] = ("tensor", "attn_head")
    merge_rules: ClassVar[Mapping[str, Rule]] = {**Widening.merge_rules, "counts": "sum"}
    _last: ClassVar[tuple[tuple[Any, ...], Tensor, Range] | None] = None
    """The last question, and its answer: queries, keys and values are made from one input, and ask in turn."""

    @override
    def reset(self) -> None:
        super().reset()
        self.counts: Tensor | None = None

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        counts = self.counted(observed)
        self.counts = counts if self.counts is None else self.counts + counts
        self.take(self.fold(self.so_far(), *self.range_of(observed)))

    @override
    def chosen_range(self, global_scale: Tensor | None) -> Range:
        if self.counts is None or not self.has_own_range:  # ranges that a user has set are obeyed
            return super().chosen_range(global_scale)
        knobs = tuple(getattr(self, knob.name) for knob in self.knobs)  # as they are now
        question = (type(self), self.args.model_dump_json(), knobs, self.scale_dtype)
        last = HistogramObserver._last
        if last is not None and last[0] == question and torch.equal(last[1], self.counts):
            return last[2]
        values_C = code_values(self.counts.device)
        found = [self.range_from(counts_C, values_C) for counts_C in self.counts.reshape(-1, len(values_C))]
        lo_Q, hi_Q = (torch.stack(ends).reshape(self.counts.shape[:-1]) for ends in zip(*found, strict=True))
        HistogramObserver._last = (question, self.counts.clone(), (lo_Q, hi_Q))
        return lo_Q, hi_Q

    def counted(self, observed: Tensor) -> Tensor:
        """The counts of one value."""
        return count_codes(observed)

    @abstractmethod
    def range_from(self, counts_C: Tensor, values_C: Tensor) -> Range:
        """The range of one position, two fp32 scalars, from the counts of its values."""
        raise NotImplementedError


@Observer.register("percentile")
class PercentileObserver(HistogramObserver):
    """The narrowest range that holds `percentile` percent of all values."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("percentile", 99.99, "percent of all values that the range holds", above=0, high=100),
    )
    percentile: float

    @override
    def range_from(self, counts_C: Tensor, values_C: Tensor) -> Range:
        lo, hi = range_holding(counts_C, values_C, self.percentile, symmetric=self.args.symmetric)
        if lo < 0 or hi > 0:
            return lo, hi
        # So many zeros that nothing else is within the percentage: a range of nothing would lose everything.
        seen = values_C[counts_C > 0]
        return seen.min(), seen.max()

    @override
    def notes(self) -> list[str]:
        if self.counts is None:
            return super().notes()
        num_zeros_Q = self.counts[..., code_values(self.counts.device) == 0].sum(dim=-1)
        is_sparse_Q = num_zeros_Q >= self.counts.sum(dim=-1) * (self.percentile / 100)
        num_sparse = int((is_sparse_Q & (num_zeros_Q < self.counts.sum(dim=-1))).sum())
        if not num_sparse:
            return super().notes()
        return [
            *super().notes(),
            f"{self._where}: at {num_sparse} of {is_sparse_Q.numel()} qparam positions {self.percentile:g} percent of "
            "all values are zeros, so the whole range is taken.",
        ]


@Observer.register("entropy")
class EntropyObserver(HistogramObserver):
    """The clipping magnitude at which the quantised distribution of |x| diverges least (KL) from the true one."""

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("bins", 2048, "bins that |x| is sorted into", low=256, high=8192),)
    bins: int

    @override
    def range_from(self, counts_C: Tensor, values_C: Tensor) -> Range:
        threshold = entropy_threshold(counts_C, values_C, grid_of(self.args), num_bins=self.bins)
        seen = values_C[counts_C > 0]
        return torch.maximum(seen.min(), -threshold), torch.minimum(seen.max(), threshold)


@Observer.register("histogram_mse")
class HistogramMSEObserver(HistogramObserver):
    """The range that loses least over all values that were seen; the ends of an affine range are searched in turn."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("maxshrink", 0.95, "how far the range may shrink, as a share of it", low=0, high=1),
        Knob("grid", 200.0, "steps that the whole range is cut into", above=0),
        Knob("norm", 2.0, "power of the error that is summed", above=0, high=16),
    )
    maxshrink: float
    grid: float
    norm: float

    @override
    def range_from(self, counts_C: Tensor, values_C: Tensor) -> Range:
        is_seen = counts_C > 0
        values = values_C[is_seen].reshape(1, 1, -1)
        weights = self.weights_of(counts_C[is_seen], values).float().reshape(1, 1, -1)
        extremes = (values.amin().reshape(1), values.amax().reshape(1))

        def search(candidates_K2: Tensor) -> tuple[Tensor, Range]:
            found = search_range(
                values,
                *extremes,
                self.args,
                candidates_K2=candidates_K2,
                norm=self.norm,
                weights_NQG=weights,
                dtype=self.scale_dtype,
            )
            return candidates_K2[found.best_Q.cpu()][0], (found.lo_Q, found.hi_Q)

        together = shrink_candidates(maxshrink=self.maxshrink, grid=self.grid)
        factors, best = search(together)
        if not self.args.symmetric:
            for end in (0, 1, 0, 1):  # each end in turn, the other held fast
                candidates_K2 = factors.repeat(len(together), 1)
                candidates_K2[:, end] = together[:, end]
                factors, best = search(candidates_K2)
        return best[0].reshape(()), best[1].reshape(())

    def weights_of(self, counts: Tensor, values: Tensor) -> Tensor:
        """What the errors of some values weigh, from their counts; fp32 must have room for it."""
        return counts


@Observer.register("balanced_mse")
class BalancedMSEObserver(HistogramMSEObserver):
    """`histogram_mse` with each token's error divided by the token's strength, so that loud tokens do not drown others.

    Some tokens (often the first) have activations a hundred times those of the rest. Plain squared error spends the
    range on them; here a token weighs in inverse proportion to its root mean square.
    """

    @override
    def counted(self, observed: Tensor) -> Tensor:
        return count_codes(observed, evening_weights(observed))

    @override
    def weights_of(self, counts: Tensor, values: Tensor) -> Tensor:
        # A token of 2 ** -64 of the largest value loses nothing under any scale, but would weigh more than fp32 has
        # room for, and all others nothing beside it.
        unit = power_of_two_below(values.abs().amax()).double()
        return (counts * unit).clamp(max=_FAINTEST)
