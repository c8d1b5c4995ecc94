"""What is to be done to a model: which layers, by which pipeline, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor, nn

from scalewright.calibration.experts import put_back, unfuse_experts
from scalewright.calibration.loaders import (
    check_experts,
    check_stored_alone,
    check_zero_points,
    notes_on_dtype,
    settle_formats,
)
from scalewright.calibration.targets import (
    Pattern,
    check_layers,
    join_targets,
    largest_blocks,
    loader_targets,
    resolve_targets,
)
from scalewright.errors import DataError, ModelError, RecipeError
from scalewright.modifiers import GPTQModifier, Modifier, QuantizationModifier
from scalewright.modifiers.attention import WatchedAttention
from scalewright.modifiers.gptq_layer import GPTQLayer
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import bits_per_weight


@dataclass
class Plan:
    """What would be done to a model."""

    model: nn.Module
    layers: list[WatchedLayer]
    ignored: list[str]
    pipeline: str
    why: str
    blocks: list[str]
    notes: list[str]

    def tokens_per_batch(self) -> int:
        """How many tokens to run at a time: at most 1024 on a CPU, and so many that the widest input of a layer has
        2 M values.

        More would take memory and gain nothing there. Devices with memory of their own take 32 times as many.
        """
        weights = [each for layer in self.layers if isinstance(each := getattr(layer.module, "weight", None), Tensor)]
        on_cpu = all(each.device.type in ("cpu", "meta") for each in weights)
        widest = max((each.shape[-1] for each in weights), default=1024)
        return max(256, min(1024 if on_cpu else 8192, (1 << (21 if on_cpu else 26)) // widest))

    def bytes_before(self) -> int:
        """What the weights take as they are."""
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def bytes_of_layers(self) -> tuple[int, int]:
        """What the weights to be quantised take, before and, about, after."""
        before, after = 0, 0.0
        for layer in self.layers:
            if layer.scheme.weights is not None:
                weight = layer.weight
                bits = bits_per_weight(
                    layer.scheme.weights, weight.shape, layer.scheme.input_activations, dtype=weight.dtype
                )
                before += weight.numel() * weight.element_size()
                after += weight.numel() * bits / 8
        return before, round(after)


def bytes_after(plans: Sequence[Plan]) -> tuple[int, int]:
    """What the checkpoint of all stages will take, and the finished layers in it, about."""
    of_layers = [plan.bytes_of_layers() for plan in plans]
    before, after = (sum(each) for each in zip(*of_layers, strict=True))
    return plans[-1].bytes_before() - before + after, after


def largest_block(plans: Sequence[Plan]) -> int:
    """Bytes of the largest block that a pass goes through at a time; 0 if there are no blocks."""
    blocks = [plan.model.get_submodule(name) for plan in plans for name in plan.blocks]
    return max((sum(each.numel() * each.element_size() for each in block.parameters()) for block in blocks), default=0)


def make_plans(
    model: nn.Module,
    stages: Sequence[Sequence[Modifier]],
    *,
    pipeline: str = "auto",
    has_data: bool = False,
    blocks: str | Sequence[str] | None = None,
) -> list[Plan]:
    """The plans of all stages of a recipe, each given by its modifiers. What cannot be read back is said here."""
    done = next((name for name, module in model.named_modules() if is_module_quantized(module)), None)
    if done is not None:
        raise ModelError(f"{done}: is quantised already. Give the original model.")
    plans = [make_plan(model, each, pipeline=pipeline, has_data=has_data, blocks=blocks) for each in stages]
    names: set[str] = set()
    for plan in plans:
        twice = next((layer.name for layer in plan.layers if layer.name in names), None)
        if twice is not None:
            raise RecipeError(f"{twice}: two stages mean it, and it can be quantised once. Use ignore in one of them.")
        names |= {layer.name for layer in plan.layers}
    layers = [layer for plan in plans for layer in plan.layers]
    with_weights = [layer for layer in layers if layer.scheme.weights is not None]
    settle_formats(model, with_weights)
    check_zero_points(with_weights)
    check_stored_alone(model, with_weights)
    plans[-1].notes += [*check_experts(model, layers), *notes_on_dtype(layers)]
    return plans


def make_plan(
    model: nn.Module,
    modifiers: Sequence[Modifier],
    *,
    pipeline: str = "auto",
    has_data: bool = False,
    blocks: str | Sequence[str] | None = None,
) -> Plan:
    """Resolve modifiers on a model. Fused experts are taken apart, shared weights that are meant become own ones."""
    replaced, notes = unfuse_experts(model)
    meant = [each for each in modifiers if isinstance(each, QuantizationModifier)]
    if len(meant) < len(modifiers):
        other = next(each for each in modifiers if each not in meant)
        raise RecipeError(f"{type(other).__name__} cannot be run.")
    resolved = [resolve_targets(model, each) for each in meant]
    targets = join_targets(resolved)
    owners = {layer.name: owner for owner, own in zip(meant, resolved, strict=True) for layer in own.layers}
    check_layers(targets.layers)
    notes += targets.notes
    by_loader = loader_targets(targets)
    layers: list[WatchedLayer] = [
        _layer(
            owners[each.name], each.name, each.module, each.scheme.model_copy(update={"targets": by_loader[each.group]})
        )
        for each in targets.layers
    ]
    layers += [
        WatchedAttention(name, module, args, model=model, queries=queries)
        for name, module, args, queries in targets.attention
    ]
    put_back(model, replaced, (layer.name for layer in layers))
    if not layers:
        raise RecipeError(
            " ".join(["the recipe means no layer of this model. Name linear layers or embeddings in targets.", *notes])
        )
    notes += _untie(model, layers)
    notes += _rounded_to_the_nearest(owners, layers)
    found = _blocks(model, [layer.name for layer in layers], blocks)
    chosen, why = _pipeline(pipeline, meant, has_data, found)
    return Plan(model, layers, targets.ignored, chosen, why, found, notes)


def _layer(owner: QuantizationModifier, name: str, module: nn.Module, scheme: QuantizationScheme) -> WatchedLayer:
    if isinstance(owner, GPTQModifier) and isinstance(module, nn.Linear) and scheme.weights is not None:
        return GPTQLayer(name, module, scheme, owner.rounding)
    return WatchedLayer(name, module, scheme)


def _rounded_to_the_nearest(owners: Mapping[str, QuantizationModifier], layers: Sequence[WatchedLayer]) -> list[str]:
    """Say which layers have no inputs that could tell GPTQ what their errors cost."""
    names = [
        layer.name
        for layer in layers
        if isinstance(owners.get(layer.name), GPTQModifier)
        and layer.scheme.weights is not None
        and not isinstance(layer, GPTQLayer)
    ]
    return [f"{name}: picks rows by number, so GPTQ rounds its weight to the nearest." for name in names]


def _pipeline(
    asked: str, modifiers: Sequence[QuantizationModifier], has_data: bool, blocks: Sequence[str]
) -> tuple[str, str]:
    """Which pipeline, and why."""
    needs = {each.data for each in modifiers}
    rounding = next((type(each).__name__ for each in modifiers if isinstance(each, GPTQModifier)), None)
    if rounding is not None and not has_data:
        raise DataError(
            f"{rounding} rounds weights with their inputs in mind, which are found by watching data. Give a dataset, "
            "or do without: QuantizationModifier in a recipe, quality fast or balanced on the command line."
        )
    if rounding is not None and asked == "data_free":
        raise DataError(
            f"{rounding} rounds weights with their inputs in mind, so it cannot be run data_free. Use sequential, or "
            "leave the pipeline out."
        )
    if rounding is not None and asked == "auto":
        return "sequential", f"{rounding} rounds each layer for what the quantised layers before it really give it"
    if "needed" in needs and not has_data:
        raise DataError(
            "the recipe has static activation scales, which are found by watching data. Give a dataset, or use a "
            "scheme with dynamic activations."
        )
    if asked == "data_free" and "needed" in needs:
        raise DataError(
            "the recipe has static activation scales, so it cannot be run data_free. Leave the pipeline out, or make "
            "them dynamic."
        )
    if asked in ("basic", "sequential") and not has_data:
        raise DataError(f"the {asked} pipeline runs data through the model. Give a dataset.")
    if asked == "sequential" and not blocks and rounding is None:
        raise ModelError("no repeated blocks were found in this model. Name them in sequential_targets, or use basic.")
    if asked != "auto":
        return asked, "asked for"
    if needs == {"none"}:
        return "data_free", "weights are all there is to see"
    if not has_data:
        return "data_free", "no data was given, so errors of weights are not weighted by what they cost"
    reason = "static activation scales" if "needed" in needs else "the importance of input channels"
    return "basic", f"one pass over the data shows all that is needed: {reason}"


def _blocks(model: nn.Module, names: Sequence[str], given: str | Sequence[str] | None) -> list[str]:
    if given is None:
        return largest_blocks(model, names)
    patterns = [Pattern.of(each) for each in ([given] if isinstance(given, str) else given)]
    found = [
        name for name, module in model.named_modules() if name and any(each.means(name, module) for each in patterns)
    ]
    if not found:
        raise ModelError(f"sequential_targets: {given!r} matches no module. Name blocks by class, name or pattern.")
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _untie(model: nn.Module, layers: Sequence[WatchedLayer]) -> list[str]:
    """Give each layer that shares its weight with a module that is not to be quantised alike a weight of its own."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    notes = []
    for layer in layers:
        weight = getattr(layer.module, "weight", None)
        others = [name for name in owners.get(id(weight), []) if name != layer.name]
        if not isinstance(weight, nn.Parameter) or not others:
            continue
        owners[id(weight)].remove(layer.name)
        layer.module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        config = getattr(model, "config", None)
        for each in (config, getattr(config, "text_config", None)):
            if each is not None and hasattr(each, "tie_word_embeddings"):
                each.tie_word_embeddings = False
        if hasattr(model, "all_tied_weights_keys"):
            vars(model)["all_tied_weights_keys"] = {}
        notes.append(f"{layer.name}: shared its weight with {', '.join(others)}, and has its own now.")
    return notes
