"""The search of `mse`, with errors weighted by how strongly each input channel is driven."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from scalewright.errors import ImportanceError
from scalewright.observers.base import Observer
from scalewright.observers.folding import Memoryless
from scalewright.observers.importance import ImportanceObserver
from scalewright.observers.knobs import Knob, with_defaults
from scalewright.observers.mse import SEARCH_KNOBS, RangeSearchObserver


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(Memoryless, ImportanceObserver, RangeSearchObserver):
    """`memoryless_mse` weighted by the importance E[x^2] of each input channel.

    Where there is none, errors weigh the same and a note says so; with `strict` that is an error.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        *with_defaults(SEARCH_KNOBS, maxshrink=0.95, grid=20.0, norm=3.0),
        Knob("strict", False, "whether missing importance is an error"),
    )
    strict: bool

    @override
    def importance_for(self, observed: Tensor) -> Tensor | None:
        weights = super().importance_for(observed)
        if weights is None and self.strict:
            raise ImportanceError(f"{self._fallback}. Calibrate with data, or set strict to false.")
        return weights
