"""What is known of a checkpoint: what its run has left beside it, and what its files tell.

Everything here was written by a program, maybe another one or an older one of ours: what is missing, or is not what it
should be, is left out. Only a folder that holds no quantised checkpoint is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from scalewright.checkpoint import folder as checkpoint
from scalewright.checkpoint.structure import names_in_files
from scalewright.errors import ModelError
from scalewright.report.files import EVALUATION_FILE, PICTURES_FILE, RUN_FILE, TIMINGS_FILE
from scalewright.report.places import Place, places_of

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_FIGURES = ("weight_db", "gain_db", "output_db", "dynamic_db", "above_optimum")
_COMPENSATING = "GPTQModifier"
_LARGEST = 1e9  # stands for infinity, which JSON does not have


@dataclass(frozen=True)
class Layer:
    """A quantised layer. Figures are None where they are not known."""

    name: str
    place: Place
    weights: str
    activations: str
    observers: Mapping[str, str]
    shape: tuple[int, ...]
    bits: float | None
    """What a weight takes in the checkpoint, its share of scales included."""
    weight_db: float | None = None
    gain_db: float | None = None
    output_db: float | None = None
    dynamic_db: float | None = None
    above_optimum: float | None = None
    num_tokens: int | None = None
    is_compensated: bool = False
    """Whether its columns make up for each other's errors (GPTQ): its weight keeps less then, and its output more."""
    pictures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quality_db(self) -> float | None:
        """What the layer keeps, as far as it is known: of its output, or else of its weight."""
        return self.weight_db if self.output_db is None else self.output_db


@dataclass(frozen=True)
class Findings:
    """All that is known of a checkpoint."""

    name: str
    architecture: str
    layers: list[Layer]
    notes: list[str]
    bytes_before: int | None
    bytes_after: int
    bits: float | None
    """Bits for each weight of the quantised layers."""
    bits_of_all: float | None
    """Bits for each parameter of the model."""
    has_run: bool
    """Whether a run of ours has left its figures."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Pipeline, samples, tokens, seed, versions: whatever there is."""
    recipe: str = ""
    seconds: Mapping[str, float] | None = None
    evaluation: Mapping[str, Any] | None = None

    def worst(self, count: int) -> list[Layer]:
        """The layers that keep least, the worst first."""
        known = [(each.quality_db, number) for number, each in enumerate(self.layers) if each.quality_db is not None]
        return [self.layers[number] for _, number in sorted(known)[:count]]


def read_folder(
    folder: Path, *, seconds: Mapping[str, float] | None = None, evaluation: Mapping[str, Any] | None = None
) -> Findings:
    """What is known of the checkpoint in a folder; `seconds` by phase, where they are known, and what `eval` found."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: is no folder. Give one that `quantize` has written.")
    run, pictures = _object_in(folder / RUN_FILE), _object_in(folder / PICTURES_FILE) or {}
    config = _object_in(folder / "config.json") or {}
    stored = _modules_in(folder)
    if run is None and not isinstance(config.get("quantization_config"), dict):
        raise ModelError(
            f"{folder}: has neither {RUN_FILE} nor a quantization_config in config.json, so it is no quantised "
            "checkpoint. Give a folder that `quantize` has written."
        )
    rows = [each for each in _list(run, "layers") if isinstance(each, dict) and isinstance(each.get("name"), str)]
    if run is None:
        rows = [{"name": name, "shape": module.shape} for name, module in stored.items() if module.is_quantised]
    places = places_of(row["name"] for row in rows)
    of_layers = _by_layers(folder, config, stored, list(places))
    is_compensated = _has_modifier(run, _COMPENSATING)
    kept = seconds if seconds is not None else _object_in(folder / TIMINGS_FILE)
    architectures = _list(config, "architectures")
    few = [module for module in stored.values() if module.is_quantised and module.num_weights]
    num_weights, num_bytes = sum(each.num_weights for each in few), sum(each.num_bytes for each in few)
    of_all = [sum(each.num_weights for each in stored.values()), sum(each.num_bytes for each in stored.values())]
    return Findings(
        folder.resolve().name,
        str(architectures[0]) if architectures else "",
        [_layer(row, places, of_layers, pictures, is_compensated=is_compensated) for row in rows],
        [str(each) for each in _list(run, "notes")],
        _whole((run or {}).get("bytes_before")),
        sum(module.num_bytes for module in stored.values()),
        8 * num_bytes / num_weights if num_weights else None,
        8 * of_all[1] / of_all[0] if of_all[0] else None,
        run is not None,
        {} if run is None else run,
        _recipe(folder, run),
        None
        if kept is None
        else {str(key): found for key, value in kept.items() if (found := _number(value)) is not None},
        evaluation if evaluation is not None else _object_in(folder / EVALUATION_FILE),
    )


# ---- the files of a run ----------------------------------------------------------------------------------------------


def _object_in(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{file}: cannot be read ({error}). Quantise again.") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: has a {type(found).__name__} in it, and an object is needed. Quantise again.")
    return found


def _layer(
    row: Mapping[str, Any],
    places: Mapping[str, Place],
    stored: Mapping[str, _Module],
    pictures: Mapping[str, Any],
    *,
    is_compensated: bool,
) -> Layer:
    name = row["name"]
    shape = tuple(size for each in _list(row, "shape") if (size := _whole(each)) is not None)
    module, found = stored.get(name), pictures.get(name)
    observers = row.get("observers")
    count = math.prod(shape) if shape else 0
    return Layer(
        name,
        places[name],
        str(row.get("weights", "")),
        str(row.get("activations", "")),
        {str(key): str(value) for key, value in observers.items()} if isinstance(observers, dict) else {},
        shape,
        8 * module.num_bytes / count if module is not None and count else None,
        num_tokens=_whole(row.get("num_tokens")),
        is_compensated=is_compensated,
        pictures={str(key): seen for key, each in found.items() if (seen := _picture(each)) is not None}
        if isinstance(found, dict)
        else {},
        **{figure: _number(row.get(figure)) for figure in _FIGURES},
    )


def _recipe(folder: Path, run: Mapping[str, Any] | None) -> str:
    file = folder / "recipe.yaml"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""
    recipe = None if run is None else run.get("recipe")
    return yaml.safe_dump(recipe, sort_keys=False) if isinstance(recipe, dict) else ""


def _has_modifier(run: Mapping[str, Any] | None, name: str) -> bool:
    """Whether the recipe of a run has a modifier of that class; which layers are its, only the run knew."""
    recipe = None if run is None else run.get("recipe")
    stages = [each for each in recipe.values() if isinstance(each, dict)] if isinstance(recipe, dict) else []
    modifiers = [each for stage in stages for key in stage for each in _list(stage, key)]
    return any(isinstance(each, dict) and name in each for each in modifiers)


def _list(holder: Mapping[str, Any] | None, name: str) -> list[Any]:
    found = None if holder is None else holder.get(name)
    return list(found) if isinstance(found, list | tuple) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and math.isnan(value):  # which `max` and `min` would take for some number
        return None
    return float(max(-_LARGEST, min(value, _LARGEST)))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _picture(found: Any) -> dict[str, Any] | None:
    """What of it can be drawn; None if that is not enough."""
    if not isinstance(found, dict):
        return None
    counts = _counts(found.get("counts"))
    ends = {end: _number(found.get(end)) for end in ("from", "to", "min", "max")}
    if not counts or None in ends.values():
        return None
    outside = {side: _whole(found.get(side)) or 0 for side in ("below", "above")}
    ranges = {name: _range(found.get(name)) for name in ("chosen", "typical")}
    return {**ends, "counts": counts, **outside, **ranges, "ratios": _counts(found.get("ratios"))}


def _counts(found: Any) -> list[int] | None:
    counts = [_whole(each) for each in found] if isinstance(found, list) else [None]
    return None if None in counts else [each for each in counts if each is not None]


def _range(found: Any) -> list[float] | None:
    ends = [_number(each) for each in found] if isinstance(found, list) else []
    return [each for each in ends if each is not None] if len(ends) == 2 and None not in ends else None


# ---- the checkpoint --------------------------------------------------------------------------------------------------


@dataclass
class _Module:
    """The tensors of a module in a checkpoint."""

    num_bytes: int = 0
    num_weights: int = 0
    shape: tuple[int, ...] = ()
    is_quantised: bool = False
    packed: tuple[int, ...] = ()
    """Bytes that hold codes of small floats."""
    num_groups: int = 0
    """How many scales there are that are exponents, each for 32 numbers."""


def _modules_in(folder: Path) -> dict[str, _Module]:
    """The modules of a checkpoint by name. Only headers are read, and the shapes that packed weights had."""
    modules: dict[str, _Module] = {}
    for file in sorted(folder.glob("*.safetensors")):
        _add_file(modules, file)
    for module in modules.values():
        if module.packed:
            *most, last = module.packed
            bits = 6 if 0 < 16 * module.num_groups < math.prod(module.packed) else 4
            _set_shape(module, (*most, 8 * last // bits))
    return modules


def _by_layers(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, _Module], names: Sequence[str]
) -> Mapping[str, _Module]:
    """The modules of layers, by the names that the run has for them: files may call them otherwise."""
    if all(name in stored for name in names):
        return stored
    places = names_in_files(checkpoint.read_folder(folder), config, names)
    return {name: stored[place] for name in names if (place := places.get(name, name)) in stored}


def _add_file(modules: dict[str, _Module], file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.offset_keys():
                part = opened.get_slice(key)
                name, _, tensor = key.rpartition(".")
                _add(modules.setdefault(name, _Module()), tensor, part.get_dtype(), tuple(part.get_shape()))
                if tensor == "weight_shape":
                    _set_shape(modules[name], (int(each) for each in opened.get_tensor(key).tolist()))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}). Copy it again, or quantise again.") from None


def _add(module: _Module, tensor: str, dtype: str, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    module.num_bytes += count * _BYTES.get(dtype, 1)
    if tensor.endswith(("_scale", "_zero_point", "_shape", "_g_idx")):
        module.is_quantised = module.is_quantised or tensor.startswith("weight")
        if tensor == "weight_scale" and dtype == "U8":
            module.num_groups = count
    elif tensor != "weight_packed":
        module.num_weights += count
        if tensor == "weight":
            module.shape = shape
    elif dtype == "U8":  # integers say their shape themselves
        module.packed = shape


def _set_shape(module: _Module, shape: Iterable[int]) -> None:
    module.shape = tuple(shape)
    module.num_weights += math.prod(module.shape)
