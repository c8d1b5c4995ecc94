"""Rounding with the inputs in mind: the laws of GPTQ, and the plain definition to compare with."""

import math

import pytest
import torch
from torch import Tensor

from scalewright.numerics.gptq import Codebook, corrected, descend, output_error, refit, round_columns
from scalewright.numerics.grids import E2M1, Grid
from scalewright.numerics.hessian import Factor, add_outer_, damped, factor, symmetrize_
from scalewright.numerics.scales import E4M3_SCALES, E8M0_SCALES

INT4 = Grid("int4", -8, 7)


def inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Tokens whose channels hang together, some much stronger than others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -1.5, columns)
    return torch.randn(tokens, columns, generator=generator) @ mix / columns**0.5


def hessian_of(x_TC: Tensor) -> Tensor:
    return symmetrize_(add_outer_(torch.zeros(x_TC.shape[1], x_TC.shape[1]), x_TC))


def problem(rows: int = 24, columns: int = 96, group_size: int = 32, *, affine: bool = False, grid: Grid = INT4):
    generator = torch.Generator().manual_seed(3)
    weight_CR = torch.randn(rows, columns, generator=generator).T.contiguous()
    grouped = weight_CR.view(-1, group_size, rows)
    lo_GR, hi_GR = grouped.amin(dim=1).clamp(max=0), grouped.amax(dim=1).clamp(min=0)
    scale_GR = (hi_GR - lo_GR) / 15 if affine else torch.maximum(-lo_GR, hi_GR) / grid.high
    zero_point_GR = (-8 - lo_GR / scale_GR).round() if affine else None
    return weight_CR, Codebook(grid, scale_GR, zero_point_GR, [column // group_size for column in range(columns)])


def nearest(weight_CR: Tensor, book: Codebook) -> Tensor:
    return torch.stack([book.rounded(column, value_R) for column, value_R in enumerate(weight_CR)])


def by_definition(weight_CR: Tensor, hessian_CC: Tensor, book: Codebook, order: list[int]) -> Tensor:
    """GPTQ as it is told: the inverse of what is left of H spreads each column's error over the columns to come."""
    left = list(order)
    weight_CR = weight_CR.double().clone()
    rounded_CR = torch.empty_like(weight_CR)
    while left:
        inverse = torch.linalg.inv(hessian_CC.double()[left][:, left])
        column = left[0]
        rounded_CR[column] = book.rounded(column, weight_CR[column].float()).double()
        error_R = (weight_CR[column] - rounded_CR[column]) / inverse[0, 0]
        for i, other in enumerate(left[1:], start=1):
            weight_CR[other] -= error_R * inverse[0, i]
        left = left[1:]
    return rounded_CR.float()


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("columns", [3, 96, 1100])
def test_the_hessian_is_the_sum_of_all_products(tokens, columns):
    x_TC = inputs(tokens, min(columns, 96)).repeat(1, -(-columns // 96))[:, :columns].contiguous()
    torch.testing.assert_close(hessian_of(x_TC), x_TC.T @ x_TC, rtol=1e-4, atol=1e-4)
    halves = add_outer_(torch.zeros(columns, columns), x_TC[: tokens // 2])
    torch.testing.assert_close(
        symmetrize_(add_outer_(halves, x_TC[tokens // 2 :])), x_TC.T @ x_TC, rtol=1e-4, atol=1e-4
    )


def with_damping(hessian_CC: Tensor, found: Factor) -> Tensor:
    """A copy of H with what was added to its diagonal; H itself stays as it is."""
    before_CC = hessian_CC.clone()
    with damped(hessian_CC, found) as inside_CC:
        assert torch.equal(inside_CC.diagonal(), before_CC.diagonal() + found.added_C)
        copy_CC = inside_CC.clone()
    assert torch.equal(hessian_CC, before_CC)
    return copy_CC


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_factor_makes_the_damped_hessian(is_ordered):
    hessian_CC = hessian_of(inputs(400, 64))
    found = factor(hessian_CC, damping=0.01, is_ordered=is_ordered)
    order_C = torch.arange(64) if found.order_C is None else found.order_C
    assert torch.equal(found.upper_CC, found.upper_CC.triu())
    expected = with_damping(hessian_CC, found)[order_C][:, order_C]
    torch.testing.assert_close(found.upper_CC @ found.upper_CC.T, expected, rtol=1e-4, atol=1e-3)
    if is_ordered:
        diagonal_C = hessian_CC.diagonal()[order_C]
        assert bool((diagonal_C[1:] <= diagonal_C[:-1]).all())


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_it_is_gptq(is_ordered, affine):
    weight_CR, book = problem(affine=affine)
    hessian_CC = hessian_of(inputs(400, 96))
    found = factor(hessian_CC, damping=0.01, is_ordered=is_ordered)
    order = list(range(96)) if found.order_C is None else found.order_C.tolist()
    expected = by_definition(weight_CR, with_damping(hessian_CC, found), book, order)
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    assert float((rounded_CR == expected).float().mean()) > 0.995  # a tie may fall either way


@pytest.mark.parametrize("grid", [INT4, E2M1])
def test_what_comes_out_is_in_the_codebook_and_loses_less_in_the_output(grid):
    weight_CR, book = problem(grid=grid)
    hessian_CC = hessian_of(inputs(400, 96))
    rounded_CR = round_columns(weight_CR, factor(hessian_CC, damping=0.01, is_ordered=True), book, block_size=128)
    assert torch.equal(rounded_CR, nearest(rounded_CR, book))
    plain = output_error(weight_CR, nearest(weight_CR, book), hessian_CC)
    assert float(output_error(weight_CR, rounded_CR, hessian_CC).sum()) < 0.6 * float(plain.sum())


def test_inputs_that_have_nothing_to_do_with_each_other_leave_nothing_to_make_up_for():
    weight_CR, book = problem()
    found = factor(torch.diag(torch.rand(96) + 0.5), damping=0.01, is_ordered=True)
    assert torch.equal(round_columns(weight_CR, found, book, block_size=32), nearest(weight_CR, book))


@pytest.mark.parametrize("block_size", [1, 7, 32, 33, 96, 500])
def test_how_columns_are_taken_together_changes_nothing(block_size):
    weight_CR, book = problem()
    found = factor(hessian_of(inputs(400, 96)), damping=0.01, is_ordered=True)
    expected = round_columns(weight_CR, found, book, block_size=128)
    rounded_CR = round_columns(weight_CR, found, book, block_size=block_size)
    assert float((rounded_CR == expected).float().mean()) > 0.995


def test_rows_do_not_know_of_each_other():
    weight_CR, book = problem(rows=10)
    found = factor(hessian_of(inputs(400, 96)), damping=0.01, is_ordered=True)
    together = round_columns(weight_CR, found, book, block_size=32)
    some = Codebook(book.grid, book.scale_GR[:, 3:5].contiguous(), None, book.group_C)
    alone = round_columns(weight_CR[:, 3:5].contiguous(), found, some, block_size=32)
    assert float((together[:, 3:5] == alone).float().mean()) > 0.99


@pytest.mark.parametrize("block_size", [16, 96])
@pytest.mark.parametrize("affine", [False, True])
def test_another_sweep_is_never_worse(block_size, affine):
    weight_CR, book = problem(affine=affine)
    hessian_CC = hessian_of(inputs(400, 96))
    found = factor(hessian_CC, damping=0.01, is_ordered=True)
    target = with_damping(hessian_CC, found)
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    for _ in range(3):
        again_CR = descend(weight_CR, rounded_CR, target, book, block_size=block_size)
        before, after = (output_error(weight_CR, each, target) for each in (rounded_CR, again_CR))
        assert bool((after <= before * (1 + 1e-5)).all()) and float(after.sum()) < float(before.sum())
        assert torch.equal(again_CR, nearest(again_CR, book))
        rounded_CR = again_CR


@pytest.mark.parametrize("is_ordered", [False, True])
def test_columns_without_input_change_nothing_for_the_others(is_ordered):
    """Neither their damping, which is a share of the mean of those that have input, nor what they become."""
    weight_CR, book = problem(columns=64)
    hessian_CC = hessian_of(inputs(300, 64))
    padded_CC = torch.block_diag(hessian_CC, torch.zeros(32, 32))
    plain, padded = (factor(each, damping=0.01, is_ordered=is_ordered) for each in (hessian_CC, padded_CC))
    torch.testing.assert_close(padded.added_C[:64], plain.added_C)
    wide_CR, wide = problem(columns=96)
    wide_CR[:64], wide.scale_GR[:2] = weight_CR, book.scale_GR
    found_CR = round_columns(wide_CR, padded, wide, block_size=32)[:64]
    torch.testing.assert_close(found_CR, round_columns(weight_CR, plain, book, block_size=32))


def test_a_column_without_input_is_rounded_to_the_nearest():
    weight_CR, book = problem()
    x_TC = inputs(400, 96)
    x_TC[:, [5, 50]] = 0
    found = factor(hessian_of(x_TC), damping=0.0, is_ordered=True)
    assert found.damping == 0  # no other column is damped for its sake
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    assert torch.equal(rounded_CR[[5, 50]], nearest(weight_CR, book)[[5, 50]])


@pytest.mark.parametrize("tokens", [32, 64, 96, 192, 400])
def test_few_tokens_do_not_make_it_worse_on_others_than_the_nearest(tokens):
    weight_CR, book = problem(rows=200)
    x_TC = inputs(4400, 96)
    hessian_CC, other_CC = hessian_of(x_TC[:tokens]), hessian_of(x_TC[400:])
    found = factor(hessian_CC, damping=0.01, is_ordered=True, num_tokens=tokens)
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    again_CR = descend(weight_CR, rounded_CR, with_damping(hessian_CC, found), book, block_size=32)
    plain = output_error(weight_CR, nearest(weight_CR, book), other_CC).sum()
    for each_CR in (rounded_CR, again_CR):
        assert float(output_error(weight_CR, each_CR, other_CC).sum()) < 0.95 * float(plain)


def test_many_tokens_are_believed_and_few_leave_the_nearest():
    weight_CR, book = problem()
    hessian_CC = hessian_of(inputs(400, 96))
    plain, many, few = (
        factor(hessian_CC, damping=0.01, is_ordered=True, num_tokens=each) for each in (math.inf, 1e12, 1e-3)
    )
    assert plain.damping == many.damping == few.damping == 0.01
    torch.testing.assert_close(many.added_C, plain.added_C)
    torch.testing.assert_close(many.upper_CC, plain.upper_CC)
    assert torch.equal(round_columns(weight_CR, few, book, block_size=32), nearest(weight_CR, book))


def test_damping_grows_until_it_is_enough_and_is_told():
    few = hessian_of(inputs(10, 96))
    found = factor(few, damping=0.0, is_ordered=False)
    assert found.damping > 0 and bool(torch.isfinite(found.upper_CC).all())
    broken = -torch.eye(4)
    broken[0, 0] = 1.0
    with pytest.raises(ArithmeticError, match="not positive definite, even with 1"):
        factor(broken + 100 * torch.ones(4, 4).fill_diagonal_(0), damping=0.01, is_ordered=False)


# ---- scales fitted to the codes --------------------------------------------------------------------------------------


def rounded_problem(*, affine: bool = False, grid: Grid = INT4, signs: bool = False):
    """A weight that is rounded, H, and the codebook."""
    weight_CR, book = problem(affine=affine, grid=grid)
    if signs:
        book.scale_GR[:, ::2] *= -1
    hessian_CC = hessian_of(inputs(400, 96))
    found = factor(hessian_CC, damping=0.01, is_ordered=True)
    return weight_CR, round_columns(weight_CR, found, book, block_size=32), with_damping(hessian_CC, found), book


def bf16(scale: Tensor) -> Tensor:
    return scale.bfloat16().float()


def e4m3(scale: Tensor) -> Tensor:
    return E4M3_SCALES.nearest(scale * 300) / 300


STORABLE = {"any": torch.clone, "bf16": bf16, "e4m3": e4m3, "e8m0": E8M0_SCALES.nearest}


def of_columns(book: Codebook) -> Tensor:
    return book.scale_GR[book.group_C]


CASES = [(kind, storable) for kind in ("symmetric", "affine", "e2m1") for storable in STORABLE]
CASES += [("signed", "any"), ("signed", "bf16")]  # the others have no sign


@pytest.mark.parametrize(("kind", "storable"), CASES)
def test_fitted_scales_keep_codes_and_signs_can_be_stored_and_are_never_worse(kind, storable):
    weight_CR, rounded_CR, hessian_CC, book = rounded_problem(
        affine=kind == "affine", grid=E2M1 if kind == "e2m1" else INT4, signs=kind == "signed"
    )
    nearest_storable = STORABLE[storable]
    codes_CR = rounded_CR / of_columns(book)
    book.scale_GR = nearest_storable(book.scale_GR)
    rounded_CR = codes_CR * of_columns(book)
    before = (weight_CR.clone(), rounded_CR.clone(), hessian_CC.clone(), book.scale_GR.clone())
    fitted_CR, fitted = refit(weight_CR, rounded_CR, hessian_CC, book, storable=nearest_storable)
    assert all(
        torch.equal(*each) for each in zip(before, (weight_CR, rounded_CR, hessian_CC, book.scale_GR), strict=True)
    )
    torch.testing.assert_close(fitted_CR / of_columns(fitted), codes_CR, rtol=1e-4, atol=1e-4)
    assert bool((fitted.scale_GR.sign() == book.scale_GR.sign()).all())
    torch.testing.assert_close(nearest_storable(fitted.scale_GR), fitted.scale_GR, rtol=1e-6, atol=0)
    loss, fitted_loss = (output_error(weight_CR, each, hessian_CC) for each in (rounded_CR, fitted_CR))
    assert bool((fitted_loss <= loss * (1 + 1e-5)).all())
    assert float(fitted_loss.sum()) < (0.999 if storable != "e8m0" else 1.0) * float(loss.sum())
    assert fitted.grid is book.grid and fitted.zero_point_GR is book.zero_point_GR and fitted.group_C is book.group_C


def test_the_scale_of_a_row_is_the_best_for_its_codes():
    weight_CR, _ = problem()
    book = Codebook(INT4, weight_CR.abs().amax(dim=0, keepdim=True) / 7, None, [0] * 96)
    hessian_CC = hessian_of(inputs(400, 96))
    codes_CR = (nearest(weight_CR, book) / book.scale_GR).double()
    _, fitted = refit(weight_CR, nearest(weight_CR, book), hessian_CC, book, storable=torch.clone)
    wide_CC = hessian_CC.double()
    best_R = (codes_CR * (wide_CC @ weight_CR.double())).sum(dim=0) / (codes_CR * (wide_CC @ codes_CR)).sum(dim=0)
    torch.testing.assert_close(fitted.scale_GR[0].double(), best_R, rtol=1e-4, atol=0)


def test_each_group_is_fitted_given_those_before_it_wherever_their_columns_stand():
    weight_CR, rounded_CR, hessian_CC, book = rounded_problem()
    shuffled = torch.randperm(96, generator=torch.Generator().manual_seed(4))
    mixed = Codebook(book.grid, book.scale_GR, None, [book.group_C[i] for i in shuffled.tolist()])
    fitted_CR, fitted = refit(weight_CR, rounded_CR, hessian_CC, book, storable=torch.clone)
    mixed_CR, found = refit(
        weight_CR[shuffled], rounded_CR[shuffled], hessian_CC[shuffled][:, shuffled], mixed, storable=torch.clone
    )
    torch.testing.assert_close(found.scale_GR, fitted.scale_GR, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mixed_CR, fitted_CR[shuffled], rtol=1e-4, atol=1e-5)
    # By hand, in float64: after each group is fitted, the loss does not change with its scale.
    wide_CC, left_CR = hessian_CC.double(), (weight_CR - rounded_CR).double()
    codes_CR = (rounded_CR / of_columns(book)).double()
    for group, scale_R in enumerate(book.scale_GR.double()):
        code_CR = codes_CR * (torch.tensor(book.group_C) == group).unsqueeze(1)
        change_R = (code_CR * (wide_CC @ left_CR)).sum(dim=0) / (code_CR * (wide_CC @ code_CR)).sum(dim=0)
        torch.testing.assert_close(fitted.scale_GR[group].double(), scale_R + change_R, rtol=1e-4, atol=1e-6)
        left_CR = left_CR - code_CR * change_R


def test_a_scale_stays_where_another_would_be_worse_or_means_nothing():
    weight_CR, rounded_CR, hessian_CC, book = rounded_problem()
    for storable in (lambda scale: 3 * scale, lambda scale: -scale, lambda scale: scale * torch.nan, torch.zeros_like):
        kept_CR, kept = refit(weight_CR, rounded_CR, hessian_CC, book, storable=storable)
        assert torch.equal(kept_CR, rounded_CR) and torch.equal(kept.scale_GR, book.scale_GR)
    _, kept = refit(weight_CR, -rounded_CR, hessian_CC, book, storable=torch.clone)  # codes for the other sign
    assert bool((kept.scale_GR > 0).all()) and float((kept.scale_GR == book.scale_GR).float().mean()) > 0.5
    rounded_CR[:32] = 0  # a group without codes says nothing of its scale
    fitted_CR, fitted = refit(weight_CR, rounded_CR, hessian_CC, book, storable=torch.clone)
    assert bool(fitted_CR.isfinite().all()) and torch.equal(fitted.scale_GR[0], book.scale_GR[0])
    assert not torch.equal(fitted.scale_GR[1], book.scale_GR[1])


@pytest.mark.parametrize("codes", [E4M3_SCALES, E8M0_SCALES])
def test_the_nearest_scale_of_a_short_format_is_the_nearest(codes):
    numbers = codes.numbers[codes.first :].double()
    given = torch.cat([torch.tensor([0.0, 1e-30, 1e30]), numbers[:200].float(), torch.logspace(-4, 2.6, 300)])
    found = codes.nearest(given).double()
    assert bool(torch.isin(found, numbers).all())
    least = (given.double().unsqueeze(1) - numbers).abs().amin(dim=1)
    torch.testing.assert_close((given.double() - found).abs(), least, rtol=0, atol=0)


# ---- what inputs have lost -------------------------------------------------------------------------------------------


def streams(tokens: int = 400, columns: int = 48):
    """What a layer should be given, and what it is given."""
    generator = torch.Generator().manual_seed(7)
    x_TC = inputs(tokens, columns)
    return x_TC, x_TC + 0.2 * torch.randn(tokens, columns, generator=generator) * x_TC.std()


def cross_of(x_TC: Tensor, given_TC: Tensor) -> Tensor:
    half = len(x_TC) // 2
    cross_CC = torch.zeros(x_TC.shape[1], x_TC.shape[1])
    for part in (slice(0, half), slice(half, None)):
        add_outer_(cross_CC, given_TC[part], (x_TC - given_TC)[part])
    return cross_CC


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_corrected_weight_is_the_least_squares_solution(is_ordered):
    x_TC, given_TC = streams()
    weight_CR = problem(rows=10, columns=48, group_size=16)[0]
    found = factor(hessian_of(given_TC), damping=1e-7, is_ordered=is_ordered)
    corrected_CR = corrected(weight_CR, cross_of(x_TC, given_TC), found, share=1.0)
    expected = torch.linalg.lstsq(given_TC.double(), x_TC.double() @ weight_CR.double()).solution
    torch.testing.assert_close(corrected_CR.double(), expected, rtol=2e-3, atol=2e-3)
    lost = [float((given_TC @ each - x_TC @ weight_CR).square().sum()) for each in (weight_CR, corrected_CR)]
    assert lost[1] < 0.9 * lost[0]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_damping_draws_a_corrected_weight_to_where_it_was(is_ordered, share):
    x_TC, given_TC = streams()
    given_TC[:, 5] = 0  # dead
    weight_CR = problem(rows=10, columns=48, group_size=16)[0]
    hessian_CC = hessian_of(given_TC)
    found = factor(hessian_CC, damping=0.1, is_ordered=is_ordered)
    cross_CC = cross_of(x_TC, given_TC)
    before = weight_CR.clone()
    corrected_CR = corrected(weight_CR, cross_CC, found, share=share)
    assert torch.equal(weight_CR, before)
    # (H + damping) change = share * D W
    change_CR = torch.linalg.solve(
        (hessian_CC + torch.diag(found.added_C)).double(), share * cross_CC.double() @ weight_CR.double()
    )
    torch.testing.assert_close((corrected_CR - weight_CR).double(), change_CR, rtol=1e-3, atol=1e-4)
    assert torch.equal(corrected_CR[5], weight_CR[5])


def test_nothing_is_corrected_where_nothing_was_lost_or_no_share_is_asked_for():
    x_TC, given_TC = streams()
    weight_CR = problem(rows=10, columns=48, group_size=16)[0]
    found = factor(hessian_of(given_TC), damping=0.01, is_ordered=True)
    assert torch.equal(corrected(weight_CR, cross_of(x_TC, given_TC), found, share=0.0), weight_CR)
    assert torch.equal(corrected(weight_CR, cross_of(given_TC, given_TC), found, share=1.0), weight_CR)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_corrected_weight_makes_up_for_what_its_output_is_added_to(is_ordered):
    x_TC, given_TC = streams()
    weight_CR = problem(rows=10, columns=48, group_size=16)[0]
    generator = torch.Generator().manual_seed(8)
    lost_TR = given_TC @ torch.randn(48, 10, generator=generator) + torch.randn(len(x_TC), 10, generator=generator)
    found = factor(hessian_of(given_TC), damping=1e-7, is_ordered=is_ordered)
    corrected_CR = corrected(weight_CR, cross_of(x_TC, given_TC), found, share=1.0, beside_CR=given_TC.T @ lost_TR)
    wanted = x_TC.double() @ weight_CR.double() + lost_TR.double()
    expected = torch.linalg.lstsq(given_TC.double(), wanted).solution
    torch.testing.assert_close(corrected_CR.double(), expected, rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_factor_knows_what_errors_cost_without_its_damping(is_ordered):
    x_TC = inputs(400, 96)
    x_TC[:, 5] = 0
    found = factor(hessian_of(x_TC), damping=0.01, is_ordered=is_ordered)
    error_RC = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.costs(error_RC), (error_RC @ x_TC.T).square().sum(dim=1), rtol=1e-4, atol=1e-4)
    nothing_RC = torch.zeros(1, 96)
    nothing_RC[0, 5] = 1  # an error that no token shows
    assert float(found.costs(nothing_RC)) <= 1e-4


@pytest.mark.parametrize("columns", [3, 96, 300])
def test_below_its_diagonal_a_hessian_is_not_read(columns):
    hessian_CC = hessian_of(inputs(900, columns))
    upper_CC = hessian_CC.triu() + torch.full_like(hessian_CC, math.nan).tril(-1)
    whole, half = (factor(each, damping=0.01, is_ordered=True) for each in (hessian_CC, upper_CC))
    assert torch.equal(half.upper_CC, whole.upper_CC) and torch.equal(half.order_C, whole.order_C)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_what_is_rounded_takes_the_place_of_a_weight_that_is_spent(is_ordered):
    weight_CR, book = problem()
    found = factor(hessian_of(inputs(400, 96)), damping=0.01, is_ordered=is_ordered)
    before_CR = weight_CR.clone()
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    assert torch.equal(weight_CR, before_CR)
    spent_CR = round_columns(weight_CR, found, book, block_size=32, is_spent=True)
    assert torch.equal(spent_CR, rounded_CR) and spent_CR.data_ptr() == weight_CR.data_ptr()
