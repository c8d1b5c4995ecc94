"""The error measures: what is read back, powers of differences, weighted sums, signal to noise."""

import math

import pytest
import torch

from scalewright.numerics.grids import E2M1, Grid
from scalewright.numerics.measure import abs_power_, quantize_dequantize_, sqnr_db, summed_error

INT4 = Grid("int4", -8, 7)


def test_a_value_is_read_back_as_code_times_scale():
    x = torch.tensor([0.26, -0.74, 5.0, -5.0])
    read_back = quantize_dequantize_(x, torch.tensor(0.5), None, INT4)
    assert read_back is x
    torch.testing.assert_close(x, torch.tensor([0.5, -0.5, 3.5, -4.0]))


def test_the_zero_point_moves_the_codes_and_not_the_values():
    x = torch.tensor([0.0, 0.26, 5.0, -5.0])
    quantize_dequantize_(x, torch.tensor(0.5), torch.tensor(-8.0), INT4)
    torch.testing.assert_close(x, torch.tensor([0.0, 0.5, 5.0, 0.0]))


def test_floats_are_read_back_on_their_own_grid():
    x = torch.tensor([0.9, 2.6, -70.0])
    torch.testing.assert_close(quantize_dequantize_(x, torch.tensor(2.0), None, E2M1), torch.tensor([1.0, 3.0, -12.0]))


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 2.4, 3.0])
def test_the_power_is_that_of_the_magnitude(norm):
    d = torch.tensor([-1.5, 0.0, 0.3])
    expected = d.double().abs().pow(norm).float()
    assert abs_power_(d, norm) is d
    torch.testing.assert_close(d, expected)


@pytest.mark.parametrize("norm", [1.0, 2.0, 2.4])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_summed_over_the_elements_that_share_a_scale(norm, weighted):
    torch.manual_seed(0)
    x, scale, zero_point = torch.randn(3, 5, 2, 16), torch.rand(5, 2) + 0.1, torch.randint(-8, 8, (5, 2))
    weights = torch.rand(1, 1, 2, 16) if weighted else None
    before = x.clone()
    found = summed_error(x, scale, zero_point, INT4, norm=norm, weights_NQG=weights)
    s, z = scale.unsqueeze(-1).double(), zero_point.unsqueeze(-1).double()
    read_back = ((x.double() / s + z).round().clamp(-8, 7) - z) * s
    error = (read_back - x.double()).abs().pow(norm)
    expected = (error if weights is None else error * weights).sum(dim=-1)
    assert found.shape == (3, 5, 2) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_errors_of_fp16_are_summed_in_fp32():
    # The sum of squares is 64 * 200^2 = 2.56 million, far beyond the largest fp16.
    x = torch.full((1, 1, 64), 900.0, dtype=torch.float16)
    error = summed_error(x, torch.tensor([100.0], dtype=torch.float16), None, INT4)
    torch.testing.assert_close(error, torch.tensor([[64 * 200.0**2]]))


def test_signal_to_noise_counts_decibels():
    original = torch.tensor([3.0, 4.0])
    assert sqnr_db(original, original + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(original, 2 * original) == pytest.approx(0.0)
    assert sqnr_db(original, original) == math.inf


def test_signal_to_noise_of_huge_fp16_values_does_not_overflow():
    original = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert sqnr_db(original, original * 0.5) == pytest.approx(20 * math.log10(2), abs=1e-3)
