"""Observations: what was seen of a model, how several become one, and what they tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from scalewright.checkpoint.outputs import write_file
from scalewright.errors import MergeError, ObservationsError, ScalewrightError
from scalewright.observing.figures import LayerFigures, experts_of, figures_of, notes_on
from scalewright.observing.files import packed, unpacked
from scalewright.observing.records import LayerRecord

_VERSION = 1
_WRITTEN = "Give a file that `scalewright observe` has written."


class _Head(BaseModel):
    """What is read of a file; figures, which are there for others to read, are not."""

    model_config = ConfigDict(strict=True)

    model: str
    scheme: str
    observers: list[str]
    num_tokens: NonNegativeInt
    seeds: list[int]
    run_notes: list[str]
    records: dict[str, Any]


@dataclass(frozen=True)
class Observations:
    """What was seen of the layers of a model. Nothing of it was quantised."""

    records: Mapping[str, LayerRecord] = field(repr=False)
    """By the layer's name."""
    model: str = ""
    """The name of the model."""
    scheme: str = ""
    """What losses are told for."""
    observers: tuple[str, ...] = ()
    """Who was asked, of inputs, weights or both."""
    num_tokens: int = 0
    """Tokens of the data; padding does not count."""
    seeds: tuple[int, ...] = ()
    """By which the samples were chosen."""
    origin: str = "observations"
    """What error texts call it: the file that it comes from."""
    run_notes: tuple[str, ...] = ()
    """What was noted while the model ran."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, name: str) -> LayerFigures:
        """The figures of a layer."""
        return next(each for each in self.layers if each.name == name)

    @cached_property
    def layers(self) -> list[LayerFigures]:
        """The figures of each layer, in the order of the model."""
        return figures_of(self.records)

    @property
    def experts(self) -> dict[str, dict[int, int]]:
        """Tokens that each expert of each mixture was given."""
        return experts_of(self.layers)

    @property
    def notes(self) -> list[str]:
        """What a user should know, in words."""
        return [*self.run_notes, *notes_on(self.layers)]

    def merge(self, *others: Observations) -> Observations:
        """What would have been seen, had all the data been shown at once."""
        merged = self
        for other in others:
            merged = _both(merged, other)
        return merged

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write figures and records to a JSON file, for `load` and `merge`."""
        content = {
            "version": _VERSION,
            **self.to_dict(),
            "run_notes": list(self.run_notes),
            "records": packed(self.records),
        }
        return write_file(Path(path), json.dumps(content, allow_nan=False).encode(), overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Observations:
        """Read a file that `save` has written. Figures are computed anew."""
        file = Path(path)
        if not file.is_file():
            raise ObservationsError(f"{file}: there is no such file.")
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ObservationsError(f"{file}: is no JSON ({str(error).splitlines()[0]}). {_WRITTEN}") from None
        try:
            return cls._read(content, origin=file.name)
        except ScalewrightError as error:
            raise ObservationsError(f"{file}: {str(error).rstrip('.')}. {_WRITTEN}") from None

    @classmethod
    def _read(cls, content: Any, *, origin: str) -> Observations:
        if not isinstance(content, dict) or "version" not in content:
            raise ObservationsError("there is no 'version' in it")
        if content["version"] != _VERSION:
            raise ObservationsError(f"is of version {content['version']!r}, and version {_VERSION} can be read")
        try:
            head = _Head.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise ObservationsError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return cls(
            unpacked(head.records, scheme=head.scheme),
            head.model,
            head.scheme,
            tuple(head.observers),
            head.num_tokens,
            tuple(head.seeds),
            origin,
            tuple(head.run_notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data; the records that they were computed from are not in it."""
        return {
            "model": self.model,
            "scheme": self.scheme,
            "observers": list(self.observers),
            "num_tokens": self.num_tokens,
            "seeds": list(self.seeds),
            "layers": [each.to_dict() for each in self.layers],
            "experts": {
                name: {str(each): count for each, count in some.items()} for name, some in self.experts.items()
            },
            "notes": self.notes,
        }


def _both(one: Observations, other: Observations) -> Observations:
    for what in ("scheme", "observers"):
        mine, theirs = getattr(one, what), getattr(other, what)
        if mine != theirs:
            raise MergeError(
                f"{other.origin}: was observed with {what} {_listed(theirs)}, and {one.origin} with {_listed(mine)}. "
                "Merge what was observed in the same way."
            )
    alone = next(
        (name for name in (*one.records, *other.records) if (name in one.records) != (name in other.records)), None
    )
    if alone is not None:
        has, has_not = (one, other) if alone in one.records else (other, one)
        raise MergeError(
            f"{other.origin}: has {len(other)} layers, and {one.origin} has {len(one)}: {alone} is in {has.origin}, "
            f"and not in {has_not.origin}. Merge what was observed of one model and the same layers."
        )
    try:
        records = {name: record.merged(other.records[name], name) for name, record in one.records.items()}
    except MergeError as error:
        raise error.at(other.origin) from None
    notes = list(dict.fromkeys((*one.run_notes, *other.run_notes)))
    if one.model != other.model:
        notes.append(f"observations of models by different names were merged: {one.model}, {other.model}.")
    return Observations(
        records,
        one.model,
        one.scheme,
        one.observers,
        one.num_tokens + other.num_tokens,
        tuple(dict.fromkeys((*one.seeds, *other.seeds))),
        one.origin,
        tuple(notes),
    )


def _listed(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value) or "none"


def merge_files(files: Sequence[str | Path]) -> Observations:
    """What several files have, as one."""
    resolved = [Path(each).resolve() for each in files]
    twice = next((each for i, each in enumerate(files) if resolved[i] in resolved[:i]), None)
    if twice is not None:
        raise MergeError(f"{twice}: is given twice. What it has must be added once.")
    first, *others = (Observations.load(each) for each in files)
    return first.merge(*others)
