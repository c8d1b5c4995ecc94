"""Whether the numbers in a checkpoint are such as a loader can use: scales, codes, zero points, all the rest.

Tensors are looked at one by one, and large ones in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.checkpoint.folder import pieces, read_rows, read_tensor
from scalewright.checkpoint.formats import PACKED, words
from scalewright.checkpoint.problems import Problem
from scalewright.checkpoint.shards import DTYPES, TensorAt
from scalewright.checkpoint.smoothed import Powers
from scalewright.checkpoint.structure import Layer
from scalewright.modifiers.storing import read_back
from scalewright.numerics.grids import grid_of
from scalewright.numerics.layout import strategy_of
from scalewright.numerics.measure import Noise

_ROWS = 128  # zero points are packed down the rows, and a multiple of this is a whole number of words
_ELEMENTS = 1 << 20  # of the rows that are restored at one time
_E8M0_NAN = 255
_FLUSHED = ("BF16", "F32", "U8")  # fp16 and e4m3 have so few numbers that the smallest ones are of use
_ORDINARY = 2.0**20  # times the smallest number that is not flushed
_BY_ROW = ("tensor", "channel", "group", "tensor_group")

Places = Mapping[str, TensorAt]
"""Where the tensors of a layer are, by their names within it; those that are as they should be."""


def check_layer(layer: Layer, places: Places, *, may_be_negative: bool) -> Iterator[Problem]:
    """What is wrong with the values of a layer's tensors."""
    weights = layer.scheme.weights
    for local, at in places.items():
        where = layer.places[local]
        if local.endswith("_scale"):
            yield from _check_scale(where, local, at, layer, places, may_be_negative=may_be_negative)
        elif local == "weight_shape":
            found = tuple(read_tensor(at).tolist())
            if found != layer.shape:
                yield Problem(where, f"says {list(found)}, and the weight has the shape {list(layer.shape)}.")
        elif local == "weight_packed" and layer.stored_as == PACKED and weights is not None:
            yield from _check_padding(where, at, layer.shape[1], int(weights.num_bits), dim=1)
        elif local == "weight_zero_point" and layer.stored_as == PACKED and at.dtype == "I32" and weights is not None:
            yield from _check_padding(where, at, layer.shape[0], int(weights.num_bits), dim=0)
        elif local.endswith("_zero_point"):
            yield from _check_codes(where, at, _args_of(layer, local.removesuffix("_zero_point")))
        elif local == "weight" and weights is not None:
            yield from _check_codes(where, at, weights)
        else:
            yield from check_finite(where, at)


def check_finite(where: str, at: TensorAt, *, infinite_too: bool = True) -> Iterator[Problem]:
    """NaN in a tensor, and Inf unless that is as it should be."""
    if not DTYPES[at.dtype].is_floating_point:
        return
    num_nan = num_inf = 0
    for each in pieces(at):
        if _may_have_others(each):
            piece = each.float() if each.element_size() == 1 else each
            num_nan += int(torch.isnan(piece).sum())
            num_inf += int(torch.isinf(piece).sum())
    if num_nan:
        yield Problem(where, f"{num_nan} of {math.prod(at.shape)} values {_are(num_nan)} NaN.")
    if num_inf and infinite_too:
        yield Problem(where, f"{num_inf} of {math.prod(at.shape)} values {_are(num_inf)} infinite.")


def _may_have_others(piece: Tensor) -> bool:
    """Whether there may be NaN or Inf in a piece; quick, because there are none as a rule."""
    if piece.dtype == torch.float8_e4m3fn:  # has no Inf, and is NaN where all bits but the sign are set
        codes = piece.view(torch.int8)
        return bool((codes.max() == 0x7F) | (codes.view(torch.uint8).max() == 0xFF))
    if piece.element_size() == 1:
        piece = piece.float()
    return not bool(torch.isfinite(piece.sum(dtype=torch.float32)))  # which may overflow


# ---- scales ----------------------------------------------------------------------------------------------------------


def _check_scale(
    where: str, local: str, at: TensorAt, layer: Layer, places: Places, *, may_be_negative: bool
) -> Iterator[Problem]:
    stored = read_tensor(at)
    if at.dtype == "U8":
        yield from _said(where, stored == _E8M0_NAN, "NaN", stored)
        scale, smallest = 2.0 ** (stored.double() - 127), 2.0**-126
    else:
        scale, smallest = stored.double(), torch.finfo(DTYPES[at.dtype]).smallest_normal
        yield from _said(where, torch.isnan(scale), "NaN", scale)
        yield from _said(where, torch.isinf(scale), "infinite", scale)
        yield from _said(where, scale == 0, "zero", scale)
        negative = (scale < 0) & torch.isfinite(scale)
        if local != "weight_scale":
            yield from _said(where, negative, "negative", scale, ", and only scales of weights may be")
        elif not may_be_negative:
            yield from _said(where, negative, "negative", scale, ", and the recipe asks for no signed scales")
    if at.dtype in _FLUSHED:
        yield from _check_flushed(where, local, scale.abs(), smallest, layer, places)


def _said(where: str, bad: Tensor, word: str, scale: Tensor, more: str = "") -> Iterator[Problem]:
    if bool(bad.any()):
        value = f" ({float(scale[bad][0]):.3g})" if word == "negative" else ""
        yield Problem(where, f"{_some_of(bad)} {word}{value}{more}.")


def _some_of(bad: Tensor) -> str:
    """`3 of 192 scales, the first at [5, 0], are`."""
    count = int(bad.sum())
    if bad.numel() == 1:
        return "is"
    place = [int(each[0]) for each in bad.nonzero(as_tuple=True)]
    return f"{count} of {bad.numel()} scales, {'the first ' if count > 1 else ''}at {place}, {_are(count)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _check_flushed(
    where: str, local: str, scale: Tensor, smallest: float, layer: Layer, places: Places
) -> Iterator[Problem]:
    """Scales so small that arithmetic units take them for zero.

    Rows of a weight may be that small, and are as good as zero. So a scale of a weight is wrong if it has anything to
    scale, and others in its row are of ordinary size; or if it is the only one.
    """
    is_tiny = (scale < smallest) & (scale > 0)
    if not bool(is_tiny.any()):
        return
    if local == "weight_scale" and scale.numel() > 1:
        used = _positions_in_use(layer, places)
        is_tiny &= scale.amax(dim=-1, keepdim=True) > _ORDINARY * smallest
        if used is not None:
            is_tiny &= used.reshape(scale.shape)
    if bool(is_tiny.any()):
        yield Problem(
            where, f"{_some_of(is_tiny)} flushed: below {smallest:.2g}, and arithmetic units may take that for zero."
        )


def _positions_in_use(layer: Layer, places: Places) -> Tensor | None:
    """Which scales have anything to scale; None if it cannot be told, because tensors are missing."""
    args = layer.scheme.weights
    if args is None or places.keys() != layer.tensors.keys():
        return None
    stored = {local: read_tensor(at) for local, at in places.items()}
    for local in ("weight_scale", "weight_global_scale"):
        if local in stored:
            one = 127 if stored[local].dtype == torch.uint8 else 1
            stored[local] = torch.full_like(stored[local].float(), one).to(stored[local].dtype)
    if "weight_shape" in stored:
        stored["weight_shape"] = torch.tensor(layer.shape)
    used = read_back(stored, layer.scheme, CompressionFormat(layer.stored_as))["weight"] != 0
    strategy = strategy_of(args)
    if strategy == "tensor":
        return used.any().reshape(1)
    rows, columns = layer.shape
    height, width = 1, columns
    if strategy in ("group", "tensor_group"):
        width = int(args.group_size)
    elif strategy == "block":
        height, width = args.block_structure
    padded = torch.nn.functional.pad(used, (0, -columns % width, 0, -rows % height))
    return padded.reshape(padded.shape[0] // height, height, -1, width).any(dim=3).any(dim=1)


# ---- codes -----------------------------------------------------------------------------------------------------------


def _args_of(layer: Layer, base_name: str) -> QuantizationArgs | None:
    parts = {"weight": layer.scheme.weights, "output": layer.scheme.output_activations}
    return parts.get(base_name, layer.scheme.input_activations)


def _check_codes(where: str, at: TensorAt, args: QuantizationArgs | None) -> Iterator[Problem]:
    """Integers beyond the range of their bits; floats that are no numbers."""
    if DTYPES[at.dtype].is_floating_point or args is None:
        yield from check_finite(where, at)
        return
    grid = grid_of(args)
    low, high = int(grid.low), int(grid.high)
    if low <= torch.iinfo(DTYPES[at.dtype]).min and high >= torch.iinfo(DTYPES[at.dtype]).max:
        return
    count, worst = 0, 0
    for piece in pieces(at):
        outside = piece[(piece < low) | (piece > high)].long()
        count += len(outside)
        if len(outside):
            worst = max(worst, int(outside[outside.abs().argmax()]), key=abs)
    if count:
        yield Problem(
            where,
            f"{count} of {math.prod(at.shape)} values {_are(count)} outside of {low} to {high}, the range of "
            f"{args.num_bits} bits, such as {worst}.",
        )


def _check_padding(where: str, at: TensorAt, count: int, num_bits: int, *, dim: int) -> Iterator[Problem]:
    """Bits of packed words that belong to no code, and are to be zero."""
    spare = words(count, num_bits) * 32 - count * num_bits
    if not spare or not math.prod(at.shape):
        return
    last = read_tensor(at).select(dim, -1).long() & 0xFFFFFFFF
    bad = int((last >> (32 - spare) != 0).sum())
    if bad:
        yield Problem(
            where,
            f"behind {count} values of {num_bits} bits there are {spare} bits to spare, and {bad} of {last.numel()} "
            "last words have others than zeros there.",
        )


# ---- beside the original ---------------------------------------------------------------------------------------------


def decibels_kept(
    layer: Layer, places: Places, original: TensorAt, dtype: torch.dtype, powers: Powers | None = None
) -> float:
    """Signal to noise of a stored weight, beside the original in the dtype that the model was quantised in.

    `powers` of two are what the original was multiplied with.
    """
    stored = {local: read_tensor(at) for local, at in places.items() if local != "weight_shape"}
    noise = Noise()
    for rows in _slices(layer):
        restored = read_back(_rows_of(layer, stored, rows), layer.scheme, CompressionFormat(layer.stored_as))["weight"]
        expected = read_rows(original, rows).to(dtype)
        noise.add(expected if powers is None else powers.of(expected, rows), restored.to(dtype))
    return noise.decibels


def _slices(layer: Layer) -> list[slice]:
    rows, columns = layer.shape
    args = layer.scheme.weights
    if args is None or strategy_of(args) not in _BY_ROW:
        return [slice(0, rows)]
    step = max(1, _ELEMENTS // max(1, columns) // _ROWS) * _ROWS
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _rows_of(layer: Layer, stored: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """What is stored of some rows of a weight."""
    args = layer.scheme.weights
    assert args is not None
    found = {}
    for local, each in stored.items():
        has_rows = local.startswith("weight") and each.ndim == 2 and strategy_of(args) in _BY_ROW
        if has_rows and local == "weight_zero_point" and each.dtype == torch.int32:
            bits = int(args.num_bits)
            found[local] = each[rows.start * bits // 32 : words(rows.stop, bits)]
        else:
            found[local] = each[rows] if has_rows else each
    if layer.stored_as == PACKED:
        found["weight_shape"] = torch.tensor([rows.stop - rows.start, layer.shape[1]])
    return found


def is_same(one: TensorAt, other: TensorAt, powers: Powers | None = None) -> bool:
    """Whether a tensor is what the other becomes in its dtype, multiplied with `powers` of two."""
    if powers is not None:
        if not DTYPES[one.dtype].is_floating_point or DTYPES[one.dtype].itemsize < 2:  # nothing that is smoothed
            return False
        mine = read_tensor(one)
        theirs = powers.of(read_tensor(other).to(mine.dtype))
        return torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    for mine, theirs in zip(_elements(one), _elements(other), strict=True):
        if not torch.equal(mine.view(torch.uint8), theirs.to(mine.dtype).view(torch.uint8)):
            return False
    return True


def _elements(at: TensorAt) -> Iterator[Tensor]:
    """The numbers of a tensor, as many at a time whatever the dtype."""
    size = DTYPES[at.dtype].itemsize
    flat = TensorAt(at.file, at.start, at.num_bytes, at.dtype, (at.num_bytes // size,))
    for start in range(0, flat.shape[0], _ELEMENTS):
        yield read_rows(flat, slice(start, start + _ELEMENTS))
