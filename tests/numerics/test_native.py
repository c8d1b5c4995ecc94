"""The compiled loops beside plain definitions in float64, where loops go wrong: at ends, tails and signs."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams

from scalewright.numerics import native, products
from scalewright.numerics.grids import E2M1, E4M3, Grid, grid_of

INT4, INT8 = Grid("int4", -8, 7), Grid("int8", -128, 127)
SIZES = (1, 7, 15, 16, 17, 31, 33, 64, 129, 1000)


@pytest.fixture(params=["plain", "AVX2", "AVX-512"], autouse=True)
def kernels(request, monkeypatch):
    """Each of the levels that the loops are compiled for, where this processor has it."""
    level = request.param_index
    if native._module is None or level > native._module.best_level():
        pytest.skip(f"there are no compiled loops of level {level} here")
    monkeypatch.setattr(native, "_level", level)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def steps_lost(x_PE, scale_JP, point_JP, grid):
    """How far values are from the grid, in float64, given the fp32 steps that the loops round."""
    point_JP1 = 0.0 if point_JP is None else point_JP.unsqueeze(-1)
    steps = (x_PE.double() * scale_JP.reciprocal().unsqueeze(-1).double() + point_JP1).float()
    return (steps - grid.round_(steps.clone())).double()


# ---- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [QuantizationArgs(num_bits=4), QuantizationArgs(num_bits=8, type="float")], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_scales_are_those_of_compressed_tensors_to_the_bit(args, size):
    torch.manual_seed(size)
    strength = 10 ** (torch.rand(size) * 80 - 42)
    lo, hi = torch.randn(2, size).mul(strength).sort(dim=0).values  # some ranges lie on one side of 0
    lo[::5], hi[::5] = 0, 0
    lo[-1] = -3e38
    grid = grid_of(args)
    half, stand_in = (grid.high - grid.low) / 2, torch.finfo(torch.float32).eps
    scale, largest = native.symmetric_scales(lo, hi, half=half, stand_in=stand_in)
    expected, _ = calculate_qparams(lo, hi, args)
    torch.testing.assert_close(scale, expected, rtol=0, atol=0)
    assert largest == float(expected.max())


@pytest.mark.parametrize("at", [0, 15, 16, 36])
def test_an_infinite_scale_is_told_of(at):
    lo = torch.full((37,), -1.0)
    lo[at] = -math.inf
    assert native.symmetric_scales(lo, -lo, half=7.5, stand_in=1.0)[1] == math.inf


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_ends_are_the_least_and_the_largest(dtype, size, num_rows):
    torch.manual_seed(size)
    for shift in (0.0, 3.0, -3.0):
        x = (torch.randn(num_rows, size) + shift).to(dtype)
        lo, hi = native.min_max_of_rows(x, x.shape[:-1])
        torch.testing.assert_close(lo, x.amin(dim=1).float(), rtol=0, atol=0)
        torch.testing.assert_close(hi, x.amax(dim=1).float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 200])
def test_nan_of_either_sign_makes_both_ends_nan_and_infinities_stay(dtype, size):
    for place in {0, size // 2, size - 1}:
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            x = torch.ones(3, size).to(dtype)
            x[1, place] = bad
            if math.isnan(bad):
                x[1, place] = torch.tensor(torch.nan, dtype=dtype).copysign(torch.tensor(bad, dtype=dtype))
            lo, hi = native.min_max_of_rows(x, x.shape[:-1])
            torch.testing.assert_close(lo, x.amin(dim=1).float(), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(hi, x.amax(dim=1).float(), rtol=0, atol=0, equal_nan=True)


def test_a_tensor_may_begin_anywhere_in_memory():
    memory = torch.randn(4000)
    for start in range(17):
        x = memory[start : start + 3000].view(30, 100)
        assert native.serves(x)
        torch.testing.assert_close(native.min_max_of_rows(x, x.shape[:-1])[1], x.amax(dim=1), rtol=0, atol=0)
        scale = torch.full((2, 30), 0.3)
        native.errors(x, None, scale, None, grid=INT4, norm=2.0, segment=100)
        native.scores(x, x.abs(), scale, None, grid=INT4, segment=100)


def test_what_it_cannot_take_is_left_to_torch():
    x = torch.randn(8, 8)
    assert native.serves(x)
    assert not native.serves(x.T)
    assert not native.serves(x.double())
    assert not native.serves(x.to("meta"))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [INT4, INT8, E2M1, E4M3], ids=lambda grid: grid.name)
@pytest.mark.parametrize("norm", [1.0, 2.0, 2.4, 3.0, 4.0])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", [1, 16, 33, 300])
def test_errors_are_what_float64_says(grid, norm, is_weighted, size, threads):
    torch.manual_seed(size)
    x = torch.randn(53, size)
    weights = torch.rand(53, size) if is_weighted else None
    absmax = x.abs().amax(dim=1).clamp(min=0.1)
    scale = absmax / grid.high * torch.tensor([1.1, 1.0, 0.8, 0.5]).unsqueeze(1)
    point = torch.randint(-3, 4, scale.shape).float() if grid is INT4 else None
    found = native.errors(x, weights, scale, point, grid=grid, norm=norm, segment=size)
    lost = steps_lost(x, scale, point, grid).abs().pow(norm) * (1.0 if weights is None else weights.double())
    torch.testing.assert_close(found.double(), lost.sum(dim=-1), rtol=2e-4, atol=1e-5 * size)
    if point is None:
        index, error = native.least(x, weights, scale, None, grid=grid, norm=norm, largest=1e10)
        exact = lost.sum(dim=-1) * scale.double().pow(norm)
        torch.testing.assert_close(error.double(), exact.amin(dim=0), rtol=2e-4, atol=1e-9)
        chosen = exact.gather(0, index.unsqueeze(0))[0]
        assert bool((chosen <= exact.amin(dim=0) * (1 + 2e-4) + 1e-9).all())


def test_the_first_of_equals_is_chosen_and_nothing_is_chosen_by_what_is_not_finite():
    x = torch.ones(20, 16)
    scale = torch.ones(3, 20)
    index, error = native.least(x, None, scale, None, grid=INT4, norm=2.0, largest=1e10)
    assert index.tolist() == [0] * 20 and error.tolist() == [0.0] * 20
    scale = torch.stack([torch.full((20,), 1e-30), torch.full((20,), 0.7)])
    index, error = native.least(x, None, scale, None, grid=INT4, norm=4.0, largest=1e9)
    assert index.tolist() == [1] * 20 and bool(error.isfinite().all())


def test_scales_so_large_that_their_power_is_infinite_count_as_the_largest():
    x = torch.ones(20, 16)
    index, error = native.least(x, None, torch.full((1, 20), 1e30), None, grid=INT4, norm=2.0, largest=1e18)
    assert index.tolist() == [0] * 20
    assert error.tolist() == [0.0] * 20  # no square of fp32 is as small as these; 0 times infinity would be no number


def test_polynomials_stand_in_for_powers():
    torch.manual_seed(0)
    x, scale = torch.randn(20, 48), torch.full((2, 20), 0.3)
    curves = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 2.0, 0.0, 0.25]])
    found = native.errors(x, None, scale, None, grid=INT4, norm=2.4, segment=48, curves_JT=curves)
    u = steps_lost(x, scale, None, INT4).abs()
    expected = torch.stack([u[0].pow(2), 0.5 * u[1] + 2 * u[1].pow(3) + 0.25 * u[1].pow(5)]).sum(dim=-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_segments", [1, 3])
def test_neither_threads_nor_neighbours_nor_segments_change_a_bit(num_segments):
    torch.manual_seed(0)
    x, scale = torch.randn(3000, 200 * num_segments), torch.rand(7, 3000) + 0.1
    whole = []
    before = torch.get_num_threads()
    for num in (1, 2):
        torch.set_num_threads(num)
        whole.append(native.errors(x, x.abs(), scale, None, grid=E2M1, norm=2.4, segment=200))
    torch.set_num_threads(before)
    torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=0)
    some = slice(1001, 1014)
    few = native.errors(x[some], x.abs()[some], scale[:, some], None, grid=E2M1, norm=2.4, segment=200)
    torch.testing.assert_close(few, whole[0][:, some], rtol=0, atol=0)
    parts = [
        native.errors(piece.contiguous(), piece.abs().contiguous(), scale, None, grid=E2M1, norm=2.4, segment=200)
        for piece in torch.split(x, 200, dim=1)
    ]
    torch.testing.assert_close(sum(each.double() for each in parts), whole[0].double(), rtol=0, atol=1e-12)


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("has_points", [False, True], ids=["symmetric", "affine"])
@pytest.mark.parametrize(("size", "segment"), [(5, 5), (64, 64), (129, 129), (300, 100)])
def test_scores_are_what_float64_says(is_weighted, has_points, size, segment, threads):
    torch.manual_seed(size)
    x = torch.randn(45, size)
    weights = torch.rand(45, size) if is_weighted else None
    scale = torch.rand(3, 45) * 0.3 + 0.05
    point = torch.randint(-4, 4, (3, 45)).float() if has_points else None
    products, squares = native.scores(x, weights, scale, point, grid=INT4, segment=segment)
    shift = torch.zeros(3, 45, 1) if point is None else point.unsqueeze(-1)
    codes = (x * scale.reciprocal().unsqueeze(-1)).round()
    codes = torch.minimum(torch.maximum(codes, -8 - shift), 7 - shift).double()
    w = 1.0 if weights is None else weights.double()
    torch.testing.assert_close(products.double(), (w * x.double() * codes).sum(dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares.double(), (w * codes * codes).sum(dim=-1), rtol=1e-4, atol=1e-4)


# ---- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 16, 20, 48, 64])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("size", "segment"), [(3, 3), (16, 16), (70, 70), (120, 40)])
def test_lines_are_looked_up(columns, is_weighted, size, segment, threads):
    torch.manual_seed(columns)
    x, table = torch.randn(29, size), torch.rand(2 * 50, columns)
    weights = torch.rand(29, size) if is_weighted else None
    first = torch.randint(0, 2, (29,)).float() * 50
    lines = native.Lines(native.in_vectors(table), columns, torch.full((29,), 9.0), first + 25.5, first, 50)
    place = torch.maximum(
        torch.minimum(x * 9.0 + (first + 25.5).unsqueeze(1), first.unsqueeze(1) + 49), first.unsqueeze(1)
    )
    picked = table.double()[place.long()]
    expected = (picked if weights is None else picked * weights.double().unsqueeze(-1)).sum(dim=1)
    torch.testing.assert_close(
        native.chart_sums(x, weights, lines, segment=segment).double(), expected, rtol=1e-5, atol=1e-5
    )
    if size == segment:
        index, least = native.chart_least(x, weights, lines)
        torch.testing.assert_close(least.double(), expected.amin(dim=1), rtol=1e-5, atol=1e-5)
        chosen = expected.gather(1, index.unsqueeze(1))[:, 0]
        torch.testing.assert_close(chosen, expected.amin(dim=1), rtol=1e-5, atol=1e-5)


# ---- with and without ------------------------------------------------------------------------------------------------


def test_the_environment_can_do_without_them():
    code = "from scalewright.numerics import native, products; print(native.kernels(), products.multiplier())"
    for wish, found in (("torch", "torch torch"), ("", f"native {products.multiplier()}")):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SCALEWRIGHT_KERNELS": wish},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == found


def test_loops_of_another_version_are_left_alone(monkeypatch):
    """As after an update of the sources without compiling them: arguments are others by then."""
    from scalewright.numerics import _native

    assert native._compiled() is _native
    monkeypatch.setattr(_native, "interface", 0)
    assert native._compiled() is None


# ---- weights as they will be read back -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [INT4, INT8, E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("size", SIZES)
def test_codes_and_what_they_are_read_back_as_are_those_of_torch_to_the_bit(grid, size, dtype, threads):
    torch.manual_seed(size)
    x_PE = (torch.randn(70_000 // size, size) * torch.randn(70_000 // size, size).exp()).to(dtype)
    x_PE.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    scale_P = (torch.randn(len(x_PE)) * 0.1).to(dtype)  # of both signs
    steps = (x_PE / scale_P.unsqueeze(-1)).clamp_(grid.low, grid.high)
    expected = steps.round().to(torch.int8) if grid.mantissa_bits is None else steps.to(torch.float8_e4m3fn)
    codes, restored, lost = native.rounded(x_PE, scale_P, grid)
    assert codes.dtype == expected.dtype and restored.dtype == dtype
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(
        restored.view(torch.uint8), (expected.to(dtype) * scale_P.unsqueeze(-1)).contiguous().view(torch.uint8)
    )
    exact = float(x_PE.double().square().sum()), float((x_PE.double() - restored.double()).square().sum())
    assert lost == pytest.approx(exact, rel=1e-6)
    in_place = x_PE.clone()
    torch.set_num_threads(1)
    again, _, same = native.rounded(in_place, scale_P, grid, into_PE=in_place)
    assert same == lost and torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(in_place.view(torch.uint8), restored.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_losses_are_squares_and_do_not_depend_on_the_number_of_threads(size, dtype, threads):
    torch.manual_seed(size)
    x_PE, y_PE = torch.randn(2, 140_000 // size, size).to(dtype).unbind()
    signal, noise = native.losses(x_PE, y_PE)
    assert signal == pytest.approx(float(x_PE.double().square().sum()), rel=1e-6)
    assert noise == pytest.approx(float((x_PE.double() - y_PE.double()).square().sum()), rel=1e-6)
    torch.set_num_threads(1)
    assert (signal, noise) == native.losses(x_PE, y_PE)


# ---- how often values are seen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_counts_are_those_of_each_number_of_bf16(size, is_weighted, dtype, threads, monkeypatch):
    monkeypatch.setattr(native, "_WORTH_A_TABLE", 1)  # each thread has its table
    torch.manual_seed(size)
    x_NQG = torch.randn(6, 3, size) * 10 ** (torch.rand(6, 3, size) * 60 - 30)
    x_NQG[0, :, 0] = torch.tensor([3.4e38, -3.4e38, -0.0])  # beyond the largest number of bf16; a zero with a sign
    x_NQG[1, :, 0] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1e-40])  # half-way between two; subnormal
    x_NQG = x_NQG.to(dtype).nan_to_num()
    weight_NQ = torch.randint(1, 4096, (6, 3)).double() if is_weighted else None
    expected = torch.zeros(3, 1 << 16, dtype=torch.float64)
    largest = torch.finfo(torch.bfloat16).max
    bits_NQG = x_NQG.to(torch.bfloat16).clamp(-largest, largest).view(torch.int16).int() & 0xFFFF
    places_NQG = torch.where(bits_NQG < 0x8000, bits_NQG + 0x8000, 0xFFFF - bits_NQG)
    for n in range(6):
        for q in range(3):
            for place in places_NQG[n, q].tolist():
                expected[q, place] += 1 if weight_NQ is None else weight_NQ[n, q]
    found = native.counts_by_value(x_NQG, weight_NQ)
    assert found.dtype == (torch.float64 if is_weighted else torch.int64)
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_squares_of_rows_neither_overflow_nor_vanish(size, dtype, threads):
    torch.manual_seed(size)
    strength = torch.tensor([1.0, 1e30, 1e-30, 0.0]).reshape(4, 1, 1)
    x_NQG = (torch.randn(4, 9, size) * strength).to(dtype)
    found = native.squares_of_rows(x_NQG)
    torch.testing.assert_close(found, x_NQG.double().square().sum(dim=-1), rtol=1e-12, atol=0)
