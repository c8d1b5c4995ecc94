"""Sums of powers of values, kept exactly, so that they add up to the same whatever the order.

A piece is summed in float64, about its own mean. From there on sums are fractions, which Python adds and multiplies
without rounding; so kurtosis, which is a small difference of large sums where values are far from zero, loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb

import torch
from torch import Tensor

_PIECE = 1 << 19  # values that are copied to float64 at a time
_POWERS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Moments:
    """How many values there were, and the sums of x, x^2, x^3 and x^4."""

    count: int = 0
    sums: tuple[Fraction, ...] = field(default=(Fraction(0),) * len(_POWERS))

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
        if not len(piece):
            continue
        values = piece.double()
        mean = float(values.mean())
        values = values.sub_(mean) if values is not piece else values - mean
        squares = values * values
        sums = (values.sum(), squares.sum(), torch.dot(squares, values), torch.dot(squares, squares))
        found += Moments(len(piece), _about_zero(len(piece), Fraction(mean), [Fraction(float(each)) for each in sums]))
    return found


def _about_zero(count: int, mean: Fraction, sums: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Sums of powers of x from those of x - mean."""
    powers = [Fraction(count), *sums]
    return tuple(sum((comb(n, k) * mean ** (n - k) * powers[k] for k in range(n + 1)), Fraction(0)) for n in _POWERS)
