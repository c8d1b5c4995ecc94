"""A lossless, mergeable record of bf16 values: how often each of the 65,536 codes was seen.

Counting codes keeps everything that order-free statistics need. Records add up over batches and ranks, their size
does not depend on how many values were seen, and maximum, percentile, entropy and squared error are all computed
afterwards. Values of other dtypes are recorded as the nearest bf16, which is at most 0.4 % off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalewright.numerics import native
from scalewright.numerics.grids import Grid
from scalewright.numerics.measure import quantize_dequantize_

# N observations, Q qparam positions, G elements that share one scale, C codes in order of their value.

NUM_CODES = 1 << 16
_BLOCK = 1 << 18  # values that are counted at a time
_INFINITY = 0x7F80  # its code; the largest number has the code before
_TABLE = 1 << 19  # cuts times bins that are worked on at a time


def count_codes(x_NQG: Tensor, weight_NQ: Tensor | None = None) -> Tensor:
    """How often each bf16 code stands at each position: int64 of shape (*qparam_shape, 65536), in the codes' order.

    With weights (float64, not negative) a value counts as much as the weight of its observation says, in float64.
    """
    shape_Q = x_NQG.shape[1:-1]
    if native.can_count(x_NQG):
        return native.counts_by_value(x_NQG, weight_NQ).reshape(*shape_Q, NUM_CODES)
    counts = torch.zeros(
        shape_Q.numel() * NUM_CODES, device=x_NQG.device, dtype=torch.int64 if weight_NQ is None else torch.float64
    )
    blocks = _blocks(x_NQG)
    room = _Room.for_values(x_NQG[blocks[0]], is_weighted=weight_NQ is not None)
    for some in blocks:
        counts += _counts_of(x_NQG[some], None if weight_NQ is None else weight_NQ[some], room)
    if x_NQG.dtype == torch.float32:  # the topmost fp32 numbers round to Inf, and belong to the largest number
        by_code = counts.view(-1, NUM_CODES)
        for infinite in (_INFINITY, _INFINITY | 0x8000):
            by_code[:, infinite - 1] += by_code[:, infinite]
            by_code[:, infinite] = 0
    positive, negative = counts.reshape(*shape_Q, NUM_CODES).chunk(2, dim=-1)
    return torch.cat([negative.flip(-1), positive], dim=-1)  # as `_codes_in_order`, in a tenth of the time


def evening_weights(x_NQG: Tensor) -> Tensor:
    """Weights in inverse proportion to the strength (root mean square) of each observation, float64 [N, *Q].

    They have 12 significant bits, so float64 adds them up exactly, in any order, unless strengths differ by more than
    2 ** 20 among a million observations. Observations of zeros weigh 1.
    """
    if native.can_count(x_NQG):
        norm_NQ = native.squares_of_rows(x_NQG).sqrt_()
    else:
        norm_NQ = torch.linalg.vector_norm(x_NQG, dim=-1, dtype=torch.float64)  # a third of the time of double()
    strength_NQ = norm_NQ.div_(x_NQG.shape[-1] ** 0.5)
    mantissa_NQ, exponent_NQ = torch.frexp(torch.where(strength_NQ > 0, strength_NQ, 1.0).reciprocal())
    weight_NQ: Tensor = torch.ldexp((mantissa_NQ * 4096).round_(), exponent_NQ - 12)
    return weight_NQ


def _blocks(x_NQG: Tensor) -> list[slice]:
    """Runs of observations that are worked on at a time, so that copies of them stay small."""
    rows = max(1, _BLOCK // max(1, x_NQG[0].numel()))
    return [slice(start, start + rows) for start in range(0, len(x_NQG), rows)]


@dataclass(frozen=True)
class _Room:
    """Memory that is used again for each block: new memory takes longer to get than counting takes."""

    rounded: Tensor
    codes: Tensor
    weights: Tensor | None

    @classmethod
    def for_values(cls, x_NQG: Tensor, *, is_weighted: bool) -> _Room:
        """Room for a block of this size."""
        flat = x_NQG.new_empty(x_NQG.numel(), dtype=torch.bfloat16)
        weights = torch.empty_like(flat, dtype=torch.float64) if is_weighted else None
        return cls(flat, torch.empty_like(flat, dtype=torch.int32), weights)


def _counts_of(x_NQG: Tensor, weight_NQ: Tensor | None, room: _Room) -> Tensor:
    """How often each code stands at each position, flat, by the codes' bits."""
    shape_Q, count = x_NQG.shape[1:-1], x_NQG.numel()
    rounded, codes = room.rounded[:count], room.codes[:count]
    rounded.view(x_NQG.shape).copy_(x_NQG)
    codes.copy_(rounded.view(torch.uint16))
    if shape_Q.numel() > 1:
        offsets = torch.arange(shape_Q.numel(), device=codes.device, dtype=torch.int32) * NUM_CODES
        codes.view(x_NQG.shape).add_(offsets.reshape(*shape_Q, 1))
    weights = None
    if weight_NQ is not None and room.weights is not None:
        weights = room.weights[:count]
        weights.view(x_NQG.shape).copy_(weight_NQ.unsqueeze(-1))
    return torch.bincount(codes, weights, minlength=shape_Q.numel() * NUM_CODES)


def code_values(device: torch.device | str = "cpu") -> Tensor:
    """The value of each code, fp32 [65536], ascending; the codes of NaN and Inf, never counted, stand as zeros."""
    bits = _codes_in_order(device)
    values = torch.where(bits > 0x7FFF, bits - NUM_CODES, bits).to(torch.int16).view(torch.bfloat16).float()
    return torch.where(torch.isfinite(values), values, torch.zeros_like(values))


def range_holding(counts_C: Tensor, values_C: Tensor, percent: float, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The narrowest recorded range that holds `percent` of all values of one position.

    Symmetric: `[-a, a]` for the least a that holds them. Otherwise as many values are left out below as above.
    Both ends are values that were seen.
    """
    total = counts_C.sum().double()
    if symmetric:
        magnitudes, order = values_C.abs().sort(stable=True)
        high = _first_reaching(counts_C[order], magnitudes, total * (percent / 100))
        return -high, high
    outside = total * ((100 - percent) / 200)
    high = _first_reaching(counts_C, values_C, total - outside)
    low = -_first_reaching(counts_C.flip(0), -values_C.flip(0), total - outside)
    return low, high


def entropy_threshold(counts_C: Tensor, values_C: Tensor, grid: Grid, *, num_bins: int) -> Tensor:
    """The magnitude to clip at so that the quantised distribution of |x| diverges least from the true one.

    For each cut i: P is the first i bins of |x| with everything beyond added to the last, Q the same bins without
    the tail, merged into the levels of the grid and spread evenly over the bins that are not empty; the cut with
    the least KL(P || Q) wins. A bin whose middle lies on the border of two levels belongs to the lower; where P has
    mass and Q has none, Q counts as 1e-12. Adding the tail to Q as well would make the shortest cut, where each bin is
    its own level and P equals Q, win always. (Migacz, 8-bit inference with TensorRT, 2017.)
    """
    is_seen = counts_C > 0
    magnitudes = values_C[is_seen].abs().double()
    absmax = magnitudes.max()
    if absmax == 0:
        return absmax.float()
    bin_of = (magnitudes / absmax * num_bins).long().clamp(max=num_bins - 1)
    mass = torch.zeros(num_bins, dtype=torch.float64, device=counts_C.device)
    mass.scatter_add_(0, bin_of, counts_C[is_seen].double())
    edges = _level_edges(grid).to(mass.device)
    num_levels = len(edges) - 1
    first = min(num_levels, num_bins)
    cuts = torch.arange(first, num_bins + 1, device=mass.device)
    divergence = torch.cat([_divergence(mass, some, edges) for some in torch.split(cuts, max(1, _TABLE // num_bins))])
    best = cuts[torch.argmin(divergence)]
    return (absmax * best / num_bins).float()


def noise_under(counts_C: Tensor, values_C: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> float:
    """The sum of squared errors of all recorded values under one scale, in float64."""
    is_seen = counts_C > 0
    values = values_C[is_seen].float()
    rounded = quantize_dequantize_(values.clone(), scale.float().reshape(()), zero_point.float().reshape(()), grid)
    return float((rounded.double() - values.double()).square_().mul_(counts_C[is_seen]).sum())


def squares_of(counts_C: Tensor, values_C: Tensor) -> float:
    """The sum of squares of all recorded values, in float64."""
    return float((values_C.double().square() * counts_C).sum())


def _divergence(mass: Tensor, cuts: Tensor, edges: Tensor) -> Tensor:
    """KL(P || Q) for each cut; rows are cuts, columns are bins."""
    num_bins, num_levels = len(mass), len(edges) - 1
    position = torch.arange(num_bins, device=mass.device, dtype=torch.float64)
    inside = position < cuts.unsqueeze(1)
    kept = torch.where(inside, mass, 0.0)
    p = kept.clone()
    p[torch.arange(len(cuts), device=mass.device), cuts - 1] += mass.sum() - kept.sum(dim=1)
    centre = ((position + 0.5) / cuts.unsqueeze(1)).clamp(max=1.0)
    level = (torch.searchsorted(edges, centre) - 1).clamp(0, num_levels - 1)
    level_mass = torch.zeros(len(cuts), num_levels, dtype=torch.float64, device=mass.device)
    level_mass.scatter_add_(1, level, kept)
    occupied = (kept > 0).double()
    level_bins = torch.zeros_like(level_mass).scatter_add_(1, level, occupied)
    q = occupied * (level_mass / level_bins.clamp(min=1)).gather(1, level)
    p = p / p.sum(dim=1, keepdim=True)
    q = q / q.sum(dim=1, keepdim=True).clamp(min=1e-300)
    terms = p * (p.clamp(min=1e-300).log() - q.clamp(min=1e-12).log())
    return torch.where(p > 0, terms, 0.0).sum(dim=1)


def _level_edges(grid: Grid) -> Tensor:
    """Where the levels of a grid's positive half begin and end, as fractions of the clipping magnitude, float64.

    Integers have 2^(b-1) levels of equal width; floats have levels that meet half-way between their numbers.
    """
    if grid.mantissa_bits is None:
        num_levels = int(grid.high) + 1
        return torch.linspace(0, 1, num_levels + 1, dtype=torch.float64, device="cpu")
    numbers = grid.numbers().double()
    numbers = numbers[numbers >= 0]
    middles = (numbers[1:] + numbers[:-1]) / 2
    return torch.cat([middles.new_zeros(1), middles / grid.high, middles.new_ones(1)])


def _first_reaching(counts: Tensor, ascending: Tensor, amount: Tensor) -> Tensor:
    """The first recorded value at which the running count reaches `amount`."""
    reached = (counts.cumsum(0).double() >= amount - 1e-6) & (counts > 0)
    return ascending[reached.int().argmax()]


def _codes_in_order(device: torch.device | str) -> Tensor:
    """All bf16 bit patterns by ascending value: the negative ones backwards, then the positive ones."""
    negative = torch.arange(0xFFFF, 0x7FFF, -1, device=device)
    return torch.cat([negative, torch.arange(0x8000, device=device)])
