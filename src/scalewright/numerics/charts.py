"""Charts: what values lose under many scales at once, looked up.

Where scales stand in fixed ratios to a base scale, such as shrunken ranges to min-max's, what a value loses under each
of them depends on nothing but the value in steps of the base. So the steps are cut into bins, a table holds what the
middle of each bin loses under every scale, and the sum over a group is a sum of rows of the table: the time of one or
two scales for all of them.

A bin is narrow but not a point, and a stored scale is rounded and so a little off its ratio: the table also has how far
off it may be, so that sums are bounds (judge.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from scalewright.numerics import native
from scalewright.numerics.blocks import Block, Positions
from scalewright.numerics.grids import Grid

# B bins; J scales, C columns of the table; P positions, E elements of a block, S segments.

COLUMNS = 64  # that a chart has at most, where the best of them is asked for
_MARGIN = 0.51  # half a bin, and what fp32 may be off in the number of the bin
_FP32 = 6e-8
_NO_WOBBLE = 1e-5  # less is not worth a column
_MOST_BINS = 256  # to a step, and
_MOST_ROWS = 1 << 14  # of a plain chart


@dataclass(frozen=True, eq=False)
class Chart:
    """A table with a row for each bin, for each zero point of an affine format: `rows` from `start` steps on."""

    table_BC: Tensor
    bins_per_step: float
    start: float
    rows: int
    first_point: float = 0.0

    def sums(self, positions: Positions, base_P: Tensor, point_P: Tensor | None = None) -> Tensor:
        """The (weighted) sum of each column over the values of each position, in steps of `base_P`: [P, C]."""
        lines = self._lines(base_P, point_P)
        sums_PC: Tensor | None = None
        for block in positions:
            if self._is_native(block):
                part_PC = native.chart_sums(block.x_PE, block.weights_PE, lines, segment=block.segment)
            else:
                part_PC = self._sums_of(block, lines)
            sums_PC = part_PC if sums_PC is None else sums_PC.double() + part_PC
        assert sums_PC is not None
        return sums_PC

    def least(self, positions: Positions, base_P: Tensor, point_P: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The column with the least sum, of up to 64, and about (to 1e-5) what that is, if none is negative: two [P].

        In torch, a number's last bits are made the number of its column, so that one `amin` finds both: four times as
        fast as `min` with its indices.
        """
        if positions.is_one_segment:
            (block,) = positions
            if self._is_native(block):
                return native.chart_least(block.x_PE, block.weights_PE, self._lines(base_P, point_P))
        sums_PC = self.sums(positions, base_P, point_P).float()
        column_C = torch.arange(sums_PC.shape[1], dtype=torch.int32, device=sums_PC.device)
        packed_P = sums_PC.view(torch.int32).bitwise_and(-COLUMNS).bitwise_or_(column_C).amin(dim=1)
        return packed_P.bitwise_and(COLUMNS - 1), packed_P.view(torch.float32)

    @cached_property
    def _table_in_vectors(self) -> Tensor:
        return native.in_vectors(self.table_BC)

    def _is_native(self, block: Block) -> bool:
        return native.serves(block.x_PE) and self.table_BC.shape[1] <= native.MOST_COLUMNS

    def _lines(self, base_P: Tensor, point_P: Tensor | None) -> native.Lines:
        """The line of a value is that of its bin, with half a bin because places are cut off."""
        zero_P = torch.full_like(base_P[:1], 0.5 - self.start * self.bins_per_step)
        first_P = torch.zeros_like(zero_P)
        if point_P is not None:
            first_P = (point_P - self.first_point) * self.rows
            zero_P = zero_P + first_P + point_P * self.bins_per_step
        factor_P = self.bins_per_step / base_P
        return native.Lines(self._table_in_vectors, self.table_BC.shape[1], factor_P, zero_P, first_P, self.rows)

    def _sums_of(self, block: Block, lines: native.Lines) -> Tensor:
        place_PE, bins_PE, _ = block.scratch
        first_P1 = lines.first_P.unsqueeze(1)
        torch.mul(block.x_PE, lines.factor_P.unsqueeze(1), out=place_PE)
        place_PE.add_(lines.zero_P.unsqueeze(1))  # a third of addcmul's time
        # Without weights and zero points all values are known to be on the chart.
        if self.rows < len(self.table_BC) or block.weights_PE is not None:
            torch.maximum(place_PE, first_P1, out=place_PE)
            torch.minimum(place_PE, first_P1 + (self.rows - 1), out=place_PE)
        sums_XC = torch.nn.functional.embedding_bag(
            bins_PE.view(torch.int32).copy_(place_PE).view(-1),
            self.table_BC,
            torch.arange(0, bins_PE.numel() + 1, block.segment, dtype=torch.int32, device=bins_PE.device),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=None if block.weights_PE is None else block.weights_PE.view(-1),
        )
        if bins_PE.shape[1] == block.segment:
            return sums_XC
        return sums_XC.view(len(bins_PE), -1, sums_XC.shape[1]).double().sum(dim=1)


@dataclass(frozen=True, eq=False)
class ErrorChart:
    """A chart of `|d| ** norm` under scales in some `ratios` to the base, in steps of the base.

    Scales may be off their ratio by a factor of `1 + wobble`, or `1 - wobble`.
    """

    ratios: tuple[float, ...]
    wobble: float
    chart: Chart

    def bounds(self, positions: Positions, base_P: Tensor, scale_JP: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the most that scales may lose, in steps of the base: [J, P]."""
        ratio_J1 = torch.tensor(self.ratios, dtype=torch.float32, device=base_P.device).unsqueeze(1)
        off_JP = scale_JP / (base_P * ratio_J1) - 1
        error_JP, slack_JP, *slope_JP = torch.split(self.chart.sums(positions, base_P).T, len(self.ratios))
        if slope_JP:
            error_JP = error_JP + off_JP * slope_JP[0]
        # What summing one by one in fp32 may be off.
        slack_JP = slack_JP + error_JP.abs() * (1e-5 + _FP32 * positions.segment)
        # Scales that are too small for their dtype are off by more: nothing is known of them.
        is_known_JP = off_JP.abs() <= self.wobble
        least_JP = torch.where(is_known_JP, error_JP - slack_JP, -torch.inf)
        return least_JP, torch.where(is_known_JP, error_JP + slack_JP, torch.inf)


_ROWS = 512  # of a table that are computed at a time


@lru_cache(maxsize=16)
def error_chart(
    grid: Grid, norm: float, ratios: tuple[float, ...], *, wobble: float, bins: int, device: str
) -> ErrorChart:
    """The chart of some ratios, with bounds that hold for norms from 1 on, and about `bins` bins.

    A code c loses `|y - r c| ** norm`, which is convex in y and r, and the nearest code loses least. So no value of a
    bin, under no wobbling ratio, loses more than the code of the middle does in one of the corners; nor less than a
    tangent of that code, or of a neighbouring one, leads to. Ratios must not be so small that a bin has many codes.
    """
    least = math.floor(grid.low) - 1.0
    bins_per_step = bins // round(grid.high + 1 - least)
    rows = round((grid.high + 1 - least) * bins_per_step) + 1
    parts = [  # some rows at a time: what is made on the way takes twenty times what is left of it
        _error_lines(grid, norm, ratios, wobble, least, bins_per_step, slice(start, min(start + _ROWS, rows)))
        for start in range(0, rows, _ROWS)
    ]
    return ErrorChart(ratios, wobble, Chart(torch.cat(parts).to(device), bins_per_step, least, rows))


def _error_lines(
    grid: Grid, norm: float, ratios: tuple[float, ...], wobble: float, least: float, bins_per_step: int, rows: slice
) -> Tensor:
    """Some rows of the table of an error chart, fp32: errors, slack and, if ratios wobble, slopes for each ratio."""
    steps_B = torch.arange(rows.start, rows.stop, dtype=torch.float64, device="cpu")
    middle_B1 = (least + steps_B / bins_per_step).unsqueeze(1)
    half = _MARGIN / bins_per_step
    numbers = grid.numbers().double()
    ratio_J = torch.tensor(ratios, dtype=torch.float64, device="cpu")
    index_BJ = torch.bucketize(middle_B1 / ratio_J, (numbers[1:] + numbers[:-1]) / 2)
    has_slopes = wobble > _NO_WOBBLE

    def at(shift: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the nearest code or one beside it: `y - r c`, `r c`, and how its loss grows with y and r (by share)."""
        code_BJ = ratio_J * numbers[(index_BJ + shift).clamp_(0, len(numbers) - 1)]
        d_BJ = middle_B1 - code_BJ
        by_y_BJ = norm * d_BJ.abs().pow(norm - 1) * d_BJ.sign()
        return d_BJ, code_BJ, by_y_BJ, -code_BJ * by_y_BJ

    d_BJ, code_BJ, by_y_BJ, by_ratio_BJ = at(0)
    error_BJ = d_BJ.abs().pow(norm)
    slope_BJ = by_ratio_BJ if has_slopes else torch.zeros_like(by_ratio_BJ)
    slack_BJ = by_y_BJ.abs() * half + (by_ratio_BJ - slope_BJ).abs() * wobble
    for shift in (-1, 1):
        other_d_BJ, _, by_y_BJ, by_ratio_BJ = at(shift)
        below_BJ = error_BJ - other_d_BJ.abs().pow(norm) + by_y_BJ.abs() * half
        slack_BJ = torch.maximum(slack_BJ, below_BJ + (by_ratio_BJ - slope_BJ).abs() * wobble)
    for off in (-wobble, wobble):
        for shift_y in (-half, half):
            corner_BJ = (d_BJ + shift_y - off * code_BJ).abs().pow(norm)
            slack_BJ = torch.maximum(slack_BJ, corner_BJ - error_BJ - off * slope_BJ)
    columns = [error_BJ, slack_BJ, slope_BJ] if has_slopes else [error_BJ, slack_BJ]
    return torch.cat(columns, dim=1).float()


@lru_cache(maxsize=32)
def plain_chart(grid: Grid, norm: float, ratios: tuple[float, ...], *, affine: bool, device: str) -> Chart:
    """A chart of `|d| ** norm` without bounds, and with coarser bins: good enough to see which scales are worth a look.

    If `affine`, for each zero point, and for values up to some steps outside the range.
    """
    outside = 2.5 if affine else 1.0
    span = round(grid.high - grid.low)
    num_points = span + 1 if affine else 1
    bins_per_step = min(_MOST_BINS, 2 ** int(math.log2(_MOST_ROWS / (span * num_points))))
    rows = round((span + 2 * outside) * bins_per_step) + 1
    points = torch.arange(num_points, device="cpu") + (grid.low if affine else 0.0)
    in_codes_B1 = (
        grid.low - outside + torch.arange(rows, dtype=torch.float32, device="cpu") / bins_per_step
    ).unsqueeze(1)
    ratio_J = torch.tensor(ratios, dtype=torch.float32, device="cpu")
    tables = []
    for point in points.tolist():
        y_B1 = in_codes_B1 - point
        codes_BJ = grid.round_(y_B1 / ratio_J + point) - point
        tables.append((y_B1 - codes_BJ * ratio_J).abs().pow(norm))
    return Chart(torch.cat(tables).to(device), bins_per_step, grid.low - outside, rows, float(points[0]))
