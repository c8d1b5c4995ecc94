"""Attention states on their way to few bits: keys and values, and queries where these are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from compressed_tensors.modeling import (
    IMPL_ATTR,
    KV_CACHE_ATTR,
    initialize_hooked_attention,
    initialize_hooked_kv_cache,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from compressed_tensors.utils import get_direct_state_dict
from torch import Tensor, nn
from typing_extensions import override

from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer
from scalewright.modifiers.shown import See, shown_to
from scalewright.observers import Observer, make_observer


class WatchedAttention(WatchedLayer):
    """An attention module whose keys and values, and with `queries` its queries, are to be quantised."""

    def __init__(
        self, name: str, module: nn.Module, args: QuantizationArgs, *, model: nn.Module, queries: bool
    ) -> None:
        super().__init__(name, module, QuantizationScheme(targets=[type(module).__name__], input_activations=args))
        self._model = model
        self._base_names = ("q", "k", "v") if queries else ("k", "v")
        self._undo = ExitStack()
        self._unfinished = ExitStack()

    @override
    def new_observers(self) -> dict[str, Observer]:
        args = self.scheme.input_activations
        assert args is not None
        return {base_name: make_observer(base_name, args) for base_name in self._base_names}

    @override
    def start(self) -> None:
        self._undo = _as_before(self._model, self.module)
        initialize = initialize_hooked_attention if "q" in self._base_names else initialize_hooked_kv_cache
        initialize(self._model, self.module)
        self.observers = self.new_observers()
        for base_name, observer in self.observers.items():
            observer.label = f"{self.name}.{base_name}"

    @override
    def stop(self) -> None:
        """Let go of the observers, and of the module's changes unless it is quantised by now."""
        self.observers = {}
        self._undo.close()

    @override
    def sees(self) -> Iterator[tuple[str, See]]:
        yield from ((base_name, shown_to(observer)) for base_name, observer in self.observers.items())

    @property
    @override
    def is_seen_by_its_input(self) -> bool:
        return False

    @property
    @override
    def cost(self) -> float:
        return 1.0

    @override
    def observe_weight(self, *, foreseen_absmax: float | None = None) -> None:
        """There is none."""

    @override
    @torch.no_grad()
    def finish(self) -> QuantizedLayer:
        layer = self._quantized_layer(())
        self._write_qparams({base_name: self._qparams(observer) for base_name, observer in self.observers.items()})
        layer.compressed = get_direct_state_dict(self.module)
        self._freeze()
        return layer

    @override
    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> QuantizedLayer:
        initialize_module_for_quantization(self.module, self.scheme, force_zero_point=False)
        for name, parameter in self.module.named_parameters(recurse=False):
            if name in tensors:
                parameter.data.copy_(tensors[name])
        self._freeze()
        return self._from_record(tensors, record)

    @override
    def undo(self) -> None:
        super().undo()
        self._unfinished.close()

    def _freeze(self) -> None:
        self.module.quantization_status = QuantizationStatus.FROZEN
        self._unfinished = self._undo.pop_all()


def _as_before(model: nn.Module, attention: nn.Module) -> ExitStack:
    """On closing, compressed-tensors' hooks on an attention module are taken off again."""
    stack = ExitStack()
    hooks = set(attention._forward_pre_hooks)
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    missing = [name for name in (KV_CACHE_ATTR, IMPL_ATTR) if not hasattr(attention, name)]

    def undo() -> None:
        for key in set(attention._forward_pre_hooks) - hooks:
            del attention._forward_pre_hooks[key]
            attention._forward_pre_hooks_with_kwargs.pop(key, None)
        for name in missing:
            attention._modules.pop(name, None)
        config: Any = getattr(model, "config", None)
        if implementation is not None and config._attn_implementation != implementation:
            set_implementation: Any = model.set_attn_implementation
            set_implementation(implementation)

    stack.callback(undo)
    return stack
