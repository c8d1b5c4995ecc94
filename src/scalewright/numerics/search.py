"""THE range search: every observer that chooses a range calls it.

A candidate is a pair of factors on the least and the largest value. It is judged by the error of what would really
be stored: the scale as compressed-tensors computes it, rounded to the dtype that carries it, under the real global
scale, with the integer zero point. Errors are fp32 sums inside a block and float64 between blocks.

Each position is measured in units of a power of two near its own largest value, so neither 1e-30 nor 1e38 leaves the
range of fp32 when a difference is raised to a power, and scaling a tensor by a power of two scales the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.grids import Grid, grid_of
from scalewright.numerics.measure import summed_error
from scalewright.numerics.scales import effective_scale, stored_qparams

# N observations, Q qparam positions (B of them in one block), G elements that share one scale, K candidates.

BLOCK_ELEMENTS = 1 << 18  # fp32 values that are worked on at a time: about what stays in cache


@dataclass(frozen=True)
class RangeSearch:
    """The best range at each position, the candidate that gave it, its error, and how many candidates were measured.

    `error_Q` is the sum over N and G of `w * |d| ** norm`, in units of `unit_Q ** norm`.
    """

    lo_Q: Tensor
    hi_Q: Tensor
    best_Q: Tensor
    error_Q: Tensor
    unit_Q: Tensor
    num_tried_Q: Tensor


def shrink_candidates(*, maxshrink: float, grid: float, expand: float = 1.0) -> Tensor:
    """`expand * (1 - i / grid)` for i below `maxshrink * grid`, for both ends alike; 1 (min-max itself) comes first.

    [K, 2] factors. Min-max is always among them, so that a search can never be worse than none.
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
    only grows as ranges shrink, exceeds its best error: the answer is that of the full search, in less time.
    """
    unit_Q = _power_of_two_below(torch.maximum(lo_Q.abs(), hi_Q.abs()))
    candidates_K2 = candidates_K2.to(x_NQG.device)
    if weights_NQG is not None:
        weights_NQG = weights_NQG.expand(x_NQG.shape)
    parts = [
        _search_block(
            x_NQG[:, rows],
            lo_Q[rows],
            hi_Q[rows],
            unit_Q[rows],
            args,
            candidates_K2,
            norm=norm,
            weights_NBG=None if weights_NQG is None else weights_NQG[:, rows],
            global_scale=global_scale,
            dtype=dtype,
            patience=patience,
            block_elements=block_elements,
        )
        for rows in _row_blocks(x_NQG, block_elements)
    ]
    best_Q, error_Q, num_tried_Q = (torch.cat(column) for column in zip(*parts, strict=True))
    factors_Q2 = candidates_K2[best_Q]
    lo_Q, hi_Q = _times(lo_Q, factors_Q2[..., 0]), _times(hi_Q, factors_Q2[..., 1])
    return RangeSearch(lo_Q, hi_Q, best_Q, error_Q, unit_Q, num_tried_Q)


def _search_block(
    x_NBG: Tensor,
    lo_B: Tensor,
    hi_B: Tensor,
    unit_B: Tensor,
    args: QuantizationArgs,
    candidates_K2: Tensor,
    *,
    norm: float,
    weights_NBG: Tensor | None,
    global_scale: Tensor | None,
    dtype: torch.dtype,
    patience: int,
    block_elements: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Index of the best candidate, its error and the number of candidates tried, for each position of a block."""
    grid = grid_of(args)
    chunks = list(_element_chunks(x_NBG, block_elements))
    units = [_in_units(x_NBG[chunk], unit_B) for chunk in chunks] if len(chunks) == 1 else None
    best_B = torch.zeros(lo_B.shape, dtype=torch.int64, device=x_NBG.device)
    least_B = torch.full(lo_B.shape, torch.inf, dtype=torch.float64, device=x_NBG.device)
    stale_B = torch.zeros_like(best_B)
    tried_B = torch.zeros_like(best_B)
    done_B = torch.zeros(lo_B.shape, dtype=torch.bool, device=x_NBG.device)
    for index, (lo_factor, hi_factor) in enumerate(candidates_K2):
        lo, hi = _times(lo_B, lo_factor), _times(hi_B, hi_factor)
        stored, zero_point_B = stored_qparams(lo, hi, args, global_scale=global_scale, dtype=dtype)
        scale_B = effective_scale(stored, global_scale) / unit_B
        zero_point = None if args.symmetric else zero_point_B
        error_B = torch.zeros_like(least_B)
        for number, chunk in enumerate(chunks):
            x = units[number] if units is not None else _in_units(x_NBG[chunk], unit_B)
            weights = None if weights_NBG is None else weights_NBG[chunk]
            error_B += summed_error(x, scale_B, zero_point, grid, norm=norm, weights_NQG=weights).sum(dim=0)
        tried_B += ~done_B
        is_better = (error_B < least_B) & ~done_B
        best_B = torch.where(is_better, index, best_B)
        least_B = torch.where(is_better, error_B, least_B)
        stale_B = torch.where(is_better, 0, stale_B + 1)
        if patience and args.symmetric and weights_NBG is None:
            hopeless_B = _clipped_loss(lo_B, hi_B, unit_B, scale_B, grid, norm) > least_B
            done_B |= hopeless_B & (stale_B >= patience)
            if bool(done_B.all()):
                break
    return best_B, least_B, tried_B


def _clipped_loss(lo_B: Tensor, hi_B: Tensor, unit_B: Tensor, scale_B: Tensor, grid: Grid, norm: float) -> Tensor:
    """What the largest and the least value lose by lying outside the range, at least: a lower bound of the error."""
    above = (hi_B / unit_B - scale_B * grid.high).clamp(min=0)
    below = (scale_B * grid.low - lo_B / unit_B).clamp(min=0)
    return torch.maximum(above, below).double().pow(norm)


def _times(end: Tensor, factor: Tensor) -> Tensor:
    """`end * factor`, saturating: factors above 1 could leave fp32."""
    largest = torch.finfo(torch.float32).max
    return (end * factor).clamp(-largest, largest)


def _in_units(x: Tensor, unit_B: Tensor) -> Tensor:
    return x.float() / unit_B.unsqueeze(-1)


def _power_of_two_below(absmax: Tensor) -> Tensor:
    """The largest power of two that is no larger; the smallest normal number of fp32 for zero and denormals."""
    _, exponent = torch.frexp(absmax.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.ldexp(torch.ones_like(absmax), exponent - 1)


def _row_blocks(x_NQG: Tensor, block_elements: int) -> Iterator[slice]:
    """Slices of the first qparam dimension that hold about `block_elements` elements each, one row at least."""
    per_row = x_NQG[:, 0].numel()
    step = max(1, block_elements // max(1, per_row))
    for start in range(0, x_NQG.shape[1], step):
        yield slice(start, start + step)


def _element_chunks(x_NBG: Tensor, block_elements: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a block too large for the cache along N, and along G where one observation is too large."""
    everything = (slice(None),) * (x_NBG.ndim - 2)
    num_positions, group_size = x_NBG[0, ..., 0].numel(), x_NBG.shape[-1]
    across = max(1, min(group_size, block_elements // max(1, num_positions)))
    along = max(1, block_elements // (num_positions * across))
    for n in range(0, x_NBG.shape[0], along):
        for g in range(0, group_size, across):
            yield (slice(n, n + along), *everything, slice(g, g + across))
