"""What a layer's inputs say of the errors of its weight: H = sum of x xT over tokens.

An error d in a row of the weight costs d H dT in the layer's output. `factor` splits H into R RT, with R upper
triangular, after which the cost is the sum of squares of d R, and column j of R has to do with columns 0 to j of the
weight alone: that is what rounding column by column needs.

What few tokens say of how channels go together is mostly chance, and a weight that is fitted to it is worse on other
text than one that is rounded to the nearest. So H is drawn to its diagonal, which few tokens suffice for, as the more
columns there are for each token: covariances are estimated so (Ledoit and Wolf, 2004). To draw it there by rho is, but
for a factor that nothing depends on, to add rho / (1 - rho) of each channel's own strength to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from scalewright.numerics.products import add_product_, add_square_, is_quick, product

# T tokens, C columns of the weight (input channels), R rows of it, B columns of a block.

_STRIP = 512  # columns of H that are mirrored, or turned round, at a time
_BLOCK = 128  # columns that are solved for together
_LOOKED_UP = 128  # columns of it whose places are looked up at a time
_MOST_DAMPING = 1.0  # of the mean diagonal; beyond it H says nothing
# How much of its own strength is added to each channel where there are as many tokens as columns, for each unit of
# damping: three times itself with the usual .01. On stories15M, one to ten times are about as good.
_DOUBT = 300.0


def add_outer_(hessian_CC: Tensor, x_TC: Tensor, y_TC: Tensor | None = None) -> Tensor:
    """Add xT y to H; without `y`, xT x, of which only the upper triangle is computed: `symmetrize_` fills the rest."""
    return add_square_(hessian_CC, x_TC) if y_TC is None else add_product_(hessian_CC, x_TC.T, y_TC)


def symmetrize_(hessian_CC: Tensor) -> Tensor:
    """Make the lower triangle the mirror of the upper."""
    for start in range(0, len(hessian_CC), _STRIP):
        rows = slice(start, start + _STRIP)
        stop = min(start + _STRIP, len(hessian_CC))
        block = hessian_CC[rows, rows]
        block.copy_(block.triu() + block.triu(1).T)
        hessian_CC[stop:, rows] = hessian_CC[rows, stop:].T
    return hessian_CC


@dataclass(frozen=True)
class Factor:
    """H + damping = R RT, its columns in `order_C`; None for the order that they stand in."""

    upper_CC: Tensor
    order_C: Tensor | None
    damping: float
    """What was added to the diagonal, as a share of its mean."""
    added_C: Tensor
    """What was added to the diagonal of each column, in the order that they stand in."""

    def costs(self, error_RC: Tensor) -> Tensor:
        """What the errors of each row cost under H as it was: d H dT. [R]"""
        ordered_RC = error_RC if self.order_C is None else error_RC[:, self.order_C]
        with_damping_R = product(ordered_RC, self.upper_CC).square().sum(dim=1)
        return (with_damping_R - error_RC.square() @ self.added_C).clamp(min=0)

    def solved(self, x_CR: Tensor) -> Tensor:
        """(R RT)^-1 x, of which the rows are in the order of R's columns; `x_CR` is spent.

        Where products are by oneDNN, it goes block by block: MKL is slow to solve, with few columns and with many.
        """
        if not is_quick(self.upper_CC.T, x_CR):
            half_CR = torch.linalg.solve_triangular(self.upper_CC, x_CR, upper=True)
            whole_CR: Tensor = torch.linalg.solve_triangular(self.upper_CC.T, half_CR, upper=False)
            return whole_CR
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(x_CR), _BLOCK)]
        inverses = [_inverse(self.upper_CC[block, block]) for block in blocks]
        for block, inverse_BB in zip(reversed(blocks), reversed(inverses), strict=True):
            known = slice(block.stop, None)
            add_product_(x_CR[block], self.upper_CC[block, known], x_CR[known], alpha=-1)
            x_CR[block] = product(inverse_BB, x_CR[block])
        for block, inverse_BB in zip(blocks, inverses, strict=True):
            known = slice(None, block.start)
            add_product_(x_CR[block], self.upper_CC[known, block].T, x_CR[known], alpha=-1)
            x_CR[block] = product(inverse_BB.T, x_CR[block])
        return x_CR


def _inverse(upper_BB: Tensor) -> Tensor:
    result_BB: Tensor = torch.linalg.solve_triangular(
        upper_BB, torch.eye(len(upper_BB), device=upper_BB.device), upper=True
    )
    return result_BB


def factor(hessian_CC: Tensor, *, damping: float, is_ordered: bool, num_tokens: float = math.inf) -> Factor:
    """Split H, of which the upper triangle is read; with `is_ordered` the columns that count most come first.

    H is the sum over `num_tokens`: the fewer they are, the less is believed of how columns go together. Dead columns
    get the mean of the others on the diagonal, so that they are rounded to what is nearest. The damping grows tenfold
    as long as H is not positive definite.
    """
    diagonal_C = hessian_CC.diagonal()
    is_dead_C = diagonal_C <= 0
    num_alive = max(1, int((~is_dead_C).sum()))
    mean = float(diagonal_C.sum() / num_alive) or 1.0
    doubted_C = diagonal_C.clamp(min=0) * (_DOUBT * num_alive / num_tokens)
    order_C = torch.argsort(diagonal_C, descending=True, stable=True) if is_ordered else None
    # The Cholesky factor of H read backwards, read backwards, is upper triangular.
    backwards_C = (torch.arange(len(diagonal_C), device=hessian_CC.device) if order_C is None else order_C).flip(0)
    share = damping
    while True:
        added_C = torch.where(is_dead_C, mean, 0.0) + (mean + doubted_C) * share
        lower_CC = _lower_of(hessian_CC, backwards_C)
        lower_CC.diagonal().add_(added_C[backwards_C])
        failed = lower_CC.new_empty((), dtype=torch.int32)
        torch.linalg.cholesky_ex(lower_CC, out=(lower_CC, failed))
        if not int(failed) and bool(torch.isfinite(lower_CC.diagonal()).all()):
            return Factor(_turned_round_(lower_CC), order_C, share, added_C)
        if share >= _MOST_DAMPING:
            raise ArithmeticError(f"its Hessian is not positive definite, even with {share:g} of its mean added to it")
        share = max(10 * share, 1e-4)


def _lower_of(hessian_CC: Tensor, order_C: Tensor) -> Tensor:
    """The lower triangle of H, its rows and columns in some order, as LAPACK lays it: column by column.

    What is above is anything. All is in one place: of many columns, each copy takes gigabytes.
    """
    columns_CC, flat = torch.empty_like(hessian_CC), hessian_CC.reshape(-1)
    for start in range(0, len(order_C), _LOOKED_UP):
        stop = start + _LOOKED_UP
        some_C1, rest_C = order_C[start:stop].unsqueeze(1), order_C[start:]
        places = torch.minimum(some_C1, rest_C).mul_(len(order_C)).add_(torch.maximum(some_C1, rest_C))
        columns_CC[start:stop, start:] = flat[places]
    return columns_CC.T


def _turned_round_(x_CC: Tensor) -> Tensor:
    """Rows and columns in the opposite order, in their place; `x_CC` lies column by column."""
    columns_CC = x_CC.T
    for start in range(0, len(columns_CC) // 2, _STRIP):
        stop = min(start + _STRIP, len(columns_CC) // 2)
        first, last = columns_CC[start:stop], columns_CC[len(columns_CC) - stop : len(columns_CC) - start]
        kept = first.flip(0, 1)
        first.copy_(last.flip(0, 1))
        last.copy_(kept)
    if len(columns_CC) % 2:
        middle = columns_CC[len(columns_CC) // 2]
        middle.copy_(middle.flip(0))
    return x_CC


@contextmanager
def damped(hessian_CC: Tensor, factor: Factor) -> Iterator[Tensor]:
    """While inside, H has on its diagonal what was added to it."""
    diagonal_C = hessian_CC.diagonal()
    before_C = diagonal_C.clone()
    diagonal_C.add_(factor.added_C)
    try:
        yield hessian_CC
    finally:
        diagonal_C.copy_(before_C)
