"""The least and the largest value at each qparam position, about as quickly as torch can read them.

This file looks at values only: what shares a position is `layout`'s business, what a NaN means the observers'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# N observations, Q qparam positions (one or more dimensions), G elements that share one scale, P = N * Q.

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_SHORT = 64  # torch takes the elements of shorter rows of int16 one by one, and has to be given fp32
_LONG = 1024  # from here on numpy, which spends 30 ns on starting a row, is the quicker
_PIECE_BYTES = 1 << 22  # rows that are copied are copied so many bytes at a time, and the copies stay in cache


def min_max(x_NQG: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value at each qparam position, in fp32: two tensors of qparam_shape.

    NaN comes through, so the results are finite just when all of `x_NQG` is.
    """
    qparam_shape = x_NQG.shape[1:-1]
    is_one_row = qparam_shape.numel() == 1
    row_size = x_NQG.numel() if is_one_row else x_NQG.shape[-1]
    # amin and amax read long rows of fp32 as quickly as torch.sum does, in a pass each. Short ones (4 M values in
    # groups of 16: 13 ms, here 6) and 16-bit floats (channels 2.4 ms, here .4; groups of 128 5.7 ms, here 1) are slow.
    if x_NQG.device.type == "cpu" and x_NQG.dtype in _BITS and (x_NQG.itemsize == 2 or row_size < _SHORT):
        lo_P, hi_P = _min_max_of_rows(x_NQG.reshape(-1, row_size))
        lo_NQ, hi_NQ = lo_P.reshape(-1, *qparam_shape), hi_P.reshape(-1, *qparam_shape)
    elif is_one_row:
        # torch.aminmax is quick over everything, but with a dim twenty times slower than amin and amax one by one.
        lo_NQ, hi_NQ = (each.float().reshape(1, *qparam_shape) for each in torch.aminmax(x_NQG))
    else:
        lo_NQ, hi_NQ = x_NQG.amin(dim=-1).float(), x_NQG.amax(dim=-1).float()
    # Of a single observation there is nothing to reduce, but torch would take .2 ms for groups of 16.
    return (lo_NQ[0], hi_NQ[0]) if len(lo_NQ) == 1 else (lo_NQ.amin(dim=0), hi_NQ.amax(dim=0))


def is_finite(x: Tensor) -> bool:
    """Whether `x`, which is not empty, has neither NaN nor Inf."""
    return all(math.isfinite(each) for each in torch.aminmax(x))  # torch.isfinite takes ten times as long


def _min_max_of_rows(x_PG: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each row in fp32, found by comparing bits as integers.

    A float is a sign and a magnitude. So the largest float is the largest signed integer, if one float has no sign;
    and the least float is the largest unsigned integer, if one float has a sign.
    """
    rows = max(1, _PIECE_BYTES // (4 * x_PG.shape[1]))
    if rows < len(x_PG) and x_PG.shape[1] < _LONG:
        parts = [_min_max_of_rows(x_PG[start : start + rows]) for start in range(0, len(x_PG), rows)]
        lo_P, hi_P = (torch.cat(each) for each in zip(*parts, strict=True))
        return lo_P, hi_P
    if x_PG.shape[1] < _SHORT:
        x_PG = x_PG.float()  # bf16 in groups of 32: 2.3 ms, and 5 without
    dtype, bits = x_PG.dtype, _BITS[x_PG.dtype]
    hi_P = x_PG.view(bits).amax(dim=-1).view(dtype).float()
    if x_PG.shape[1] < _LONG:  # flipping the sign makes signed order of unsigned
        lo_P = x_PG.neg().view(bits).amax(dim=-1).view(dtype).float().neg()
    else:  # torch cannot compare unsigned integers, but numpy can: bf16 channels .4 ms, and .7 with the copy
        lo_P = torch.from_numpy(x_PG.view(bits).numpy().view("uint16").max(axis=-1).view("int16")).view(dtype).float()
    if float(lo_P.amax()) <= 0 <= float(hi_P.amin()):
        return lo_P, hi_P

    # A row whose values have one sign gave one end twice, and the other is its least signed integer; or it has a NaN.
    # Gathering a row takes .1 us, so it pays where they are few, as among groups of 16.
    rows_W = (~((lo_P <= 0) & (hi_P >= 0))).nonzero().flatten()
    wrong = rows_W if len(rows_W) < len(x_PG) // 64 else slice(None)
    lo_W, hi_W, other_W = lo_P[wrong], hi_P[wrong], x_PG[wrong].view(bits).amin(dim=-1).view(dtype).float()
    nan_W = torch.where(lo_W.isnan() | hi_W.isnan(), torch.nan, 0.0)
    lo_P[wrong] = torch.where(lo_W > 0, other_W, lo_W) + nan_W
    hi_P[wrong] = torch.where(hi_W < 0, other_W, hi_W) + nan_W
    return lo_P, hi_P
