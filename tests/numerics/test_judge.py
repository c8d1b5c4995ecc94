"""What scales lose, measured apart in float64: bounds hold, and the winner is that of measuring everything."""

import pytest
import torch

from scalewright.numerics.blocks import positions_of
from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import E2M1, E4M3, Grid
from scalewright.numerics.judge import Judge, Judged

INT2, INT4, INT8 = Grid("int2", -2, 1), Grid("int4", -8, 7), Grid("int8", -128, 127)
# In fp32 a value of 128 steps is known to 1e-5 of a step.
TOLERANCE = {"int8": 1e-4, "e4m3": 1e-4}
GRIDS = [INT2, INT4, INT8, E2M1, E4M3]
NORMS = [1.0, 2.0, 2.4, 3.0, 3.3]


def made(*shape: int, weighted: bool = False, block_elements: int = 1 << 18, seed: int = 0):
    """A tensor in units, its weights in theirs, and its positions."""
    torch.manual_seed(seed)
    x = torch.randn(shape)
    weights = torch.rand(shape) ** 3 if weighted else None
    (positions,) = positions_of(x, *min_max(x), weights_NQG=weights, block_elements=block_elements)
    if weights is not None:
        weights = weights / positions.weight_unit_P.reshape(x.shape[1:-1]).unsqueeze(-1)
    return x / positions.unit_P.reshape(x.shape[1:-1]).unsqueeze(-1), weights, positions


def error_at(x, grid, scale, zero_point=None, *, norm, weights=None):
    """Float64 [P]."""
    numbers = grid.numbers().double()
    scale = scale.double().reshape(x.shape[1:-1]).unsqueeze(-1)
    zero_point = 0.0 if zero_point is None else zero_point.double().reshape(x.shape[1:-1]).unsqueeze(-1)
    codes = numbers[torch.bucketize(x.double() / scale + zero_point, (numbers[1:] + numbers[:-1]) / 2)]
    error = ((codes - zero_point) * scale - x.double()).abs().pow(norm)
    return (error if weights is None else error * weights.double()).sum(dim=(0, -1)).flatten()


def errors_at(x, grid, scale_KP, point_KP=None, **options):
    points = [None] * len(scale_KP) if point_KP is None else point_KP
    return torch.stack([error_at(x, grid, *pair, **options) for pair in zip(scale_KP, points, strict=True)])


def ladder(positions, grid, count=12, low=0.5, high=1.3):
    largest_P = torch.maximum(-positions.lo_P, positions.hi_P)
    return torch.linspace(high, low, count).unsqueeze(1) * largest_P / ((grid.high - grid.low) / 2)


@pytest.mark.parametrize("shape", [(1, 20, 2, 32), (5, 6, 16), (1, 2, 5000)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_error_lies_within_the_bounds(grid, norm, weighted, shape):
    x, weights, positions = made(*shape, weighted=weighted)
    scale_KP, judge = ladder(positions, grid), Judge(grid, norm)
    judged = judge.judge(positions, scale_KP)
    expected = errors_at(x, grid, scale_KP, norm=norm, weights=weights)
    rtol = TOLERANCE.get(grid.name, 1e-5)
    assert (judged.least_KP <= expected * (1 + rtol)).all()
    assert (judged.most_KP >= expected * (1 - rtol)).all()
    if judged.is_exact:
        torch.testing.assert_close(judged.least_KP.double(), expected, rtol=rtol, atol=0)
    error_P = judge.errors(positions, scale_KP[3])
    torch.testing.assert_close(error_P.double(), expected[3], rtol=rtol, atol=0)


def test_whole_norms_are_exact_and_fractional_ones_of_integers_are_bounds():
    _, _, positions = made(1, 20, 2, 32)
    for norm, is_exact in ((1.0, True), (2.0, True), (3.0, True), (4.0, True), (2.4, False)):
        assert Judge(INT4, norm).judge(positions, ladder(positions, INT4, low=0.9)).is_exact == is_exact


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("grid", [INT2, INT4, INT8], ids=lambda grid: grid.name)
def test_zero_points_move_the_range(grid, norm, weighted):
    x, weights, positions = made(1, 20, 2, 32, weighted=weighted)
    scale_KP = ladder(positions, grid)
    point_KP = torch.randint(-2, 2, scale_KP.shape).float()
    judge = Judge(grid, norm)
    judged = judge.judge(positions, scale_KP, point_KP)
    expected = errors_at(x, grid, scale_KP, point_KP, norm=norm, weights=weights)
    rtol = TOLERANCE.get(grid.name, 1e-5)
    assert (judged.least_KP <= expected * (1 + rtol)).all()
    assert (judged.most_KP >= expected * (1 - rtol)).all()
    error_P = judge.errors(positions, scale_KP[0], point_KP[0])
    torch.testing.assert_close(error_P.double(), expected[0], rtol=rtol, atol=0)
    at_best = expected.gather(0, judge.best(positions, judged).unsqueeze(0))[0]
    torch.testing.assert_close(at_best, expected.amin(dim=0), rtol=rtol, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_winner_is_that_of_measuring_everything_exactly(grid, norm, weighted):
    x, weights, positions = made(1, 60, 2, 32, weighted=weighted)
    # So close to each other that bounds overlap.
    scale_KP, judge = ladder(positions, grid, count=60, low=0.7, high=1.1), Judge(grid, norm)
    best_P = judge.best(positions, judge.judge(positions, scale_KP))
    errors = errors_at(x, grid, scale_KP, norm=norm, weights=weights)
    at_best = errors.gather(0, best_P.unsqueeze(0))[0]
    torch.testing.assert_close(at_best, errors.amin(dim=0), rtol=1e-5, atol=0)
    assert len(best_P.unique()) > 5


@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_the_first_of_equals_wins(norm):
    _, _, positions = made(1, 60, 2, 32)
    once = ladder(positions, INT4, count=10, low=0.9)
    twice = once.repeat_interleave(2, dim=0)
    judge = Judge(INT4, norm)
    best_P, of_two_P = (judge.best(positions, judge.judge(positions, each)) for each in (once, twice))
    torch.testing.assert_close(of_two_P, 2 * best_P, rtol=0, atol=0)


def test_of_candidates_whose_bounds_overlap_the_exact_errors_decide():
    x, _, positions = made(1, 4, 1, 64)
    scale_KP, judge = ladder(positions, INT4), Judge(INT4, 2.4)
    errors = errors_at(x, INT4, scale_KP, norm=2.4)
    blurred = Judged(scale_KP, None, torch.zeros_like(errors), errors.max() + errors.flip(0))
    torch.testing.assert_close(judge.best(positions, blurred), errors.argmin(dim=0), rtol=0, atol=0)


def test_a_candidate_whose_bounds_lie_below_all_others_wins_as_it_is():
    _, _, positions = made(1, 4, 1, 64)
    scale_KP = ladder(positions, INT4, count=3)
    least = torch.tensor([[2.0], [0.5], [3.0]], dtype=torch.float64).expand(-1, 4)
    assert (Judge(INT4, 2.4).best(positions, Judged(scale_KP, None, least, least + 1e-3)) == 1).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_batches_are_joined_and_picked_from_in_order(weighted):
    _, _, positions = made(1, 5, 2, 32, weighted=weighted)
    scale_KP = ladder(positions, INT4, low=0.9)
    for norm in (2.0, 2.4):
        judge = Judge(INT4, norm)
        joined = Judged.joined([judge.judge(positions, each) for each in torch.split(scale_KP, 5)])
        torch.testing.assert_close(joined.scale_KP, scale_KP, rtol=0, atol=0)
        assert joined.is_exact == (norm == 2.0)
        index = torch.tensor([[7], [2]]).expand(-1, scale_KP.shape[1])
        some = joined.at(index)
        torch.testing.assert_close(some.scale_KP, scale_KP[[7, 2]], rtol=0, atol=0)
        torch.testing.assert_close(some.least_KP, joined.least_KP[[7, 2]], rtol=0, atol=0)
        torch.testing.assert_close(some.most_KP, joined.most_KP[[7, 2]], rtol=0, atol=0)
        assert some.is_exact == joined.is_exact
        assert some.zero_point_KP is None


@pytest.mark.parametrize("shape", [(1, 20, 2, 32), (5, 6, 16), (1, 2, 5000)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("has_points", [False, True])
def test_scores_are_the_sums_that_the_best_scale_for_the_codes_comes_from(shape, weighted, has_points):
    x, weights, positions = made(*shape, weighted=weighted)
    scale_KP = ladder(positions, INT4, count=4)
    point_KP = torch.randint(-3, 3, scale_KP.shape).float() if has_points else None
    judge = Judge(INT4, 2.0)
    a_KP, b_KP = judge.scores(positions, scale_KP, point_KP)
    w = 1.0 if weights is None else weights.double()
    for k in range(4):
        scale = scale_KP[k].reshape(x.shape[1:-1]).unsqueeze(-1)
        point = 0.0 if point_KP is None else point_KP[k].reshape(x.shape[1:-1]).unsqueeze(-1)
        codes = (x * scale.reciprocal()).round().clamp(-8 - point, 7 - point).double()
        for found, expected in ((a_KP[k], x.double() * codes * w), (b_KP[k], codes.square() * w)):
            torch.testing.assert_close(found.double(), expected.sum(dim=(0, -1)).flatten(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [2.0, 3.0])
@pytest.mark.parametrize("grid", [INT2, INT4, E2M1], ids=lambda grid: grid.name)
def test_what_is_clipped_loses_no_more_than_any_smaller_scale(grid, norm, weighted):
    x, weights, positions = made(1, 30, 2, 16, weighted=weighted)
    scale_KP, judge = ladder(positions, grid, count=20, low=0.2), Judge(grid, norm)
    errors = errors_at(x, grid, scale_KP, norm=norm, weights=weights)
    for k in range(20):
        clipped = judge.clipped(positions, scale_KP[k], thorough=True)
        if not weighted:
            assert (judge.clipped(positions, scale_KP[k], thorough=False) <= clipped * (1 + 1e-5)).all()
        assert (clipped * (1 - 1e-5) <= errors[k:].amin(dim=0)).all()
    assert (clipped > 0.1 * errors[-1]).all()  # a bound that says something


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [2.0, 3.0])
def test_a_lonely_value_outside_the_range_loses_just_what_is_clipped(norm, weighted, sign):
    x = torch.zeros(1, 4, 1, 16)
    x[..., 0] = sign * torch.tensor([1.0, 1.2, 1.5, 1.9]).reshape(4, 1)
    weights = torch.full(x.shape, 1.2) if weighted else None  # their unit is 1
    (positions,) = positions_of(x, *min_max(x), weights_NQG=weights)
    judge, scale_P = Judge(INT4, norm), torch.full((4,), 0.1)
    expected = error_at(x, INT4, scale_P, norm=norm, weights=weights)
    for thorough in (True,) if weighted else (True, False):
        clipped = judge.clipped(positions, scale_P, thorough=thorough)
        torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0)
        assert not judge.clipped(positions, 10 * scale_P, thorough=thorough).any()


@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
def test_a_scale_under_which_powers_overflow_never_wins(norm):
    x = torch.randn(1, 6, 1, 16, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(16)
    weights[3] = 0.0
    (positions,) = positions_of(x, *min_max(x), weights_NQG=weights)
    judge = Judge(INT4, norm)
    scale_KP = torch.tensor([[1e-30], [0.2], [1e-25]]).expand(-1, 6)
    judged = judge.judge(positions, scale_KP)
    assert not judged.least_KP.isnan().any()
    assert (judge.best(positions, judged) == 1).all()
    assert not judge.errors(positions, scale_KP[0]).isnan().any()


@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6, 1e12])
def test_scales_of_any_size_are_judged(scale, norm):
    x, _, positions = made(1, 6, 1, 16)
    scale_KP = torch.full((1, 6), scale)
    error_P = Judge(E2M1, norm).errors(positions, scale_KP[0])
    torch.testing.assert_close(error_P.double(), errors_at(x, E2M1, scale_KP, norm=norm)[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("shape", [(9, 3, 32), (1, 1, 9000), (3, 1, 5000)])
def test_positions_in_many_blocks_lose_what_whole_ones_lose_bit_for_bit(shape, norm, weighted):
    _, _, whole = made(*shape, weighted=weighted)
    torch.manual_seed(0)
    x = torch.randn(shape)
    weights = torch.rand(shape) ** 3 if weighted else None
    pieces = list(positions_of(x, *min_max(x), weights_NQG=weights, block_elements=shape[-1]))
    assert not pieces[0].is_whole
    judge, scale_P = Judge(INT4, norm), ladder(whole, INT4)[4]
    start, errors, products, squares = 0, [], [], []
    for piece in pieces:
        part_P = scale_P[start : start + len(piece.unit_P)]
        start += len(piece.unit_P)
        errors.append(judge.errors(piece, part_P))
        a_1P, b_1P = judge.scores(piece, part_P.unsqueeze(0))
        products.append(a_1P[0])
        squares.append(b_1P[0])
    torch.testing.assert_close(torch.cat(errors), judge.errors(whole, scale_P), rtol=0, atol=0)
    a_1P, b_1P = judge.scores(whole, scale_P.unsqueeze(0))
    torch.testing.assert_close(torch.cat(products), a_1P[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(squares), b_1P[0], rtol=0, atol=0)
