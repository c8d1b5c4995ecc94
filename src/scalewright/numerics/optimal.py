"""The best stored scale: not the best of some shrunken ranges, but the best of the scales that the format allows.

Which scales are worth trying depends on the format:

- Scales that are themselves numbers of a short format (e4m3 under a global scale, e8m0) are tried one by one, from the
  largest that can be best downwards, until what lies outside the range loses more than the best so far. The answer is
  that of trying all of them.
- Scales of fp32, bf16 or fp16 are tried on a ladder, from one larger than min-max's down to where the bit width makes
  it hopeless, then more closely round the best; for affine formats under the neighbouring zero points, too. Squared
  errors of few bits take a short cut: the codes q that a scale gives have a best scale of their own,
  A / B = sum(w x q) / sum(w q q), and each rung is judged by that.
- Of a floating-point format's scale it matters where it lies between two powers of two: that is the ladder then.

The result is a range, so that compressed-tensors computes the chosen scale from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.blocks import BLOCK_ELEMENTS, Positions, positions_of
from scalewright.numerics.grids import Grid, grid_of
from scalewright.numerics.judge import Judge, Judged
from scalewright.numerics.scales import (
    ScaleCodes,
    candidate_qparams,
    effective_scale,
    range_for,
    round_scale,
    scale_codes_of,
)

# N observations, Q qparam positions, G elements that share one scale; P positions of one block, J scales at a time.

# How far below min-max's scale the best may lie, by bits: further down, clipping loses more than finer steps gain. With
# importance the largest values may hardly count.
_SMALLEST = {2: 0.25, 3: 0.4, 4: 0.6, 5: 0.72, 6: 0.82, 7: 0.9, 8: 0.95}
_SMALLEST_WEIGHTED = {2: 0.25, 3: 0.35, 4: 0.5, 5: 0.65, 6: 0.75, 7: 0.82, 8: 0.88}
# And how far above: a few elements may happen to fit a larger scale.
_LARGEST_OF_FEW = {2: 1.3, 3: 1.3, 4: 1.3, 5: 1.2, 6: 1.12, 7: 1.08, 8: 1.06}
_FEW = 64
_LARGEST_AFFINE = {**_LARGEST_OF_FEW, **dict.fromkeys(range(3, 7), 1.1)}
_MORE_IF_ROUGH = 1.6  # few elements, or elements that weigh differently: the best scale is harder to hit
_SILENT = 1e-4  # elements that weigh less than this share of the mean do not say where the ladder begins
_SCORED_BITS = 4  # beyond, sum(w x x) - A * A / B is a difference of numbers too close to each other for fp32
_CODES_BELOW, _CODES_BELOW_WEIGHTED = 3, 8  # tried at once; more only where they can be better


@dataclass(frozen=True)
class OptimalRange:
    """The range of the best scale at each position, and the sign that the scale is to have."""

    lo_Q: Tensor
    hi_Q: Tensor
    sign_Q: Tensor


def optimal_range(
    x_NQG: Tensor,
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    norm: float = 2.0,
    candidates: int = 10,
    refits: int = 1,
    weights_NQG: Tensor | None = None,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    signed: bool = False,
    block_elements: int = BLOCK_ELEMENTS,
) -> OptimalRange:
    """The range whose stored scale has the least `sum of w * |dequantised - x| ** norm` at each qparam position.

    `lo_Q` and `hi_Q` are the true ranges of `x_NQG` (finite, at least one element); `weights_NQG` broadcasts against
    `x_NQG` and is not negative; `dtype` is what the scale is stored in. Of fp32, bf16 and fp16 scales about
    `candidates` are tried, and the best is refined `refits` times; it is never worse than min-max's. `signed` tries
    negative scales, too, where the format is a symmetric integer.
    """
    search = _Search(args, grid_of(args), norm, candidates, refits, global_scale, dtype)
    if weights_NQG is not None and weights_NQG.numel() == 1:
        weights_NQG = None
    signed = signed and args.symmetric and search.grid.mantissa_bits is None
    cut = positions_of(x_NQG, lo_Q, hi_Q, weights_NQG=weights_NQG, block_elements=block_elements)
    found = [search.better_sign(each) if signed else search.best_of(each) for each in cut]
    scale_Q = torch.cat([each.scale_P for each in found]).reshape(lo_Q.shape)
    points = [each.point_P for each in found if each.point_P is not None]
    point_Q = torch.cat(points).reshape(lo_Q.shape) if points else None
    best_lo_Q, best_hi_Q = range_for(scale_Q.abs(), point_Q, args, global_scale=global_scale)
    # Min-max's own range is given back as it came: computed from its scale it may be off by the last bit. Nor can the
    # range of a scale be given that lies beyond fp32.
    own_scale_Q, own_point_Q = candidate_qparams(lo_Q, hi_Q, args, global_scale=global_scale, dtype=dtype)
    is_own_Q = (scale_Q == own_scale_Q) | (torch.maximum(-best_lo_Q, best_hi_Q) >= torch.finfo(torch.float32).max)
    if point_Q is not None and own_point_Q is not None:
        is_own_Q &= (point_Q == own_point_Q) | (scale_Q != own_scale_Q)
    return OptimalRange(torch.where(is_own_Q, lo_Q, best_lo_Q), torch.where(is_own_Q, hi_Q, best_hi_Q), scale_Q.sign())


@dataclass(frozen=True)
class _Found:
    """The best of some scales at each position, with its zero point and what it loses at most."""

    scale_P: Tensor
    point_P: Tensor | None
    error_P: Tensor | None = None

    def or_better(self, other: _Found) -> _Found:
        assert self.error_P is not None and other.error_P is not None
        is_better_P = other.error_P < self.error_P
        points = (self.point_P, other.point_P)
        return _Found(
            torch.where(is_better_P, other.scale_P, self.scale_P),
            None if points[0] is None or points[1] is None else torch.where(is_better_P, points[1], points[0]),
            torch.minimum(other.error_P, self.error_P),
        )


@dataclass(frozen=True)
class _Search:
    """What is the same for all positions of one search."""

    args: QuantizationArgs
    grid: Grid
    norm: float
    candidates: int
    refits: int
    global_scale: Tensor | None
    dtype: torch.dtype

    @property
    def judge(self) -> Judge:
        return Judge(self.grid, self.norm)

    def best_of(self, positions: Positions) -> _Found:
        """The best stored scales."""
        codes = scale_codes_of(self.args)
        if codes is not None:
            return _Found(codes.numbers.to(positions.unit_P.device)[self._best_code(positions, codes)], None)
        found = self._best_on_ladder(positions)
        return replace(found, scale_P=self.in_store(found.scale_P * positions.unit_P))

    def better_sign(self, positions: Positions) -> _Found:
        """The best stored scales, of both signs."""
        mirrored = replace(self, grid=self.grid.mirrored())
        both = []
        for search in (self, mirrored):
            found = search._best_on_ladder(positions)
            error_P = search.judge.errors(positions, found.scale_P, found.point_P)
            both.append(replace(found, error_P=error_P, scale_P=self.in_store(found.scale_P * positions.unit_P)))
        return both[0].or_better(replace(both[1], scale_P=-both[1].scale_P))

    def rungs(self, positions: Positions, count: int) -> tuple[range, float]:
        """The rungs of the ladder and how far they are apart."""
        grid, bits = self.grid, self.args.num_bits
        if grid.mantissa_bits is not None:
            # One octave of larger scales has all there is; but few numbers may gain by clipping.
            octaves_below = 0.5 if bits < 8 else 0.0
            num_below = round(count * octaves_below / (1 + octaves_below))
            return range(-(count - num_below) + 1, num_below + 1), (1 + octaves_below) / count
        bits = min(max(bits, 2), 8)
        smallest = (_SMALLEST_WEIGHTED if positions.is_weighted else _SMALLEST)[bits]
        largest = (grid.high - grid.low) / 2 / min(grid.high, -grid.low)
        if not self.args.symmetric:
            largest = _LARGEST_AFFINE[bits]
        elif _is_rough(positions):
            largest = max(largest, _LARGEST_OF_FEW[bits])
        step = (1 / smallest - 1 / largest) / (count - 1)
        num_above = max(1, round((1 - 1 / largest) / step))
        return range(-num_above, count - num_above), step

    def in_store(self, scale: Tensor) -> Tensor:
        """What is stored for a scale that codes are multiplied with."""
        return scale if self.global_scale is None else scale * self.global_scale

    def minmax(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point that min-max would store."""
        lo_P, hi_P = positions.lo_P * positions.unit_P, positions.hi_P * positions.unit_P
        return candidate_qparams(lo_P, hi_P, self.args, global_scale=self.global_scale, dtype=self.dtype)

    # ---- scales of a short format --------------------------------------------------------------------------------

    def _best_code(self, positions: Positions, codes: ScaleCodes) -> Tensor:
        """The code of the best scale; that of min-max if another is no better."""
        own_P = codes.code_of(self.minmax(positions)[0])
        below = _CODES_BELOW_WEIGHTED if positions.is_weighted else min(_CODES_BELOW, codes.above)
        offsets = [0, *range(codes.above, 0, -1), *range(-1, -below - 1, -1)]
        offset_J1 = torch.tensor(offsets, device=own_P.device).unsqueeze(1)
        best_P, is_open_P = self._best_of_codes(positions, codes, own_P + offset_J1, thorough=positions.is_weighted)
        odd_M = (own_P + codes.above < codes.halved_from - 1).nonzero()[:, 0]
        if len(odd_M):
            small_J1 = torch.arange(codes.first, codes.halved_from, device=own_P.device).unsqueeze(1)
            tried_JM = torch.cat([best_P[odd_M].unsqueeze(0), small_J1.flip(0).expand(-1, len(odd_M))])
            best_P[odd_M], is_open_P[odd_M] = self._best_of_codes(positions.at(odd_M), codes, tried_JM, thorough=True)
        lowest = below
        while bool(is_open_P.any()):
            # What is outside does not yet lose more than the best: smaller scales may be better still.
            open_M = is_open_P.nonzero()[:, 0]
            lower_J1 = -torch.arange(lowest + 1, lowest + 1 + _CODES_BELOW_WEIGHTED, device=own_P.device).unsqueeze(1)
            lowest += _CODES_BELOW_WEIGHTED
            tried_JM = torch.cat([best_P[open_M].unsqueeze(0), own_P[open_M] + lower_J1])
            best_P[open_M], is_open_M = self._best_of_codes(positions.at(open_M), codes, tried_JM, thorough=True)
            is_open_P = torch.zeros_like(is_open_P).index_put((open_M,), is_open_M)
        return best_P

    def _best_of_codes(
        self, positions: Positions, codes: ScaleCodes, code_JP: Tensor, *, thorough: bool
    ) -> tuple[Tensor, Tensor]:
        """The best of some codes, the last of which are the least, and whether a lesser one may be better still."""
        code_JP = code_JP.clamp(codes.first, len(codes.numbers) - 1)
        numbers_JP = codes.numbers.to(code_JP.device)[code_JP]
        judged = self.judge.judge(positions, effective_scale(numbers_JP, self.global_scale) / positions.unit_P)
        best_P = code_JP.gather(0, self.judge.best(positions, judged).unsqueeze(0))[0]
        clipped_P = self.judge.clipped(positions, judged.scale_KP[-1], thorough=thorough)
        return best_P, (clipped_P <= judged.most_KP.amin(dim=0)) & (code_JP[-1] > codes.first)

    # ---- scales that may be anything -----------------------------------------------------------------------------

    def _best_on_ladder(self, positions: Positions) -> _Found:
        """The best scales, as stored, in units of their position."""
        ladder = _Ladder.of(self, positions)
        is_scored = self.norm == 2 and self.grid.mantissa_bits is None and self.args.num_bits <= _SCORED_BITS
        return ladder.climb_by_score() if is_scored else ladder.climb_by_error()


@dataclass(frozen=True)
class _Rung:
    """Where on the ladder the best scale is, its zero point, how good it is, and A and B of its codes if scored."""

    rung_P: Tensor
    point_P: Tensor | None
    value_P: Tensor
    products_P: Tensor | None = None
    squares_P: Tensor | None = None


@dataclass(frozen=True)
class _Ladder:
    """Scales by their rung: 0 is min-max's, rungs above are smaller. Everything is in units of each position.

    `raw_P` is the scale that the others are counted from: min-max's, or that of the elements which have a weight. For
    integers the inverse of the scale grows by the same amount from rung to rung, for floats the scale shrinks by the
    same factor. Rungs need not be whole numbers.
    """

    search: _Search
    positions: Positions
    rungs: range
    step: float
    num_zoom: int
    raw_P: Tensor
    minmax_P: Tensor
    point_P: Tensor | None
    minmax_point_P: Tensor | None

    @classmethod
    def of(cls, search: _Search, positions: Positions) -> _Ladder:
        grid = search.grid
        scale_P, minmax_point_P = search.minmax(positions)
        lo_P, hi_P = _loud_range(positions) if positions.is_weighted else (positions.lo_P, positions.hi_P)
        lo_P, hi_P = lo_P.clamp(max=0), hi_P.clamp(min=0)
        point_P = minmax_point_P
        if search.args.symmetric:
            raw_P = torch.maximum(-lo_P, hi_P) / ((grid.high - grid.low) / 2)
        else:
            raw_P = (hi_P - lo_P) / (grid.high - grid.low)
        raw_P = torch.where(raw_P > 0, raw_P, 1.0)  # nothing but zeros: any scale will do
        if point_P is not None and positions.is_weighted:
            point_P = (grid.low - lo_P / raw_P).round_().clamp_(grid.low, grid.high)
        is_float = grid.mantissa_bits is not None
        candidates = round(search.candidates * (_MORE_IF_ROUGH if _is_rough(positions) or is_float else 1))
        if is_float and positions.is_weighted:
            candidates *= 2  # with 16, forty shrunken ranges of fp8 found scales that lost 7 % less
        num_zoom = 4 if candidates >= 8 else 2 if candidates >= 4 else 0
        rungs, step = search.rungs(positions, max(2, candidates - num_zoom))
        minmax_P = effective_scale(scale_P, search.global_scale) / positions.unit_P
        return cls(search, positions, rungs, step, num_zoom, raw_P, minmax_P, point_P, minmax_point_P)

    # ---- by score: A * A / B of the codes at each rung -------------------------------------------------------------

    def climb_by_score(self) -> _Found:
        """Judge each rung by the best scale for its codes, then take that scale."""
        best, minmax = self._every_rung_scored()
        for rung_JP, point_JP in self._under_other_points(best):
            best = self._scored(rung_JP, point_JP, best)
        if self.num_zoom:
            best = self._scored(*self._around(best, 1.0, self.num_zoom), best)
        total_P = self.search.judge.total(self.positions)
        found = self._fitted(minmax, total_P, self.minmax_P).or_better(self._fitted(best, total_P))
        for _ in range(self.search.refits):
            again = self._scored_at(found.scale_P.unsqueeze(0), found.point_P)
            found = found.or_better(self._fitted(again, total_P))
        return found

    def _every_rung_scored(self) -> tuple[_Rung, _Rung]:
        rung_JP, point_JP = self._every_rung()
        scale_JP = self._scale_at(rung_JP)
        products_JP, squares_JP = self.search.judge.scores(self.positions, scale_JP, point_JP)
        best = _best_score(rung_JP, point_JP, products_JP, squares_JP)
        j = self.rungs.index(0)
        return best, _Rung(rung_JP[j], self.minmax_point_P, best.value_P, products_JP[j], squares_JP[j])

    def _scored(self, rung_JP: Tensor, point_JP: Tensor | None, best: _Rung) -> _Rung:
        """The best of some rungs and the best so far."""
        products_JP, squares_JP = self.search.judge.scores(self.positions, self._scale_at(rung_JP), point_JP)
        return _better(best, _best_score(rung_JP, point_JP, products_JP, squares_JP))

    def _scored_at(self, scale_1P: Tensor, point_P: Tensor | None) -> _Rung:
        point_1P = None if point_P is None else point_P.unsqueeze(0)
        products_1P, squares_1P = self.search.judge.scores(self.positions, scale_1P, point_1P)
        return _Rung(scale_1P[0], point_P, products_1P[0], products_1P[0], squares_1P[0])

    def _fitted(self, rung: _Rung, total_P: Tensor, scale_P: Tensor | None = None) -> _Found:
        """The best scale for the codes of a rung (or `scale_P`), as stored, and what they lose: recoding loses less."""
        products_P, squares_P = rung.products_P, rung.squares_P
        assert products_P is not None and squares_P is not None
        if scale_P is None:
            fitted_P = torch.where(squares_P > 0, products_P / squares_P, 0.0).float()
            scale_P = torch.where(fitted_P > 0, self._stored(fitted_P), self.minmax_P)
        scale64_P = scale_P.double()
        return _Found(scale_P, rung.point_P, total_P - scale64_P * (2 * products_P - scale64_P * squares_P))

    # ---- by error: what the stored scale of each rung loses --------------------------------------------------------

    def climb_by_error(self) -> _Found:
        """Judge each rung by its own error."""
        judge = self.search.judge
        rung_JP, point_JP = self._every_rung()
        # Weights leave no bound on how far outside values may lie.
        outside = math.inf if self.positions.is_weighted else self._outside
        tried = [judge.judge(self.positions, self._stored_at(rung_JP), point_JP, outside=outside)]
        best = _least_error(rung_JP, tried[0])

        def try_more(rung_JP: Tensor, point_JP: Tensor | None) -> None:
            nonlocal best
            tried.append(judge.judge(self.positions, self._stored_at(rung_JP), point_JP, outside=outside))
            best = _better(best, _least_error(rung_JP, tried[-1]))

        for more in self._under_other_points(best):
            try_more(*more)
        if self.num_zoom:
            try_more(*self._around(best, 1.0, self.num_zoom))
        for refit in range(self.search.refits):
            try_more(*self._around(best, 0.5 ** (refit + 1), 2))
        # Bounds are close enough to choose among rungs; against min-max the choice must stand exactly.
        every = Judged.joined(tried)
        minmax_P = torch.full_like(self.raw_P, self.rungs.index(0), dtype=torch.int64)
        last = every.at(torch.stack([minmax_P, every.most_KP.min(dim=0).indices]))
        index_1P = judge.best(self.positions, last).unsqueeze(0)
        points_KP = last.zero_point_KP
        return _Found(
            last.scale_KP.gather(0, index_1P)[0], None if points_KP is None else points_KP.gather(0, index_1P)[0]
        )

    # ---- rungs -----------------------------------------------------------------------------------------------------

    def _every_rung(self) -> tuple[Tensor, Tensor | None]:
        rung_J1 = torch.tensor(list(self.rungs), dtype=torch.float32, device=self.raw_P.device).unsqueeze(1)
        rung_JP = rung_J1.expand(-1, len(self.raw_P))
        if self.point_P is None or self.minmax_point_P is None:
            return rung_JP, None
        return rung_JP, torch.where(rung_JP == 0, self.minmax_point_P, self.point_P)

    def _around(self, best: _Rung, width: float, count: int) -> tuple[Tensor, Tensor | None]:
        """Rungs on both sides of the best, less than `width` away."""
        each = torch.arange(1, count // 2 + 1, dtype=torch.float32, device=self.raw_P.device) / (count // 2 + 1)
        rung_JP = best.rung_P + torch.cat([-each.flip(0), each]).mul_(width).unsqueeze(1)
        return rung_JP, None if best.point_P is None else best.point_P.expand_as(rung_JP)

    def _under_other_points(self, best: _Rung) -> Iterator[tuple[Tensor, Tensor]]:
        """Rungs near the best under other zero points: the neighbouring ones, or all if there are but four."""
        grid = self.search.grid
        if self.point_P is None or best.point_P is None or grid.mantissa_bits is not None:
            return
        num_points = round(grid.high - grid.low) + 1
        others = (1, 2, 3) if num_points == 4 else (-1, 1, -2, 2) if self.positions.is_weighted else (-1, 1)
        for other in others:
            point_P = best.point_P + other
            point_P = (
                (point_P - grid.low).remainder(4) + grid.low if num_points == 4 else point_P.clamp(grid.low, grid.high)
            )
            rung_JP = torch.stack([best.rung_P - 1, best.rung_P, best.rung_P + 1])
            yield rung_JP, point_P.expand_as(rung_JP)

    @property
    def _outside(self) -> float:
        """How many steps values may lie outside the range of the smallest scale that is ever tried."""
        grid, last = self.search.grid, self.rungs.stop + 1
        if grid.mantissa_bits is not None:
            return (grid.high - grid.low) / 2 * (math.pow(2, last * self.step) - 1)
        reach = (grid.high - grid.low) * (1 + last * self.step)
        if self.point_P is not None:
            return reach - (grid.high - grid.low) + 3  # zero points are tried that are 3 away
        return reach / 2 - min(grid.high, -grid.low)

    def _scale_at(self, rung_JP: Tensor) -> Tensor:
        if self.search.grid.mantissa_bits is None:
            # Rungs below 0 have larger scales, down to half of the inverse.
            scale_JP = self.raw_P / (1 + rung_JP * self.step).clamp_(min=0.5)
        else:
            scale_JP = self.raw_P * torch.exp(rung_JP * (-self.step * math.log(2)))
        return torch.where(rung_JP == 0, self.minmax_P, scale_JP)

    def _stored_at(self, rung_JP: Tensor) -> Tensor:
        return torch.where(rung_JP == 0, self.minmax_P, self._stored(self._scale_at(rung_JP)))

    def _stored(self, scale: Tensor) -> Tensor:
        """A scale in units as it will be stored."""
        unit_P, search = self.positions.unit_P, self.search
        stored = round_scale(search.in_store(scale * unit_P), search.dtype)
        return effective_scale(stored, search.global_scale) / unit_P


def _loud_range(positions: Positions) -> tuple[Tensor, Tensor]:
    """The range of the elements that are not silent, and 0."""
    lo_P, hi_P = torch.zeros_like(positions.lo_P), torch.zeros_like(positions.hi_P)
    least_P1 = (positions.total_weight() / positions.num_elements * _SILENT).unsqueeze(1)
    for block in positions:
        assert block.weights_PE is not None
        loud_PE = torch.where(block.weights_PE > least_P1, block.x_PE, 0.0)
        lo_P, hi_P = torch.minimum(lo_P, loud_PE.amin(dim=1)), torch.maximum(hi_P, loud_PE.amax(dim=1))
    return lo_P, hi_P


def _is_rough(positions: Positions) -> bool:
    """Whether the error goes up and down from one scale to the next."""
    return positions.is_weighted or positions.group_size <= _FEW


def _best_score(rung_JP: Tensor, point_JP: Tensor | None, products_JP: Tensor, squares_JP: Tensor) -> _Rung:
    value_JP = torch.where(squares_JP > 0, products_JP.square() / squares_JP, 0.0)
    value_P, index_P = value_JP.max(dim=0)
    index_1P = index_P.unsqueeze(0)
    return _Rung(
        rung_JP.gather(0, index_1P)[0],
        None if point_JP is None else point_JP.gather(0, index_1P)[0],
        value_P,
        products_JP.gather(0, index_1P)[0],
        squares_JP.gather(0, index_1P)[0],
    )


def _least_error(rung_JP: Tensor, judged: Judged) -> _Rung:
    value_P, index_P = judged.most_KP.min(dim=0)
    index_1P = index_P.unsqueeze(0)
    points_KP = judged.zero_point_KP
    return _Rung(
        rung_JP.gather(0, index_1P)[0], None if points_KP is None else points_KP.gather(0, index_1P)[0], -value_P
    )


def _better(one: _Rung, other: _Rung) -> _Rung:
    """Whichever has the larger value, at each position."""
    is_better_P = other.value_P > one.value_P

    def either(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return None if mine is None or theirs is None else torch.where(is_better_P, theirs, mine)

    return _Rung(
        torch.where(is_better_P, other.rung_P, one.rung_P),
        either(one.point_P, other.point_P),
        torch.maximum(one.value_P, other.value_P),
        either(one.products_P, other.products_P),
        either(one.squares_P, other.squares_P),
    )
