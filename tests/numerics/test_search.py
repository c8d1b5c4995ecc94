"""The range search: it finds what trying everything finds, however the work is cut, and stops only when it may."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from scalewright.numerics import search
from scalewright.numerics.blocks import BLOCK_ELEMENTS
from scalewright.numerics.charts import error_chart
from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import grid_of
from scalewright.numerics.scales import global_scale_of, stored_qparams
from scalewright.numerics.search import search_range, shrink_candidates

INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
INT4_AFFINE = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=16)
INT8 = QuantizationArgs(num_bits=8, strategy="channel")
INT5 = QuantizationArgs(num_bits=5)  # the fewest bits that are not charted
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
EXPANDED = {"maxshrink": 1 - 0.8 / 1.8, "grid": 200, "expand": 1.8}
BATCH = 8  # candidates that are judged at a time
FORMATS = {"int4": INT4, "int4 affine": INT4_AFFINE, "int8": INT8, "fp8": FP8, "nvfp4": NVFP4}


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape) * torch.exp(torch.randn(shape))


def bell_shaped(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape)


def run(x, args, *, candidates=None, norm=2.4, **options):
    if candidates is None:
        candidates = shrink_candidates(maxshrink=0.5, grid=20)
    lo, hi = min_max(x)
    if args is NVFP4:
        options.setdefault("global_scale", global_scale_of(x.abs().max()))
    return search_range(x, lo, hi, args, candidates_K2=candidates, norm=norm, **options)


def error_of_everything(x, args, candidates, *, norm, global_scale=None, weights=None, dtype=torch.float32):
    """The error of every candidate at every position, in float64: [K, *Q]. Written apart from the search."""
    lo, hi = min_max(x)
    grid = grid_of(args)
    numbers = grid.numbers().double()
    errors = []
    for factor_lo, factor_hi in candidates.tolist():
        scale, zero_point = calculate_qparams(lo * factor_lo, hi * factor_hi, args, global_scale)
        scale = scale.to(dtype).double().unsqueeze(-1)
        scale = scale if global_scale is None else scale / global_scale.double()
        zero_point = zero_point.double().unsqueeze(-1)
        code = x.double() / scale + zero_point
        if args.type == "int":
            code = code.round().clamp(grid.low, grid.high)
        else:  # a tie may go to either number: the error is the same
            code = numbers[(code.unsqueeze(-1) - numbers).abs().argmin(dim=-1)]
        error = ((code - zero_point) * scale - x.double()).abs().pow(norm)
        errors.append((error if weights is None else error * weights.double()).sum(dim=(0, -1)))
    return torch.stack(errors)


def error_of_found(x, found, args, *, norm=2.4, global_scale=None, weights=None, dtype=torch.float32):
    """The error of the range that was found, as it would be stored, in float64: [*Q]."""
    if args is NVFP4 and global_scale is None:
        global_scale = global_scale_of(x.abs().max())
    scale, zero_point = stored_qparams(found.lo_Q, found.hi_Q, args, global_scale=global_scale, dtype=dtype)
    scale = scale.double().unsqueeze(-1)
    scale = scale if global_scale is None else scale / global_scale.double()
    zero_point = zero_point.double().unsqueeze(-1)
    numbers = grid_of(args).numbers().double()
    codes = numbers[torch.bucketize(x.double() / scale + zero_point, (numbers[1:] + numbers[:-1]) / 2)]
    error = ((codes - zero_point) * scale - x.double()).abs().pow(norm)
    return (error if weights is None else error * weights.double()).sum(dim=(0, -1))


# ---- candidates --------------------------------------------------------------------------------------------------


def test_candidates_shrink_both_ends_step_by_step_and_stop_before_maxshrink():
    candidates = shrink_candidates(maxshrink=0.3, grid=10)
    torch.testing.assert_close(candidates, torch.tensor([[1.0, 1.0], [0.9, 0.9], [0.8, 0.8]]))


def test_candidates_with_expand_begin_with_min_max_itself():
    candidates = shrink_candidates(maxshrink=0.5, grid=4, expand=2.0)
    torch.testing.assert_close(candidates[:, 0], torch.tensor([1.0, 2.0, 1.5]))


def test_min_max_is_not_tried_twice():
    candidates = shrink_candidates(maxshrink=0.75, grid=4, expand=2.0)  # 2, 1.5, 1
    torch.testing.assert_close(candidates[:, 0], torch.tensor([1.0, 2.0, 1.5]))


@pytest.mark.parametrize(("maxshrink", "grid"), [(0.0, 100.0), (0.001, 100.0), (1.0, 0.5)])
def test_without_room_to_shrink_there_is_min_max_alone(maxshrink, grid):
    torch.testing.assert_close(shrink_candidates(maxshrink=maxshrink, grid=grid), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("maxshrink", "grid", "count"),
    [(0.2, 100.0, 20), (0.95, 20.0, 19), (1.0, 100.0, 100), (0.29, 100.0, 29), (0.57, 100.0, 57)],
)
def test_the_number_of_candidates_is_maxshrink_times_grid_and_no_float_error_eats_one(maxshrink, grid, count):
    candidates = shrink_candidates(maxshrink=maxshrink, grid=grid)
    assert len(candidates) == count
    assert (candidates > 0).all()


def test_the_expanded_search_goes_from_1_8_to_0_8():
    candidates = shrink_candidates(maxshrink=1 - 0.8 / 1.8, grid=200, expand=1.8)[:, 0]
    assert len(candidates) == 112
    assert candidates[0] == 1
    assert candidates[1:].max().item() == pytest.approx(1.8)
    assert candidates[1:].min().item() == pytest.approx(1.8 * (1 - 110 / 200))


# ---- the answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1.5, 2.0, 2.4, 3.0, 5.0])
@pytest.mark.parametrize("name", FORMATS)
def test_the_search_finds_what_trying_everything_finds(name, norm):
    args, x = FORMATS[name], bell_shaped(1, 6, 2, 128)
    candidates = shrink_candidates(maxshrink=0.3, grid=100, expand=1.1)
    global_scale = global_scale_of(x.abs().max()) if args is NVFP4 else None
    errors = error_of_everything(x, args, candidates, norm=norm, global_scale=global_scale)
    found = run(x, args, candidates=candidates, norm=norm)
    least = errors.amin(dim=0)
    at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(at_found, least, rtol=1e-5, atol=0)
    torch.testing.assert_close(error_of_found(x, found, args, norm=norm), least, rtol=1e-5, atol=0)
    factors = candidates[found.best_Q]
    lo, hi = min_max(x)
    torch.testing.assert_close(found.lo_Q, lo * factors[..., 0], rtol=0, atol=0)
    torch.testing.assert_close(found.hi_Q, hi * factors[..., 1], rtol=0, atol=0)
    assert (found.num_tried_Q == len(candidates)).all()
    assert len(found.best_Q.unique()) > 2  # the case is not a trivial one


def test_the_two_ends_may_have_factors_of_their_own():
    x = heavy_tailed(1, 6, 2, 16)
    factors = torch.linspace(1, 0.5, 6)
    candidates = torch.cartesian_prod(factors, factors)
    errors = error_of_everything(x, INT4_AFFINE, candidates, norm=2.0)
    found = run(x, INT4_AFFINE, candidates=candidates, norm=2.0)
    at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(at_found, errors.amin(dim=0), rtol=1e-5, atol=0)
    chosen = candidates[found.best_Q]
    assert (chosen[..., 0] != chosen[..., 1]).any()
    lo, hi = min_max(x)
    torch.testing.assert_close(found.lo_Q, lo * chosen[..., 0], rtol=0, atol=0)
    torch.testing.assert_close(found.hi_Q, hi * chosen[..., 1], rtol=0, atol=0)


def test_observations_add_up():
    x = heavy_tailed(7, 5, 16)
    candidates = shrink_candidates(maxshrink=0.6, grid=30)
    found = run(x, INT8, candidates=candidates)
    together = run(x.movedim(0, -2).flatten(-2).unsqueeze(0), INT8, candidates=candidates)
    torch.testing.assert_close(found.best_Q, together.best_Q)
    torch.testing.assert_close(found.hi_Q, together.hi_Q, rtol=0, atol=0)


def test_the_first_of_equal_candidates_wins():
    x = bell_shaped(1, 8, 2, 64)
    factors = torch.tensor([1.0, 0.9, 0.9, 0.8, 0.8, 1.0])
    found = run(x, INT4, candidates=factors.unsqueeze(1).expand(-1, 2))
    assert not torch.isin(found.best_Q, torch.tensor([2, 4, 5])).any()
    assert torch.isin(found.best_Q, torch.tensor([1, 3])).any()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_keep_the_first_candidate_and_lose_nothing(name):
    for candidates in (None, shrink_candidates(**EXPANDED)):
        x = torch.zeros(1, 3, 2, 16)
        found = run(x, FORMATS[name], candidates=candidates)
        assert not found.best_Q.any()
        assert not error_of_found(x, found, FORMATS[name]).any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**-16)])
def test_candidates_are_judged_by_the_scale_as_it_is_stored(dtype, size):
    # Steps so small that rounding the scale (to a denormal, for fp16) decides which candidate is best.
    x = bell_shaped(1, 40, 1, 64) * size
    candidates = shrink_candidates(maxshrink=0.2, grid=400)
    stored = run(x, INT4, candidates=candidates, dtype=dtype)
    plain = run(x, INT4, candidates=candidates)
    errors = error_of_everything(x, INT4, candidates, norm=2.4, dtype=dtype)
    at_stored, at_plain = (errors.gather(0, each.best_Q.long().unsqueeze(0)).squeeze(0) for each in (stored, plain))
    torch.testing.assert_close(at_stored, errors.amin(dim=0), rtol=1e-5, atol=0)
    assert (at_plain > at_stored * 1.001).any()


@pytest.mark.parametrize("exponent", [-100, -20, 60])
@pytest.mark.parametrize("name", ["int4", "int4 affine", "int8", "fp8"])
def test_scaling_by_a_power_of_two_scales_the_answer_exactly(name, exponent):
    x = heavy_tailed(1, 6, 2, 16)
    found, scaled = run(x, FORMATS[name], norm=3.0), run(x * 2.0**exponent, FORMATS[name], norm=3.0)
    torch.testing.assert_close(scaled.best_Q, found.best_Q)
    torch.testing.assert_close(scaled.lo_Q, found.lo_Q * 2.0**exponent, rtol=0, atol=0)
    torch.testing.assert_close(scaled.hi_Q, found.hi_Q * 2.0**exponent, rtol=0, atol=0)


@pytest.mark.parametrize("absmax", [1e-30, 60000.0, 1e37])
def test_errors_neither_vanish_nor_overflow(absmax):
    x = heavy_tailed(1, 6, 2, 16)
    x = x / x.abs().max() * absmax
    candidates = shrink_candidates(maxshrink=0.5, grid=20)
    for norm in (2.0, 2.4, 3.0):
        found = run(x, INT4, norm=norm, candidates=candidates)
        assert (found.best_Q > 0).any()
        # In float64 neither happens: powers of 1e37 and of 1e-30 are well inside.
        errors = error_of_everything(x, INT4, candidates, norm=norm)
        at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
        assert (at_found <= errors.amin(dim=0) * (1 + 1e-5)).all()


# ---- weights -----------------------------------------------------------------------------------------------------


def test_weighted_errors_find_what_trying_everything_finds():
    x = heavy_tailed(1, 12, 3, 16)
    weights = torch.rand(1, 1, 3, 16) ** 4
    candidates = shrink_candidates(maxshrink=0.6, grid=30)
    errors = error_of_everything(x, INT4, candidates, norm=2.4, weights=weights)
    found = run(x, INT4, candidates=candidates, weights_NQG=weights)
    at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(at_found, errors.amin(dim=0), rtol=1e-5, atol=0)
    assert (found.best_Q != run(x, INT4, candidates=candidates).best_Q).any()


def test_ranges_of_a_thousandth_are_told_apart():
    x, weights = bell_shaped(1, 20, 1, 64), torch.ones(64)
    x[..., 0], weights[0] = 400.0, 0.0  # so that next to nothing of the range is best
    candidates = shrink_candidates(maxshrink=1.0, grid=1000)
    errors = error_of_everything(x, INT4, candidates, norm=2.4, weights=weights)
    found = run(x, INT4, candidates=candidates, weights_NQG=weights)
    at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(at_found, errors.amin(dim=0), rtol=1e-5, atol=0)
    assert (candidates[found.best_Q] < 0.02).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_range_beyond_fp32_ends_with_fp32(name):
    x = bell_shaped(1, 6, 2, 16)
    x = x / x.abs().max() * torch.finfo(torch.float32).max
    found = run(x, FORMATS[name], candidates=shrink_candidates(maxshrink=0.3, grid=20, expand=1.8))
    assert found.lo_Q.isfinite().all() and found.hi_Q.isfinite().all()


def test_equal_weights_are_no_weights():
    x = heavy_tailed(1, 6, 2, 16)
    plain, weighted = run(x, INT4), run(x, INT4, weights_NQG=torch.full((1, 1, 1, 1), 4.0))
    torch.testing.assert_close(weighted.best_Q, plain.best_Q)
    torch.testing.assert_close(weighted.hi_Q, plain.hi_Q, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [2.4, 3.0, 8.0])
@pytest.mark.parametrize("exponent", [-120, 124])
@pytest.mark.parametrize("name", FORMATS)
def test_what_weights_are_measured_in_does_not_matter(name, exponent, norm):
    x, weights = bell_shaped(1, 40, 2, 64), torch.rand(1, 1, 2, 64) ** 3 + 0.1
    how = {"norm": norm, "candidates": shrink_candidates(maxshrink=0.2, grid=100, expand=1.15)}
    found, scaled = (run(x, FORMATS[name], weights_NQG=each, **how) for each in (weights, weights * 2.0**exponent))
    torch.testing.assert_close(scaled.best_Q, found.best_Q, rtol=0, atol=0)
    assert len(found.best_Q.unique()) > 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_default_dtype_of_the_process_is_none_of_our_business(name, dtype):
    x = bell_shaped(1, 40, 2, 16)
    before = run(x, FORMATS[name])
    error_chart.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        torch.testing.assert_close(run(x, FORMATS[name]).best_Q, before.best_Q, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
        error_chart.cache_clear()


def test_an_element_without_weight_does_not_count():
    x = heavy_tailed(1, 6, 2, 16).clamp(-2, 2)
    x[..., 0] = 4.0
    weights = torch.ones(16)
    weights[0] = 0
    candidates = shrink_candidates(maxshrink=0.6, grid=30)
    unweighted, weighted = run(x, INT8, candidates=candidates), run(x, INT8, candidates=candidates, weights_NQG=weights)
    assert (unweighted.hi_Q > 3.5).all()
    assert (weighted.hi_Q < 3).all()


# ---- how the work is cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_elements", [1, 7, 64, 1000])
@pytest.mark.parametrize("shape", [(1, 9, 3, 16), (11, 4, 16), (1, 1, 600), (5, 3, 1, 1, 8)])
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_any_size_give_the_same_answer(shape, weighted, block_elements):
    x = heavy_tailed(*shape)
    weights = torch.rand(shape) if weighted else None
    whole = run(x, INT4, weights_NQG=weights)
    cut = run(x, INT4, weights_NQG=weights, block_elements=block_elements)
    torch.testing.assert_close(cut.best_Q, whole.best_Q)
    torch.testing.assert_close(cut.lo_Q, whole.lo_Q, rtol=0, atol=0)
    torch.testing.assert_close(cut.hi_Q, whole.hi_Q, rtol=0, atol=0)
    torch.testing.assert_close(cut.num_tried_Q, whole.num_tried_Q)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("shape", [(1, 30, 3, 16), (20, 4, 16), (3, 2, 5000)])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_searched_in_blocks_of_any_size(name, shape, norm):
    x = bell_shaped(*shape)
    candidates = shrink_candidates(**EXPANDED)
    how = {"candidates": candidates, "norm": norm}
    whole, cut = run(x, FORMATS[name], **how), run(x, FORMATS[name], block_elements=64, **how)
    torch.testing.assert_close(cut.best_Q, whole.best_Q)
    torch.testing.assert_close(cut.hi_Q, whole.hi_Q, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 600, 8, 16), (64, 21, 64)])  # torch shares out 32,768 elements and more
@pytest.mark.parametrize("name", ["int4", "int4 affine", "nvfp4"])
def test_any_number_of_threads_gives_the_same_answer(name, shape, weighted, norm, num_threads):
    x = heavy_tailed(*shape)
    weights = torch.rand(shape[-1]) if weighted else None
    answers = []
    for number in (1, 2, 3):
        num_threads(number)
        answers.append(run(x, FORMATS[name], norm=norm, weights_NQG=weights, patience=2))
        assert torch.get_num_threads() == number
    for other in answers[1:]:
        for field in ("best_Q", "lo_Q", "hi_Q", "num_tried_Q"):
            torch.testing.assert_close(getattr(other, field), getattr(answers[0], field), rtol=0, atol=0)


# ---- many candidates, few scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("partner", [1.0, 5.0, 3000.0, 0.2])
def test_the_expanded_search_finds_the_best_of_all_112_candidates(partner, weighted, norm):
    # A fused partner may be larger, so that codes are subnormal; too small a maximum saturates them at 448.
    x = bell_shaped(1, 30, 2, 16)
    x[:, 10:20] *= 1e-3
    weights = torch.rand(x.shape) ** 2 if weighted else None
    candidates, global_scale = shrink_candidates(**EXPANDED), global_scale_of(x.abs().max() * partner)
    lo, hi = min_max(x)
    found = run(x, NVFP4, candidates=candidates, norm=norm, weights_NQG=weights, global_scale=global_scale)
    how = {"norm": norm, "weights": weights, "global_scale": global_scale}
    least = torch.stack(
        [
            error_of_found(x, replace(found, lo_Q=lo * factor, hi_Q=hi * factor), NVFP4, **how)
            for factor in candidates[:, 0]
        ]
    ).amin(dim=0)
    torch.testing.assert_close(error_of_found(x, found, NVFP4, **how), least, rtol=1e-5, atol=0)
    factor = candidates[found.best_Q]
    torch.testing.assert_close(found.hi_Q, hi * factor[..., 1], rtol=0, atol=0)
    torch.testing.assert_close(found.lo_Q, lo * factor[..., 0], rtol=0, atol=0)


@pytest.mark.parametrize("factors", [[1.0, 1.6, 1.3, 0.9, 0.7], [1.0, 0.9, 1.7, 0.8, 1.5], [1.0, 1.04, 1.0, 0.5]])
def test_candidates_that_pass_over_codes_are_tried_one_by_one(factors):
    x = bell_shaped(1, 60, 2, 16)
    candidates = torch.tensor(factors).unsqueeze(1).expand(-1, 2)
    errors = error_of_everything(x, NVFP4, candidates, norm=2.0, global_scale=global_scale_of(x.abs().max()))
    found = run(x, NVFP4, candidates=candidates, norm=2.0)
    at_found = errors.gather(0, found.best_Q.long().unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(at_found, errors.amin(dim=0), rtol=1e-5, atol=0)


def test_the_short_cut_gives_the_candidate_that_the_plain_path_gives():
    x = bell_shaped(1, 60, 2, 16)
    candidates = shrink_candidates(**EXPANDED)
    short = run(x, NVFP4, candidates=candidates)
    # The last step is too wide for the short cut, and too far down to be best.
    plain = run(x, NVFP4, candidates=torch.cat([candidates, torch.full((1, 2), 0.01)]))
    torch.testing.assert_close(short.best_Q, plain.best_Q)
    assert len(short.best_Q.unique()) > 5


# ---- stopping early ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [1, 2, 5])
@pytest.mark.parametrize("expand", [1.0, 1.8])
@pytest.mark.parametrize("name", FORMATS)
def test_patience_never_changes_the_answer(name, expand, patience):
    candidates = shrink_candidates(maxshrink=0.9, grid=50, expand=expand)
    for seed in range(3):
        x = heavy_tailed(1, 16, 2, 16, seed=seed)
        full = run(x, FORMATS[name], candidates=candidates)
        hasty = run(x, FORMATS[name], candidates=candidates, patience=patience)
        torch.testing.assert_close(hasty.best_Q, full.best_Q)
        torch.testing.assert_close(hasty.lo_Q, full.lo_Q, rtol=0, atol=0)
        torch.testing.assert_close(hasty.hi_Q, full.hi_Q, rtol=0, atol=0)


@pytest.mark.parametrize("patience", [1, 4, 9])
def test_a_position_waits_as_many_candidates_as_it_has_patience(patience):
    candidates = shrink_candidates(maxshrink=0.9, grid=50)
    found = run(heavy_tailed(1, 64, 2, 4), INT8, candidates=candidates, patience=patience)
    has_stopped = found.num_tried_Q < len(candidates)
    assert has_stopped.any()
    assert (found.num_tried_Q - 1 - found.best_Q >= patience)[has_stopped].all()


def test_patience_never_changes_a_weighted_answer():
    x, weights = heavy_tailed(1, 16, 2, 16), torch.rand(16) ** 8
    candidates = shrink_candidates(maxshrink=0.9, grid=50)
    for args in (INT4, INT8):
        full = run(x, args, candidates=candidates, weights_NQG=weights)
        hasty = run(x, args, candidates=candidates, weights_NQG=weights, patience=1)
        torch.testing.assert_close(hasty.best_Q, full.best_Q)


@pytest.mark.parametrize("patience", [1, 5, 8, 20])
def test_patience_saves_the_candidates_that_have_no_hope(patience):
    # One value and zeros: to shrink is to clip that value more and more, and nothing else is gained by it.
    x = torch.zeros(1, 3, 1, 16)
    x[..., 0] = torch.tensor([1.0, -3.0, 0.01]).reshape(1, 3, 1)
    candidates = shrink_candidates(maxshrink=0.9, grid=50)
    assert (run(x, FP8, candidates=candidates).num_tried_Q == len(candidates)).all()
    hasty = run(x, FP8, candidates=candidates, patience=patience)
    # Judged in batches: the first that has seen enough is the last.
    assert (hasty.num_tried_Q == -(-(1 + patience) // BATCH) * BATCH).all()


def test_a_position_without_hope_does_not_stop_the_others():
    x = torch.zeros(1, 2, 1, 64)
    x[0, 0, 0, 0] = 1.0
    x[0, 1] = heavy_tailed(1, 64, seed=3).clamp(-4, 4)
    candidates = shrink_candidates(maxshrink=0.5, grid=200)
    hasty = run(x, INT5, candidates=candidates, patience=1)
    full = run(x, INT5, candidates=candidates)
    assert hasty.num_tried_Q[0, 0] < hasty.num_tried_Q[1, 0]
    torch.testing.assert_close(hasty.best_Q, full.best_Q)


def test_more_patience_tries_more():
    x = heavy_tailed(1, 32, 2, 16)
    candidates = shrink_candidates(maxshrink=0.95, grid=100)
    tried = [run(x, INT8, candidates=candidates, patience=patience).num_tried_Q.sum() for patience in (1, 9, 20, 0)]
    assert tried[0] < tried[1] < tried[2] < tried[3]


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [INT4, INT8])
@pytest.mark.parametrize("num_candidates", [20, 190])
def test_blocks_hold_fewer_positions_where_there_are_more_candidates(args, num_candidates, monkeypatch):
    held = []
    cut = search.positions_of

    def watched(*given, **options):
        for positions in cut(*given, **options):
            held.append(len(positions.unit_P))
            yield positions

    monkeypatch.setattr(search, "positions_of", watched)
    candidates = shrink_candidates(maxshrink=0.95, grid=num_candidates / 0.95)
    run(bell_shaped(1, 1 << 15, 2, 16), args, candidates=candidates)
    # The errors of all candidates at all positions of a block are in memory at once.
    assert max(held) * num_candidates <= BLOCK_ELEMENTS
