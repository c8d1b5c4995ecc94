"""What records mean: figures of each layer, and notes in words on what stands out.

Losses are told twice, in decibels of signal to noise: of all values together, and of the mean token. Where a few tokens
are loud, the first says little of the others, which may all have been rounded to nothing; and the second says little of
the loud ones, which may have been cut off. What is kept is the lesser of both.

Exact, whatever the model's dtype: ranges, channels, tokens, kurtosis (of sums in float64), losses of weights, and those
of dynamic scales (under a global scale, as NVFP4 has it, each batch has its own). Losses of static scales are those of
all values that were seen, as bf16: exact for models in bf16, and hardly off for others, whose values move by .4 % at
the most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.calibration.targets import first_of
from scalewright.numerics.grids import grid_of
from scalewright.numerics.histogram import code_values, noise_under, squares_of
from scalewright.numerics.layout import strategy_of
from scalewright.observers import Observer
from scalewright.observing.records import InputRecord, LayerRecord, WeightChoice, decibels

OUTLIER = 20.0
"""Channels whose largest magnitude is so many times that of the middle channel are outliers."""
_WORTH_DB = 6.0  # what scales for each token must gain to be worth a word
_POOR_DB = 30.0  # and what one scale keeps at the most then
_EXPERT = re.compile(r"(?P<all>.*\.experts)\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Channels:
    """How the input channels of a layer, or the columns of its weight, compare."""

    count: int
    median: float
    """The largest magnitude of the middle channel, of those that are not dead."""
    ratio: float | None
    """How many times that the largest channel has; None if all are dead."""
    outliers: tuple[tuple[int, float], ...]
    """The channels that are over `OUTLIER` times the median, and how many times; the largest first."""
    dead: tuple[int, ...]
    """Channels that have nothing but zeros."""

    @classmethod
    def of(cls, absmax_H: Tensor) -> Channels:
        """From the largest magnitude of each channel."""
        absmax = absmax_H.numpy().astype(np.float64)
        alive = absmax[absmax > 0]
        if not len(alive):
            return cls(len(absmax), 0.0, None, (), tuple(range(len(absmax))))
        ratio = absmax / np.median(alive)
        largest = [int(i) for i in np.argsort(-ratio, kind="stable") if ratio[i] > OUTLIER]
        return cls(
            len(absmax),
            float(np.median(alive)),
            float(ratio.max()),
            tuple((i, float(ratio[i])) for i in largest),
            tuple(int(i) for i in np.flatnonzero(absmax == 0)),
        )


@dataclass(frozen=True)
class Kept:
    """What is left of a layer's input, in decibels of signal to noise."""

    db: float
    """Of all values together."""
    token_db: float
    """Of the mean token: classes of tokens that are about as strong weigh as much as they have tokens."""

    @property
    def least(self) -> float:
        """The lesser of both."""
        return min(self.db, self.token_db)


@dataclass(frozen=True)
class InputChoice:
    """What an observer would choose for the input of a layer, and what is lost by it."""

    low: float
    """The least number that can be written with its scale; with a global scale alone, the least that was seen."""
    high: float
    scale: float | None = None
    zero_point: float | None = None
    global_scale: float | None = None
    """Under which groups have scales that are found while the model runs."""
    kept: Kept | None = None
    """With its scale; None for a global scale alone."""


@dataclass(frozen=True)
class InputFigures:
    """What a layer was given; there was a token at least."""

    min: float
    max: float
    kurtosis: float | None
    channels: Channels
    choices: Mapping[str, InputChoice] = field(default_factory=dict)
    dynamic: Kept | None = None
    """With scales for each token (or group of it), found while the model runs; None if activations are left alone."""

    @property
    def best(self) -> tuple[str, float] | None:
        """The observer that loses least, and what is kept."""
        kept = {name: each.kept.least for name, each in self.choices.items() if each.kept is not None}
        return max(kept.items(), key=lambda each: each[1]) if kept else None

    @property
    def lost_by_one_scale(self) -> float:
        """How many decibels scales for each token would gain over the best that is the same for all."""
        if self.best is None or self.dynamic is None or not math.isfinite(self.dynamic.least):
            return 0.0
        return self.dynamic.least - self.best[1]


@dataclass(frozen=True)
class WeightFigures:
    """What a weight is like."""

    shape: tuple[int, ...]
    min: float
    max: float
    kurtosis: float | None
    channels: Channels
    choices: Mapping[str, WeightChoice] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, float] | None:
        """The observer that loses least, and what is left."""
        kept = {name: each.db for name, each in self.choices.items()}
        return max(kept.items(), key=lambda each: each[1]) if kept else None


@dataclass(frozen=True)
class LayerFigures:
    """Everything that is told of a layer."""

    name: str
    tokens: int
    input: InputFigures | None
    """None if it was given no token."""
    weight: WeightFigures

    @property
    def worst_db(self) -> float:
        """What is left of its input or its weight, whichever is less, with the best observers."""
        kept = [self.weight.best] if self.input is None else [self.input.best, self.weight.best]
        if self.input is not None and self.input.best is None and self.input.dynamic is not None:
            kept.append(("dynamic", self.input.dynamic.least))
        return min((each[1] for each in kept if each is not None), default=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is infinite or unknown is null."""
        found: dict[str, Any] = _plain(asdict(self))
        return found


def worst_first(layers: Sequence[LayerFigures]) -> list[LayerFigures]:
    """Those that keep least first; of equals, those whose largest channel stands out most."""

    def badness(each: LayerFigures) -> tuple[float, float]:
        ratio = 0.0 if each.input is None else each.input.channels.ratio or 0.0
        return (each.worst_db, -ratio)

    return sorted(layers, key=badness)


def figures_of(layers: Mapping[str, LayerRecord]) -> list[LayerFigures]:
    """The figures of all layers. What layers that share an input have in common is computed once."""
    chosen: dict[tuple[str, bytes], InputChoice] = {}
    return [_figures(name, record, chosen) for name, record in layers.items()]


def _figures(name: str, record: LayerRecord, chosen: dict[tuple[str, bytes], InputChoice]) -> LayerFigures:
    seen, weight = record.input, record.weight
    of_weight = WeightFigures(
        weight.shape, weight.lo, weight.hi, weight.kurtosis, Channels.of(weight.absmax_H), weight.choices
    )
    if seen.lo_H is None or seen.hi_H is None:
        return LayerFigures(name, 0, None, of_weight)
    choices = {}
    for each, observer in record.observers.items():
        key = (each, _digest(observer))
        if key not in chosen:
            chosen[key] = _choice(observer, seen)
        choices[each] = chosen[key]
    of_input = InputFigures(
        float(seen.lo_H.min()),
        float(seen.hi_H.max()),
        seen.moments.kurtosis,
        Channels.of(torch.maximum(-seen.lo_H, seen.hi_H)),
        choices,
        _kept(seen, {k: (float(each.signal), each.noise) for k, each in seen.strengths.items()}),
    )
    return LayerFigures(name, seen.num_tokens, of_input, of_weight)


def _choice(observer: Observer, seen: InputRecord) -> InputChoice:
    assert seen.lo_H is not None and seen.hi_H is not None
    args: QuantizationArgs = observer.args
    if strategy_of(args) != "tensor":
        global_scale = observer.get_global_scale()
        assert global_scale is not None
        return InputChoice(float(seen.lo_H.min()), float(seen.hi_H.max()), global_scale=float(global_scale))
    qparams, grid = observer.get_qparams(), grid_of(args)
    values_C = code_values()
    scale, zero_point = (qparams[key].cpu() for key in ("scale", "zero_point"))
    losses = {
        k: (squares_of(each.counts_C, values_C), noise_under(each.counts_C, values_C, scale, zero_point, grid))
        for k, each in seen.strengths.items()
    }
    step, point = float(scale), float(zero_point)
    return InputChoice(
        (grid.low - point) * step,
        (grid.high - point) * step,
        step,
        point,
        kept=_kept(seen, losses),
    )


def _kept(seen: InputRecord, losses: Mapping[int, tuple[float, float | Fraction | None]]) -> Kept | None:
    """What is left, from signal and noise of each class of tokens; None if there is no noise to speak of."""
    known = {k: (signal, float(noise)) for k, (signal, noise) in losses.items() if noise is not None and signal > 0}
    if len(known) < sum(signal > 0 for signal, _ in losses.values()):
        return None
    tokens = {k: seen.strengths[k].num_tokens for k in known}
    return Kept(
        decibels(sum(signal for signal, _ in known.values()), sum(noise for _, noise in known.values())),
        decibels(sum(tokens.values()), sum(tokens[k] * noise / signal for k, (signal, noise) in known.items())),
    )


def _digest(observer: Observer) -> bytes:
    """What tells observers apart that saw different things."""
    digest = sha256(str(observer.scale_dtype).encode())
    for name in observer.merge_rules:
        value = getattr(observer, name)
        digest.update(b"-" if value is None else torch.as_tensor(value).cpu().numpy().tobytes())
    return digest.digest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- in words --------------------------------------------------------------------------------------------------------


def experts_of(layers: Sequence[LayerFigures]) -> dict[str, dict[int, int]]:
    """Tokens that each expert of each mixture was given: by the mixture's name, and the expert's number."""
    found: dict[str, dict[int, int]] = {}
    for layer in layers:
        place = _EXPERT.match(f"{layer.name}.")
        if place is not None:
            mixture = found.setdefault(place["all"], {})
            number = int(place["number"])
            mixture[number] = max(mixture.get(number, 0), layer.tokens)
    return found


def notes_on(layers: Sequence[LayerFigures]) -> list[str]:
    """What stands out, in words: the worst layers first, then dead channels and dead experts.

    Layers of which the same is to be told, such as those that share an input, share a note.
    """
    alike: dict[str, list[str]] = {}
    for layer in worst_first(layers):
        for told in _losses_told(layer):
            alike.setdefault(told, []).append(layer.name)
    for layer in layers:
        for told in _dead_channels_told(layer):
            alike.setdefault(told, []).append(layer.name)
    notes = [f"{first_of(names)}: {told}" for told, names in alike.items()]
    experts = experts_of(layers)
    for name, tokens in experts.items():
        dead = [number for number, count in tokens.items() if count == 0]
        if dead:
            was = "was" if len(dead) == 1 else "were"
            notes.append(
                f"{name}: {len(dead)} of {len(tokens)} experts {was} given no token ({_some(dead)}). Add samples, or "
                "use dynamic activations."
            )
    of_experts = tuple(f"{name}." for name in experts)
    unseen = [each.name for each in layers if each.input is None and not each.name.startswith(of_experts or ("\0",))]
    notes += [f"{name}: was given no token. Add samples, or ignore it." for name in unseen]
    return notes


def _losses_told(layer: LayerFigures) -> list[str]:
    if layer.input is None:
        return []
    facts, channels = [], layer.input.channels
    if channels.outliers:
        are = "is" if len(channels.outliers) == 1 else "are"
        facts.append(
            f"{len(channels.outliers)} of {channels.count} channels {are} over {OUTLIER:g} times the median channel "
            f"(the largest, {channels.outliers[0][0]}, is {channels.outliers[0][1]:.0f} times it)"
        )
    best, gain = layer.input.best, layer.input.lost_by_one_scale
    if best is not None and gain >= _WORTH_DB and (best[1] <= _POOR_DB or facts):
        facts.append(
            f"one scale for all tokens keeps {best[1]:.1f} dB at best ({best[0]}), and loses {gain:.1f} dB against one "
            "for each token: use dynamic activations or ignore it"
        )
    return [f"{'; '.join(facts)}."] if facts else []


def _dead_channels_told(layer: LayerFigures) -> list[str]:
    parts = [("columns of its weight", layer.weight.channels)]
    if layer.input is not None:
        parts.insert(0, ("input channels", layer.input.channels))
    return [
        f"{len(channels.dead)} of {channels.count} {what} have only zeros ({_some(channels.dead)})."
        for what, channels in parts
        if channels.dead
    ]


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown}, ... and {len(numbers) - 5} more"
