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
from scalewright.modifiers.packing import FP8Packer, MXFP4Packer, NVFP4Packer, Packer
from scalewright.numerics.layout import strategy_of

backends.register()

_ELEMENTS = 1 << 19  # of the rows that go at one time
_STEP = 128  # rows go in multiples of this: zero points are packed eight rows to a word
_BY_ROW = ("tensor", "channel", "group", "tensor_group")  # nothing is shared by some rows and not by others
_OF_ROWS = ("weight", "weight_scale", "weight_zero_point")
_SHAPE = "weight_shape"
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
    take: Callable[[slice, Tensor], None],
) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores for a module's `state`. `take` is given rows as they will be read back."""
    compressor = _compressor(stored_as)
    weight = state["weight"]
    pieces: list[dict[str, Tensor]] = []
    for rows in _slices(weight, scheme):
        given = {name: each[rows] if _has_rows(name, each, len(weight)) else each for name, each in state.items()}
        piece = compressor.compress(given, scheme)
        take(rows, compressor.decompress(piece, scheme)["weight"])
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
