"""How much louder than others a channel may be: what is taken from an input goes into the weight that it meets.

x W^T = (x / s) (W s)^T, with a factor s for each input channel. Inputs that are rounded to integers under one scale
lose most where few channels are loud; weights mind less, whose rows have scales of their own (SmoothQuant, Xiao et al.,
2022, section 4: s = max|x|^a / max|w|^(1-a)). Factors are powers of two here, so that nothing is rounded: the model
says what it said before, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# C input channels of a layer, R rows of what gives them.

LIMIT = 12
"""No factor is larger than 2 to the power of this, or smaller than its inverse."""
_PARTS = 8  # of a weight, as long as what they give channels to
_QUIET = 1e-6  # of the loudest channel: what is quieter counts as this


@dataclass(frozen=True)
class Rows:
    """Which row of a weight gives each input channel of a layer behind it.

    Channel j comes from row `start + j // (head * repeats) * stride + j % head`: each head of a value serves some heads
    of what attends to it, and values may lie among queries and keys in one weight.
    """

    start: int
    head: int
    repeats: int
    stride: int

    @classmethod
    def same(cls, columns: int, start: int = 0) -> Rows:
        """Channel j comes from row `start + j`."""
        return cls(start, columns, 1, columns)

    def of(self, columns: int) -> Tensor:
        """The row of each channel. [C]"""
        channel_C = torch.arange(columns)
        return self.start + channel_C // (self.head * self.repeats) * self.stride + channel_C % self.head


def rows_that_fit(num_rows: int, columns: int, heads: tuple[int, ...] = ()) -> list[Rows]:
    """In which ways a weight with so many rows may give a layer its channels; `heads` are sizes that heads may have."""
    parts, rest = divmod(num_rows, columns)
    found = [Rows.same(columns, part * columns) for part in reversed(range(parts)) if not rest and parts <= _PARTS]
    for head in heads:
        if columns % head or num_rows == columns:
            continue
        queries = columns // head
        stride = num_rows // queries
        if num_rows % queries == 0 and stride > head:  # each head's values are the last of its rows
            found.append(Rows(stride - head, head, 1, stride))
        if num_rows % head:
            continue
        all_heads = num_rows // head
        if all_heads < queries and queries % all_heads == 0:
            found.append(Rows(0, head, queries // all_heads, head))
        values, rest = divmod(all_heads - queries, 2)  # queries, keys and values in one weight
        if not rest and 0 < values <= queries and queries % values == 0:
            repeats = queries // values
            found.append(Rows((queries + values) * head, head, repeats, head))
            found.append(Rows((repeats + 1) * head, head, repeats, (repeats + 2) * head))  # group by group
    return list(dict.fromkeys(found))


def exponents(loudest_C: Tensor, heaviest_C: Tensor, *, strength: float, row_C: Tensor | None = None) -> Tensor:
    """The power of two that each input channel is divided by, and its column of the weight multiplied with. [C]

    `loudest_C` is the largest magnitude of the input, `heaviest_C` that of the weights. A `strength` of 1 makes all
    channels equally loud, one of 0 all columns equally heavy. Channels that come from one row have one factor. Those
    that are always zero stay as they are; the factors of the others are about 1 in the middle.
    """
    loud_C, heavy_C = loudest_C.double(), heaviest_C.double()
    if row_C is not None:
        loud_C, heavy_C = (_most(each, row_C) for each in (loud_C, heavy_C))
    is_alive_C = loud_C > 0
    if not bool(is_alive_C.any()):
        return torch.zeros(len(loud_C), dtype=torch.int8)
    loud_C = loud_C.clamp(min=_QUIET * float(loud_C.max())).log2()
    heavy_C = heavy_C.clamp(min=_QUIET * (float(heavy_C.max()) or 1.0)).log2()
    wanted_C = strength * loud_C - (1 - strength) * heavy_C
    wanted_C = (wanted_C - wanted_C[is_alive_C].mean()).round().clamp(-LIMIT, LIMIT)
    return torch.where(is_alive_C, wanted_C, 0.0).to(torch.int8)


def by_rows(exponents_C: Tensor, row_C: Tensor | None, num_rows: int) -> Tensor:
    """The exponents of the rows that give the channels; zero for rows that give none. [R]"""
    if row_C is None:
        return exponents_C
    exponents_R = torch.zeros(num_rows, dtype=exponents_C.dtype)
    exponents_R[row_C] = exponents_C
    return exponents_R


def times_two_to(weight: Tensor, exponents: Tensor, *, dim: int) -> Tensor:
    """A weight whose rows (`dim` 0) or columns (`dim` 1) are multiplied with powers of two."""
    factors = torch.exp2(exponents.float()).to(weight.device, weight.dtype)
    return weight * (factors.unsqueeze(1) if dim == 0 and weight.ndim == 2 else factors)


def _most(values_C: Tensor, row_C: Tensor) -> Tensor:
    """The largest value of the channels that come from the same row, for each of them."""
    most_R = torch.zeros(int(row_C.max()) + 1, dtype=values_C.dtype)
    most_R.scatter_reduce_(0, row_C, values_C, "amax")
    return most_R[row_C]
