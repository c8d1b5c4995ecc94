"""Schemes by name: compressed-tensors' presets, and W8A8 as its users mean it.

`W8A8` has static activation scales, one for each tensor; `W8A8_DYNAMIC` has one for each token, found while the model
runs (compressed-tensors' own preset of the name `W8A8`, which is also its `INT8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from scalewright.errors import RecipeError, did_you_mean
from scalewright.numerics.layout import strategy_of
from scalewright.numerics.scales import stored_dtype

_DYNAMIC = "W8A8_DYNAMIC"


def scheme_names() -> list[str]:
    """All names that `scheme_named` knows."""
    return sorted({*PRESET_SCHEMES, _DYNAMIC})


def scheme_named(name: str, targets: Iterable[str] = ("Linear",)) -> QuantizationScheme:
    """The scheme of that name, in any case of letters, for some targets. Its arguments name no observer."""
    known = scheme_names()
    if not isinstance(name, str):
        raise RecipeError(f"scheme: expected a name, got {name!r}. Schemes: {', '.join(known)}.")
    wanted = name.upper()
    if wanted not in known:
        raise RecipeError(f"there is no scheme '{name}'.{did_you_mean(wanted, known)} Schemes: {', '.join(known)}.")
    preset = "W8A8" if wanted == _DYNAMIC else wanted
    scheme: QuantizationScheme = preset_name_to_scheme(preset, list(targets))
    if wanted == "W8A8":
        scheme.input_activations = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=True, dynamic=False)
    for args in (scheme.weights, scheme.input_activations, scheme.output_activations):
        if args is not None:
            args.observer = None  # ours measure better than those that presets name, unless the user names one
    return scheme


def bits_per_weight(
    args: QuantizationArgs | None,
    shape: Sequence[int],
    inputs: QuantizationArgs | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """What one weight of a matrix takes in the checkpoint, its share of scales and zero points included.

    Small integers are packed where `inputs` stay as they are; where those are quantised, each integer has a byte.
    Scales that are no codes are stored in the `dtype` of the weight.
    """
    if args is None:
        return 8.0 * dtype.itemsize
    num_bits = int(args.num_bits) if inputs is None or args.type == "float" else max(int(args.num_bits), 8)
    rows, columns = shape[-2], shape[-1]
    strategy = strategy_of(args)
    if strategy in ("group", "tensor_group"):
        num_scales = rows * -(-columns // int(args.group_size or columns))
    elif strategy == "channel":
        num_scales = rows
    elif strategy == "block":
        block_rows, block_columns = args.block_structure or (rows, columns)
        num_scales = -(-rows // block_rows) * -(-columns // block_columns)
    else:
        num_scales = 1
    scale_bits = 8 if args.scale_dtype is not None else 8 * stored_dtype(dtype, args).itemsize
    point_bits = 0 if args.symmetric else num_bits
    return num_bits + num_scales * (scale_bits + point_bits) / (rows * columns)


@dataclass(frozen=True)
class SchemeRow:
    """One line of the table of schemes."""

    name: str
    weights: str
    activations: str
    bits: float
    needs_data: bool


def scheme_rows() -> list[SchemeRow]:
    """The table of schemes: what each does to weights and activations of a 4096 x 4096 layer."""
    rows = []
    for name in scheme_names():
        scheme = scheme_named(name)
        rows.append(
            SchemeRow(
                name,
                in_words(scheme.weights),
                in_words(scheme.input_activations),
                bits_per_weight(scheme.weights, (4096, 4096), scheme.input_activations),
                any(wants_values(args) for args in (scheme.input_activations, scheme.output_activations)),
            )
        )
    return rows


def in_words(args: QuantizationArgs | None) -> str:
    """`int4, groups of 128, symmetric` and the like."""
    if args is None:
        return "as they are"
    strategy = strategy_of(args)
    kind = "int" if args.type == "int" else "fp"
    parts = [f"{kind}{args.num_bits}"]
    if strategy in ("group", "tensor_group"):
        parts.append(f"groups of {args.group_size}")
        if strategy == "tensor_group":
            parts.append("under a global scale")
    elif strategy == "block":
        parts.append("blocks of {}x{}".format(*(args.block_structure or ("?", "?"))))
    else:
        parts.append({"tensor": "per tensor", "channel": "per channel", "token": "per token"}.get(strategy, strategy))
    if not args.symmetric:
        parts.append("asymmetric")
    if args.dynamic:
        parts.append("dynamic" if args.dynamic is True else "dynamic group scales")
    return ", ".join(parts)


def wants_values(args: QuantizationArgs | None) -> bool:
    """Whether activations must be seen before they can be quantised: static scales, or a static global scale."""
    return args is not None and args.dynamic is not True
