"""The exact optimum: the scale, and the zero point, that lose least of all that a format can hold.

It is what searches are measured by, in tests and in reports, and too slow to be one. It knows the plain and the
weighted square and no other norm, computes in float64, and rounds no scale to fp32, bf16 or fp16: those count as
continuous. The scales of e4m3 and e8m0 are few enough to try them all.

Continuous scales, by breakpoints. Each element has a code, the nearest number of the grid to `x / s`. With `t = 1 / s`
growing from 0, all codes start at 0, and that of x leaves the number n for the next one, m, as t passes
`(n + m) / 2 / |x|`. Between two such events the codes are fixed, and with `A = sum w x q` and `B = sum w q^2` the best
scale for them is `A / B` and its error `sum w x^2 - A^2 / B`. So sort the events, cumulate A and B, and take the
largest `A^2 / B`. A zero point, or a negative scale, only changes how far the codes reach on either side of zero: the
events are sorted once, and those out of reach do not count.

Which optimum is found is certain up to the rounding of the cumulated sums, a few 1e-14 of `sum w x^2`. The error that
is returned is summed again from the differences at the returned scale, so that one is always attained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from scalewright.errors import ImportanceError, LayoutError, NonFiniteError
from scalewright.numerics.grids import E4M3, grid_of

# N observations, Q qparam positions, G elements that share one scale; P positions in one piece, E = N * G elements of
# each; L positive numbers of the grid ("levels"), V = E * L events of one position.

_PIECE = 1 << 19  # events held at a time: about 40 MB. One position is never cut.
_E8M0_LOW, _E8M0_HIGH = 2.0**-127, 2.0**127


@dataclass(frozen=True)
class Optimum:
    """The best qparams of each position, in float64, and what they lose.

    `scale_Q` is the effective scale, what a code is multiplied with; `zero_point_Q` is 0 for symmetric formats;
    `error_Q` is the sum over N and G of `w * (x - scale * (q - zero_point)) ** 2`.
    """

    scale_Q: Tensor
    zero_point_Q: Tensor
    error_Q: Tensor


def exact_optimum(
    x_NQG: Tensor,
    args: QuantizationArgs,
    *,
    weights_NQG: Tensor | None = None,
    global_scale: Tensor | None = None,
    signed: bool = False,
) -> Optimum:
    """The qparams with the least (weighted) squared error of all that `args` allows, at each position.

    `weights_NQG` (>= 0) broadcasts against `x_NQG`, and `global_scale`, which divides the scales of e4m3, against Q.
    Affine formats try every integer zero point of the grid. `signed` allows negative scales, which matter where the
    grid reaches further on one side; an affine format gains nothing by them.

    Of equal optima: the zero point nearest to 0, the negative of two; then the positive scale, then the largest one.
    (Of e4m3 and e8m0 the largest scale first.) Where the sums are not exact, their rounding decides between equals.
    A position of zeros (or of no weight, or without elements) has the stored scale 1 and the zero point 0.

    Memory: about 80 bytes for each event of a position, and there are N * G * L of them.
    """
    ladder = _ladder_of(args, signed).to(x_NQG.device)
    by_position = _ByPosition(x_NQG, weights_NQG)
    is_continuous = args.scale_dtype not in (torch.float8_e4m3fn, torch.uint8)
    global_Q = torch.ones(by_position.shape, dtype=torch.float64, device=x_NQG.device)
    if global_scale is not None and args.scale_dtype == torch.float8_e4m3fn:
        is_one = global_scale.numel() == 1
        global_Q = (global_scale.reshape(()) if is_one else global_scale).to(global_Q).expand(by_position.shape)
    global_P = global_Q.reshape(-1)

    cost = by_position.num_elements * (len(ladder.midpoints()) if is_continuous else 1)
    num_positions = max(1, _PIECE // max(1, cost))
    scales, zero_points, errors = [], [], []
    for start in range(0, len(global_P), num_positions):
        part = slice(start, min(start + num_positions, len(global_P)))
        piece = by_position.piece(part, ladder)
        if is_continuous:
            best_P, reach_P = piece.best_of_all_scales()
        elif args.scale_dtype == torch.uint8:
            best_P, reach_P = piece.best_of(_e8m0(piece.unit_P))
        else:
            best_P, reach_P = piece.best_of(_e4m3(global_P[part], piece.unit_P))
        error_P = piece.errors(best_P, *(ladder.table(name)[reach_P].unsqueeze(-1) for name in ("above", "below")))
        scale_P = ladder.table("sign")[reach_P] * best_P * piece.unit_P
        scales.append(torch.where(piece.is_zero_P, global_P[part].reciprocal(), scale_P))
        zero_points.append(ladder.table("zero_point")[reach_P].double().masked_fill_(piece.is_zero_P, 0.0))
        errors.append(error_P * piece.unit_P.square() * piece.weight_unit_P)
    nothing = global_P[:0]
    return Optimum(*(torch.cat([nothing, *each]).reshape(by_position.shape) for each in (scales, zero_points, errors)))


@dataclass(frozen=True)
class _Reach:
    """How many levels the codes (less the zero point) may climb for x above zero, and for x below it."""

    above: int
    below: int
    zero_point: int = 0
    sign: int = 1


@dataclass(frozen=True)
class _Ladder:
    """The numbers that codes climb, away from zero on either side, and the ways to use them, the preferred first."""

    numbers_L1: Tensor
    """0 and the L levels, ascending, float64."""
    reaches: tuple[_Reach, ...]

    def midpoints(self) -> Tensor:
        """Where x, in steps of the scale, leaves a number for the next."""
        return (self.numbers_L1[:-1] + self.numbers_L1[1:]) / 2

    def table(self, name: str) -> Tensor:
        """One field of all reaches."""
        return torch.tensor([getattr(reach, name) for reach in self.reaches], device=self.numbers_L1.device)

    def to(self, device: torch.device) -> _Ladder:
        return replace(self, numbers_L1=self.numbers_L1.to(device))


def _ladder_of(args: QuantizationArgs, signed: bool) -> _Ladder:
    grid = grid_of(args)
    if args.type == QuantizationType.FLOAT:
        if not args.symmetric:
            raise LayoutError(f"{grid.name} has no zero points. Set symmetric to true, or use type int.")
        numbers = grid.numbers().double()
        numbers = numbers[numbers >= 0]
        return _Ladder(numbers, (_Reach(len(numbers) - 1, len(numbers) - 1),))
    low, high = round(grid.low), round(grid.high)
    reaches: tuple[_Reach, ...] = (_Reach(high, -low),)
    if not args.symmetric:
        # A negative scale with the zero point z reaches as far as a positive one with -1 - z.
        points = sorted(range(low, high + 1), key=lambda z: (abs(z), z))
        reaches = tuple(_Reach(high - z, z - low, zero_point=z) for z in points)
    elif signed:
        reaches = (*reaches, _Reach(-low, high, sign=-1))
    num_levels = max(max(reach.above, reach.below) for reach in reaches)
    return _Ladder(torch.arange(num_levels + 1, dtype=torch.float64, device="cpu"), reaches)


class _ByPosition:
    """A tensor and its weights, of which some positions at a time are copied to float64."""

    def __init__(self, x_NQG: Tensor, weights_NQG: Tensor | None) -> None:
        if x_NQG.ndim < 2:
            raise LayoutError(
                f"{x_NQG.ndim} dimensions are too few. Give (num_observations, *qparam_shape, group_size)."
            )
        if x_NQG.shape[0] * x_NQG.shape[-1] == 0:
            x_NQG, weights_NQG = x_NQG.new_zeros(1, *x_NQG.shape[1:-1], 1), None
        self.shape = x_NQG.shape[1:-1]
        self.num_elements = x_NQG.shape[0] * x_NQG.shape[-1]
        self.x_QNG = x_NQG.detach().movedim(0, -2)
        self.weights_QNG = None if weights_NQG is None else weights_NQG.detach().expand(x_NQG.shape).movedim(0, -2)

    def piece(self, part: slice, ladder: _Ladder) -> _Piece:
        """The positions `part` of the flattened Q."""
        x_PE = self._copy(self.x_QNG, part)
        if not bool(torch.isfinite(x_PE).all()):
            raise NonFiniteError("NaN or Inf has no optimal scale. Leave such elements out, or give them as 0.")
        weights_PE = torch.ones_like(x_PE) if self.weights_QNG is None else self._copy(self.weights_QNG, part)
        if not bool(torch.isfinite(weights_PE).all() & (weights_PE >= 0).all()):
            raise ImportanceError("weights must be finite and not negative. Mend them, or leave them out.")
        # What is zero, or weighs nothing, has no events and no say in the units.
        counts_PE = (x_PE != 0) & (weights_PE != 0)
        x_PE, weights_PE = x_PE * counts_PE, weights_PE * counts_PE
        unit_P, weight_unit_P = _power_of_two_below(x_PE.abs()), _power_of_two_below(weights_PE)
        return _Piece(
            magnitude_PE=x_PE.abs().div_(unit_P.unsqueeze(-1)),
            is_above_PE=x_PE > 0,
            weights_PE=weights_PE.div_(weight_unit_P.unsqueeze(-1)),
            unit_P=unit_P,
            weight_unit_P=weight_unit_P,
            is_zero_P=~counts_PE.any(dim=-1),
            ladder=ladder,
        )

    def _copy(self, values_QNG: Tensor, part: slice) -> Tensor:
        # Indexing, and not reshaping: broadcast weights would be copied whole.
        if self.shape:
            indices = torch.arange(part.start, part.stop, device=values_QNG.device)
            values_QNG = values_QNG[torch.unravel_index(indices, self.shape)]
        return values_QNG.double().reshape(part.stop - part.start, self.num_elements)


@dataclass(frozen=True)
class _Piece:
    """Some positions, in units of a power of two near the largest element and the largest weight of each.

    Scales are positive here, and in these units too.
    """

    magnitude_PE: Tensor
    is_above_PE: Tensor
    weights_PE: Tensor
    unit_P: Tensor
    weight_unit_P: Tensor
    is_zero_P: Tensor
    ladder: _Ladder

    def errors(self, scale_P: Tensor, above: Tensor | int, below: Tensor | int) -> Tensor:
        """`sum of w * d ** 2` at `scale_P`, each x being coded as the nearest number that is in reach. [P]"""
        scale_P1 = scale_P.unsqueeze(-1)
        code_PE = torch.bucketize(self.magnitude_PE / scale_P1, self.ladder.midpoints())
        code_PE = torch.minimum(code_PE, torch.where(self.is_above_PE, above, below))
        d_PE = self.magnitude_PE - scale_P1 * self.ladder.numbers_L1[code_PE]
        return d_PE.square_().mul_(self.weights_PE).sum(dim=-1)

    def best_of_all_scales(self) -> tuple[Tensor, Tensor]:
        """The best scale, and the index of its reach: by the breakpoints. [P], [P]"""
        numbers_L1 = self.ladder.numbers_L1
        order_PV = _order((self.ladder.midpoints() / self.magnitude_PE.unsqueeze(-1)).flatten(1))

        def events(of_elements_PE: Tensor, of_levels_L: Tensor) -> Tensor:
            return (of_elements_PE.unsqueeze(-1) * of_levels_L).flatten(1).gather(1, order_PV)

        a_PV = events(self.weights_PE * self.magnitude_PE, numbers_L1.diff())
        b_PV = events(self.weights_PE, numbers_L1.square().diff())
        side_PE = torch.where(self.is_above_PE, 1, -1).short()
        climb_PV = events(side_PE, torch.arange(1, len(numbers_L1), dtype=torch.int16, device=side_PE.device))

        score_P = torch.full_like(self.unit_P, -1.0)
        scale_P = torch.ones_like(score_P)
        reach_P = torch.zeros_like(score_P, dtype=torch.long)
        for index, reach in enumerate(self.ladder.reaches):
            is_in_reach_PV = (climb_PV <= reach.above) & (climb_PV >= -reach.below)
            sum_a_PV = (a_PV * is_in_reach_PV).cumsum_(dim=-1)
            sum_b_PV = (b_PV * is_in_reach_PV).cumsum_(dim=-1)
            scores_PV = sum_a_PV.square().div_(sum_b_PV).masked_fill_(sum_b_PV == 0, 0.0)  # before the first event
            highest_P, at_P = scores_PV.max(dim=-1)
            is_better_P = highest_P > score_P
            a_P, b_P = (sums_PV.gather(1, at_P.unsqueeze(-1)).squeeze(-1) for sums_PV in (sum_a_PV, sum_b_PV))
            refit_P = torch.where(b_P > 0, a_P / b_P, 1.0)  # 1: nothing is in reach, so that every scale is as good
            scale_P = torch.where(is_better_P, refit_P, scale_P)
            reach_P = torch.where(is_better_P, index, reach_P)
            score_P = torch.where(is_better_P, highest_P, score_P)
        return scale_P, reach_P

    def best_of(self, descending_scales: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        """The best of the given scales [P], which descend, and the index of its reach: by trying them all. [P], [P]"""
        least_P = torch.full_like(self.unit_P, math.inf)
        best_P = torch.ones_like(least_P)
        reach_P = torch.zeros_like(least_P, dtype=torch.long)
        for scale_P in descending_scales:
            # What lies outside the range loses at least this much, and only more with every smaller scale.
            excess_PE = (self.magnitude_PE - scale_P.unsqueeze(-1) * self.ladder.numbers_L1[-1]).clamp_(min=0)
            if bool((excess_PE.square_().mul_(self.weights_PE).sum(dim=-1) >= least_P).all()):
                break
            for index, reach in enumerate(self.ladder.reaches):
                error_P = self.errors(scale_P, reach.above, reach.below)
                is_better_P = error_P < least_P
                best_P = torch.where(is_better_P, scale_P, best_P)
                reach_P = torch.where(is_better_P, index, reach_P)
                least_P = torch.where(is_better_P, error_P, least_P)
        return best_P, reach_P


def _order(values_PV: Tensor) -> Tensor:
    """The places of each row's values in ascending order. numpy takes a fifth of torch's time where it has them."""
    if values_PV.device.type != "cpu":
        return values_PV.argsort(dim=-1)
    return torch.from_numpy(np.argsort(values_PV.numpy(), axis=-1))


def _e4m3(global_P: Tensor, unit_P: Tensor) -> Iterator[Tensor]:
    """The 126 positive numbers of e4m3 under the global scale, descending, in units."""
    numbers = E4M3.numbers().double()
    for number in numbers[numbers > 0].flip(0).tolist():
        yield number / global_P / unit_P


def _e8m0(unit_P: Tensor) -> Iterator[Tensor]:
    """The powers of two that e8m0 has, descending, in units, without those that are too large to matter.

    Every grid holds 0 and 1, and twice any of its numbers below 1. So where all of x lies between -s and s, the scale
    2s offers nothing that s does not: the first to try is the power of two above the largest element.
    """
    first_P = (2 * unit_P).clamp_(_E8M0_LOW, _E8M0_HIGH)
    for halvings in range(255):
        yield (first_P * 2.0**-halvings).clamp_(min=_E8M0_LOW).div_(unit_P)


def _power_of_two_below(values_PE: Tensor) -> Tensor:
    """The largest power of two that is no larger than the largest of each row; 1 for a row of zeros. [P]"""
    largest_P = values_PE.amax(dim=-1)
    largest_P = largest_P.masked_fill(largest_P == 0, 1.0)
    mantissa_P, _ = torch.frexp(largest_P)
    return largest_P / (2 * mantissa_P)  # exact, where ldexp would go through fp32
