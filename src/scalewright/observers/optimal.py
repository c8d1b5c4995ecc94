"""The observer of choice for weights: the best scale that can be stored, weighted by importance where there is any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from scalewright.numerics.optimal import optimal_range
from scalewright.numerics.scales import stored_dtype
from scalewright.observers.base import Observer, QParamsDict, Range
from scalewright.observers.folding import Memoryless
from scalewright.observers.importance import ImportanceObserver
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import Rule, as_tensor


@Observer.register("optimal")
class OptimalObserver(Memoryless, ImportanceObserver):
    """The scale that loses least of all that can be stored, weighted by importance where there is any.

    With importance, errors are squared: `sum E[x^2] * d^2` is what the layer's output loses. Without, and at 2 bits, a
    norm above 2 guards against clipping too much. NVFP4 and MXFP4 scales are the very best; others come from a search
    that, for 4 bits and fewer in groups of 32 to 256, ends within about a percent of it. It may end further off where
    most values are zeros, and, with zero points, where thousands share a scale.

    With `signed`, `scale_sign` (fp32, 1 or -1) says where the scale is negative.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(
            "candidates",
            32,
            "scales to try at each position, 1.6 times as many with importance and in groups of 64 and less, a third "
            "of them for affine formats of more than 4 bits; for NVFP4 and MXFP4, all that can be best are tried",
            low=2,
        ),
        Knob("refits", 1, "times that the best scale is refined", low=0),
        Knob("norm", 2.4, "power of the error without importance, and at 2 bits; else it is 2", above=0, high=16),
        Knob("importance", "auto", "whether errors are weighted by the input's strength", choices=("auto", "off")),
        Knob("signed", False, "whether scales of symmetric integers may be negative, where that loses less"),
    )
    merge_rules: ClassVar[Mapping[str, Rule]] = {**ImportanceObserver.merge_rules, "scale_sign": "min"}
    can_do_without: ClassVar[bool] = True

    candidates: int
    refits: int
    norm: float
    importance: str
    signed: bool

    @override
    def reset(self) -> None:
        super().reset()
        self.scale_sign: Tensor | None = None

    @property
    @override
    def wants_inputs(self) -> bool:
        return super().wants_inputs and self.importance == "auto"

    @override
    def attach(self, module: torch.nn.Module) -> None:
        if self.importance == "auto":
            super().attach(module)

    @override
    def importance_for(self, observed: Tensor) -> Tensor | None:
        weights = super().importance_for(observed) if self.importance == "auto" else None
        importance = self.channel_importance
        if weights is None or importance is None or bool((importance != importance[0]).any()):
            return weights
        return torch.ones([1] * observed.ndim, device=observed.device)  # equal importance is none, but for the norm

    @override
    def search(self, observed: Tensor, global_scale: Tensor | None, weights: Tensor | None) -> Range:
        found = optimal_range(
            observed,
            *self.range_of(observed),
            self.args,
            norm=2.0 if weights is not None and self.args.num_bits > 2 else self.norm,
            candidates=self.candidates,
            refits=self.refits,
            weights_NQG=weights,
            global_scale=global_scale,
            dtype=stored_dtype(observed.dtype, self.args),
            signed=self.signed and self.base_name == "weight" and global_scale is None,
        )
        self.scale_sign = found.sign_Q if bool((found.sign_Q < 0).any()) else None
        return found.lo_Q, found.hi_Q

    @override
    def get_qparams(self) -> QParamsDict:
        qparams = super().get_qparams()
        if self.scale_sign is not None and self.has_own_range:
            sign = as_tensor(self.scale_sign).to(qparams["scale"])
            qparams["scale"] = qparams["scale"] * sign.reshape(qparams["scale"].shape)
        return qparams
