"""What all observers share that search a value for its best range: when to search, under which global scale.

How to search is said by a child class, and done in numerics.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.errors import StaleWeightError
from scalewright.numerics import layout
from scalewright.numerics.scales import global_scale_of
from scalewright.observers.base import Observer, Range
from scalewright.observers.folding import Folded, Folding
from scalewright.observers.merging import Rule, as_tensor

# Q: qparam positions.


@dataclass(frozen=True)
class _Searched:
    """A weight under TENSOR_GROUP, kept to be searched again when a fused partner changes the global scale."""

    observed: Tensor
    version: int
    weights: Tensor | None
    before: Folded | None
    results: dict[float, Folded]
    """What became of it under each global scale that was asked for."""


class SearchObserver(Folding):
    """An observer that searches each value for its best range, judged by what will be stored.

    Under TENSOR_GROUP the scale depends on the global scale, which comes from true maxima, those of fused partners
    included. Partners may be seen later, so the weight is remembered by reference, and searched again if the global
    scale has changed: leave it as it is until its qparams were read, or `detach` was called, with all partners seen.
    Who knows the largest magnitude of all of them beforehand may set `foreseen_absmax`, and spare the second search.
    """

    merge_rules: ClassVar[Mapping[str, Rule]] = {**Observer.merge_rules, "true_absmax": "max"}

    @override
    def reset(self) -> None:
        super().reset()
        self.true_absmax: Tensor | None = None
        self.foreseen_absmax: float | None = None
        self._own_absmax: Tensor | None = None
        self._searched: _Searched | None = None

    @override
    def detach(self, module: torch.nn.Module) -> None:
        super().detach(module)
        if self._searched is not None and all(each.has_statistics for each in self._fused_observers):
            if self.has_own_range:
                global_scale = self.get_global_scale()
                assert global_scale is not None
                self.take(self._under(global_scale, self._searched))
                self._own_range = (self.min_vals, self.max_vals)
            self._searched = None

    @override
    def statistics_replaced(self, *, unchanged: bool) -> None:
        super().statistics_replaced(unchanged=unchanged)
        self._own_absmax = self.true_absmax
        if not unchanged:
            self._searched = None

    @override
    def absmax(self) -> Tensor:
        # Our maximum says nothing of ranges that a user has set since; one that the user has set is obeyed.
        is_stale = not self.has_own_range and self._own_absmax is self.true_absmax
        if self.true_absmax is None or is_stale:
            return super().absmax()
        return as_tensor(self.true_absmax).float()

    @override
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        lo_Q, hi_Q = self.range_of(observed)
        absmax = torch.maximum(-lo_Q.min(), hi_Q.max()).clamp(min=0)
        # A batch is searched under its own global scale: under that of all batches so far, their order would matter.
        is_grouped = layout.strategy_of(self.args) == "tensor_group"
        global_scale = global_scale_of(absmax.clamp(min=self.foreseen_absmax or 0.0)) if is_grouped else None
        if self.true_absmax is not None and self.remembers:
            absmax = torch.maximum(absmax, as_tensor(self.true_absmax).to(absmax))
        before = self.so_far()
        weights = self.importance_for(observed)
        result = self.fold(before, *self.search(observed, global_scale, weights))
        self.take(result)
        self.true_absmax = self._own_absmax = absmax
        if global_scale is not None and self.base_name == "weight":
            self._searched = _Searched(observed, _version(observed), weights, before, {_key(global_scale): result})

    @override
    def chosen_range(self, global_scale: Tensor | None) -> Range:
        searched = self._searched
        # Ranges that a user has set are obeyed.
        if searched is None or not self.has_own_range or global_scale is None:
            return super().chosen_range(global_scale)
        found = self._under(global_scale, searched)
        return found["min_vals"], found["max_vals"]

    def _under(self, global_scale: Tensor, searched: _Searched) -> Folded:
        """The statistics with the kept weight under this global scale."""
        if _key(global_scale) not in searched.results:
            if _version(searched.observed) != searched.version:
                raise StaleWeightError(
                    f"{self._where}: the weight was changed after it was observed, and a fused partner has changed the "
                    "global scale since, so it must be searched again. Read the qparams of all partners before "
                    "changing weights, or observe it once more."
                )
            found = self.search(searched.observed, global_scale, searched.weights)
            searched.results[_key(global_scale)] = self.fold(searched.before, *found)
        return searched.results[_key(global_scale)]

    @abstractmethod
    def search(self, observed: Tensor, global_scale: Tensor | None, weights: Tensor | None) -> Range:
        """The best range of one value at each qparam position, if it is stored under `global_scale`."""
        raise NotImplementedError

    def importance_for(self, observed: Tensor) -> Tensor | None:
        """Weights on the errors, broadcasting against `observed`; None for equal ones."""
        return None


def _key(global_scale: Tensor) -> float:
    return float(global_scale)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
