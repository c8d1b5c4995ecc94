"""What each layer loses under each of some schemes, measured on data. The model is only looked at.

Near the model as it was, KL(model || quantised) is half the mean of (g dy)^2 over tokens: dy is what the layer's output
is off by, and g is the gradient of log p at that output, for tokens that are drawn from the model's own predictions (so
this is the true Fisher information, not that of the text). Errors of different tokens are taken to have nothing to do
with each other. That needs one forward and one backward pass, for all layers and schemes; then each layer is quantised
under each scheme, apart from the model, and shown the inputs that were kept.

Squares would let a few tokens decide, which stand at a cliff: any error pushes them over, so what they lose does not
add up over layers. Hence the square of the mean of |g dy|, times pi / 2, which is the same for normal distributions.

What it refuses to do: choose anything. That is `budget`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.utils import get_direct_state_dict
from torch import Tensor, nn

from scalewright.calibration.experts import UnfusedExperts
from scalewright.calibration.loaders import settle_formats
from scalewright.calibration.passes import evaluating, without_cache
from scalewright.calibration.pipelines import Calibration, OnStep, silent
from scalewright.calibration.plan import LM_HEAD
from scalewright.calibration.sources import DataOptions
from scalewright.calibration.taps import Masks, first_tensor
from scalewright.calibration.targets import Target, check_layers, first_of, resolve_targets
from scalewright.errors import DataError, ModelError, RecipeError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.modifiers.storing import store
from scalewright.numerics.layout import strategy_of
from scalewright.observers import FUSED_LAYER_NAMES
from scalewright.observers.importance import leave_importance, sum_squares
from scalewright.preparing import layers_and_data, refuse_if_strict
from scalewright.quality import recipe_for

# B samples of a batch, T tokens, V entries of the vocabulary, I inputs and O outputs of a layer.

_LENGTH = 512  # tokens of a sample at most
_TOKENS = 16384  # that flow through the model, at the most
_KEPT = 1024  # of these, about, that each layer keeps
_NOT_COUNTED = "weight_shape"  # two numbers that loaders could do without


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
    512. Whether `bits` for each weight can be had with these schemes is said before any data is run.
    """
    candidates = candidate_schemes(schemes, quality=quality, group_size=group_size, observer=observer)
    if dataset is None:
        raise DataError("what layers lose is measured by running data through the model. Give a dataset.")
    sizes: dict[str, dict[str, int]] = {}

    def find(loaded: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
        layers, notes = _layers_meant(loaded, ignore)
        sizes.update({name: _checked_sizes(loaded, layers, name, scheme) for name, scheme in candidates.items()})
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
        seen = _Evidence(ready.model, layers, ready.batches, seed=seed, on_step=on_step)
        unseen = [name for name in layers if not seen.has_seen(name)]
        if unseen:
            notes.append(f"{first_of(unseen)}: no token came to it, so it seems to lose nothing. Add samples.")
            refuse_if_strict(notes, strict=strict)
        sets = layers_together(ready.model, list(layers))
        for number, names in enumerate(sets):
            name, some = _name_of(names), {each: layers[each] for each in names}
            on_step("measuring", name, number, len(sets))
            stored = {scheme: sum(each[layer] for layer in names) for scheme, each in sizes.items()}
            losses = _losses(some, candidates, seen)
            groups.append(LayerGroup(name, tuple(names), _num_weights(some), losses, stored))
            seen.forget(names)
            on_step("measuring", name, number + 1, len(sets))
    ignored = None if ignore is None else tuple(ignore)
    found = (tuple(candidates), tuple(groups), seen.num_tokens, quality, group_size, observer, ignored)
    return Sensitivity(*found, notes=notes)


def _num_weights(layers: Mapping[str, nn.Linear]) -> int:
    return sum(module.weight.numel() for module in layers.values())


# ---- schemes ---------------------------------------------------------------------------------------------------------


def candidate_schemes(
    names: Sequence[str], *, quality: str = "balanced", group_size: int | None = None, observer: str | None = None
) -> dict[str, QuantizationScheme]:
    """The schemes of those names as `quality` has them, by their names in capitals.

    `group_size` is for those that have groups of a size which may be chosen.
    """
    names = [name.upper() for name in names]
    if not names:
        raise RecipeError("schemes: there is none. Name some, such as W4A16 and W8A16.")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RecipeError(f"schemes: {twice} is named twice. Name it once.")
    idle = next((name for name in names if scheme_named(name).weights is None), None)
    if idle is not None:
        raise RecipeError(f"schemes: {idle} leaves weights as they are. Name another, or ignore layers.")
    if group_size is not None and not any(map(takes_group_size, names)):
        raise RecipeError(f"group_size: none of {', '.join(names)} has groups of another size. Leave it out.")
    candidates = {}
    for name in names:
        size = group_size if takes_group_size(name) else None
        recipe = recipe_for("fast" if quality == "fast" else "balanced", name, group_size=size, observer=observer)
        (modifier,) = recipe.modifiers
        assert isinstance(modifier, QuantizationModifier)
        candidates[name] = modifier.groups[0].scheme
    recipe_for(quality, names[0])  # says no to a quality that there is not
    return candidates


def takes_group_size(name: str) -> bool:
    """Whether the weights of a scheme have groups of a size which may be chosen."""
    weights = scheme_named(name).weights
    return weights is not None and strategy_of(weights) == "group" and weights.scale_dtype is None


def check_bits(bits: float, by_scheme: Mapping[str, float]) -> float:
    """What may be spent of a budget; an error if no choice of schemes fits it, or all of them do.

    One that is the least scheme's to two digits stands for it: NVFP4 takes a little more than 4.5 bits.
    """
    least, largest = (find(by_scheme, key=by_scheme.__getitem__) for find in (min, max))
    if math.isnan(bits):
        raise RecipeError(f"bits: {bits:g} is no number. Give {by_scheme[least]:.2f}, which {least} takes, or more.")
    if round(by_scheme[least], 2) > bits:
        raise RecipeError(
            f"bits: {bits:g} for each weight is less than {least} takes, {by_scheme[least]:.2f} with its scales. Give "
            "more, or name a smaller scheme."
        )
    if by_scheme[largest] < bits and round(by_scheme[largest], 2) < bits:
        raise RecipeError(
            f"bits: {bits:g} for each weight is more than {largest} takes, {by_scheme[largest]:.2f} with its scales. "
            f"Give less, or use scheme {largest} for all layers."
        )
    return max(bits, by_scheme[least])


def _checked_sizes(
    model: nn.Module, layers: Mapping[str, nn.Linear], name: str, scheme: QuantizationScheme
) -> dict[str, int]:
    """The bits that a scheme stores for each layer. Says no to layers that it does not fit, or no loader could read."""
    check_layers(Target(each, module, name, scheme) for each, module in layers.items())
    watched = [WatchedLayer(each, module, scheme) for each, module in layers.items()]
    settle_formats(model, watched)
    known: dict[tuple[Any, ...], int] = {}
    sizes = {}
    for layer in watched:
        key = (*layer.weight.shape, layer.weight.dtype, layer.format)
        if key not in known:
            known[key] = stored_bits(layer.scheme, tuple(layer.weight.shape), layer.weight.dtype, layer.format)
        sizes[layer.name] = known[key]
    return sizes


def stored_bits(
    scheme: QuantizationScheme, shape: tuple[int, ...], dtype: torch.dtype, stored_as: CompressionFormat
) -> int:
    """What a checkpoint stores for a weight: all tensors that take its place. Nothing is computed but shapes."""
    rows, columns = shape
    module = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    tensors = store(dict(get_direct_state_dict(module)), scheme, stored_as, lambda rows, weight: None)
    point = tensors.get("weight_zero_point")
    if point is not None and point.dtype == torch.int8 and "weight_packed" in tensors:
        # compressed-tensors packs them by columns, but not where there are only shapes.
        assert scheme.weights is not None
        words = -(-point.shape[0] * int(scheme.weights.num_bits) // 32)
        tensors["weight_zero_point"] = point.new_empty(words, *point.shape[1:], dtype=torch.int32)
    counted = (each for name, each in tensors.items() if name.startswith("weight") and name != _NOT_COUNTED)
    return sum(8 * each.numel() * each.element_size() for each in counted)


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers_meant(model: nn.Module, ignore: Sequence[str] | None) -> tuple[dict[str, nn.Linear], list[str]]:
    """The linear layers that are to have a scheme, and notes."""
    ignored = list(ignore or [LM_HEAD])
    targets = resolve_targets(model, QuantizationModifier(scheme="W8A16", targets=["Linear"], ignore=ignored))
    notes = [note for note in targets.notes if f"'{LM_HEAD}'" not in note]
    return {each.name: each.module for each in targets.layers if isinstance(each.module, nn.Linear)}, notes


def layers_together(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """The layers in groups that must have one scheme, in the order of the model."""
    experts = [f"{name}." for name, module in model.named_modules() if isinstance(module, UnfusedExperts)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parent, _, short = name.rpartition(".")
        prefix = next((each for each in experts if name.startswith(each)), None)
        partners = next((each for each in FUSED_LAYER_NAMES if short in each), (short,))
        groups.setdefault((parent, *partners) if prefix is None else (prefix,), []).append(name)
    return list(groups.values())


def _name_of(names: Sequence[str]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`; of experts what they have in common."""
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) == 1:
        (parent,) = parents
        shorts = "+".join(name.rpartition(".")[2] for name in names)
        return f"{parent}.{shorts}" if parent else shorts
    parts = [name.split(".") for name in names]
    common = [each[0] for each in zip(*parts, strict=False) if len(set(each)) == 1]
    return f"{'.'.join(common)} ({len(names)} layers)"


# ---- what the model says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Some tokens that came to layers with one input, and how many of all tokens each stands for."""

    x_TI: Tensor
    gradients: dict[str, Tensor]
    """Of log p at the outputs [T, O], by layer."""
    stands_for_T: Tensor


class _Evidence:
    """Inputs of layers, and the gradients of log p at their outputs, for some of the tokens that the model was run on.

    A few tokens in a thousand may cost more than all others together, and which those are depends on the layer. So many
    tokens are run, and each layer keeps those that may matter to it: with a chance that grows with |x| |g|.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        batches: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        on_step: OnStep,
    ) -> None:
        self._model = model
        self._layers = layers
        self._set_of = {name: names[0] for names in _given_one_input(list(layers)) for name in names}
        self._pieces: dict[str, list[_Piece]] = {}
        self._squares: dict[str, tuple[Tensor, int]] = {}
        used = _some_of(batches)
        total = sum(_tokens_of(batch) for batch in used)
        self._share = min(1.0, _KEPT / total)
        self._masks = Masks(model, used)
        self._of_words, self._of_tokens = (torch.Generator().manual_seed(seed) for _ in range(2))
        self.num_tokens = 0
        shown = 0
        with evaluating(model), without_cache(model), _without_gradients(model), self._masks.following():
            for number, batch in enumerate(used):
                on_step("gathering", f"batch {number + 1} of {len(used)}", shown, total)
                self._masks.enter(number)
                self._run(batch)
                shown += _tokens_of(batch)
                on_step("gathering", f"batch {number + 1} of {len(used)}", shown, total)

    def has_seen(self, name: str) -> bool:
        """Whether any token came to a layer."""
        return name in self._squares

    def pieces_of(self, names: Sequence[str]) -> list[_Piece]:
        """What is known of partners."""
        return self._pieces.get(self._set_of[names[0]], [])

    def input_of(self, name: str) -> Tensor:
        """Inputs of a layer [T, I]; zeros if no token came to it."""
        found = [piece.x_TI for piece in self.pieces_of([name]) if name in piece.gradients and len(piece.x_TI)]
        return (
            torch.cat(found) if found else self._layers[name].weight.detach().new_zeros(1, _width(self._layers[name]))
        )

    def leave_importance(self, name: str, module: nn.Module) -> None:
        """Leave what is known of all inputs of a layer on a copy of it."""
        if name in self._squares:
            sum_C, count = self._squares[name]
            leave_importance(module, sum_C, torch.tensor(count, device=sum_C.device))

    def forget(self, names: Sequence[str]) -> None:
        """Let go of what is known of some layers."""
        for name in names:
            self._pieces.pop(self._set_of[name], None)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _run(self, batch: Mapping[str, Any]) -> None:
        """One batch forwards and backwards."""
        calls: list[tuple[str, Tensor, Tensor]] = []  # layer, its input, its output
        with ExitStack() as stack, torch.enable_grad():
            for name, module in self._layers.items():
                stack.callback(module.register_forward_hook(_noting(name, calls), with_kwargs=True).remove)
            logits_BTV = getattr(self._model(**batch), "logits", None)
            if not isinstance(logits_BTV, Tensor) or logits_BTV.ndim != 3 or not logits_BTV.requires_grad:
                raise ModelError(
                    f"{type(self._model).__name__}: gives no logits of tokens that its layers have a part in, so what "
                    "layers lose cannot be measured. Give a language model."
                )
            log_p_TV = logits_BTV[_counted(batch, logits_BTV)].float().log_softmax(dim=-1)
            drawn_T = torch.multinomial(log_p_TV.detach().exp().cpu(), 1, generator=self._of_words)
            log_p = log_p_TV.gather(1, drawn_T.to(log_p_TV.device)).sum()
            gradients = torch.autograd.grad(log_p, [output for *_, output in calls], allow_unused=True)
        self.num_tokens += len(log_p_TV)
        together: dict[tuple[str, int], tuple[Tensor, dict[str, Tensor]]] = {}
        for (name, value, output), gradient in zip(calls, gradients, strict=True):
            rows = self._rows(value, self._layers[name])
            x_TI = value.detach().reshape(-1, value.shape[-1])[rows]
            if len(x_TI):
                self._add_squares(name, x_TI)
                given = torch.zeros_like(output) if gradient is None else gradient
                _, by_layer = together.setdefault((self._set_of[name], id(value)), (x_TI, {}))
                by_layer[name] = given.reshape(-1, given.shape[-1])[rows].float()
        for (first, _), (x_TI, by_layer) in together.items():
            self._pieces.setdefault(first, []).append(self._some_tokens(x_TI, by_layer))

    def _some_tokens(self, x_TI: Tensor, gradients: dict[str, Tensor]) -> _Piece:
        size_T = x_TI.float().square().sum(dim=-1) * sum(each.square().sum(dim=-1) for each in gradients.values())
        kept, stands_for_T = drawn_tokens(size_T.sqrt(), self._share, self._of_tokens)
        return _Piece(x_TI[kept], {name: each[kept] for name, each in gradients.items()}, stands_for_T)

    def _add_squares(self, name: str, x_TI: Tensor) -> None:
        sum_C, count = sum_squares(x_TI)
        known = self._squares.get(name)
        self._squares[name] = (sum_C, count) if known is None else (known[0] + sum_C, known[1] + count)

    def _rows(self, value: Tensor, module: nn.Module) -> Tensor:
        """Which of the tokens of a layer's input count."""
        mask = self._masks.of(value, module, "input")
        num_rows = value.numel() // value.shape[-1]
        return torch.arange(num_rows, device=value.device) if mask is None else mask.reshape(-1).nonzero()[:, 0]


def drawn_tokens(size_T: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which tokens are kept, and how many each of them stands for, so that sums over tokens are right on average.

    Half of the chances go by size, and half are equal, for who is wrong about sizes. With a share of 1 all are kept.
    """
    sizes_T = size_T.double().cpu()
    by_size_T = sizes_T / sizes_T.sum().clamp_min(1e-300)
    chance_T = (share * len(sizes_T) * (by_size_T + 1 / len(sizes_T)) / 2).clamp_max(1)
    chance_T = chance_T if share < 1 else torch.ones_like(chance_T)
    kept = (torch.rand(len(sizes_T), generator=generator, dtype=torch.float64) < chance_T).nonzero()[:, 0]
    return kept.to(size_T.device), (1 / chance_T[kept]).float().to(size_T.device)


def _noting(name: str, calls: list[tuple[str, Tensor, Tensor]]) -> Callable[..., Tensor | None]:
    """A hook that notes the input and the output of a layer, and makes the output one that has a gradient."""

    def note(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> Tensor | None:
        value = first_tensor((*args, *keywords.values()))
        assert value is not None
        is_first = not output.requires_grad
        output = output.detach().requires_grad_() if is_first else output
        calls.append((name, value, output))
        return output.clone() if is_first else None  # a copy, for who works in place on what it is given

    return note


def _width(module: nn.Linear) -> int:
    return int(module.weight.shape[1])


def _some_of(batches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first batches, of as many tokens as are needed."""
    used: list[Mapping[str, Any]] = []
    total = 0
    for batch in batches:
        if used and total + _tokens_of(batch) > _TOKENS:
            break
        used.append(batch)
        total += _tokens_of(batch)
    return used


def _tokens_of(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return max(1, int(mask.sum()))
    return max(1, ids.numel()) if isinstance(ids, Tensor) else 1


def _counted(batch: Mapping[str, Any], logits_BTV: Tensor) -> Tensor:
    """Which predictions count [B, T]: those at padding do not."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.shape == logits_BTV.shape[:2]:
            return mask.bool().to(logits_BTV.device)
    return torch.ones(logits_BTV.shape[:2], dtype=torch.bool, device=logits_BTV.device)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """While inside, no parameter asks for a gradient: those of activations are all that is wanted."""
    asking = [each for each in model.parameters() if each.requires_grad]
    for each in asking:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in asking:
            each.requires_grad_(True)


# ---- what schemes do -------------------------------------------------------------------------------------------------


class _Partners(nn.Module):
    """Copies of layers, each with an input of its own."""

    def forward(self, **inputs: Tensor) -> None:
        """Show each layer its input."""
        for name, layer in self.named_children():
            layer(inputs[name])


def _losses(
    layers: Mapping[str, nn.Linear], candidates: Mapping[str, QuantizationScheme], seen: _Evidence
) -> dict[str, float]:
    """About the KL for each token where some layers have a scheme, by scheme."""
    losses = dict.fromkeys(candidates, 0.0)
    for names in _given_one_input(list(layers)):
        for scheme_name, scheme in candidates.items():
            quantised = _quantised({each: layers[each] for each in names}, scheme, seen)
            total = 0.0
            for piece in seen.pieces_of(names):
                x_TI = piece.x_TI.float()
                slope_T = torch.zeros_like(x_TI[:, 0])
                for each, gradient_TO in piece.gradients.items():
                    bias = None if layers[each].bias is None else layers[each].bias.detach().float()
                    original_TO = nn.functional.linear(x_TI, layers[each].weight.detach().float(), bias)
                    slope_T += ((quantised[each](x_TI) - original_TO) * gradient_TO).sum(dim=-1)
                total += float((slope_T.double().abs() * piece.stands_for_T).sum())
            losses[scheme_name] += math.pi / 4 * (total / seen.num_tokens) ** 2
    return losses


def _given_one_input(names: Sequence[str]) -> list[list[str]]:
    """The layers of a group in sets that are given the same input: of experts, those of one expert."""
    sets: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parent, _, short = name.rpartition(".")
        sets.setdefault((parent, *next((each for each in FUSED_LAYER_NAMES if short in each), (short,))), []).append(
            name
        )
    return list(sets.values())


@torch.no_grad()
def _quantised(layers: Mapping[str, nn.Linear], scheme: QuantizationScheme, seen: _Evidence) -> dict[str, nn.Module]:
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
