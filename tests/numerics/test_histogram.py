"""The record of bf16 codes: it loses nothing, adds up, and ranges are read from it as by hand."""

import math

import pytest
import torch

from scalewright.numerics.grids import E4M3, Grid
from scalewright.numerics.histogram import NUM_CODES, code_values, count_codes, entropy_threshold, range_holding

INT4 = Grid("int4", -8, 7)
INT8 = Grid("int8", -128, 127)


def record(values: list[float] | torch.Tensor) -> torch.Tensor:
    return count_codes(torch.as_tensor(values, dtype=torch.float32).reshape(1, 1, -1))[0]


def all_finite_bf16() -> torch.Tensor:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    return every[torch.isfinite(every)]


# ---- counting ----------------------------------------------------------------------------------------------------


def test_every_finite_bf16_value_has_a_place_of_its_own():
    every = all_finite_bf16()
    counts = count_codes(every.reshape(1, 1, -1))[0]
    assert counts.dtype == torch.int64 and counts.shape == (NUM_CODES,)
    assert counts.sum() == len(every) and counts.max() == 1
    torch.testing.assert_close(code_values()[counts > 0], every.float().sort().values, rtol=0, atol=0)


def test_the_values_can_be_rebuilt_from_the_counts():
    torch.manual_seed(0)
    x = (torch.randn(20, 3, 50) * torch.exp(3 * torch.randn(20, 3, 50))).to(torch.bfloat16)
    counts = count_codes(x)
    assert counts.shape == (3, NUM_CODES)
    for position in range(3):
        rebuilt = code_values().repeat_interleave(counts[position])
        torch.testing.assert_close(rebuilt, x[:, position].float().flatten().sort().values, rtol=0, atol=0)


def test_counts_have_the_shape_of_the_qparams():
    x = torch.ones(6, 5, 1, 1, 4)
    counts = count_codes(x)
    assert counts.shape == (5, 1, 1, NUM_CODES)
    assert (counts.sum(dim=-1) == 24).all()


def test_records_of_two_batches_add_up():
    torch.manual_seed(0)
    x = torch.randn(10, 2, 30)
    torch.testing.assert_close(count_codes(x[:4]) + count_codes(x[4:]), count_codes(x))


def test_other_dtypes_are_recorded_as_the_nearest_bf16():
    x = torch.tensor([1.001, 3.14159, -0.3333]).reshape(1, 1, -1)
    values = code_values()[count_codes(x)[0] > 0]
    torch.testing.assert_close(values.sort().values, x.bfloat16().float().flatten().sort().values, rtol=0, atol=0)
    torch.testing.assert_close(count_codes(x.half()), count_codes(x.half().float()))


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_an_fp32_value_beyond_the_largest_bf16_counts_as_the_largest(value):
    counts = record([1.0, value])
    seen = code_values()[counts > 0]
    assert seen.abs().max() == torch.finfo(torch.bfloat16).max
    assert seen.abs().min() == 1.0


def test_the_values_of_the_codes_ascend():
    values = code_values()
    finite = count_codes(all_finite_bf16().reshape(1, 1, -1))[0] > 0
    assert (values[finite].diff() >= 0).all()
    assert torch.isfinite(values).all()
    assert not values[~finite].any()


# ---- percentile --------------------------------------------------------------------------------------------------

ONE_TO_TEN = [float(i) for i in range(1, 11)]


@pytest.mark.parametrize(
    ("percent", "high"), [(100, 10.0), (90, 9.0), (89.9, 9.0), (90.1, 10.0), (10, 1.0), (0.1, 1.0)]
)
def test_a_symmetric_range_holds_the_percent_asked_for_and_no_more(percent, high):
    lo, hi = range_holding(record(ONE_TO_TEN), code_values(), percent, symmetric=True)
    assert (lo.item(), hi.item()) == (-high, high)


def test_a_symmetric_range_is_by_magnitude():
    lo, hi = range_holding(record([-4.0, -0.5, 0.5, 1.0, 2.0]), code_values(), 80, symmetric=True)
    assert (lo.item(), hi.item()) == (-2.0, 2.0)


@pytest.mark.parametrize(("percent", "low", "high"), [(100, 1, 10), (80, 2, 9), (81, 1, 10), (60, 3, 8), (0.1, 5, 6)])
def test_an_affine_range_leaves_out_as_many_below_as_above(percent, low, high):
    lo, hi = range_holding(record(ONE_TO_TEN), code_values(), percent, symmetric=False)
    assert (lo.item(), hi.item()) == (low, high)


def test_repeated_values_count_each_time():
    counts = record([0.0] * 98 + [1.0, 100.0])
    assert range_holding(counts, code_values(), 99, symmetric=True)[1] == 1.0
    assert range_holding(counts, code_values(), 98, symmetric=True)[1] == 0.0
    assert range_holding(counts, code_values(), 99.5, symmetric=True)[1] == 100.0


def test_a_range_is_exact_for_billions_of_values():
    counts = torch.zeros(NUM_CODES, dtype=torch.int64)
    values = code_values()
    one, two = int((values == 1).nonzero()), int((values == 2).nonzero())
    counts[one], counts[two] = 10**10 - 1, 1
    assert range_holding(counts, values, 100, symmetric=True)[1] == 2.0
    assert range_holding(counts, values, 99.99, symmetric=True)[1] == 1.0


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_constant_is_its_own_range(symmetric):
    lo, hi = range_holding(record([-3.0] * 7), code_values(), 50, symmetric=symmetric)
    assert lo == -3.0
    assert hi == (3.0 if symmetric else -3.0)


# ---- entropy -----------------------------------------------------------------------------------------------------


def divergences_by_hand(values: list[float], num_levels: int, num_bins: int) -> list[float]:
    """KL(P || Q) for each cut from `num_levels` bins on, for a grid of equal levels, in plain Python.

    A bin belongs to the level that its centre lies in, to the lower one if it lies between two.
    """
    absmax = max(abs(v) for v in values)
    mass = [0.0] * num_bins
    for v in values:
        mass[min(num_bins - 1, int(abs(v) / absmax * num_bins))] += 1
    found = []
    for cut in range(num_levels, num_bins + 1):
        p = mass[:cut]
        p[-1] += sum(mass[cut:])
        q = [0.0] * cut
        members = [min(num_levels - 1, math.ceil((i + 0.5) / cut * num_levels) - 1) for i in range(cut)]
        for level in range(num_levels):
            bins = [i for i in range(cut) if members[i] == level and mass[i] > 0]
            for i in bins:
                q[i] = sum(mass[j] for j in bins) / len(bins)
        total_p, total_q = sum(p), sum(q)
        found.append(
            sum(
                a / total_p * math.log((a / total_p) / max(b / total_q if total_q else 0.0, 1e-12))
                for a, b in zip(p, q, strict=True)
                if a > 0
            )
        )
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_threshold_is_the_cut_with_the_least_divergence(seed):
    torch.manual_seed(seed)
    values = (torch.randn(4000) * torch.exp(0.7 * torch.randn(4000))).bfloat16().float()
    num_bins = 61
    by_hand = divergences_by_hand(values.tolist(), 8, num_bins)
    cut = 8 + by_hand.index(min(by_hand))
    threshold = entropy_threshold(record(values), code_values(), INT4, num_bins=num_bins)
    torch.testing.assert_close(threshold, values.abs().max() * cut / num_bins)
    assert cut < num_bins  # something was clipped


def test_one_far_outlier_is_clipped_away():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(200_000), torch.tensor([40.0])])
    threshold = entropy_threshold(record(values), code_values(), INT8, num_bins=1024)
    assert 2.5 < threshold < 10


def test_a_uniform_distribution_is_not_clipped_much():
    torch.manual_seed(0)
    values = torch.rand(200_000) * 8 - 4
    assert entropy_threshold(record(values), code_values(), INT8, num_bins=1024) > 3.5


def test_the_levels_of_a_float_grid_reach_outliers_that_integers_clip():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(200_000), torch.full((20,), 30.0)])
    counts = record(values)
    as_int = entropy_threshold(counts, code_values(), INT8, num_bins=1024)
    as_float = entropy_threshold(counts, code_values(), E4M3, num_bins=1024)
    assert as_float > as_int


def test_zeros_have_the_threshold_zero():
    assert entropy_threshold(record([0.0] * 9), code_values(), INT8, num_bins=1024) == 0


@pytest.mark.parametrize("value", [-3.0, 1e-30, 1e38])
def test_a_constant_has_its_magnitude_as_threshold(value):
    counts = record([value] * 5)
    threshold = entropy_threshold(counts, code_values(), INT8, num_bins=256)
    torch.testing.assert_close(threshold, code_values()[counts > 0].abs()[0], rtol=1e-6, atol=0)


def test_the_number_of_times_a_record_was_seen_does_not_matter():
    torch.manual_seed(0)
    counts = record(torch.randn(5000) * torch.exp(torch.randn(5000)))
    once = entropy_threshold(counts, code_values(), INT8, num_bins=512)
    often = entropy_threshold(counts * 1000, code_values(), INT8, num_bins=512)
    torch.testing.assert_close(once, often, rtol=0, atol=0)
