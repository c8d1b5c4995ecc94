"""Sums of powers of values, kept exactly, so that they add up to the same whatever the order.

A piece is summed in float64. The sums of pieces are fractions, which Python adds without rounding; so kurtosis, the
difference of large numbers, loses nothing on the way either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

_PIECE = 1 << 19  # values that are copied to float64 at a time
_POWERS = 4


@dataclass(frozen=True)
class Moments:
    """How many values there were, and the sums of x, x^2, x^3 and x^4."""

    count: int = 0
    sums: tuple[Fraction, ...] = field(default=(Fraction(0),) * _POWERS)

    def __add__(self, other: Moments) -> Moments:
        """Those of the values of both."""
        sums = tuple(mine + theirs for mine, theirs in zip(self.sums, other.sums, strict=True))
        return Moments(self.count + other.count, sums)

    @property
    def squares(self) -> float:
        """The sum of x^2."""
        return float(self.sums[1])

    @property
    def kurtosis(self) -> float | None:
        """E[(x - mean)^4] / var^2: 3 for a normal distribution, 1.8 for a uniform one; None if all values are equal."""
        if not self.count:
            return None
        mean, second, third, fourth = (each / self.count for each in self.sums)
        variance = second - mean**2
        if variance <= 0:
            return None
        return float((fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2)


def moments_of(x: Tensor) -> Moments:
    """The sums over all elements of a finite tensor. Pieces end at fixed places."""
    found = Moments()
    for piece in torch.split(x.detach().reshape(-1), _PIECE):
        values = piece.double()
        squares = values * values
        sums = (values.sum(), squares.sum(), torch.dot(squares, values), torch.dot(squares, squares))
        found += Moments(len(piece), tuple(Fraction(float(each)) for each in sums))
    return found
