"""Calibration data: texts, files, datasets, token ids or ready batches become batches that a model can be called with.

Samples are chosen with a seed, turned into token ids, cut to `max_seq_length` (or joined and cut into full sequences),
and put together in batches of similar length with padding and a mask. A tokenizer is asked for only where there is
text, and is left as it was. What comes as a stream (a generator, a DataLoader) is taken in its own order, as far as it
is needed; batches that are ready are used as they are. Where rows come from is the business of sources.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scalewright.calibration.sources import (
    DataOptions,
    Source,
    described,
    first_line,
    has_ids,
    kind_of,
    listed,
    open_source,
    plain,
)
from scalewright.errors import DataError

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_FEW_TOKENS = 2048
_GIVE_SOME = "Give data that has text or token ids in it."
_MUCH_UNKNOWN = 0.02
_IDS = (torch.int32, torch.int64)  # what embeddings take
_HALF = re.compile("[\ud800-\udfff]")


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
    source = open_source(dataset, options)
    if source.is_ready:
        samples = _ready(source, options, vocab_size)
    else:
        samples = _made(source, options, _Encoder(source.name, tokenizer), vocab_size)
    samples.notes[:0] = notes
    return samples


def _made(source: Source, options: DataOptions, encoder: _Encoder, vocab_size: int | None) -> Samples:
    """Samples made of texts, chats or token ids."""
    encoded = (ids for number, sample in _chosen(source, options.seed) if (ids := encoder.ids(number, sample)))
    is_packed = source.is_running if options.pack is None else options.pack
    cut = _packed(encoded, options, encoder) if is_packed else (each[: options.max_seq_length] for each in encoded)
    found = list(islice(cut, min(options.num_samples, sys.maxsize)))
    if not found:
        raise DataError(
            f"{source.name}: {'all its samples are empty' if encoder.has_empty else 'there is nothing in it'}. "
            f"{_GIVE_SOME}"
        )
    _check_vocabulary(min(map(min, found)), max(map(max, found)), vocab_size, source.name)
    sequences = [torch.tensor(each) for each in found]
    num_tokens = sum(len(each) for each in sequences)
    short = _shortage(source.name, options, len(sequences), num_tokens, is_packed=is_packed)
    notes = [*encoder.notes(sequences), *short, *_copies(source.name, options, found)]
    return Samples(list(_batched(sequences, options, encoder.pad)), len(sequences), num_tokens, notes)


def _chosen(source: Source, seed: int) -> Iterator[tuple[int, Any]]:
    """Samples and their numbers, counted from 1: chosen with the seed, or as they come."""
    rows = source.rows
    numbered = enumerate(rows) if isinstance(rows, Iterator) else ((i, rows[i]) for i in _shuffled(len(rows), seed))
    for i, row in numbered:
        yield i + 1, source.sample(i + 1, row)


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """The numbers below `count` in an order that depends on the seed; drawn one by one, so that few cost little."""
    random = Random(seed)
    moved: dict[int, int] = {}
    for i in range(count):
        j = random.randrange(i, count)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)


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
    if num_tokens < _FEW_TOKENS and options.is_calibration:
        notes.append(
            f"{name}: {num_tokens} tokens are little to calibrate with; scales may not fit other text. "
            f"Give {_FEW_TOKENS} or more."
        )
    return notes


def _copies(name: str, options: DataOptions, samples: Sequence[Sequence[int]]) -> list[str]:
    """A note where half of the samples or more are copies: they count as tokens, and GPTQ fits what few there are."""
    num_different = len(set(map(tuple, samples)))
    if not options.is_calibration or 2 * num_different > len(samples) or num_different == len(samples):
        return []
    return [
        f"{name}: of {len(samples)} samples {num_different} are different, and the others are copies, which say "
        "nothing new. Give other text."
    ]


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
        sample = plain(sample)
        if sample == [] or (isinstance(sample, str) and not sample.strip()):
            self.has_empty = True
            return []
        kind = kind_of(sample)
        if kind is None:
            raise DataError(
                f"{self.name}: sample {number} is {described(sample)}. A sample is text, chat messages or token ids."
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
        if half := _HALF.search(text):
            raise DataError(
                f"{self.name}: sample {number} has half of a character in it ({ascii(half[0])[1:-1]}), which no "
                "tokenizer can read. Take it out."
            )
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
                f"{self.name}: sample {number}: the chat template refuses it ({first_line(error)}). Mend it, or "
                "give texts."
            ) from None

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates want it; ShareGPT calls things otherwise."""
        if "role" in message:
            return dict(message)
        if "from" in message:
            role = str(message["from"])
            return {"role": _ROLES.get(role, role), "content": message.get("value", "")}
        raise DataError(
            f"{self.name}: sample {number} has a message without 'role' or 'from'. It has: {listed(message)}. "
            "Give each a role and a content."
        )


# ---- batches ---------------------------------------------------------------------------------------------------------


def _batched(sequences: Sequence[Tensor], options: DataOptions, pad: int) -> Iterator[dict[str, Any]]:
    """Batches of similar length, the longest first: what is too much for the memory shows at once."""
    ordered = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        size = options.batch_size or max(1, options.tokens_per_batch // len(ordered[start]))
        some = ordered[start : start + size]
        yield {
            "input_ids": pad_sequence(some, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in some], batch_first=True),
        }
        start += size


def _ready(source: Source, options: DataOptions, vocab_size: int | None) -> Samples:
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
        num_samples, num_tokens = size_of(batch)
        found.batches.append(batch)
        found.num_samples += num_samples
        found.num_tokens += num_tokens
        if found.num_samples >= options.num_samples:
            break
    if found.num_samples == 0:
        raise DataError(f"{source.name}: there is nothing in it. {_GIVE_SOME}")
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
    if isinstance(row, Tensor) and row.ndim == 2 and has_ids(row):
        row = {"input_ids": row}
    if isinstance(row, Mapping) and any(isinstance(each, Tensor) and each.ndim > 0 for each in row.values()):
        batch = dict(row)
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and has_ids(ids) and ids.dtype not in _IDS:  # as files of token ids have them
            batch["input_ids"] = ids.long()
        return batch
    what = f"a dict without tensors ({listed(row)})" if isinstance(row, Mapping) else described(row)
    raise DataError(
        f"{name}: batch {number} is {what}. A batch is a dict of tensors that the model is called with, or token ids "
        "[samples, tokens]."
    )


def no_texts(model: object, wanted: str) -> DataError:
    """What is said of texts for a model that is shown pictures or sound."""
    return DataError(
        f"data: {type(model).__name__} is shown {wanted}, and there are none in it, but input_ids. Give batches with "
        f"{wanted}, in Python; or a scheme that needs no data."
    )


def size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Samples and tokens of a batch; padding does not count."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return len(mask), int((mask != 0).sum())
    values = (batch.get("input_ids"), *batch.values())
    first = next((each for each in values if isinstance(each, Tensor) and each.ndim >= 2), None)
    return (1, 0) if first is None else (len(first), first.shape[:2].numel())
