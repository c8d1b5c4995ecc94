"""Where calibration data comes from: files, folders, the hub, datasets, lists, tensors and DataLoaders become rows.

A `Source` has the rows of whatever was given, and knows which column of them is meant. Nothing is chosen or
tokenized here; what comes as a stream is read no further than its first row.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import logging as hub_logging
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from scalewright.calibration.hub import hub_asked_once
from scalewright.errors import DataError, did_you_mean

_SPLIT = "train"
_SEPARATOR = "<|endoftext|>"
_COLUMNS = ("input_ids", "text", "messages", "conversations", "content", "prompt")  # looked for in this order
_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]+)?")
_CHARACTERS_PER_TOKEN = 4
_OPEN_FILES = ("/dev/fd", "/proc/self/fd")
_TOO_MUCH = "not JSON that can be read"


@dataclass(frozen=True)
class DataOptions:
    """How samples are chosen, cut and put together."""

    num_samples: int = 512
    max_seq_length: int = 2048
    batch_size: int | None = None
    """Sequences in one batch; None for about `tokens_per_batch`."""
    column: str | None = None
    pack: bool | None = None
    """Whether samples are joined and cut into sequences of full length; None to do so for a text file of lines."""
    split: str = _SPLIT
    seed: int = 0
    tokens_per_batch: int = 2048
    is_calibration: bool = True
    """Whether scales are found with the data: few tokens are then worth a note."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_seq_length", "batch_size"):
            value = getattr(self, name)
            if value is None and name == "batch_size":
                continue
            called = "num_calibration_samples" if name == "num_samples" and self.is_calibration else name
            if not is_id(value):
                raise DataError(f"{called}: expected a whole number from 1 on, got {value!r}.")
            if value < 1:
                raise DataError(f"{called}: is {value}. Use 1 or more.")
        check_seed(self.seed)


@dataclass(frozen=True)
class Source:
    """Rows that can be numbered, or that come in a stream; the column of them that is meant, where there are any."""

    name: str
    rows: Any
    column: str | None = None
    is_running: bool = False
    """Whether the rows are pieces of running text: to be joined, unless one says otherwise."""
    is_ready: bool = False
    """Whether the rows are batches as a model is called with."""

    def sample(self, number: int, row: Any) -> Any:
        """The sample of a row; an empty text where it has none."""
        if self.column is None:
            return row
        if not isinstance(row, Mapping):
            raise DataError(
                f"{self.name}: sample {number} is {described(row)}, and others have columns. Give samples of one kind."
            )
        if self.column not in row:
            raise DataError(
                f"{self.name}: sample {number} has no '{self.column}'. It has: {listed(row)}. Give it to all, or name "
                "another column."
            )
        value = row[self.column]
        mask = row.get("attention_mask") if self.column == "input_ids" else None
        if mask is None or value is None:
            return "" if value is None else value
        ids, keeps = plain(value), plain(mask)
        if not isinstance(ids, list):
            return value
        if not isinstance(keeps, list):
            raise DataError(f"{self.name}: sample {number} has a mask that is {described(keeps)}. Give a list of them.")
        if len(ids) != len(keeps):
            raise DataError(
                f"{self.name}: sample {number} has {len(ids)} token ids and a mask of {len(keeps)}. "
                "Give as many of both."
            )
        return [each for each, keep in zip(ids, keeps, strict=True) if keep]


def open_source(dataset: Any, options: DataOptions) -> Source:
    """Find the rows of whatever `dataset` is."""
    if isinstance(dataset, str) and not os.path.exists(dataset):  # unlike Path, it bears a text that is no name at all
        return _from_hub(dataset, options)
    if isinstance(dataset, str | Path):
        path = Path(dataset)
        return _from_folder(path, options) if os.path.isdir(path) else _from_file(path, options)
    return _from_memory("data", dataset, options)


def check_file(dataset: Any) -> None:
    """Say no to the name of a file that is not there, to a pipe or a device, and to what is no name at all."""
    if not isinstance(dataset, str | Path):
        return
    if os.path.exists(dataset):
        _check_kind(Path(dataset))
        return
    is_file = Path(dataset).suffix.lower() in _SUFFIXES or str(dataset).startswith(("/", "./", "../", "~"))
    if is_file or isinstance(dataset, Path):
        raise _no_file(Path(dataset))
    if not _HUB_NAME.fullmatch(dataset):
        raise DataError(
            f"data: {listed([repr(dataset)])} is neither a file nor a dataset. Give texts as a list of them."
        )


def _from_memory(name: str, data: Any, options: DataOptions) -> Source:
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a table of pandas
        data = data.to_dict("list")
    if getattr(data, "ndim", None) == 1:
        data = data.tolist()
    if isinstance(data, Mapping):
        return _from_mapping(name, data, options)
    _refuse_split(name, options)
    if isinstance(data, str | bytes | set | frozenset):  # a set has another order each time
        raise _no_data(name, data)
    if isinstance(data, DataLoader):
        return _without_column(Source(name, iter(data), is_ready=True), options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        if getattr(data, "ndim", 1) == 0:
            raise _no_data(name, data)
        return _from_rows(name, data, data[0] if len(data) else None, options)
    if isinstance(data, Iterable):
        stream = iter(data)
        some = list(islice(stream, 1))
        return _from_rows(name, chain(some, stream), some[0] if some else None, options)
    raise _no_data(name, data)


def _from_rows(name: str, rows: Any, first: Any, options: DataOptions) -> Source:
    """Rows in a sequence or a stream, by what the first one is."""
    if first is None:
        return Source(name, rows, options.column)
    if _is_batch(first):
        return _without_column(Source(name, iter(rows), is_ready=True), options)
    if isinstance(first, Mapping):
        is_message = any(pair <= set(first) for pair in ({"role", "content"}, {"from", "value"}))
        if is_message and options.column is None and isinstance(rows, list | tuple):
            return Source(name, [list(rows)])  # one chat
        chosen = _choose(first, name, options.column)
        if hasattr(rows, "select_columns"):
            rows = rows.select_columns(_needed(chosen, first))
        return Source(name, rows, chosen)
    if is_id(first) and not isinstance(rows, Iterator):  # one long run of tokens
        length = options.max_seq_length
        rows = [list(rows[i : i + length]) for i in range(0, len(rows), length)]
    return _without_column(Source(name, rows), options)


def _from_mapping(name: str, data: Mapping[str, Any], options: DataOptions) -> Source:
    """Splits of a dataset, a batch, columns, or one row."""
    if any(hasattr(each, "column_names") for each in data.values()) and options.split not in data:
        raise DataError(
            f"{name}: there is no split '{options.split}'.{did_you_mean(options.split, data)} Splits: {listed(data)}."
        )
    if options.split in data:
        return _from_memory(name, data[options.split], replace(options, split=_SPLIT))
    _refuse_split(name, options)
    if _is_batch(data):
        return _from_rows(name, [data], data, options)
    lists = [each for each in data.values() if isinstance(each, list)]
    if len(lists) == 1 and not {*_COLUMNS, options.column} & set(data):
        return _from_memory(name, lists[0], options)  # {"version": 1, "rows": [...]}
    chosen = _choose(data, name, options.column)
    is_row = isinstance(data[chosen], Mapping) or kind_of(plain(data[chosen]))
    if is_row or not hasattr(data[chosen], "__getitem__"):
        return Source(name, [data], chosen)
    columns = {each: data[each] for each in _needed(chosen, data)}
    for each, values in columns.items():
        if not hasattr(values, "__len__"):
            raise DataError(
                f"{name}: its column '{each}' is {described(values)}. Give a list with a row for each sample."
            )
    if len({len(each) for each in columns.values()}) > 1:
        raise DataError(
            f"{name}: columns have {' and '.join(str(len(each)) for each in columns.values())} rows. "
            "Give as many of each."
        )
    return Source(name, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], chosen)


def _choose(columns: Iterable[Any], name: str, column: str | None) -> str:
    """The column that is meant: the one that is named, or the first that usually has samples."""
    known = [each for each in columns if isinstance(each, str)]
    chosen = column or next((each for each in _COLUMNS if each in known), None)
    if chosen is None or chosen not in known:
        wanted = f"no column '{column}'.{did_you_mean(column, known)}" if column else "no column that is known."
        raise DataError(f"{name}: there is {wanted} Columns: {listed(known)}. Name one of them as column.")
    return chosen


def _needed(chosen: str, columns: Iterable[str]) -> list[str]:
    """The chosen column, and the one that says which of its token ids count."""
    return [chosen, "attention_mask"] if chosen == "input_ids" and "attention_mask" in columns else [chosen]


def _without_column(source: Source, options: DataOptions) -> Source:
    if options.column is not None:
        raise DataError(f"{source.name}: has no columns. Leave column '{options.column}' out.")
    return source


def _refuse_split(name: str, options: DataOptions) -> None:
    """Say no to a split of data that has none."""
    if options.split != _SPLIT:
        raise DataError(f"{name}: has no splits. Leave split '{options.split}' out.")


def _no_data(name: str, data: Any) -> DataError:
    return DataError(
        f"{name}: {described(data)} is no data. Give a list of texts, a file, a dataset, token ids or batches."
    )


# ---- files and folders -----------------------------------------------------------------------------------------------


def _from_file(path: Path, options: DataOptions) -> Source:
    _check_kind(path)
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    try:
        if path.suffix.lower() in readers:
            return _from_memory(path.name, readers[path.suffix.lower()](path, options), options)
        text = _text(path)
        _refuse_split(path.name, options)
    except FileNotFoundError:
        raise _no_file(path) from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}). Check its path and its permissions."
        ) from None
    if _SEPARATOR in text:
        return _without_column(Source(path.name, [each.strip() for each in text.split(_SEPARATOR)]), options)
    if options.pack is False:
        return _without_column(Source(path.name, text.split("\n")), options)
    pieces = list(_pieces(text, options.max_seq_length * _CHARACTERS_PER_TOKEN))
    return _without_column(Source(path.name, pieces, is_running=True), options)


def _check_kind(path: Path) -> None:
    """Say no to what is neither a file nor a folder: a pipe that nobody writes to would be waited for for ever."""
    odd = _odd_kind(path)
    if odd == "a pipe" and str(path.parent) in _OPEN_FILES:  # as a shell gives what another command writes
        return
    if odd is not None:
        raise DataError(f"{path}: is {odd}, and no file. Write what comes out of it to a file, and give that.")


def _odd_kind(path: Path) -> str | None:
    """What something is that is there and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:  # whoever opens it will say why
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _no_file(path: Path) -> DataError:
    return DataError(f"{path}: there is no such file.{_nearest_file(path)}")


def _nearest_file(path: Path) -> str:
    """A sentence that names the file beside it whose name is nearest, if one is near."""
    return did_you_mean(path.name, os.listdir(path.parent) if os.access(path.parent, os.R_OK) else [])


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError(
            f"{path.name}: is not text in UTF-8. Save it so, as {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}."
        )
    return text


def _pieces(text: str, size: int) -> Iterator[str]:
    """Running text in pieces of about `size` characters, cut between lines if possible, or else between words."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            breaks = (text.rfind(mark, start + size // 2, end) for mark in ("\n", " "))
            end = next((at + 1 for at in breaks if at >= 0), end)
        yield text[start:end].strip()
        start = end


def _jsonl(path: Path, options: DataOptions) -> list[Any]:
    rows = []
    # Not splitlines(): JSON may have line separators of Unicode in its strings.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path.name}:{number}: not JSON: {error.msg}. Mend that line.") from None
            except (ValueError, RecursionError) as error:  # numbers of too many digits; too deep
                raise DataError(
                    f"{path.name}:{number}: {_TOO_MUCH} ({first_line(error)}). Write plain texts."
                ) from None
    return rows


def _json(path: Path, options: DataOptions) -> Any:
    text = _text(path)
    if not text.strip():
        return []
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a value on each line
            return _jsonl(path, options)
        raise DataError(f"{path.name}:{error.lineno}: not JSON: {error.msg}. Mend that line.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name}: {_TOO_MUCH} ({first_line(error)}). Write plain texts.") from None
    if not isinstance(data, list | dict):
        raise DataError(f"{path.name}: {described(data)} is no list of samples. Write a list of texts.")
    return data


def _csv(path: Path, options: DataOptions) -> list[Any]:
    text = _text(path)
    reader = csv.DictReader(io.StringIO(text if text.strip() else ""), strict=True)
    try:
        names = list(reader.fieldnames or ())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path.name}: {names.count(twice)} of its columns are called '{twice}'. Rename them.")
        return list(reader)
    except csv.Error as error:
        raise DataError(f"{path.name}:{reader.reader.line_num}: not CSV: {error}. Write it as .jsonl.") from None


def _parquet(path: Path, options: DataOptions) -> list[Any]:
    parquet, arrow = _extra("pyarrow.parquet", path.name), _extra("pyarrow", path.name)
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            chosen = _choose(columns, path.name, options.column)
            rows: list[Any] = file.read(columns=_needed(chosen, columns)).to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path.name}: not Parquet ({first_line(error)}). Write it again, or as .jsonl.") from None
    return rows


def _from_folder(path: Path, options: DataOptions) -> Source:
    """A folder that `Dataset.save_to_disk` has written, or one of data files."""
    if not any(each.suffix.lower() in _SUFFIXES for each in chain(path.glob("*"), path.glob("*/*"))):
        raise DataError(f"{path}: is a folder without data. Give a file: {', '.join(_SUFFIXES)}.")
    datasets = _extra("datasets", path.name)
    is_saved = any((path / each).is_file() for each in ("state.json", "dataset_dict.json"))
    try:
        with _in_silence(datasets):
            loaded = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path))
    except Exception as error:  # each reader of a file has its own
        raise DataError(
            f"{path}: a folder whose data cannot be loaded ({first_line(error)}). Give one of its files."
        ) from None
    return _from_memory(path.name, loaded, options)


def _from_hub(name: str, options: DataOptions) -> Source:
    check_file(name)
    datasets, repository = _extra("datasets", name), name.partition(":")[0]
    with hub_asked_once(repository, file="README.md", kind="dataset") as reason:
        try:
            with _in_silence(datasets):
                loaded = datasets.load_dataset(*name.split(":", 1), split=options.split)
        except Exception as error:  # the hub has many ways to say no
            raise DataError(
                f"{name}: neither a file nor a dataset that can be loaded ({reason or first_line(error)})."
                f"{_nearest_file(Path(repository))} Check its name, or give a file."
            ) from None
    return _from_memory(name, loaded, replace(options, split=_SPLIT))


@contextmanager
def _in_silence(datasets: Any) -> Iterator[None]:
    """While inside, `datasets` draws no progress bars without a terminal, and the hub does not ask for cards."""
    is_drawn = not datasets.are_progress_bars_disabled()
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
        if is_drawn:
            datasets.enable_progress_bars()


def _extra(module: str, name: str) -> Any:
    """A module that comes with the extra `data`."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise DataError(f"{name}: {package} would read it, and is missing. pip install 'scalewright[data]'.") from None


# ---- what a row is ---------------------------------------------------------------------------------------------------


def plain(sample: Any) -> Any:
    """Tensors and arrays as lists; [1, tokens] is one sample."""
    if hasattr(sample, "tolist"):
        sample = sample.tolist()
    if isinstance(sample, list | tuple) and len(sample) == 1 and isinstance(sample[0], list):
        return sample[0]
    return list(sample) if isinstance(sample, tuple) else sample


def kind_of(sample: Any) -> str | None:
    """What a sample is, in words; None if it is no sample."""
    if isinstance(sample, str):
        return "text"
    if isinstance(sample, list) and sample:
        if all(isinstance(each, Mapping) for each in sample):
            return "chat messages"
        if all(map(is_id, sample)):
            return "token ids"
    return None


def other_split(split: str) -> dict[str, str]:
    """The split as an option, if it is another than the one that is taken anyway."""
    return {} if split == _SPLIT else {"split": split}


def check_seed(seed: Any) -> None:
    """Say no to a seed that no generator takes."""
    if not is_id(seed):
        raise DataError(f"seed: expected a whole number, got {seed!r}.")
    if not -(2**63) <= seed < 2**64:
        raise DataError(f"seed: {seed} is too large for a generator. Use one of up to 63 bits.")


def is_id(value: Any) -> bool:
    """Whether a value can be a token id."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_batch(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 2 and len(value) > 1 and has_ids(value)
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) and each.ndim >= 2 for each in value.values())


def has_ids(tensor: Tensor) -> bool:
    """Whether a tensor can have token ids in it."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


# ---- in words --------------------------------------------------------------------------------------------------------


def described(value: Any) -> str:
    """What a value is, for an error."""
    if isinstance(value, list) and value:
        odd = next((each for each in value if not is_id(each)), value[0])
        return f"a list with {type(odd).__name__}"
    return "None" if value is None else type(value).__name__


def listed(names: Iterable[Any]) -> str:
    """Names in a row; where a file has no header they may be whole texts."""
    short = [text if len(text) <= 40 else f"{text[:37]}..." for text in map(str, names)]
    return ", ".join([*short[:20], *["..."] * (len(short) > 20)]) or "none"


def first_line(error: BaseException) -> str:
    """What an error says, in one line: the cause of it, where it names one."""
    deepest = error.__cause__ or error
    return next(iter(str(deepest).strip().splitlines()), type(deepest).__name__)
