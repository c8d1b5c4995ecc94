"""What makes a run the same run: its model, recipe, data, settings and the versions of what computes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scalewright.checkpoint.cut_files import check_not_cut
from scalewright.errors import ModelError
from scalewright.numerics.native import kernels
from scalewright.numerics.products import multiplier

_SUFFIXES = (".json", ".safetensors")
_CHUNK = 1 << 22
_PACKAGES = ("scalewright", "torch", "transformers", "compressed-tensors")


def versions() -> dict[str, str]:
    """Of the packages whose code decides what is written, and which kernels compute it: their sums are not the same."""
    return {**_packages(), "kernels": kernels(), "products": multiplier()}


@cache
def _packages() -> dict[str, str]:
    """To be read only. Looking them up takes 6 ms each, a tenth of a small run."""
    return {name: version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class SourceFiles:
    """The files that a model is read from, as they were when a run began; none if it is given as an object."""

    folder: Path | None
    known: Mapping[str, tuple[int, int]]
    """The size of each, and when it was changed last."""

    @classmethod
    def of(cls, source: nn.Module | str | Path) -> SourceFiles:
        """Those of a model as the user gave it."""
        folder = None if isinstance(source, nn.Module) else Path(source)
        if folder is None or not os.path.isdir(folder):  # unlike Path, it bears a name that is too long
            return cls(None, {})
        files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        stats = {file.name: file.stat() for file in files}
        return cls(folder, {name: (each.st_size, each.st_mtime_ns) for name, each in stats.items()})

    def check_unchanged(self) -> None:
        """Say no if one of them is not what it was: nobody knows which weights were read from it."""
        check_not_cut()
        now = {} if self.folder is None else SourceFiles.of(self.folder).known
        other = next((name for name in sorted({*now, *self.known}) if now.get(name) != self.known.get(name)), None)
        if other is not None:
            assert self.folder is not None
            what = "is new" if other not in self.known else "is gone" if other not in now else "has changed"
            raise ModelError(
                f"{self.folder / other}: {what} since the run began, so nobody knows which weights were read. "
                "Nothing was written. Run again with restart, when the model stays as it is."
            )


def fingerprint_of(
    source: SourceFiles,
    model: nn.Module,
    recipe: Any,
    batches: Sequence[Mapping[str, Any]],
    files: Iterable[str],
    settings: Sequence[Any],
) -> dict[str, str]:
    """A digest of each thing that a run depends on. `model` is what was read from `source`.

    `files` are those that the recipe names.
    """
    return {
        "model": _digest(_of_model(source, model)),
        "recipe": _digest([recipe.to_yaml(), *((each, digest_of_file(Path(each))) for each in sorted(files))]),
        "set of samples": digest_of_data(batches),
        "set of options": _digest(settings),
        "set of versions": json.dumps(versions()),
    }


def digest_of_file(file: Path) -> str:
    """A digest of all bytes of a file."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of_data(batches: Sequence[Mapping[str, Any]]) -> str:
    """A digest of all that is in batches."""
    return _digest([_of_value(each) for batch in batches for each in tree_leaves(dict(batch))])


def _of_model(source: SourceFiles, model: nn.Module) -> Iterable[Any]:
    yield str(next((each.dtype for each in model.parameters()), None))
    yield from source.known.items()
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    if source.folder is None and revision is not None:
        yield revision
    elif source.folder is None:
        for name, each in model.state_dict().items():
            yield name, _of_value(each)


def _of_value(value: Any) -> Any:
    """What tells a value from others: of a tensor a digest of all its bytes."""
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return repr(value)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _digest(values: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for each in values:
        digest.update(repr(each).encode() + b"\n")
    return digest.hexdigest()
