"""safetensors files, put together from others by copying bytes: no tensor is in memory on the way.

A file is eight bytes that say how long its header is, the header (JSON: dtype, shape and place of each tensor), and the
bytes of the tensors.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Those of safetensors, by the names that it has for them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 22
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_PLAIN = {"format": "pt"}


class Writer(Protocol):
    """Whoever takes bytes, one after the other."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take some."""


class StoredTensor(Protocol):
    """A tensor whose bytes can be written, wherever they are."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, so many at a time, each in the place of the last."""


@dataclass(frozen=True)
class TensorHere:
    """A tensor in memory that is written from there, without a copy."""

    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors calls it."""
        return _NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, all at once: they are here already."""
        flat = self.tensor.detach().resolve_neg().cpu().contiguous().reshape(-1)
        flat = flat.as_strided(flat.shape, (1,))  # one number alone is contiguous with any stride, and is no bytes then
        raw = flat.view(torch.uint8)
        if sys.byteorder == "big":  # files are little-endian
            raw = raw.reshape(-1, flat.element_size()).flip(1).reshape(-1)
        yield raw.numpy().data


@dataclass(frozen=True)
class TensorAt:
    """Where the bytes of a tensor lie."""

    file: Path
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> bytes:
        """All of its bytes."""
        with self.file.open("rb") as opened:
            opened.seek(self.start)
            return opened.read(self.num_bytes)

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, so many at a time, each in the place of the last: new memory would take longer than reading."""
        room = memoryview(bytearray(min(self.num_bytes, _CHUNK)))
        with self.file.open("rb", buffering=0) as opened:
            opened.seek(self.start)
            left = self.num_bytes
            while left:
                count = opened.readinto(room[:left])
                if not count:
                    raise OSError(f"{self.file.name}: ends before its last tensor does")
                yield room[:count]
                left -= count


def tensors_in(file: Path) -> dict[str, TensorAt]:
    """The tensors of a file by name."""
    with file.open("rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        header: dict[str, Any] = json.loads(opened.read(length))
    begin = _LENGTH.size + length
    return {
        name: TensorAt(
            file,
            begin + each["data_offsets"][0],
            each["data_offsets"][1] - each["data_offsets"][0],
            each["dtype"],
            tuple(each["shape"]),
        )
        for name, each in header.items()
        if name != _METADATA
    }


def digest_of(tensor: StoredTensor) -> str:
    """What tells a tensor from others: a digest of its dtype, its shape and its bytes."""
    digest = _digest_without_bytes(tensor)
    for chunk in tensor.chunks():
        digest.update(chunk)
    return str(digest.hexdigest())


def write_shards(folder: Path, tensors: Mapping[str, StoredTensor], *, max_bytes: int) -> dict[str, str]:
    """Write `model.safetensors`, or as many shards as are needed, with their index; the digest of each tensor."""
    shards = list(_split(tensors, max_bytes))
    if len(shards) == 1:
        return _write(folder / "model.safetensors", shards[0])
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        digests |= _write(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(each.num_bytes for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return digests


def _split(tensors: Mapping[str, StoredTensor], max_bytes: int) -> Iterator[dict[str, StoredTensor]]:
    """The tensors in runs of at most so many bytes, or of one tensor."""
    shard: dict[str, StoredTensor] = {}
    size = 0
    for name, each in tensors.items():
        if shard and size + each.num_bytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = each
        size += each.num_bytes
    yield shard


def _write(file: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    with file.open("wb") as opened:
        return write_tensors(opened, tensors)


def write_tensors(
    target: Writer, tensors: Mapping[str, StoredTensor], *, metadata: Mapping[str, str] = _PLAIN
) -> dict[str, str]:
    """Write a file of some tensors; the digest of each."""
    # Readers map the file: tensors with large elements go first, so that all are aligned to their elements.
    ordered = sorted(tensors.items(), key=lambda item: (-_item_size(item[1]), item[0]))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    place = 0
    for name, each in ordered:
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [place, place + each.num_bytes]}
        place += each.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write(_LENGTH.pack(len(text)) + text)
    return {name: _copy(each, target) for name, each in ordered}


def _copy(tensor: StoredTensor, target: Writer) -> str:
    """Append the bytes of a tensor to an open file; its digest, taken from the bytes that were written."""
    digest = _digest_without_bytes(tensor)
    for chunk in tensor.chunks():
        target.write(chunk)
        digest.update(chunk)
    return str(digest.hexdigest())


def _digest_without_bytes(tensor: StoredTensor) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)}".encode())


def _item_size(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.num_bytes // count if count else 1
