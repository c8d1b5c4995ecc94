"""What those who read a checkpoint make of it: transformers with compressed-tensors, and vLLM.

Which forms they cannot read is asked before any work; by which names they find layers is settled when a checkpoint is
written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.modeling import IMPL_ATTR
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.quantization.utils import is_module_quantized
from compressed_tensors.utils import match_targets
from compressed_tensors.utils.match import is_match, is_narrow_match, match_name
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from scalewright.calibration.experts import UnfusedExperts, are_read_apart, is_fused, put_together
from scalewright.calibration.targets import QUANTIZABLE
from scalewright.errors import ModelError
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.numerics.layout import strategy_of

_WORD = 32

# ---- forms that cannot be read ---------------------------------------------------------------------------------------


def settle_formats(model: nn.Module, layers: Sequence[WatchedLayer]) -> None:
    """Say no to packed weights where transformers could not load them; integers of 8 bits are left unpacked there.

    Before transformers fills a model, it has the model initialise what the checkpoint may lack. The code for that is
    the architecture's own. T5's, for one, asks its layers for their weights, and a packed layer has none.
    """
    is_own = _sets_up_its_own_way(model)
    packed = {
        layer.name: layer
        for layer in layers
        if "pack" in layer.format.value and (is_own or not isinstance(layer.module, nn.Linear))
    }
    for name in _needed_unpacked(model, list(packed)):
        scheme = packed[name].scheme
        args = scheme.weights
        assert args is not None
        if (args.type, args.num_bits) != ("int", 8):
            raise ModelError(
                f"{name}: transformers cannot load packed weights here, because {type(model).__name__} asks for "
                "unpacked ones while it is set up. Use 8 bits (W8A16, W8A8, FP8_DYNAMIC), or ignore this layer."
            )
        scheme.format = CompressionFormat.int_quantized.value


def check_stored_alone(model: nn.Module, layers: Sequence[WatchedLayer]) -> None:
    """Say no to weights that keep their name in few bits, where checkpoints have several of them in one tensor."""
    plain = [layer for layer in layers if layer.format.value in _PLAIN]
    if not plain or not isinstance(model, PreTrainedModel):
        return
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, QUANTIZABLE)]
    known: Mapping[str, str] | None = None
    with suppress(Exception):  # if transformers cannot say it, there is nothing to be said
        known = renamed_in_checkpoints(model, names)
    for layer in plain:
        name = f"{layer.name}.weight"
        if known is not None and name in names and name not in known:
            raise ModelError(
                f"{layer.name}: checkpoints of {type(model).__name__} have its weight in one tensor with others, which "
                "takes no scales. Use a packed format (W4A16, W8A16), or ignore this layer."
            )


def check_zero_points(layers: Sequence[WatchedLayer]) -> None:
    """Say no to zero points that compressed-tensors packs and then cannot unpack: those of few rows, by its version."""
    for layer in layers:
        args, (rows, columns) = layer.scheme.weights, layer.weight.shape[-2:]
        if args is None or args.symmetric or layer.format != CompressionFormat.pack_quantized:
            continue
        if strategy_of(args) != "group" or rows * args.num_bits > _WORD:
            continue
        if not _can_unpack(args.num_bits, rows, -(-columns // args.group_size)):
            raise ModelError(
                f"{layer.name}: compressed-tensors cannot unpack zero points of {args.num_bits} bits for "
                f"{rows} {'row' if rows == 1 else 'rows'}, but for {_WORD // args.num_bits + 1} and more. Give this "
                "layer a symmetric scheme, or ignore it."
            )


@cache
def _can_unpack(num_bits: int, rows: int, groups: int) -> bool:
    try:
        unpack_from_int32(torch.zeros(1, groups, dtype=torch.int32), num_bits, torch.Size((rows, groups)), packed_dim=0)
    except RuntimeError:
        return False
    return True


def _sets_up_its_own_way(model: nn.Module) -> bool:
    """Whether any part of a model has code of its own for that; transformers' does without the weights of Linears."""
    parts = {type(each) for each in model.modules() if isinstance(each, PreTrainedModel)}
    return any(each._init_weights is not PreTrainedModel._init_weights for each in parts)


def _needed_unpacked(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Those of the layers without whose weights an empty model cannot be set up."""
    empty = _empty(model) if names else None
    found = {} if empty is None else dict(empty.named_modules())
    needed = []
    for name in names:
        weight = None if name not in found else found[name]._parameters.pop("weight", None)
        if weight is not None:
            if not all(_can_be_set_up(found, each) for each in _with_what_is_around(name)):
                needed.append(name)
            found[name].register_parameter("weight", weight)
    return needed


def _can_be_set_up(modules: Mapping[str, nn.Module], name: str) -> bool:
    owners = (modules[each] for each in _with_what_is_around(name))
    owner: Any = next(each for each in owners if isinstance(each, PreTrainedModel))
    try:
        owner._init_weights(modules[name])
    except AttributeError:
        return False
    return True


def _with_what_is_around(name: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`, and the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _empty(model: nn.Module) -> nn.Module | None:
    """The model without weights, as transformers builds it; none if it cannot be built of its configuration alone."""
    if isinstance(model, PreTrainedModel):
        # Whatever goes wrong here is no reason not to quantise the model.
        with suppress(Exception), torch.device("meta"):
            return type(model)(deepcopy(model.config))
    return None


# ---- names -----------------------------------------------------------------------------------------------------------


def settle_names(model: nn.Module, config: QuantizationConfig) -> None:
    """Make `config` say to loaders what is quantised in `model` and how, where it would be read differently.

    compressed-tensors matches names of modules, and vLLM those of the checkpoint, which may be others. Layers that
    would be taken by mistake are ignored by name; where one would get a scheme that it does not have, or none, targets
    are names alone.
    """
    own = _own_groups(model, config)
    stored = _names_in_checkpoints(model)
    ignore = list(config.ignore or ())
    for names in ({}, stored):
        ignore += [names.get(each, each) for each in groups_read(model, config, names) if each not in own]
    config.ignore = list(dict.fromkeys(ignore))
    layers = {name: group for name, group in own.items() if name in stored}
    if groups_read(model, config, {}) != own or groups_read(model, config, stored) != layers:
        _name_all(model, config, own, stored)
    _settle_experts(model, config, own, stored)


def _own_groups(model: nn.Module, config: QuantizationConfig) -> dict[str, str]:
    """The group of each quantised module."""
    return {
        name: group
        for name, module in model.named_modules(remove_duplicate=False)
        if is_module_quantized(module) and (hasattr(module, IMPL_ATTR) or not is_cached_attention_module(module))
        for group, scheme in config.config_groups.items()
        if scheme == module.quantization_scheme
    }


def groups_read(model: nn.Module, config: QuantizationConfig, names: Mapping[str, str]) -> dict[str, str]:
    """The group that loaders would give to each module, by its own name; `names` are those that they see instead.

    With other names only layers are looked at.
    """
    schemes = _schemes(config)
    owners = {target: group for group, scheme in schemes.items() for target in scheme.targets}  # the last one counts
    read = {}
    for name, module in model.named_modules(remove_duplicate=False):  # what is there twice is stored twice
        seen = names.get(name, name)
        is_layer = isinstance(module, QUANTIZABLE)
        if not (is_layer or (not names and is_cached_attention_module(module))):
            continue
        if is_match(seen, module, list(owners), config.ignore or ()):
            group = owners[match_targets(seen, module, list(owners))[0]]
            if is_layer or is_narrow_match(model, schemes[group].targets, name):
                read[name] = group
    return read


def _name_all(model: nn.Module, config: QuantizationConfig, own: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Make the names of modules, in memory and in the checkpoint, the targets of all groups.

    Experts are many, and have a pattern if they are of one group. It is the one that transformers looks for, too.
    """
    lists = _fused_by_transformers(model)
    patterns = sorted({f"re:.*\\.{re.escape(name.rpartition('.')[2])}\\.\\d+\\..*" for name in lists})
    experts = {name for name in own if any(match_name(name, each) for each in patterns)}
    if len({own[name] for name in experts}) > 1:
        experts = set()
    for group, scheme in _schemes(config).items():
        names = [name for name in own if own[name] == group and name not in experts]
        targets = [*names, *(stored.get(name, name) for name in names)]
        if any(own[name] == group for name in experts):
            targets += patterns
        config.config_groups[group] = scheme.model_copy(update={"targets": list(dict.fromkeys(targets))})


def _schemes(config: QuantizationConfig) -> dict[str, QuantizationScheme]:
    return {group: each for group, each in config.config_groups.items() if isinstance(each, QuantizationScheme)}


def _names_in_checkpoints(model: nn.Module) -> dict[str, str]:
    """What the linear layers and embeddings of a model are called in its checkpoints."""
    every = model.named_modules(remove_duplicate=False)
    names = [name for name, module in every if isinstance(module, QUANTIZABLE)]
    found = {name: name for name in names}
    if isinstance(model, PreTrainedModel):
        with suppress(Exception):
            for name, stored in renamed_in_checkpoints(model, [f"{name}.weight" for name in names]).items():
                if stored.endswith(".weight"):
                    found[name.removesuffix(".weight")] = stored.removesuffix(".weight")
    return found


def renamed_in_checkpoints(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The names in checkpoints of those tensors of a model that are just called otherwise there.

    Tensors that are stored in one with others, or in pieces, are left out.
    """
    first = len(names) + 2  # pieces of a mark are shorter than any, and several in one are longer
    marks = {name: torch.empty(first + i, 0, 1, 1, 1, 1, device="meta") for i, name in enumerate(names)}
    found = {}
    for stored, mark in revert_weight_conversion(model, marks).items():
        if mark.ndim == 6 and mark.shape[1] == 0 and first <= len(mark) < first + len(names):
            found[names[len(mark) - first]] = stored
    return found


# ---- experts ---------------------------------------------------------------------------------------------------------

_PLAIN = (
    CompressionFormat.int_quantized.value,
    CompressionFormat.float_quantized.value,
    CompressionFormat.naive_quantized.value,
)


def _settle_experts(
    model: nn.Module, config: QuantizationConfig, own: Mapping[str, str], stored: Mapping[str, str]
) -> None:
    """Make transformers read all experts by the scheme that they have, and what else it puts together as it is.

    It keeps the experts of a layer in one tensor, so it restores their weights while it loads them, all by the scheme
    of one group: the first one with a pattern that has the word `experts` in it, else the first one that has a target
    which is no pattern. If that is packed, it finds packed ones alone. If it is FP8, it finds weights as they are,
    and multiplies those that come with a scale by it; so that is what integers of 8 bits need, too. A group for that
    has a pattern which means nothing.
    """
    lists = _fused_by_transformers(model)
    fused = [name for name, module in model.named_modules() if is_fused(module)]
    groups = list(dict.fromkeys(group for name, group in own.items() if any(name.startswith(f"{x}.") for x in lists)))
    schemes = _schemes(config)
    if not schemes or not (groups or fused or put_together(model)):
        return
    config.ignore = [*(config.ignore or ()), *_ignored_experts(fused, own)]
    chosen = _group_of_experts(schemes)
    if not groups or schemes[groups[0]].format in _PLAIN:
        if not _is_fp8(schemes[chosen].weights):
            by_multiplying = scheme_named("FP8_DYNAMIC", ["re:(?!)experts"])
            by_multiplying.format = CompressionFormat.float_quantized.value
            config.config_groups = {"experts_of_transformers": by_multiplying, **config.config_groups}
    elif chosen != groups[0]:
        _name_all(model, config, own, stored)


def _ignored_experts(fused: Sequence[str], own: Mapping[str, str]) -> list[str]:
    """Patterns for experts that are not quantised: they are no layers here, but vLLM knows them as such."""
    short = {f"re:.*\\.{re.escape(name.rpartition('.')[2])}\\..*" for name in fused}
    if not any(match_name(name, each) for name in own for each in short):
        return sorted(short)
    return [f"re:{re.escape(name)}\\..*" for name in fused]


def _group_of_experts(schemes: Mapping[str, QuantizationScheme]) -> str:
    """The group that transformers takes to be that of the experts."""
    patterns = [group for group, each in schemes.items() if any(_means_experts(target) for target in each.targets)]
    others = [group for group, each in schemes.items() if not all(x.startswith("re:") for x in each.targets)]
    return (patterns + others + list(schemes))[0]


def _means_experts(target: str) -> bool:
    return target.startswith("re:") and "experts" in target


def _is_fp8(args: QuantizationArgs | None) -> bool:
    return args is not None and (args.type, args.num_bits) == ("float", 8)


def _fused_by_transformers(model: nn.Module) -> list[str]:
    """Experts that are single layers here, and one tensor in transformers."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, UnfusedExperts) and not module.are_linear_in_transformers
    ]


def check_experts(model: nn.Module, layers: Sequence[WatchedLayer]) -> list[str]:
    """Say no to experts that no loader can read; notes on those that only vLLM can."""
    schemes = {layer.name: layer.scheme for layer in layers}
    kinds: dict[str, QuantizationScheme | None] = {}
    lists = _fused_by_transformers(model)
    for name, module in model.named_modules():
        if isinstance(module, UnfusedExperts) and name in lists:
            kinds[name] = _scheme_of_all(name, module, schemes)
        elif is_fused(module):
            kinds[name] = None
    taken = {name: scheme for name, scheme in kinds.items() if scheme is not None}
    if not taken:
        return []
    first, scheme = next(iter(taken.items()))
    where = f"{first} and {len(taken) - 1} more" if len(taken) > 1 else first
    other = next((name for name, each in kinds.items() if each is None or not _is_alike(each, scheme)), None)
    if other is not None:
        return [
            f"{other}: its experts have another scheme than those of {first}, or none. vLLM reads that, transformers "
            "has one scheme for all experts. For transformers treat all experts alike."
        ]
    if isinstance(model, PreTrainedModel) and not are_read_apart(model):
        return [
            f"{where}: transformers does not read single experts of {type(model).__name__}, because it has all of a "
            "layer in one tensor in its checkpoints, too. Ignore them, unless they are for vLLM."
        ]
    why = _unreadable(scheme)
    if why is not None:
        return [
            f"{where}: vLLM reads such experts, transformers does not: {why}. For transformers use W4A16, W8A16 or "
            "FP8_DYNAMIC."
        ]
    joined = put_together(model)
    if joined is not None and scheme.format not in _PLAIN:
        return [
            f"{where}: vLLM reads such experts beside {joined}, transformers does not: it looks for packed weights "
            "wherever it puts several together. For transformers use FP8_DYNAMIC, or ignore the experts."
        ]
    inputs = scheme.input_activations
    if inputs is None:
        return []
    scales = "" if inputs.dynamic else ", and finds their scales unexpected"
    return [f"{where}: vLLM quantises the activations of experts, transformers leaves them as they are{scales}."]


def _scheme_of_all(
    name: str, experts: UnfusedExperts, schemes: Mapping[str, QuantizationScheme]
) -> QuantizationScheme | None:
    """The scheme of the experts of a layer."""
    inside = [f"{name}.{each}" for each, module in experts.named_modules() if isinstance(module, nn.Linear)]
    first = next((each for each in inside if each in schemes), None)
    if first is None:
        return None
    for each in inside:
        if each not in schemes or not _is_alike(schemes[each], schemes[first]):
            raise ModelError(
                f"{each}: would be stored in another way than {first}, and loaders know one for all experts of a "
                "layer. Treat them alike."
            )
    inputs = schemes[first].input_activations
    if inputs is not None and inputs.type == "int" and not inputs.dynamic:
        raise ModelError(
            f"{first}: vLLM has no experts with static INT8 activations, and transformers leaves activations of "
            "experts as they are. Use W8A8_DYNAMIC."
        )
    return schemes[first]


def _is_alike(one: QuantizationScheme, other: QuantizationScheme) -> bool:
    return bool(one.model_copy(update={"targets": []}) == other.model_copy(update={"targets": []}))


def _unreadable(scheme: QuantizationScheme) -> str | None:
    """Why transformers cannot restore the weights of experts, if so."""
    args = scheme.weights
    assert args is not None
    if not args.symmetric:
        return "it has no place for their zero points"
    if args.strategy == "tensor_group":
        return "it has no place for their global scales"
    if scheme.format in (*_PLAIN, CompressionFormat.mxfp8_quantized.value) and args.strategy in ("group", "block"):
        return "it has one scale for each row of theirs, and not several"
    return None


def notes_on_dtype(layers: Sequence[WatchedLayer]) -> list[str]:
    """A note if loaders will find the weights in another dtype than the rest of the model.

    compressed-tensors restores what has e4m3 or e8m0 scales, NVFP4 and the MX formats, in bf16 whatever it was before.
    transformers then fails at the first matrix product of a model that is not in bf16.
    """
    for layer in layers:
        args = layer.scheme.weights
        if args is not None and args.scale_dtype is not None and layer.weight.dtype != torch.bfloat16:
            return [
                "dtype: transformers restores NVFP4 and MX weights in bfloat16, and this model is in "
                f"{str(layer.weight.dtype).removeprefix('torch.')}. "
                "Load the checkpoint with dtype=torch.bfloat16, or quantise it in bfloat16."
            ]
    return []
