"""What every observer should find, computed again in float64 and in the plainest way, to judge the real thing by.

It imports numpy and nothing else: neither the package under test nor compressed-tensors. Nothing here is fast, blocked
or clever. Every candidate of a search is measured on every value, each rule is written down as it is told in words.

    P  positions that have a scale of their own, E  values that share one, K  candidates, B  bins of a histogram

Rounding to few bits has jumps, and fp32 arithmetic may end up on the other side of one. So qparams can be asked for
with a `nudge`: the same formula with its argument moved by that share, just before it is rounded. What was computed
in fp32 must lie between the answers for a small nudge down and a small nudge up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# mantissa bits, exponent of the least normal number, largest number
FLOATS = {
    "fp32": (23, -126, float(np.finfo(np.float32).max)),
    "bf16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "fp16": (10, -14, 65504.0),
    "e4m3": (3, -6, 448.0),
    "e2m3": (3, 0, 7.5),
    "e2m1": (1, 0, 6.0),
}

# A few fp32 roundings (2^-24 each) one after the other.
FP32_NOISE = 2.0**-21

STRATEGIES = ("tensor", "channel", "group", "tensor_group", "token", "block", "attn_head")
FITTING = {
    "weight": {"tensor", "channel", "group", "tensor_group", "block"},
    "input": {"tensor", "group", "tensor_group", "token"},
    "output": {"tensor", "group", "tensor_group", "token"},
    "q": {"tensor", "attn_head"},
    "k": {"tensor", "attn_head"},
    "v": {"tensor", "attn_head"},
}


@dataclass(frozen=True)
class Format:
    """A number format: `grid` is "int" or one of FLOATS; `scales` is "own" (the tensor's dtype), "e4m3" or "e8m0"."""

    name: str
    grid: str
    bits: int
    symmetric: bool = True
    scales: str = "own"
    group_size: int = 16

    @property
    def low(self) -> float:
        return -(2.0 ** (self.bits - 1)) if self.grid == "int" else -FLOATS[self.grid][2]

    @property
    def high(self) -> float:
        return 2.0 ** (self.bits - 1) - 1 if self.grid == "int" else FLOATS[self.grid][2]


# ---- rounding -------------------------------------------------------------------------------------------------------


def round_to_float(x: Array, kind: str) -> Array:
    """The nearest number of a float format, half to even, saturating."""
    mantissa_bits, least_exponent, largest = FLOATS[kind]
    _, exponent = np.frexp(x)  # |x| = m * 2^exponent with m in [1/2, 1)
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, least_exponent) - mantissa_bits)
    return np.clip(np.rint(x / spacing) * spacing, -largest, largest)


def round_to_grid(x: Array, fmt: Format) -> Array:
    """The nearest number that the format has, half to even, saturating."""
    if fmt.grid == "int":
        return np.clip(np.rint(x), fmt.low, fmt.high)
    return round_to_float(x, fmt.grid)


# ---- layout ---------------------------------------------------------------------------------------------------------


def cut(x: Array, base_name: str, strategy: str, *, group_size: int, block: tuple[int, int]) -> Array:
    """The values that share a scale, side by side: [*qparam_shape, E]."""
    if strategy == "tensor":
        return x.reshape(1, -1)
    if base_name == "weight":
        rows, columns = x.shape
        if strategy == "channel":
            return x.reshape(rows, 1, columns)
        if strategy == "block":
            return _cut_blocks(x, *block)
        return np.stack([x[:, start : start + group_size] for start in range(0, columns, group_size)], axis=1)
    if strategy == "attn_head":
        return np.stack([x[:, head].reshape(1, 1, -1) for head in range(x.shape[1])])
    if strategy == "token":
        return np.stack([x[:, place].reshape(-1) for place in range(x.shape[1])])
    starts = range(0, x.shape[-1], group_size)
    return np.stack([x[..., start : start + group_size].reshape(-1) for start in starts])


def _cut_blocks(x: Array, height: int, width: int) -> Array:
    rows, columns = math.ceil(x.shape[0] / height), math.ceil(x.shape[1] / width)
    blocks = np.zeros((rows, columns, height * width))
    for r in range(rows):
        for c in range(columns):
            values = np.zeros((height, width))
            inside = x[r * height : (r + 1) * height, c * width : (c + 1) * width]
            values[: inside.shape[0], : inside.shape[1]] = inside
            blocks[r, c] = values.reshape(-1)
    return blocks


# ---- qparams --------------------------------------------------------------------------------------------------------


def global_scale(absmax: float) -> float:
    """The divisor that brings the largest scale of a tensor of e2m1 numbers to the end of e4m3."""
    return float(round_to_float(np.asarray(448.0 * 6.0 / absmax), "fp32"))


def qparams(
    lo: Array,
    hi: Array,
    fmt: Format,
    dtype: str,
    divisor: float | None = None,
    *,
    nudge_scale: float = 0.0,
    nudge_zero_point: float = 0.0,
) -> tuple[Array, Array]:
    """Scale and zero point, as stored, of ranges that are not all zero; `divisor` is the global scale."""
    lo, hi = np.minimum(lo, 0), np.maximum(hi, 0)
    absmax = np.maximum(-lo, hi)
    assert (absmax > 0).all()
    if fmt.scales == "e8m0":
        # The power of two that puts the largest value between 3.5 and 7, where 6 is the largest number.
        _, exponent = np.frexp(absmax * (1 + nudge_scale) / 3.5)
        return np.ldexp(1.0, exponent - 1), np.zeros_like(lo)
    exact = absmax / ((2.0**fmt.bits - 1) / 2 if fmt.grid == "int" else fmt.high)
    zero_point = np.zeros_like(lo)
    if not fmt.symmetric:
        exact = (hi - lo) / (fmt.high - fmt.low)
        place = fmt.low - lo / exact + nudge_zero_point * 2.0**fmt.bits
        zero_point = np.clip(np.rint(place), fmt.low, fmt.high)
    exact = exact * (1 + nudge_scale) * (1.0 if divisor is None else divisor)
    if fmt.scales == "e4m3":
        return np.maximum(round_to_float(exact, "e4m3"), 2.0**-9), zero_point
    mantissa_bits, least_exponent, _ = FLOATS[dtype]
    return np.maximum(round_to_float(exact, dtype), 2.0 ** (least_exponent - mantissa_bits)), zero_point


def qparams_bounds(
    lo: Array, hi: Array, fmt: Format, dtype: str, divisor: float | None = None
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The least and the largest scale, and the same of zero points, that fp32 arithmetic may arrive at."""
    down = qparams(lo, hi, fmt, dtype, divisor, nudge_scale=-FP32_NOISE, nudge_zero_point=-FP32_NOISE)
    up = qparams(lo, hi, fmt, dtype, divisor, nudge_scale=FP32_NOISE, nudge_zero_point=FP32_NOISE)
    return (down[0], up[0]), (down[1], up[1])


# ---- what is lost ---------------------------------------------------------------------------------------------------


def dequantized(x: Array, scale: Array, zero_point: Array, fmt: Format, divisor: float | None = None) -> Array:
    """What `x` [..., E] is read back as; scale and zero point have the shape of all but the last dimension."""
    scale, zero_point = scale[..., None] / (1.0 if divisor is None else divisor), zero_point[..., None]
    return (round_to_grid(x / scale + zero_point, fmt) - zero_point) * scale


def error(
    x: Array,
    scale: Array,
    zero_point: Array,
    fmt: Format,
    divisor: float | None = None,
    *,
    norm: float,
    weights: Array | float = 1.0,
) -> Array:
    """`sum w * |dequantised - x| ^ norm` over the last dimension."""
    return (weights * np.abs(dequantized(x, scale, zero_point, fmt, divisor) - x) ** norm).sum(axis=-1)


def least_error_of_codes(
    x: Array, fmt: Format, divisor: float | None = None, *, norm: float, weights: Array | float = 1.0
) -> Array:
    """The least error at each position of all scales that the format has: every number of e4m3, or every power of two.

    For formats whose scales are numbers of a short format themselves.
    """
    powers = np.ldexp(1.0, np.arange(-127, 128))
    scales = {"e4m3": positive_numbers("e4m3")[1:], "e8m0": powers}[fmt.scales]
    least = np.full(x.shape[:-1], np.inf)
    for scale in scales:
        tried = error(x, np.full(x.shape[:-1], scale), np.zeros(()), fmt, divisor, norm=norm, weights=weights)
        least = np.minimum(least, tried)
    return least


def least_error_of_scan(
    x: Array,
    fmt: Format,
    dtype: str,
    divisor: float | None = None,
    *,
    norm: float,
    weights: Array | float = 1.0,
    num_scales: int = 400,
) -> Array:
    """The least error at each position of many stored scales, from 0.2 to 1.5 times that of min-max.

    Affine formats try each of them under the zero point of min-max and its two neighbours.
    """
    lo, hi = x.min(axis=-1), x.max(axis=-1)
    _, middle = qparams(lo, hi, fmt, dtype, divisor)
    least = np.full(lo.shape, np.inf)
    for factor in np.linspace(0.2, 1.5, num_scales):
        scale, _ = qparams(lo * factor, hi * factor, fmt, dtype, divisor)
        for step in (0,) if fmt.symmetric else (-1, 0, 1):
            zero_point = np.clip(middle + step, fmt.low, fmt.high)
            least = np.minimum(least, error(x, scale, zero_point, fmt, divisor, norm=norm, weights=weights))
    return least


def shrink_factors(*, maxshrink: float, grid: float, expand: float = 1.0) -> Array:
    """Min-max itself, and `expand * (1 - i / grid)` for every whole i below `maxshrink * grid`, at least for i = 0."""
    num_steps = max(1, math.floor(maxshrink * grid + 1e-9))
    return np.array([1.0] + [expand * (1 - i / grid) for i in range(num_steps)])


def candidate_errors(
    x: Array,
    lo: Array,
    hi: Array,
    factors_K2: Array,
    fmt: Format,
    dtype: str,
    divisor: float | None = None,
    *,
    norm: float,
    weights: Array | float = 1.0,
) -> Array:
    """[K, *qparam_shape]: the error of each candidate, by what would be stored for it.

    Where it hangs on fp32 noise what is stored, the larger error of the two stands: nobody can promise the smaller.
    """
    shape = (-1,) + (1,) * lo.ndim
    lo_K, hi_K = lo * factors_K2[:, 0].reshape(shape), hi * factors_K2[:, 1].reshape(shape)
    # fp32 scales have no jumps worth the name.
    nudge_scale = FP32_NOISE if fmt.scales != "own" or dtype != "fp32" else 0.0
    sides = [
        qparams(lo_K, hi_K, fmt, dtype, divisor, nudge_scale=sign * nudge_scale, nudge_zero_point=sign * FP32_NOISE)
        for sign in (-1, 1)
    ]
    if all(np.array_equal(down, up) for down, up in zip(*sides, strict=True)):
        sides = sides[:1]
    return np.max([error(x, *side, fmt, divisor, norm=norm, weights=weights) for side in sides], axis=0)


def least_error_by_turns(
    x: Array, fmt: Format, dtype: str, factors: Array, *, norm: float, weights: Array | float = 1.0
) -> float:
    """The error of the best range [f * least, g * largest] of the values `x` [E] that this walk arrives at.

    First f = g, the best of all factors. Affine formats then move the lower end alone, the upper end alone, and both
    once more, each time to the best of all factors.
    """
    lo, hi = x.min(), x.max()

    def best_of(pairs_K2: Array) -> tuple[Array, float]:
        errors = candidate_errors(x, lo, hi, pairs_K2, fmt, dtype, norm=norm, weights=weights)
        return pairs_K2[errors.argmin()], float(errors.min())

    pair, least = best_of(np.stack([factors, factors], axis=1))
    for end in () if fmt.symmetric else (0, 1, 0, 1):
        pairs = np.tile(pair, (len(factors), 1))
        pairs[:, end] = factors
        pair, least = best_of(pairs)
    return least


def evening_weights(x: Array, base_name: str, strategy: str) -> Array:
    """A weight for each value, in inverse proportion to the root mean square of its token; a weight is one token.

    For attention heads with scales of their own, each head of a token counts as a token. Weights have 12 significant
    bits.
    """
    if base_name == "weight":
        axes: tuple[int, ...] = (0, 1)
    elif base_name in ("input", "output") or strategy == "attn_head":
        axes = (-1,)
    else:
        axes = (1, 3)
    strength = np.sqrt((x**2).mean(axis=axes, keepdims=True))
    mantissa, exponent = np.frexp(1 / strength)
    return np.broadcast_to(np.ldexp(np.rint(mantissa * 4096), exponent - 12), x.shape)


# ---- rules on the distribution of all values ------------------------------------------------------------------------


def percentile_range(x: Array, percent: float, *, symmetric: bool) -> tuple[float, float]:
    """The narrowest range of seen values that holds `percent` of the values `x` [E].

    Symmetric: by magnitude. Otherwise each end by itself leaves out at most half of what may be left out.
    """
    share = Fraction(str(percent)) / 100
    if symmetric:
        high = np.sort(np.abs(x))[math.ceil(share * x.size) - 1]
        return -high, high
    kept = math.ceil(x.size - (1 - share) / 2 * x.size)
    ascending = np.sort(x)
    return ascending[x.size - kept], ascending[kept - 1]


def divergence_of_cuts(x: Array, fmt: Format, num_bins: int) -> dict[int, float]:
    """For each number of bins of |x| that is kept: KL(P || Q) of the distribution and the quantised distribution.

    P is the kept bins, with all that lies beyond added to the last of them. Q is the kept bins without it, where
    all bins of a level share their values evenly, those that are empty excepted. A bin belongs to the level that its
    middle lies in, and to the lower one if it lies on the border. Where Q has nothing it counts as 1e-12.
    """
    magnitude = np.abs(x)
    place = np.minimum(np.floor(magnitude * num_bins / magnitude.max()), num_bins - 1).astype(int)
    mass_B = np.bincount(place, minlength=num_bins).astype(float)
    borders = _level_borders(fmt)
    divergence = {}
    for num_kept in range(min(len(borders) - 1, num_bins), num_bins + 1):
        kept = mass_B[:num_kept]
        p = kept.copy()
        p[-1] += mass_B[num_kept:].sum()
        middles = (np.arange(num_kept) + 0.5) / num_kept
        level = np.searchsorted(borders[1:-1], middles, side="left")
        in_level = np.bincount(level, weights=kept)
        bins_in_level = np.bincount(level, weights=kept > 0)
        q = np.where(kept > 0, in_level[level] / np.maximum(bins_in_level, 1)[level], 0.0)
        p, q = p / p.sum(), q / max(q.sum(), 1e-300)
        has_mass = p > 0
        divergence[num_kept] = float((p[has_mass] * np.log(p[has_mass] / np.maximum(q[has_mass], 1e-12))).sum())
    return divergence


def _level_borders(fmt: Format) -> Array:
    """Where the levels of |x| meet, from 0 to 1: equal widths for integers, half-way between numbers for floats."""
    if fmt.grid == "int":
        num_levels = int(fmt.high) + 1
        return np.arange(num_levels + 1) / num_levels
    numbers = positive_numbers(fmt.grid)
    return np.concatenate([[0.0], (numbers[1:] + numbers[:-1]) / 2 / numbers[-1], [1.0]])


def positive_numbers(kind: str) -> Array:
    """Zero and all positive numbers of a small float format, ascending, from the meaning of its bits."""
    mantissa_bits, least_exponent, largest = FLOATS[kind]
    steps = 2**mantissa_bits
    subnormal = [m / steps * 2.0**least_exponent for m in range(steps)]
    normal = [
        (1 + m / steps) * 2.0**exponent
        for exponent in range(least_exponent, math.floor(math.log2(largest)) + 1)
        for m in range(steps)
    ]
    return np.array([number for number in subnormal + normal if number <= largest])
