"""The exact optimum: nothing beats it, what it promises is attained, and simple laws hold.

The references here are written apart from it, in plain Python: every assignment of codes to elements, every interval
between breakpoints, every scale of a discrete domain.
"""

from itertools import pairwise, product

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalewright.errors import ImportanceError, LayoutError, NonFiniteError
from scalewright.numerics import optimum
from scalewright.numerics.optimum import exact_optimum
from scalewright.numerics.scales import global_scale_of

INT2, INT3, INT4, INT8 = (QuantizationArgs(num_bits=bits) for bits in (2, 3, 4, 8))
INT2_AFFINE, INT3_AFFINE, INT4_AFFINE = (QuantizationArgs(num_bits=bits, symmetric=False) for bits in (2, 3, 4))
FP4 = QuantizationArgs(num_bits=4, type="float")
FP8 = QuantizationArgs(num_bits=8, type="float")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
)
MXFP8 = MXFP4.model_copy(update={"num_bits": 8})
INT4_E8M0_AFFINE = INT4_AFFINE.model_copy(update={"scale_dtype": torch.uint8})

CONTINUOUS = {
    **{"int2": INT2, "int3": INT3, "int4": INT4, "int8": INT8, "fp4": FP4, "fp8": FP8},
    **{"int2 affine": INT2_AFFINE, "int3 affine": INT3_AFFINE, "int4 affine": INT4_AFFINE},
}
DISCRETE = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "int4 affine e8m0": INT4_E8M0_AFFINE}
ALL = CONTINUOUS | DISCRETE

# Written out, and not asked of the grids.
FP4_NUMBERS = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3_POSITIVE = [m * 2.0**-9 for m in range(1, 8)] + [
    (8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]
FP8_NUMBERS = [-n for n in reversed(E4M3_POSITIVE)] + [0.0, *E4M3_POSITIVE]


def numbers_of(args: QuantizationArgs) -> list[float]:
    if args.type == "float":
        return FP4_NUMBERS if args.num_bits == 4 else FP8_NUMBERS
    half = 2 ** (args.num_bits - 1)
    return [float(n) for n in range(-half, half)]


def zero_points_of(args: QuantizationArgs) -> list[float]:
    return [0.0] if args.symmetric else numbers_of(args)


def error_at(x, w, numbers, scale, zero_point=0.0) -> float:
    """`sum w * (x - s * (q - z)) ** 2` with the nearest codes."""
    return sum(
        wi * min((xi - scale * (n - zero_point)) ** 2 for n in numbers) for xi, wi in zip(x, w, strict=True) if wi
    )


def least_by_intervals(x, w, args, *, signed=False) -> float:
    """The least error: code at a scale inside each interval between breakpoints, refit, measure. One group, slow."""
    numbers = numbers_of(args)
    least = sum(wi * xi * xi for xi, wi in zip(x, w, strict=True))
    for sign, zero_point in product((1, -1) if signed else (1,), zero_points_of(args)):
        values = [n - zero_point for n in numbers]
        # Where a scale codes x halfway between two neighbours.
        ends = {xi / ((a + b) / 2) for xi in x for a, b in pairwise(values) if a + b}
        ends = sorted(sign * end for end in ends if sign * end > 0)
        if not ends:
            continue
        inner = [ends[0] / 2, *((a + b) / 2 for a, b in pairwise(ends)), ends[-1] * 2]
        for scale in inner:
            codes = [min(values, key=lambda v, xi=xi, s=sign * scale: abs(xi - s * v)) for xi in x]
            a = sum(wi * xi * v for wi, xi, v in zip(w, x, codes, strict=True))
            b = sum(wi * v * v for wi, v in zip(w, codes, strict=True))
            if b and a * sign > 0:
                least = min(least, error_at(x, w, values, a / b))
    return least


def least_by_codes(x, w, args, *, signed=False) -> float:
    """The least error over every assignment of codes to elements: no breakpoints, no rounding."""
    total = sum(wi * xi * xi for xi, wi in zip(x, w, strict=True))
    least = total
    for zero_point in zero_points_of(args):
        for codes in product([n - zero_point for n in numbers_of(args)], repeat=len(x)):
            a = sum(wi * xi * v for wi, xi, v in zip(w, x, codes, strict=True))
            b = sum(wi * v * v for wi, v in zip(w, codes, strict=True))
            if b and (a > 0 or signed):
                least = min(least, total - a * a / b)
    return max(least, 0.0)


def group(x: list[float]) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64).reshape(1, 1, -1)


def solve(x: list[float], w: list[float] | None, args: QuantizationArgs, **options) -> tuple[float, float, float]:
    found = exact_optimum(group(x), args, weights_NQG=None if w is None else group(w), **options)
    return float(found.scale_Q), float(found.zero_point_Q), float(found.error_Q)


def recoded_error(x_NQG, found, args, weights=1.0):
    """The error of coding with the found qparams, rounding half to even. [*Q]"""
    scale, zero_point = found.scale_Q.unsqueeze(-1), found.zero_point_Q.unsqueeze(-1)
    code = x_NQG.double() / scale + zero_point
    numbers = torch.tensor(numbers_of(args), dtype=torch.float64)
    if args.type == "int":
        code = code.round().clamp(numbers[0], numbers[-1])
    else:  # a tie may go to either number: the error is the same
        code = numbers[(code.unsqueeze(-1) - numbers).abs().argmin(dim=-1)]
    return ((x_NQG.double() - (code - zero_point) * scale).square() * weights).sum(dim=(0, -1))


def random_groups(*shape: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64) * torch.exp(0.7 * torch.randn(shape, dtype=torch.float64)) + shift


def options_for(args: QuantizationArgs, x: torch.Tensor) -> dict:
    return {"global_scale": global_scale_of(x.abs().max())} if args is NVFP4 else {}


elements = st.one_of(st.floats(-4, 4, width=32).map(lambda v: round(v, 3)), st.integers(-8, 8).map(float), st.just(0.0))
weights = st.one_of(st.floats(0.0625, 16, width=32), st.just(1.0), st.just(0.0))


def weighted_groups(max_size: int):
    return st.lists(st.tuples(elements, weights), min_size=1, max_size=max_size)


# ---- against references ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(weighted_groups(5), st.booleans(), st.sampled_from([INT2, INT2_AFFINE]))
@example([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], False, INT2)
@example([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], True, INT2)
@example([(-1.0, 1.0), (0.1, 9.0)], True, INT2_AFFINE)
def test_no_assignment_of_two_bit_codes_does_better(pairs, signed, args):
    x, w = [list(each) for each in zip(*pairs, strict=True)]
    *_, error = solve(x, w, args, signed=signed)
    total = sum(wi * xi * xi for xi, wi in pairs)
    assert error == pytest.approx(least_by_codes(x, w, args, signed=signed), rel=1e-9, abs=1e-13 * total)


@settings(max_examples=25, deadline=None)
@given(weighted_groups(3), st.booleans(), st.sampled_from([INT3, INT4, FP4, INT3_AFFINE]))
def test_no_assignment_of_codes_does_better(pairs, signed, args):
    x, w = [list(each) for each in zip(*pairs, strict=True)]
    *_, error = solve(x, w, args, signed=signed)
    total = sum(wi * xi * xi for xi, wi in pairs)
    assert error == pytest.approx(least_by_codes(x, w, args, signed=signed), rel=1e-9, abs=1e-13 * total)


@settings(max_examples=30, deadline=None)
@given(weighted_groups(8), st.booleans(), st.sampled_from([INT2, INT3, INT4, FP4, INT2_AFFINE, INT3_AFFINE]))
def test_no_interval_between_breakpoints_does_better(pairs, signed, args):
    x, w = [list(each) for each in zip(*pairs, strict=True)]
    *_, error = solve(x, w, args, signed=signed)
    total = sum(wi * xi * xi for xi, wi in pairs)
    assert error == pytest.approx(least_by_intervals(x, w, args, signed=signed), rel=1e-9, abs=1e-13 * total)


@pytest.mark.parametrize("args", [FP8, INT8, INT4_AFFINE], ids=["fp8", "int8", "int4 affine"])
def test_no_interval_does_better_in_large_grids(args):
    x, w = random_groups(4).tolist(), [1.0, 0.3, 2.0, 1.0]
    *_, error = solve(x, w, args)
    assert error == pytest.approx(least_by_intervals(x, w, args), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_thousands_of_random_scales_never_win(name, is_weighted, signed):
    args = CONTINUOUS[name]
    x = random_groups(2, 3, 24, seed=1, shift=0.3)
    w = torch.rand(2, 1, 24, dtype=torch.float64) if is_weighted else None
    found = exact_optimum(x, args, weights_NQG=w, signed=signed)
    numbers = torch.tensor(numbers_of(args), dtype=torch.float64)
    zero_points = torch.tensor(zero_points_of(args), dtype=torch.float64)
    torch.manual_seed(2)
    for _ in range(20):
        # 200 scales at a time, from a hundredth to three times what would just cover the largest element.
        absmax = x.abs().amax(dim=(0, -1)).reshape(3, 1, 1)
        scale = absmax / numbers[-1] * torch.exp(torch.empty(200, 1, 1, 1, dtype=torch.float64).uniform_(-4.6, 1.1))
        scale = torch.where(torch.rand_like(scale) < 0.5, -scale, scale) if signed else scale
        zero_point = zero_points[torch.randint(len(zero_points), (200, 1, 1, 1))]
        x_QNG = x.transpose(0, 1)
        midpoints = (numbers[:-1] + numbers[1:]) / 2
        code = numbers[torch.bucketize((x_QNG / scale + zero_point).contiguous(), midpoints)]
        d = (x_QNG - (code - zero_point) * scale).square()
        errors = (d if w is None else d * w.transpose(0, 1)).sum(dim=(-1, -2))
        assert bool((errors >= found.error_Q * (1 - 1e-12)).all())


def test_two_bit_optimum_by_hand():
    # Codes -2, -1, 0, 1. [1, 2, 3]: codes 1, 1, 1 at the mean 2 lose 2; codes 0, 1, 1 at 2.5 lose 1.5.
    assert solve([1.0, 2.0, 3.0], None, INT2) == pytest.approx((2.5, 0, 1.5))
    # With a negative scale they may be -1, -1, -2: A = -9, B = 6.
    assert solve([1.0, 2.0, 3.0], None, INT2, signed=True) == pytest.approx((-1.5, 0, 0.5))
    # The mirror image uses -2 with a positive scale.
    assert solve([-1.0, -2.0, -3.0], None, INT2) == pytest.approx((1.5, 0, 0.5))
    # Codes 1, 2, 3 above the zero point -2.
    assert solve([1.0, 2.0, 3.0], None, INT2_AFFINE) == pytest.approx((1, -2, 0))
    # The largest element weighs so little that the zero point 1, which leaves no code above zero, is best.
    assert solve([5.0, -1.0, -2.0, -3.0], [1e-3, 1, 1, 1], INT2_AFFINE) == pytest.approx((1, 1, 0.025))
    # The weight of the first element moves its code from 0 to 1: A = 4 + 2 + 3, B = 6.
    assert solve([1.0, 2.0, 3.0], [4.0, 1.0, 1.0], INT2) == pytest.approx((1.5, 0, 17 - 81 / 6))


# ---- discrete scales ---------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(weighted_groups(6), st.sampled_from([2.0**-12, 0.37, 1.0, 448 * 6 / 4.0, 2.0**14]))
def test_e4m3_scales_are_tried_one_and_all(pairs, global_scale):
    x, w = [list(each) for each in zip(*pairs, strict=True)]
    scale, zero_point, error = solve(x, w, NVFP4, global_scale=torch.tensor([global_scale]))
    domain = [float(n / torch.tensor(global_scale).double()) for n in E4M3_POSITIVE]
    assert len(domain) == 126
    assert error == pytest.approx(min(error_at(x, w, FP4_NUMBERS, s) for s in domain), rel=1e-9, abs=1e-13)
    assert min(abs(scale / s - 1) for s in domain) < 1e-12
    assert zero_point == 0


def test_e4m3_scales_without_a_global_scale():
    x = random_groups(16).tolist()
    scale, _, error = solve(x, None, NVFP4)
    assert error == pytest.approx(min(error_at(x, [1.0] * 16, FP4_NUMBERS, s) for s in E4M3_POSITIVE), rel=1e-9)
    assert scale in E4M3_POSITIVE


def test_each_position_may_have_its_own_global_scale():
    x = random_groups(1, 2, 3, 16)
    global_scale = torch.tensor([[100.0, 200.0, 300.0], [50.0, 70.0, 90.0]])
    found = exact_optimum(x, NVFP4, global_scale=global_scale)
    for row, column in product(range(2), range(3)):
        one = exact_optimum(
            x[:, row : row + 1, column : column + 1], NVFP4, global_scale=global_scale[row, column].reshape(1)
        )
        torch.testing.assert_close(found.scale_Q[row, column], one.scale_Q.squeeze(), rtol=0, atol=0)
        torch.testing.assert_close(found.error_Q[row, column], one.error_Q.squeeze(), rtol=1e-13, atol=0)


@settings(max_examples=20, deadline=None)
@given(weighted_groups(6), st.integers(-100, 100), st.sampled_from([MXFP4, MXFP8, INT4_E8M0_AFFINE]))
@example([(1.0, 1.0)], 0, MXFP4)
@example([(4.0, 1e-9), (0.001, 16.0)], 0, MXFP4)  # the largest element hardly weighs: the small one decides
def test_e8m0_scales_are_tried_one_and_all(pairs, exponent, args):
    x, w = [list(each) for each in zip(*pairs, strict=True)]
    x = [xi * 2.0**exponent for xi in x]
    scale, _, error = solve(x, w, args)
    numbers = numbers_of(args)
    tried = range(max(-127, exponent - 24), min(127, exponent + 12) + 1)  # beyond: all is clipped, or all is zero
    expected = min(
        error_at(x, w, [n - zero_point for n in numbers], 2.0**e) for e in tried for zero_point in zero_points_of(args)
    )
    total = sum(wi * xi * xi for xi, wi in zip(x, w, strict=True))
    assert error == pytest.approx(expected, rel=1e-9, abs=1e-13 * total)
    assert scale in {2.0**e for e in range(-127, 128)}


@pytest.mark.parametrize(("value", "scale"), [(3e38, 2.0**127), (1e-45, 2.0**-127)])
def test_e8m0_scales_stay_in_their_range(value, scale):
    found = exact_optimum(torch.tensor([value]).reshape(1, 1, 1), MXFP4)
    assert float(found.scale_Q) == scale


def test_discrete_scales_may_be_negative_too():
    args = INT2.model_copy(update={"scale_dtype": torch.float8_e4m3fn})
    assert solve([1.0, 2.0, 3.0], None, args) == (2.5, 0, 1.5)
    assert solve([1.0, 2.0, 3.0], None, args, signed=True) == (-1.5, 0, 0.5)


# ---- what is promised is attained --------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_the_scale_attains_the_error(name, signed):
    x = random_groups(2, 5, 3, 16, seed=3, shift=0.2)
    w = torch.rand(2, 1, 3, 16, dtype=torch.float64)
    found = exact_optimum(x, ALL[name], weights_NQG=w, signed=signed, **options_for(ALL[name], x))
    torch.testing.assert_close(found.error_Q, recoded_error(x, found, ALL[name], w), rtol=1e-9, atol=0)
    assert found.scale_Q.shape == found.zero_point_Q.shape == found.error_Q.shape == (5, 3)
    assert found.scale_Q.dtype == found.zero_point_Q.dtype == found.error_Q.dtype == torch.float64
    assert signed or bool((found.scale_Q > 0).all())


def test_a_large_group_attains_its_error_too():
    x = random_groups(1, 2, 4096, seed=4)
    for args in (INT8, FP8):
        found = exact_optimum(x, args)
        torch.testing.assert_close(found.error_Q, recoded_error(x, found, args), rtol=1e-9, atol=0)
        for factor in (0.999, 1.001):
            near = optimum.Optimum(found.scale_Q * factor, found.zero_point_Q, found.error_Q)
            assert bool((recoded_error(x, near, args) > found.error_Q).all())


def test_elements_on_a_grid_lose_nothing():
    for args in (INT3, INT4, FP4, INT2_AFFINE):
        numbers = torch.tensor(numbers_of(args), dtype=torch.float64)
        numbers = numbers if args.symmetric else numbers - numbers[1]
        scale, _, error = solve((numbers * 0.3).tolist(), None, args)
        assert scale == pytest.approx(0.3)
        assert error < 1e-28


# ---- laws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_whole_weights_are_repeated_elements(name):
    args = ALL[name]
    x = random_groups(1, 4, 12, seed=5)
    counts = torch.tensor([0, 1, 2, 3] * 3)
    options = options_for(args, x)
    weighted = exact_optimum(x, args, weights_NQG=counts.double(), **options)
    repeated = exact_optimum(x.repeat_interleave(counts, dim=-1), args, **options)
    torch.testing.assert_close(weighted.error_Q, repeated.error_Q, rtol=1e-10, atol=0)
    torch.testing.assert_close(recoded_error(x, repeated, args, counts), weighted.error_Q, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_equal_weights_are_no_weights(name):
    args = ALL[name]
    x = random_groups(1, 4, 12, seed=6)
    options = options_for(args, x)
    plain = exact_optimum(x, args, **options)
    weighted = exact_optimum(x, args, weights_NQG=torch.full((1, 1, 1), 2.0**-90), **options)
    torch.testing.assert_close(weighted.scale_Q, plain.scale_Q, rtol=0, atol=0)
    torch.testing.assert_close(weighted.zero_point_Q, plain.zero_point_Q, rtol=0, atol=0)
    torch.testing.assert_close(weighted.error_Q, plain.error_Q * 2.0**-90, rtol=0, atol=0)


@pytest.mark.parametrize("exponent", [-100, -3, 1, 100])
@pytest.mark.parametrize("name", ALL)
def test_scaling_by_a_power_of_two_scales_the_answer(name, exponent):
    args, factor = ALL[name], 2.0**exponent
    x = random_groups(1, 4, 12, seed=7)
    options, scaled = options_for(args, x), options_for(args, x)
    if args is NVFP4:
        scaled = {"global_scale": options["global_scale"] / factor}
    plain = exact_optimum(x, args, **options)
    found = exact_optimum(x * factor, args, **scaled)
    torch.testing.assert_close(found.scale_Q, plain.scale_Q * factor, rtol=0, atol=0)
    torch.testing.assert_close(found.zero_point_Q, plain.zero_point_Q, rtol=0, atol=0)
    torch.testing.assert_close(found.error_Q, plain.error_Q * factor**2, rtol=0, atol=0)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_tiny_and_huge_values_are_ordinary(name, magnitude):
    args = CONTINUOUS[name]
    x = random_groups(1, 3, 8, seed=8) / 20
    ordinary = exact_optimum(x, args)
    found = exact_optimum(x * magnitude, args)
    torch.testing.assert_close(found.error_Q / magnitude / magnitude, ordinary.error_Q, rtol=1e-9, atol=0)
    torch.testing.assert_close(recoded_error(x * magnitude, found, args), found.error_Q, rtol=1e-9, atol=0)


def test_a_heavy_weight_of_a_huge_element_leaves_no_nan():
    x, w = [3e38, 1e-45, -1.0], [1e-38, 3e38, 1.0]
    for args in (*CONTINUOUS.values(), MXFP4):
        scale, _, error = solve(x, w, args)
        assert 0 < scale < float("inf")
        assert 0 <= error < sum(wi * xi * xi for xi, wi in zip(x, w, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_signed_is_never_worse_and_mirrors(name):
    args = ALL[name]
    x = random_groups(1, 40, 8, seed=9, shift=0.5)
    options = options_for(args, x)
    plain, mirrored = exact_optimum(x, args, **options), exact_optimum(-x, args, **options)
    signed, signed_mirror = (exact_optimum(each, args, signed=True, **options) for each in (x, -x))
    best = torch.minimum(plain.error_Q, mirrored.error_Q)
    torch.testing.assert_close(signed.error_Q, best, rtol=1e-10, atol=0)
    torch.testing.assert_close(signed_mirror.error_Q, best, rtol=1e-10, atol=0)
    is_one_sided = args.type == "int" and args.symmetric
    assert bool((signed.scale_Q < 0).any()) == is_one_sided
    if is_one_sided:
        is_strict = (plain.error_Q - mirrored.error_Q).abs() > 1e-9 * best
        assert bool(is_strict.any())
        torch.testing.assert_close(torch.sign(signed_mirror.scale_Q * signed.scale_Q) == -1, is_strict)
        assert bool((signed.error_Q < plain.error_Q * 0.99).any())


@pytest.mark.parametrize("args", [INT2_AFFINE, INT4_AFFINE], ids=["int2", "int4"])
def test_affine_is_never_worse_than_symmetric(args):
    x = random_groups(1, 30, 16, seed=10, shift=1.0)
    symmetric = args.model_copy(update={"symmetric": True})
    affine_error, error = exact_optimum(x, args).error_Q, exact_optimum(x, symmetric, signed=True).error_Q
    assert bool((affine_error <= error * (1 + 1e-12)).all())
    assert bool((affine_error < error * 0.8).any())


def test_the_zero_point_nearest_to_zero_wins_ties():
    # One element is exact with every zero point that leaves it a code above zero.
    assert solve([1.0], None, INT3_AFFINE) == (1, 0, 0)
    # 0 ... 4 needs four codes above zero: -1 is the nearest zero point that leaves as many.
    assert solve([1.0, 2.0, 3.0, 4.0], None, INT3_AFFINE) == pytest.approx((1, -1, 0))
    assert solve([-1.0, -2.0, -3.0, -4.0], None, INT3_AFFINE) == pytest.approx((1, 0, 0))


def test_the_positive_and_the_largest_scale_win_ties():
    assert solve([1.0], None, INT4, signed=True) == (1, 0, 0)
    assert solve([-1.0, 1.0], None, INT4, signed=True) == (1, 0, 0)
    assert solve([6.0], None, MXFP4) == (4, 0, 0)  # 1.5 * 4, 3 * 2 and 6 * 1


def test_observations_are_elements():
    x = random_groups(4, 3, 6, seed=11)
    w = torch.rand(4, 3, 6, dtype=torch.float64)
    one = x.transpose(0, 1).reshape(1, 3, 24)
    found = exact_optimum(x, INT4, weights_NQG=w)
    expected = exact_optimum(one, INT4, weights_NQG=w.transpose(0, 1).reshape(1, 3, 24))
    torch.testing.assert_close(found.scale_Q, expected.scale_Q, rtol=0, atol=0)
    torch.testing.assert_close(found.error_Q, expected.error_Q, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_size_of_the_pieces_does_not_matter(name, monkeypatch):
    args = ALL[name]
    x = random_groups(2, 7, 3, 8, seed=12)
    x[:, 2, 1] = 0
    w = torch.rand(1, 1, 3, 8, dtype=torch.float64)
    options = {"weights_NQG": w, **options_for(args, x)}
    whole = exact_optimum(x, args, **options)
    monkeypatch.setattr(optimum, "_PIECE", 1)
    cut = exact_optimum(x, args, **options)
    torch.testing.assert_close(cut.scale_Q, whole.scale_Q, rtol=1e-13, atol=0)
    torch.testing.assert_close(cut.zero_point_Q, whole.zero_point_Q, rtol=0, atol=0)
    torch.testing.assert_close(cut.error_Q, whole.error_Q, rtol=1e-12, atol=0)


# ---- edges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_zeros_have_the_stored_scale_one_and_lose_nothing(name, signed):
    x = random_groups(1, 3, 8, seed=13)
    x[:, 1] = 0
    w = torch.ones(3, 8)
    w[2] = 0
    options = {"global_scale": torch.tensor([4.0])} if ALL[name] is NVFP4 else {}
    found = exact_optimum(x, ALL[name], weights_NQG=w, signed=signed, **options)
    expected = 0.25 if ALL[name] is NVFP4 else 1.0
    assert found.scale_Q[1:].tolist() == [expected, expected]
    assert found.zero_point_Q[1:].tolist() == [0, 0]
    assert found.error_Q[1:].tolist() == [0, 0]
    assert float(found.error_Q[0]) > 0


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_weightless_elements_change_nothing(name):
    args = ALL[name]
    x = random_groups(1, 4, 8, seed=14)
    more, w = torch.cat([x, torch.zeros_like(x), x * 1e9], dim=-1), torch.ones(24)
    w[16:] = 0
    options = options_for(args, x)
    plain, found = exact_optimum(x, args, **options), exact_optimum(more, args, weights_NQG=w, **options)
    torch.testing.assert_close(found.scale_Q, plain.scale_Q, rtol=1e-13, atol=0)
    torch.testing.assert_close(found.zero_point_Q, plain.zero_point_Q, rtol=0, atol=0)
    torch.testing.assert_close(found.error_Q, plain.error_Q, rtol=1e-10, atol=0)


@pytest.mark.parametrize("args", [INT4, MXFP4], ids=["int4", "mxfp4"])
def test_empty_tensors_have_a_stated_answer(args):
    no_positions = exact_optimum(torch.empty(1, 0, 8), args)
    assert no_positions.scale_Q.shape == no_positions.error_Q.shape == (0,)
    no_elements = exact_optimum(torch.empty(0, 2, 8), args, weights_NQG=torch.ones(0, 2, 8))
    assert no_elements.scale_Q.tolist() == [1, 1]
    assert no_elements.error_Q.tolist() == [0, 0]


def test_no_qparam_dimension_is_one_position():
    found = exact_optimum(torch.tensor([[1.0, 2.0, 3.0]]), INT2, weights_NQG=torch.ones(3))
    assert found.scale_Q.shape == ()
    assert float(found.scale_Q) == 2.5


def test_half_precision_parameters_are_read_exactly_and_not_changed():
    x = torch.nn.Parameter(random_groups(1, 2, 8).bfloat16())
    before = x.detach().clone()
    found = exact_optimum(x, INT4)
    expected = exact_optimum(before.double(), INT4)
    torch.testing.assert_close(found.scale_Q, expected.scale_Q, rtol=0, atol=0)
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)
    assert not found.scale_Q.requires_grad


def test_what_has_no_optimum_is_refused():
    x = torch.ones(1, 1, 4)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            exact_optimum(x * bad, INT4)
        with pytest.raises(ImportanceError, match="finite and not negative"):
            exact_optimum(x, INT4, weights_NQG=x * bad)
    with pytest.raises(ImportanceError, match="finite and not negative"):
        exact_optimum(x, INT4, weights_NQG=-x)
    with pytest.raises(LayoutError, match="e2m1 has no zero points"):
        exact_optimum(x, FP4.model_copy(update={"symmetric": False}))
    with pytest.raises(LayoutError, match="1 dimensions are too few"):
        exact_optimum(torch.ones(4), INT4)
