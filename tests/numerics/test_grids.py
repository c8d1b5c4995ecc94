"""The numbers that each format holds, and which of them a value is rounded to."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.errors import LayoutError
from scalewright.numerics.grids import E2M1, E2M3, E4M3, Grid, grid_of, numbers_of_e4m3

INT4 = Grid("int4", -8, 7)
GRIDS = [Grid("int2", -2, 1), INT4, Grid("int8", -128, 127), E2M1, E2M3, E4M3]


def rounded(grid: Grid, *values: float) -> list[float]:
    return grid.round_(torch.tensor(values)).tolist()


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_have_all_codes_of_their_bits(bits):
    grid = grid_of(QuantizationArgs(num_bits=bits, type="int"))
    expected = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).float()
    torch.testing.assert_close(grid.numbers(), expected, rtol=0, atol=0)
    assert grid.name == f"int{bits}"


def test_e2m1_has_these_fifteen_numbers():
    positive = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert E2M1.numbers().tolist() == [-x for x in reversed(positive)] + [0.0] + positive


def test_e2m3_has_eighths_below_two_quarters_below_four_and_halves_above():
    positive = [i / 8 for i in range(1, 16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
    assert E2M3.numbers().tolist() == [-x for x in reversed(positive)] + [0.0] + positive


def test_e4m3_has_every_finite_bit_pattern_of_float8():
    patterns = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    expected = torch.unique(patterns[torch.isfinite(patterns)])
    assert len(expected) == 253
    torch.testing.assert_close(E4M3.numbers(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("args", "grid"),
    [
        (QuantizationArgs(num_bits=4, type="float"), E2M1),
        (QuantizationArgs(num_bits=6, type="float"), E2M3),
        (QuantizationArgs(num_bits=8, type="float"), E4M3),
    ],
)
def test_floats_are_known_by_their_bits(args, grid):
    assert grid_of(args) is grid


@pytest.mark.parametrize("bits", [2, 5, 16])
def test_a_float_of_other_bits_is_an_error_that_says_which_there_are(bits):
    with pytest.raises(LayoutError, match=f"no float format of {bits} bits. Use 4, 6 or 8"):
        grid_of(QuantizationArgs(num_bits=bits, type="float", zp_dtype=torch.int8))


def test_integer_ties_go_to_the_even_code():
    assert rounded(INT4, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5) == [0, 2, 2, 0, -2, -2, 6]


def test_e2m1_ties_go_to_the_even_mantissa():
    assert rounded(E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) == [0, 1, 1, 2, 2, 4, 4]
    assert rounded(E2M1, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0) == [0, -1, -1, -2, -2, -4, -4]


def test_e2m3_ties_go_to_the_even_mantissa():
    assert rounded(E2M3, 0.0625, 0.1875, 1.9375, 2.125, 2.375, 3.875, 4.25, 4.75) == [0, 0.25, 2, 2, 2.5, 4, 4, 5]


def test_e4m3_ties_go_to_the_even_mantissa():
    smallest = 2.0**-9
    assert rounded(E4M3, smallest / 2, 1.5 * smallest, 1.0625, 1.1875, 432.0) == [0, 2 * smallest, 1, 1.25, 448]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_values_beyond_the_ends_are_rounded_to_the_ends(grid):
    assert rounded(grid, 1e30, -1e30, grid.high * 1.01 + 0.6) == [grid.high, grid.low, grid.high]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_every_value_is_rounded_to_a_nearest_number(grid):
    torch.manual_seed(0)
    numbers = grid.numbers()
    x = torch.cat([torch.randn(2000) * grid.high, torch.randn(500), torch.randn(500) * grid.smallest])
    nearest = (x.clamp(grid.low, grid.high).unsqueeze(1) - numbers).abs().amin(dim=1)
    found = grid.round_(x.clone())
    assert torch.isin(found, numbers).all()
    torch.testing.assert_close((found - x.clamp(grid.low, grid.high)).abs(), nearest, rtol=0, atol=0)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_numbers_of_a_grid_are_rounded_to_themselves(grid):
    numbers = grid.numbers()
    torch.testing.assert_close(grid.round_(numbers.clone()), numbers, rtol=0, atol=0)
    assert numbers[0] == grid.low and numbers[-1] == grid.high
    assert numbers[numbers > 0].min() == grid.smallest


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_rounding_is_done_in_place(grid):
    x = torch.tensor([0.3, 1.1])
    assert grid.round_(x) is x
    assert x[0] != torch.tensor(0.3)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_a_mirrored_grid_has_the_same_numbers_with_the_other_sign(grid):
    mirrored = grid.mirrored()
    torch.testing.assert_close(mirrored.numbers(), -grid.numbers().flip(0), rtol=0, atol=0)
    torch.manual_seed(0)
    x = torch.randn(1000) * grid.high
    torch.testing.assert_close(mirrored.round_(-x), -grid.round_(x.clone()), rtol=0, atol=0)
    assert mirrored.name == f"-{grid.name}"
    assert (mirrored.smallest, mirrored.widest_gap) == (grid.smallest, grid.widest_gap)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_widest_gap_is_that_between_the_numbers_furthest_apart(grid):
    assert grid.widest_gap == float(grid.numbers().diff().max())


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_rounding_into_another_tensor_leaves_the_values_alone(grid):
    torch.manual_seed(0)
    x = torch.randn(100) * grid.high
    before, out, scratch = x.clone(), torch.empty(100), torch.empty(100)
    assert grid.round_into(x, out, scratch) is out
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    torch.testing.assert_close(out, grid.round_(x), rtol=0, atol=0)


def e4m3_codes() -> Tensor:
    """All of them."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)


def test_codes_of_e4m3_are_read_as_torch_reads_them() -> None:
    numbers = e4m3_codes()[~e4m3_codes().float().isnan()]
    found, expected = numbers_of_e4m3(numbers), numbers.float()
    assert len(found) == 254
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # the sign of zero, too
    assert torch.equal(numbers_of_e4m3(numbers.reshape(2, -1)[:, ::2]), expected.reshape(2, -1)[:, ::2])


def test_nan_of_e4m3_stays_nan() -> None:
    torch.testing.assert_close(numbers_of_e4m3(e4m3_codes()), e4m3_codes().float(), rtol=0, atol=0, equal_nan=True)


def test_subnormal_codes_of_e4m3_are_read_where_torch_has_no_subnormals() -> None:
    codes = torch.tensor([1, 7, 0x81], dtype=torch.uint8).view(torch.float8_e4m3fn)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot do without subnormals")
    try:
        assert numbers_of_e4m3(codes).tolist() == [2.0**-9, 7 * 2.0**-9, -(2.0**-9)]
    finally:
        torch.set_flush_denormal(False)
