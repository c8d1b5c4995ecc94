"""What is kept of a layer while data flows: records that add up, exactly and in any order.

Everything that is told of a layer later is computed from these. Nothing here decides what is bad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.errors import MergeError, NonFiniteError
from scalewright.modifiers.shown import Shown, shown_to
from scalewright.numerics.dynamic import dynamic_noise
from scalewright.numerics.extremes import min_max
from scalewright.numerics.grids import grid_of
from scalewright.numerics.histogram import count_codes
from scalewright.numerics.layout import flatten_for_calibration
from scalewright.numerics.measure import quantize_dequantize_
from scalewright.numerics.moments import Moments, moments_of
from scalewright.numerics.scales import effective_scale, stored_qparams
from scalewright.observers import Observer

# T tokens, H input channels, C codes of bf16 in order of their value.

_SILENT = -1000  # the class of tokens that are zeros; no float32 is so small


@dataclass(frozen=True)
class StrengthRecord:
    """Tokens that are about as strong: every value as bf16, and what scales for each token lose."""

    num_tokens: int
    counts_C: Tensor
    signal: Fraction
    """The sum of squares."""
    noise: Fraction | None
    """The squared error under scales for each token, as the scheme rounds; None where it leaves activations alone."""

    def __add__(self, other: StrengthRecord) -> StrengthRecord:
        """The record of the tokens of both."""
        return StrengthRecord(
            self.num_tokens + other.num_tokens,
            self.counts_C + other.counts_C,
            self.signal + other.signal,
            None if self.noise is None or other.noise is None else self.noise + other.noise,
        )


@dataclass(frozen=True)
class InputRecord:
    """All tokens that a layer was given: how many, the range of each channel, sums of powers, tokens by strength."""

    num_tokens: int = 0
    lo_H: Tensor | None = None
    hi_H: Tensor | None = None
    moments: Moments = field(default_factory=Moments)
    strengths: Mapping[int, StrengthRecord] = field(default_factory=dict)
    """Tokens whose root mean square is from 4^(k-1) up to 4^k, by k. Loud tokens would drown the others."""

    @classmethod
    def of(cls, x_TH: Tensor, dynamic: QuantizationArgs | None) -> InputRecord:
        """The record of some tokens. `dynamic` says how they would be rounded with scales for each token."""
        if not len(x_TH):
            return cls()
        lo_H, hi_H = x_TH.amin(dim=0).float(), x_TH.amax(dim=0).float()
        if not bool(torch.isfinite(lo_H).all() and torch.isfinite(hi_H).all()):
            num_bad = int((~torch.isfinite(x_TH)).sum())
            raise NonFiniteError(
                f"{num_bad} of {x_TH.numel()} values are NaN or Inf. Mend the model, or leave this layer out."
            )
        global_absmax = torch.maximum(-lo_H.min(), hi_H.max())
        classes_T = strength_classes(x_TH)
        strengths = {
            int(k): _strength_record(x_TH[classes_T == k], dynamic, global_absmax) for k in torch.unique(classes_T)
        }
        return cls(len(x_TH), lo_H.cpu(), hi_H.cpu(), moments_of(x_TH), strengths)

    def __add__(self, other: InputRecord) -> InputRecord:
        """The record of the tokens of both."""
        if self.lo_H is None or self.hi_H is None:
            return other
        if other.lo_H is None or other.hi_H is None:
            return self
        strengths = dict(self.strengths)
        for k, record in other.strengths.items():
            strengths[k] = strengths[k] + record if k in strengths else record
        return InputRecord(
            self.num_tokens + other.num_tokens,
            torch.minimum(self.lo_H, other.lo_H),
            torch.maximum(self.hi_H, other.hi_H),
            self.moments + other.moments,
            dict(sorted(strengths.items())),
        )

    def all_counts(self) -> Tensor:
        """How often each bf16 value was seen, in all tokens; there was one at least."""
        return torch.stack([each.counts_C for each in self.strengths.values()]).sum(dim=0)


def strength_classes(x_TH: Tensor) -> Tensor:
    """For each token the least k such that its root mean square is below 4^k; tokens of zeros have a k of their own."""
    rms_T = torch.linalg.vector_norm(x_TH.double(), dim=-1) / x_TH.shape[-1] ** 0.5
    _, exponent_T = torch.frexp(rms_T)  # 2^(e-1) <= rms < 2^e
    k_T = torch.div(exponent_T + 1, 2, rounding_mode="floor")
    return torch.where(rms_T > 0, k_T, _SILENT).cpu()


def _strength_record(x_TH: Tensor, dynamic: QuantizationArgs | None, global_absmax: Tensor) -> StrengthRecord:
    return StrengthRecord(
        len(x_TH),
        count_codes(x_TH.unsqueeze(1)).reshape(-1).cpu(),
        moments_of(x_TH).sums[1],
        None if dynamic is None else Fraction(dynamic_noise(x_TH, dynamic, global_absmax=global_absmax)),
    )


@dataclass(frozen=True)
class WeightChoice:
    """What an observer would make of a weight."""

    db: float
    """Signal to noise; infinite if nothing is lost."""
    share: float
    """The width of its ranges beside min-max's: the middle one of all qparam positions."""


@dataclass(frozen=True)
class WeightRecord:
    """What is known of a weight; no data changes it."""

    shape: tuple[int, ...]
    dtype: str
    lo: float
    hi: float
    kurtosis: float | None
    absmax_H: Tensor
    """Of each input channel, that is column."""
    choices: Mapping[str, WeightChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, weight: Tensor, args: QuantizationArgs | None, observers: tuple[str, ...]) -> WeightRecord:
        """Look at a weight, and at what each observer would make of it under `args`."""
        weight = weight.detach()
        lo, hi = (float(each) for each in min_max(weight.reshape(1, 1, -1)))
        if not (math.isfinite(lo) and math.isfinite(hi)):
            raise NonFiniteError("there are NaN or Inf in it. Mend the model, or leave this layer out.")
        choices = {} if args is None else {name: _weight_choice(weight, args, name) for name in observers}
        absmax_H = weight.abs().amax(dim=0).float().cpu()
        dtype = str(weight.dtype).removeprefix("torch.")
        return cls(tuple(weight.shape), dtype, lo, hi, moments_of(weight).kurtosis, absmax_H, choices)

    def is_like(self, other: WeightRecord) -> bool:
        """Whether both were taken from the same weight, as far as can be told."""
        mine, theirs = ((each.shape, each.dtype, each.lo, each.hi, each.kurtosis) for each in (self, other))
        return mine == theirs and torch.equal(self.absmax_H, other.absmax_H)


@torch.no_grad()
def _weight_choice(weight: Tensor, args: QuantizationArgs, name: str) -> WeightChoice:
    observer: Observer = Observer.load_from_registry(name, base_name="weight", args=args)
    observer(weight)
    qparams = observer.get_qparams()
    x_NQG = flatten_for_calibration(weight.float(), "weight", args)
    shape, global_scale = (*x_NQG.shape[1:-1], 1), qparams["global_scale"]
    plain, _ = stored_qparams(*min_max(x_NQG), args, global_scale=global_scale, dtype=observer.scale_dtype)
    share = (qparams["scale"].float().abs().flatten() / plain.float().flatten()).median()
    rounded = quantize_dequantize_(
        x_NQG.clone(),
        effective_scale(qparams["scale"], global_scale).reshape(shape),
        qparams["zero_point"].float().reshape(shape),
        grid_of(args),
    )
    noise = float((rounded.double() - x_NQG.double()).square_().sum())
    return WeightChoice(decibels(moments_of(weight).squares, noise), float(share))


@dataclass(frozen=True)
class LayerRecord:
    """One layer: what it was given, who watched that, and its weight."""

    input: InputRecord
    observers: Mapping[str, Observer]
    """Who watched the input, by their names."""
    weight: WeightRecord

    def merged(self, other: LayerRecord, name: str) -> LayerRecord:
        """What would be known if both had been seen by one. The name of the layer is for errors."""
        if not self.weight.is_like(other.weight):
            raise MergeError(
                f"{name}: its weight is {_told(self.weight)} in one, and {_told(other.weight)} in the other. Merge "
                "what was observed of one model."
            )
        observers = {name: _both(mine, other.observers[name]) for name, mine in self.observers.items()}
        return replace(self, input=self.input + other.input, observers=observers)


class Watcher:
    """Looks at the input of a layer while data flows."""

    def __init__(self, name: str, observers: Mapping[str, Observer], dynamic: QuantizationArgs | None) -> None:
        self.input = InputRecord()
        self.observers = observers
        self._name = name
        self._dynamic = dynamic
        self._key = ("observed", None if dynamic is None else dynamic.model_dump_json())
        for observer in observers.values():
            observer.label = f"{name}.input"
        self._sees = [shown_to(observer) for observer in observers.values()]

    def see(self, shown: Shown) -> None:
        """Add what the layer is given just now."""
        try:
            self.input += shown.once(self._key, lambda: InputRecord.of(_tokens(shown), self._dynamic))
        except NonFiniteError as error:
            raise error.at(f"{self._name}.input") from None
        for see in self._sees:
            see(shown)


def decibels(signal: float, noise: float) -> float:
    """Of signal to noise: infinite when nothing was lost."""
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _tokens(shown: Shown) -> Tensor:
    value, mask = shown.value.detach(), shown.mask
    return value.reshape(-1, value.shape[-1]) if mask is None else value[mask.bool()]


def _both(one: Observer, other: Observer) -> Observer:
    joined = type(one)(one.base_name, one.args)
    joined.label = one.label
    return joined.merge(one).merge(other)


def _told(weight: WeightRecord) -> str:
    shape = " x ".join(map(str, weight.shape))
    return f"{shape} in {weight.dtype} from {weight.lo:.6g} to {weight.hi:.6g}"
