"""What we compute, compressed-tensors computes too: qparams, fake-quantised values and rounding agree with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, generate_gparam
from float64_reference import Format, positive_numbers, round_to_grid
from golden_matrix import (
    ANYWHERE,
    KNOBS_FOR_EVERY_CELL,
    NVFP4,
    OBSERVERS,
    PAIRS,
    SOME_FORMATS,
    args_for,
    cut_for,
    exact,
    formats_for,
    observer_for,
    serves,
    values_for,
)

from scalewright.numerics.grids import grid_of
from scalewright.numerics.measure import quantize_dequantize_, summed_error
from scalewright.numerics.scales import effective_scale
from scalewright.observers import QParamsDict

FP6 = Format("fp6", "e2m3", 6)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors as small as these lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- qparams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax"])
def test_minmax_qparams_are_those_of_compressed_tensors_to_the_bit(name: str):
    for base_name, strategy in PAIRS:
        for fmt in formats_for(strategy):
            where = f"{name}, {strategy}, {fmt.name}, {base_name}"
            args, x = args_for(fmt, strategy), values_for(base_name, "fp32")
            found = observer_for(name, base_name, args)(x).get_qparams()
            shared = torch.from_numpy(cut_for(x, base_name, strategy, fmt)).float()
            divisor = generate_gparam(x.min(), x.max()) if strategy == "tensor_group" else None
            scale, zero_point = calculate_qparams(shared.amin(dim=-1), shared.amax(dim=-1), args, divisor)
            if fmt == NVFP4:
                # The one departure: for a scale that rounds to zero theirs is 0.125, so that the whole group rounds to
                # zero, and ours is the smallest number that e4m3 has.
                is_flushed = shared.abs().amax(dim=-1) / 6 * divisor <= 2.0**-10
                assert bool(is_flushed.any()) == (base_name == "weight"), where
                scale = scale.masked_fill(is_flushed, 2.0**-9)
            for key, expected in {"scale": scale, "zero_point": zero_point, "global_scale": divisor}.items():
                same_bits(found[key], expected, f"{where}: {key}")


def same_bits(got: torch.Tensor | None, expected: torch.Tensor | None, where: str) -> None:
    if got is None or expected is None:
        assert got is expected, f"{where} is {got}, and compressed-tensors has {expected}"
        return
    assert got.dtype == expected.dtype, f"{where} is {got.dtype}, and compressed-tensors has {expected.dtype}"
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, msg=lambda text: f"{where}: {text}")


# ---- fake quantisation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVERS)
def test_fake_quantize_gives_the_values_and_the_error_that_we_measure(name: str):
    for base_name, strategy, fmt in cells_for(name):
        where = f"{name}, {strategy}, {fmt.name}, {base_name}"
        args, x = args_for(fmt, strategy), values_for(base_name, "fp32")
        qparams = qparams_found(name, base_name, args, x)
        theirs = fake_quantized(x, qparams, base_name, args)
        assert theirs.shape == x.shape, where
        assert theirs.isfinite().all(), where
        shared = torch.from_numpy(cut_for(x, base_name, strategy, fmt)).float()
        scale = effective_scale(qparams["scale"], qparams["global_scale"])
        zero_point = None if fmt.symmetric else qparams["zero_point"].float()
        point = None if zero_point is None else zero_point.unsqueeze(-1)
        ours = quantize_dequantize_(shared.clone(), scale.unsqueeze(-1), point, grid_of(args))
        expected = torch.from_numpy(cut_for(theirs, base_name, strategy, fmt))
        close(ours.double(), expected, where, rtol=1e-6)
        lost = summed_error(shared.unsqueeze(0), scale, zero_point, grid_of(args))[0]
        close(lost.double(), (expected - shared.double()).square().sum(dim=-1), f"{where}: error", rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OBSERVERS)
def test_fake_quantize_in_half_precision_loses_little_more_than_in_fp32(name: str, dtype: str):
    for base_name, strategy, fmt in cells_for(name):
        where = f"{name}, {strategy}, {fmt.name}, {dtype}, {base_name}"
        args, x = args_for(fmt, strategy), values_for(base_name, dtype)
        qparams = qparams_found(name, base_name, args, x)
        half = fake_quantized(x, qparams, base_name, args)
        assert half.shape == x.shape, where
        assert half.isfinite().all(), where
        whole = fake_quantized(x.float(), {**qparams, "scale": qparams["scale"].float()}, base_name, args)
        lost_in_half, lost = (np.square(exact(each) - exact(x)).sum() for each in (half, whole))
        assert lost_in_half <= 4 * lost, f"{where}: {lost_in_half} is lost, and {lost} in fp32"


def cells_for(name: str) -> Iterator[tuple[str, str, Format]]:
    """Where the observer serves; every format for plain min-max, one of each kind for the others."""
    for base_name, strategy in PAIRS:
        if serves(name, strategy):
            formats = formats_for(strategy)
            some = [fmt for fmt in formats if fmt in SOME_FORMATS or fmt.grid == "e2m1"]
            yield from ((base_name, strategy, fmt) for fmt in (formats if name == "memoryless_minmax" else some))


def qparams_found(name: str, base_name: str, args: QuantizationArgs, x: torch.Tensor) -> QParamsDict:
    knobs = dict(KNOBS_FOR_EVERY_CELL.get(name, ()))
    return observer_for(name, base_name, args, **knobs)(x).get_qparams()


def fake_quantized(x: torch.Tensor, qparams: QParamsDict, base_name: str, args: QuantizationArgs) -> torch.Tensor:
    scale, zero_point = qparams["scale"], qparams["zero_point"]
    # compressed-tensors lines scales up with the tensor from the right: tokens must be a column, groups a row.
    if args.strategy == "token":
        scale, zero_point = scale.unsqueeze(-1), zero_point.unsqueeze(-1)
    elif base_name != "weight" and args.strategy in ("group", "tensor_group"):
        scale, zero_point = scale.unsqueeze(0), zero_point.unsqueeze(0)
    return fake_quantize(x, scale, zero_point, args, qparams["global_scale"])


def close(got: torch.Tensor, expected: torch.Tensor, where: str, *, rtol: float) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=0, msg=lambda text: f"{where}: {text}")


# ---- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [*[fmt for fmt in ANYWHERE if fmt.symmetric], FP6], ids=lambda fmt: fmt.name)
def test_grids_round_as_compressed_tensors_does(fmt: Format):
    args = QuantizationArgs(num_bits=fmt.bits, type="int" if fmt.grid == "int" else "float", zp_dtype=torch.int8)
    x = values_to_round(fmt)
    low, high = calculate_range(args, x.device)
    theirs = round_to_quantized_type_args(x.clone(), args, low, high)
    torch.testing.assert_close(grid_of(args).round_(x.clone()), theirs, rtol=0, atol=0)
    torch.testing.assert_close(torch.from_numpy(round_to_grid(exact(x), fmt)).float(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", [*[fmt for fmt in ANYWHERE if fmt.symmetric], FP6], ids=lambda fmt: fmt.name)
def test_grids_list_all_their_numbers(fmt: Format):
    args = QuantizationArgs(num_bits=fmt.bits, type="int" if fmt.grid == "int" else "float", zp_dtype=torch.int8)
    torch.testing.assert_close(grid_of(args).numbers(), numbers_of(fmt), rtol=0, atol=0)


def values_to_round(fmt: Format) -> torch.Tensor:
    """All numbers, all ties between them and their nearest neighbours, every bf16 number, and a dense sweep."""
    numbers = numbers_of(fmt)
    special = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    infinity = torch.tensor(torch.inf)
    codes = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
    sweep = torch.linspace(1.5 * fmt.low, 1.5 * fmt.high, 50_001)
    return torch.cat(
        [special, special.nextafter(infinity), special.nextafter(-infinity), codes[codes.isfinite()], sweep]
    )


def numbers_of(fmt: Format) -> torch.Tensor:
    if fmt.grid == "int":
        return torch.arange(fmt.low, fmt.high + 1)
    positive = torch.from_numpy(positive_numbers(fmt.grid)).float()
    return torch.cat([-positive[1:].flip(0), positive])
