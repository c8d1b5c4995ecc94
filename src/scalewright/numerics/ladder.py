"""The search for the best scale where a scale may be any number: fp32, bf16 or fp16.

Scales are tried on a ladder, from one larger than min-max's down to where the bit width makes it hopeless; for affine
formats under neighbouring zero points, too. All rungs stand in fixed ratios to min-max's scale, so a chart (charts.py)
tells what each of them about loses, in one go. From the best rung on, the values themselves are asked:

- For squared errors of few bits, the codes q that a scale gives have a best scale of their own,
  A / B = sum(w x q) / sum(w q q): fitted, and fitted again to the codes that it gives.
- Else scales between the best rung and its neighbours are tried, closer and closer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scalewright.numerics.blocks import Positions
from scalewright.numerics.charts import COLUMNS, plain_chart
from scalewright.numerics.judge import Judge, Judged

# P positions of one block, J scales at a time.

# How far below min-max's scale the best may lie, by bits: further down, clipping loses more than finer steps gain. With
# importance the largest values may hardly count.
_SMALLEST = {2: 0.25, 3: 0.4, 4: 0.6, 5: 0.72, 6: 0.82, 7: 0.9, 8: 0.95}
_SMALLEST_WEIGHTED = {2: 0.25, 3: 0.35, 4: 0.5, 5: 0.65, 6: 0.75, 7: 0.82, 8: 0.88}
# And how far above: a few elements may happen to fit a larger scale.
_LARGEST_OF_FEW = {2: 1.3, 3: 1.3, 4: 1.3, 5: 1.2, 6: 1.12, 7: 1.08, 8: 1.06}
_FEW = 64
_LARGEST_AFFINE = {2: 1.3, **dict.fromkeys(range(3, 9), 1.1)}
# With importance an outlier may be worth nothing, and among thousands of values it may cost less than a coarse step for
# all of them: some more scales further down, each this share of the one before. Most: what a chart has room for.
_FAR_RATIO, _NUM_FAR, _MOST_FAR = 0.08 ** (1 / 12), 12, 32
_MANY = 256
_MORE_IF_ROUGH = 1.6  # few elements, or elements that weigh differently: the best scale is harder to hit
_SILENT = 1e-4  # elements that weigh less than this share of the mean do not say where the ladder begins
_FITTED_BITS = 4  # with more, the search closes in between rungs
_TIE = 1e-6  # fits that differ by less are as good as each other: rounding would choose
_CHARTED_POINTS = 16  # more zero points would make too large a chart
_FEWER_UNCHARTED = 3  # rungs that must be measured one by one


@dataclass(frozen=True)
class Found:
    """The best of some scales at each position, with its zero point and what it loses at most."""

    scale_P: Tensor
    point_P: Tensor | None
    error_P: Tensor | None = None

    def or_better(self, other: Found) -> Found:
        """Whichever loses less; this one of equals."""
        assert self.error_P is not None and other.error_P is not None
        is_better_P = other.error_P < self.error_P
        return Found(
            torch.where(is_better_P, other.scale_P, self.scale_P),
            _either(is_better_P, other.point_P, self.point_P),
            torch.minimum(other.error_P, self.error_P),
        )


@dataclass(frozen=True)
class Ladder:
    """Scales by their rung, a number: 0 is `raw_P`, rungs above are smaller. Everything is in units of the positions.

    `raw_P` and `point_P` are min-max's, or those of the elements that have a weight; `minmax` is what min-max would
    store. For integers the inverse of the scale grows by `step` from rung to rung, for floats the scale shrinks by the
    factor `2 ** step`. Rungs need not be whole.
    """

    judge: Judge
    bits: int
    positions: Positions
    minmax: Found
    stored: Callable[[Tensor], Tensor]
    """A scale as it will be stored."""
    raw_P: Tensor
    point_P: Tensor | None
    rungs: tuple[float, ...]
    step: float

    @classmethod
    def of(
        cls,
        judge: Judge,
        bits: int,
        positions: Positions,
        *,
        candidates: int,
        minmax: Found,
        stored: Callable[[Tensor], Tensor],
    ) -> Ladder:
        """The ladder of about `candidates` rungs for a grid of some bits, affine if min-max has a zero point."""
        grid, point_P = judge.grid, minmax.point_P
        lo_P, hi_P = _loud_range(positions) if positions.is_weighted else (positions.lo_P, positions.hi_P)
        lo_P, hi_P = lo_P.clamp(max=0), hi_P.clamp(min=0)
        if point_P is None:
            raw_P = torch.maximum(-lo_P, hi_P) / ((grid.high - grid.low) / 2)
        else:
            raw_P = (hi_P - lo_P) / (grid.high - grid.low)
        raw_P = torch.where(raw_P > 0, raw_P, 1.0)  # nothing but zeros: any scale will do
        if point_P is not None and positions.is_weighted:
            point_P = (grid.low - lo_P / raw_P).round_().clamp_(grid.low, grid.high)
        is_rough = _is_rough(positions)
        if point_P is not None and bits > _FITTED_BITS:
            candidates = max(2, candidates // _FEWER_UNCHARTED)
        if is_rough:
            candidates = round(candidates * _MORE_IF_ROUGH)
        far: list[float] = []
        if grid.mantissa_bits is None:
            largest = _LARGEST_AFFINE[bits]
            if point_P is None:
                largest = (grid.high - grid.low) / 2 / min(grid.high, -grid.low)
            if is_rough:
                largest = max(largest, _LARGEST_OF_FEW[bits])
            smallest = (_SMALLEST_WEIGHTED if positions.is_weighted else _SMALLEST)[bits]
            step = (1 / smallest - 1 / largest) / (candidates - 1)
            num_above = max(1, round((1 - 1 / largest) / step))
            num_far = _NUM_FAR if positions.is_weighted else 0
            # Other norms are there to guard the outliers, and models need that: SmolLM2-135M, rows of int3, KL 4.4 and
            # with these scales 5.3.
            if judge.norm <= 2 and not positions.is_weighted and point_P is None and positions.num_elements > _MANY:
                # If one value is far out, a share r of the range cuts off (1 - r)^2 of its square, and the others lose
                # n r^2 / 12 squared steps, of which half the range has h: together least at 1 / (1 + n / 12 h^2).
                lone = 1 / (1 + positions.num_elements / (3 * (grid.high - grid.low) ** 2))
                num_far = min(_MOST_FAR, max(0, math.ceil(math.log(lone / smallest) / math.log(_FAR_RATIO))))
            far = [(1 / (smallest * _FAR_RATIO ** (i + 1)) - 1) / step for i in range(num_far)]
        else:
            # One octave of larger scales has all there is; but few numbers may gain by clipping.
            octaves_below = 0.5 if bits < 8 else 0.0
            step = (1 + octaves_below) / candidates
            num_above = candidates - 1 - round(candidates * octaves_below / (1 + octaves_below))
        rungs = tuple(map(float, range(-num_above, candidates - num_above)))
        return cls(judge, bits, positions, minmax, stored, raw_P, point_P, (*rungs, *far), step)

    def climb(self, refits: int) -> Found:
        """The best scale, as stored, refined so many times; never worse than min-max's."""
        is_charted = self.point_P is None or self.judge.grid.high - self.judge.grid.low < _CHARTED_POINTS
        rung_P, point_P = self._best_on_chart() if is_charted else self._best_measured()
        is_fitted = self.judge.norm == 2 and self.judge.grid.mantissa_bits is None and self.bits <= _FITTED_BITS
        return (self._fit if is_fitted else self._close_in)(rung_P, point_P, refits)

    # ---- which rung ------------------------------------------------------------------------------------------------

    def _best_on_chart(self) -> tuple[Tensor, Tensor | None]:
        best: tuple[Tensor, ...] | None = None
        for rungs in (self.rungs[i : i + COLUMNS] for i in range(0, len(self.rungs), COLUMNS)):
            rung_J = torch.tensor(rungs, dtype=torch.float32, device=self.raw_P.device)
            chart = plain_chart(
                self.judge.grid,
                self.judge.norm,
                tuple(self._ratio(rung_J).tolist()),
                affine=self.point_P is not None,
                device=str(self.raw_P.device),
            )
            for point_P in (None,) if self.point_P is None else (self.point_P, *self._other_points(self.point_P)):
                index_P, error_P = chart.least(self.positions, self.raw_P, point_P)
                tried = (error_P, rung_J[index_P], *(() if point_P is None else (point_P,)))
                if best is not None:
                    is_better_P = error_P < best[0]
                    tried = tuple(torch.where(is_better_P, *pair) for pair in zip(tried, best, strict=True))
                best = tried
        assert best is not None
        return best[1], best[2] if len(best) > 2 else None

    def _best_measured(self) -> tuple[Tensor, Tensor]:
        """The same for affine formats that have too many zero points for a chart."""
        assert self.point_P is not None
        rung_J1 = torch.tensor(self.rungs, dtype=torch.float32, device=self.raw_P.device).unsqueeze(1)
        rung_P, point_P, error_P = self._least(rung_J1.expand(-1, len(self.raw_P)), self.point_P)
        around_J1 = torch.tensor([-1.0, 0.0, 1.0], device=rung_P.device).unsqueeze(1)
        for other_P in self._other_points(self.point_P):
            tried = self._least(rung_P + around_J1, other_P)
            is_better_P = tried[2] < error_P
            rung_P, point_P, error_P = (
                torch.where(is_better_P, *pair) for pair in zip(tried, (rung_P, point_P, error_P), strict=True)
            )
        return rung_P, point_P

    def _least(self, rung_JP: Tensor, point_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        judged = self._judged(rung_JP, point_P)
        error_P, index_P = judged.most_KP.min(dim=0)
        return rung_JP.gather(0, index_P.unsqueeze(0))[0], point_P, error_P

    def _other_points(self, point_P: Tensor) -> Iterator[Tensor]:
        """Neighbouring zero points, or all if there are but four."""
        grid = self.judge.grid
        if grid.high - grid.low == 3:
            for other in (1, 2, 3):
                yield (point_P + other - grid.low).remainder(4) + grid.low
            return
        for other in (-1, 1, -2, 2) if self.positions.is_weighted else (-1, 1):
            yield (point_P + other).clamp(grid.low, grid.high)

    # ---- from there on ---------------------------------------------------------------------------------------------

    def _fit(self, rung_P: Tensor, point_P: Tensor | None, refits: int) -> Found:
        """The best scale for the codes that the rung gives, and for those that this one gives, and so on.

        What they lose is measured: as `sum(w x x) - A * A / B` it would be a small difference of large numbers, and
        their last bits would decide.
        """
        point_1P = None if point_P is None else point_P.unsqueeze(0)
        scales = [self.minmax.scale_P]
        scale_P = self._scale_at(rung_P)
        for _ in range(1 + refits):
            products_1P, squares_1P = self.judge.scores(self.positions, scale_P.unsqueeze(0), point_1P)
            fitted_P = torch.where(squares_1P[0] > 0, products_1P[0] / squares_1P[0], 0.0).float()
            scale_P = torch.where(fitted_P > 0, self.stored(fitted_P), self.minmax.scale_P)
            scales.append(scale_P)
        points_KP = None
        if point_P is not None and self.minmax.point_P is not None:
            points_KP = torch.stack([self.minmax.point_P, *[point_P] * (len(scales) - 1)])
        judged = self.judge.judge(self.positions, torch.stack(scales), points_KP)
        index_P, error_P = torch.zeros_like(scale_P, dtype=torch.int64), judged.most_KP[0]
        for k, tried_P in enumerate(judged.most_KP[1:], start=1):
            is_better_P = tried_P < error_P * (1 - _TIE)
            index_P, error_P = torch.where(is_better_P, k, index_P), torch.where(is_better_P, tried_P, error_P)
        return _found_at(judged, index_P)

    def _close_in(self, rung_P: Tensor, point_P: Tensor | None, refits: int) -> Found:
        """Try scales on both sides, each time three times as close."""
        tried = [self._judged_with_minmax(rung_P, point_P)]
        error_P = tried[0].most_KP[1]
        for refit in range(refits):
            away = 3.0 ** -(refit + 1)
            around_2P = torch.stack([rung_P - away, rung_P + away])
            tried.append(self._judged(around_2P, point_P))
            least_P, index_P = tried[-1].most_KP.min(dim=0)
            rung_P = torch.where(least_P < error_P, around_2P.gather(0, index_P.unsqueeze(0))[0], rung_P)
            error_P = torch.minimum(least_P, error_P)
        # Bounds are close enough to choose among rungs; against min-max the choice must stand exactly.
        every = Judged.joined(tried)
        index_P = every.most_KP.min(dim=0).indices
        last = every.at(torch.stack([torch.zeros_like(index_P), index_P]))
        return _found_at(last, self.judge.best(self.positions, last))

    # ---- scales and what they lose -----------------------------------------------------------------------------------

    def _judged_with_minmax(self, rung_P: Tensor, point_P: Tensor | None) -> Judged:
        """What min-max loses, and what a rung does."""
        scale_2P = torch.stack([self.minmax.scale_P, self.stored(self._scale_at(rung_P))])
        points_2P = None
        if point_P is not None and self.minmax.point_P is not None:
            points_2P = torch.stack([self.minmax.point_P, point_P])
        return self.judge.judge(self.positions, scale_2P, points_2P, outside=self._outside)

    def _judged(self, rung_JP: Tensor, point_P: Tensor | None) -> Judged:
        point_JP = None if point_P is None else point_P.expand_as(rung_JP)
        scale_JP = self.stored(self._scale_at(rung_JP))
        return self.judge.judge(self.positions, scale_JP, point_JP, outside=self._outside)

    @property
    def _outside(self) -> float:
        """How many steps values may lie outside the range of the smallest scale that is ever tried."""
        if self.positions.is_weighted:
            return math.inf
        grid, last = self.judge.grid, max(self.rungs) + 2
        if grid.mantissa_bits is not None:
            return (grid.high - grid.low) / 2 * (math.pow(2, last * self.step) - 1)
        reach = (grid.high - grid.low) * (1 + last * self.step)
        if self.point_P is not None:
            return reach - (grid.high - grid.low) + 3  # zero points are tried that are 3 away
        return reach / 2 - min(grid.high, -grid.low)

    def _scale_at(self, rung: Tensor) -> Tensor:
        return self.raw_P * self._ratio(rung)

    def _ratio(self, rung: Tensor) -> Tensor:
        if self.judge.grid.mantissa_bits is None:
            # Rungs below 0 have larger scales, down to half of the inverse.
            return (1 + rung * self.step).clamp_(min=0.5).reciprocal_()
        return torch.exp(rung * (-self.step * math.log(2)))


def _loud_range(positions: Positions) -> tuple[Tensor, Tensor]:
    """The range of the elements that are not silent, and 0."""
    lo_P, hi_P = torch.zeros_like(positions.lo_P), torch.zeros_like(positions.hi_P)
    least_P1 = (positions.total_weight() / positions.num_elements * _SILENT).unsqueeze(1)
    for block in positions:
        assert block.weights_PE is not None
        loud_PE = torch.where(block.weights_PE > least_P1, block.x_PE, 0.0)
        lo_P, hi_P = torch.minimum(lo_P, loud_PE.amin(dim=1)), torch.maximum(hi_P, loud_PE.amax(dim=1))
    return lo_P, hi_P


def _found_at(judged: Judged, index_P: Tensor) -> Found:
    index_1P, points_KP = index_P.unsqueeze(0), judged.zero_point_KP
    point_P = None if points_KP is None else points_KP.gather(0, index_1P)[0]
    return Found(judged.scale_KP.gather(0, index_1P)[0], point_P)


def _is_rough(positions: Positions) -> bool:
    """Whether the error goes up and down from one scale to the next."""
    return positions.is_weighted or positions.group_size <= _FEW


def _either(chosen_P: Tensor, this_P: Tensor | None, other_P: Tensor | None) -> Tensor | None:
    return None if this_P is None or other_P is None else torch.where(chosen_P, this_P, other_P)
