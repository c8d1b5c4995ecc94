"""Judging scales: what each of several would lose at each position, and which loses least.

Scales are what would really be stored, in the units of their position. Where the norm is fractional, a short polynomial
(curves.py) gives bounds first, and the power itself is computed only where bounds overlap: the winner is the one that
measuring everything exactly would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from scalewright.numerics import native
from scalewright.numerics.blocks import Block, Positions
from scalewright.numerics.charts import ErrorChart
from scalewright.numerics.curves import Curve, power_curve
from scalewright.numerics.grids import Grid
from scalewright.numerics.measure import abs_power_, is_quick_norm

# K candidates, J of them in a batch; P positions and E elements in one block; M pairs of a position and a candidate.

_WORTH_A_CURVE = 2e-2  # bounds that are wider leave too many candidates in the race
_WORTH_BOUNDS = 32  # elements of a position: of fewer the powers are compiled loops' work for less than bounds cost
BATCH = 8  # candidates that are judged at a time


@dataclass(frozen=True)
class Judged:
    """Scales (in units of their position, with zero points unless all are 0) and bounds of their errors."""

    scale_KP: Tensor
    zero_point_KP: Tensor | None
    least_KP: Tensor
    most_KP: Tensor

    @property
    def is_exact(self) -> bool:
        """Whether the bounds are the error itself."""
        return self.least_KP is self.most_KP

    def at(self, index_JP: Tensor) -> Judged:
        """Some of the candidates, others at each position."""
        least_JP = self.least_KP.gather(0, index_JP)
        return Judged(
            self.scale_KP.gather(0, index_JP),
            None if self.zero_point_KP is None else self.zero_point_KP.gather(0, index_JP),
            least_JP,
            least_JP if self.is_exact else self.most_KP.gather(0, index_JP),
        )

    @staticmethod
    def joined(batches: list[Judged]) -> Judged:
        """All candidates of some batches, in order."""
        if len(batches) == 1:
            return batches[0]
        points = [each.zero_point_KP for each in batches if each.zero_point_KP is not None]
        least_KP = torch.cat([each.least_KP for each in batches])
        return Judged(
            torch.cat([each.scale_KP for each in batches]),
            torch.cat(points) if points else None,
            least_KP,
            least_KP if all(each.is_exact for each in batches) else torch.cat([each.most_KP for each in batches]),
        )


@dataclass(frozen=True)
class Judge:
    """Measures `sum of w * |dequantised - x| ** norm` for a grid, in units of each position."""

    grid: Grid
    norm: float

    def judge(
        self,
        positions: Positions,
        scale_JP: Tensor,
        zero_point_JP: Tensor | None = None,
        *,
        outside: float | None = None,
    ) -> Judged:
        """Measure some scales, exactly or within bounds, whichever is the shorter way to the best.

        Bounds depend on how far values lie outside the ranges, and so on which positions are worked on together.
        `best` does not, for it goes back to the values; who compares bounds himself gives the largest distance that
        there may be, in steps, as `outside`.
        """
        curves = self._curves_for(positions, scale_JP, zero_point_JP, outside)
        sums_JP = self._sums(positions, scale_JP, zero_point_JP, curves)
        if curves is None:
            error_JP = self._in_units(sums_JP, scale_JP)
            return Judged(scale_JP, zero_point_JP, error_JP, error_JP)
        tolerance_J1 = torch.tensor([[each.tolerance] for each in curves], dtype=torch.float32, device=sums_JP.device)
        slack_JP = tolerance_J1 * (curves[0].floor * positions.total_weight())
        power_JP = self._power_of_scales(scale_JP)
        least_JP, most_JP = (sums_JP - slack_JP) / (1 + tolerance_J1), (sums_JP + slack_JP) / (1 - tolerance_J1)
        return Judged(scale_JP, zero_point_JP, least_JP * power_JP, most_JP * power_JP)

    def survey(self, positions: Positions, base_P: Tensor, chart: ErrorChart, scale_JP: Tensor) -> Judged:
        """Measure scales that are in the ratios of a chart to `base_P`, within bounds, all at once."""
        least_JP, most_JP = chart.bounds(positions, base_P, scale_JP)
        power_P = self._power_of_scales(base_P)
        return Judged(scale_JP, None, least_JP * power_P, most_JP * power_P)

    def least(self, positions: Positions, scale_KP: Tensor) -> tuple[Tensor, Tensor]:
        """The index of the symmetric scale that loses least at each position, the first of equals, and its error.

        The error is what it loses at most, where only bounds were needed to tell.
        """
        if positions.is_one_segment and positions.group_size < _WORTH_BOUNDS:
            (block,) = positions
            if native.serves(block.x_PE):
                return native.least(
                    block.x_PE, block.weights_PE, scale_KP, None, grid=self.grid, norm=self.norm, largest=self._largest
                )
        batches = [self.judge(positions, scale_JP) for scale_JP in torch.split(scale_KP, BATCH)]
        judged = Judged.joined(batches)
        return self.best(positions, judged), judged.most_KP.amin(dim=0)

    def best(self, positions: Positions, judged: Judged) -> Tensor:
        """The index of the candidate that loses least at each position; the first of equals."""
        if judged.is_exact:
            return _first_least(judged.least_KP)
        first_P = _first_least(judged.most_KP)
        contends_KP = judged.least_KP <= judged.most_KP.amin(dim=0)
        unsure_M = (contends_KP.sum(dim=0) > 1).nonzero()[:, 0]
        if len(unsure_M) == 0:
            return first_P
        # The likely winner is measured first: few can beat it then.
        error_KP = torch.full_like(judged.least_KP, inf, dtype=torch.float64)
        self._measure(positions, judged, first_P[unsure_M], unsure_M, error_KP)
        error_P = error_KP.amin(dim=0)
        contends_KP &= (judged.least_KP <= error_P) & (error_P < inf) & (error_KP == inf)
        k_M, p_M = contends_KP.nonzero(as_tuple=True)
        self._measure(positions, judged, k_M, p_M, error_KP)
        return torch.where(error_P < inf, _first_least(error_KP), first_P)

    def _measure(self, positions: Positions, judged: Judged, k_M: Tensor, p_M: Tensor, out_KP: Tensor) -> None:
        """Write what some candidates lose exactly."""
        if len(k_M) == 0:
            return
        for some_k, some_p in zip(*(torch.split(each, len(positions.unit_P)) for each in (k_M, p_M)), strict=True):
            points = None if judged.zero_point_KP is None else judged.zero_point_KP[some_k, some_p]
            error = self.errors(positions.at(some_p), judged.scale_KP[some_k, some_p], points)
            out_KP[some_k, some_p] = error.double()

    def errors(self, positions: Positions, scale_P: Tensor, zero_point_P: Tensor | None = None) -> Tensor:
        """What the scales lose, exactly, float64 [P]."""
        point_1P = None if zero_point_P is None else zero_point_P.unsqueeze(0)
        return self._in_units(self._sums(positions, scale_P.unsqueeze(0), point_1P)[0], scale_P)

    def scores(
        self, positions: Positions, scale_JP: Tensor, zero_point_JP: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`A = sum of w * x * q` and `B = sum of w * q * q` of the codes q that each scale gives, [J, P].

        For these codes the best scale is A / B, and it loses `sum of w * x * x - A * A / B`: for norm 2, and integers.
        """
        sums_2JP: Tensor | None = None
        for block in positions:
            part_2JP = self._scores_of(block, scale_JP, zero_point_JP)
            sums_2JP = part_2JP if sums_2JP is None else sums_2JP.double() + part_2JP
        assert sums_2JP is not None
        return sums_2JP[0], sums_2JP[1]

    def _scores_of(self, block: Block, scale_JP: Tensor, zero_point_JP: Tensor | None) -> Tensor:
        if native.serves(block.x_PE):
            return native.scores(
                block.x_PE, block.weights_PE, scale_JP, zero_point_JP, grid=self.grid, segment=block.segment
            )
        codes, spare, weighted = block.scratch
        if block.weights_PE is None:
            weighted = block.x_PE
        else:
            torch.mul(block.x_PE, block.weights_PE, out=weighted)
        inverse_JP1 = scale_JP.reciprocal().unsqueeze(-1)
        part_2JP = torch.empty((2, *scale_JP.shape), dtype=block.sum_dtype, device=scale_JP.device)
        for j, (inverse_P1, product_P, square_P) in enumerate(zip(inverse_JP1, *part_2JP, strict=True)):
            torch.mul(block.x_PE, inverse_P1, out=codes).round_()
            if zero_point_JP is None:
                codes.clamp_(self.grid.low, self.grid.high)
            else:
                torch.maximum(codes, (self.grid.low - zero_point_JP[j]).unsqueeze(1), out=codes)
                torch.minimum(codes, (self.grid.high - zero_point_JP[j]).unsqueeze(1), out=codes)
            block.sum(torch.mul(weighted, codes, out=spare), product_P)
            self._sum_of_squares(block, codes, square_P)
        return part_2JP

    def clipped(self, positions: Positions, scale_P: Tensor, *, thorough: bool) -> Tensor:
        """What values outside the range of symmetric scales lose at least, [P]; no smaller scale can lose less.

        All of them if `thorough`, else only the largest of each position (which must not have weights), at no cost.
        """
        high_P, low_P = scale_P * self.grid.high, scale_P * self.grid.low
        if not thorough:
            assert not positions.is_weighted
            largest_P = torch.maximum(positions.hi_P - high_P, low_P - positions.lo_P).clamp_(min=0)
            return abs_power_(largest_P.double(), self.norm)
        total_P = torch.zeros_like(scale_P, dtype=torch.float64)
        for block in positions:
            outside, inside, _ = block.scratch
            torch.minimum(block.x_PE, high_P.unsqueeze(1), out=inside)
            torch.maximum(inside, low_P.unsqueeze(1), out=inside)
            torch.sub(block.x_PE, inside, out=outside)
            total_P += self._summed(block, outside, inside, None)
        return total_P

    def _sums(
        self,
        positions: Positions,
        scale_JP: Tensor,
        zero_point_JP: Tensor | None,
        curves: list[Curve] | None = None,
    ) -> Tensor:
        """Sums of |u| ** norm, or of its curves, in steps of each scale: [J, P]."""
        sums_JP: Tensor | None = None
        for block in positions:
            part_JP = self._sums_of(block, scale_JP, zero_point_JP, curves)
            sums_JP = part_JP if sums_JP is None else sums_JP.double() + part_JP
        assert sums_JP is not None
        return sums_JP

    def _sums_of(
        self, block: Block, scale_JP: Tensor, zero_point_JP: Tensor | None, curves: list[Curve] | None
    ) -> Tensor:
        if native.serves(block.x_PE):
            return native.errors(
                block.x_PE,
                block.weights_PE,
                scale_JP,
                zero_point_JP,
                grid=self.grid,
                norm=self.norm,
                segment=block.segment,
                curves_JT=None if curves is None else torch.stack([each.coefficients for each in curves]),
            )
        steps, codes, spare = block.scratch
        part_JP = torch.empty(scale_JP.shape, dtype=block.sum_dtype, device=scale_JP.device)
        for j, (scale_P, part_P) in enumerate(zip(scale_JP, part_JP, strict=True)):
            _into_steps(block, scale_P, None if zero_point_JP is None else zero_point_JP[j], out=steps)
            steps.sub_(self.grid.round_into(steps, codes, spare))
            self._summed(block, steps, codes, None if curves is None else curves[j], part_P)
        return part_JP

    def _summed(
        self, block: Block, u_PE: Tensor, scratch: Tensor, curve: Curve | None, out_P: Tensor | None = None
    ) -> Tensor:
        if self.norm == 2:
            return self._sum_of_squares(block, u_PE, out_P)
        if curve is None:
            abs_power_(u_PE, self.norm, scratch=scratch)
        else:
            curve.evaluate_(u_PE, scratch)
        if block.weights_PE is not None:
            u_PE.mul_(block.weights_PE)
        return block.sum(u_PE, out_P)

    @staticmethod
    def _sum_of_squares(block: Block, values_PE: Tensor, out_P: Tensor | None = None) -> Tensor:
        """The weighted sum of squares; overwrites the values."""
        if block.weights_PE is None:
            return block.sum_of_squares(values_PE, out_P)
        return block.sum(values_PE.mul_(values_PE).mul_(block.weights_PE), out_P)

    def _in_units(self, sums: Tensor, scale: Tensor) -> Tensor:
        # Far outside a tiny range, infinite powers are multiplied with 0: NaN, which would win every comparison.
        error = sums * self._power_of_scales(scale)
        return error.nan_to_num_(nan=inf, posinf=inf)

    def _power_of_scales(self, scale: Tensor) -> Tensor:
        # Only positions that are too small for the format, and lose everything, have scales so large in their units.
        return abs_power_(scale.clamp(max=self._largest), self.norm)

    @property
    def _largest(self) -> float:
        return float(1e37 ** (1 / max(self.norm, 1.0)))

    def _curves_for(
        self, positions: Positions, scale_JP: Tensor, zero_point_JP: Tensor | None, outside: float | None
    ) -> list[Curve] | None:
        """A curve for each scale that covers what its range leaves out; None where the power itself is better."""
        if is_quick_norm(self.norm):
            return None
        if outside is not None:
            curve = self._curve_for(outside)
            return None if curve is None else [curve] * len(scale_JP)
        if not positions.is_whole:
            return None
        inverse_JP = scale_JP.reciprocal()
        above_JP, below_JP = positions.hi_P * inverse_JP, positions.lo_P * inverse_JP
        if zero_point_JP is not None:
            above_JP, below_JP = above_JP + zero_point_JP, below_JP + zero_point_JP
        outside_J = torch.maximum(above_JP.amax(dim=1) - self.grid.high, self.grid.low - below_JP.amin(dim=1))
        curves = []
        for each in outside_J.tolist():
            curve = self._curve_for(each)
            if curve is None:
                return None
            curves.append(curve)
        return curves

    def _curve_for(self, outside: float) -> Curve | None:
        largest = self.grid.widest_gap / 2
        if outside > 64 * self.grid.widest_gap:
            return None
        while largest < outside * (1 + 1e-6):
            largest *= 1.25
        curve = power_curve(self.norm, largest=largest, typical=self.grid.smallest / 2)
        return curve if curve.tolerance < _WORTH_A_CURVE else None


def _first_least(error_KP: Tensor) -> Tensor:
    # Twenty times faster than argmin(dim=0).
    index_P: Tensor = error_KP.min(dim=0).indices
    return index_P


def _into_steps(block: Block, scale_P: Tensor, zero_point_P: Tensor | None, *, out: Tensor) -> Tensor:
    inverse_P1 = scale_P.reciprocal().unsqueeze(1)
    if zero_point_P is None:
        return torch.mul(block.x_PE, inverse_P1, out=out)
    return torch.mul(block.x_PE, inverse_P1, out=out).add_(zero_point_P.unsqueeze(1))  # faster than addcmul
