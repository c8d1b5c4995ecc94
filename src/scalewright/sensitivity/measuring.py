"""What each layer loses under each of some schemes, measured on data. The model is only looked at.

Near the model as it was, KL(model || quantised) is half the mean of (g dy)^2 over tokens: dy is what the layer's output
is off by, and g is the gradient of log p at that output, for tokens that are drawn from the model's own predictions (so
this is the true Fisher information, not that of the text). Errors of different tokens are taken to have nothing to do
with each other. That needs one forward and one backward pass, for all layers and schemes; then each layer is quantised
under each scheme, apart from the model, and shown the inputs that were kept.

Squares would let a few tokens decide, which stand at a cliff: any error pushes them over, so what they lose does not
add up over layers. Hence the square of the mean of |g dy|, times pi / 2, which is the same for normal distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from scalewright.calibration.passes import quickly
from scalewright.calibration.pipelines import Calibration, OnStep, silent
from scalewright.calibration.sources import DataOptions
from scalewright.calibration.targets import first_of, resolve_targets
from scalewright.checkpoint.cut_files import outliving_cuts
from scalewright.errors import DataError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.modifiers.layers import WatchedLayer
from scalewright.preparing import layers_and_data, refuse_if_strict
from scalewright.sensitivity.evidence import Evidence
from scalewright.sensitivity.partners import given_one_input, layers_together, name_of
from scalewright.sensitivity.sizes import candidate_schemes, check_bits, checked_sizes

# T tokens, I inputs and O outputs of a layer.

_LENGTH = 512  # tokens of a sample at most


@dataclass(frozen=True)
class LayerGroup:
    """Layers that must have one scheme, because loaders make one matrix of them, or one tensor of all experts."""

    name: str
    layers: tuple[str, ...]
    num_weights: int
    losses: Mapping[str, float]
    """About the KL for each token, in nats, where this group alone has a scheme; by scheme."""
    stored_bits: Mapping[str, int]
    """What the checkpoint stores for its weights, by scheme: codes, scales, zero points and global scales."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        bits = {scheme: stored / self.num_weights for scheme, stored in self.stored_bits.items()}
        layers = list(self.layers)
        return {"name": self.name, "layers": layers, "weights": self.num_weights, "loss": self.losses, "bits": bits}


@dataclass(frozen=True)
class Sensitivity:
    """What all groups of a model lose under some schemes, and how weights were rounded for it."""

    schemes: tuple[str, ...]
    groups: tuple[LayerGroup, ...]
    num_tokens: int
    quality: str = "balanced"
    group_size: int | None = None
    observer: str | None = None
    ignore: tuple[str, ...] | None = None
    positive_scales: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def worst_first(self) -> list[LayerGroup]:
        """The groups, by what they lose under the scheme that costs most in all."""
        totals = {scheme: sum(group.losses[scheme] for group in self.groups) for scheme in self.schemes}
        worst = max(totals, key=totals.__getitem__)
        return sorted(self.groups, key=lambda group: -group.losses[worst])

    def bits_of(self, scheme: str) -> float:
        """Bits for each weight where all groups have one scheme."""
        return self.bits_per_weight(dict.fromkeys((group.name for group in self.groups), scheme))

    def bits_per_weight(self, chosen: Mapping[str, str]) -> float:
        """Bits for each weight under a choice of schemes, by group."""
        stored = sum(group.stored_bits[chosen[group.name]] for group in self.groups)
        return stored / sum(group.num_weights for group in self.groups)

    def loss(self, chosen: Mapping[str, str]) -> float:
        """The KL that is to be expected of a choice of schemes, by group: losses add up."""
        return sum(group.losses[chosen[group.name]] for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, worst group first."""
        return {
            "schemes": {scheme: {"bits": self.bits_of(scheme)} for scheme in self.schemes},
            "groups": [group.to_dict() for group in self.worst_first],
            "num_tokens": self.num_tokens,
            "notes": self.notes,
        }


@outliving_cuts()
def measure_sensitivity(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    schemes: Sequence[str],
    bits: float | None = None,
    quality: str = "balanced",
    group_size: int | None = None,
    observer: str | None = None,
    ignore: Sequence[str] | None = None,
    positive_scales: bool = False,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Sensitivity:
    """What each layer of a model, given as an object or by its path or hub name, loses under each scheme.

    The model stays as it is, bit for bit. Weights are rounded as `quality` says; those of `best` as if it were
    balanced, for GPTQ takes its time and gains much the same everywhere. At most 16384 tokens are used, in samples of
    512. With `positive_scales` no scale is negative, neither here nor in what is chosen. Whether `bits` for each weight
    can be had with these schemes is said before any data is run.
    """
    candidates = candidate_schemes(
        schemes, quality=quality, group_size=group_size, observer=observer, positive_scales=positive_scales
    )
    if dataset is None:
        raise DataError("what layers lose is measured by running data through the model. Give a dataset.")
    sizes: dict[str, dict[str, int]] = {}

    def find(loaded: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
        layers, notes = _layers_meant(loaded, ignore)
        sizes.update({name: checked_sizes(loaded, layers, name, scheme) for name, scheme in candidates.items()})
        if bits is not None and layers:
            check_bits(bits, {name: sum(each.values()) / _num_weights(layers) for name, each in sizes.items()})
        return dict(layers), notes

    groups = []
    with layers_and_data(
        model,
        dataset,
        find,
        DataOptions(num_calibration_samples, batch_size=1, column=column, pack=pack, split=split, seed=seed),
        max_seq_length=max_seq_length,
        longest=_LENGTH,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        strict=strict,
        on_step=on_step,
    ) as ready:
        layers = {name: each for name, each in ready.layers.items() if isinstance(each, nn.Linear)}
        notes = ready.notes
        seen = Evidence(ready.model, layers, ready.batches, seed=seed, on_step=on_step)
        unseen = [name for name in layers if not seen.has_seen(name)]
        if unseen:
            notes.append(f"{first_of(unseen)}: no token came to it, so it seems to lose nothing. Add samples.")
            refuse_if_strict(notes, strict=strict)
        sets = layers_together(ready.model, list(layers))
        for number, names in enumerate(sets):
            name, some = name_of(names), {each: layers[each] for each in names}
            on_step("measuring", name, number, len(sets))
            stored = {scheme: sum(each[layer] for layer in names) for scheme, each in sizes.items()}
            losses = _losses(some, candidates, seen)
            groups.append(LayerGroup(name, tuple(names), _num_weights(some), losses, stored))
            seen.forget(names)
            on_step("measuring", name, number + 1, len(sets))
    ignored = None if ignore is None else tuple(ignore)
    return Sensitivity(
        tuple(candidates),
        tuple(groups),
        seen.num_tokens,
        quality,
        group_size,
        observer,
        ignored,
        positive_scales,
        notes,
    )


def _num_weights(layers: Mapping[str, nn.Linear]) -> int:
    return sum(module.weight.numel() for module in layers.values())


def _layers_meant(model: nn.Module, ignore: Sequence[str] | None) -> tuple[dict[str, nn.Linear], list[str]]:
    """The linear layers that are to have a scheme, and notes."""
    ignored = list(ignore or LEFT_ALONE)
    targets = resolve_targets(model, QuantizationModifier(scheme="W8A16", targets=["Linear"], ignore=ignored))
    found = {each.name: each.module for each in targets.layers if isinstance(each.module, nn.Linear)}
    return found, targets.notes


# ---- what schemes do -------------------------------------------------------------------------------------------------


class _Partners(nn.Module):
    """Copies of layers, each with an input of its own."""

    def forward(self, **inputs: Tensor) -> None:
        """Show each layer its input."""
        for name, layer in self.named_children():
            layer(inputs[name])


def _losses(
    layers: Mapping[str, nn.Linear], candidates: Mapping[str, QuantizationScheme], seen: Evidence
) -> dict[str, float]:
    """About the KL for each token where some layers have a scheme, by scheme."""
    losses = dict.fromkeys(candidates, 0.0)
    for names in given_one_input(list(layers)):
        for scheme_name, scheme in candidates.items():
            quantised = _quantised({each: layers[each] for each in names}, scheme, seen)
            total = 0.0
            for piece in seen.pieces_of(names):
                x_TI = piece.x_TI.float()
                slope_T = torch.zeros_like(x_TI[:, 0])
                for each, gradient_TO in piece.gradients.items():
                    lost_TO = _lost(layers[each], quantised[each], x_TI)
                    slope_T += (lost_TO * gradient_TO).sum(dim=-1)
                total += float((slope_T.double().abs() * piece.stands_for_T).sum())
            losses[scheme_name] += math.pi / 4 * (total / seen.num_tokens) ** 2
    return losses


@torch.no_grad()
def _lost(layer: nn.Linear, quantised: nn.Module, x_TI: Tensor) -> Tensor:
    """What a layer's outputs lose where it is quantised: both are computed in the same way."""
    bias = None if layer.bias is None else layer.bias.float()
    with quickly(quantised):
        lost_TO: Tensor = quantised(x_TI) - nn.functional.linear(x_TI, layer.weight.float(), bias)
    return lost_TO


@torch.no_grad()
def _quantised(layers: Mapping[str, nn.Linear], scheme: QuantizationScheme, seen: Evidence) -> dict[str, nn.Module]:
    """Copies of partners, quantised; in fp32, so that small errors are not rounded away."""
    partners, inputs = _Partners(), {}
    for name, module in layers.items():
        copied, short = _copy(module), name.rpartition(".")[2]
        seen.leave_importance(name, copied)
        partners.add_module(short, copied)
        inputs[short] = seen.input_of(name)
    watched = [WatchedLayer(name, copied, scheme) for name, copied in zip(layers, partners.children(), strict=True)]
    Calibration(partners, watched, [inputs]).run("basic")
    return {layer.name: layer.module.float() for layer in watched}


def _copy(module: nn.Linear) -> nn.Linear:
    """A linear layer of its own, whatever class and hooks the original has."""
    weight = module.weight.detach()
    copied = nn.Linear(
        weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta", dtype=weight.dtype
    )
    copied.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if module.bias is not None:
        copied.bias = nn.Parameter(module.bias.detach().clone(), requires_grad=False)
    return copied
