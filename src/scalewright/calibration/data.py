"""Calibration data: texts, files, datasets, token ids or ready batches become batches that a model can be called with.

Samples are chosen with a seed, tokenised, cut to `max_seq_length` (or packed into full sequences), and put together in
batches of similar length with padding and a mask. A tokenizer is asked for only where there is text.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewright.errors import DataError, did_you_mean

_SEPARATOR = "<|endoftext|>"
_COLUMNS = ("text", "messages", "conversations", "content", "prompt", "input_ids")  # looked for in this order
_TOKENS_PER_BATCH = 2048
_FEW_TOKENS = 2048
_MUCH_UNKNOWN = 0.01


@dataclass(frozen=True)
class DataOptions:
    """How samples are chosen, cut and put together."""

    num_samples: int = 512
    max_seq_length: int = 2048
    batch_size: int | None = None
    """Sequences in one batch; None for about 2048 tokens."""
    column: str | None = None
    pack: bool | None = None
    """Whether texts are joined into sequences of full length; None to do so for a text file of lines."""
    split: str = "train"
    seed: int = 0


@dataclass
class Samples:
    """Batches for a model, and what is known of them."""

    batches: list[dict[str, Any]]
    num_samples: int
    num_tokens: int
    notes: list[str] = field(default_factory=list)


Tokenizer = Any


def load_samples(
    dataset: Any,
    options: DataOptions,
    *,
    tokenizer: Callable[[], Tokenizer] | None = None,
    vocab_size: int | None = None,
) -> Samples:
    """Batches from whatever `dataset` is; `tokenizer()` is called only where there is text."""
    ready = _ready_batches(dataset, options)
    if ready is not None:
        return ready
    source = _Source.of(dataset, options)
    samples = list(source.samples)
    if not samples:
        raise DataError(f"{source.name}: there is nothing in it.")
    random.Random(options.seed).shuffle(samples)
    notes: list[str] = []
    if _is_ids(samples[0]):
        sequences = [_ids(each, source.name) for each in samples[: options.num_samples]]
        pad = 0
    else:
        if tokenizer is None:
            raise DataError(f"{source.name}: there is text in it, and no tokenizer. Give one, or give token ids.")
        encoder = _Encoder(tokenizer(), source.name)
        pack = source.is_lines if options.pack is None else options.pack
        if pack:
            sequences = encoder.packed(samples, options)
        else:
            sequences = [encoder.ids(each) for each in samples[: options.num_samples]]
        pad = encoder.pad
        notes += encoder.notes()
    sequences = [each[: options.max_seq_length] for each in sequences if len(each) > 0]
    if not sequences:
        raise DataError(f"{source.name}: all texts are empty.")
    _check_vocabulary(sequences, vocab_size, source.name)
    num_tokens = sum(len(each) for each in sequences)
    if len(sequences) < options.num_samples:
        notes.append(f"{source.name}: {options.num_samples} samples were asked for, and there are {len(sequences)}.")
    if num_tokens < _FEW_TOKENS:
        notes.append(
            f"{source.name}: {num_tokens} tokens are little to calibrate with; scales may not fit other text. "
            f"Give {_FEW_TOKENS} or more."
        )
    return Samples(list(_batched(sequences, options, pad)), len(sequences), num_tokens, notes)


# ---- where samples come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    name: str
    samples: Iterable[Any]
    is_lines: bool = False

    @classmethod
    def of(cls, dataset: Any, options: DataOptions) -> _Source:
        if isinstance(dataset, Path) or (isinstance(dataset, str) and Path(dataset).exists()):
            return _from_file(Path(dataset), options)
        if isinstance(dataset, str):
            return _from_hub(dataset, options)
        if isinstance(dataset, Tensor):
            if dataset.ndim not in (1, 2) or dataset.is_floating_point():
                raise DataError(
                    f"data: a tensor of token ids is whole numbers [samples, tokens], got {dataset.dtype} "
                    f"{tuple(dataset.shape)}."
                )
            return cls("data", dataset.unsqueeze(0) if dataset.ndim == 1 else dataset)
        if hasattr(dataset, "column_names") and not isinstance(dataset, Mapping):
            return cls("dataset", _column_of(dataset, "dataset", options.column))
        if isinstance(dataset, Mapping) and any(hasattr(each, "column_names") for each in dataset.values()):
            if options.split not in dataset:
                raise DataError(
                    f"dataset: there is no split '{options.split}'.{did_you_mean(options.split, dataset)} "
                    f"Splits: {', '.join(dataset)}."
                )
            return cls.of(dataset[options.split], options)
        if isinstance(dataset, Sequence) and len(dataset) > 0 and isinstance(dataset[0], Mapping):
            return cls("data", _column_of(dataset, "data", options.column))
        if isinstance(dataset, Sequence):
            if dataset and isinstance(dataset[0], int):
                return cls("data", [dataset])
            return cls("data", dataset)
        if isinstance(dataset, Iterable):
            return cls("data", list(dataset))
        raise DataError(
            f"data: {type(dataset).__name__} is no data. Give texts, a file, a dataset, token ids or batches."
        )


def _from_file(path: Path, options: DataOptions) -> _Source:
    if path.is_dir():
        raise DataError(f"{path}: is a folder. Give a file: .txt, .jsonl, .json, .csv or .parquet.")
    suffix = path.suffix.lower()
    try:
        if suffix in (".jsonl", ".json", ".csv", ".parquet"):
            rows = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[suffix](path)
            if rows and isinstance(rows[0], str):
                return _Source(path.name, rows)
            return _Source(path.name, _column_of(rows, path.name, options.column))
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path.name}: is not text in UTF-8. Use .txt, .jsonl, .json, .csv or .parquet.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if options.column is not None:
        raise DataError(f"{path.name}: a text file has no columns. Leave column '{options.column}' out.")
    if _SEPARATOR in text:
        return _Source(path.name, [each.strip() for each in text.split(_SEPARATOR) if each.strip()])
    return _Source(path.name, [line.strip() for line in text.splitlines() if line.strip()], is_lines=True)


def _jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path.name}:{number}: not JSON: {error.msg}.") from None
    return rows


def _json(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: not JSON: {error.msg}.") from None
    if isinstance(data, Mapping):
        lists = [each for each in data.values() if isinstance(each, list)]
        data = lists[0] if len(lists) == 1 else [data]
    if not isinstance(data, list):
        raise DataError(f"{path.name}: expected a list of samples.")
    return data


def _csv(path: Path) -> list[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _parquet(path: Path) -> list[Any]:
    import pyarrow.parquet

    rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def _from_hub(name: str, options: DataOptions) -> _Source:
    import datasets

    try:
        loaded = datasets.load_dataset(*name.split(":", 1), split=options.split)
    except Exception as error:  # the hub has many ways to say no
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{name}: neither a file nor a dataset that could be loaded ({first}).") from None
    return _Source(name, _column_of(loaded, name, options.column))


def _column_of(rows: Any, name: str, column: str | None) -> list[Any]:
    """One column of a dataset or of a list of rows."""
    if hasattr(rows, "column_names"):
        columns = list(rows.column_names)
    else:
        bad = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
        if bad is not None:
            raise DataError(f"{name}: sample {bad + 1} is {type(rows[bad]).__name__}, and others have columns.")
        columns = list(rows[0]) if rows else []
    chosen = column or next((each for each in _COLUMNS if each in columns), None)
    if chosen is None or chosen not in columns:
        wanted = f"no column '{column}'.{did_you_mean(column, columns)}" if column else "no column that is known."
        raise DataError(
            f"{name}: there is {wanted} Columns: {', '.join(columns) or 'none'}. Name one of them as column."
        )
    if hasattr(rows, "column_names"):
        return list(rows[chosen])
    missing = next((i for i, row in enumerate(rows) if row.get(chosen) is None), None)
    if missing is not None:
        raise DataError(f"{name}: sample {missing + 1} has no '{chosen}'.")
    return [row[chosen] for row in rows]


# ---- text to ids -----------------------------------------------------------------------------------------------------


@dataclass
class _Encoder:
    tokenizer: Tokenizer
    name: str
    num_tokens: int = 0
    num_unknown: int = 0

    @property
    def pad(self) -> int:
        for each in ("pad_token_id", "eos_token_id", "unk_token_id"):
            token = getattr(self.tokenizer, each, None)
            if token is not None:
                return int(token)
        return 0

    def ids(self, sample: Any) -> list[int]:
        if isinstance(sample, list) and sample and all(isinstance(each, Mapping) for each in sample):
            if not getattr(self.tokenizer, "chat_template", None):
                raise DataError(f"{self.name}: there are chat messages in it, and the tokenizer has no chat template.")
            text = self.tokenizer.apply_chat_template(_messages(sample), tokenize=False)
            found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(sample, str):
            found = self.tokenizer(sample)["input_ids"]
        else:
            raise DataError(f"{self.name}: a sample is text, chat messages or token ids, got {type(sample).__name__}.")
        self.num_tokens += len(found)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        self.num_unknown += 0 if unknown is None else sum(each == unknown for each in found)
        return list(found)

    def packed(self, samples: Sequence[Any], options: DataOptions) -> list[list[int]]:
        end = getattr(self.tokenizer, "eos_token_id", None)
        sequences: list[list[int]] = []
        stream: list[int] = []
        for sample in samples:
            stream += [*self.ids(sample), *([] if end is None else [int(end)])]
            while len(stream) >= options.max_seq_length and len(sequences) < options.num_samples:
                sequences.append(stream[: options.max_seq_length])
                del stream[: options.max_seq_length]
            if len(sequences) == options.num_samples:
                return sequences
        return [*sequences, stream] if stream else sequences

    def notes(self) -> list[str]:
        if self.num_unknown <= _MUCH_UNKNOWN * self.num_tokens:
            return []
        share = 100 * self.num_unknown / self.num_tokens
        return [
            f"{self.name}: {share:.0f} % of its tokens are not in the vocabulary. Is it text that this model knows?"
        ]


def _messages(sample: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as templates want them; ShareGPT calls things otherwise."""
    roles = {"human": "user", "gpt": "assistant", "bot": "assistant"}
    return [
        dict(each)
        if "role" in each
        else {"role": roles.get(str(each.get("from")), str(each.get("from"))), "content": each.get("value", "")}
        for each in sample
    ]


def _is_ids(sample: Any) -> bool:
    if isinstance(sample, Tensor):
        return True
    return isinstance(sample, list | tuple) and len(sample) > 0 and isinstance(sample[0], int)


def _ids(sample: Any, name: str) -> list[int]:
    if isinstance(sample, Tensor) and sample.ndim == 1 and not sample.is_floating_point():
        return [int(each) for each in sample.tolist()]
    if isinstance(sample, list | tuple) and all(isinstance(each, int) for each in sample):
        return list(sample)
    raise DataError(f"{name}: not all samples are lists of token ids.")


def _check_vocabulary(sequences: Sequence[Sequence[int]], vocab_size: int | None, name: str) -> None:
    largest, least = max(max(each) for each in sequences), min(min(each) for each in sequences)
    if least < 0 or (vocab_size is not None and largest >= vocab_size):
        raise DataError(
            f"{name}: token id {least if least < 0 else largest} is outside the model's vocabulary of {vocab_size} tokens. "
            "Use the model's own tokenizer."
        )


# ---- batches ---------------------------------------------------------------------------------------------------------


def _batched(sequences: list[list[int]], options: DataOptions, pad: int) -> Iterator[dict[str, Tensor]]:
    """Batches of similar length, longest first."""
    ordered = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        size = options.batch_size or max(1, _TOKENS_PER_BATCH // len(ordered[start]))
        some = ordered[start : start + size]
        width = len(some[0])
        yield {
            "input_ids": torch.tensor([[*each, *[pad] * (width - len(each))] for each in some]),
            "attention_mask": torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in some]),
        }
        start += size


def _ready_batches(dataset: Any, options: DataOptions) -> Samples | None:
    """Batches that are ready as they are: a DataLoader, or dicts of tensors."""
    if isinstance(dataset, torch.utils.data.DataLoader) or (isinstance(dataset, Sequence) and len(dataset) > 0 and _is_batch(dataset[0])):
        batches = _some(dataset, options.num_samples)
    elif _is_batch(dataset):
        batches = [dict(dataset)]
    else:
        return None
    if not batches:
        raise DataError("data: there is nothing in it.")
    bad = next((i for i, each in enumerate(batches) if not isinstance(each, Mapping)), None)
    if bad is not None:
        raise DataError(
            f"data: batch {bad + 1} is {type(batches[bad]).__name__}. A batch is a dict of what the model is called with."
        )
    counts = [_size_of(each) for each in batches]
    return Samples(batches, sum(each[0] for each in counts), sum(each[1] for each in counts))


def _some(batches: Iterable[Any], num_samples: int) -> list[Any]:
    """Batches from the first on, until there are enough samples in them."""
    found: list[Any] = []
    count = 0
    for each in batches:
        if count >= num_samples:
            break
        found.append(dict(each) if isinstance(each, Mapping) else each)
        count += _size_of(each)[0] if isinstance(each, Mapping) else 1
    return found


def _is_batch(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) and each.ndim >= 2 for each in value.values())


def _size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Samples and tokens of a batch."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    first = next((each for each in batch.values() if isinstance(each, Tensor)), None)
    if isinstance(mask, Tensor):
        return len(mask), int(mask.sum())
    if isinstance(ids, Tensor):
        return len(ids), ids.numel()
    return (len(first), first.shape[:2].numel()) if first is not None else (1, 0)
