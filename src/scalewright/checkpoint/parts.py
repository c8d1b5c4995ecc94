"""Tensors in a file that are read when somebody asks. In memory they would add to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
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
