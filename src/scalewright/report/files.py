"""The files that a run leaves beside its checkpoint, by name, and what is in those that only the page reads.

scalewright.json            what was done, and the figures of each layer
scalewright_pictures.json   histograms of each layer's weight and input
scalewright_timings.json    seconds by phase; only `--report` writes it, because equal runs are equal files
scalewright_evaluation.json what `eval` has found, once a page was written with it
report.html                 the page
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

RUN_FILE = "scalewright.json"
PICTURES_FILE = "scalewright_pictures.json"
TIMINGS_FILE = "scalewright_timings.json"
EVALUATION_FILE = "scalewright_evaluation.json"
PAGE_FILE = "report.html"


class Pictured(Protocol):
    """A layer that knows what its values look like: `modifiers.layers.QuantizedLayer`."""

    @property
    def name(self) -> str:
        """Its name in the model."""

    @property
    def pictures(self) -> dict[str, Any]:
        """Plain data."""


def pictures_text(layers: Iterable[Pictured]) -> str:
    """The file of pictures: an object with a line for each layer."""
    lines = (f"{json.dumps(each.name)}:{json.dumps(each.pictures, separators=(',', ':'))}" for each in layers)
    return "{\n" + ",\n".join(lines) + "\n}\n"
