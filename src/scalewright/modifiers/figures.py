"""How good the rounding of a weight is, on a sample of its rows: beside min-max's, and beside the best possible."""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import grid_of
from scalewright.numerics.layout import flatten_for_calibration, spread_columns, strategy_of
from scalewright.numerics.measure import summed_error
from scalewright.numerics.optimum import exact_optimum
from scalewright.numerics.scales import effective_scale, stored_dtype, stored_qparams

_ELEMENTS = 1 << 15  # of the sample
_POSITIONS = 64  # whose exact optimum is computed
_FEW_BITS = 4  # the exact optimum of more takes too long
_BY_ROW = ("channel", "group", "tensor_group")


def gain_over_minmax(
    weight: Tensor,
    restored: Tensor,
    args: QuantizationArgs,
    *,
    importance: Tensor | None,
    global_scale: Tensor | None,
) -> float | None:
    """By how many decibels the squared error (weighted, if there is importance) is less than that of min-max.

    None where rows have no scales of their own.
    """
    if strategy_of(args) not in _BY_ROW:
        return None
    rows = _some_rows(weight)
    x_NQG = flatten_for_calibration(weight[rows].float(), "weight", args)
    scale, zero_point = stored_qparams(
        *min_max(x_NQG), args, global_scale=global_scale, dtype=stored_dtype(weight.dtype, args)
    )
    shape = x_NQG.shape[1:-1]
    weights = None if importance is None else spread_columns(importance, tuple(weight[rows].shape), args)
    plain = summed_error(
        x_NQG,
        effective_scale(scale, global_scale).reshape(shape),
        zero_point.reshape(shape),
        grid_of(args),
        weights_NQG=weights,
    ).sum()
    ours = _error(x_NQG, flatten_for_calibration(restored[rows].float(), "weight", args), weights)
    if float(ours) == 0 or float(plain) == 0:
        return 0.0 if float(ours) == float(plain) else None
    return 10 * math.log10(float(plain) / float(ours))


def above_optimum(
    weight: Tensor,
    restored: Tensor,
    args: QuantizationArgs,
    *,
    importance: Tensor | None,
    global_scale: Tensor | None,
) -> float | None:
    """How much more squared error (weighted, if there is importance) there is than the least possible, as its share.

    None where the exact optimum would take too long, or is zero.
    """
    if strategy_of(args) not in _BY_ROW or args.num_bits > _FEW_BITS:
        return None
    positions = weight.shape[-1] // int(args.group_size or weight.shape[-1])
    rows = _some_rows(weight)[: max(1, _POSITIONS // positions)]
    x_NQG = flatten_for_calibration(weight[rows].float(), "weight", args)
    weights = None if importance is None else spread_columns(importance, tuple(weight[rows].shape), args)
    least = exact_optimum(x_NQG, args, weights_NQG=weights, global_scale=global_scale).error_Q.sum()
    ours = _error(x_NQG, flatten_for_calibration(restored[rows].float(), "weight", args), weights)
    # The optimum knows nothing of the dtype that weights are restored in, whose rounding may happen to help.
    return max(0.0, float(ours / least) - 1) if float(least) > 0 else None


def _error(x_NQG: Tensor, restored_NQG: Tensor, weights_NQG: Tensor | None) -> Tensor:
    squares = (x_NQG - restored_NQG).double().square()
    return (squares if weights_NQG is None else squares * weights_NQG).sum()


def _some_rows(weight: Tensor) -> Tensor:
    """Indices of rows from all over the weight."""
    count = max(1, min(len(weight), _ELEMENTS // weight.shape[-1]))
    return torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
