"""A weight becomes what a checkpoint stores, and then what will be read back, as compressed-tensors does it.

It goes some rows at a time, so that what is made on the way stays in cache and never takes the memory of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from scalewright.modifiers import backends
from scalewright.modifiers.packing import FP8Packer, MXFP4Packer, NVFP4Packer, Packer, can_pack, packed
from scalewright.numerics import native
from scalewright.numerics.grids import grid_of
from scalewright.numerics.layout import strategy_of

backends.register()

_ELEMENTS = 1 << 19  # of the rows that go at one time
_STEP = 128  # rows go in multiples of this: zero points are packed eight rows to a word
_BY_ROW = ("tensor", "channel", "group", "tensor_group")  # nothing is shared by some rows and not by others
_OF_ROWS = ("weight", "weight_scale", "weight_zero_point")
_SHAPE = "weight_shape"
_NOT_IN_ONE_PASS = ("weight_zero_point", "weight_g_idx")
_AS_CODES = (CompressionFormat.int_quantized, CompressionFormat.float_quantized)
Loss = tuple[float, float]
"""The sum of squares of some numbers, and of how far off what is read back is."""

_QUICK = {
    CompressionFormat.pack_quantized: Packer,
    CompressionFormat.float_quantized: FP8Packer,
    CompressionFormat.nvfp4_pack_quantized: NVFP4Packer,
    CompressionFormat.mxfp4_pack_quantized: MXFP4Packer,
}


def store(
    state: Mapping[str, Tensor],
    scheme: QuantizationScheme,
    stored_as: CompressionFormat,
    take: Callable[[slice, Tensor, Loss | None], None],
    *,
    into: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores for a module's `state`.

    `take` is given rows as they will be read back, and what they lose, where that was found on the way. They may have
    been written to `into`, which may be the weight itself.
    """
    weight = state["weight"]
    pieces: list[dict[str, Tensor]] = []
    for rows in _slices(weight, scheme):
        given = {name: each[rows] if _has_rows(name, each, len(weight)) else each for name, each in state.items()}
        room = None if into is None else into[rows]
        piece, restored, loss = _in_one_pass(given, scheme, stored_as, room) or _by_the_book(given, scheme, stored_as)
        take(rows, restored, loss)
        pieces.append({name: each for name, each in piece.items() if isinstance(each, Tensor)})
    if len(pieces) == 1:
        return pieces[0]
    # What does not depend on rows is the same in all pieces.
    joined = {
        name: torch.cat([piece[name] for piece in pieces]) if name.startswith("weight") and first.ndim > 1 else first
        for name, first in pieces[0].items()
    }
    if _SHAPE in joined:
        joined[_SHAPE] = torch.tensor(weight.shape, dtype=joined[_SHAPE].dtype, device=joined[_SHAPE].device)
    return joined


def read_back(
    stored: Mapping[str, Tensor], scheme: QuantizationScheme, stored_as: CompressionFormat
) -> dict[str, Tensor]:
    """The tensors of a module that a loader will make of stored ones: its weight, and qparams as they are meant."""
    found: dict[str, Tensor] = _compressor(stored_as).decompress(dict(stored), scheme)
    return found


def _by_the_book(
    given: Mapping[str, Tensor], scheme: QuantizationScheme, stored_as: CompressionFormat
) -> tuple[dict[str, Tensor], Tensor, None]:
    """Rows as they are stored, and as they will be read back."""
    compressor = _compressor(stored_as)
    piece = compressor.compress(given, scheme)
    return piece, compressor.decompress(piece, scheme)["weight"], None


def _in_one_pass(
    given: Mapping[str, Tensor], scheme: QuantizationScheme, stored_as: CompressionFormat, into: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, Loss] | None:
    """The same, bit for bit, where codes and what they are read back as can be had in one pass; None elsewhere.

    compressed-tensors makes several passes of it, and packs and unpacks in between.
    """
    args, weight, scale = scheme.weights, given["weight"], given["weight_scale"]
    is_packed = stored_as == CompressionFormat.pack_quantized
    if (
        args is None
        or strategy_of(args) not in ("tensor", "channel", "group")
        or not given.keys().isdisjoint(_NOT_IN_ONE_PASS)
        or not (is_packed or (stored_as in _AS_CODES and args.num_bits == 8))
        or (is_packed and not can_pack(weight))
        or not native.can_round(weight)
        or scale.dtype != weight.dtype
        or weight.numel() % scale.numel()
    ):
        return None
    scale_P = scale.reshape(-1) if scale.numel() > 1 else scale.reshape(-1).expand(len(weight))
    as_rows = (len(scale_P), -1)
    can_be_filled = into is not None and native.can_round(into) and into.dtype == weight.dtype
    room_PE = into.view(as_rows) if into is not None and can_be_filled else None
    codes, restored, loss = native.rounded(weight.view(as_rows), scale_P, grid_of(args), into_PE=room_PE)
    stored = {name: each for name, each in given.items() if name != "weight"}
    if is_packed:
        stored |= {
            "weight_packed": packed(codes.view(weight.shape), args.num_bits),
            _SHAPE: torch.tensor(weight.shape, device="cpu"),
        }
    else:
        stored["weight"] = codes.view(weight.shape)
    return stored, restored.view(weight.shape), loss


def _compressor(stored_as: CompressionFormat) -> Any:
    return _QUICK.get(stored_as) or BaseCompressor.get_value_from_registry(stored_as.value)


def _slices(weight: Tensor, scheme: QuantizationScheme) -> list[slice]:
    args = scheme.weights
    if args is None or weight.ndim != 2 or strategy_of(args) not in _BY_ROW:
        return [slice(None)]
    step = max(1, _ELEMENTS // weight.shape[1] // _STEP) * _STEP
    starts = range(0, max(1, len(weight) // step * step), step)  # the last takes what is left over, too
    return [slice(start, start + step if start != starts[-1] else None) for start in starts]


def _has_rows(name: str, tensor: Tensor, count: int) -> bool:
    return name in _OF_ROWS and tensor.ndim > 1 and len(tensor) == count
