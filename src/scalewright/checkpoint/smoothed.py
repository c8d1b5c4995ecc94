"""By which powers of two the weights of a checkpoint differ from the original's, as the record of a run keeps it.

Smoothing multiplies rows and columns of weights before they are quantised. Who compares a checkpoint with the original
has to know by what. Texts, because there are many: bytes, one for each row or column, compressed, in base64.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalewright.calibration.loaders import renamed_in_checkpoints
from scalewright.calibration.smoothing import Smoothing
from scalewright.numerics.smoothing import LIMIT, times_two_to

_PARTS = ("rows", "columns")


@dataclass(frozen=True)
class Powers:
    """The powers of two that the rows and columns of one tensor were multiplied with; None for all ones."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """What does not fit about them, if anything does not."""
        sizes = (shape[:1], shape[1:2]) if len(shape) <= 2 else ((), ())
        for part, powers, size in zip(_PARTS, (self.rows, self.columns), sizes, strict=True):
            if powers is not None and (len(powers),) != size:
                return f"{len(powers)} {part} of it are smoothed, and its shape is {list(shape)}"
        return None

    def of(self, original: Tensor, rows: slice = slice(None)) -> Tensor:
        """What some rows of a tensor became."""
        if self.rows is not None:
            original = times_two_to(original, self.rows[rows], dim=0)
        return original if self.columns is None else times_two_to(original, self.columns, dim=1)


def record_of(smoothing: Smoothing, model: nn.Module, quantised: Iterable[str]) -> dict[str, dict[str, str]]:
    """What the record of a run is to keep, by the names of tensors in the original's files."""
    layers = set(quantised)
    found: dict[str, dict[str, str]] = {}
    for part, powers in zip(_PARTS, (smoothing.outputs, smoothing.inputs), strict=True):
        for name, each in powers.items():
            module = model.get_submodule(name)
            for local in ("weight", "bias") if part == "rows" else ("weight",):
                if getattr(module, local, None) is not None:
                    mark = "weight_scale" if name in layers and local == "weight" else local
                    found.setdefault(f"{name}.{mark}", {})[part] = _as_text(each)
    names = list(found)
    places = renamed_in_checkpoints(model, names) if hasattr(model, "save_pretrained") else {}
    stored = {name: places.get(name, name) for name in names}
    return {
        f"{stored[name].removesuffix('.weight_scale')}.weight" if name.endswith(".weight_scale") else stored[name]: each
        for name, each in found.items()
    }


def read_powers(told: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Powers]:
    """The same from a record, for tensors with these shapes; a ValueError if it makes no sense.

    A short text may unpack to a thousand times its length. So nothing is kept that no tensor has room for.
    """
    if not isinstance(told, Mapping):
        raise ValueError("is no object")
    found = {}
    for name, each in told.items():
        powers = Powers(*(_from(each, part, max(shapes.get(name, ()), default=0)) for part in _PARTS))
        if name in shapes:
            found[name] = powers
    return found


def _from(each: Any, part: str, most: int) -> Tensor | None:
    if not isinstance(each, Mapping) or not each.keys() <= set(_PARTS):
        raise ValueError(f"has {each!r:.60}, and not rows and columns")
    text = each.get(part)
    return None if text is None else _from_text(text, most)


def _as_text(powers: Tensor) -> str:
    return base64.b64encode(zlib.compress(powers.to(torch.int8).numpy().tobytes(), 9)).decode()


def _from_text(text: Any, most: int) -> Tensor:
    """The first powers of a text, so many and one more if there are."""
    if not isinstance(text, str):
        raise ValueError(f"has {text!r:.60}, and not a text")
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(base64.b64decode(text, validate=True), most + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"cannot be unpacked ({error})") from None
    if not unpacking.eof and len(unpacked) <= most:
        raise ValueError("cannot be unpacked (it has no end)")
    powers = torch.frombuffer(bytearray(unpacked), dtype=torch.int8) if unpacked else torch.empty(0, dtype=torch.int8)
    if bool((powers.abs() > 4 * LIMIT).any()) or bool((powers == -128).any()):
        raise ValueError("has powers beyond all that smoothing does")
    return powers
