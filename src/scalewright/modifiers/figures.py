"""How good the rounding of a weight is, on a sample of its rows: beside min-max's, and beside the best possible."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from torch import Tensor

from scalewright.numerics.extremes import min_max
from scalewright.numerics.hessian import Factor
from scalewright.numerics.layout import flatten_for_calibration, spread_columns, strategy_of
from scalewright.numerics.optimum import exact_optimum
from scalewright.numerics.scales import stored_dtype, stored_qparams

_ELEMENTS = 1 << 15  # of the sample
_POSITIONS = 16  # whose exact optimum is computed
_FEW_BITS = 4  # the exact optimum of more takes too long
_BY_ROW = ("channel", "group", "tensor_group")


@dataclass(frozen=True)
class Sample:
    """Rows of a weight, as they were and as they will be read back.

    Errors are weighted if there is importance. With a Hessian's factor, they are those of the layer's output.
    """

    original: Tensor
    restored: Tensor
    args: QuantizationArgs
    importance: Tensor | None = None
    global_scale: Tensor | None = None
    factor: Factor | None = None

    def gain_over_minmax(self) -> float | None:
        """By how many decibels the squared error is less than that of min-max; None where rows share a scale."""
        if strategy_of(self.args) not in _BY_ROW:
            return None
        x_NQG, weights = self._blocks(self.original), self._weights()
        dtype = stored_dtype(self.original.dtype, self.args)
        scale, zero_point = stored_qparams(*min_max(x_NQG), self.args, global_scale=self.global_scale, dtype=dtype)
        # As it would be stored: in bf16 the arithmetic alone costs int8 up to a decibel, and ours is stored, too.
        rounded = fake_quantize(self.original, scale, zero_point, self.args, global_scale=self.global_scale)
        plain = self._error(x_NQG - self._blocks(rounded), weights)
        ours = self._error(x_NQG - self._blocks(self.restored), weights)
        if float(ours) == 0 or float(plain) == 0:
            return 0.0 if float(ours) == float(plain) else None
        return 10 * math.log10(float(plain) / float(ours))

    def above_optimum(self) -> float | None:
        """How much more squared error there is than the least possible, as its share.

        None where the exact optimum would take too long, or is zero.
        """
        if strategy_of(self.args) not in _BY_ROW or self.args.num_bits > _FEW_BITS or self.factor is not None:
            return None
        positions = self.original.shape[-1] // int(self.args.group_size or self.original.shape[-1])
        count = max(1, _POSITIONS // positions)
        few = replace(self, original=self.original[:count], restored=self.restored[:count])
        x_NQG, weights = few._blocks(few.original), few._weights()
        least = exact_optimum(x_NQG, self.args, weights_NQG=weights, global_scale=self.global_scale).error_Q.sum()
        # The optimum knows nothing of the dtype that weights are restored in, whose rounding may happen to help.
        return (
            max(0.0, float(few._error(x_NQG - few._blocks(few.restored), weights) / least) - 1)
            if float(least) > 0
            else None
        )

    def _blocks(self, rows: Tensor) -> Tensor:
        return flatten_for_calibration(rows.float(), "weight", self.args)

    def _weights(self) -> Tensor | None:
        shape = tuple(self.original.shape)
        return None if self.importance is None else spread_columns(self.importance, shape, self.args)

    def _error(self, d_NQG: Tensor, weights_NQG: Tensor | None) -> Tensor:
        if self.factor is not None:
            return self.factor.costs(d_NQG.reshape(self.original.shape)).sum(dtype=torch.float64)
        squares = d_NQG.double().square()
        return (squares if weights_NQG is None else squares * weights_NQG).sum()


def some_rows(weight: Tensor) -> Tensor:
    """Indices of rows from all over the weight."""
    count = max(1, min(len(weight), _ELEMENTS // weight.shape[-1]))
    return torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
