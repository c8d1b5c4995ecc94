"""Rounding a weight so that its errors cancel in the layer's output.

The cost of an error d in a row is d H dT (see `hessian`). Columns are rounded one by one, each to what is best given
the errors of those before it (GPTQ: with H = R RT, column j is moved by what these add up to in column j of d R).
Afterwards single columns may be rounded again given all others (`descend`), and scales be fitted to the codes
(`refit`). Rows do not know of each other, so layers that share their input are rounded together.

All work is done on the transposed weight: a column of it is contiguous there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scalewright.numerics.grids import Grid
from scalewright.numerics.hessian import Factor
from scalewright.numerics.products import add_product_, product

# R rows (output channels), C columns (input channels), G groups of columns that share a scale, B columns of a block, S
# of a strip, E of it before the one that is rounded.

_STRIP = 32  # columns that are finished before the rest of their block hears of it


@dataclass
class Codebook:
    """What each element of a weight may become: a grid, under a scale (and zero point) for each row and group.

    `group_C` names the group of each column. Scales are what codes are multiplied with, global scale included.
    """

    grid: Grid
    scale_GR: Tensor
    zero_point_GR: Tensor | None
    group_C: list[int]

    def of_rows(self, rows: slice) -> Codebook:
        """That of some rows alone."""
        scale_GR, point_GR = self.scale_GR[:, rows].contiguous(), self.zero_point_GR
        return replace(
            self, scale_GR=scale_GR, zero_point_GR=None if point_GR is None else point_GR[:, rows].contiguous()
        )

    def rounded(self, column: int, value_R: Tensor) -> Tensor:
        """The nearest that `value_R` can be in a column."""
        group = self.group_C[column]
        scale_R = self.scale_GR[group]
        code_R = value_R / scale_R
        if self.zero_point_GR is None:
            return self.grid.round_(code_R).mul_(scale_R)
        point_R = self.zero_point_GR[group]
        return self.grid.round_(code_R.add_(point_R)).sub_(point_R).mul_(scale_R)


def round_columns(
    weight_CR: Tensor, factor: Factor, book: Codebook, *, block_size: int, is_spent: bool = False
) -> Tensor:
    """The rounded weight, [C, R], each column chosen with the errors of those before it in mind.

    It takes the place of `weight_CR` if that `is_spent`.
    """
    order = range(len(weight_CR)) if factor.order_C is None else factor.order_C.tolist()
    target_CR = weight_CR.clone() if factor.order_C is None else weight_CR[factor.order_C]
    diagonal_C = factor.upper_CC.diagonal()
    rounded_CR = weight_CR if is_spent else torch.empty_like(weight_CR)
    error_CR = target_CR  # a column that is rounded is no target any more
    for block in _runs(0, len(target_CR), block_size):
        # Column j: how much of each error of the block it takes over. For all blocks at once it would be another H.
        share_BC = factor.upper_CC[block] / diagonal_C
        for strip in _runs(block.start, block.stop, _STRIP):
            begin, first = strip.start, strip.start - block.start
            for j in range(strip.start, strip.stop):
                share_E = share_BC[first : j - block.start, j]
                value_R = torch.addmv(target_CR[j], error_CR[begin:j].T, share_E) if j > begin else target_CR[j]
                rounded_R = book.rounded(order[j], value_R)
                torch.sub(weight_CR[order[j]], rounded_R, out=error_CR[j])
                rounded_CR[order[j]] = rounded_R
            later_SB = share_BC[first : strip.stop - block.start, strip.stop : block.stop]
            add_product_(target_CR[strip.stop : block.stop], later_SB.T, error_CR[strip])
        add_product_(target_CR[block.stop :], share_BC[:, block.stop :].T, error_CR[block])
    return rounded_CR


def descend(weight_CR: Tensor, rounded_CR: Tensor, hessian_CC: Tensor, book: Codebook, *, block_size: int) -> Tensor:
    """One sweep in which each column is rounded anew, given all others; never worse. H has no zero on its diagonal."""
    rounded_CR = rounded_CR.clone()
    error_CR = weight_CR - rounded_CR
    diagonal_C = hessian_CC.diagonal()
    for block in _runs(0, len(weight_CR), block_size):
        share_CB = hessian_CC[:, block] / diagonal_C[block]
        own_BB = share_CB[block]
        # What the errors as they are would have each column of the block be.
        target_BR = add_product_(rounded_CR[block].clone(), share_CB.T, error_CR)
        change_BR = torch.empty_like(target_BR)
        for strip in _runs(0, len(target_BR), _STRIP):
            begin = strip.start
            for i in range(strip.start, strip.stop):
                j = block.start + i
                value_R = (
                    torch.addmv(target_BR[i], change_BR[begin:i].T, own_BB[begin:i, i]) if i > begin else target_BR[i]
                )
                rounded_R = book.rounded(j, value_R)
                torch.sub(rounded_CR[j], rounded_R, out=change_BR[i])
                rounded_CR[j] = rounded_R
            add_product_(target_BR[strip.stop :], own_BB[strip, strip.stop :].T, change_BR[strip])
        error_CR[block] += change_BR
    return rounded_CR


def refit(
    weight_CR: Tensor, rounded_CR: Tensor, hessian_CC: Tensor, book: Codebook, *, storable: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Codebook]:
    """The scale of each group fitted to its codes, one group after the other; never worse, codes stay.

    `storable` gives the nearest scale that can be stored. A scale that this would make worse stays as it is.
    """
    rounded_CR, scale_GR = rounded_CR.clone(), book.scale_GR.clone()
    pull_CR = product(hessian_CC, weight_CR - rounded_CR)
    group_C = torch.tensor(book.group_C)
    for group in range(len(scale_GR)):
        columns_B = (group_C == group).nonzero().squeeze(1).to(weight_CR.device)
        old_R = scale_GR[group].clone()
        code_BR = rounded_CR[columns_B] / old_R
        hessian_BB = hessian_CC[columns_B][:, columns_B]
        curve_R = (code_BR * product(hessian_BB, code_BR)).sum(dim=0)
        slope_R = (code_BR * pull_CR[columns_B]).sum(dim=0)
        new_R = storable(old_R + slope_R / curve_R)
        change_R = new_R - old_R
        gain_R = change_R * (2 * slope_R - change_R * curve_R)
        is_better_R = (gain_R > 0) & (new_R * old_R > 0) & new_R.isfinite()
        change_R = torch.where(is_better_R, change_R, 0.0)
        scale_GR[group] += change_R
        step_BR = code_BR * change_R
        rounded_CR[columns_B] += step_BR
        add_product_(pull_CR, hessian_CC[:, columns_B], step_BR, alpha=-1)
    return rounded_CR, replace(book, scale_GR=scale_GR)


def corrected(
    weight_CR: Tensor, cross_CC: Tensor, factor: Factor, *, share: float, beside_CR: Tensor | None = None
) -> Tensor:
    """The weight that makes up for what its inputs have lost: W + share * (H + damping)^-1 (D W + B).

    D is the sum of x_q (x - x_q)T, with x what the layer should be given and x_q what it is given, and H that of
    x_q x_qT. B is the sum of x_q (r - r_q)T, where the output is added to r_q, and should be to r; None if it is added
    to nothing that is known. With a share of 1, what the layer gives (and what becomes of the stream) is as near to
    what it should be as it can be.
    """
    order_C = torch.arange(len(weight_CR), device=weight_CR.device) if factor.order_C is None else factor.order_C
    if beside_CR is None:
        pull_CR = product(cross_CC, weight_CR)
    else:
        pull_CR = add_product_(beside_CR.clone(), cross_CC, weight_CR)
    result_CR = weight_CR.clone()
    result_CR[order_C] += share * factor.solved(pull_CR[order_C])
    return result_CR


def output_error(weight_CR: Tensor, rounded_CR: Tensor, hessian_CC: Tensor) -> Tensor:
    """What the errors of each row cost: d H dT."""
    error_CR = weight_CR - rounded_CR
    return (error_CR * product(hessian_CC, error_CR)).sum(dim=0)


def _runs(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(each, min(each + size, stop)) for each in range(start, stop, size))
