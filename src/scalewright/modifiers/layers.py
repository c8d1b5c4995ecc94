"""One layer on its way to few bits: observers on, values seen, scales found, weight rounded, observers off.

What is stored is computed once, by compressed-tensors, and the module's weight becomes what a loader will read back. So
the model in memory and the checkpoint are the same numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
    fake_quantize,
    initialize_module_for_quantization,
)
from compressed_tensors.utils import get_direct_state_dict
from torch import Tensor, nn

from scalewright.errors import CalibrationError
from scalewright.modifiers.figures import Sample, some_rows
from scalewright.modifiers.pictures import Picture, Seen, input_picture, weight_picture
from scalewright.modifiers.quantization import observers_of
from scalewright.modifiers.schemes import wants_values
from scalewright.modifiers.shown import See, Shown, shown_to
from scalewright.modifiers.storing import Loss, read_back, store
from scalewright.numerics.apart import copied_apart
from scalewright.numerics.hessian import Factor
from scalewright.numerics.measure import Noise, signal_to_noise
from scalewright.numerics.products import quick_linears
from scalewright.numerics.scales import round_scale
from scalewright.observers import Observer
from scalewright.observers.base import QParamsDict
from scalewright.observers.importance import ImportanceObserver, empty_sum, sum_squares
from scalewright.observers.searching import SearchObserver

SAMPLE_TOKENS = 128  # of a layer's input, kept to see what its output loses
_POOR_DB = 20.0  # an output that keeps less, and
_WORTH_DB = 6.0  # would gain more by dynamic scales, is named; and one that
_FAIR_DB = 30.0  # keeps less, if
_DROWNED_DB = 10.0  # half of its input channels keep less than this


@dataclass
class QuantizedLayer:
    """What became of a layer, for the table and the report. Decibels are of signal to noise."""

    name: str
    scheme: QuantizationScheme
    observers: dict[str, str]
    """The name of the observer of each part: weight, input, output, q, k, v."""
    shape: tuple[int, ...]
    compressed: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the checkpoint, by their names within the module; none if they are those of the module."""
    weight_db: float | None = None
    gain_db: float | None = None
    """By how much the weight's squared error, weighted where data weighs it, is less than min-max's, on a sample."""
    output_db: float | None = None
    """Of the layer's output, on tokens that were seen in calibration."""
    dynamic_db: float | None = None
    """The same if each token had its own scale, where one for all of them keeps little."""
    above_optimum: float | None = None
    """How much more the weight loses than the least possible, as a share of it, on a sample."""
    num_tokens: int | None = None
    """How many tokens of the data it was given; of an expert, those that chose it."""
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Picture] = field(default_factory=dict, repr=False)
    """What its weight and its input look like."""

    def record(self) -> dict[str, Any]:
        """What is to be kept of it beside its tensors, as plain data."""
        return {name: getattr(self, name) for name in (*_FIGURES, "observers", "notes", "pictures")} | {
            "shape": list(self.shape)
        }


_FIGURES = ("weight_db", "gain_db", "output_db", "dynamic_db", "above_optimum", "num_tokens")


class WatchedLayer:
    """A module that is to be quantised, with its observers while they are on."""

    def __init__(self, name: str, module: nn.Module, scheme: QuantizationScheme) -> None:
        self.name = name
        self.module = module
        self.scheme = scheme.model_copy(deep=True)
        self.observers: dict[str, Observer] = {}
        self.has_weight_alone = False
        """Whether no other parameter is the same memory, so that it may be written to."""
        self.keeps_weight = True
        """Whether its weight becomes what will be read back. Where nobody will look at it, that is time lost."""
        self.is_called_again = False
        """Whether it is known that a pass comes to it more than once."""
        self.stream: str | None = None
        """The name of the module whose input is what the output is added to, where that is known."""
        self.chosen_tokens: Callable[[], Tensor | None] = lambda: None
        """Which of the tokens that it is shown just now have chosen it; None for all of them."""
        self._sample: list[Tensor] = []
        self._seen = Seen()
        self._has_data = False
        self._has_hooks = bool(module._forward_pre_hooks)  # of others, which may change what it is given

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
            # Importance is shown (`sees`), so that masks are known, unless somebody has collected it before.
            if observer is not self.importance or hasattr(self.module, "_imatrix_sum"):
                observer.attach(self.module)
            elif isinstance(observer, ImportanceObserver):
                observer._imatrix_sum = empty_sum(self.weight.shape[-1], self.weight.device)

    def stop(self) -> None:
        """Take them off; nothing of them stays."""
        for base_name, observer in self.observers.items():
            if hasattr(self.module, f"{base_name}_observer"):
                delattr(self.module, f"{base_name}_observer")
            observer.detach(self.module)
            observer.reset()  # fused ones know each other: what they have seen would stay until cycles are looked for
        for name in ("_imatrix_sum", "_imatrix_count"):
            if hasattr(self.module, name):
                delattr(self.module, name)
        self.observers = {}
        self._sample = []
        self._seen = Seen()

    @property
    def importance(self) -> ImportanceObserver | None:
        """The observer of the weight, if it wants to see inputs, too; those of an embedding say nothing."""
        observer = self.observers.get("weight")
        if not isinstance(observer, ImportanceObserver) or isinstance(self.module, nn.Embedding):
            return None
        return observer if observer.wants_inputs else None

    goes_in_steps: ClassVar[bool] = False
    """Whether layers before it are quantised before it is shown anything, in the sequential pipeline."""

    @property
    def is_seen_by_its_input(self) -> bool:
        """Whether its input is all there is to see of it."""
        output = self.scheme.output_activations
        return not self._has_hooks and (output is None or not wants_values(output))

    @property
    def wants_data(self) -> bool:
        """Whether anything but the weight has to be seen."""
        importance = self.importance
        is_weighed = importance is not None and not importance.is_given
        return is_weighed or any(base_name != "weight" for base_name in self.observers)

    def sees(self) -> Iterator[tuple[str, See]]:
        """What of the module must be shown to whom while data flows."""
        self._has_data = True
        yield from (
            (base_name, shown_to(self.observers[base_name])) for base_name in _ACTIVATIONS & self.observers.keys()
        )
        yield from self._sees_for_weights()
        if isinstance(self.module, nn.Linear):
            yield "input", self._keep_some

    def sees_unquantised(self) -> Iterator[tuple[str, See]]:
        """What must be shown to whom while the same data flows through the model as it was."""
        yield from ()

    @property
    def wants_unquantised(self) -> bool:
        """Whether data is to flow through the model as it was, too. It is shown each batch of that first."""
        return False

    @property
    def wants_stream(self) -> bool:
        """Whether it is to be shown what its output is added to, where that is known."""
        return False

    def _sees_for_weights(self) -> Iterator[tuple[str, See]]:
        importance = self.importance
        if importance is not None and not importance.is_given:
            yield "input", lambda shown: importance.add_squares(*shown.once("squares", lambda: _squares(shown)))

    def _keep_some(self, shown: Shown) -> None:
        self._seen.look(shown, self.chosen_tokens())
        room = SAMPLE_TOKENS - sum(len(each) for each in self._sample)
        if room > 0:
            self._sample.append(shown.once("sample", lambda: _sample(shown))[:room])

    # ---- on several ranks --------------------------------------------------------------------------------------------

    @property
    def cost(self) -> float:
        """How long it takes to quantise it, in weights whose scales are searched."""
        return float(self.weight.numel())

    @property
    def room(self) -> int:
        """Bytes that it takes to quantise it, where these are many."""
        return 0

    def observers_to_merge(self) -> list[Observer]:
        """Those that have seen on each rank a part of what there is to see."""
        importance = self.importance
        is_weighed = importance is not None and not importance.is_given
        return [each for name, each in self.observers.items() if name != "weight" or is_weighed]

    def told(self) -> dict[str, Any]:
        """What other ranks must know of what it has seen on this one, as plain data."""
        sample = self.sample
        kind = (0, 0, "") if sample is None else (*sample.shape, str(sample.dtype).removeprefix("torch."))
        return {"has_data": self._has_data, "sample": kind, "seen": self._seen.told()}

    def heard(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Take over what all ranks have `told`."""
        self._has_data = any(each["has_data"] for each in everyone)
        self._seen.heard([each["seen"] for each in everyone])

    @property
    def sample(self) -> Tensor | None:
        """The first tokens that it was given, [tokens, columns]."""
        return torch.cat(self._sample) if self._sample else None

    @sample.setter
    def sample(self, tokens: Tensor | None) -> None:
        """Let these be the first tokens that it was given."""
        self._sample = [] if tokens is None else [tokens]

    # ---- quantising --------------------------------------------------------------------------------------------------

    def observe_weight(self, *, foreseen_absmax: float | None = None) -> None:
        """Show the weight to its observer; what it wants to know of inputs must have been seen by now.

        `foreseen_absmax` is the largest magnitude of all weights that share a global scale with it.
        """
        observer = self.observers.get("weight")
        if isinstance(observer, SearchObserver):
            observer.foreseen_absmax = foreseen_absmax
        if observer is not None:
            observer(self.target.to(self.weight.dtype))

    @property
    def target(self) -> Tensor:
        """What the weight should have been rounded from: itself, unless something better is known."""
        return self.weight.detach()

    @torch.no_grad()
    def finish(self) -> QuantizedLayer:
        """Find the qparams, write them on the module, and make its weight what will be read back."""
        layer = self._quantized_layer(tuple(self.weight.shape))
        before = self._output()
        qparams = {base_name: self._qparams(observer) for base_name, observer in self.observers.items()}
        if self.scheme.weights is None:
            self._picture(layer, qparams)
            self._write_qparams(qparams)
            stored = get_direct_state_dict(self.module)
            layer.compressed = {name: each for name, each in stored.items() if each is not None}  # a bias may be None
        else:
            importance = None if self.importance is None else self.importance.channel_importance
            self.observers["weight"].detach(self.module)  # it may hold the weight as it was
            rounded = self._rounded(qparams["weight"], layer.notes)
            self._picture(layer, qparams)
            self._write_qparams(qparams)
            self._store(layer, rounded, importance=importance, global_scale=qparams["weight"]["global_scale"])
        self.module.quantization_status = QuantizationStatus.DECOMPRESSED
        after = self._output()
        if before is not None and after is not None:
            layer.output_db = signal_to_noise(before, after)
            layer.dynamic_db, notes = self._static_inputs(before, layer.output_db)
            layer.notes += notes
        return layer

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> QuantizedLayer:
        """What `finish` made of the layer in an earlier run, from what was kept of it."""
        initialize_module_for_quantization(self.module, self.scheme, force_zero_point=False)
        self.refill(tensors, is_weight_wanted=self.keeps_weight)
        self.module.quantization_status = QuantizationStatus.DECOMPRESSED
        return self._from_record(tensors, record)

    @torch.no_grad()
    def refill(self, tensors: Mapping[str, Tensor], *, is_weight_wanted: bool = True) -> None:
        """Give the module of a finished layer its numbers again, of which it may have been emptied."""
        is_read = self.scheme.weights is not None and is_weight_wanted
        read = read_back(tensors, self.scheme, self.format) if is_read else tensors  # scales may be stored as codes
        for name, parameter in list(self.module.named_parameters(recurse=False)):
            if name in read and name != "weight" and read[name].shape == parameter.shape:
                value = read[name].to(self.weight.device, parameter.dtype, copy=True)
                setattr(self.module, name, nn.Parameter(value, requires_grad=False))
        if is_read:
            target = self._weight_to_write()
            target.detach().copy_(read["weight"])
            self.module.weight = target.requires_grad_(False)

    def undo(self) -> None:
        """Make the module of a finished layer, which was emptied, what it was before."""
        for name in [name for name, each in self.module.named_parameters(recurse=False) if _QPARAM.match(name)]:
            delattr(self.module, name)
        for name in ("quantization_scheme", "quantization_status", "forward"):
            vars(self.module).pop(name, None)

    def empty(self, weight: nn.Parameter) -> None:
        """Take the numbers of a finished layer off its module, which gets this weight."""
        for name, parameter in list(self.module.named_parameters(recurse=False)):
            if name.startswith("weight_"):
                setattr(self.module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        self.module.weight = weight

    def _from_record(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> QuantizedLayer:
        figures = {name: record[name] for name in _FIGURES}
        notes, shape = list(record["notes"]), tuple(record["shape"])
        layer = QuantizedLayer(self.name, self.scheme, record["observers"], shape, tensors, notes=notes, **figures)
        layer.pictures = record["pictures"]
        return layer

    @property
    def format(self) -> CompressionFormat:
        """How the layer is stored."""
        if self.scheme.format is None:
            self.scheme.format = infer_module_format(type(self.module), self.scheme)
            # transformers cannot load packed embeddings, and 8 bits gain nothing by it.
            args = self.scheme.weights
            if isinstance(self.module, nn.Embedding) and args is not None and (args.type, args.num_bits) == ("int", 8):
                self.scheme.format = CompressionFormat.int_quantized
        return CompressionFormat(self.scheme.format)

    @property
    def weight(self) -> Tensor:
        """The module's weight."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    def _rounded(self, qparams: QParamsDict, notes: list[str]) -> Tensor | None:
        """The weight as it is to be stored, if that is not the nearest under `qparams`, which may be changed."""
        return None

    def _store(
        self,
        layer: QuantizedLayer,
        rounded: Tensor | None,
        *,
        importance: Tensor | None,
        global_scale: Tensor | None,
    ) -> None:
        """Make the weight what will be read back, keep what is stored, and measure what was lost."""
        args = self.scheme.weights
        assert args is not None
        original = self.weight.detach()
        target = self._weight_to_write() if self.keeps_weight or self._sample else None
        some = some_rows(original)
        some_as_restored: list[Tensor] = []
        some_as_meant = self.target[some].to(original.dtype)
        noise = Noise()
        state = dict(get_direct_state_dict(self.module))
        if rounded is not None:
            state["weight"] = rounded

        def take(rows: slice, restored: Tensor, loss: Loss | None) -> None:
            restored = restored.to(original.dtype)
            if loss is None or rounded is not None:
                noise.add(original[rows], restored)
            else:
                noise.count(*loss)
            begin, end, _ = rows.indices(len(original))
            some_as_restored.append(restored[some[(some >= begin) & (some < end)] - begin])
            if target is not None and restored.data_ptr() != target[rows].data_ptr():
                target.detach()[rows] = restored

        into = None if rounded is not None or target is None else target.detach()  # or what it was is needed until then
        layer.compressed = store(state, self.scheme, self.format, take, into=into)
        if target is not None:
            self.module.weight = target.requires_grad_(False)
        layer.weight_db = noise.decibels
        sample = Sample(some_as_meant, torch.cat(some_as_restored), args, importance, global_scale, self.factor)
        layer.gain_db = sample.gain_over_minmax()
        layer.above_optimum = sample.above_optimum()

    @property
    def factor(self) -> Factor | None:
        """What errors of the weight's columns cost together, where that is known."""
        return None

    def _weight_to_write(self) -> nn.Parameter:
        """What becomes the module's weight: the one it has if nobody else has it, too, because the memory between the
        weights of a model is hard to use again.
        """
        weight = self.weight
        is_whole = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        if self.has_weight_alone and is_whole and not weight.is_inference() and isinstance(weight, nn.Parameter):
            return weight
        return nn.Parameter(torch.empty_like(weight), requires_grad=False)

    def _quantized_layer(self, shape: tuple[int, ...]) -> QuantizedLayer:
        names = {base_name: observer.observer_name for base_name, observer in self.observers.items()}
        notes = [note for observer in self.observers.values() for note in observer.notes()]
        weighted, importance = self.observers.get("weight"), self.importance
        has_none = importance is None or not (self._has_data or importance.is_given)
        if has_none and isinstance(weighted, ImportanceObserver) and weighted.can_do_without:
            notes = [note for note in notes if note != weighted.fallback]
        return QuantizedLayer(self.name, self.scheme, names, shape, {}, notes=notes)

    def _picture(self, layer: QuantizedLayer, qparams: Mapping[str, QParamsDict]) -> None:
        """Keep what the weight, which is still as it was, and the inputs look like."""
        weights, inputs = self.scheme.weights, self.scheme.input_activations
        pictures = {"weight": None if weights is None else weight_picture(self.weight, weights, qparams["weight"])}
        if self._sample:
            layer.num_tokens = self._seen.num_tokens
            pictures["input"] = input_picture(torch.cat(self._sample), self._seen, inputs, qparams.get("input"))
        elif self._has_data and isinstance(self.module, nn.Linear):
            layer.num_tokens = 0
        layer.pictures = {name: each for name, each in pictures.items() if each is not None}

    def _write_qparams(self, found: Mapping[str, QParamsDict]) -> None:
        """Put qparams on the module."""
        initialize_module_for_quantization(self.module, self.scheme, force_zero_point=False)
        for base_name, qparams in found.items():
            for kind in ("scale", "zero_point", "global_scale"):
                parameter, value = getattr(self.module, f"{base_name}_{kind}", None), qparams.get(kind)
                if isinstance(parameter, Tensor) and isinstance(value, Tensor):
                    if kind == "scale" and self._has_powers(base_name):
                        value = round_scale(value, parameter.dtype)  # fp16 has not all powers of two that e8m0 has
                    parameter.data.copy_(value.reshape(parameter.shape))

    def _has_powers(self, base_name: str) -> bool:
        """Whether the scales are powers of two."""
        weights = self.scheme.weights
        return base_name == "weight" and weights is not None and weights.scale_dtype == torch.uint8

    def _qparams(self, observer: Observer) -> QParamsDict:
        if not observer.has_statistics:
            raise CalibrationError(
                f"{self.name}: saw 0 tokens in calibration, so it has no {observer.base_name} scale. Add samples, "
                "make its activations dynamic, or ignore it."
            )
        return observer.get_qparams()

    def _output(self) -> Tensor | None:
        sample = self.sample
        if sample is None or not isinstance(self.module, nn.Linear):
            return None
        with quick_linears([self.weight]):
            output = self.module.forward(sample)  # past all hooks
        return output if isinstance(output, Tensor) else None  # routers may give more than one

    def _static_inputs(self, before: Tensor, output_db: float) -> tuple[float | None, list[str]]:
        """What a poor output would keep if each token had its own scale (None where that is no question), and a note
        if one static INT8 scale for all inputs costs much.

        Scales for each token help where tokens differ. A channel that is louder than all others is loud in every token,
        and the others drown beside it, though the output, which is mostly that channel's, may look fair: then a note
        says what else there is.
        """
        inputs, weights = self.scheme.input_activations, self.scheme.weights
        if inputs is None or inputs.dynamic or inputs.type != "int" or output_db > _FAIR_DB:
            return None, []
        loud, times, channel_db = self._channels(inputs)
        is_drowned = channel_db < _DROWNED_DB
        if output_db > _POOR_DB and not is_drowned:
            return None, []
        dynamic_db = self._output_db(before, inputs.model_copy(update={"strategy": "token", "dynamic": True}))
        if output_db <= _POOR_DB and dynamic_db >= output_db + _WORTH_DB:
            return dynamic_db, [
                f"{self.name}: its output keeps {output_db:.1f} dB with one static scale for all tokens, and would "
                f"keep {dynamic_db:.1f} dB with W8A8_DYNAMIC."
            ]
        plain_db = self._output_db(before, None)
        if not is_drowned or weights is None or plain_db < output_db + _WORTH_DB:
            return dynamic_db, []
        return dynamic_db, [
            f"{self.name}: half of its input channels keep less than {channel_db:.1f} dB in INT8, beside channel "
            f"{loud}, which is {times:.0f} times as loud; its output keeps {output_db:.1f} dB, and would keep "
            f"{dynamic_db:.1f} dB with W8A8_DYNAMIC. Leave its inputs as they are (W{weights.num_bits}A16: "
            f"{plain_db:.1f} dB), use FP8, or ignore it."
        ]

    def _output_db(self, before: Tensor, inputs: QuantizationArgs | None) -> float:
        """What the output would keep if inputs were quantised otherwise, or not at all."""
        other: Any = self.scheme.model_copy(update={"input_activations": inputs})
        self.module.quantization_scheme = other
        after = self._output()
        self.module.quantization_scheme = self.scheme
        assert after is not None
        return signal_to_noise(before, after)

    def _channels(self, inputs: QuantizationArgs) -> tuple[int, float, float]:
        """Of the sample's channels: the loudest, how many times as loud as most it is, and the signal that half of them
        keep no more than, in decibels.
        """
        x_TH = self.sample
        assert x_TH is not None
        rounded_TH = fake_quantize(
            x_TH, self.module.input_scale, getattr(self.module, "input_zero_point", None), inputs
        )
        noise_H = (rounded_TH.double() - x_TH.double()).square().sum(dim=0)
        ratio_H = x_TH.double().square().sum(dim=0) / noise_H  # 0 / 0 of a channel of zeros, which loses nothing
        peak_H = x_TH.abs().amax(dim=0).double()
        times = float(peak_H.max() / peak_H.median()) if float(peak_H.median()) else math.inf
        kept = float(torch.nan_to_num(ratio_H, nan=math.inf).median())
        return int(peak_H.argmax()), times, 10 * math.log10(kept) if kept else -math.inf


_ACTIVATIONS = {"input", "output"}
_QPARAM = re.compile(r"(weight|input|output|q|k|v)_(scale|zero_point|global_scale|g_idx)$")


def _squares(shown: Shown) -> tuple[Tensor, int]:
    return sum_squares(shown.value, mask=shown.mask)


def _sample(shown: Shown) -> Tensor:
    value, mask = shown.value, shown.mask
    tokens = value.reshape(-1, value.shape[-1]) if mask is None else value[mask.bool()]
    return copied_apart(tokens[:SAMPLE_TOKENS])
