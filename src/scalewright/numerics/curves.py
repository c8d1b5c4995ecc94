"""Short polynomials that stand in for |u| ** norm where the power itself would take most of the time.

A curve knows how far off it can be, so that what was measured with it is a pair of bounds, and only candidates whose
bounds overlap need the power itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

_TERMS = 5
_POINTS = 600
_ROUNDS = 24
_EXACT = 1e-9  # closer than fp32 can tell


@dataclass(frozen=True, eq=False)
class Curve:
    """`coefficients` of |u|, |u| ** 2, ...; it is off by `tolerance * (|u| ** norm + floor)` at most."""

    coefficients: Tensor
    tolerance: float
    floor: float

    @cached_property
    def _last(self) -> float:
        return float(self.coefficients[-1])

    def evaluate_(self, u: Tensor, scratch: Tensor) -> Tensor:
        """The curve at each element, in place of `u`; overwrites `scratch`."""
        *constants, _ = self.coefficients.to(u.device).unbind()
        torch.add(constants[-1], u.abs_(), alpha=self._last, out=scratch)
        for constant in reversed(constants[:-1]):
            torch.addcmul(constant, scratch, u, out=scratch)
        return u.mul_(scratch)


@lru_cache(maxsize=64)
def power_curve(norm: float, *, largest: float, typical: float) -> Curve:
    """The curve for `|u| <= largest`, most of it below `typical`: relative error above the mean there, absolute below.

    Least squares, reweighted by the error until it is about the same everywhere (Lawson's algorithm). The tolerance is
    measured between the points that were fitted, too.
    """
    floor = typical**norm / (norm + 1)
    grid = torch.cat([_spaced(0, typical), _spaced(typical, max(largest, 2 * typical))])
    points = grid[::2]
    basis, target = _powers(points), points.pow(norm)
    size = target + floor
    weights = torch.ones_like(points)
    best: tuple[float, Tensor] | None = None
    for _ in range(_ROUNDS):
        by = weights.sqrt() / size
        fitted = torch.linalg.lstsq(basis * by.unsqueeze(1), (target * by).unsqueeze(1)).solution[:, 0]
        off = (basis @ fitted - target).abs() / size
        if best is None or float(off.max()) < best[0]:
            best = float(off.max()), fitted
        if best[0] < _EXACT:  # a whole power is a term of the curve: there is no error to weigh by
            break
        weights = weights * off
        weights = weights / weights.mean()
    assert best is not None
    target = grid.pow(norm)
    off = (_powers(grid) @ best[1] - target).abs() / (target + floor)
    # A little more than measured, for what lies between the points and for fp32.
    return Curve(best[1].float(), 1.02 * float(off.max()) + 1e-5, floor)


def _spaced(start: float, end: float) -> Tensor:
    return torch.linspace(start, end, _POINTS, dtype=torch.float64, device="cpu")


def _powers(points: Tensor) -> Tensor:
    return torch.stack([points**power for power in range(1, _TERMS + 1)], dim=1)
