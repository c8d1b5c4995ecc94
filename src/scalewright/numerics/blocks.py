"""Cutting the work on a tensor into pieces that stay in cache.

`Positions` are some qparam positions that are worked on together; iterating over them gives their elements in one or
more `Block`s: copied to fp32, in units of a power of two near each position's largest value, and their weights in units
of one near its largest weight. So neither 1e-30 nor 1e38 leaves the range of fp32 when a difference is raised to a
power and weighed; scaling a tensor by a power of two scales every answer, and scaling its weights changes none. All
blocks share their scratch memory: use one before the next.

Sums are fp32 over at most `SEGMENT` neighbouring elements of one observation, and float64 beyond. So they do not depend
on how the work was cut, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

# N observations, Q qparam positions, G elements that share one scale; P positions and E elements in one block.

BLOCK_ELEMENTS = 1 << 20
SEGMENT = 4096
NUM_SCRATCH = 3


@dataclass(frozen=True)
class Block:
    """Elements of some positions, with their weights and scratch tensors of the same shape to write into."""

    x_PE: Tensor
    weights_PE: Tensor | None
    scratch: tuple[Tensor, ...]
    segment: int

    def sum(self, values_PE: Tensor, out_P: Tensor | None = None) -> Tensor:
        """The sum of each position's elements [P]: float64, or fp32 where one segment is all there is."""
        if values_PE.shape[1] == self.segment:
            return torch.sum(values_PE, dim=1) if out_P is None else torch.sum(values_PE, dim=1, out=out_P)
        total_P = values_PE.view(len(values_PE), -1, self.segment).sum(dim=-1).double().sum(dim=-1)
        return total_P if out_P is None else out_P.copy_(total_P)

    def sum_of_squares(self, values_PE: Tensor, out_P: Tensor | None = None) -> Tensor:
        """The same of their squares, in one pass."""
        norm_PS = torch.linalg.vector_norm(values_PE.view(len(values_PE), -1, self.segment), dim=-1)
        squares_PS: Tensor = norm_PS.mul_(norm_PS)
        total_P = squares_PS[:, 0] if squares_PS.shape[1] == 1 else squares_PS.double().sum(dim=-1)
        return total_P if out_P is None else out_P.copy_(total_P)

    @property
    def sum_dtype(self) -> torch.dtype:
        """What `sum` gives."""
        return torch.float32 if self.x_PE.shape[1] == self.segment else torch.float64

    def at(self, index_M: Tensor) -> Block:
        """The elements of some of the positions, no more than there are, copied; scratch memory is shared."""
        x_ME = torch.index_select(self.x_PE, 0, index_M)
        weights_ME = None if self.weights_PE is None else torch.index_select(self.weights_PE, 0, index_M)
        return replace(
            self, x_PE=x_ME, weights_PE=weights_ME, scratch=tuple(each[: len(x_ME)] for each in self.scratch)
        )


@dataclass(frozen=True)
class Positions:
    """Some qparam positions, their ranges in units, and a way to go over their blocks, as often as need be."""

    lo_P: Tensor
    hi_P: Tensor
    unit_P: Tensor
    weight_unit_P: Tensor | None
    group_size: int
    segment: int
    num_elements: int
    is_whole: bool
    """Whether all elements are in one block."""
    _blocks: Callable[[], Iterable[Block]] = field(repr=False)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks())

    @property
    def is_one_segment(self) -> bool:
        """Whether all elements are one segment in one block."""
        return self.is_whole and self.num_elements == self.segment

    @property
    def is_weighted(self) -> bool:
        """Whether elements have weights."""
        return self.weight_unit_P is not None

    def total_weight(self) -> Tensor:
        """How much all elements of each position weigh together, in units; without weights, how many they are."""
        if not self.is_weighted:
            return torch.full_like(self.unit_P, self.num_elements)
        total_P = torch.zeros_like(self.unit_P, dtype=torch.float64)
        for block in self:
            assert block.weights_PE is not None
            total_P += block.sum(block.weights_PE)
        return total_P.float()

    def at(self, index_M: Tensor) -> Positions:
        """Some of these positions."""
        blocks = tuple(block.at(index_M) for block in self) if self.is_whole else None
        return replace(
            self,
            lo_P=self.lo_P[index_M],
            hi_P=self.hi_P[index_M],
            unit_P=self.unit_P[index_M],
            weight_unit_P=None if self.weight_unit_P is None else self.weight_unit_P[index_M],
            _blocks=lambda: (block.at(index_M) for block in self) if blocks is None else blocks,
        )


def positions_of(
    x_NQG: Tensor,
    lo_Q: Tensor,
    hi_Q: Tensor,
    *,
    weights_NQG: Tensor | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> Iterator[Positions]:
    """Cut `x_NQG`, whose ranges are `[lo, hi]`, into blocks of about `block_elements` elements, in order.

    `weights_NQG` broadcasts against `x_NQG`. Elements that pad a segment are zeros.
    """
    cut = _Cut.of(x_NQG, weights_NQG, block_elements)
    lo, hi = lo_Q.flatten(), hi_Q.flatten()
    weight_unit_AB = None if weights_NQG is None else _weight_units(weights_NQG, x_NQG).reshape(-1, cut.columns)
    for row in range(0, len(lo) // cut.columns, cut.rows):
        start = row * cut.columns
        part = slice(start, start + cut.rows * cut.columns)
        unit_P = power_of_two_below(torch.maximum(lo[part].abs(), hi[part].abs()))
        weight_unit_P = None if weight_unit_AB is None else weight_unit_AB[row : row + cut.rows].flatten()
        blocks = partial(cut.blocks, start, unit_P, weight_unit_P)
        again = partial(iter, tuple(blocks())) if cut.is_whole else blocks
        yield Positions(
            lo[part] / unit_P,
            hi[part] / unit_P,
            unit_P,
            weight_unit_P,
            x_NQG.shape[-1],
            cut.segment,
            x_NQG.shape[0] * x_NQG.shape[-1],
            cut.is_whole,
            again,
        )


@dataclass(frozen=True)
class _Cut:
    """How one tensor is cut: `rows` of positions, `observations` and `width` elements of each, at a time."""

    x_NABG: Tensor
    w_NABG: Tensor | None
    rows: int
    observations: int
    width: int
    segment: int
    buffers: Tensor = field(repr=False)

    @classmethod
    def of(cls, x_NQG: Tensor, weights_NQG: Tensor | None, block_elements: int) -> _Cut:
        # Rows of the second-to-last kind of position (a weight's rows) are never cut, so that broadcast weights are
        # sliced and not copied whole.
        num_observations, group_size = x_NQG.shape[0], x_NQG.shape[-1]
        columns = x_NQG.shape[-2] if x_NQG.ndim > 3 else 1
        x_NABG = x_NQG.reshape(num_observations, -1, columns, group_size)
        w_NABG = None if weights_NQG is None else _folded(weights_NQG.expand(x_NQG.shape), columns)
        segment = min(group_size, SEGMENT)
        padded = -(-group_size // segment) * segment
        per_observation = columns * padded
        rows = max(1, min(x_NABG.shape[1], block_elements // (num_observations * per_observation)))
        observations = max(1, min(num_observations, block_elements // (rows * per_observation)))
        width = padded
        if rows * per_observation > block_elements:
            width = max(segment, block_elements // columns // segment * segment)
        num_buffers = 1 + (w_NABG is not None) + NUM_SCRATCH
        size = rows * columns * observations * width
        buffers = torch.empty(num_buffers, size, dtype=torch.float32, device=x_NQG.device)
        return cls(x_NABG, w_NABG, rows, observations, width, segment, buffers)

    @property
    def columns(self) -> int:
        return self.x_NABG.shape[2]

    @property
    def padded(self) -> int:
        return -(-self.x_NABG.shape[3] // self.segment) * self.segment

    @property
    def is_whole(self) -> bool:
        return self.observations == self.x_NABG.shape[0] and self.width == self.padded

    def blocks(self, start: int, unit_P: Tensor, weight_unit_P: Tensor | None) -> Iterator[Block]:
        """The blocks of the positions from `start` on, one after the other in the same memory."""
        rows = slice(start // self.columns, start // self.columns + self.rows)
        inverse_P = unit_P.reciprocal()
        inverse_weight_P = None if weight_unit_P is None else weight_unit_P.reciprocal()
        starts = product(range(0, self.x_NABG.shape[0], self.observations), range(0, self.padded, self.width))
        for observation, element in starts:
            part = (
                slice(observation, observation + self.observations),
                rows,
                slice(None),
                slice(element, element + self.width),
            )
            x_PE, weights_PE = self._copied(self.x_NABG[part], inverse_P, 0), None
            if self.w_NABG is not None and inverse_weight_P is not None:
                weights_PE = self._copied(self.w_NABG[part], inverse_weight_P, NUM_SCRATCH + 1)
            yield Block(
                x_PE=x_PE,
                weights_PE=weights_PE,
                scratch=tuple(each[: x_PE.numel()].view_as(x_PE) for each in self.buffers[1 : NUM_SCRATCH + 1]),
                segment=self.segment,
            )

    def _copied(self, part_NABG: Tensor, factor_P: Tensor, buffer: int) -> Tensor:
        """`part_NABG` times a factor, as fp32 [A * B, N * (G, padded to whole segments)], in a buffer."""
        observations, rows, columns, elements = part_NABG.shape
        padded = -(-elements // self.segment) * self.segment
        target = self.buffers[buffer][: rows * columns * observations * padded]
        target = target.view(rows, columns, observations, padded)
        part_ABNG, factor_AB11 = part_NABG.permute(1, 2, 0, 3), factor_P.view(rows, columns, 1, 1)
        if part_ABNG.dtype == torch.float32:
            torch.mul(part_ABNG, factor_AB11, out=target[..., :elements])
        else:
            target[..., :elements].copy_(part_ABNG).mul_(factor_AB11)
        if padded > elements:
            target[..., elements:].zero_()
        return target.view(rows * columns, observations * padded)


class InOrder:
    """What is found for positions, piece by piece in their order, put together in their shape.

    Nothing but the results is ever as large as all positions together.
    """

    def __init__(self, lo_Q: Tensor, hi_Q: Tensor) -> None:
        self._shape = lo_Q.shape
        self._lo, self._hi = lo_Q.flatten(), hi_Q.flatten()
        self._done = 0
        self._whole: tuple[Tensor, ...] = ()

    def next_of(self, count: int) -> tuple[Tensor, Tensor]:
        """The true ranges of the next positions."""
        part = slice(self._done, self._done + count)
        return self._lo[part], self._hi[part]

    def put(self, *found_P: Tensor) -> None:
        """What was found for the next positions."""
        self._whole = self._whole or tuple(each.new_empty(len(self._lo)) for each in found_P)
        part = slice(self._done, self._done + len(found_P[0]))
        for whole, each_P in zip(self._whole, found_P, strict=True):
            whole[part] = each_P
        self._done = part.stop

    def whole(self) -> tuple[Tensor, ...]:
        """All that was put, of the shape of Q."""
        assert self._done == len(self._lo)
        return tuple(each.view(self._shape) for each in self._whole)


def power_of_two_below(absmax: Tensor) -> Tensor:
    """The largest power of two that is no larger; the smallest normal number of fp32 for zero and denormals."""
    _, exponent = torch.frexp(absmax.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.ldexp(torch.ones_like(absmax), exponent - 1)


def _weight_units(weights_NQG: Tensor, x_NQG: Tensor) -> Tensor:
    """A power of two near the largest weight of each position, of the shape of Q; broadcast weights are read once."""
    weights_NQG = weights_NQG.reshape(*[1] * (x_NQG.ndim - weights_NQG.ndim), *weights_NQG.shape)
    return power_of_two_below(weights_NQG.amax(dim=(0, -1)).float()).expand(x_NQG.shape[1:-1])


def _folded(expanded_NQG: Tensor, columns: int) -> Tensor:
    return expanded_NQG.reshape(expanded_NQG.shape[0], -1, columns, expanded_NQG.shape[-1])
