"""What activations lose when their scales are found while the model runs: one for each token, or group of a token."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import grid_of
from scalewright.numerics.layout import flatten_for_calibration, strategy_of
from scalewright.numerics.measure import quantize_dequantize_
from scalewright.numerics.scales import effective_scale, global_scale_of, stored_dtype, stored_qparams

# T tokens, H channels, G elements that share one scale.

_PIECE = 1 << 19  # values that are rounded at a time


def dynamic_noise(x_TH: Tensor, args: QuantizationArgs, *, global_absmax: Tensor) -> float:
    """The sum of squared errors, in float64, under scales of each token's own range, or that of each group of it.

    TENSOR is taken as TOKEN. Under TENSOR_GROUP the global scale is made from `global_absmax`.
    """
    global_scale = global_scale_of(global_absmax) if strategy_of(args) == "tensor_group" else None
    dtype, grid = stored_dtype(x_TH.dtype, args), grid_of(args)
    noise = 0.0
    for piece_TH in torch.split(x_TH, max(1, _PIECE // x_TH.shape[-1])):
        values = piece_TH.float()
        x_NG = flatten_for_calibration(values, "input", args).flatten(0, -2)  # each observation has a scale of its own
        lo_N, hi_N = min_max(x_NG.unsqueeze(0))
        scale, zero_point = stored_qparams(lo_N, hi_N, args, global_scale=global_scale, dtype=dtype)
        rounded_NG = quantize_dequantize_(
            x_NG.clone(),
            effective_scale(scale, global_scale).reshape(-1, 1),
            zero_point.float().reshape(-1, 1),
            grid,
        )
        noise += float((rounded_NG.double() - x_NG.double()).square_().sum(dtype=torch.float64))
    return noise
