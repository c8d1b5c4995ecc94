"""The files of a checkpoint, read by one who trusts none of them.

Headers, the index and JSON files are looked at before anything relies on them. Whatever bytes there are, the answer is
a list of problems and the tensors that can be read all the same. Nothing outside of the folder is looked at.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
import yaml
from torch import Tensor

from scalewright.checkpoint.problems import Problem
from scalewright.checkpoint.shards import DTYPES, TensorAt
from scalewright.errors import ModelError, RecipeError
from scalewright.modifiers.base import matches

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION, RECIPE, RECORD = "generation_config.json", "recipe.yaml", "scalewright.json"
BESIDE = (  # what loaders read besides, where it is there
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_MAX_HEADER = 100_000_000  # bytes; safetensors refuses longer ones, too
_MAX_NAME = 200
_MOST_PARTS = 1 << 14  # layers or experts that a configuration may speak of, where there are not as many tensors
_PARTS = re.compile("layer|expert|block|depth")
_SIZES = re.compile("size|dim|channel|vocab")  # of a part, and not how many there are
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ROW = ("name", "shape", "weight_db")
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 21  # bytes that are read at one time


@dataclass(frozen=True)
class Recorded:
    """What the record of a run says of a layer."""

    shape: tuple[int, ...]
    weight_db: float | None


@dataclass(frozen=True)
class Record:
    """What `scalewright.json` says; nothing, if there is no such file."""

    layers: Mapping[str, Recorded] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the tensors that the run has written."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it has written in other files, by their names."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files beside these."""
    smoothing: Any = None
    """By which powers of two weights were multiplied before they were quantised, as it stands there."""


class BrokenFileError(Exception):
    """What is wrong with a file, as a sentence."""


@dataclass
class Folder:
    """What could be read of a checkpoint, and what could not."""

    path: Path
    tensors: dict[str, TensorAt] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    total_size: Any = None
    """What the index says of all tensors together."""

    lost: set[str] = field(default_factory=set)
    """Tensors in files that cannot be read, by the index."""
    is_readable: bool = True
    """Whether all files can be read, or the index says what is lost."""

    def is_lost(self, name: str) -> bool:
        """Whether a tensor may be in a file that cannot be read."""
        return not self.is_readable or name in self.lost

    def say(self, where: str, what: str) -> None:
        """Keep a problem."""
        self.problems.append(Problem(where, what))

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file that is an object; None if there is no such file, or if it is broken, which is a problem."""
        if not (self.path / name).exists():
            return None
        try:
            return _json_object(_contents(self.path / name))
        except BrokenFileError as broken:
            self.say(name, str(broken))
        return None

    def record(self) -> Record:
        """The record of the run; an empty one if there is none, or if it is broken, which is a problem."""
        told = self.json(RECORD)
        if told is None:
            return Record()
        return Record(
            self._layers(told.get("layers")),
            self._digests(told, "digests", "tensors"),
            self._settings(told),
            self._digests(told, "files", "files"),
            told.get("smoothing"),
        )

    def _layers(self, layers: Any) -> dict[str, Recorded]:
        found: dict[str, Recorded] = {}
        for row in layers if isinstance(layers, list) else ():
            name, shape, decibels = (row.get(key) if isinstance(row, dict) else None for key in _ROW)
            if not isinstance(name, str) or not _are_counts(shape) or not isinstance(decibels, int | float | None):
                self.say(RECORD, f"has a layer that makes no sense: name {name!r}, shape {shape!r}.")
                continue
            found[name] = Recorded(tuple(shape), decibels)
        if not isinstance(layers, list):
            self.say(RECORD, "has no list of layers.")
        return found

    def _digests(self, told: Mapping[str, Any], key: str, what: str) -> dict[str, str]:
        """Those that are recorded: runs before there were any have none."""
        digests = told.get(key)
        if digests is None:
            return {}
        if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
            self.say(RECORD, f"its {key} are no texts by the names of {what}.")
            return {}
        return digests

    def _settings(self, told: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Those that are recorded: runs before there were any have none."""
        settings = told.get("settings")
        if settings is None:
            return {}
        if not isinstance(settings, dict) or not all(isinstance(each, dict) for each in settings.values()):
            self.say(RECORD, "its settings are no objects by the names of files.")
            return {}
        return settings

    def recipe(self) -> Any:
        """What `recipe.yaml` says, as plain data; None if there is none, or if it is broken, which is a problem."""
        if not (self.path / RECIPE).exists():
            return None
        try:
            return yaml.safe_load(_contents(self.path / RECIPE))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.say(RECIPE, f"is no YAML ({first_line(error)}).")
        except BrokenFileError as broken:
            self.say(RECIPE, str(broken))
        return None


def read_folder(path: Path) -> Folder:
    """The tensors of all files of a checkpoint, and what is wrong with the files.

    A folder that has neither a configuration nor tensors is no checkpoint, and an error.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder.")
    files = sorted(each.name for each in path.glob("*.safetensors"))
    if not files and not (path / CONFIG).exists():
        raise ModelError(f"{path}: is no checkpoint. There is no config.json in it, and no safetensors.")
    folder = Folder(path)
    if not (path / CONFIG).exists():
        folder.say(CONFIG, "is missing.")
    places = _files_by_index(folder, files) if (path / INDEX).exists() else _files_alone(folder, files)
    _read_headers(folder, places)
    return folder


def check_source(path: Path) -> None:
    """Say no to a model that no loader should be given.

    Weights that are pickled (loading them can run code), files outside of the folder, broken headers, a configuration
    of more parts than there are tensors. What a loader says itself in words is left to it.
    """
    files = sorted(each.name for each in path.glob("*.safetensors"))
    pickled = sorted(each.name for each in path.iterdir() if each.suffix in _PICKLED)
    if pickled and not files:
        raise ModelError(
            f"{path}: its weights are in {pickled[0]}, and reading pickled files can run code that is hidden in them. "
            "Save the model as safetensors where you trust it: from_pretrained(...).save_pretrained(FOLDER)."
        )
    folder = Folder(path)
    places = _files_by_index(folder, []) if (path / INDEX).exists() else dict.fromkeys(files)
    if folder.problems:
        raise ModelError(f"{path}: {folder.problems[0]}")
    names = [name for file in places for name in _names_in(path / file)]
    config: Any = None
    with suppress(ValueError, RecursionError, BrokenFileError):  # which a loader says in words
        config = json.loads(_contents(path / CONFIG))
    if not isinstance(config, dict):
        return
    many = too_many_parts(config, len(names))
    if many is not None:
        raise ModelError(f"{path / CONFIG}: {many}.")
    modules = modules_of(names)
    try:
        for text in _texts_in(config.get("quantization_config")):
            with suppress(re.error):  # which a loader says in words
                check_pattern(text, modules)
    except RecipeError as error:
        raise ModelError(f"{path / CONFIG}: {error}") from None


def _names_in(file: Path) -> Iterable[str]:
    try:
        return _header(file).keys()
    except BrokenFileError as broken:
        raise ModelError(f"{file}: {broken}") from None


def _texts_in(value: Any) -> Iterator[str]:
    """All texts in plain data, but for the names of entries."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def modules_of(tensors: Iterable[str]) -> list[str]:
    """The modules that tensors belong to, by their names."""
    return sorted({name.rpartition(".")[0] for name in tensors})


def check_pattern(text: str, modules: Iterable[str]) -> None:
    """Say no to a pattern that is none (re.error), or that loaders would compare with names for ever (RecipeError)."""
    if text.startswith("re:"):
        pattern = re.compile(text.removeprefix("re:"))
        for name in modules:
            matches(pattern, name)


def too_many_parts(config: Mapping[str, Any], num_tensors: int) -> str | None:
    """What in a configuration would make a model of more parts than anybody could have stored, if anything."""
    most = max(_MOST_PARTS, num_tensors)
    for key, value in config.items():
        if isinstance(value, Mapping):
            inner = too_many_parts(value, num_tensors)
            if inner is not None:
                return inner
        elif isinstance(value, int | float) and value > most and _PARTS.search(key) and not _SIZES.search(key):
            return f"{key} is {value}, and there are {num_tensors} tensors"
    return None


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


# ---- the index -------------------------------------------------------------------------------------------------------


def _files_alone(folder: Folder, files: list[str]) -> dict[str, set[str] | None]:
    """The files to read where there is no index: loaders look for one name."""
    if WHOLE not in files:
        folder.is_readable = False
        folder.say(WHOLE, f"is missing, and there is no {INDEX} that names other files.")
    for name in files:
        if name != WHOLE:
            folder.say(name, f"is named by no index: there is no {INDEX}.")
    return dict.fromkeys(files)


def _files_by_index(folder: Folder, files: list[str]) -> dict[str, set[str] | None]:
    """The files to read, and the tensors that the index says are in each."""
    index = folder.json(INDEX)
    weight_map = None if index is None else index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(each, str) for each in weight_map.values()):
        if index is not None:
            folder.say(INDEX, "has no weight_map that names a file for each tensor.")
        return dict.fromkeys(files)
    named: dict[str, set[str] | None] = {}
    for tensor, file in weight_map.items():
        owned = named.setdefault(file, set())
        assert owned is not None
        owned.add(tensor)
    for file in list(named):
        if not stays_inside(file):
            folder.say(INDEX, f"names the file '{file}', which is outside of the folder. It is not looked at.")
            del named[file]
        elif not (folder.path / file).is_file():
            lost = named.pop(file) or set()
            folder.say(file, f"is missing; by {INDEX} it has the tensors of {len(lost)} names.")
            folder.lost |= lost
    for file in files:
        if file not in named:
            folder.say(file, f"is not in {INDEX}.")
    metadata = index.get("metadata") if index is not None else None
    folder.total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return named


def stays_inside(name: str) -> bool:
    """Whether a name that a file gives is that of something in its own folder."""
    path = PurePosixPath(name)
    is_name = 0 < len(name) < _MAX_NAME and name.isprintable() and not set(name) & {"\\", ":"}
    return is_name and not path.is_absolute() and ".." not in path.parts


# ---- headers ---------------------------------------------------------------------------------------------------------


def _read_headers(folder: Folder, places: dict[str, set[str] | None]) -> None:
    for file, indexed in places.items():
        try:
            found = _header(folder.path / file)
        except BrokenFileError as broken:
            folder.say(file, str(broken))
            folder.lost |= indexed or set()
            folder.is_readable = folder.is_readable and indexed is not None
            continue
        for name, each in found.items():
            if name in folder.tensors:
                folder.say(name, f"is in two files, {folder.tensors[name].file.name} and {file}.")
            elif indexed is not None and name not in indexed:
                folder.say(name, f"is in {file}, and {INDEX} does not say so.")
            folder.tensors.setdefault(name, each)
        for name in sorted((indexed or set()) - found.keys()):
            folder.say(name, f"is not in {file}, where {INDEX} says it is.")
    total = sum(each.num_bytes for each in folder.tensors.values())
    is_whole = folder.is_readable and not folder.lost
    if is_whole and folder.total_size is not None and folder.total_size != total:
        folder.say(
            INDEX, f"says that total_size is {folder.total_size!r}, and all tensors together have {total} bytes."
        )


def _header(file: Path) -> dict[str, TensorAt]:
    """Where the tensors of a file lie. Every byte behind the header belongs to one tensor, as readers demand."""
    head = _contents(file, _LENGTH.size)
    size = file.stat().st_size
    if len(head) < _LENGTH.size:
        raise BrokenFileError(f"has {size} bytes, too few for a safetensors file.")
    (length,) = _LENGTH.unpack(head)
    if length > min(size - _LENGTH.size, _MAX_HEADER):
        raise BrokenFileError(f"has {size} bytes, and says that its header alone takes {length}.")
    begin = _LENGTH.size + length
    header = _json_object(_contents(file, begin)[_LENGTH.size :], "its header")
    found: dict[str, TensorAt] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = _tensor_at(file, begin, size, name, entry)
    end = begin
    last = "its header"
    for name, each in sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if each.start < end:
            raise BrokenFileError(f"{name} begins at byte {each.start}, before {last} ends at {end}: they overlap.")
        if each.start > end:
            raise BrokenFileError(f"the bytes from {end} to {each.start} belong to no tensor.")
        end, last = each.start + each.num_bytes, name
    if end < size:
        raise BrokenFileError(f"has {size} bytes, and its last tensor ends at {end}.")
    return found


def _tensor_at(file: Path, begin: int, size: int, name: str, entry: Any) -> TensorAt:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BrokenFileError(f"{name} has the dtype {dtype!r}, which is none that a checkpoint has.")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BrokenFileError(f"{name} has the shape {shape!r} and the data_offsets {offsets!r}, which make no sense.")
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise BrokenFileError(
            f"{name} has {offsets[1] - offsets[0]} bytes, and {dtype} of shape {shape} takes {num_bytes}."
        )
    if begin + offsets[1] > size:
        raise BrokenFileError(f"is cut short: {name} ends at byte {begin + offsets[1]}, and the file has {size}.")
    return TensorAt(file, begin + offsets[0], num_bytes, dtype, tuple(shape))


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _contents(file: Path, count: int = -1) -> bytes:
    """The bytes of a file, or so many of them; pipes and the like, which might never end, are not opened."""
    try:
        if not file.is_file():
            raise BrokenFileError("is no file.")
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError as error:
        raise BrokenFileError(f"cannot be read ({error.strerror}).") from None


def _json_object(raw: bytes, what: str = "it") -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BrokenFileError(f"'{name}' is twice in {what}.")
            found[name] = value
        return found

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{'is' if what == 'it' else what + ' is'} no JSON ({first_line(error)}).") from None
    if not isinstance(found, dict):
        raise BrokenFileError(f"{'is' if what == 'it' else what + ' is'} no JSON object.")
    return found


# ---- tensors ---------------------------------------------------------------------------------------------------------


def read_tensor(at: TensorAt) -> Tensor:
    """All of a tensor."""
    return _as_tensor(_bytes(at, 0, at.num_bytes), at).reshape(at.shape)


def read_rows(at: TensorAt, rows: slice) -> Tensor:
    """Some rows of a matrix."""
    start, stop, _ = rows.indices(at.shape[0])
    width = at.num_bytes // at.shape[0] if at.shape[0] else 0
    return _as_tensor(_bytes(at, start * width, (stop - start) * width), at).reshape(stop - start, *at.shape[1:])


def pieces(at: TensorAt) -> Iterator[Tensor]:
    """The numbers of a tensor in runs, each in the place of the last: a large one is never in memory as a whole."""
    room = bytearray(min(_PIECE, at.num_bytes))
    with at.file.open("rb") as opened:
        opened.seek(at.start)
        for start in range(0, at.num_bytes, _PIECE):
            piece = memoryview(room)[: at.num_bytes - start]
            if opened.readinto(piece) != len(piece):
                raise OSError(f"{at.file.name}: ends before its last tensor does")
            yield _as_tensor(piece, at)


def _bytes(at: TensorAt, start: int, count: int) -> bytearray:
    found = bytearray(count)
    with at.file.open("rb") as opened:
        opened.seek(at.start + start)
        if opened.readinto(found) != count:
            raise OSError(f"{at.file.name}: ends before its last tensor does")
    return found


def _as_tensor(raw: bytearray | memoryview, at: TensorAt) -> Tensor:
    dtype = DTYPES[at.dtype]
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
