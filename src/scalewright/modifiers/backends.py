"""Quicker ways on the CPU to do what compressed-tensors does, offered to it through its own registry.

They give the same bits. compressed-tensors takes them wherever it needs them: when weights are stored, and when
activations are rounded as a loader would. Its own ways look at a value once for each of the numbers that there are, or
make more copies on the way.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from scalewright.numerics.grids import E2M1, numbers_of_e4m3

_REGISTRY = "compressed_tensors.utils.impl_backend"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def register() -> None:
    """Offer them, once; versions of compressed-tensors that have no registry go their own way."""
    try:
        backends: Any = importlib.import_module(_REGISTRY).ImplBackend
    except (ImportError, AttributeError):
        return
    ways: tuple[tuple[str, Callable[..., Tensor], Callable[..., bool]], ...] = (
        ("cast_to_fp4", rounded_to_fp4, can_round),
        ("pack_fp4_to_uint8", packed_fp4, can_pack),
        ("_quantize", codes_in_place, can_compute_codes),
    )
    for name, ours, is_able in ways:
        if ours.__name__ not in backends._fn_registry:
            backends.register(name, is_able, 1)(ours)


def can_round(x: Tensor) -> bool:
    """Whether `rounded_to_fp4` takes it."""
    return x.device.type == "cpu" and x.dtype in _FLOATS


def can_pack(x: Tensor) -> bool:
    """Whether `packed_fp4` takes it."""
    return can_round(x) and x.shape[-1] % 2 == 0 and sys.byteorder == "little"


def can_compute_codes(x: Tensor, *given: Any, args: QuantizationArgs, **more: Any) -> bool:
    """Whether `codes_in_place` takes it."""
    is_known = args.type == QuantizationType.INT or args.num_bits == 8
    return not given and can_round(x) and is_known and more.get("global_scale") is None


@torch.no_grad()
def codes_in_place(
    x: Tensor,
    *,
    scale: Tensor,
    zero_point: Tensor | None,
    q_min: Tensor,
    q_max: Tensor,
    args: QuantizationArgs,
    dtype: torch.dtype | None = None,
    global_scale: None = None,
) -> Tensor:
    """The codes of integers or e4m3, with one copy of `x` made on the way instead of three."""
    codes = x / scale
    if zero_point is not None:
        codes += zero_point.to(x.dtype)
    codes.clamp_(float(q_min), float(q_max))
    if args.type == QuantizationType.INT:
        return codes.round_() if dtype is None else codes.round_().to(dtype)
    rounded = codes.to(torch.float8_e4m3fn)
    return (
        rounded
        if dtype == torch.float8_e4m3fn
        else numbers_of_e4m3(rounded).to(codes.dtype if dtype is None else dtype)
    )


def rounded_to_fp4(x: Tensor) -> Tensor:
    """The nearest number of e2m1, half to even. Zero keeps the sign of what it was rounded from, unless that is -0."""
    values = x.float()
    rounded = E2M1.round_into(values, torch.empty_like(values), torch.empty_like(values))
    return rounded.copysign_(values + 0.0).to(x.dtype)


def packed_fp4(x: Tensor) -> Tensor:
    """Numbers of e2m1, [rows, columns], as their codes, two to a byte."""
    doubled = (x * 2).to(torch.int8).abs_()  # 0, 1, 2, 3, 4, 6, 8, 12
    codes = doubled.clamp(max=4)
    for later in (6, 8, 12):
        codes += doubled >= later
    codes |= torch.signbit(x).to(torch.int8) << 3
    pairs = codes.contiguous().view(torch.int16)  # the first one has the lower byte
    return (pairs | (pairs >> 4)).to(torch.uint8)
