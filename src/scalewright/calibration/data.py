"""Calibration data: texts, files, datasets, token ids or ready batches become batches that a model can be called with.

Samples are chosen with a seed, turned into token ids, cut to `max_seq_length` (or joined and cut into full sequences),
and put together in batches of similar length with padding and a mask. A tokenizer is asked for only where there is
text, and is left as it was. What comes as a stream (a generator, a DataLoader) is taken in its own order, as far as it
is needed; batches that are ready are used as they are.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from scalewright.errors import DataError, did_you_mean

_SEPARATOR = "<|endoftext|>"
_COLUMNS = ("input_ids", "text", "messages", "conversations", "content", "prompt")  # looked for in this order
_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]+)?")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_TOKENS_PER_BATCH = 2048
_FEW_TOKENS = 2048
_CHARACTERS_PER_TOKEN = 4
_MUCH_UNKNOWN = 0.02


@dataclass(frozen=True)
class DataOptions:
    """How samples are chosen, cut and put together."""

    num_samples: int = 512
    max_seq_length: int = 2048
    batch_size: int | None = None
    """Sequences in one batch; None for about 2048 tokens."""
    column: str | None = None
    pack: bool | None = None
    """Whether samples are joined and cut into sequences of full length; None to do so for a text file of lines."""
    split: str = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_seq_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name}: is {value}. Use 1 or more.")


@dataclass
class Samples:
    """Batches for a model, and what is known of them."""

    batches: list[dict[str, Any]]
    num_samples: int
    num_tokens: int
    """Tokens that count: padding does not."""
    notes: list[str] = field(default_factory=list)


Tokenizer = Any


def load_samples(
    dataset: Any,
    options: DataOptions,
    *,
    tokenizer: Callable[[], Tokenizer] | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> Samples:
    """Batches from whatever `dataset` is; `tokenizer()` is called only where there is text.

    No sequence is longer than `max_positions`, if that is known of the model.
    """
    notes: list[str] = []
    if max_positions is not None and max_positions < options.max_seq_length:
        notes.append(
            f"max_seq_length: {options.max_seq_length} is more than the model's {max_positions} positions; "
            f"sequences have {max_positions} tokens at the most."
        )
        options = replace(options, max_seq_length=max_positions)
    source = _open(dataset, options)
    if source.is_ready:
        samples = _ready(source, options, vocab_size)
    else:
        samples = _made(source, options, _Encoder(source.name, tokenizer), vocab_size)
    samples.notes[:0] = notes
    return samples


def _made(source: _Source, options: DataOptions, encoder: _Encoder, vocab_size: int | None) -> Samples:
    """Samples made of texts, chats or token ids."""
    encoded = (ids for number, sample in source.samples(options.seed) if (ids := encoder.ids(number, sample)))
    is_packed = source.is_running if options.pack is None else options.pack
    cut = _packed(encoded, options, encoder) if is_packed else (each[: options.max_seq_length] for each in encoded)
    found = list(islice(cut, options.num_samples))
    if not found:
        raise DataError(
            f"{source.name}: {'all its samples are empty' if encoder.has_empty else 'there is nothing in it'}."
        )
    _check_vocabulary(min(map(min, found)), max(map(max, found)), vocab_size, source.name)
    sequences = [torch.tensor(each) for each in found]
    num_tokens = sum(len(each) for each in sequences)
    short = _shortage(source.name, options, len(sequences), num_tokens, is_packed=is_packed)
    notes = [*encoder.notes(sequences), *short]
    return Samples(list(_batched(sequences, options.batch_size, encoder.pad)), len(sequences), num_tokens, notes)


def _packed(encoded: Iterable[list[int]], options: DataOptions, encoder: _Encoder) -> Iterator[list[int]]:
    """All samples one after another, in sequences of full length; the last one has what is left."""
    stream: list[int] = []
    for ids in encoded:
        stream += ids
        if encoder.end is not None and ids[-1] != encoder.end:
            stream.append(encoder.end)
        while len(stream) >= options.max_seq_length:
            yield stream[: options.max_seq_length]
            del stream[: options.max_seq_length]
    if stream:
        yield stream


def _check_vocabulary(least: int, largest: int, vocab_size: int | None, name: str) -> None:
    if least < 0 or largest >= (2**63 if vocab_size is None else vocab_size):
        raise DataError(
            f"{name}: token id {least if least < 0 else largest} is outside the model's vocabulary"
            f"{'' if vocab_size is None else f' of {vocab_size} tokens'}. Use the model's own tokenizer."
        )


def _shortage(name: str, options: DataOptions, num_samples: int, num_tokens: int, *, is_packed: bool) -> list[str]:
    """Notes where there is too little data."""
    notes = []
    if num_samples < options.num_samples:
        full = f" once they are packed into sequences of {options.max_seq_length} tokens" if is_packed else ""
        notes.append(f"{name}: {options.num_samples} samples were asked for, and there are {num_samples}{full}.")
    if num_tokens < _FEW_TOKENS:
        notes.append(
            f"{name}: {num_tokens} tokens are little to calibrate with; scales may not fit other text. "
            f"Give {_FEW_TOKENS} or more."
        )
    return notes


# ---- where samples come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Rows that can be numbered, or that come in a stream; the column of them that is meant, where there are any."""

    name: str
    rows: Any
    column: str | None = None
    is_running: bool = False
    """Whether the rows are pieces of running text: to be joined, unless one says otherwise."""
    is_ready: bool = False
    """Whether the rows are batches as a model is called with."""

    def samples(self, seed: int) -> Iterator[tuple[int, Any]]:
        """Samples and their numbers, counted from 1: chosen with the seed, or as they come."""
        if isinstance(self.rows, Iterator):
            numbered: Iterable[tuple[int, Any]] = enumerate(self.rows)
        else:
            numbered = ((i, self.rows[i]) for i in _shuffled(len(self.rows), seed))
        for i, row in numbered:
            yield i + 1, self._cell(i + 1, row)

    def _cell(self, number: int, row: Any) -> Any:
        """The sample of a row; an empty text where it has none."""
        if self.column is None:
            return row
        if not isinstance(row, Mapping):
            raise DataError(f"{self.name}: sample {number} is {_described(row)}, and others have columns.")
        if self.column not in row:
            raise DataError(f"{self.name}: sample {number} has no '{self.column}'. It has: {_listed(row)}.")
        value = row[self.column]
        mask = row.get("attention_mask") if self.column == "input_ids" else None
        if mask is None or value is None:
            return "" if value is None else value
        ids, keeps = _plain(value), _plain(mask)
        if len(ids) != len(keeps):
            raise DataError(f"{self.name}: sample {number} has {len(ids)} token ids and a mask of {len(keeps)}.")
        return [each for each, keep in zip(ids, keeps, strict=True) if keep]


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """The numbers below `count` in an order that depends on the seed; drawn one by one, so that few cost little."""
    random = Random(seed)
    moved: dict[int, int] = {}
    for i in range(count):
        j = random.randrange(i, count)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)


def _open(dataset: Any, options: DataOptions) -> _Source:
    """Find the rows of whatever `dataset` is."""
    if isinstance(dataset, str) and not os.path.exists(dataset):  # unlike Path, it bears a text that is no name at all
        return _from_hub(dataset, options)
    if isinstance(dataset, str | Path):
        path = Path(dataset)
        return _from_folder(path, options) if os.path.isdir(path) else _from_file(path, options)
    return _from_memory("data", dataset, options)


def _from_memory(name: str, data: Any, options: DataOptions) -> _Source:
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a table of pandas
        data = data.to_dict("list")
    if getattr(data, "ndim", None) == 1:
        data = data.tolist()
    if isinstance(data, Mapping):
        return _from_mapping(name, data, options)
    if isinstance(data, str | bytes | set | frozenset):  # a set has another order each time
        raise _no_data(name, data)
    if isinstance(data, DataLoader):
        return _without_column(_Source(name, iter(data), is_ready=True), options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        if getattr(data, "ndim", 1) == 0:
            raise _no_data(name, data)
        return _from_rows(name, data, data[0] if len(data) else None, options)
    if isinstance(data, Iterable):
        stream = iter(data)
        some = list(islice(stream, 1))
        return _from_rows(name, chain(some, stream), some[0] if some else None, options)
    raise _no_data(name, data)


def _from_rows(name: str, rows: Any, first: Any, options: DataOptions) -> _Source:
    """Rows in a sequence or a stream, by what the first one is."""
    if first is None:
        return _Source(name, rows, options.column)
    if _is_batch(first):
        return _without_column(_Source(name, iter(rows), is_ready=True), options)
    if isinstance(first, Mapping):
        is_message = any(pair <= set(first) for pair in ({"role", "content"}, {"from", "value"}))
        if is_message and options.column is None and isinstance(rows, list | tuple):
            return _Source(name, [list(rows)])  # one chat
        chosen = _choose(first, name, options.column)
        if hasattr(rows, "select_columns"):
            rows = rows.select_columns(_needed(chosen, first))
        return _Source(name, rows, chosen)
    if _is_id(first) and not isinstance(rows, Iterator):  # one long run of tokens
        length = options.max_seq_length
        rows = [list(rows[i : i + length]) for i in range(0, len(rows), length)]
    return _without_column(_Source(name, rows), options)


def _from_mapping(name: str, data: Mapping[str, Any], options: DataOptions) -> _Source:
    """Splits of a dataset, a batch, columns, or one row."""
    if any(hasattr(each, "column_names") for each in data.values()) and options.split not in data:
        raise DataError(
            f"{name}: there is no split '{options.split}'.{did_you_mean(options.split, data)} Splits: {_listed(data)}."
        )
    if options.split in data:
        return _from_memory(name, data[options.split], options)
    if _is_batch(data):
        return _from_rows(name, [data], data, options)
    lists = [each for each in data.values() if isinstance(each, list)]
    if len(lists) == 1 and not {*_COLUMNS, options.column} & set(data):
        return _from_memory(name, lists[0], options)  # {"version": 1, "rows": [...]}
    chosen = _choose(data, name, options.column)
    if not hasattr(data[chosen], "__getitem__") or _kind(_plain(data[chosen])):
        return _Source(name, [data], chosen)
    columns = {each: data[each] for each in _needed(chosen, data)}
    if len({len(each) for each in columns.values()}) > 1:
        raise DataError(f"{name}: columns have {' and '.join(str(len(each)) for each in columns.values())} rows.")
    return _Source(name, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], chosen)


def _choose(columns: Iterable[Any], name: str, column: str | None) -> str:
    """The column that is meant: the one that is named, or the first that usually has samples."""
    known = [each for each in columns if isinstance(each, str)]
    chosen = column or next((each for each in _COLUMNS if each in known), None)
    if chosen is None or chosen not in known:
        wanted = f"no column '{column}'.{did_you_mean(column, known)}" if column else "no column that is known."
        raise DataError(f"{name}: there is {wanted} Columns: {_listed(known)}. Name one of them as column.")
    return chosen


def _needed(chosen: str, columns: Iterable[str]) -> list[str]:
    """The chosen column, and the one that says which of its token ids count."""
    return [chosen, "attention_mask"] if chosen == "input_ids" and "attention_mask" in columns else [chosen]


def _without_column(source: _Source, options: DataOptions) -> _Source:
    if options.column is not None:
        raise DataError(f"{source.name}: has no columns. Leave column '{options.column}' out.")
    return source


def _no_data(name: str, data: Any) -> DataError:
    return DataError(
        f"{name}: {_described(data)} is no data. Give a list of texts, a file, a dataset, token ids or batches."
    )


def _listed(names: Iterable[Any]) -> str:
    """Names in a row; where a file has no header they may be whole texts."""
    short = [text if len(text) <= 40 else f"{text[:37]}..." for text in map(str, names)]
    return ", ".join([*short[:20], *["..."] * (len(short) > 20)]) or "none"


# ---- files and folders -----------------------------------------------------------------------------------------------


def _from_file(path: Path, options: DataOptions) -> _Source:
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    try:
        if path.suffix.lower() in readers:
            return _from_memory(path.name, readers[path.suffix.lower()](path, options), options)
        text = _text(path)
    except FileNotFoundError:
        raise _no_file(path) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if _SEPARATOR in text:
        return _without_column(_Source(path.name, [each.strip() for each in text.split(_SEPARATOR)]), options)
    if options.pack is False:
        return _without_column(_Source(path.name, text.split("\n")), options)
    pieces = list(_pieces(text, options.max_seq_length * _CHARACTERS_PER_TOKEN))
    return _without_column(_Source(path.name, pieces, is_running=True), options)


def _no_file(path: Path) -> DataError:
    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK) else []
    return DataError(f"{path}: there is no such file.{did_you_mean(path.name, beside)}")


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError(f"{path.name}: is not text in UTF-8. Use {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}.")
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
                raise DataError(f"{path.name}:{number}: not JSON: {error.msg}.") from None
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
        raise DataError(f"{path.name}:{error.lineno}: not JSON: {error.msg}.") from None
    if not isinstance(data, list | dict):
        raise DataError(f"{path.name}: {_described(data)} is no list of samples.")
    return data


def _csv(path: Path, options: DataOptions) -> list[Any]:
    text = _text(path)
    reader = csv.DictReader(io.StringIO(text if text.strip() else ""))
    try:
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
        raise DataError(f"{path.name}: not Parquet: {_first_line(error)}") from None
    return rows


def _from_folder(path: Path, options: DataOptions) -> _Source:
    """A folder that `Dataset.save_to_disk` has written, or one of data files."""
    if not any(each.suffix.lower() in _SUFFIXES for each in chain(path.glob("*"), path.glob("*/*"))):
        raise DataError(f"{path}: is a folder without data. Give a file: {', '.join(_SUFFIXES)}.")
    datasets = _extra("datasets", path.name)
    is_saved = any((path / each).is_file() for each in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path))
    except Exception as error:  # each reader of a file has its own
        raise DataError(f"{path}: a folder whose data cannot be loaded ({_first_line(error)}).") from None
    return _from_memory(path.name, loaded, options)


def _from_hub(name: str, options: DataOptions) -> _Source:
    if Path(name).suffix.lower() in _SUFFIXES or name.startswith(("/", "./", "../", "~")):
        raise _no_file(Path(name))
    if not _HUB_NAME.fullmatch(name):
        raise DataError(f"data: {_listed([repr(name)])} is neither a file nor a dataset. Give texts as a list of them.")
    datasets = _extra("datasets", name)
    try:
        loaded = datasets.load_dataset(*name.split(":", 1), split=options.split)
    except Exception as error:  # the hub has many ways to say no
        raise DataError(f"{name}: neither a file nor a dataset that can be loaded ({_first_line(error)}).") from None
    return _from_memory(name, loaded, options)


def _extra(module: str, name: str) -> Any:
    """A module that comes with the extra `data`."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise DataError(f"{name}: {package} would read it, and is missing. pip install 'scalewright[data]'.") from None


def _first_line(error: BaseException) -> str:
    """What an error says, in one line: the cause of it, where it names one."""
    deepest = error.__cause__ or error
    return next(iter(str(deepest).strip().splitlines()), type(deepest).__name__)


# ---- samples to token ids --------------------------------------------------------------------------------------------


class _Encoder:
    """Turns samples, all of one kind, into token ids."""

    def __init__(self, name: str, make_tokenizer: Callable[[], Tokenizer] | None) -> None:
        self.name = name
        self.has_empty = False
        self._make_tokenizer = make_tokenizer
        self._first: tuple[int, str] | None = None

    def ids(self, number: int, sample: Any) -> list[int]:
        """The token ids of a sample; none if there is nothing in it."""
        sample = _plain(sample)
        if sample == [] or (isinstance(sample, str) and not sample.strip()):
            self.has_empty = True
            return []
        kind = _kind(sample)
        if kind is None:
            raise DataError(
                f"{self.name}: sample {number} is {_described(sample)}. A sample is text, chat messages or token ids."
            )
        self._first = self._first or (number, kind)
        if kind != self._first[1]:
            raise DataError(
                f"{self.name}: sample {number} is {kind}, and sample {self._first[0]} is {self._first[1]}. "
                "Give samples of one kind."
            )
        if kind == "token ids":
            return [int(each) for each in sample]
        text = self._chat(number, sample) if kind == "chat messages" else sample
        # Not cut by the tokenizer, which would remember it and be saved so; not verbose, for it warns of long texts.
        found = self._tokenizer(text, add_special_tokens=kind == "text", verbose=False)["input_ids"]
        return [int(each) for each in found]

    @property
    def pad(self) -> int:
        """What stands in masked places."""
        names = ("pad_token_id", "eos_token_id", "unk_token_id") if self._has_text else ()
        return next((int(each) for name in names if (each := getattr(self._tokenizer, name, None)) is not None), 0)

    @property
    def end(self) -> int | None:
        """What stands after a text when another one follows."""
        is_text = self._first is not None and self._first[1] == "text"
        found = getattr(self._tokenizer, "eos_token_id", None) if is_text else None
        return None if found is None else int(found)

    def notes(self, sequences: Sequence[Tensor]) -> list[str]:
        """Whether much of the text is outside the vocabulary: unknown, or spelled in bytes."""
        if not self._has_text:
            return []
        ids = torch.cat(list(sequences))
        share = float(torch.isin(ids, torch.tensor(self._outside(), dtype=ids.dtype)).double().mean())
        if share <= _MUCH_UNKNOWN:
            return []
        return [
            f"{self.name}: {share:.0%} of its tokens stand for text outside the vocabulary. Is it text that the model "
            "knows?"
        ]

    @property
    def _has_text(self) -> bool:
        return self._first is not None and self._first[1] != "token ids"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._make_tokenizer is None:
            raise DataError(f"{self.name}: there is text in it, and no tokenizer. Give one, or give token ids.")
        made = self._make_tokenizer()
        if not callable(made):
            raise DataError(f"{self.name}: {type(made).__name__} is no tokenizer of transformers. Give one of these.")
        return made

    def _outside(self) -> list[int]:
        """Ids of unknown text, and of bytes of letters that have no token. ASCII is left out: a new line may be one."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        known = self._tokenizer.get_vocab()
        spelled = [known[name] for byte in range(0x80, 0x100) if (name := f"<0x{byte:02X}>") in known]
        return spelled if unknown is None else [int(unknown), *spelled]

    def _chat(self, number: int, sample: Sequence[Mapping[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f"{self.name}: there are chat messages in it, and the tokenizer has no chat template. Give texts, or a "
                "tokenizer that has one."
            )
        messages = [self._message(number, each) for each in sample]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates raise what they like
            raise DataError(
                f"{self.name}: sample {number}: the chat template refuses it ({_first_line(error)})."
            ) from None

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates want it; ShareGPT calls things otherwise."""
        if "role" in message:
            return dict(message)
        if "from" in message:
            role = str(message["from"])
            return {"role": _ROLES.get(role, role), "content": message.get("value", "")}
        raise DataError(
            f"{self.name}: sample {number} has a message without 'role' or 'from'. It has: {_listed(message)}."
        )


def _plain(sample: Any) -> Any:
    """Tensors and arrays as lists; [1, tokens] is one sample."""
    if hasattr(sample, "tolist"):
        sample = sample.tolist()
    if isinstance(sample, list | tuple) and len(sample) == 1 and isinstance(sample[0], list):
        return sample[0]
    return list(sample) if isinstance(sample, tuple) else sample


def _kind(sample: Any) -> str | None:
    if isinstance(sample, str):
        return "text"
    if isinstance(sample, list) and sample:
        if all(isinstance(each, Mapping) for each in sample):
            return "chat messages"
        if all(map(_is_id, sample)):
            return "token ids"
    return None


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if isinstance(value, list) and value:
        odd = next((each for each in value if not _is_id(each)), value[0])
        return f"a list with {type(odd).__name__}"
    return "None" if value is None else type(value).__name__


# ---- batches ---------------------------------------------------------------------------------------------------------


def _batched(sequences: Sequence[Tensor], batch_size: int | None, pad: int) -> Iterator[dict[str, Any]]:
    """Batches of similar length, the longest first: what is too much for the memory shows at once."""
    ordered = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        size = batch_size or max(1, _TOKENS_PER_BATCH // len(ordered[start]))
        some = ordered[start : start + size]
        yield {
            "input_ids": pad_sequence(some, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in some], batch_first=True),
        }
        start += size


def _ready(source: _Source, options: DataOptions, vocab_size: int | None) -> Samples:
    """Batches as they are, from the first on, until there are enough samples in them."""
    if options.pack:
        raise DataError(
            f"{source.name}: its batches are ready, and cannot be packed. Leave pack out, or give token ids."
        )
    found = Samples([], 0, 0)
    longest = 0
    for number, row in enumerate(source.rows, start=1):
        batch = _batch_of(number, row, source.name)
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            if ids.numel():
                _check_vocabulary(int(ids.min()), int(ids.max()), vocab_size, source.name)
            longest = max(longest, ids.shape[-1])
        num_samples, num_tokens = _size_of(batch)
        found.batches.append(batch)
        found.num_samples += num_samples
        found.num_tokens += num_tokens
        if found.num_samples >= options.num_samples:
            break
    if found.num_samples == 0:
        raise DataError(f"{source.name}: there is nothing in it.")
    if options.batch_size is not None:
        found.notes.append(f"{source.name}: its batches are used as they are, not in batches of {options.batch_size}.")
    if longest > options.max_seq_length:
        found.notes.append(
            f"{source.name}: its batches are used as they are, with up to {longest} tokens in a sequence, more than "
            f"{options.max_seq_length}."
        )
    found.notes += _shortage(source.name, options, found.num_samples, found.num_tokens, is_packed=False)
    return found


def _batch_of(number: int, row: Any, name: str) -> dict[str, Any]:
    """A batch as a dict; a tensor of token ids is one too, alone or as DataLoaders of one tensor give it."""
    if isinstance(row, list | tuple) and len(row) == 1:
        row = row[0]
    if isinstance(row, Tensor) and row.ndim == 2 and _has_ids(row):
        return {"input_ids": row}
    if isinstance(row, Mapping) and any(isinstance(each, Tensor) and each.ndim > 0 for each in row.values()):
        return dict(row)
    what = f"a dict without tensors ({_listed(row)})" if isinstance(row, Mapping) else _described(row)
    raise DataError(
        f"{name}: batch {number} is {what}. A batch is a dict of tensors that the model is called with, or token ids "
        "[samples, tokens]."
    )


def _is_batch(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 2 and len(value) > 1 and _has_ids(value)
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) and each.ndim >= 2 for each in value.values())


def _has_ids(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Samples and tokens of a batch; padding does not count."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return len(mask), int((mask != 0).sum())
    values = (batch.get("input_ids"), *batch.values())
    first = next((each for each in values if isinstance(each, Tensor) and each.ndim >= 2), None)
    return (1, 0) if first is None else (len(first), first.shape[:2].numel())
