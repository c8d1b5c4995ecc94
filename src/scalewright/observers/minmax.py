"""Observers that take the least and the largest value as they are."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from scalewright.observers.base import Observer
from scalewright.observers.folding import Memoryless, MovingAverage


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Memoryless):
    """The least and the largest value of the tensor that was seen last; of all batches, for activations."""

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        self.take(self.fold(self.so_far(), *self.range_of(observed)))


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """The least and the largest of all values that were seen."""

    @property
    @override
    def remembers(self) -> bool:
        return True


@Observer.register("minmax")
class MinMaxObserver(MovingAverage):
    """A moving average of each sample's least and largest value."""

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        self.take(self.fold(self.so_far(), *self.range_of(observed)))
