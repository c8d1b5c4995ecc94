"""Rounding with the inputs in mind: the laws of GPTQ, and the plain definition to compare with."""

import pytest
import torch
from torch import Tensor

from scalewright.numerics.gptq import Codebook, descend, output_error, round_columns
from scalewright.numerics.grids import E2M1, Grid
from scalewright.numerics.hessian import add_outer_, damped, factor, symmetrize_

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


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_factor_makes_the_damped_hessian(is_ordered):
    hessian_CC = hessian_of(inputs(400, 64))
    found = factor(hessian_CC, damping=0.01, is_ordered=is_ordered)
    order_C = torch.arange(64) if found.order_C is None else found.order_C
    assert torch.equal(found.upper_CC, found.upper_CC.triu())
    expected = damped(hessian_CC, found)[order_C][:, order_C]
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
    expected = by_definition(weight_CR, damped(hessian_CC, found), book, order)
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
    target = damped(hessian_CC, found)
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    for _ in range(3):
        again_CR = descend(weight_CR, rounded_CR, target, book, block_size=block_size)
        before, after = (output_error(weight_CR, each, target) for each in (rounded_CR, again_CR))
        assert bool((after <= before * (1 + 1e-5)).all()) and float(after.sum()) < float(before.sum())
        assert torch.equal(again_CR, nearest(again_CR, book))
        rounded_CR = again_CR


def test_a_column_without_input_is_rounded_to_the_nearest():
    weight_CR, book = problem()
    x_TC = inputs(400, 96)
    x_TC[:, [5, 50]] = 0
    found = factor(hessian_of(x_TC), damping=0.0, is_ordered=True)
    rounded_CR = round_columns(weight_CR, found, book, block_size=32)
    assert torch.equal(rounded_CR[[5, 50]], nearest(weight_CR, book)[[5, 50]])


def test_damping_grows_until_it_is_enough_and_is_told():
    few = hessian_of(inputs(10, 96))
    found = factor(few, damping=0.0, is_ordered=False)
    assert found.damping > 0 and bool(torch.isfinite(found.upper_CC).all())
    broken = -torch.eye(4)
    broken[0, 0] = 1.0
    with pytest.raises(ArithmeticError, match="not positive definite, even with 1"):
        factor(broken + 100 * torch.ones(4, 4).fill_diagonal_(0), damping=0.01, is_ordered=False)
