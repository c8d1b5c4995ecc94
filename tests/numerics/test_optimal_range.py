"""The best stored scale: held to the exact optimum, to brute force over all scales of a short format, and to laws.

All errors are measured here, in float64, apart from the search: from the qparams that compressed-tensors computes.
"""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalewright.numerics.charts import plain_chart
from scalewright.numerics.extremes import min_max
from scalewright.numerics.judge import Judge
from scalewright.numerics.optimal import _Search, optimal_range
from scalewright.numerics.optimum import exact_optimum
from scalewright.numerics.scales import global_scale_of, stored_qparams


def integer(bits: int, *, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="channel")


INT2, INT3, INT4, INT8 = (integer(bits) for bits in (2, 3, 4, 8))
INT2_AFFINE, INT3_AFFINE, INT4_AFFINE, INT8_AFFINE = (integer(bits, symmetric=False) for bits in (2, 3, 4, 8))
FP4, FP8 = (QuantizationArgs(num_bits=bits, type="float", strategy="channel") for bits in (4, 8))
NVFP4, MXFP4, MXFP8 = (preset_name_to_scheme(name, ["Linear"]).weights for name in ("NVFP4", "MXFP4", "MXFP8"))
ANY_SCALE = {
    **{f"int{bits}": integer(bits) for bits in range(2, 9)},
    **{f"int{bits} affine": integer(bits, symmetric=False) for bits in range(2, 9)},
    **{"fp4": FP4, "fp8": FP8},
}
SHORT_SCALES = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8}
EVERY_FORMAT = ANY_SCALE | SHORT_SCALES
FEW = {name: EVERY_FORMAT[name] for name in ("int2", "int4", "int4 affine", "int8", "fp8", "nvfp4", "mxfp4")}

# Written out, and not asked of the grids.
E4M3_POSITIVE = [m * 2.0**-9 for m in range(1, 8)] + [
    (8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]
FP4_POSITIVE = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bell_shaped(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape)


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape) * torch.exp(torch.randn(shape))


def numbers_of(args: QuantizationArgs) -> torch.Tensor:
    if args.type == "int":
        half = 2 ** (args.num_bits - 1)
        return torch.arange(-half, half, dtype=torch.float64)
    positive = FP4_POSITIVE if args.num_bits == 4 else E4M3_POSITIVE
    return torch.tensor([-n for n in reversed(positive)] + [0.0, *positive], dtype=torch.float64)


def error_at(x, args, scale, zero_point=None, *, norm=2.0, weights=None):
    """`sum of w * |dequantised - x| ** norm` with effective scales of either sign: float64 [*Q]."""
    x, scale = x.double(), scale.double().unsqueeze(-1)
    zero_point = 0.0 if zero_point is None else zero_point.double().unsqueeze(-1)
    numbers = numbers_of(args)
    codes = numbers[torch.bucketize(x / scale + zero_point, (numbers[1:] + numbers[:-1]) / 2)]
    error = ((codes - zero_point) * scale - x).abs().pow(norm)
    return (error if weights is None else error * weights.double()).sum(dim=(0, -1))


def stored(lo, hi, args, *, global_scale=None, dtype=torch.float32):
    """The effective scale of a range, and its zero point."""
    scale, zero_point = stored_qparams(lo, hi, args, global_scale=global_scale, dtype=dtype)
    return scale.float() if global_scale is None else scale.float() / global_scale, zero_point


def best(x, args, *, norm=2.0, weights=None, global_scale=None, dtype=torch.float32, **options):
    """The effective scale, with its sign, and the zero point that are stored for the range that is found."""
    found = optimal_range(
        *(x, *min_max(x), args), norm=norm, weights_NQG=weights, global_scale=global_scale, dtype=dtype, **options
    )
    scale, zero_point = stored(found.lo_Q, found.hi_Q, args, global_scale=global_scale, dtype=dtype)
    return scale * torch.where(found.sign_Q < 0, -1.0, 1.0), zero_point


def least_error(x, args, *, norm=2.0, weights=None, global_scale=None, dtype=torch.float32, **options):
    """What the found scale loses: float64 [*Q]."""
    qparams = best(x, args, norm=norm, weights=weights, global_scale=global_scale, dtype=dtype, **options)
    return error_at(x, args, *qparams, norm=norm, weights=weights)


def minmax_error(x, args, *, norm=2.0, weights=None, global_scale=None, dtype=torch.float32):
    qparams = stored(*min_max(x), args, global_scale=global_scale, dtype=dtype)
    return error_at(x, args, *qparams, norm=norm, weights=weights)


def global_scale_for(args: QuantizationArgs, x: torch.Tensor) -> torch.Tensor | None:
    return global_scale_of(x.abs().max()) if args is NVFP4 else None


def assert_same_range(one, other):
    for name in ("lo_Q", "hi_Q", "sign_Q"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0)


# ---- against the exact optimum -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "group_size", "bound"),
    [
        (INT4, 128, 1.003),
        (INT4, 32, 1.003),
        (INT4, 256, 1.003),
        (INT3, 128, 1.003),
        (INT3, 32, 1.002),
        (INT2, 128, 1.001),
        (INT2, 32, 1.001),
        (INT4_AFFINE, 128, 1.004),
        (INT4_AFFINE, 32, 1.004),
        (INT3_AFFINE, 128, 1.006),
        (INT2_AFFINE, 64, 1.003),
    ],
)
def test_bell_shaped_groups_lose_hardly_more_than_the_exact_optimum_and_never_less(args, group_size, bound):
    x = bell_shaped(1, 60 if not args.symmetric else 200, 1, group_size)
    error, least = least_error(x, args), exact_optimum(x, args).error_Q
    assert (error >= least * (1 - 1e-9)).all()
    assert error.sum() <= bound * least.sum()


@pytest.mark.parametrize(
    ("args", "group_size", "bound"),
    [
        (INT4, 128, 1.004),
        (INT4, 32, 1.01),
        (INT3, 128, 1.003),
        (INT3, 32, 1.005),
        (INT2, 256, 1.001),
        (INT2, 32, 1.001),
        (INT4_AFFINE, 128, 1.02),
        (INT4_AFFINE, 32, 1.05),
        (INT3_AFFINE, 32, 1.03),
        (INT2_AFFINE, 32, 1.005),
    ],
)
def test_weighted_groups_lose_little_more_than_the_exact_optimum_and_never_less(args, group_size, bound):
    x = bell_shaped(1, 60 if not args.symmetric else 200, 1, group_size)
    weights = torch.rand(x.shape) ** 2
    error, least = least_error(x, args, weights=weights), exact_optimum(x, args, weights_NQG=weights).error_Q
    assert (error >= least * (1 - 1e-9)).all()
    assert error.sum() <= bound * least.sum()


def test_values_on_the_side_that_has_fewer_codes_are_given_a_scale_above_min_maxs():
    x = bell_shaped(1, 100, 1, 128).abs().clamp(max=1.0)
    scale, minmax = best(x, INT4)[0], stored(*min_max(x), INT4)[0]
    assert (scale > 1.02 * minmax).any()
    assert least_error(x, INT4).sum() <= 1.003 * exact_optimum(x, INT4).error_Q.sum()


@pytest.mark.parametrize("size", [1024, 5000])
@pytest.mark.parametrize("args", [INT4, INT3, INT2], ids=["int4", "int3", "int2"])
def test_outliers_among_thousands_are_cut_off(args, size):
    x = bell_shaped(1, 8, 1, size)
    x[..., 0] *= 20
    assert least_error(x, args).sum() <= 1.01 * exact_optimum(x, args).error_Q.sum()


def test_the_guarded_norm_keeps_outliers_among_thousands():
    """Cutting them off loses less by the norm, and more of the model."""
    x = bell_shaped(1, 8, 1, 5000)
    x[..., 0] *= 20
    minmax = stored(*min_max(x), INT4)[0]
    assert (best(x, INT4, norm=2.4)[0] >= 0.55 * minmax).all()
    assert (best(x, INT4)[0] < 0.55 * minmax).any()


@pytest.mark.parametrize(("times", "weight"), [(8.0, 1e-3), (1e4, 1e-10)], ids=["hardly", "not at all"])
@pytest.mark.parametrize(
    ("args", "bound"),
    [(INT4, 1.1), (INT3, 1.03), (INT4_AFFINE, 1.6)],
    ids=["int4", "int3", "int4 affine"],
)
def test_outliers_that_do_not_count_are_cut_off(args, bound, times, weight):
    x, weights = bell_shaped(1, 30, 1, 128), torch.ones(128)
    x[..., ::32] *= times
    weights[::32] = weight
    error = least_error(x, args, weights=weights)
    least = exact_optimum(x, args, weights_NQG=weights.expand(x.shape)).error_Q
    assert error.sum() <= bound * least.sum()


@settings(max_examples=60, deadline=None)
@given(
    args=st.sampled_from([INT2, INT3, INT4, INT2_AFFINE, INT3_AFFINE, INT4_AFFINE]),
    group_size=st.sampled_from([1, 2, 3, 16, 100]),
    seed=st.integers(0, 2**16),
    weighted=st.booleans(),
    signed=st.booleans(),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_nothing_is_better_than_the_exact_optimum(args, group_size, seed, weighted, signed, shift):
    x = heavy_tailed(1, 5, 1, group_size, seed=seed) + shift
    weights = torch.rand(x.shape) ** 8 * (torch.rand(x.shape) < 0.8) if weighted else None
    error = least_error(x, args, weights=weights, signed=signed)
    least = exact_optimum(x, args, weights_NQG=weights, signed=signed).error_Q
    total = (x.double().square() * (1 if weights is None else weights)).sum(dim=(0, -1))
    assert (error >= least * (1 - 1e-9) - 1e-14 * total).all()


@pytest.mark.parametrize("shift", [-0.3, 0.3])
@pytest.mark.parametrize("args", [INT2_AFFINE, INT4_AFFINE], ids=["int2", "int4"])
def test_one_position_alone_is_searched_as_it_is_among_others(args, shift):
    x = (bell_shaped(1, 2, 1, 300) * 0.1 + shift) * torch.tensor([1.0, -2.0]).view(1, 2, 1, 1)
    both = optimal_range(x, *min_max(x), args)
    for i in range(2):
        alone = optimal_range(x[:, i : i + 1], *min_max(x[:, i : i + 1]), args)
        torch.testing.assert_close((alone.lo_Q[0], alone.hi_Q[0]), (both.lo_Q[i], both.hi_Q[i]), rtol=0, atol=0)


def test_two_bits_lose_at_most_53_hundredths_of_what_min_max_loses():
    x = bell_shaped(1, 400, 1, 128)
    assert least_error(x, INT2).sum() <= 0.53 * minmax_error(x, INT2).sum()


def test_the_fp8_sweep_beats_min_max_by_its_phase():
    x = bell_shaped(1, 50, 1, 256)
    assert least_error(x, FP8).sum() <= 0.97 * minmax_error(x, FP8).sum()


# ---- against brute force: any scale, other norms -------------------------------------------------------------------


def least_of_many_scales(x, args, *, norm, weights=None):
    """The least error of 200 scales round min-max's, under zero points up to two away: float64 [*Q]."""
    scale, zero_point = stored(*min_max(x), args)
    half = 2 ** (args.num_bits - 1)
    points = [None]
    if not args.symmetric:
        points = [(zero_point.double() + other).clamp(-half, half - 1) for other in (-2, -1, 0, 1, 2)]
    ratios = torch.linspace(0.25, 1.4, 200) if args.type == "int" else torch.linspace(0.7, 2.0, 200)
    errors = [
        error_at(x, args, scale * ratio, point, norm=norm, weights=weights) for ratio in ratios for point in points
    ]
    return torch.stack(errors).amin(dim=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [2.4, 3.0])
@pytest.mark.parametrize(
    ("name", "bound"), [("int2", 1.001), ("int3", 1.002), ("int4", 1.003), ("int4 affine", 1.003), ("fp4", 1.001)]
)
def test_under_other_norms_hardly_a_scale_loses_less(name, bound, norm, weighted):
    args, x = ANY_SCALE[name], bell_shaped(1, 30, 1, 32)
    how = {"norm": norm, "weights": torch.rand(x.shape) ** 2 if weighted else None}
    assert least_error(x, args, **how).sum() <= bound * least_of_many_scales(x, args, **how).sum()


@pytest.mark.parametrize("shift", [0.0, -3.0, 0.9])
@pytest.mark.parametrize("name", ANY_SCALE)
def test_no_value_lies_further_outside_than_the_search_reckons_with(name, shift, monkeypatch):
    # Errors are bounded by a curve that reaches as far as values may lie outside the range, in steps.
    judge, distances = Judge.judge, []

    def watched(self, positions, scale_JP, zero_point_JP=None, *, outside=None):
        above_JP, below_JP = positions.hi_P / scale_JP, positions.lo_P / scale_JP
        if zero_point_JP is not None:
            above_JP, below_JP = above_JP + zero_point_JP, below_JP + zero_point_JP
        furthest = float(torch.maximum(above_JP - self.grid.high, self.grid.low - below_JP).max())
        distances.append((furthest, outside))
        return judge(self, positions, scale_JP, zero_point_JP, outside=outside)

    monkeypatch.setattr(Judge, "judge", watched)
    x = bell_shaped(1, 60, 1, 32) * (0.02 if shift == 0.9 else 1.0) + shift
    optimal_range(x, *min_max(x), ANY_SCALE[name], norm=2.4, refits=2)
    assert distances and all(furthest <= outside for furthest, outside in distances)


# ---- against brute force: scales of a short format ---------------------------------------------------------------


def least_of_all_codes(x, args, *, norm=2.0, weights=None, global_scale=None):
    """The least error of every e4m3 code under the global scale, or of every exponent of e8m0: float64 [*Q]."""
    if args is NVFP4:
        scales = torch.tensor(E4M3_POSITIVE) / global_scale
    else:
        scales = 2.0 ** torch.arange(-127.0, 128.0, dtype=torch.float64)
    shape = x.shape[1:-1]
    errors = [error_at(x, args, scale.expand(shape), norm=norm, weights=weights) for scale in scales]
    return torch.stack(errors).amin(dim=0)


def assert_as_good_as_brute_force(x, args, *, norm=2.0, weights=None, global_scale=None):
    options = {"norm": norm, "weights": weights, "global_scale": global_scale}
    found, least = least_error(x, args, **options), least_of_all_codes(x, args, **options)
    # fp32 knows the stored scale, its inverse and x / scale to 6e-8 each, so a difference d is off by 1.8e-7 of x, and
    # what two scales lose is compared with an error of 2 * norm * sum(w * |d| ** (norm - 1) * 1.8e-7 * |x|): Hoelder.
    total = (x.double().abs().pow(norm) * (1 if weights is None else weights)).sum(dim=(0, -1))
    blur = 2 * norm * 1.8e-7 * least ** (1 - 1 / norm) * total ** (1 / norm)
    excess = found - least * (1 + 1e-6) - blur - 1e-12 * total
    assert (excess <= 0).all(), f"{float((found / least).max())} of the least error"


def adversarial(shape, seed):
    """Weights over many orders of magnitude, a good part of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = 10.0 ** (torch.rand(shape, generator=generator) * 8 - 4)
    return weights * (torch.rand(shape, generator=generator) < 0.7)


kinds = st.sampled_from(["bell", "tails", "few", "ladder", "subnormal", "lonely"])


def drawn(kind: str, group_size: int, seed: int) -> torch.Tensor:
    x = bell_shaped(1, 6, 2, group_size, seed=seed)
    if kind == "tails":
        x = heavy_tailed(1, 6, 2, group_size, seed=seed)
    elif kind == "few":  # a handful of values, so that some scales fit exactly
        x = (x * 2).round() / 2
    elif kind == "ladder":
        x = torch.randint(-12, 13, x.shape) * 0.25
    elif kind == "lonely":  # one value that is much larger than the rest
        x[..., 0] *= 2.0 ** (seed % 12)
    elif kind == "subnormal":  # groups that are tiny beside the largest one
        x[:, 1:] *= 2.0 ** torch.randint(-18, -10, (1, 5, 2, 1)).float()
        x[:, 3:] = (x[:, 3:] * 2**16).round() / 2**16
    return x


@settings(max_examples=40, deadline=None)
@given(
    kind=kinds,
    seed=st.integers(0, 2**16),
    norm=st.sampled_from([2.0, 2.4, 3.0]),
    partner=st.sampled_from([1.0, 1.0, 1.7, 16.0, 3000.0, 0.3, 1e-3]),
)
def test_nvfp4_loses_what_the_best_of_all_126_codes_loses(kind, seed, norm, partner):
    # A fused partner may be larger; a global scale from too small a maximum saturates codes at 448.
    x = drawn(kind, 16, seed)
    assert_as_good_as_brute_force(x, NVFP4, norm=norm, global_scale=global_scale_of(x.abs().max() * partner))


@settings(max_examples=40, deadline=None)
@given(kind=kinds, seed=st.integers(0, 2**16), partner=st.sampled_from([1.0, 1.0, 1.7, 300.0, 0.3]))
@example(kind="lonely", seed=861, partner=300.0)
def test_weighted_nvfp4_loses_what_the_best_of_all_126_codes_loses(kind, seed, partner):
    x = drawn(kind, 16, seed)
    global_scale = global_scale_of(x.abs().max() * partner)
    assert_as_good_as_brute_force(x, NVFP4, weights=adversarial(x.shape, seed), global_scale=global_scale)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["mxfp4", "mxfp8"]),
    kind=kinds,
    seed=st.integers(0, 2**16),
    norm=st.sampled_from([2.0, 2.4, 3.0]),
    exponent=st.sampled_from([0, 0, -120, -60, 100]),
)
def test_mx_formats_lose_what_the_best_of_all_exponents_loses(name, kind, seed, norm, exponent):
    x = drawn(kind, 32, seed) * 2.0**exponent
    assert_as_good_as_brute_force(x, SHORT_SCALES[name], norm=norm)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(["mxfp4", "mxfp8"]), kind=kinds, seed=st.integers(0, 2**16))
def test_weighted_mx_formats_lose_what_the_best_of_all_exponents_loses(name, kind, seed):
    x = drawn(kind, 32, seed)
    assert_as_good_as_brute_force(x, SHORT_SCALES[name], weights=adversarial(x.shape, seed))


@pytest.mark.parametrize("number", [9, 11, 13, 15])
def test_a_tiny_group_may_have_a_scale_that_is_twice_no_other(number):
    # Where e4m3 is evenly spaced, half of an odd code is not a number that it has.
    x = torch.zeros(1, 1, 1, 16)
    x[..., :4] = torch.tensor([1.0, 0.5, 1.0, -0.5]) * number * 2.0**-9
    assert_as_good_as_brute_force(x, NVFP4, global_scale=torch.ones(1))


def test_a_value_that_hardly_counts_is_clipped_as_far_as_the_others_want():
    x = bell_shaped(1, 8, 1, 16).clamp(-2, 2)
    x[..., 0] = 1000.0
    weights = torch.ones(16)
    weights[0] = 1e-9
    assert_as_good_as_brute_force(x, NVFP4, weights=weights.expand(x.shape), global_scale=global_scale_of(x.max()))
    assert_as_good_as_brute_force(x, MXFP4, weights=weights.expand(x.shape))


# ---- laws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_it_is_never_worse_than_min_max_by_its_own_measure(name, dtype):
    args = EVERY_FORMAT[name]
    if name in SHORT_SCALES and dtype != torch.float32:
        dtype = torch.float32  # carries them whatever the tensor is
    for norm, weighted, options in [
        (2.0, False, {}),
        (2.4, False, {}),
        (3.0, False, {"candidates": 2, "refits": 0}),
        (2.0, True, {}),
        (2.4, True, {"refits": 5}),
    ]:
        for x in (bell_shaped(1, 40, 2, 16, seed=1), heavy_tailed(5, 40, 32, seed=2), bell_shaped(1, 9, 1, 1)):
            weights = torch.rand(x.shape) ** 6 if weighted else None
            how = {"norm": norm, "weights": weights, "global_scale": global_scale_for(args, x), "dtype": dtype}
            total = (x.double().abs().pow(norm) * (1 if weights is None else weights)).sum(dim=(0, -1))
            found, minmax = least_error(x, args, **how, **options), minmax_error(x, args, **how)
            # A single element loses next to nothing: what is left is below what fp32 can tell apart.
            floor = 1e-6 if x.shape[-1] == 1 else 1e-13
            assert (found <= minmax * (1 + 1e-5) + floor * total).all(), (norm, weighted, tuple(x.shape))


@pytest.mark.parametrize("absmax", [3.4e38, 3e38, 65504.0, 1e-7, 1e-38, 1e-44])
@pytest.mark.parametrize("name", FEW)
def test_it_is_never_worse_than_min_max_at_the_edges_of_the_number_range(name, absmax):
    args = FEW[name]
    for raw in (bell_shaped(1, 40, 2, 16, seed=3), heavy_tailed(1, 40, 2, 16, seed=3)):
        x = (raw.double() / raw.abs().amax(dim=(0, -1), keepdim=True).double() * absmax).float()
        for norm in (2.0, 2.4):
            how = {"norm": norm, "global_scale": global_scale_for(args, x)}
            found, minmax = least_error(x, args, **how), minmax_error(x, args, **how)
            total = x.double().abs().pow(norm).sum(dim=(0, -1))
            assert torch.isfinite(found).all()
            assert (found <= minmax * (1 + 1e-5) + 1e-13 * total).all(), norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("args", [INT4, INT4_AFFINE, INT8, FP8], ids=["int4", "int4 affine", "int8", "fp8"])
def test_tensors_of_short_floats_are_searched_as_their_fp32_copies(args, dtype):
    x = (bell_shaped(1, 20, 2, 64) * (10000 if dtype == torch.float16 else 1)).to(dtype)
    for norm in (2.0, 2.4):
        found, wide = (optimal_range(each, *min_max(x), args, norm=norm, dtype=dtype) for each in (x, x.float()))
        assert_same_range(found, wide)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("name", FEW)
def test_equal_weights_are_no_weights(name, norm):
    args, x = FEW[name], bell_shaped(1, 60, 2, 32)
    how = {"norm": norm, "global_scale": global_scale_for(args, x)}
    weights = torch.full((1, 1, 1, 1), 4.0)
    if name in SHORT_SCALES:
        for mine, theirs in zip(best(x, args, **how), best(x, args, weights=weights, **how), strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0)
    else:  # more scales are tried with weights, so that the error may be a little less
        plain, weighted = least_error(x, args, **how).sum(), least_error(x, args, weights=weights, **how).sum() / 4
        torch.testing.assert_close(weighted, plain, rtol=0.06, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ANY_SCALE)
def test_what_is_stored_for_the_range_is_the_scale_and_zero_point_that_were_found(name, dtype, monkeypatch):
    args, best_of, every = ANY_SCALE[name], _Search.best_of, []

    def watched(self, positions):
        every.append(best_of(self, positions))
        return every[-1]

    monkeypatch.setattr(_Search, "best_of", watched)
    x = heavy_tailed(1, 400, 1, 8).to(dtype)
    found = optimal_range(x, *min_max(x), args, dtype=dtype)
    scale, zero_point = stored(found.lo_Q, found.hi_Q, args, dtype=dtype)
    rtol = 2e-7 if dtype == torch.float32 else 0
    torch.testing.assert_close(scale.flatten(), torch.cat([each.scale_P for each in every]), rtol=rtol, atol=0)
    if not args.symmetric:
        own_scale, own_point = stored(*min_max(x), args, dtype=dtype)
        torch.testing.assert_close(zero_point.float().flatten(), torch.cat([each.point_P for each in every]))
        if name == "int8 affine" and dtype == torch.bfloat16:  # min-max's scale under another zero point does occur
            assert ((scale == own_scale) & (zero_point != own_point)).any()


def test_weights_matter_and_zero_weights_are_as_if_the_element_were_not_there():
    x = bell_shaped(1, 20, 1, 32).clamp(-2, 2)
    x[..., 0] = 3.5
    weights = torch.ones(32)
    weights[0] = 0
    how = {"weights": weights.expand(x.shape)}
    without = exact_optimum(x[..., 1:], INT4).error_Q.sum()
    assert least_error(x, INT4, **how).sum() <= 1.15 * without
    assert error_at(x, INT4, *best(x, INT4), **how).sum() > 1.5 * without


@pytest.mark.parametrize("exponent", [-120, 124])
@pytest.mark.parametrize("norm", [2.0, 2.4, 8.0])
@pytest.mark.parametrize("name", FEW)
def test_what_weights_are_measured_in_does_not_matter(name, norm, exponent):
    args, x = FEW[name], heavy_tailed(1, 40, 2, 32)
    weights = torch.rand(1, 1, 2, 32) ** 3 + 0.1
    how = {"norm": norm, "global_scale": global_scale_for(args, x)}
    found, scaled = (
        optimal_range(x, *min_max(x), args, weights_NQG=each, **how) for each in (weights, weights * 2.0**exponent)
    )
    assert_same_range(scaled, found)


@pytest.mark.parametrize("exponent", [-80, -20, 60])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in FEW if name != "nvfp4"])
def test_scaling_by_a_power_of_two_scales_the_answer_exactly(name, weighted, exponent):
    x = heavy_tailed(1, 20, 2, 16)
    weights = torch.rand(x.shape) if weighted else None
    for norm in (2.0, 2.4):
        found, scaled = (
            optimal_range(each, *min_max(each), FEW[name], norm=norm, weights_NQG=weights)
            for each in (x, x * 2.0**exponent)
        )
        torch.testing.assert_close(scaled.lo_Q, found.lo_Q * 2.0**exponent, rtol=0, atol=0)
        torch.testing.assert_close(scaled.hi_Q, found.hi_Q * 2.0**exponent, rtol=0, atol=0)


def test_scaling_nvfp4_and_its_global_scale_by_a_power_of_two_scales_the_answer_exactly():
    x = heavy_tailed(1, 20, 2, 16)
    global_scale = global_scale_of(x.abs().max())
    found = optimal_range(x, *min_max(x), NVFP4, global_scale=global_scale)
    scaled = optimal_range(x * 8, *min_max(x * 8), NVFP4, global_scale=global_scale / 8)
    torch.testing.assert_close(scaled.hi_Q, found.hi_Q * 8, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("args", [INT2, INT3, INT4, INT8], ids=["int2", "int3", "int4", "int8"])
def test_a_signed_scale_is_the_better_of_both_signs(args, norm):
    x = bell_shaped(1, 100, 2, 32)
    signed = optimal_range(x, *min_max(x), args, norm=norm, signed=True)
    plain, mirrored = (optimal_range(each, *min_max(each), args, norm=norm) for each in (x, -x))
    plain_error, mirrored_error = least_error(x, args, norm=norm), least_error(-x, args, norm=norm)
    error = least_error(x, args, norm=norm, signed=True)
    torch.testing.assert_close(error, torch.minimum(plain_error, mirrored_error), rtol=1e-5, atol=0)
    negative = signed.sign_Q < 0
    assert negative.any() and (signed.sign_Q > 0).any()
    torch.testing.assert_close(signed.hi_Q, torch.where(negative, mirrored.hi_Q, plain.hi_Q), rtol=0, atol=0)
    assert (plain.sign_Q >= 0).all()


@pytest.mark.parametrize("name", ["int4 affine", "fp8", "nvfp4"])
def test_formats_without_a_longer_side_have_no_negative_scales(name):
    args, x = FEW[name], bell_shaped(1, 20, 2, 16)
    how = {"global_scale": global_scale_for(args, x)}
    plain, signed = (optimal_range(x, *min_max(x), args, signed=signed, **how) for signed in (False, True))
    assert_same_range(plain, signed)
    assert (signed.sign_Q >= 0).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_zeros_have_the_range_zero_and_leave_their_neighbours_alone(name, norm, signed):
    args, x = EVERY_FORMAT[name], bell_shaped(1, 3, 2, 16)
    x[:, 1] = 0
    how = {"norm": norm, "signed": signed, "global_scale": global_scale_for(args, x)}
    found = optimal_range(x, *min_max(x), args, **how)
    assert not found.lo_Q[1].any() and not found.hi_Q[1].any()
    others = optimal_range(x[:, ::2], *min_max(x[:, ::2]), args, **how)
    torch.testing.assert_close(found.hi_Q[::2], others.hi_Q, rtol=1e-6, atol=0)
    assert (found.hi_Q[::2] > 0).all()


def test_more_candidates_and_refits_come_closer_to_the_optimum():
    x = bell_shaped(1, 200, 1, 128)
    errors = [least_error(x, INT4, candidates=c, refits=r).sum() for c, r in ((4, 0), (12, 0), (12, 1), (40, 2))]
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_every_element_without_weight_is_still_an_answer():
    x = bell_shaped(1, 4, 1, 16)
    for args in (INT4, INT4_AFFINE, INT8, MXFP4):
        found = optimal_range(x, *min_max(x), args, weights_NQG=torch.zeros(16))
        assert torch.isfinite(found.hi_Q).all() and (found.hi_Q > found.lo_Q).all()


@pytest.mark.parametrize("size", [0.02, 1.0, 300.0])
@pytest.mark.parametrize("norm", [1.0, 2.0, 2.4])
@pytest.mark.parametrize("name", SHORT_SCALES)
def test_where_no_element_counts_the_scale_of_a_short_format_is_min_maxs(name, norm, size):
    # Any scale loses nothing then, and one far below would cut off all that other inputs may need.
    args, x = SHORT_SCALES[name], bell_shaped(1, 30, 2, 16) * size
    weights = torch.zeros(30, 2, 16)
    weights[:3], x[:, :3, :, :8] = 1.0, 0.0
    weights[:3, :, 8:] = 0.0  # only zeros count
    found = optimal_range(
        *(x, *min_max(x), args), norm=norm, weights_NQG=weights, global_scale=global_scale_for(args, x)
    )
    torch.testing.assert_close((found.lo_Q, found.hi_Q), min_max(x), rtol=0, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [8.0, 16.0])
@pytest.mark.parametrize("name", FEW)
def test_high_norms_do_not_overflow(name, norm, weighted):
    args, x = FEW[name], bell_shaped(1, 20, 2, 16)
    weights = torch.rand(x.shape) if weighted else None
    how = {"norm": norm, "weights": weights, "global_scale": global_scale_for(args, x)}
    assert (least_error(x, args, **how) <= minmax_error(x, args, **how) * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEW)
def test_the_default_dtype_of_the_process_is_none_of_our_business(name, dtype):
    args, x = FEW[name], bell_shaped(1, 20, 2, 32)
    how = {"norm": 2.4, "global_scale": global_scale_for(args, x)}
    before = optimal_range(x, *min_max(x), args, **how)
    plain_chart.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert_same_range(optimal_range(x, *min_max(x), args, **how), before)
    finally:
        torch.set_default_dtype(torch.float32)
        plain_chart.cache_clear()


# ---- how the work is cut -----------------------------------------------------------------------------------------

CUT = {name: EVERY_FORMAT[name] for name in ("int4", "int4 affine", "int8", "fp8", "nvfp4", "mxfp4")}


@pytest.mark.parametrize("shape", [(1, 24, 4, 32), (11, 4, 16), (3, 2, 5000)])
@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_blocks_of_any_size_give_the_same_answer_bit_for_bit(name, weighted, norm, shape):
    args, x = CUT[name], bell_shaped(*shape)
    weights = torch.rand(shape) if weighted else None
    how = {"norm": norm, "weights_NQG": weights, "global_scale": global_scale_for(args, x)}
    whole = optimal_range(x, *min_max(x), args, **how)
    for block_elements in (64, 1 << 13):
        assert_same_range(optimal_range(x, *min_max(x), args, block_elements=block_elements, **how), whole)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_any_number_of_threads_gives_the_same_answer_bit_for_bit(name, weighted, norm, num_threads):
    args, x = CUT[name], bell_shaped(1, 600, 4, 32)  # torch shares out 32,768 elements and more
    weights = torch.rand(1, 1, 4, 32) if weighted else None
    answers = []
    for number in (1, 2, 3):
        num_threads(number)
        answers.append(
            optimal_range(
                *(x, *min_max(x), args), norm=norm, weights_NQG=weights, global_scale=global_scale_for(args, x)
            )
        )
        assert torch.get_num_threads() == number
    for other in answers[1:]:
        assert_same_range(other, answers[0])


@pytest.mark.parametrize("name", ["int4", "int4 affine", "int8", "nvfp4"])
def test_observations_add_up(name):
    args, x = FEW[name], heavy_tailed(7, 5, 100)
    how = {"global_scale": global_scale_for(args, x)}
    together = x.movedim(0, -2).flatten(-2).unsqueeze(0)
    one, other = (best(each, args, block_elements=64, **how) for each in (x, together))
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(one[1].float(), other[1].float(), rtol=0, atol=0)
