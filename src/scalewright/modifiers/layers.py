"""One layer on its way to few bits: observers on, values seen, scales found, weights rounded, observers off.

What is stored is computed once, by compressed-tensors, and the module's weight becomes what a loader will read back. So
the model in memory and the checkpoint are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.modeling import initialize_hooked_attention, initialize_hooked_kv_cache
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from compressed_tensors.utils import get_direct_state_dict
from torch import Tensor, nn

from scalewright.errors import CalibrationError
from scalewright.modifiers.quantization import observers_of
from scalewright.numerics.measure import signal_to_noise
from scalewright.observers import Observer, make_observer
from scalewright.observers.base import QParamsDict
from scalewright.observers.importance import ImportanceObserver

_SAMPLE_TOKENS = 128  # of a layer's input, kept to see what its output loses
_POOR_DB = 20.0  # an output that keeps less, and
_WORTH_DB = 6.0  # would gain more by dynamic scales, is named


@dataclass
class QuantizedLayer:
    """What became of a layer, for the table and the report; decibels are of signal to noise."""

    name: str
    scheme: QuantizationScheme
    observers: dict[str, str]
    shape: tuple[int, ...]
    compressed: dict[str, Tensor] = field(repr=False)
    """The tensors of the checkpoint, by their names within the module."""
    weight_db: float | None = None
    output_db: float | None = None
    gain_db: float | None = None
    """How much better than min-max's the weights are."""
    above_optimum: float | None = None
    """How much more the weights lose than the least possible, as a share of it, on a sample of groups."""
    notes: list[str] = field(default_factory=list)


class WatchedLayer:
    """A module that is to be quantised, with its observers while they are on."""

    def __init__(self, name: str, module: nn.Module, scheme: QuantizationScheme) -> None:
        self.name = name
        self.module = module
        self.scheme = scheme.model_copy(deep=True)
        self.observers: dict[str, Observer] = {}
        self._sample: list[Tensor] = []
        self._num_sampled = 0

    # ---- watching ----------------------------------------------------------------------------------------------------

    def new_observers(self) -> dict[str, Observer]:
        """The observers that the scheme asks for, by base name."""
        return observers_of(self.scheme)

    def start(self) -> None:
        """Put observers on the module."""
        self.observers = self.new_observers()
        for base_name, observer in self.observers.items():
            observer.label = f"{self.name}.{base_name}"
            setattr(self.module, f"{base_name}_observer", observer)
            if self.importance is not observer or hasattr(self.module, "_imatrix_sum"):
                observer.attach(self.module)

    def stop(self) -> None:
        """Take them off; nothing of them stays."""
        for base_name, observer in self.observers.items():
            observer.detach(self.module)
            if hasattr(self.module, f"{base_name}_observer"):
                delattr(self.module, f"{base_name}_observer")
        for name in ("_imatrix_sum", "_imatrix_count"):
            if hasattr(self.module, name):
                delattr(self.module, name)
        self.observers = {}

    @property
    def importance(self) -> ImportanceObserver | None:
        """The observer of the weight, if it wants to see inputs, too."""
        observer = self.observers.get("weight")
        return observer if isinstance(observer, ImportanceObserver) and observer.wants_inputs else None

    @property
    def wants_data(self) -> bool:
        """Whether anything but the weight has to be seen."""
        return self.importance is not None or any(base_name != "weight" for base_name in self.observers)

    def sees(self) -> Iterator[tuple[str, Callable[[Tensor, Tensor | None], None]]]:
        """What of the module must be shown to whom while data flows."""
        for base_name in ("input", "output"):
            if base_name in self.observers:
                observer = self.observers[base_name]
                yield base_name, lambda value, mask, observer=observer: observer(value, mask=mask)
        importance = self.importance
        if importance is not None:
            yield "input", lambda value, mask: importance.observe_input(value, mask=mask)
        if isinstance(self.module, nn.Linear):
            yield "input", self._keep_some

    def _keep_some(self, value: Tensor, mask: Tensor | None) -> None:
        if self._num_sampled >= _SAMPLE_TOKENS or not value.is_floating_point():
            return
        tokens = value.reshape(-1, value.shape[-1]) if mask is None else value[mask.bool()]
        self._sample.append(tokens[: _SAMPLE_TOKENS - self._num_sampled].clone())
        self._num_sampled += len(self._sample[-1])

    # ---- quantising --------------------------------------------------------------------------------------------------

    def observe_weight(self) -> None:
        """Show the weight to its observer; importance must be there by now."""
        if "weight" in self.observers:
            self.observers["weight"](self.module.weight)

    @torch.no_grad()
    def finish(self) -> QuantizedLayer:
        """Find the qparams, write them on the module, and make its weight what will be read back."""
        module, original = self.module, self.module.weight.detach()
        qparams = {base_name: self._qparams(observer) for base_name, observer in self.observers.items()}
        notes = [note for observer in self.observers.values() for note in observer.notes()]
        expected = self._output()
        initialize_module_for_quantization(module, self.scheme, force_zero_point=False)
        for base_name, found in qparams.items():
            for kind, value in found.items():
                parameter = getattr(module, f"{base_name}_{kind}", None)
                if parameter is not None and value is not None:
                    parameter.data.copy_(value.reshape(parameter.shape))
        compressor = BaseCompressor.get_value_from_registry(self.format.value)
        compressed = compressor.compress(get_direct_state_dict(module), self.scheme)
        if self.scheme.weights is not None:
            restored = compressor.decompress(dict(compressed), self.scheme)["weight"]
            module.weight = nn.Parameter(restored.to(original.dtype), requires_grad=False)
        module.quantization_status = QuantizationStatus.DECOMPRESSED
        layer = QuantizedLayer(
            self.name,
            self.scheme,
            {base_name: observer._observer_name for base_name, observer in self.observers.items()},
            tuple(original.shape),
            {name: each for name, each in compressed.items() if isinstance(each, Tensor)},
            notes=notes,
        )
        if self.scheme.weights is not None:
            layer.weight_db = signal_to_noise(original, module.weight)
        if expected is not None:
            layer.output_db = signal_to_noise(expected, self._output())
            layer.notes += self._loses_by_static_scales(expected, layer.output_db)
        return layer

    @property
    def format(self) -> CompressionFormat:
        """How the layer is stored."""
        if self.scheme.format is None:
            self.scheme.format = infer_module_format(type(self.module), self.scheme)
        return CompressionFormat(self.scheme.format)

    def _qparams(self, observer: Observer) -> QParamsDict:
        if not observer.has_statistics:
            raise CalibrationError(
                f"{self.name}: saw 0 tokens in calibration, so it has no {observer.base_name} scale. Add samples, or make "
                "its activations dynamic."
            )
        return observer.get_qparams()

    def _output(self) -> Tensor | None:
        if not self._sample or not isinstance(self.module, nn.Linear):
            return None
        return self.module(torch.cat(self._sample))

    def _loses_by_static_scales(self, expected: Tensor, output_db: float) -> list[str]:
        """A note if one scale for all tokens costs much, and one for each would not."""
        inputs = self.scheme.input_activations
        if inputs is None or inputs.dynamic or inputs.type != "int" or output_db > _POOR_DB:
            return []
        by_token = inputs.model_copy(update={"strategy": "token", "dynamic": True})
        self.module.quantization_scheme = self.scheme.model_copy(update={"input_activations": by_token})
        try:
            dynamic_db = signal_to_noise(expected, self._output())
        finally:
            self.module.quantization_scheme = self.scheme
        if dynamic_db < output_db + _WORTH_DB:
            return []
        return [
            f"{self.name}: its output keeps {output_db:.1f} dB with one static scale for all tokens, and would keep "
            f"{dynamic_db:.1f} dB with W8A8_DYNAMIC."
        ]


class WatchedAttention(WatchedLayer):
    """An attention module whose keys and values, and with `queries` its queries, are to be quantised."""

    def __init__(
        self, name: str, module: nn.Module, args: QuantizationArgs, *, model: nn.Module, queries: bool
    ) -> None:
        super().__init__(name, module, QuantizationScheme(targets=[type(module).__name__], input_activations=args))
        self._model = model
        self._base_names = ("q", "k", "v") if queries else ("k", "v")

    def new_observers(self) -> dict[str, Observer]:
        """One for each of the states."""
        args = self.scheme.input_activations
        return {base_name: make_observer(base_name, args) for base_name in self._base_names}

    def start(self) -> None:
        """Put observers where attention states can be seen."""
        if "q" in self._base_names:
            initialize_hooked_attention(self._model, self.module)
        else:
            initialize_hooked_kv_cache(self._model, self.module)
        self.observers = self.new_observers()
        for base_name, observer in self.observers.items():
            observer.label = f"{self.name}.{base_name}"

    def stop(self) -> None:
        """Let go of the observers."""
        self.observers = {}

    def sees(self) -> Iterator[tuple[str, Callable[[Tensor, Tensor | None], None]]]:
        """Queries, keys and values."""
        for base_name, observer in self.observers.items():
            yield base_name, lambda value, mask, observer=observer: observer(value, mask=mask)

    def observe_weight(self) -> None:
        """There is none."""

    @torch.no_grad()
    def finish(self) -> QuantizedLayer:
        """Find the qparams and write them on the module, which uses them from now on."""
        qparams = {base_name: self._qparams(observer) for base_name, observer in self.observers.items()}
        notes = [note for observer in self.observers.values() for note in observer.notes()]
        initialize_module_for_quantization(self.module, self.scheme, force_zero_point=False)
        for base_name, found in qparams.items():
            for kind, value in found.items():
                parameter = getattr(self.module, f"{base_name}_{kind}", None)
                if parameter is not None and value is not None:
                    parameter.data.copy_(value.reshape(parameter.shape))
        self.module.quantization_status = QuantizationStatus.FROZEN
        names = {base_name: observer._observer_name for base_name, observer in self.observers.items()}
        return QuantizedLayer(self.name, self.scheme, names, (), {}, notes=notes)
