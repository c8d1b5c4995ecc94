"""How strongly each input channel of a layer is driven, collected for observers that weigh errors by it.

What a weight's error costs is the error of the layer's output, and that grows with E[x^2] of the input channel. It is
collected with a hook on the module that the observer is attached to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from scalewright.errors import LayoutError, NonFiniteError, ScalewrightError
from scalewright.numerics import layout
from scalewright.observers.merging import Rule, as_tensor
from scalewright.observers.searching import SearchObserver


class ImportanceObserver(SearchObserver):
    """A search with errors weighted by the importance E[x^2] of each input channel.

    Importance is for weights of modules with `in_features`, under any weight strategy. Where there is none, errors
    weigh the same and a note says so.

    `_imatrix_sum` [in_features] (fp32) and `_imatrix_count` (int64) are sum of x^2 and number of tokens. They stand on
    the observer and, while it is attached and after `detach`, on the module, where the next observer's `attach` picks
    them up instead of collecting anew.
    """

    watches: ClassVar[tuple[str, ...]] = ("weights",)
    merge_rules: ClassVar[Mapping[str, Rule]] = {
        **SearchObserver.merge_rules,
        "_imatrix_sum": "sum",
        "_imatrix_count": "sum",
    }

    @override
    def reset(self) -> None:
        super().reset()
        self._imatrix_sum: Tensor | None = None
        self._imatrix_count: Tensor = torch.tensor(0, dtype=torch.int64, device="cpu")
        self.is_given: bool = False
        """Whether importance was taken over from the module. It is complete then: inputs that are shown add nothing."""
        self._fallback: str | None = None
        self.input_mask: Tensor | None = None

    can_do_without: ClassVar[bool] = False
    """Whether it is as it should be that there is no importance where there is no data."""

    @property
    def wants_inputs(self) -> bool:
        """Whether importance is to be collected at all."""
        return self.base_name == "weight"

    # ---- collecting --------------------------------------------------------------------------------------------

    @override
    def attach(self, module: torch.nn.Module) -> None:
        """Take over the importance that stands on `module`, or begin to collect it from the module's inputs.

        While the hook collects, tokens that are zero in `input_mask` are left out.
        """
        super().attach(module)
        module = _without_compiler(module)
        left_behind = getattr(module, "_imatrix_sum", None)
        count = as_tensor(getattr(module, "_imatrix_count", 1))
        if left_behind is not None and bool(count > 0):
            # A sum without a count still says how the channels compare.
            self._imatrix_sum, self._imatrix_count = as_tensor(left_behind), count
            self.is_given = True
            forget_importance(module)
            return
        in_features = getattr(module, "in_features", None)
        if self.base_name != "weight" or in_features is None:
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._imatrix_sum = torch.zeros(int(in_features), dtype=torch.float32, device=device)
        self._imatrix_count = torch.tensor(0, dtype=torch.int64, device=device)
        self._share_with(module)

        def collect(mod: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = next(iter((*inputs, *keywords.values())), None)
            x = x[0] if isinstance(x, tuple) and x else x
            if isinstance(x, Tensor):
                self.observe_input(x, mask=self.input_mask)
                self._share_with(mod)

        module._imatrix_hook = module.register_forward_pre_hook(collect, with_kwargs=True)  # type: ignore[assignment]

    @override
    def detach(self, module: torch.nn.Module) -> None:
        """Remove the hook; what it collected stays on `module` for the next observer."""
        super().detach(module)
        module = _without_compiler(module)
        hook = module.__dict__.pop("_imatrix_hook", None)
        if isinstance(hook, RemovableHandle):
            hook.remove()
            self._share_with(module)
            if self.channel_importance is None:
                forget_importance(module)

    def observe_input(self, x: Tensor, *, mask: Tensor | None = None) -> None:
        """Add the input [..., in_features] of one call of the module to the importance; masked tokens do not count."""
        try:
            squares = sum_squares(x, mask=mask)
        except ScalewrightError as error:
            raise error.at(self._where) from None
        self.add_squares(*squares)

    def add_squares(self, sum_C: Tensor, num_tokens: int) -> None:
        """Add what `sum_squares` has found in an input, which other layers may have, too."""
        if self.is_given:
            return
        try:
            if not bool(torch.isfinite(sum_C).all()):
                raise NonFiniteError(
                    "the module's input has NaN or Inf in it, or numbers too large to be squared in fp32, so it has no "
                    "importance. Mend the data."
                )
            if self._imatrix_sum is None:
                self._imatrix_sum = torch.zeros_like(sum_C)
            if self._imatrix_sum.shape != sum_C.shape:
                raise LayoutError(
                    f"an input of {len(sum_C)} channels, and importance has {len(self._imatrix_sum)}. "
                    "Give inputs of the module that the observer is attached to."
                )
        except ScalewrightError as error:
            raise error.at(self._where) from None
        self._imatrix_sum = self._imatrix_sum.to(sum_C.device) + sum_C
        self._imatrix_count = as_tensor(self._imatrix_count).to(sum_C.device) + num_tokens

    def _share_with(self, module: torch.nn.Module) -> None:
        leave_importance(module, self._imatrix_sum, self._imatrix_count)

    # ---- using it ----------------------------------------------------------------------------------------------

    @property
    def channel_importance(self) -> Tensor | None:
        """E[x^2] of each input channel; None when nothing was collected. A sum that was set without a count will do."""
        count = int(self._imatrix_count)
        if self._imatrix_sum is None or (count == 0 and not bool((self._imatrix_sum != 0).any())):
            return None
        return self._imatrix_sum.float() / max(1, count)

    @override
    def importance_for(self, observed: Tensor) -> Tensor | None:
        importance, current = self.channel_importance, self._current
        columns = current.shape[-1] if current is not None else layout.num_columns(observed, self.args)
        self._fallback = _problem_with(importance, self.base_name, columns)
        if self._fallback is not None:
            return None
        assert importance is not None and columns is not None
        shape, g_idx = (current.shape, current.g_idx) if current is not None else ((1, columns), None)
        return layout.spread_columns(importance.to(observed.device), shape, self.args, g_idx=g_idx)

    @property
    def fallback(self) -> str | None:
        """Why importance was not used, as a note; None if it was."""
        return None if self._fallback is None else f"{self._where}: {self._fallback}, so all errors weigh the same."

    @override
    def notes(self) -> list[str]:
        return [*super().notes(), *([] if self.fallback is None else [self.fallback])]


def empty_sum(columns: int, device: torch.device) -> Tensor:
    """Where the squares of many batches are added up, in float64: in fp32, neither their order nor ranks show then."""
    return torch.zeros(columns, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


@torch.no_grad()
def sum_squares(x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, int]:
    """The sum of x^2 for each channel of an input [..., C], in fp32, and the number of its tokens."""
    if mask is not None:
        x = x[layout.align_mask(mask, x, "input")]
    x_TC = x.detach().reshape(-1, x.shape[-1]).float()
    return x_TC.square().sum(dim=0), len(x_TC)


def _without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, where `torch.compile` has wrapped it."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


def leave_importance(module: torch.nn.Module, sum_C: Tensor | None, num_tokens: Tensor) -> None:
    """Put importance on a module, where the next observer's `attach` picks it up."""
    module._imatrix_sum, module._imatrix_count = sum_C, num_tokens  # type: ignore[assignment]


def forget_importance(module: torch.nn.Module) -> None:
    """Take the importance off a module."""
    for name in ("_imatrix_sum", "_imatrix_count"):
        if hasattr(module, name):
            delattr(module, name)


def _problem_with(importance: Tensor | None, base_name: str, columns: int | None) -> str | None:
    """Why importance cannot be used, in words; None when it can."""
    if base_name != "weight":
        return f"importance is for weights, and this is '{base_name}'"
    if importance is None:
        return "no importance was collected"
    if len(importance) != columns:
        return f"importance has {len(importance)} channels, and the weight has {columns} columns"
    if not bool(torch.isfinite(importance).all()) or bool((importance < 0).any()):
        return "importance has NaN, Inf or negative numbers in it"
    return None if bool((importance > 0).any()) else "importance is zero for every channel"
