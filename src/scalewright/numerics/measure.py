"""What a quantisation loses.

`summed_error` is the plain definition. The search computes the same in place and in steps of the scale, with the same
`abs_power_`; tests hold it to this one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalewright.numerics import native
from scalewright.numerics.grids import Grid


def quantize_dequantize_(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid) -> Tensor:
    """Round fp32 `x` in place to what it will be read back as; scale and zero point broadcast against it."""
    x.div_(scale)
    if zero_point is None:
        return grid.round_(x).mul_(scale)
    return grid.round_(x.add_(zero_point)).sub_(zero_point).mul_(scale)


def is_quick_norm(norm: float) -> bool:
    """Whether `|d| ** norm` is a product or two."""
    return norm in (1, 2, 3, 4)


def abs_power_(d: Tensor, norm: float, *, scratch: Tensor | None = None) -> Tensor:
    """`|d| ** norm` in place, overwriting `scratch`.

    Whole norms are products. Others take a logarithm and an exponential, which is less than half the time of `pow`.
    """
    if norm == 2:
        return d.mul_(d)
    if norm == 1:
        return d.abs_()
    if norm == 3:
        squares = torch.mul(d, d, out=torch.empty_like(d) if scratch is None else scratch)
        return d.abs_().mul_(squares)
    d.mul_(d)
    # Not log2 and exp2: torch's exp2 gives other last bits at the end of a tensor than in its middle.
    return d.mul_(d) if norm == 4 else d.log_().mul_(norm / 2).exp_()


def summed_error(
    x_NQG: Tensor,
    scale_Q: Tensor,
    zero_point_Q: Tensor | None,
    grid: Grid,
    *,
    norm: float = 2.0,
    weights_NQG: Tensor | None = None,
) -> Tensor:
    """`sum over G of w * |dequantised - x| ** norm`, in fp32; scale and zero point have the shape of Q.

    `weights_NQG` broadcasts against `x_NQG`, which is not changed.
    """
    x_NQG = x_NQG.float()
    zero_point = None if zero_point_Q is None else zero_point_Q.float().unsqueeze(-1)
    d = quantize_dequantize_(x_NQG.clone(), scale_Q.float().unsqueeze(-1), zero_point, grid).sub_(x_NQG)
    abs_power_(d, norm)
    if weights_NQG is not None:
        d.mul_(weights_NQG)
    return d.sum(dim=-1)


def sqnr_db(original: Tensor, quantized: Tensor) -> float:
    """Signal to quantisation noise in decibels, computed in float64; infinite when nothing was lost."""
    signal = original.double().square().sum()
    noise = (original.double() - quantized.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


class Noise:
    """What pieces of a large tensor lose together. Within a piece, sums are fp32 over short runs or in pairs."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, original: Tensor, changed: Tensor) -> None:
        """Count a piece, as it was and as it is now."""
        is_alike = changed.dtype == original.dtype and changed.shape == original.shape and original.ndim > 1
        if is_alike and native.can_round(original) and native.can_round(changed):
            self.count(*native.losses(original.flatten(1), changed.flatten(1)))
            return
        original = original.float()
        self.count(
            float(torch.linalg.vector_norm(original)) ** 2, float(torch.linalg.vector_norm(original - changed)) ** 2
        )

    def count(self, signal: float, noise: float) -> None:
        """Count a piece of which the sums of squares are known."""
        self._signal += signal
        self._noise += noise

    @property
    def decibels(self) -> float:
        """Of signal to noise: infinite when nothing was lost, and not a number when there was nothing."""
        if self._noise == 0:
            return math.inf if self._signal else math.nan
        return 10 * math.log10(self._signal / self._noise) if self._signal else -math.inf


def signal_to_noise(original: Tensor, changed: Tensor) -> float:
    """The same of a tensor that is one piece."""
    noise = Noise()
    noise.add(original, changed)
    return noise.decibels
