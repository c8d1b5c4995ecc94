"""The scales that are stored: ordinary ones as compressed-tensors has them, and the edges of the number range."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from scalewright.numerics import scales
from scalewright.numerics.scales import (
    E4M3_SCALES,
    E4M3_SMALLEST,
    E8M0_SCALES,
    candidate_qparams,
    effective_scale,
    global_scale_of,
    range_for,
    round_scale,
    scale_codes_of,
    stored_dtype,
    stored_qparams,
)

INT8 = QuantizationArgs(num_bits=8)
INT8_AFFINE = QuantizationArgs(num_bits=8, symmetric=False)
INT4_AFFINE = QuantizationArgs(num_bits=4, symmetric=False)
FP8 = QuantizationArgs(num_bits=8, type="float")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
)
ALL = {"int8": INT8, "int8 affine": INT8_AFFINE, "int4 affine": INT4_AFFINE, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}


def ends(lo: float, hi: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([lo]), torch.tensor([hi])


@pytest.mark.parametrize("name", ALL)
def test_ordinary_ranges_get_what_compressed_tensors_computes(name):
    torch.manual_seed(0)
    lo, hi = -torch.rand(5, 3), torch.rand(5, 3)
    global_scale = torch.tensor([448 * 6.0]) if name == "nvfp4" else None
    scale, zero_point = stored_qparams(lo, hi, ALL[name], global_scale=global_scale)
    expected_scale, expected_zero_point = calculate_qparams(lo, hi, ALL[name], global_scale)
    torch.testing.assert_close(scale, expected_scale.float(), rtol=0, atol=0)
    torch.testing.assert_close(zero_point, expected_zero_point, rtol=0, atol=0)
    assert zero_point.dtype == ALL[name].zp_dtype


@pytest.mark.parametrize(
    ("args", "lo", "hi", "scale", "zero_point"),
    [
        (INT8, -1.0, 0.5, 1 / 127.5, 0),
        (QuantizationArgs(num_bits=4), -0.5, 1.0, 1 / 7.5, 0),
        (FP8, -1.0, 0.5, 1 / 448, 0),
        (INT8_AFFINE, -1.0, 3.0, 4 / 255, -64),
        (INT8_AFFINE, 1.0, 3.0, 3 / 255, -128),  # widened to contain zero
        (INT8_AFFINE, -3.0, -1.0, 3 / 255, 127),
        (MXFP4, -5.0, 1.0, 1.0, 0),  # 2^(2 - 2)
    ],
)
def test_hand_made_ranges(args, lo, hi, scale, zero_point):
    found_scale, found_zero_point = stored_qparams(*ends(lo, hi), args)
    torch.testing.assert_close(found_scale, torch.tensor([scale]))
    assert found_zero_point.float().tolist() == [zero_point]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lo", "hi"),
    [
        (0.0, 0.0),
        (-0.0, 0.0),
        (-1e-45, 0.0),
        (0.0, 1e-40),
        (-1e-30, 1e-30),
        (0.0, 65504.0),
        (-3.4e38, 3.4e38),
        (3.4e38, 3.4e38),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_scales_are_finite_and_positive_at_the_edges(name, lo, hi, dtype):
    args = ALL[name]
    absmax = torch.tensor(max(abs(lo), abs(hi)))
    global_scale = global_scale_of(absmax) if name == "nvfp4" else None
    scale, zero_point = stored_qparams(*ends(lo, hi), args, global_scale=global_scale, dtype=dtype)
    assert scale.dtype == dtype
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert torch.isfinite(zero_point.float()).all()
    effective = effective_scale(scale, global_scale)
    assert torch.isfinite(effective).all() and (effective > 0).all()


def test_a_range_wider_than_fp32_gets_its_true_scale():
    scale, zero_point = stored_qparams(*ends(-3e38, 3e38), INT8_AFFINE)
    torch.testing.assert_close(scale.double(), torch.tensor([6e38 / 255], dtype=torch.float64), rtol=1e-6, atol=0)
    assert zero_point.tolist() == [0]


def test_a_range_wider_than_fp32_leaves_its_neighbours_alone():
    lo, hi = torch.tensor([-3e38, -1.0]), torch.tensor([3e38, 3.0])
    scale, zero_point = stored_qparams(lo, hi, INT8_AFFINE)
    torch.testing.assert_close(scale[1:], torch.tensor([4 / 255]), rtol=1e-6, atol=0)
    assert zero_point.tolist() == [0, -64]


@pytest.mark.parametrize("args", [INT8_AFFINE, INT4_AFFINE], ids=["int8", "int4"])
def test_a_position_of_zeros_has_the_zero_point_zero_and_its_neighbours_their_own(args):
    lo, hi = torch.tensor([[0.0], [-1.0]]), torch.tensor([[0.0], [3.0]])
    _, zero_point = stored_qparams(lo, hi, args)
    _, expected = calculate_qparams(lo[1:], hi[1:], args)
    assert zero_point[0].tolist() == [0]
    torch.testing.assert_close(zero_point[1:], expected, rtol=0, atol=0)


def test_a_group_tiny_beside_the_largest_gets_the_smallest_e4m3_scale():
    global_scale = global_scale_of(torch.tensor(1000.0))
    lo, hi = torch.tensor([-1000.0, -1e-6, 0.0]), torch.tensor([1.0, 1e-6, 0.0])
    scale, _ = stored_qparams(lo, hi, NVFP4, global_scale=global_scale)
    assert scale[0] == 448
    assert scale[1] == E4M3_SMALLEST == 2.0**-9
    # Half of the smallest scale is a tie that e4m3 rounds to zero; a little more is the smallest scale by itself.
    absmax = E4M3_SMALLEST / 2 * 6 / float(global_scale)
    for factor in (1.0, 1.01):
        scale, _ = stored_qparams(*ends(-absmax * factor, 0.0), NVFP4, global_scale=global_scale)
        assert scale.tolist() == [E4M3_SMALLEST]


def test_a_scale_that_fp16_would_flush_gets_the_smallest_fp16():
    smallest = 2.0**-24
    scale, _ = stored_qparams(*ends(-1e-7, 1e-7), INT8, dtype=torch.float16)
    assert scale.tolist() == [smallest]


@pytest.mark.parametrize(
    ("dtype", "smallest", "largest"),
    [
        (torch.float16, 2.0**-24, 65504.0),
        (torch.bfloat16, 2.0**-133, float(torch.finfo(torch.bfloat16).max)),
        (torch.float32, 2.0**-149, float(torch.finfo(torch.float32).max)),
    ],
)
def test_rounding_a_scale_gives_neither_zero_nor_infinity(dtype, smallest, largest):
    scale = torch.tensor([0.0, 2.0**-149, 1.0, 1.001, torch.finfo(torch.float32).max])
    rounded = round_scale(scale, dtype)
    assert rounded.dtype == dtype
    assert rounded.double()[[0, 1, 4]].tolist() == [smallest, smallest, largest]
    assert rounded[3] == torch.tensor(1.001).to(dtype)


@pytest.mark.parametrize(
    ("observed", "args", "expected"),
    [
        (torch.float32, INT8, torch.float32),
        (torch.bfloat16, INT8, torch.bfloat16),
        (torch.float16, INT8, torch.float16),
        (torch.float64, INT8, torch.float32),
        (torch.int8, INT8, torch.float32),
        (torch.bfloat16, NVFP4, torch.float32),
        (torch.float16, MXFP4, torch.float32),
    ],
)
def test_a_scale_is_stored_in_the_dtype_of_its_tensor_unless_the_format_has_its_own(observed, args, expected):
    assert stored_dtype(observed, args) == expected


@pytest.mark.parametrize("absmax", [1e-30, 0.37, 2688.0, 3e38])
def test_the_global_scale_brings_the_largest_value_to_the_end_of_both_formats(absmax):
    global_scale = global_scale_of(torch.tensor(absmax))
    assert global_scale.shape == (1,) and global_scale.dtype == torch.float32
    torch.testing.assert_close(global_scale, torch.tensor([448 * 6 / absmax]), rtol=1e-6, atol=0)
    torch.testing.assert_close(global_scale, generate_gparam(-torch.tensor([absmax]), torch.tensor([absmax])))


@pytest.mark.parametrize("absmax", [0.0, 1e-45, 1e-38, 1e-36])
def test_the_global_scale_of_nothing_is_finite_and_positive(absmax):
    global_scale = global_scale_of(torch.tensor(absmax))
    assert torch.isfinite(global_scale).all() and (global_scale > 0).all()


def test_the_effective_scale_is_divided_by_the_global_one_in_fp32():
    scale = torch.tensor([448.0, 2.0], dtype=torch.bfloat16)
    torch.testing.assert_close(effective_scale(scale, None), torch.tensor([448.0, 2.0]), rtol=0, atol=0)
    torch.testing.assert_close(effective_scale(scale, torch.tensor([4.0])), torch.tensor([112.0, 0.5]), rtol=0, atol=0)


def test_the_zero_point_of_zeros_is_zero_whatever_a_cast_of_nan_gives(monkeypatch):
    def odd(lo, hi, args, global_scale):
        scale, zero_point = calculate_qparams(lo, hi, args, global_scale)
        return scale, torch.where((lo == 0) & (hi == 0), torch.full_like(zero_point, -8), zero_point)

    monkeypatch.setattr(scales, "calculate_qparams", odd)
    _, zero_point = stored_qparams(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 2.0]), INT4_AFFINE)
    assert zero_point.tolist() == [0, -3]


# ---- the quick way -----------------------------------------------------------------------------------------------

EVERY_FORMAT = {
    **{
        f"int{bits} {'symmetric' if symmetric else 'affine'}": QuantizationArgs(
            num_bits=bits, symmetric=symmetric, strategy="group", group_size=32
        )
        for bits in range(2, 9)
        for symmetric in (True, False)
    },
    "fp8": QuantizationArgs(num_bits=8, type="float"),
    "nvfp4": NVFP4,
    "mxfp4": preset_name_to_scheme("MXFP4", ["Linear"]).weights,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_candidates_have_the_very_qparams_that_would_be_stored(name, dtype):
    args = EVERY_FORMAT[name]
    torch.manual_seed(0)
    lo, hi = (torch.rand(20_000) * 10 ** (torch.rand(20_000) * 20 - 10) for _ in range(2))
    lo = -lo
    lo[:100] = 0
    hi[:50] = 0
    lo[200:300] = torch.rand(100)
    lo[300:400], hi[300:400] = -1e-44, 0
    for largest in (1.0, 3e38):
        hi[-1] = largest
        global_scale = global_scale_of(torch.tensor(1e3)) if args.strategy == "tensor_group" else None
        options = {"global_scale": global_scale, "dtype": stored_dtype(dtype, args)}
        scale, zero_point = stored_qparams(lo, hi, args, **options)
        quick_scale, quick_point = candidate_qparams(lo, hi, args, **options)
        torch.testing.assert_close(quick_scale, scale.float(), rtol=0, atol=0)
        if args.symmetric:
            assert quick_point is None
        else:
            torch.testing.assert_close(quick_point, zero_point.float(), rtol=0, atol=0)


# ---- scales of short formats ---------------------------------------------------------------------------------------


def test_e4m3_scales_are_the_126_positive_numbers_of_float8_by_their_bits():
    numbers, first = E4M3_SCALES.numbers, E4M3_SCALES.first
    assert len(numbers) - first == 126
    assert numbers[first] == 2.0**-9 and numbers[-1] == 448
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    torch.testing.assert_close(codes.long(), torch.arange(127), rtol=0, atol=0)


def test_e8m0_scales_are_the_255_powers_of_two():
    numbers = E8M0_SCALES.numbers.double()
    assert E8M0_SCALES.first == 0
    torch.testing.assert_close(numbers, 2.0 ** torch.arange(-127, 128, dtype=torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize("codes", [E4M3_SCALES, E8M0_SCALES], ids=["e4m3", "e8m0"])
def test_the_code_of_a_number_is_where_it_stands(codes):
    index = torch.arange(codes.first, codes.last + 1, dtype=torch.int32).reshape(1, -1).flip(1)
    torch.testing.assert_close(codes.code_of(codes.numbers_of(index)), index, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        *((args, None) for args in (INT8, INT8_AFFINE, INT4_AFFINE, FP8)),
        (NVFP4, E4M3_SCALES),
        (MXFP4, E8M0_SCALES),
        (preset_name_to_scheme("MXFP8", ["Linear"]).weights, E8M0_SCALES),
    ],
)
def test_a_format_whose_scales_are_few_says_which(args, expected):
    assert scale_codes_of(args) is expected


# ---- a range for a scale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, args in EVERY_FORMAT.items() if scale_codes_of(args) is None])
def test_the_range_for_a_scale_gives_that_scale_and_its_zero_point_back(name, dtype):
    args = EVERY_FORMAT[name]
    torch.manual_seed(0)
    spread = 3 if dtype == torch.float16 else 25
    scale = (torch.rand(20_000) + 0.5) * 10 ** ((torch.rand(20_000) * 2 - 1) * spread)
    scale = scale.to(dtype)
    half = 2 ** (args.num_bits - 1)
    zero_point = None if args.symmetric else torch.randint(-half, half, scale.shape).float()
    lo, hi = range_for(scale, zero_point, args)
    assert lo.dtype == hi.dtype == torch.float32
    assert (lo <= 0).all() and (hi >= 0).all()
    found, found_point = stored_qparams(lo, hi, args, dtype=dtype)
    if dtype == torch.float32:
        bits, found_bits = scale.view(torch.int32), found.view(torch.int32)
        assert (bits - found_bits).abs().max() <= 1
    else:
        torch.testing.assert_close(found, scale, rtol=0, atol=0)
    expected = torch.zeros_like(scale) if zero_point is None else zero_point
    torch.testing.assert_close(found_point.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("absmax", [1e-30, 1e-3, 0.37, 1.0, 2688.0, 12345.678, 1e30])
def test_the_range_for_each_e4m3_scale_gives_it_back_under_any_global_scale(absmax):
    global_scale = global_scale_of(torch.tensor(absmax))
    scale = E4M3_SCALES.numbers[1:]
    found, _ = stored_qparams(
        *range_for(scale, None, NVFP4, global_scale=global_scale), NVFP4, global_scale=global_scale
    )
    torch.testing.assert_close(found, scale, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8"])
def test_the_range_for_each_power_of_two_gives_it_back(name):
    args = preset_name_to_scheme(name, ["Linear"]).weights
    # Beyond, the range itself leaves fp32 or its normal numbers.
    scale = 2.0 ** torch.arange(-126.0, 118.0)
    found, _ = stored_qparams(*range_for(scale, None, args), args)
    torch.testing.assert_close(found, scale, rtol=0, atol=0)


def test_the_range_for_a_scale_never_leaves_fp32():
    largest = torch.full((1,), torch.finfo(torch.float32).max)
    for args, point in ((INT8, None), (INT8_AFFINE, torch.tensor([-128.0])), (FP8, None)):
        lo, hi = range_for(largest, point, args)
        assert torch.isfinite(lo).all() and torch.isfinite(hi).all()


@pytest.mark.parametrize("shape", [(1000, 400), (600_000, 1), (3, 200_000)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_many_ranges_are_stored_as_few_are(shape, symmetric):
    """They are computed in pieces, whose ends cannot be seen."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32)
    lo = torch.randn(shape, generator=torch.Generator().manual_seed(0)).sub_(0.5)
    hi = lo + 1.5
    scale, zero_point = stored_qparams(lo, hi, args, dtype=torch.bfloat16)
    assert scale.dtype == torch.bfloat16 and scale.shape == zero_point.shape == lo.shape
    for row in (0, len(lo) // 2, len(lo) - 1):
        expected = stored_qparams(lo[row : row + 1, :1000], hi[row : row + 1, :1000], args, dtype=torch.bfloat16)
        assert torch.equal(scale[row : row + 1, :1000], expected[0])
        assert torch.equal(zero_point[row : row + 1, :1000], expected[1])
