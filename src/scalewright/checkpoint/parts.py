"""Tensors of finished layers on disk, until the checkpoint is put together. In memory they would add to the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from scalewright.checkpoint.shards import TensorAt, tensors_in


class Part(Mapping[str, Tensor]):
    """The tensors of one file, read when they are asked for."""

    def __init__(self, file: Path) -> None:
        self.places: dict[str, TensorAt] = tensors_in(file)
        self._file = file

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self.places:
            raise KeyError(name)
        with safe_open(self._file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    @override
    def __len__(self) -> int:
        return len(self.places)


class Parts:
    """A folder with a file for each finished layer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def keep(self, tensors: Mapping[str, Tensor]) -> Part:
        """Write tensors, and give what stands for them; tensors that were written before stay where they are."""
        if isinstance(tensors, Part):
            return tensors
        self._count += 1
        file = self._folder / f"{self._count:06}.safetensors"
        save_file({name: each.contiguous() for name, each in tensors.items()}, file)
        return Part(file)


@contextmanager
def parts_for(path: Path) -> Iterator[Parts]:
    """Parts of the checkpoint that is to be written to `path`, in a new folder beside it that is gone in the end."""
    beside = path.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.parts-", dir=beside) as folder:
        yield Parts(Path(folder))
