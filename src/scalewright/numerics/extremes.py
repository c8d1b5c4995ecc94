"""The least and the largest value at each qparam position, about as quickly as torch can read them.

This file looks at values only: what shares a position is `layout`'s business, what a NaN means the observers'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scalewright.numerics import native

# N observations, Q qparam positions (one or more dimensions), G elements that share one scale, P = N * Q.

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_SHORT = 64  # torch takes the elements of shorter rows of int16 one by one, and has to be given int32
_TINY = 32  # elements of rows that go one below the other where there are
_TALL = 16  # observations
_LONG = 1024  # from here on numpy, which spends 30 ns on starting a row, is the quicker
_CACHED = 1 << 23  # elements of 2 bytes that stay in a usual cache of the last level
_ROW = 1 << 12
_PIECE = 1 << 20  # elements that are looked at twice before going on, so that the second look finds them in cache


def min_max(x_NQG: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value at each qparam position, in fp32: two tensors of qparam_shape.

    NaN comes through, so the results are finite just when all of `x_NQG` is.
    """
    qparam_shape = x_NQG.shape[1:-1]
    is_one_row = qparam_shape.numel() == 1
    if native.serves(x_NQG):
        if is_one_row:
            # Everything may be one row, but rows are what threads share.
            lo_P, hi_P = native.min_max_of_rows(x_NQG, (x_NQG.numel() // _row_size(x_NQG.numel()),))
            return lo_P.amin().reshape(qparam_shape), hi_P.amax().reshape(qparam_shape)
        if x_NQG.shape[0] == 1:
            return native.min_max_of_rows(x_NQG, qparam_shape)
        lo_NQ, hi_NQ = native.min_max_of_rows(x_NQG, x_NQG.shape[:-1])
        return lo_NQ.amin(dim=0), hi_NQ.amax(dim=0)
    if len(x_NQG) >= _TALL and x_NQG.shape[-1] < _TINY and not is_one_row:
        # Down the observations first, which is quick: 512 tokens in groups of 16 .13 ms, and .58 group by group.
        return x_NQG.amin(dim=0).amin(dim=-1).float(), x_NQG.amax(dim=0).amax(dim=-1).float()
    row_size = x_NQG.numel() if is_one_row else x_NQG.shape[-1]
    # amin and amax read long rows of fp32 as quickly as torch.sum does, in a pass each. Short ones (4 M values in
    # groups of 16: 13 ms, here 5) and 16-bit floats (channels 2.4 ms, here .4; groups of 128 5.7 ms, here .9) are slow.
    if x_NQG.device.type == "cpu" and x_NQG.dtype in _BITS and (x_NQG.itemsize == 2 or row_size < _SHORT):
        # What is larger than the cache is cut into rows that are looked at twice while they are there.
        is_cut = is_one_row and row_size % _ROW == 0 and row_size > _CACHED
        lo_P, hi_P = _min_max_of_rows(x_NQG.reshape(-1, _ROW if is_cut else row_size))
        lo_NQ, hi_NQ = lo_P.reshape(-1, *qparam_shape), hi_P.reshape(-1, *qparam_shape)
    elif is_one_row:
        # torch.aminmax is quick over everything, but with a dim twenty times slower than amin and amax one by one.
        lo_NQ, hi_NQ = (each.float().reshape(1, *qparam_shape) for each in torch.aminmax(x_NQG))
    else:
        x_PG = x_NQG.reshape(-1, row_size)
        rows = (x_PG,) if x_PG.numel() <= _CACHED // 2 else torch.split(x_PG, max(1, _PIECE // row_size))
        lo_P, hi_P = (
            _joined(each).float() for each in zip(*((x.amin(dim=-1), x.amax(dim=-1)) for x in rows), strict=True)
        )
        lo_NQ, hi_NQ = lo_P.reshape(-1, *qparam_shape), hi_P.reshape(-1, *qparam_shape)
    # Of a single observation there is nothing to reduce, but torch would take .2 ms for groups of 16.
    return (lo_NQ[0], hi_NQ[0]) if len(lo_NQ) == 1 else (lo_NQ.amin(dim=0), hi_NQ.amax(dim=0))


def _row_size(size: int) -> int:
    """Of rows that so many values can be cut into: 4096 if that divides them, or 1024 at least; else all in one."""
    return next((row for row in (_ROW, _ROW // 2, _ROW // 4) if size % row == 0), size)


def absmax_of(x: Tensor) -> float:
    """The largest magnitude in `x`, which is not empty; NaN if there is one."""
    lo, hi = min_max(x.reshape(1, 1, -1))
    return float(torch.maximum(-lo, hi))


def are_finite_ends(lo_Q: Tensor, hi_Q: Tensor) -> bool:
    """Whether what `min_max` found has neither NaN nor Inf. No least value is larger than its largest."""
    return math.isfinite(lo_Q.amin()) and math.isfinite(hi_Q.amax())


def is_finite(x: Tensor) -> bool:
    """Whether `x`, which is not empty, has neither NaN nor Inf."""
    return all(math.isfinite(each) for each in torch.aminmax(x))  # torch.isfinite takes ten times as long


def _min_max_of_rows(x_PG: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each row in fp32, found by comparing bits as integers.

    A float is a sign and a magnitude. So the largest float is the largest signed integer, if one float has no sign;
    and the least float is the largest unsigned integer, if one float has a sign.
    """
    dtype, bits_PG = x_PG.dtype, x_PG.view(_BITS[x_PG.dtype])
    if x_PG.shape[1] < _LONG:
        lo_P, hi_P = _ends_of_short_rows(bits_PG)
    else:  # torch cannot compare unsigned integers, but numpy can: bf16 channels .4 ms, and .6 with a copy
        rows = len(bits_PG) if bits_PG.numel() <= _CACHED else max(1, _PIECE // bits_PG.shape[1])
        pieces = torch.split(bits_PG, rows)
        ends = [(torch.from_numpy(each.numpy().view("uint16").max(axis=-1)), each.amax(dim=-1)) for each in pieces]
        lo_P, hi_P = (_joined(each) for each in zip(*ends, strict=True))
    lo_P, hi_P = lo_P.view(dtype).float(), hi_P.view(dtype).float()
    if float(lo_P.amax()) <= 0 <= float(hi_P.amin()):
        return lo_P, hi_P

    # A row whose values have one sign gave one end twice, and the other is its least signed integer; or it has a NaN.
    # Gathering a row takes .1 us, so it pays where they are few, as among groups of 16.
    rows_W = (~((lo_P <= 0) & (hi_P >= 0))).nonzero().flatten()
    wrong = rows_W if len(rows_W) < len(x_PG) // 64 else slice(None)
    lo_W, hi_W, other_W = lo_P[wrong], hi_P[wrong], bits_PG[wrong].amin(dim=-1).view(dtype).float()
    nan_W = torch.where(lo_W.isnan() | hi_W.isnan(), torch.nan, 0.0)
    lo_P[wrong] = torch.where(lo_W > 0, other_W, lo_W) + nan_W
    hi_P[wrong] = torch.where(hi_W < 0, other_W, hi_W) + nan_W
    return lo_P, hi_P


def _ends_of_short_rows(bits_PG: Tensor) -> tuple[Tensor, Tensor]:
    """The largest unsigned and the largest signed integer of each row, through one small copy that is used again."""
    dtype = bits_PG.dtype
    is_widened = dtype == torch.int16 and bits_PG.shape[1] < _SHORT  # bf16 in groups of 32: 1.7 ms, and 6 without
    pieces = torch.split(bits_PG, max(1, _PIECE // bits_PG.shape[1]))
    copy_PG = torch.empty_like(pieces[0], dtype=torch.int32 if is_widened else dtype)
    sign = torch.iinfo(dtype).min
    lows, highs = [], []
    for piece_PG in pieces:
        copied_PG = copy_PG[: len(piece_PG)]
        if is_widened:
            copied_PG.copy_(piece_PG)
            highs.append(copied_PG.amax(dim=-1))
            lows.append(copied_PG.bitwise_and_(0xFFFF).amax(dim=-1))
        else:
            highs.append(piece_PG.amax(dim=-1))
            torch.bitwise_xor(piece_PG, sign, out=copied_PG)  # makes signed order of unsigned
            lows.append(copied_PG.amax(dim=-1).bitwise_xor_(sign))
    return _joined(lows).to(dtype), _joined(highs).to(dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
