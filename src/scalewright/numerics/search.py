"""THE range search: every observer that chooses a range calls it.

A candidate is a pair of factors on the least and the largest value. It is judged by the error of what would really be
stored: the scale as compressed-tensors computes it, rounded to the dtype that carries it, under the real global scale,
with the integer zero point. Work is done in blocks that stay in cache (numerics/blocks.py), so memory does not grow
with the tensor or with the number of candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.blocks import BLOCK_ELEMENTS, Block, blocks_of, power_of_two_below
from scalewright.numerics.grids import Grid, grid_of
from scalewright.numerics.measure import abs_power_
from scalewright.numerics.scales import candidate_qparams, effective_scale

# N observations, Q qparam positions, G elements that share one scale, K candidates (J in a batch);
# P positions and E elements in one block.

_BATCH = 8  # candidates whose scales are computed at a time


@dataclass(frozen=True)
class RangeSearch:
    """The best range at each position, the candidate that gave it, its error, and how many candidates were measured.

    `error_Q` (float64) is the sum over N and G of `w * |d| ** norm`, in units of `unit_Q ** norm`.
    """

    lo_Q: Tensor
    hi_Q: Tensor
    best_Q: Tensor
    error_Q: Tensor
    unit_Q: Tensor
    num_tried_Q: Tensor


def shrink_candidates(*, maxshrink: float, grid: float, expand: float = 1.0) -> Tensor:
    """`expand * (1 - i / grid)` for i below `maxshrink * grid`, for both ends alike; 1 (min-max itself) comes first.

    [K, 2] factors, descending after the first. Min-max is always among them: a search is never worse than none.
    """
    steps = torch.arange(max(1, int(maxshrink * grid + 1e-9)), dtype=torch.float64)
    factors = expand * (1 - steps / grid)
    factors = torch.cat([torch.ones(1, dtype=torch.float64), factors[factors != 1]])
    return factors.float().unsqueeze(1).expand(-1, 2)


def search_range(
    x_NQG: Tensor,
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    candidates_K2: Tensor,
    norm: float,
    weights_NQG: Tensor | None = None,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    patience: int = 0,
    block_elements: int = BLOCK_ELEMENTS,
) -> RangeSearch:
    """The candidate range with the least error at each qparam position; the first of equals.

    `lo_Q` and `hi_Q` are the true ranges of `x_NQG` (finite, at least one element); `weights_NQG` broadcasts against
    `x_NQG` and is not negative; `dtype` is what the scale is stored in. After `patience` candidates in a row that
    were no better (0: never) a position stops, provided that what its largest value alone loses by clipping, which
    only grows as ranges shrink, exceeds its best error: the answer is that of the full search, in less time. With
    `patience`, candidates must shrink from the second on.
    """
    unit_Q = power_of_two_below(torch.maximum(lo_Q.abs(), hi_Q.abs()))
    search = _Search(args, grid_of(args), norm, candidates_K2.to(x_NQG.device), global_scale, dtype, patience)
    ends = torch.stack([lo_Q.flatten(), hi_Q.flatten(), unit_Q.flatten()])
    blocks = blocks_of(x_NQG, unit_Q, weights_NQG=weights_NQG, block_elements=block_elements)
    found = [
        search.best_of(parts, *ends[:, start:end])
        for (start, end), parts in groupby(blocks, key=lambda block: (block.start, block.end))
    ]
    best_Q, error_Q, num_tried_Q = (torch.cat(column).reshape(lo_Q.shape) for column in zip(*found, strict=True))
    factors_Q2 = search.candidates_K2[best_Q]
    lo_Q, hi_Q = _times(lo_Q, factors_Q2[..., 0]), _times(hi_Q, factors_Q2[..., 1])
    return RangeSearch(lo_Q, hi_Q, best_Q, error_Q, unit_Q, num_tried_Q)


@dataclass(frozen=True)
class _Search:
    """What is the same for all blocks of one search."""

    args: QuantizationArgs
    grid: Grid
    norm: float
    candidates_K2: Tensor
    global_scale: Tensor | None
    dtype: torch.dtype
    patience: int

    def best_of(self, parts: Iterable[Block], lo_P: Tensor, hi_P: Tensor, unit_P: Tensor) -> tuple[Tensor, ...]:
        """Index of the best candidate, its error and the number of candidates tried, at the positions of the parts."""
        parts = iter(parts)
        block = next(parts)
        batches = (
            self._stored(lo_P, hi_P, unit_P, factors_J2) for factors_J2 in torch.split(self.candidates_K2, _BATCH)
        )
        if block.is_whole:
            return self._best_of_whole(block, batches, lo_P / unit_P, hi_P / unit_P)
        stored = list(batches)
        error_KP = torch.cat([each.errors(block, self) for each in stored])
        for block in parts:
            error_KP += torch.cat([each.errors(block, self) for each in stored])
        best_P = error_KP.argmin(dim=0)
        return best_P, error_KP.gather(0, best_P.unsqueeze(0))[0], torch.full_like(best_P, len(error_KP))

    def _best_of_whole(
        self, block: Block, batches: Iterable[_Stored], lo_P: Tensor, hi_P: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        best_P = torch.zeros(len(lo_P), dtype=torch.int64, device=lo_P.device)
        least_P = torch.full_like(lo_P, torch.inf, dtype=torch.float64)
        tried_P = torch.full_like(best_P, len(self.candidates_K2))
        may_stop = self.patience > 0 and self.args.symmetric and block.weights_PE is None
        index = 0
        for batch in batches:
            for candidate in batch.split():
                error_P = candidate.errors(block, self)[0]
                best_P = torch.where(error_P < least_P, index, best_P)
                least_P = torch.minimum(least_P, error_P)
                index += 1
                if may_stop and index > self.patience:
                    is_hopeless_P = candidate.clipped_loss(lo_P, hi_P, self) > least_P
                    stops_P = is_hopeless_P & (index - 1 - best_P >= self.patience)
                    tried_P = torch.where(stops_P, tried_P.clamp(max=index), tried_P)
                    if bool((tried_P <= index).all()):
                        return best_P, least_P, tried_P
        return best_P, least_P, tried_P

    def _stored(self, lo_P: Tensor, hi_P: Tensor, unit_P: Tensor, factors_J2: Tensor) -> _Stored:
        lo_JP, hi_JP = (_times(end, factors_J2[:, i, None]) for i, end in enumerate((lo_P, hi_P)))
        scale_JP, zero_point_JP = candidate_qparams(
            lo_JP, hi_JP, self.args, global_scale=self.global_scale, dtype=self.dtype
        )
        return _Stored(effective_scale(scale_JP, self.global_scale) / unit_P, zero_point_JP)


@dataclass(frozen=True)
class _Stored:
    """The qparams of some candidates as they would be stored, in units of each position."""

    scale_JP: Tensor
    zero_point_JP: Tensor | None

    def split(self) -> Iterator[_Stored]:
        """Each candidate alone."""
        for index in range(len(self.scale_JP)):
            one = slice(index, index + 1)
            yield _Stored(self.scale_JP[one], None if self.zero_point_JP is None else self.zero_point_JP[one])

    def errors(self, block: Block, search: _Search) -> Tensor:
        """`sum of w * |d| ** norm` of each candidate at each position of the block, float64 [J, P], in units."""
        in_steps = []
        steps, codes, spare = block.scratch
        for index, scale_P in enumerate(self.scale_JP):
            inverse_P1 = scale_P.reciprocal().unsqueeze(-1)
            if self.zero_point_JP is None:
                torch.mul(block.x_PE, inverse_P1, out=steps)
            else:
                torch.addcmul(self.zero_point_JP[index].unsqueeze(-1), block.x_PE, inverse_P1, out=steps)
            steps.sub_(search.grid.round_into(steps, codes, spare))
            abs_power_(steps, search.norm, scratch=codes)
            if block.weights_PE is not None:
                steps.mul_(block.weights_PE)
            in_steps.append(block.sum(steps))
        # Only positions that are too small for the format have large scales in their units; fp32 is too short for them.
        is_ordinary = float(self.scale_JP.max()) < 1e4
        return torch.stack(in_steps).mul_((self.scale_JP if is_ordinary else self.scale_JP.double()).pow(search.norm))

    def clipped_loss(self, lo_P: Tensor, hi_P: Tensor, search: _Search) -> Tensor:
        """What the largest and the least value lose by lying outside the first candidate's range: a lower bound."""
        above = (hi_P - self.scale_JP[0] * search.grid.high).clamp(min=0)
        below = (self.scale_JP[0] * search.grid.low - lo_P).clamp(min=0)
        return torch.maximum(above, below).double().pow(search.norm)


def _times(end: Tensor, factor: Tensor) -> Tensor:
    """`end * factor`, saturating: factors above 1 could leave fp32."""
    largest = torch.finfo(torch.float32).max
    return (end * factor).clamp(-largest, largest)
