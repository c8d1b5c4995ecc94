"""Charts against the values themselves, measured apart in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewright.numerics.blocks import positions_of
from scalewright.numerics.charts import error_chart, plain_chart
from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import E2M1, E4M3, Grid

INT2, INT3, INT4, INT8 = (Grid(f"int{bits}", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (2, 3, 4, 8))
WOBBLE = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [(1, 12, 2, 32), (5, 6, 16), (1, 2, 5000), (1, 30, 1, 3)]
RATIOS = (1.0, 0.97, 0.81, 0.5, 0.33, 1.4)


def made(*shape, weighted=False, kind="bell", seed=0):
    """A tensor in units, its weights in theirs, its positions, and min-max's scale if there are `span` steps."""
    torch.manual_seed(seed)
    x = torch.randn(shape)
    if kind == "tails":
        x = x * torch.exp(torch.randn(shape))
    elif kind == "few":
        x = (2 * x).round() / 2
    elif kind == "shifted":
        x = x + 3
    weights = torch.rand(shape) ** 3 if weighted else None
    (positions,) = positions_of(x, *min_max(x), weights_NQG=weights)
    if weights is not None:
        weights = weights / positions.weight_unit_P.reshape(x.shape[1:-1]).unsqueeze(-1)
    return x / positions.unit_P.reshape(x.shape[1:-1]).unsqueeze(-1), weights, positions


def symmetric_base(positions, grid):
    absmax_P = torch.maximum(-positions.lo_P, positions.hi_P)
    return torch.where(absmax_P > 0, absmax_P, 1.0) / ((grid.high - grid.low) / 2)


def error_at(x, grid, scale_P, point_P=None, *, norm, weights=None):
    """What a scale loses, in float64 [P]."""
    numbers = grid.numbers().double()
    scale = scale_P.double().reshape(x.shape[1:-1]).unsqueeze(-1)
    point = 0.0 if point_P is None else point_P.double().reshape(x.shape[1:-1]).unsqueeze(-1)
    codes = numbers[torch.bucketize(x.double() / scale + point, (numbers[1:] + numbers[:-1]) / 2)]
    error = ((codes - point) * scale - x.double()).abs().pow(norm)
    return (error if weights is None else error * weights.double()).sum(dim=(0, -1)).flatten()


@settings(max_examples=80, deadline=None)
@given(
    grid=st.sampled_from([INT2, INT3, INT4, INT4.mirrored(), E2M1]),
    norm=st.sampled_from([1.0, 1.5, 2.0, 2.4, 3.0]),
    dtype=st.sampled_from([*WOBBLE]),
    weighted=st.booleans(),
    kind=st.sampled_from(["bell", "tails", "few", "shifted"]),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**16),
)
def test_what_is_lost_lies_within_the_bounds(grid, norm, dtype, weighted, kind, shape, seed):
    x, weights, positions = made(*shape, weighted=weighted, kind=kind, seed=seed)
    base_P = symmetric_base(positions, grid)
    scale_JP = (base_P * torch.tensor(RATIOS).unsqueeze(1)).to(dtype).float()
    chart = error_chart(grid, norm, RATIOS, wobble=WOBBLE[dtype], bins=1024, device="cpu")
    least_JP, most_JP = chart.bounds(positions, base_P, scale_JP)
    assert (least_JP <= most_JP).all() and most_JP.isfinite().all()
    for scale_P, least_P, most_P in zip(scale_JP, least_JP, most_JP, strict=True):
        exact_P = error_at(x, grid, scale_P, norm=norm, weights=weights) / base_P.double() ** norm
        assert (least_P.double() <= exact_P + 1e-12).all()
        assert (most_P.double() >= exact_P - 1e-12).all()


@pytest.mark.parametrize("wobble", [1e-6, 2.0**-11, 2.0**-8, 2.0**-6])
@pytest.mark.parametrize("norm", [1.0, 1.5, 2.0, 2.4, 4.0])
@pytest.mark.parametrize("grid", [INT2, INT4, INT4.mirrored(), E2M1], ids=["2", "4", "-4", "e2m1"])
def test_every_value_of_a_bin_loses_what_its_row_says_under_every_scale_that_is_a_little_off(grid, norm, wobble):
    made_chart = error_chart(grid, norm, RATIOS, wobble=wobble, bins=400, device="cpu")
    chart, ratio_J = made_chart.chart, torch.tensor(RATIOS, dtype=torch.float64)
    error_BJ, slack_BJ, *slope_BJ = chart.table_BC.double().split(len(RATIOS), dim=1)
    middle_B1 = (chart.start + torch.arange(chart.rows, dtype=torch.float64) / chart.bins_per_step).unsqueeze(1)
    numbers_C = grid.numbers().double()
    for off in (-wobble, -wobble / 3, 0.0, wobble):
        about_BJ = error_BJ + off * slope_BJ[0] if slope_BJ else error_BJ
        for place in (-0.5, -0.2, 0.0, 0.3, 0.5):
            y_B11 = (middle_B1 + place / chart.bins_per_step).unsqueeze(-1)
            lost_BJ = (y_B11 - numbers_C * (ratio_J * (1 + off)).unsqueeze(-1)).abs().amin(dim=-1).pow(norm)
            assert ((lost_BJ - about_BJ).abs() <= slack_BJ + 1e-6 * error_BJ + 1e-12).all(), (off, place)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.01), (torch.float16, 0.012), (torch.bfloat16, 0.025)])
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_bounds_are_close_to_each_other(norm, dtype, bound):
    _, _, positions = made(1, 40, 1, 128)
    base_P, ratios = symmetric_base(positions, INT4), (1.0, 0.9, 0.85)
    scale_JP = (base_P * torch.tensor(ratios).unsqueeze(1)).to(dtype).float()
    chart = error_chart(INT4, norm, ratios, wobble=WOBBLE[dtype], bins=8192, device="cpu")
    least_JP, most_JP = chart.bounds(positions, base_P, scale_JP)
    assert float(((most_JP - least_JP) / most_JP).mean()) / 2 <= bound


def test_nothing_is_claimed_of_scales_that_are_off_their_ratio_by_more_than_rounding():
    _, _, positions = made(1, 5, 1, 32)
    base_P = symmetric_base(positions, INT4)
    scale_JP = torch.stack([base_P, base_P * 0.9, base_P * 1.1])
    scale_JP[0, 2] *= 1.001
    least_JP, most_JP = error_chart(INT4, 2.0, (1.0, 0.9, 1.1), wobble=1e-6, bins=1024, device="cpu").bounds(
        positions, base_P, scale_JP
    )
    assert least_JP[0, 2] == -torch.inf and most_JP[0, 2] == torch.inf
    assert int(least_JP.isfinite().sum()) == least_JP.numel() - 1 == int(most_JP.isfinite().sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize(
    "grid", [INT2, INT3, INT4, INT4.mirrored(), INT8, E2M1, E4M3], ids=["2", "3", "4", "-4", "8", "e2m1", "e4m3"]
)
def test_plain_sums_are_about_what_is_lost(grid, norm, shape, weighted):
    x, weights, positions = made(*shape, weighted=weighted)
    base_P = symmetric_base(positions, grid)
    sums_PC = plain_chart(grid, norm, RATIOS, affine=False, device="cpu").sums(positions, base_P)
    for ratio, sums_P in zip(RATIOS, sums_PC.T, strict=True):
        exact_P = error_at(x, grid, base_P * ratio, norm=norm, weights=weights)
        torch.testing.assert_close((sums_P * base_P**norm).double(), exact_P, rtol=0.04, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["bell", "shifted", "tails"])
@pytest.mark.parametrize("grid", [INT2, INT3, INT4], ids=["2", "3", "4"])
def test_plain_sums_know_zero_points(grid, kind, weighted):
    x, weights, positions = made(1, 40, 1, 32, kind=kind, weighted=weighted)
    lo_P, hi_P = positions.lo_P.clamp(max=0), positions.hi_P.clamp(min=0)
    base_P = (hi_P - lo_P) / (grid.high - grid.low)
    own_P = (grid.low - lo_P / base_P).round().clamp(grid.low, grid.high)
    chart = plain_chart(grid, 2.4, RATIOS, affine=True, device="cpu")
    for other in (-1, 0, 1, 2):
        point_P = (own_P + other).clamp(grid.low, grid.high)
        for ratio, sums_P in zip(RATIOS, chart.sums(positions, base_P, point_P).T, strict=True):
            exact_P = error_at(x, grid, base_P * ratio, point_P, norm=2.4, weights=weights)
            torch.testing.assert_close((sums_P * base_P**2.4).double(), exact_P, rtol=0.04, atol=0)


def test_values_that_are_off_the_chart_count_as_those_on_its_edge():
    # Where weights decide what the base is, a silent value may lie anywhere.
    x = torch.tensor([[[1.0, -1.0, 1e6, -1e6]]])
    weights = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 4)
    (positions,) = positions_of(x, *min_max(x), weights_NQG=weights)
    base_P = 1 / 7.5 / positions.unit_P
    chart = plain_chart(INT4, 2.0, RATIOS, affine=False, device="cpu")
    without = positions_of(x[..., :2], *min_max(x[..., :2]))
    expected = chart.sums(next(iter(without)), torch.tensor([1 / 7.5]))
    torch.testing.assert_close(chart.sums(positions, base_P), expected, rtol=1e-4, atol=1e-6)
    affine = plain_chart(INT4, 2.0, RATIOS, affine=True, device="cpu")
    for point in (-8.0, 0.0, 7.0):
        assert affine.sums(positions, base_P, torch.tensor([point])).isfinite().all()


@pytest.mark.parametrize("num_ratios", [1, 7, 64])
def test_the_least_column_is_found_with_its_sum(num_ratios):
    _, _, positions = made(1, 60, 2, 32)
    base_P = symmetric_base(positions, INT4)
    ratios = tuple(torch.linspace(0.5, 1.3, num_ratios).tolist())
    chart = plain_chart(INT4, 2.4, ratios, affine=False, device="cpu")
    column_P, error_P = chart.least(positions, base_P)
    sums_PC = chart.sums(positions, base_P)
    torch.testing.assert_close(error_P, sums_PC.amin(dim=1), rtol=1e-5, atol=0)
    at_column = sums_PC.gather(1, column_P.long().unsqueeze(1))[:, 0]
    torch.testing.assert_close(at_column, sums_PC.amin(dim=1), rtol=1e-5, atol=0)
    assert num_ratios == 1 or len(column_P.unique()) > 2


def test_charts_are_made_once():
    def make():
        return plain_chart(INT4, 2.4, RATIOS, affine=False, device="cpu")

    assert make() is make()
