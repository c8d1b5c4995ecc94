"""The numbers that a format can hold: int2 to int8, e2m1 (FP4), e2m3 (FP6), e4m3 (FP8).

A grid knows its ends and how to round to itself, half to even as the hardware does. It knows nothing of scales:
`round_` takes values that are already divided by their scale (and moved by their zero point).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from scalewright.errors import LayoutError

_EXPONENT_BITS = 0x7F800000  # of fp32
_SIGN_AND_CODE = -0x80000000 | 0x07F00000  # of fp32: where the bits of an e4m3 code come to lie, 20 bits further up
_UNIT = 2.0**120  # 127, by which fp32's exponents are off, less 7, by which those of e4m3 are


@dataclass(frozen=True)
class Grid:
    """The numbers of one format, from `low` to `high`.

    A float format also has `mantissa_bits` and the `smallest_normal` number, below which its spacing stays the same.
    """

    name: str
    low: float
    high: float
    mantissa_bits: int | None = None
    smallest_normal: float = 1.0

    def round_(self, x: Tensor) -> Tensor:
        """Round fp32 `x` in place to the nearest number of this grid, half to even, saturating at its ends."""
        return self.round_into(x, x, x if self.mantissa_bits is None else torch.empty_like(x))

    def round_into(self, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """The same, written to `out` (which may be `x`); `scratch` is overwritten. All are fp32 of one shape."""
        if self.mantissa_bits is None:
            return torch.round(x, out=out).clamp_(self.low, self.high)
        # Adding and taking away a number whose last bit is worth just the spacing at x makes fp32 do the rounding:
        # exact, and seven times faster than casting to float8 and back.
        torch.clamp(x, self.low, self.high, out=out)
        torch.bitwise_and(out.view(torch.int32), _EXPONENT_BITS, out=scratch.view(torch.int32))
        scratch.clamp_(min=self.smallest_normal).mul_(1.5 * 2 ** (23 - self.mantissa_bits))
        return out.add_(scratch).sub_(scratch)

    def mirrored(self) -> Grid:
        """The same numbers with the other sign: what a grid is under a negative scale."""
        return replace(self, name=f"-{self.name}", low=-self.high, high=-self.low)

    @property
    def smallest(self) -> float:
        """The smallest positive number: the spacing around zero."""
        return 1.0 if self.mantissa_bits is None else self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def widest_gap(self) -> float:
        """The spacing at the ends."""
        if self.mantissa_bits is None:
            return 1.0
        return float(2.0 ** (math.floor(math.log2(self.high)) - self.mantissa_bits))

    @cache  # noqa: B019 (there are as many grids as formats)
    def numbers(self) -> Tensor:
        """All numbers of the grid, ascending, in fp32. They are computed once: do not change them."""
        steps = torch.arange(round(self.low / self.smallest), round(self.high / self.smallest) + 1, device="cpu")
        numbers: Tensor = torch.unique(self.round_(steps.float() * self.smallest))
        return numbers


E2M1 = Grid("e2m1", -6.0, 6.0, 1)
E2M3 = Grid("e2m3", -7.5, 7.5, 3)
E4M3 = Grid("e4m3", -448.0, 448.0, 3, 2.0**-6)
_FLOATS = {4: E2M1, 6: E2M3, 8: E4M3}


def grid_of(args: QuantizationArgs) -> Grid:
    """The grid that `args` quantises to."""
    if args.type == QuantizationType.FLOAT:
        if args.num_bits not in _FLOATS:
            raise LayoutError(f"there is no float format of {args.num_bits} bits. Use 4, 6 or 8 bits, or type int.")
        return _FLOATS[args.num_bits]
    half = 2 ** (args.num_bits - 1)
    return Grid(f"int{args.num_bits}", -half, half - 1)


def numbers_of_e4m3(codes: Tensor) -> Tensor:
    """The numbers that float8_e4m3fn `codes` stand for, in fp32: on CPUs a tenth of the time that torch takes.

    A code that is moved to the top of an fp32 number has its sign there, and an exponent that is 120 too small.
    Subnormal codes become subnormal numbers, so the product is right for them, too.
    """
    bits = codes.view(torch.int8)
    has_nan = bool((bits & 0x7F).eq_(0x7F).any())
    if codes.device.type != "cpu" or has_nan or not _has_subnormals():
        return codes.float()
    moved = bits.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_CODE)
    return moved.view(torch.float32).mul_(_UNIT)


def _has_subnormals() -> bool:
    """Whether fp32 has them just now: torch.set_flush_denormal makes zeros of them."""
    return bool(torch.tensor(E4M3.smallest / _UNIT, device="cpu") * _UNIT)
