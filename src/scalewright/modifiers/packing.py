"""Codes packed into words, as compressed-tensors packs them, bit for bit and some times as fast.

Integers: a row is a stream of bits: code i, made unsigned, stands in bits `i * num_bits` to `(i + 1) * num_bits - 1`,
the lowest first. Eight codes, a byte each, are read as one number of 64 bits, in which neighbours then move together:
first pairs of bytes, then pairs of these, then the two halves. Unpacking goes the other way. Numbers of e2m1, two to a
byte, are looked up by their byte; those of e4m3 are computed from their bits. What this cannot do (other devices, rows
that do not end with a word) goes the way of compressed-tensors.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from torch import Tensor, nn

from scalewright.numerics.grids import numbers_of_e4m3

_LOWER_HALVES = {8: 0x00FF00FF00FF00FF, 16: 0x0000FFFF0000FFFF, 32: 0x00000000FFFFFFFF}
"""By the width of a lane: a mask of every other one, from the lowest on."""
_POSITIVE = (1 << 63) - 1  # codes of less than eight bits leave the sign of such a number alone


class Packer(PackedQuantizationCompressor):  # type: ignore[misc]  # untyped
    """What compressed-tensors does with integer weights in groups or channels."""

    @classmethod
    def compress(cls, state_dict: dict[str, Tensor], scheme: QuantizationScheme) -> dict[str, Tensor]:
        """The tensors that are stored for a module's."""
        weight, args = state_dict["weight"], scheme.weights
        if args is None or not args.symmetric or not can_pack(weight):
            found: dict[str, Tensor] = super().compress(state_dict, scheme)
            return found
        stored = {name: each for name, each in state_dict.items() if name != "weight"}
        codes = quantize(
            x=weight,
            scale=stored["weight_scale"],
            zero_point=stored.get("weight_zero_point"),
            args=args,
            dtype=torch.int8,
        )
        stored["weight_packed"] = packed(codes, args.num_bits)
        stored["weight_shape"] = torch.tensor(weight.shape)
        cleaned: dict[str, Tensor] = cls._remove_symmetric_zp(stored, scheme)
        return cleaned

    @classmethod
    def decompress(cls, state_dict: dict[str, Tensor], scheme: QuantizationScheme) -> dict[str, Tensor]:
        """What a loader makes of them."""
        words, args, shape = state_dict["weight_packed"], scheme.weights, state_dict["weight_shape"]
        if args is None or not args.symmetric or words.ndim != 2 or not can_pack(words.new_empty((0, int(shape[-1])))):
            found: dict[str, Tensor] = super().decompress(state_dict, scheme)
            return found
        read = {name: each for name, each in state_dict.items() if name != "weight_packed"}
        codes = unpacked(words, args.num_bits)
        zero_point = read.get("weight_zero_point")
        read["weight"] = dequantize(x_q=codes, scale=read["weight_scale"], zero_point=zero_point, args=args)
        return read


class NVFP4Packer(NVFP4PackedCompressor):  # type: ignore[misc]  # untyped
    """What compressed-tensors does with NVFP4 weights."""

    @classmethod
    def decompress(cls, state_dict: dict[str, Tensor], scheme: QuantizationScheme) -> dict[str, Tensor]:
        """What a loader makes of stored tensors."""
        packed = state_dict["weight_packed"]
        if not _is_here(packed):
            found: dict[str, Tensor] = super().decompress(state_dict, scheme)
            return found
        read = {name: each for name, each in state_dict.items() if name != "weight_packed"}
        numbers = unpacked_fp4(packed)
        scale = cls._decompress_scale(read["weight_scale"], numbers.dtype)
        read["weight"] = dequantize(
            x_q=numbers,
            scale=scale,
            args=scheme.weights,
            global_scale=read.get("weight_global_scale"),
            dtype=numbers.dtype,
        )
        read["weight_scale"] = nn.Parameter(scale, requires_grad=False)
        return read


class MXFP4Packer(NVFP4Packer, MXFP4PackedCompressor):  # type: ignore[misc]  # untyped
    """What compressed-tensors does with MXFP4 weights."""


class FP8Packer(FloatQuantizationCompressor):  # type: ignore[misc]  # untyped
    """What compressed-tensors does with FP8 weights."""

    @classmethod
    def decompress(cls, state_dict: dict[str, Tensor], scheme: QuantizationScheme) -> dict[str, Tensor]:
        """What a loader makes of stored tensors."""
        codes = state_dict["weight"]
        if codes.dtype == torch.float8_e4m3fn and _is_here(codes):
            state_dict = {**state_dict, "weight": numbers_of_e4m3(codes)}
        found: dict[str, Tensor] = super().decompress(state_dict, scheme)
        return found


def can_pack(values: Tensor) -> bool:
    """Whether rows of so many codes are ours to pack."""
    return _is_here(values) and values.ndim == 2 and values.shape[1] % 32 == 0 and values.shape[1] > 0


def _is_here(values: Tensor) -> bool:
    return values.device.type == "cpu" and sys.byteorder == "little"


def packed(codes: Tensor, num_bits: int) -> Tensor:
    """Codes of `num_bits` with their sign, int8 [rows, columns], as int32 words."""
    unsigned = codes + (1 << (num_bits - 1))  # beyond 127 it is the same byte
    while num_bits in (1, 2, 4):  # two of them make one of twice the width, until it is a byte
        pairs = unsigned.view(torch.int16)
        unsigned, num_bits = (pairs >> (8 - num_bits)).bitwise_or_(pairs).to(torch.int8), 2 * num_bits
    if num_bits == 8:
        return unsigned.view(torch.int32)
    lanes = unsigned.view(torch.int64)
    for width in (8, 16, 32):
        lower = _LOWER_HALVES[width]
        upper = (lanes & (lower << width & _POSITIVE)) >> (width // 8 * (8 - num_bits))
        lanes = (lanes & lower).bitwise_or_(upper)
    num_bytes = lanes.view(torch.uint8).reshape(len(codes), -1, 8)[:, :, :num_bits]
    return num_bytes.reshape(len(codes), -1).contiguous().view(torch.int32)


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """The codes again, int8, of rows that were packed."""
    rows = len(words)
    if num_bits in (1, 2, 4, 8):
        codes = words.contiguous().view(torch.uint8)
        for width in (4, 2, 1):  # a byte falls into two of half the width, until they are narrow enough
            if width >= num_bits:
                pairs = codes.to(torch.int16)
                codes = (pairs << (8 - width)).bitwise_or_(pairs).bitwise_and_(((1 << width) - 1) * 0x0101)
                codes = codes.view(torch.uint8)
        return codes.view(torch.int8) - (1 << (num_bits - 1))
    given = words.contiguous().view(torch.uint8).reshape(rows, -1, num_bits)
    room = given.new_zeros((rows, given.shape[1], 8))
    room[:, :, :num_bits] = given
    lanes = room.view(torch.int64).reshape(rows, -1)
    for width in (32, 16, 8):
        filled = width // 8 * num_bits  # bits of each lane that are taken
        lower = sum(((1 << filled) - 1) << start for start in range(0, 64, 2 * width))
        upper = (lanes & (lower << filled)) << (width - filled)
        lanes = (lanes & lower).bitwise_or_(upper)
    return lanes.view(torch.int8) - (1 << (num_bits - 1))


def unpacked_fp4(packed: Tensor) -> Tensor:
    """The numbers of e2m1 that stand in bytes, bf16 [rows, 2 * bytes of a row]."""
    pairs = _pairs_of_fp4().index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(torch.bfloat16).reshape(len(packed), -1)


@cache
def _pairs_of_fp4() -> Tensor:
    """The two numbers of each byte, as one int32."""
    every = torch.arange(256).to(torch.uint8).unsqueeze(1)
    pairs: Tensor = unpack_fp4_from_uint8(every, 256, 2).view(torch.int32).flatten()
    return pairs
