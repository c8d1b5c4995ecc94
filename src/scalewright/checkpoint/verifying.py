"""Whether a checkpoint is whole, and what it says it is: read from its files alone, before anybody loads it.

A checkpoint with a scale missing or doubled loads without a word, and answers worse. So every tensor is held against
what `config.json` says of its layer, and every number against what its format has; and, beside the original, every
weight against the error that the record of the run claims.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig

from scalewright.calibration.hub import folder_in_cache
from scalewright.checkpoint.beside import changed_files
from scalewright.checkpoint.folder import (
    BESIDE,
    CONFIG,
    GENERATION,
    RECORD,
    Folder,
    Record,
    check_pattern,
    first_line,
    modules_of,
    read_folder,
    read_tensor,
)
from scalewright.checkpoint.formats import NVFP4, Stored
from scalewright.checkpoint.problems import Problem
from scalewright.checkpoint.settings import changed_settings, notes_on_settings
from scalewright.checkpoint.shards import TensorAt, digest_of
from scalewright.checkpoint.smoothed import Powers, read_powers
from scalewright.checkpoint.structure import Layer, Structure, format_of, is_quantised_name, structure_of, ties_of
from scalewright.checkpoint.values import check_finite, check_layer, decibels_kept, is_same
from scalewright.errors import ModelError, OutputError
from scalewright.modifiers.schemes import in_words
from scalewright.observers.fusion import FUSED_LAYER_NAMES

_TOLERANCE_DB = 0.001  # of what the record claims; sums in another order differ by a thousandth of that
_METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Verification:
    """What was found in a checkpoint."""

    problems: list[Problem]
    notes: list[str]
    """What could not be looked at, and why."""
    num_tensors: int
    num_layers: int
    """How many layers are quantised, attention modules included."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "problems": [{"where": each.where, "what": each.what} for each in self.problems],
            "notes": self.notes,
            "num_tensors": self.num_tensors,
            "num_layers": self.num_layers,
        }


def verify_checkpoint(folder: str | Path, *, against: str | Path | None = None) -> list[Problem]:
    """All that is wrong with a checkpoint; nothing, if all is well.

    `against` is the folder of the model that it was made of, or its name on the hub if it is in the cache: weights are
    then compared with it, too. A folder that is no quantised checkpoint at all is an error.
    """
    return examine(folder, against=against).problems


def examine(folder: str | Path, *, against: str | Path | None = None) -> Verification:
    """What `verify_checkpoint` finds, with the figures and notes that belong to it."""
    return _examined(Path(folder), against=against)


def _examined(folder: Path, *, against: str | Path | None = None, is_new: bool = False) -> Verification:
    """The same. Of a folder that `is_new`, files that others have just written there are not read again."""
    original = None if against is None else _original(Path(against))
    found = read_folder(folder)
    config = found.json(CONFIG)
    quantization = None if config is None else _quantization(found, config)
    record = found.record()
    may_be_negative = asks_for_signed_scales(found.recipe())
    settings = {CONFIG: config, **{file: found.json(file) for file in ((GENERATION,) if is_new else BESIDE)}}
    changed, added = _settings(record, settings, found)
    if not is_new:
        broken = {problem.where for problem in found.problems}  # in better words
        of_files, edited = changed_files(folder, {k: v for k, v in record.files.items() if k not in broken})
        changed, added = [*changed, *of_files], [*added, *edited]
    if config is None or quantization is None:
        return Verification([*found.problems, *changed], added, len(found.tensors), 0)
    structure = structure_of(found, config, quantization, record.layers)
    found.problems += structure.problems
    _Check(found, structure, quantization, record, may_be_negative).run()
    if original is not None:
        found.problems += _beside(found, structure, record, original, config)
    found.problems += changed
    notes = [*structure.notes, *_notes(config["quantization_config"]), *added]
    return Verification(found.problems, notes, len(found.tensors), len(structure.layers))


def check_draft(draft: Path, out: Path) -> None:
    """Say no to a checkpoint that has problems, before it gets the name `out`.

    The files of a tokenizer were written a moment ago by who reads them; they may be as large as a small model.
    """
    problems = _examined(draft, is_new=True).problems
    if problems:
        count = f"{len(problems)} problems were" if len(problems) > 1 else "a problem was"
        raise OutputError(
            f"{out}: is not written, because {count} found in the checkpoint: {problems[0]} It lies in {draft}; "
            f"`scalewright verify {draft}` shows all of it."
        )


def asks_for_signed_scales(recipe: Any) -> bool:
    """Whether a recipe, as plain data, lets the scales of weights be negative."""
    waiting, seen = [recipe], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:  # YAML may say the same thing a million times
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            if each.get("signed") is True:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False


# ---- the configuration -----------------------------------------------------------------------------------------------


def _quantization(folder: Folder, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """`quantization_config`, as compressed-tensors reads it; None if it cannot be, which is a problem."""
    given = config.get("quantization_config")
    if given is None:
        quantised = next((name for name in folder.tensors if is_quantised_name(name)), None)
        if quantised is None and not folder.problems:
            raise ModelError(f"{folder.path}: is not quantised. There is no quantization_config in its {CONFIG}.")
        beside = "" if quantised is None else f", and there is {quantised} in the files"
        folder.say(CONFIG, f"has no quantization_config{beside}.")
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if isinstance(method, str) and method != _METHOD:
        raise ModelError(f"{folder.path}: is quantised by {method!r}, and only {_METHOD} can be verified.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = QuantizationConfig.model_validate(given)
            modules = modules_of(folder.tensors)
            for scheme in parsed.config_groups.values():
                format_of(scheme, parsed)
            targets = [each for scheme in parsed.config_groups.values() for each in scheme.targets]
            for each in (*targets, *(parsed.ignore or ())):
                check_pattern(each, modules)
    except Exception as error:  # pydantic, compressed-tensors and re, each with its own kind
        folder.say(CONFIG, f"its quantization_config cannot be read ({_reason(error)}).")
        return None
    if method is None:
        folder.say(CONFIG, "has no quant_method in its quantization_config, so loaders do not know who reads it.")
    sparse = _sparse_format(given)
    if sparse is not None and not any(name.endswith(".bitmask") for name in folder.tensors):
        folder.say(CONFIG, f"says that zeros are left out ({sparse}), and no tensor tells where they were.")
    if parsed.quantization_status != "compressed":
        folder.say(
            CONFIG, f"says that quantization_status is '{_text(parsed.quantization_status)}', and not 'compressed'."
        )
    return parsed


def _settings(
    record: Record, files: Mapping[str, Mapping[str, Any] | None], folder: Folder
) -> tuple[list[Problem], list[str]]:
    """What in some files is not what was written: problems, and notes on what is new."""
    problems: list[Problem] = []
    notes: list[str] = []
    for name, now in files.items():
        written = record.settings.get(name)
        if written is not None and now is not None:
            problems += changed_settings(name, now, written)
            notes += notes_on_settings(name, now, written)
        elif written is not None and not (folder.path / name).exists() and name != CONFIG:
            problems.append(Problem(name, f"is missing, and was written, by {RECORD}. Copy the checkpoint again."))
    return problems, notes


def _sparse_format(quantization: Mapping[str, Any]) -> str | None:
    """How zeros are left out, if they are."""
    sparsity = quantization.get("sparsity_config")
    found = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    return None if found in (None, "dense") else str(found)


def _notes(quantization: Mapping[str, Any]) -> list[str]:
    """What of a `quantization_config` is not looked at."""
    transforms = quantization.get("transform_config")
    has_some = isinstance(transforms, Mapping) and bool(transforms.get("config_groups"))
    return [f"{CONFIG}: has a transform_config; what it does to the model is not verified."] if has_some else []


def _reason(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors) and (found := errors()):
        place = ".".join(str(each) for each in found[0]["loc"] if "[" not in str(each))  # pydantic's own steps
        what = str(found[0]["msg"]).removeprefix("Value error, ").splitlines()[0].rstrip(".")
        return f"{place}: {what}" if place else what
    return first_line(error)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


# ---- tensors beside the configuration --------------------------------------------------------------------------------


class _Check:
    """One walk through the layers and tensors of a checkpoint."""

    def __init__(
        self,
        folder: Folder,
        structure: Structure,
        quantization: QuantizationConfig,
        record: Record,
        may_be_negative: bool,
    ) -> None:
        self.folder = folder
        self.tensors = folder.tensors
        self.structure = structure
        self.quantization = quantization
        self.record = record
        self.may_be_negative = may_be_negative

    def run(self) -> None:
        say = self.folder.problems
        say += self._format()
        for layer in self.structure.layers:
            say += self._layer(layer)
        say += self._shared_scales()
        for name, other in self.structure.others.items():
            if name in self.tensors:
                say += self._other(name, other.shape, is_parameter=other.is_parameter)
            elif not (self._is_tied(name) or self.structure.may_be_spared(name) or self.folder.is_lost(name)):
                say.append(Problem(name, "is missing from the files."))
        say += self._tied()
        say += self._left_over()
        say += self._records()
        say += list(self._changed())

    def _format(self) -> Iterator[Problem]:
        said = _text(self.quantization.format)
        used = {layer.stored_as for layer in self.structure.layers} - {CompressionFormat.dense.value}
        if said not in (CompressionFormat.mixed_precision.value, *used) and used:
            yield Problem(CONFIG, f"says that the format is '{said}', and layers are stored as {_listed(used)}.")

    def _layer(self, layer: Layer) -> Iterator[Problem]:
        sound: dict[str, TensorAt] = {}
        for local, stored in layer.tensors.items():
            name = layer.places[local]
            at = self.tensors.get(name)
            if at is None:
                if not self.folder.is_lost(name):
                    yield Problem(name, f"is missing from the files: {_described(layer)} has {_listed(layer.tensors)}.")
            elif (wrong := _unlike(at, stored)) is not None:
                yield Problem(name, f"{wrong}, as {_described(layer)} has it.")
            else:
                sound[local] = at
        yield from check_layer(layer, sound, may_be_negative=self.may_be_negative)

    def _changed(self) -> Iterator[Problem]:
        """Tensors that could be right, and yet are not those that the run has written."""
        told = {problem.where for problem in self.folder.problems}  # in better words
        for name, digest in self.record.digests.items():
            at = self.tensors.get(name)
            if name in told or self.folder.is_lost(name):
                continue
            if at is None:
                yield Problem(name, f"is missing from the files, and was written, by {RECORD}.")
            elif digest_of(at) != digest:
                yield Problem(
                    name,
                    f"is not the tensor that was written, by {RECORD}. Copy the checkpoint again, or run again; if "
                    "that was meant, take it out of 'digests' there.",
                )

    def _shared_scales(self) -> Iterator[Problem]:
        """Layers that loaders make one matrix of, and whose global scales differ."""
        by_name = {layer.name: layer for layer in self.structure.layers if layer.stored_as == NVFP4}
        for name, first in by_name.items():
            parent, _, last = name.rpartition(".")
            fused = next((names for names in FUSED_LAYER_NAMES if names[0] == last), ())
            partners = [by_name.get(f"{parent}.{each}" if parent else each) for each in fused]
            if len(partners) < 2 or not all(partners):
                continue
            scales = [self._global_scale(each) for each in partners if each is not None]
            for partner, scale in zip(partners, scales, strict=True):
                if partner is not None and scale is not None and scales[0] is not None and scale != scales[0]:
                    where = partner.places["weight_global_scale"]
                    yield Problem(
                        where,
                        f"is {scale:.6g}, and that of {first.name} is {scales[0]:.6g}. Loaders take one for both.",
                    )

    def _global_scale(self, layer: Layer) -> float | None:
        at = self.tensors.get(layer.places["weight_global_scale"])
        is_sound = at is not None and _unlike(at, layer.tensors["weight_global_scale"]) is None
        return float(read_tensor(at)) if at is not None and is_sound else None

    def _other(self, name: str, shape: tuple[int, ...] | None, *, is_parameter: bool) -> Iterator[Problem]:
        at = self.tensors[name]
        if shape is not None and at.shape != shape:
            yield Problem(name, f"has the shape {list(at.shape)}, and {list(shape)} is that of the model.")
        elif shape is not None and is_parameter and at.dtype not in ("BF16", "F16", "F32", "F64"):
            yield Problem(name, f"is {at.dtype}, and no quantised layer has it.")
        else:
            yield from check_finite(name, at, infinite_too=is_parameter)

    def _tied(self) -> Iterator[Problem]:
        """What the model has once and the files twice, unless the run has written it so: some loaders untie it."""
        for tie in self.structure.ties:
            first, *more = [each for each in self.structure.others if each in tie and each in self.tensors] or [""]
            for name in more:
                mine, theirs = self.tensors[name], self.tensors[first]
                if name not in self.record.digests and mine.shape == theirs.shape and not is_same(mine, theirs):
                    yield Problem(name, f"is tied to {first}, and has other values. Loaders differ in which they take.")

    def _is_tied(self, name: str) -> bool:
        return any(name in tie and any(each in self.tensors for each in tie) for tie in self.structure.ties)

    def _left_over(self) -> Iterator[Problem]:
        layers = {name.rpartition(".")[0]: layer for layer in self.structure.layers for name in layer.places.values()}
        known = {name for layer in self.structure.layers for name in layer.places.values()}
        tied = {name for tie in self.structure.ties for name in tie}
        for name in self.tensors:
            prefix, _, local = name.rpartition(".")
            is_bias = local == "bias" and not self.structure.is_complete
            if name in known or is_bias or name in tied or self.structure.may_be_spared(name):
                continue
            if prefix in layers and (name not in self.structure.others or not self.structure.is_complete):
                layer = layers[prefix]
                yield Problem(name, f"is left over: {_described(layer)} has {_listed(layer.tensors)}.")
            elif name not in self.structure.others:
                yield Problem(name, "is left over: nothing in the model has that name.")

    def _records(self) -> Iterator[Problem]:
        """Layers that were quantised, by the record of the run, and are not by the configuration."""
        shapes = {layer.name: layer.shape for layer in self.structure.layers}
        for name, each in self.record.layers.items():
            if name not in shapes:
                yield Problem(name, f"is quantised by {RECORD}, and not by {CONFIG}.")
            elif shapes[name] != each.shape:
                yield Problem(
                    name, f"has the shape {list(each.shape)} by {RECORD}, and {list(shapes[name])} by {CONFIG}."
                )
        for name in shapes if self.record.layers else ():
            if name not in self.record.layers:
                yield Problem(name, f"is quantised by {CONFIG}, and not by {RECORD}.")


def _unlike(at: TensorAt, stored: Stored) -> str | None:
    if at.dtype not in stored.dtypes:
        return f"is {at.dtype}, and not {' or '.join(stored.dtypes)}"
    return f"has the shape {list(at.shape)}, and not {list(stored.shape)}" if at.shape != stored.shape else None


def _described(layer: Layer) -> str:
    scheme = layer.scheme
    if not layer.shape:
        return f"{layer.group} ({in_words(scheme.input_activations)})"
    rows, columns = layer.shape
    inputs = "" if scheme.input_activations is None else f"; inputs {in_words(scheme.input_activations)}"
    return f"{layer.group} ({in_words(scheme.weights)}{inputs}; {layer.stored_as}; {rows} x {columns})"


def _listed(names: Any) -> str:
    *most, last = sorted(names)
    return f"{', '.join(most)} and {last}" if most else str(last)


# ---- beside the original ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Original:
    folder: Folder
    ties: list[set[str]]

    def find(self, name: str) -> TensorAt | None:
        names = [name, *(each for tie in self.ties if name in tie for each in tie)]
        return next((self.folder.tensors[each] for each in names if each in self.folder.tensors), None)


def _original(path: Path) -> _Original:
    folder = read_folder(path if path.is_dir() else folder_in_cache(str(path)) or path)
    if folder.problems:
        raise ModelError(f"{path}: cannot be compared with. {folder.problems[0]}")
    config = folder.json(CONFIG) or {}
    if config.get("quantization_config") is not None:
        raise ModelError(f"{path}: is quantised already. Give the original.")
    return _Original(folder, ties_of(folder, config))


def _beside(
    folder: Folder,
    structure: Structure,
    record: Record,
    original: _Original,
    config: Mapping[str, Any],
) -> Iterator[Problem]:
    """Weights that are farther from the original than the record claims; other tensors that are not the original's."""
    told = {problem.where for problem in folder.problems}
    try:
        smoothed = {} if record.smoothing is None else read_powers(record.smoothing, _shapes(folder, structure))
    except ValueError as error:
        yield Problem(RECORD, f"its smoothing {error}.")
        return
    for layer in structure.layers:
        if not layer.shape or layer.scheme.weights is None:
            continue
        if any(each in told or each not in folder.tensors for each in layer.places.values()):
            continue
        name = f"{layer.places['weight_scale'].rpartition('.')[0]}.weight"
        at = original.find(name)
        if at is None:
            structure.notes.append(_not_compared(name))
        else:
            yield from _farther(folder, layer, name, at, record, config, smoothed)
    if not record.layers:
        structure.notes.append(f"{RECORD}: is not there, so no error is claimed that weights could be held to.")
    for name, mine in folder.tensors.items():
        if name not in structure.others or name in told:
            continue
        theirs = original.find(name)
        if theirs is None:
            structure.notes.append(_not_compared(name))
        elif (misfit := _misfit(smoothed, name, theirs)) is not None:
            yield misfit
        elif theirs.shape != mine.shape or not is_same(mine, theirs, smoothed.get(name)):
            yield Problem(name, "is not quantised, and yet it is not what the original has.")


def _shapes(folder: Folder, structure: Structure) -> dict[str, tuple[int, ...]]:
    """Those of all tensors that the original may have, by its names."""
    shapes = {f"{layer.name}.weight": layer.shape for layer in structure.layers if layer.shape}
    return {name: tuple(each.shape) for name, each in folder.tensors.items()} | shapes


def _misfit(smoothed: Mapping[str, Powers], name: str, original: TensorAt) -> Problem | None:
    what = smoothed[name].misfit(original.shape) if name in smoothed else None
    return None if what is None else Problem(name, f"by {RECORD} {what}.")


def _not_compared(name: str) -> str:
    return str(Problem(name, "is not in the original, so it was not compared."))


def _farther(
    folder: Folder,
    layer: Layer,
    name: str,
    original: TensorAt,
    record: Record,
    config: Mapping[str, Any],
    smoothed: Mapping[str, Powers],
) -> Iterator[Problem]:
    if original.shape != layer.shape:
        yield Problem(layer.name, f"has the shape {list(layer.shape)}, and the original {list(original.shape)}.")
        return
    if (misfit := _misfit(smoothed, name, original)) is not None:
        yield misfit
        return
    claimed = None if layer.name not in record.layers else record.layers[layer.name].weight_db
    if claimed is None or math.isnan(claimed):
        return
    places = {local: folder.tensors[each] for local, each in layer.places.items()}
    kept = decibels_kept(layer, places, original, _dtype(config, places), smoothed.get(name))
    if not kept >= claimed - _TOLERANCE_DB and not math.isnan(kept):
        yield Problem(
            layer.name, f"keeps {kept:.3f} dB of its weight beside the original, and {RECORD} claims {claimed:.3f}."
        )


def _dtype(config: Mapping[str, Any], places: Mapping[str, TensorAt]) -> torch.dtype:
    """The dtype that the model was quantised in."""
    text = config.get("dtype") or config.get("torch_dtype")
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    by_scale = {"BF16": torch.bfloat16, "F16": torch.float16}
    return named.get(str(text), by_scale.get(places["weight_scale"].dtype, torch.float32))
