"""What a checkpoint stores of a quantised layer: names, dtypes and shapes, by format and scheme.

A weight of R rows and C columns, in b bits, with a group for every g columns:

    pack-quantized         weight_packed I32 [R, C b / 32], weight_scale, weight_shape I64 [2];
                           asymmetric: weight_zero_point I32 [R b / 32, C / g], packed like the weight, down the rows
    int-, float-, naive-   weight I8 or F8_E4M3 [R, C], weight_scale; asymmetric: weight_zero_point of its shape
    nvfp4-pack-quantized   weight_packed U8 [R, C / 2], weight_scale F8_E4M3 [R, C / 16], weight_global_scale F32 [1]
    mxfp4-, mxfp6-pack     weight_packed U8 [R, C b / 8], weight_scale U8 [R, C / 32]
    mxfp8-quantized        weight F8_E4M3 [R, C], weight_scale U8 [R, C / 32]

    scales                 tensor [1], channel [R, 1], group [R, C / g], block [R / h, C / w]; divisions round up
    static activations     input_scale [1], or one for each group; asymmetric ones have a zero point of its shape;
                           under a global scale input_global_scale F32 [1], and no input_scale if groups are dynamic
    keys, values, queries  k_scale, v_scale, q_scale [1], or [heads, 1, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationType

from scalewright.numerics.layout import strategy_of

FLOATS = ("BF16", "F16", "F32")
PACKED = CompressionFormat.pack_quantized.value
NVFP4 = CompressionFormat.nvfp4_pack_quantized.value
_MX_PACKED = (CompressionFormat.mxfp4_pack_quantized.value, CompressionFormat.mxfp6_pack_quantized.value)
_MX = (*_MX_PACKED, CompressionFormat.mxfp8_quantized.value)
_INTEGERS = tuple(("int", bits) for bits in range(1, 9))
_PLAIN = {
    CompressionFormat.int_quantized.value: _INTEGERS,
    CompressionFormat.float_quantized.value: (("float", 8),),
    CompressionFormat.naive_quantized.value: (*_INTEGERS, ("float", 8)),
    CompressionFormat.mxfp8_quantized.value: (("float", 8),),
}
_HOLDS = {
    PACKED: _INTEGERS,
    NVFP4: (("float", 4),),
    _MX_PACKED[0]: (("float", 4),),
    _MX_PACKED[1]: (("float", 6),),
    **_PLAIN,
}
_POINT_DTYPES = {"torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32", "torch.float8_e4m3fn": "F8_E4M3"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor as it should be: its shape, and the dtypes that will do."""

    dtypes: tuple[str, ...]
    shape: Shape


def stored_tensors(scheme: QuantizationScheme, stored_as: str, shape: Sequence[int]) -> dict[str, Stored]:
    """The tensors of a layer whose weight has this shape, by their names within the layer; but for its bias.

    A scheme that makes no sense is a ValueError.
    """
    rows, columns = shape
    found: dict[str, Stored] = {}
    if scheme.weights is None:
        found["weight"] = Stored(FLOATS, (rows, columns))
    else:
        found |= _weight(scheme.weights, stored_as, rows, columns)
    found |= _activations("input", scheme.input_activations, columns)
    return found | _activations("output", scheme.output_activations, rows)


def states_tensors(args: QuantizationArgs, heads: Mapping[str, int | None]) -> dict[str, Stored]:
    """The tensors of an attention module; `heads` has how many there are of queries, keys and values."""
    found: dict[str, Stored] = {}
    for base_name, count in heads.items():
        shape: Shape = (1,)
        if strategy_of(args) == "attn_head":
            if count is None:
                raise ValueError("the configuration does not say how many heads there are")
            shape = (count, 1, 1)
        found |= _scale_and_point(base_name, args, shape)
    return found


def _weight(args: QuantizationArgs, stored_as: str, rows: int, columns: int) -> dict[str, Stored]:
    bits = int(args.num_bits)
    if (_type_of(args), bits) not in _HOLDS.get(stored_as, ()):
        raise ValueError(f"there are no {_type_of(args)} weights of {bits} bits in the format '{stored_as}'")
    scale_shape = _scale_shape(args, (rows, columns))
    if stored_as == PACKED:
        found = {"weight_packed": Stored(("I32",), (rows, words(columns, bits)))}
        found |= _scale_and_point("weight", args, scale_shape)
        if "weight_zero_point" in found and strategy_of(args) in ("group", "channel"):
            found["weight_zero_point"] = Stored(("I32",), (words(rows, bits), scale_shape[-1]))
        return found | {"weight_shape": Stored(("I64",), (2,))}
    if stored_as in _PLAIN:
        found = {"weight": Stored(("F8_E4M3" if _type_of(args) == "float" else "I8",), (rows, columns))}
        found |= _scale_and_point("weight", args, scale_shape)
    else:
        found = {"weight_packed": Stored(("U8",), (rows, columns * bits // 8))}
        found |= _scale_and_point("weight", args, scale_shape)
        if stored_as == NVFP4:
            found["weight_scale"] = Stored(("F8_E4M3",), scale_shape)
            found["weight_global_scale"] = Stored(("F32",), (1,))
    if stored_as in _MX:
        found["weight_scale"] = Stored(("U8",), scale_shape)
    return found


def _type_of(args: QuantizationArgs) -> str:
    return str(QuantizationType(args.type).value)


def words(count: int, num_bits: int) -> int:
    """How many 32-bit words hold so many codes."""
    return -(-count * num_bits // 32)


def _activations(base_name: str, args: QuantizationArgs | None, width: int) -> dict[str, Stored]:
    if args is None or args.dynamic is True:
        return {}
    found: dict[str, Stored] = {}
    if strategy_of(args) == "tensor_group":
        found[f"{base_name}_global_scale"] = Stored(("F32",), (1,))
    if args.dynamic == "local":
        return found
    return found | _scale_and_point(base_name, args, _scale_shape(args, (width,)))


def _scale_and_point(base_name: str, args: QuantizationArgs, shape: Shape) -> dict[str, Stored]:
    found = {f"{base_name}_scale": Stored(FLOATS, shape)}
    if not args.symmetric:
        dtype = _POINT_DTYPES.get(str(args.zp_dtype), "I8")
        found[f"{base_name}_zero_point"] = Stored((dtype,), shape)
    return found


def _scale_shape(args: QuantizationArgs, shape: Shape) -> Shape:
    """The shape of the scales of a tensor whose last dimensions are known."""
    strategy = strategy_of(args)
    if strategy == "tensor":
        return (1,)
    if strategy in ("group", "tensor_group") and args.group_size:
        return (*shape[:-1], -(-shape[-1] // int(args.group_size)))
    if strategy == "channel" and len(shape) == 2:
        return (shape[0], 1)
    if strategy == "block" and len(shape) == 2 and args.block_structure and all(args.block_structure):
        rows, columns = args.block_structure
        return (-(-shape[0] // rows), -(-shape[1] // columns))
    raise ValueError(f"there are no static scales by the strategy '{strategy}'")
