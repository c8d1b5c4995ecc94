"""Cutting the work on a tensor into pieces that stay in cache.

A `Block` holds some qparam positions with all, or some, of their elements: copied to fp32, in units of a power of two
near each position's largest value. So neither 1e-30 nor 1e38 leaves the range of fp32 when a difference is raised to a
power, and scaling a tensor by a power of two scales every answer. Blocks share their scratch memory: use one before the
next.

Sums are fp32 over at most `SEGMENT` neighbouring elements of one observation, and float64 beyond. So they do not depend
on how the work was cut, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

# N observations, Q qparam positions, G elements that share one scale; P positions and E elements in one block.

BLOCK_ELEMENTS = 1 << 18
SEGMENT = 4096
NUM_SCRATCH = 3


@dataclass(frozen=True)
class Block:
    """The positions `start` to `end` (of the flattened Q), or some of their elements unless `is_whole`."""

    start: int
    end: int
    is_whole: bool
    x_PE: Tensor
    weights_PE: Tensor | None
    scratch: tuple[Tensor, ...]
    """Tensors of the shape of `x_PE` to write into."""
    segment: int

    def sum(self, values_PE: Tensor) -> Tensor:
        """The sum of each position's elements, float64 [P]."""
        return values_PE.view(len(values_PE), -1, self.segment).sum(dim=-1).double().sum(dim=-1)


def blocks_of(
    x_NQG: Tensor, unit_Q: Tensor, *, weights_NQG: Tensor | None = None, block_elements: int = BLOCK_ELEMENTS
) -> Iterator[Block]:
    """Cut `x_NQG` into blocks of about `block_elements` elements, in the order of their positions.

    `weights_NQG` broadcasts against `x_NQG`. Elements that pad a segment are zeros.
    """
    # Rows of the second-to-last kind of position (a weight's rows) are never cut, so that broadcast weights are
    # sliced and not copied whole.
    num_observations, group_size = x_NQG.shape[0], x_NQG.shape[-1]
    columns = x_NQG.shape[-2] if x_NQG.ndim > 3 else 1
    x_NABG = x_NQG.reshape(num_observations, -1, columns, group_size)
    w_NABG = None if weights_NQG is None else _folded(weights_NQG.expand(x_NQG.shape), columns)
    inverse_AB = unit_Q.reshape(-1, columns).reciprocal()
    segment = min(group_size, SEGMENT)
    padded = -(-group_size // segment) * segment

    per_observation = columns * padded
    rows = max(1, min(x_NABG.shape[1], block_elements // (num_observations * per_observation)))
    observations = max(1, min(num_observations, block_elements // (rows * per_observation)))
    width = padded
    if rows * per_observation > block_elements:
        width = max(segment, block_elements // columns // segment * segment)
    is_whole = observations == num_observations and width == padded
    buffers = torch.empty(2 + NUM_SCRATCH, rows * columns * observations * width, device=x_NQG.device)

    for row in range(0, x_NABG.shape[1], rows):
        inverse_P1 = inverse_AB[row : row + rows].reshape(-1, 1)
        for observation, element in product(range(0, num_observations, observations), range(0, padded, width)):
            observed = slice(observation, observation + observations)
            part = (observed, slice(row, row + rows), slice(None), slice(element, element + width))
            x_PE = _copy_padded(x_NABG[part], buffers[0], segment).mul_(inverse_P1)
            yield Block(
                start=row * columns,
                end=row * columns + len(x_PE),
                is_whole=is_whole,
                x_PE=x_PE,
                weights_PE=None if w_NABG is None else _copy_padded(w_NABG[part], buffers[1], segment),
                scratch=tuple(buffer[: x_PE.numel()].view_as(x_PE) for buffer in buffers[2:]),
                segment=segment,
            )


def power_of_two_below(absmax: Tensor) -> Tensor:
    """The largest power of two that is no larger; the smallest normal number of fp32 for zero and denormals."""
    _, exponent = torch.frexp(absmax.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.ldexp(torch.ones_like(absmax), exponent - 1)


def _copy_padded(part_NABG: Tensor, buffer: Tensor, segment: int) -> Tensor:
    """`part_NABG` as fp32 [A * B, N * (G, padded to whole segments)], in `buffer`."""
    observations, rows, columns, elements = part_NABG.shape
    padded = -(-elements // segment) * segment
    target = buffer[: rows * columns * observations * padded].view(rows, columns, observations, padded)
    target[..., :elements].copy_(part_NABG.permute(1, 2, 0, 3))
    target[..., elements:].zero_()
    return target.view(rows * columns, observations * padded)


def _folded(expanded_NQG: Tensor, columns: int) -> Tensor:
    return expanded_NQG.reshape(expanded_NQG.shape[0], -1, columns, expanded_NQG.shape[-1])
