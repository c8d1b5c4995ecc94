"""Which layers of a checkpoint are quantised and how, and by which names its tensors are found.

The model is built without weights and asked by the rules of loaders, which are compressed-tensors'. Where there is no
class to build (a hand-written module, code that came with a model), the names in the files have to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.utils.match import match_name
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from scalewright.calibration.experts import put_back, unfuse_experts
from scalewright.calibration.loaders import groups_read, renamed_in_checkpoints
from scalewright.calibration.targets import QUANTIZABLE
from scalewright.checkpoint.classes import class_called, is_model_of
from scalewright.checkpoint.folder import CONFIG, Folder, Recorded, first_line, read_tensor, too_many_parts
from scalewright.checkpoint.formats import Stored, states_tensors, stored_tensors
from scalewright.checkpoint.loading import in_silence
from scalewright.checkpoint.problems import Problem

KV_CACHE = "kv_cache_scheme"
_STATES = ("q", "k", "v")
_QUANTISED = re.compile(
    r"(weight_(packed|scale|shape|zero_point|global_scale)|(input|output)_(scale|zero_point|global_scale)|"
    r"[qkv]_(scale|zero_point|global_scale))"
)


@dataclass(frozen=True)
class Layer:
    """A quantised layer, or an attention module whose states are quantised."""

    name: str
    """In the model."""
    group: str
    scheme: QuantizationScheme
    stored_as: str
    shape: tuple[int, ...]
    """Of the weight; empty for attention."""
    tensors: Mapping[str, Stored]
    """What should be stored of it, by names within the layer."""
    places: Mapping[str, str]
    """The same names, and those in the files."""


@dataclass(frozen=True)
class Other:
    """A tensor that stays as it was."""

    shape: tuple[int, ...] | None
    """None if it is not known."""
    is_parameter: bool


@dataclass
class Structure:
    """What a checkpoint should have."""

    layers: list[Layer] = field(default_factory=list)
    others: dict[str, Other] = field(default_factory=dict)
    ties: list[set[str]] = field(default_factory=list)
    """Names that stand for one tensor."""
    spare: Sequence[str] = ()
    """Patterns of names that may be there or not."""
    is_complete: bool = True
    """Whether all that is missing or too much is known."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def may_be_spared(self, name: str) -> bool:
        """Whether loaders do without it."""
        return any(re.search(each, name) for each in self.spare)


def structure_of(
    folder: Folder, config: Mapping[str, Any], quantization: QuantizationConfig, record: Mapping[str, Recorded]
) -> Structure:
    """What the files of `folder` should hold, by its configuration, and by its record where that does not suffice."""
    model, why, is_known = built_model(folder, config)
    if model is not None:
        structure = _by_model(folder, model, quantization)
        if structure is not None:
            return structure
        why = "its tensors have other names"
    structure = _by_names(folder, quantization, record)
    if is_known:
        structure.problems.append(Problem(CONFIG, f"no model can be built of it ({why})."))
    structure.notes.append(f"{CONFIG}: no model was built of it ({why}), so layers are those that the names tell.")
    return structure


def is_quantised_name(name: str) -> bool:
    """Whether a tensor of that name belongs to a quantised layer."""
    return _QUANTISED.fullmatch(name.rpartition(".")[2]) is not None


def ties_of(folder: Folder, config: Mapping[str, Any]) -> list[set[str]]:
    """Names that stand for one tensor in a model that is not quantised; none if it cannot be built."""
    model, _, _ = built_model(folder, config)
    if model is None:
        return []
    state: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    detached = {name: each.detach() for name, each in state.items()}
    names = _names_in_files(model, detached, [], folder.tensors.keys())
    places = {} if names is None else names[1]
    return [{places.get(each, each) for each in tie} for tie in _ties(model, state)]


def names_in_files(folder: Folder, config: Mapping[str, Any], layers: Sequence[str]) -> dict[str, str]:
    """What quantised layers are called in the files, by their names in the model; empty if that cannot be told."""
    model, _, _ = built_model(folder, config)
    if model is None:
        return {}
    unfuse_experts(model)
    marked = [f"{name}.weight_scale" for name in layers]
    names = _names_in_files(model, {}, marked, folder.tensors.keys())
    return {} if names is None else {name: names[1][f"{name}.weight_scale"].rpartition(".")[0] for name in layers}


# ---- by the model ----------------------------------------------------------------------------------------------------


def built_model(folder: Folder, config: Mapping[str, Any]) -> tuple[nn.Module | None, str, bool]:
    """The model without weights; or None, why, and whether transformers should have been able to build it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        return None, "it names no architecture of transformers", False
    many = too_many_parts(config, len(folder.tensors))
    if many is not None:
        return None, many, True
    try:
        with in_silence():
            build = _model_class(config)
            if build is None:
                return None, "its class is none of transformers'", False
            parsed = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
            if hasattr(parsed, "quantization_config"):
                del parsed.quantization_config
            if isinstance(build, type) and not is_model_of(build, parsed):
                return None, f"{build.__name__} is no model of the type '{kind}'", True
            with torch.device("meta"):
                return build(parsed), "", True
    except Exception as error:  # whatever the configuration is made of, transformers stumbles over it in its own way
        return None, first_line(error), True


def _model_class(config: Mapping[str, Any]) -> Any:
    """What builds the model that a configuration speaks of; None if its code came with it, or is somebody's own."""
    names = config.get("architectures")
    if "auto_map" in config or not isinstance(names, list | None):
        return None
    if not names:
        return transformers.AutoModelForCausalLM.from_config
    return class_called(names[0])


def _by_model(folder: Folder, model: nn.Module, quantization: QuantizationConfig) -> Structure | None:
    """None if hardly a name of the model is that of a tensor in the files."""
    replaced, _ = unfuse_experts(model)
    groups = groups_read(model, quantization, {})
    put_back(model, replaced, groups)
    structure = Structure()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    ties = _ties(model, kept)
    state = {name: each.detach() for name, each in kept.items()}
    described: list[tuple[str, str, QuantizationScheme, str, tuple[int, ...], dict[str, Stored]]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        found = _described(model, name, module, groups.get(name), quantization, structure)
        if found is None:
            continue
        described.append((name, *found))
        state.pop(f"{name}.weight", None)
        if isinstance(module, QUANTIZABLE):
            # compressed-tensors makes parameters of them, which transformers then misses if they are not stored.
            state |= {f"{name}.{buffer}": each.detach() for buffer, each in module.named_buffers(recurse=False)}
    places = [f"{name}.{local}" for name, *_, tensors in described for local in tensors]
    names = _names_in_files(model, state, places, folder.tensors.keys())
    if names is None:
        return None
    others, found_places = names
    structure.others = {
        name: Other(tuple(each.shape), sources <= parameters) for name, (each, sources) in others.items()
    }
    structure.ties = [{found_places.get(each, each) for each in tie} for tie in ties]
    for name, group, scheme, stored_as, shape, tensors in described:
        own = {local: found_places[f"{name}.{local}"] for local in tensors}
        structure.layers.append(Layer(name, group, scheme, stored_as, shape, tensors, own))
    for when in ("on_save", "on_load_missing", "on_load_unexpected"):
        structure.spare = [*structure.spare, *(getattr(model, f"_keys_to_ignore_{when}", None) or ())]
    return structure


def _described(
    model: nn.Module,
    name: str,
    module: nn.Module,
    group: str | None,
    quantization: QuantizationConfig,
    structure: Structure,
) -> tuple[str, QuantizationScheme, str, tuple[int, ...], dict[str, Stored]] | None:
    """Group, scheme, format, shape of the weight, and tensors of a module that is quantised."""
    try:
        if is_cached_attention_module(module):
            args = quantization.kv_cache_scheme
            if group is not None:
                args = quantization.config_groups[group].input_activations
            if args is None:
                return None
            heads = _heads(model, _STATES if group is not None else _STATES[1:])
            scheme = QuantizationScheme(targets=[], input_activations=args)
            return group or KV_CACHE, scheme, CompressionFormat.dense.value, (), states_tensors(args, heads)
        if group is None or not isinstance(module, QUANTIZABLE):
            return None
        scheme = quantization.config_groups[group]
        stored_as = format_of(scheme, quantization)
        shape = tuple(module.weight.shape)
        return group, scheme, stored_as, shape, stored_tensors(scheme, stored_as, shape)
    except ValueError as error:
        structure.problems.append(Problem(name, f"{first_line(error)}, as {group or KV_CACHE} of {CONFIG} asks for."))
        return None


def format_of(scheme: QuantizationScheme, quantization: QuantizationConfig) -> str:
    """How the layers of a group are stored."""
    if scheme.weights is None:
        return str(CompressionFormat.dense.value)
    return str(CompressionFormat(scheme.format or quantization.format).value)


def _heads(model: nn.Module, base_names: Sequence[str]) -> dict[str, int | None]:
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    names = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
    return {each: getattr(config, names[each], None) for each in base_names}


def _ties(model: nn.Module, kept: Mapping[str, Tensor]) -> list[set[str]]:
    """Names in the model that stand for one tensor."""
    by_id: dict[int, set[str]] = {}
    for name, each in kept.items():
        by_id.setdefault(id(each), set()).add(name)
    ties = [names for names in by_id.values() if len(names) > 1]
    said: Any = getattr(model, "all_tied_weights_keys", None)
    pairs = [{one, other} for one, other in said.items()] if isinstance(said, Mapping) else []
    return ties + [pair for pair in pairs if not any(pair <= tie for tie in ties)]


# ---- names -----------------------------------------------------------------------------------------------------------

_Others = dict[str, tuple[Tensor, set[str]]]


def _names_in_files(
    model: nn.Module, state: Mapping[str, Tensor], marked: Sequence[str], stored: Iterable[str]
) -> tuple[_Others, dict[str, str]] | None:
    """What a model's tensors are called in its checkpoints: all but the marked ones with the names that they come
    from, and the names of the marked ones.

    A checkpoint has the names of its architecture's, those of an earlier time, or those of the model; whatever fits the
    files best is taken, and nothing if that is less than half.
    """
    stored = set(stored)
    best: tuple[_Others, dict[str, str]] | None = None
    most = -1
    for renamed in _renamings(model, state, marked):
        others, places = renamed
        count = len(stored & {*others, *places.values()})
        if count > most:
            most, best = count, renamed
        if count == len(stored):
            break
    if best is None or 2 * most < min(len(stored), len(best[0]) + len(marked)):
        return None
    return best


def _renamings(
    model: nn.Module, state: Mapping[str, Tensor], marked: Sequence[str]
) -> Iterator[tuple[_Others, dict[str, str]]]:
    plain = {name: (each, {name}) for name, each in state.items()}
    if isinstance(model, transformers.PreTrainedModel):
        for is_old in (False, True):
            with suppress(Exception):  # if transformers cannot say it, the model's own names have to do
                if is_old:
                    vars(model)["_weight_conversions"] = get_model_conversion_mapping(model)
                places = renamed_in_checkpoints(model, [*marked, *state])
                reverted = revert_weight_conversion(model, dict(state))
                sources = {places.get(name, name): {name} for name in state}
                # What was made of several, or cut from one, is a parameter.
                others = {name: (each, sources.get(name, set())) for name, each in reverted.items()}
                if all(name in places for name in marked):
                    yield others, places
    yield plain, {name: name for name in [*marked, *state]}


# ---- by the names ----------------------------------------------------------------------------------------------------


def _by_names(folder: Folder, quantization: QuantizationConfig, record: Mapping[str, Recorded]) -> Structure:
    """What can be told without a model: a layer is what has tensors of a quantised one, or what the record lists."""
    structure = Structure(is_complete=False)
    owned: dict[str, set[str]] = {name: set() for name in record}
    for name in folder.tensors:
        prefix, _, local = name.rpartition(".")
        if is_quantised_name(name) or prefix in owned:
            owned.setdefault(prefix, set()).add(local)
    for prefix, locals_ in owned.items():
        shape = record[prefix].shape if prefix in record else None
        layer = _layer_by_names(folder, prefix, locals_, shape, quantization, structure)
        if layer is not None:
            structure.layers.append(layer)
    taken = {name for layer in structure.layers for name in layer.places.values()}
    structure.others = {
        name: Other(None, name.endswith((".weight", ".bias"))) for name in folder.tensors if name not in taken
    }
    return structure


def _layer_by_names(
    folder: Folder,
    prefix: str,
    locals_: set[str],
    shape: tuple[int, ...] | None,
    quantization: QuantizationConfig,
    structure: Structure,
) -> Layer | None:
    states = [each for each in _STATES if f"{each}_scale" in locals_]
    try:
        if states or shape == ():
            group = _group_by_name(prefix, quantization) if "q" in states else None
            args = quantization.kv_cache_scheme
            args = args if group is None else quantization.config_groups[group].input_activations
            if args is None:
                structure.problems.append(
                    Problem(prefix, f"has scales of keys and values, and {CONFIG} none for them.")
                )
                return None
            heads: dict[str, int | None] = {}
            for each in _STATES if "q" in states else _STATES[1:]:
                at = folder.tensors.get(f"{prefix}.{each}_scale")
                heads[each] = at.shape[0] if at is not None and at.shape else 1
            tensors = states_tensors(args, heads)
            scheme = QuantizationScheme(targets=[], input_activations=args)
            places = {local: f"{prefix}.{local}" for local in tensors}
            return Layer(prefix, group or KV_CACHE, scheme, CompressionFormat.dense.value, (), tensors, places)
        group = _group_by_name(prefix, quantization)
        if group is None:
            structure.problems.append(
                Problem(prefix, f"has tensors of a quantised layer, and no group of {CONFIG} has it.")
            )
            return None
        scheme = quantization.config_groups[group]
        stored_as = format_of(scheme, quantization)
        shape = shape or _shape_by_tensors(folder, prefix, scheme)
        if shape is None or len(shape) != 2:
            structure.problems.append(Problem(prefix, "has no tensor that tells the shape of its weight."))
            return None
        tensors = stored_tensors(scheme, stored_as, shape)
    except ValueError as error:
        structure.problems.append(Problem(prefix, f"{first_line(error)}, as {CONFIG} asks for."))
        return None
    places = {local: f"{prefix}.{local}" for local in tensors}
    return Layer(prefix, group, scheme, stored_as, shape, tensors, places)


def _group_by_name(name: str, quantization: QuantizationConfig) -> str | None:
    """The group of a layer of unknown class: one that names it, or one that names a class."""
    if any(match_name(name, each) for each in quantization.ignore or ()):
        return None
    groups: Mapping[str, QuantizationScheme] = quantization.config_groups
    named = [group for group, each in groups.items() if any(match_name(name, target) for target in each.targets)]
    classes = [group for group, each in groups.items() if any(target.isidentifier() for target in each.targets)]
    return next(iter([*named, *classes]), None)


def _shape_by_tensors(folder: Folder, prefix: str, scheme: QuantizationScheme) -> tuple[int, ...] | None:
    at = folder.tensors.get(f"{prefix}.weight_shape")
    if at is not None and at.shape == (2,) and at.dtype == "I64":
        rows, columns = read_tensor(at).tolist()
        return (rows, columns) if rows > 0 and columns > 0 else None
    at = folder.tensors.get(f"{prefix}.weight")
    if at is not None:
        return at.shape
    at = folder.tensors.get(f"{prefix}.weight_packed")
    if at is None or len(at.shape) != 2 or scheme.weights is None:
        return None
    return (at.shape[0], at.shape[1] * (32 if at.dtype == "I32" else 8) // int(scheme.weights.num_bits))
