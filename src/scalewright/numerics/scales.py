"""The scales that a format can hold, and the qparams that will really be stored.

compressed-tensors says what every qparam is that is stored; this file calls it (or computes the same bits in one
compiled pass, which a test holds to it) in fp32 whatever the tensor's dtype was, and mends what it leaves broken at the
edges of the number range:

- a range whose width overflows fp32 (its scale would be infinite) is computed in float64;
- a group that is tiny beside the largest one (its scale would be flushed to zero, and the group with it) gets the
  smallest scale that the format has. compressed-tensors' own answer, an epsilon of 0.125 in e4m3, is so much larger
  than the group that all of it rounds to zero;
- a scale that only the cast to fp16 or bf16 would flush gets the smallest number of that dtype;
- a position that saw nothing but zeros has the zero point 0 (0/0 is not a zero point).

So scales are always finite and positive. `candidate_qparams` is a quick twin for searches, and a test holds it to the
same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    should_generate_mx_scales,
)
from torch import Tensor

from scalewright.numerics import native
from scalewright.numerics.extremes import is_finite
from scalewright.numerics.grids import E4M3, grid_of, numbers_of_e4m3

_SAFE = torch.finfo(torch.float32).max / 4  # ranges beyond may overflow on the way
_STAND_IN = torch.finfo(torch.float32).eps  # compressed-tensors' scale where nothing but zeros was seen

# The largest group's scale is 448 under a global scale; this is the smallest that e4m3 has.
E4M3_SMALLEST = E4M3.smallest


@dataclass(frozen=True)
class ScaleCodes:
    """Scales that are numbers of a short format of torch's: codes are ascending, those from `first` to `last` positive.

    No scale that is more than `above` codes larger than min-max's is best: half of it, which the format has too, gives
    every number that is needed. It has not the half of every code below `halved_from`.
    """

    dtype: torch.dtype
    first: int
    last: int
    above: int
    halved_from: int = 0

    @cached_property
    def numbers(self) -> Tensor:
        """All scales by their code, in fp32. They are computed once: do not change them."""
        return self.numbers_of(torch.arange(self.last + 1, device="cpu"))

    def code_of(self, scale: Tensor) -> Tensor:
        """The code of each scale, all of which the format has, int32."""
        return scale.to(self.dtype).view(torch.uint8).to(torch.int32)

    def numbers_of(self, codes: Tensor) -> Tensor:
        """The scales with these codes, in fp32."""
        codes = codes.to(torch.uint8).view(self.dtype)
        return numbers_of_e4m3(codes) if self.dtype == torch.float8_e4m3fn else codes.float()

    def nearest(self, scale: Tensor) -> Tensor:
        """The positive number of the format that is nearest to each scale."""
        numbers = self.numbers[self.first :].to(scale.device)
        above = torch.searchsorted(numbers, scale).clamp(1, len(numbers) - 1)
        low, high = numbers[above - 1], numbers[above]
        return torch.where(scale - low <= high - scale, low, high)


_AT_A_TIME = 1 << 18  # ranges whose qparams are computed at once
E4M3_SCALES = ScaleCodes(torch.float8_e4m3fn, first=1, last=126, above=7, halved_from=16)
E8M0_SCALES = ScaleCodes(torch.float8_e8m0fnu, first=0, last=254, above=1)


def stored_dtype(observed: torch.dtype, args: QuantizationArgs) -> torch.dtype:
    """The dtype that carries a scale: the tensor's own, or fp32 where the format has scales of its own (e4m3, e8m0)."""
    if args.scale_dtype is None and observed in (torch.float16, torch.bfloat16):
        return observed
    return torch.float32


def scale_codes_of(args: QuantizationArgs) -> ScaleCodes | None:
    """The scales that `args` has if they are those of a short format; None for scales of fp32, bf16 or fp16."""
    if args.scale_dtype == torch.float8_e4m3fn:
        return E4M3_SCALES
    return E8M0_SCALES if should_generate_mx_scales(args) else None


def stored_qparams(
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point, as they will be stored, of the ranges `[lo, hi]` (fp32, any shape).

    Many of them are computed some rows at a time: compressed-tensors takes ten times the memory of what it gives back.
    """
    if lo_Q.ndim < 2 or lo_Q.numel() <= _AT_A_TIME:
        return _stored_qparams(lo_Q, hi_Q, args, global_scale, dtype)
    rows = max(1, _AT_A_TIME * len(lo_Q) // lo_Q.numel())
    whole: tuple[Tensor, ...] = ()
    for start in range(0, len(lo_Q), rows):
        part = slice(start, start + rows)
        found = _stored_qparams(lo_Q[part], hi_Q[part], args, global_scale, dtype)
        whole = whole or tuple(each.new_empty(len(lo_Q), *each.shape[1:]) for each in found)
        for target, each in zip(whole, found, strict=True):
            target[part] = each
    return whole[0], whole[1]


def _stored_qparams(
    lo_Q: Tensor, hi_Q: Tensor, args: QuantizationArgs, global_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if global_scale is None and args.symmetric and args.scale_dtype is None:
        quick = _symmetric_qparams(lo_Q, hi_Q, args, dtype)
        if quick is not None:
            return quick
    scale, zero_point = calculate_qparams(lo_Q, hi_Q, args, global_scale)
    if not is_finite(scale):
        overflows = ~torch.isfinite(scale)
        wide_scale, wide_point = calculate_qparams(lo_Q.double(), hi_Q.double(), args, global_scale)
        scale = torch.where(overflows, wide_scale.float(), scale)
        zero_point = torch.where(overflows, wide_point, zero_point)
    if args.scale_dtype == torch.float8_e4m3fn:
        is_zero = (lo_Q >= 0) & (hi_Q <= 0)
        raw = torch.maximum(-lo_Q, hi_Q).clamp(min=0) / 6
        raw = raw if global_scale is None else raw * global_scale
        is_flushed = ~is_zero & (raw.to(torch.float8_e4m3fn).float() == 0)
        scale = scale.masked_fill(is_flushed.reshape(scale.shape), E4M3_SMALLEST)
    if not args.symmetric:
        is_zero = (lo_Q >= 0) & (hi_Q <= 0)
        zero_point = torch.where(is_zero.reshape(zero_point.shape), torch.zeros_like(zero_point), zero_point)
    return round_scale(scale, dtype), zero_point


def _symmetric_qparams(
    lo_Q: Tensor, hi_Q: Tensor, args: QuantizationArgs, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """What compressed-tensors computes of symmetric ranges, to the bit, in one pass; None where that is not served.

    It takes .14 ms for 32,768 groups where finding their ranges takes .27 ms, and 45 us for one range.
    """
    if not (lo_Q.dtype == hi_Q.dtype == torch.float32 and native.serves(lo_Q) and native.serves(hi_Q)):
        return None
    grid = grid_of(args)
    scale, largest = native.symmetric_scales(lo_Q, hi_Q, half=(grid.high - grid.low) / 2, stand_in=_STAND_IN)
    if not math.isfinite(largest):
        return None
    scale = scale if scale.ndim else scale.reshape(1)
    zero_point = torch.zeros(scale.shape, dtype=args.zp_dtype, device=scale.device)
    return scale if dtype == torch.float32 else round_scale(scale, dtype), zero_point


def candidate_qparams(
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """What `stored_qparams` gives, bit for bit, in a quarter of the time: fp32, and None for zero points that are 0.

    A search asks for the qparams of a hundred ranges for each that is stored.
    """
    if args.scale_dtype == torch.uint8 or float(torch.maximum(-lo_Q.min(), hi_Q.max())) > _SAFE:
        scale, stored_point = stored_qparams(lo_Q, hi_Q, args, global_scale=global_scale, dtype=dtype)
        return scale.float(), None if args.symmetric else stored_point.float()
    grid = grid_of(args)
    zero_point: Tensor | None = None
    if args.symmetric:
        scale = torch.maximum(-lo_Q, hi_Q).clamp_(min=0).div_((grid.high - grid.low) / 2)
    else:
        lo_Q, hi_Q = lo_Q.clamp(max=0), hi_Q.clamp(min=0)
        scale = (hi_Q - lo_Q).div_(grid.high - grid.low)
        # 0/0, where nothing but zeros was seen, becomes 0; the order of operations is that of compressed-tensors.
        zero_point = torch.sub(grid.low, lo_Q / scale).nan_to_num_(0.0).clamp_(grid.low, grid.high).round_()
    if args.scale_dtype == torch.float8_e4m3fn:
        raw = scale if global_scale is None else scale * global_scale
        scale = E4M3.round_(raw.clone())
        scale.masked_fill_((scale == 0) & ((lo_Q < 0) | (hi_Q > 0)), E4M3_SMALLEST)
        return scale.masked_fill_(scale == 0, 0.125), zero_point
    if global_scale is not None:
        scale = scale * global_scale
    scale.masked_fill_(scale == 0, _STAND_IN)
    return scale if dtype == torch.float32 else round_scale(scale, dtype).float(), zero_point


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` in `dtype`, never rounded to zero or to infinity."""
    finfo = torch.finfo(dtype)
    return scale.clamp(finfo.smallest_normal * finfo.eps, finfo.max).to(dtype)


def range_for(
    scale_Q: Tensor, zero_point_Q: Tensor | None, args: QuantizationArgs, *, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A range from which `stored_qparams` computes this scale (an fp32 one up to its last bit) and zero point."""
    grid, scale_Q = grid_of(args), effective_scale(scale_Q, global_scale).double()
    if zero_point_Q is not None:
        lo_Q, hi_Q = ((end - zero_point_Q) * scale_Q for end in (grid.low, grid.high))
    else:
        # A power of two is computed from the power of two that the largest number of the grid contains.
        is_power = scale_codes_of(args) is E8M0_SCALES
        hi_Q = scale_Q * (2.0 ** math.floor(math.log2(grid.high)) if is_power else (grid.high - grid.low) / 2)
        lo_Q = -hi_Q
    largest = torch.finfo(torch.float32).max
    return lo_Q.clamp(-largest, largest).float(), hi_Q.clamp(-largest, largest).float()


def global_scale_of(absmax: Tensor) -> Tensor:
    """The divisor that brings the largest group scale of a tensor to 448, the end of e4m3: 448 * 6 / absmax."""
    absmax = absmax.reshape(1).float()
    global_scale: Tensor = generate_gparam(-absmax, absmax)
    return global_scale


def effective_scale(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """What a code is multiplied with, in fp32: the stored scale, divided by the global one if there is any."""
    return scale.float() if global_scale is None else scale.float() / global_scale
