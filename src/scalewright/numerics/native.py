"""The face of `_native.cpp`: loops that were compiled when the package was installed, if there was a compiler.

Each function takes and gives tensors, and computes what its caller also has in torch, which is what defines the answer:
the compiled loops sum in another order, and are quicker; nothing else depends on them. `SCALEWRIGHT_KERNELS=torch` in
the environment does without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalewright.numerics.grids import Grid

# P positions, E elements of each, R segments of all of them; J candidates; B bins and C columns of a chart.

_INTERFACE = 3  # as in _native.cpp


def _compiled() -> Any:
    """The compiled loops; None if there was no compiler, they are not wanted, or they are of another version."""
    try:
        from scalewright.numerics import _native  # type: ignore[attr-defined]  # noqa: PLC0415 (it may not be there)
    except ImportError:
        return None
    return _native if getattr(_native, "interface", None) == _INTERFACE else None


_module = _compiled()
_level = 0 if _module is None else _module.best_level()
"""Which of the vectors that the loops are compiled for are used: the widest that the processor has."""
_INFINITIES = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_LANES = 16
_WORTH_A_TABLE = 1 << 17  # values that a thread counts in a table of its own, which is then added to the others
MOST_COLUMNS = 4 * _LANES
"""Of a chart."""


def kernels() -> str:
    """What does the work on CPUs: "native" or "torch"."""
    return "torch" if _module is None else "native"


def vendor() -> str:
    """Who made the processor, as an x86 processor says itself; empty of others, and without the compiled part."""
    return "" if _module is None else str(_module.vendor())


def serves(x: Tensor) -> bool:
    """Whether the loops can take `x` as it is: floats in memory, one behind the other."""
    return _module is not None and x.device.type == "cpu" and x.dtype in _INFINITIES and x.is_contiguous()


def min_max_of_rows(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each of as many rows as `shape` has places, in fp32; NaN if a row has one."""
    is_widened = x.dtype == torch.bfloat16  # which is the first half of an fp32 number
    lo_P, hi_P = x.new_empty((2, *shape), dtype=torch.float32 if is_widened else x.dtype).unbind()
    num_rows = lo_P.numel()
    _module.ends(
        x.data_ptr(),
        lo_P.data_ptr(),
        hi_P.data_ptr(),
        num_rows,
        x.numel() // num_rows,
        x.itemsize == 2,
        is_widened,
        _INFINITIES[x.dtype],
        _level,
        torch.get_num_threads(),
    )
    return (lo_P, hi_P) if lo_P.dtype == torch.float32 else (lo_P.float(), hi_P.float())


def symmetric_scales(lo_Q: Tensor, hi_Q: Tensor, *, half: float, stand_in: float) -> tuple[Tensor, float]:
    """`max(|lo|, |hi|) / half` of ranges that have the 0, or are widened to it, and the largest of these.

    `stand_in` takes the place of a scale of 0. Ranges are fp32, and have no NaN.
    """
    scale_Q = torch.empty_like(lo_Q)
    largest: float = _module.scales(
        lo_Q.data_ptr(), hi_Q.data_ptr(), scale_Q.data_ptr(), lo_Q.numel(), half, stand_in, _level
    )
    return scale_Q, largest


def errors(
    x_PE: Tensor,
    weights_PE: Tensor | None,
    scale_JP: Tensor,
    zero_point_JP: Tensor | None,
    *,
    grid: Grid,
    norm: float,
    segment: int,
    curves_JT: Tensor | None = None,
) -> Tensor:
    """`sum of w * |u| ** norm` where u is how far `x / scale + zero_point` is from the grid: [J, P].

    `curves_JT` are polynomials to take for the power, one for each candidate.
    """
    sums_JR = x_PE.new_empty(len(scale_JP), x_PE.numel() // segment)
    _measure(_module.errors, x_PE, weights_PE, scale_JP, zero_point_JP, sums_JR, grid, norm, curves_JT)
    return _over_segments(sums_JR, len(x_PE))


def least(
    x_PE: Tensor,
    weights_PE: Tensor | None,
    scale_JP: Tensor,
    zero_point_JP: Tensor | None,
    *,
    grid: Grid,
    norm: float,
    largest: float,
) -> tuple[Tensor, Tensor]:
    """The first candidate that loses least at each position of one segment, and what it loses: two [P].

    Errors are `errors` times the scale to the power of the norm, but that of `largest` at most.
    """
    error_P, index_P = x_PE.new_empty(len(x_PE)), x_PE.new_empty(len(x_PE), dtype=torch.int64)
    _measure(_module.errors, x_PE, weights_PE, scale_JP, zero_point_JP, error_P, grid, norm, None, index_P, largest)
    return index_P, error_P


def scores(
    x_PE: Tensor,
    weights_PE: Tensor | None,
    scale_JP: Tensor,
    zero_point_JP: Tensor | None,
    *,
    grid: Grid,
    segment: int,
) -> Tensor:
    """`sum of w * x * q` and `sum of w * q * q` of the codes that integer scales give: [2, J, P]."""
    sums_2JR = x_PE.new_empty(2, len(scale_JP), x_PE.numel() // segment)
    _measure(_module.scores, x_PE, weights_PE, scale_JP, zero_point_JP, sums_2JR, grid, 2.0, None)
    return _over_segments(sums_2JR, len(x_PE))


@dataclass(frozen=True)
class Lines:
    """Which lines of a table values look up: `x * factor + zero`, cut off, from `first` on and of so many bins.

    `table_BC` is `in_vectors`; the first `columns` of its columns are used.
    """

    table_BC: Tensor
    columns: int
    factor_P: Tensor
    zero_P: Tensor
    first_P: Tensor
    bins: int


def chart_sums(x_PE: Tensor, weights_PE: Tensor | None, lines: Lines, *, segment: int) -> Tensor:
    """The (weighted) sum of the lines that the values of each position look up: [P, C]."""
    sums_RC = x_PE.new_empty(x_PE.numel() // segment, lines.table_BC.shape[1])
    _look_up(x_PE, weights_PE, lines, segment, sums_RC, None)
    if len(sums_RC) > len(x_PE):
        sums_RC = sums_RC.view(len(x_PE), -1, sums_RC.shape[1]).double().sum(dim=1)
    return sums_RC[:, : lines.columns]


def chart_least(x_PE: Tensor, weights_PE: Tensor | None, lines: Lines) -> tuple[Tensor, Tensor]:
    """The column with the least sum, the first of equals, and that sum, where positions are one segment: two [P].

    Sums are not negative, and compared but for their last six bits.
    """
    error_P, index_P = x_PE.new_empty(len(x_PE)), x_PE.new_empty(len(x_PE), dtype=torch.int64)
    _look_up(x_PE, weights_PE, lines, x_PE.shape[1], error_P, index_P)
    return index_P, error_P


def _look_up(
    x_PE: Tensor, weights_PE: Tensor | None, lines: Lines, segment: int, out: Tensor, index_P: Tensor | None
) -> None:
    vectors_P = [each.expand(len(x_PE)).contiguous() for each in (lines.factor_P, lines.zero_P, lines.first_P)]
    _module.chart(
        x_PE.data_ptr(),
        _address(weights_PE),
        *(each.data_ptr() for each in (*vectors_P, lines.table_BC, out)),
        _address(index_P),
        len(out),
        segment,
        len(x_PE),
        lines.table_BC.shape[1],
        lines.columns,
        lines.bins,
        _level,
        torch.get_num_threads(),
    )


def in_vectors(table_BC: Tensor) -> Tensor:
    """A table with columns of zeros behind the others, so that a line is a whole number of vectors."""
    return torch.nn.functional.pad(table_BC, (0, -table_BC.shape[1] % _LANES)).contiguous()


def _measure(
    loop: Any,
    x_PE: Tensor,
    weights_PE: Tensor | None,
    scale_JP: Tensor,
    zero_point_JP: Tensor | None,
    sums: Tensor,
    grid: Grid,
    norm: float,
    curves_JT: Tensor | None,
    index_P: Tensor | None = None,
    largest_scale: float = 0.0,
) -> None:
    scale_JP = scale_JP.float().contiguous()
    zero_point_JP = None if zero_point_JP is None else zero_point_JP.float().expand_as(scale_JP).contiguous()
    num_rows = sums.shape[-1]
    loop(
        x_PE.data_ptr(),
        _address(weights_PE),
        scale_JP.data_ptr(),
        _address(zero_point_JP),
        _address(curves_JT),
        sums.data_ptr(),
        _address(index_P),
        num_rows,
        x_PE.numel() // num_rows,
        len(x_PE),
        len(scale_JP),
        grid.low,
        grid.high,
        *_spacing(grid),
        norm,
        largest_scale,
        _level,
        torch.get_num_threads(),
    )


def can_round(x: Tensor) -> bool:
    """Whether `rounded` and `losses` take it."""
    return serves(x) and x.dtype != torch.float16 and x.numel() > 0


def rounded(
    x_PE: Tensor, scale_P: Tensor, grid: Grid, *, into_PE: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """The codes of values under the scale of their row, int8 or e4m3; `code * scale`, in the dtype of `x_PE`; and the
    sum of squares of the values, and of their distance from that.

    Quotients and products are rounded to that dtype, as torch's are. They are written to `into_PE`, if it is given,
    which may be `x_PE` itself.
    """
    is_integer = grid.mantissa_bits is None
    codes_PE = torch.empty_like(x_PE, dtype=torch.int8)
    restored_PE = torch.empty_like(x_PE) if into_PE is None else into_PE
    lost_P2 = x_PE.new_empty(len(x_PE), 2, dtype=torch.float64)
    scale_P = scale_P.float().contiguous()
    _module.rounded(
        *(each.data_ptr() for each in (x_PE, scale_P, codes_PE, restored_PE, lost_P2)),
        *x_PE.shape,
        grid.low,
        grid.high,
        *_spacing(grid),
        x_PE.itemsize == 2,
        _level,
        torch.get_num_threads(),
    )
    return codes_PE if is_integer else codes_PE.view(torch.float8_e4m3fn), restored_PE, _summed(lost_P2)


def losses(x_PE: Tensor, y_PE: Tensor) -> tuple[float, float]:
    """The sum of squares of `x_PE`, and of its distance from `y_PE`, which is of the same dtype."""
    sums_P2 = x_PE.new_empty(len(x_PE), 2, dtype=torch.float64)
    _module.losses(
        *(each.data_ptr() for each in (x_PE, y_PE, sums_P2)),
        *x_PE.shape,
        x_PE.itemsize == 2,
        _level,
        torch.get_num_threads(),
    )
    return _summed(sums_P2)


def _summed(sums_P2: Tensor) -> tuple[float, float]:
    """Two columns summed up. In torch the sums of many rows would depend on the number of threads."""
    first, second = sums_P2.numpy().sum(axis=0).tolist()
    return first, second


def can_count(x: Tensor) -> bool:
    """Whether `counts_by_value` and `squares_of_rows` take it."""
    return can_round(x)


def counts_by_value(x_NQG: Tensor, weight_NQ: Tensor | None) -> Tensor:
    """How often each bf16 number is the nearest to a value at each position, in the order of the numbers: [Q, 65536].

    A value counts as much as the weight (float64) of its observation says, or 1, as an int64.
    """
    num_positions = x_NQG[0, ..., 0].numel()
    num_tables = max(1, min(torch.get_num_threads(), x_NQG.numel() // _WORTH_A_TABLE // num_positions))
    dtype = torch.int64 if weight_NQ is None else torch.float64
    tables = x_NQG.new_zeros((num_tables, num_positions, 1 << 16), dtype=dtype)
    weights = None if weight_NQ is None else weight_NQ.contiguous()
    _module.count(
        x_NQG.data_ptr(),
        _address(weights),
        tables.data_ptr(),
        x_NQG[..., 0].numel(),
        x_NQG.shape[-1],
        num_positions,
        num_tables,
        x_NQG.itemsize == 2,
        _level,
    )
    return tables[0] if num_tables == 1 else tables.sum(dim=0)


def squares_of_rows(x_NQG: Tensor) -> Tensor:
    """The sum of squares over the last dimension, in float64."""
    sums_NQ = x_NQG.new_empty(x_NQG.shape[:-1], dtype=torch.float64)
    _module.squares(
        x_NQG.data_ptr(),
        sums_NQ.data_ptr(),
        sums_NQ.numel(),
        x_NQG.shape[-1],
        x_NQG.itemsize == 2,
        _level,
        torch.get_num_threads(),
    )
    return sums_NQ


def _spacing(grid: Grid) -> tuple[float, float]:
    """The smallest number of the grid with all its bits, negative for integers, and what rounds to a spacing of 1."""
    is_integer = grid.mantissa_bits is None
    return -1.0 if is_integer else grid.smallest_normal, 1.5 * 2.0 ** (23 - (grid.mantissa_bits or 0))


def _over_segments(sums: Tensor, num_positions: int) -> Tensor:
    """The sum of each position: float64, or fp32 where one segment is all there is."""
    if sums.shape[-1] == num_positions:
        return sums
    return sums.view(*sums.shape[:-1], num_positions, -1).double().sum(dim=-1)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())
