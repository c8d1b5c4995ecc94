"""The matrix that the golden tests run over, and the values that observers are given in it."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from float64_reference import FITTING, Array, Format, cut

from scalewright.observers import Observer
from scalewright.observers.catalog import registered_observers

# Classes that other tests register for themselves are none of our business.
OBSERVERS = [name for name, cls in registered_observers().items() if cls.__module__.startswith("scalewright.")]
ON_COUNTS = ("percentile", "entropy", "histogram_mse", "balanced_mse")

# Defaults that take too long for every cell of the matrix, or leave no value out of so few, are tested apart.
KNOBS_FOR_EVERY_CELL: dict[str, tuple[tuple[str, float], ...]] = {
    "nvfp4_expanded_mse": (("grid", 20.0),),
    "percentile": (("percentile", 95.0),),
    "entropy": (("bins", 256),),
    "histogram_mse": (("grid", 10.0),),
    "balanced_mse": (("grid", 10.0),),
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BASE_NAMES = tuple(FITTING)
PAIRS = [(base_name, strategy) for base_name, fitting in FITTING.items() for strategy in sorted(fitting)]

ANYWHERE = [
    *[Format(f"int{bits}", "int", bits) for bits in range(2, 9)],
    *[Format(f"int{bits} affine", "int", bits, symmetric=False) for bits in range(2, 9)],
    Format("fp8", "e4m3", 8),
    Format("fp4", "e2m1", 4),
]
SOME_FORMATS = [fmt for fmt in ANYWHERE if fmt.name in ("int4", "int4 affine", "int8 affine", "fp8")]
NVFP4 = Format("NVFP4", "e2m1", 4, scales="e4m3", group_size=16)
MXFP4 = Format("MXFP4", "e2m1", 4, scales="e8m0", group_size=32)
BLOCK = (4, 24)  # neither divides the 6 x 64 weight
SHAPES = {"weight": (6, 64), "input": (2, 3, 64), "output": (2, 3, 64), **dict.fromkeys("qkv", (2, 2, 3, 32))}


def serves(observer: str, strategy: str) -> bool:
    """Whether the observer is meant for the strategy: a record of all values is kept for few positions only."""
    return observer not in ON_COUNTS or strategy in ("tensor", "attn_head")


def formats_for(strategy: str) -> list[Format]:
    """All formats; NVFP4 and MXFP4 bring their strategy with them."""
    return ANYWHERE + {"tensor_group": [NVFP4], "group": [MXFP4]}.get(strategy, [])


def args_for(fmt: Format, strategy: str) -> QuantizationArgs:
    if fmt in (NVFP4, MXFP4):
        return preset_name_to_scheme(fmt.name, ["Linear"]).weights
    extra: dict[str, object] = {}
    if strategy in ("group", "tensor_group"):
        extra["group_size"] = fmt.group_size
    if strategy == "block":
        extra["block_structure"] = list(BLOCK)
    if strategy == "token":
        extra["dynamic"] = True
    kind = "int" if fmt.grid == "int" else "float"
    return QuantizationArgs(num_bits=fmt.bits, type=kind, symmetric=fmt.symmetric, strategy=strategy, **extra)


def values_for(base_name: str, dtype: str, batch: int = 0) -> torch.Tensor:
    """Values with outliers, a mean that is not zero and sizes that differ a lot; the last quarter is all positive.

    A later batch has the largest maximum.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(base_name.encode()) + batch)
    shape = SHAPES[base_name]
    x = torch.randn(shape, generator=generator) + 0.3
    x *= torch.where(torch.rand(shape, generator=generator) < 0.02, 4.0, 1.0)
    sizes = torch.logspace(-2, 1, 8).repeat_interleave(shape[-1] // 8)
    x *= sizes
    if base_name == "weight":
        x *= torch.logspace(-1, 0.5, shape[0]).unsqueeze(1)
        x[0, :16] *= 1e-3  # a group whose scale would round to zero in e4m3, and in fp16 at many bits
    x[..., -shape[-1] // 4 :] = x[..., -shape[-1] // 4 :].abs()
    x.view(-1)[x.abs().argmax()] *= 10**batch
    return x.to(DTYPES[dtype])


def cut_for(value: torch.Tensor, base_name: str, strategy: str, fmt: Format) -> Array:
    """`value` in float64 as the reference wants it: [*qparam_shape, values that share a scale]."""
    return cut(exact(value), base_name, strategy, group_size=fmt.group_size, block=BLOCK)


def exact(value: torch.Tensor) -> Array:
    return np.asarray(value.double().numpy())


def observer_for(observer: str, base_name: str, args: QuantizationArgs, **knobs: object) -> Observer:
    return Observer.load_from_registry(observer, base_name=base_name, args=args, **knobs)
