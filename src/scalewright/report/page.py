"""One page from all that is known of a checkpoint: it needs no network, and no file beside it.

Layers travel as compact JSON in one script tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from scalewright.checkpoint.memory import in_units
from scalewright.checkpoint.outputs import write_file
from scalewright.errors import OutputError
from scalewright.report.advice import advice_for, flags_for
from scalewright.report.drawing import render
from scalewright.report.evaluated import Evaluated
from scalewright.report.files import EVALUATION_FILE, PAGE_FILE, TIMINGS_FILE
from scalewright.report.reading import Findings, Layer, read_folder

_NUM_WORST = 10
_NUM_PICTURED = 2000  # layers with histograms: more would make the page slow to open
_FIGURES = ("bits", "weight_db", "gain_db", "output_db", "above_optimum", "num_tokens")


def write_report(
    folder: str | Path,
    file: str | Path | None = None,
    *,
    seconds: Mapping[str, float] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page on the checkpoint in a folder, to `file` or to report.html in it; where it was written.

    `seconds` by phase, and what `eval` found, are kept in the folder, so that later pages have them.
    """
    folder = Path(folder)
    page = page_of(read_folder(folder, seconds=seconds, evaluation=evaluation))
    target = folder / PAGE_FILE if file is None else Path(file)
    if target.is_dir():
        raise OutputError(f"{target}: is a folder. Give a file.")
    kept = {TIMINGS_FILE: None if seconds is None else _timings(seconds), EVALUATION_FILE: evaluation}
    for name, found in kept.items():
        if found is not None:
            write_file(folder / name, f"{json.dumps(found, indent=2)}\n".encode(), overwrite=True)
    return write_file(target, page.encode(), overwrite=True)


def page_of(findings: Findings) -> str:
    """The page as text."""
    worst = findings.worst(_NUM_WORST)
    return render(
        "page",
        page_data(findings),
        {"size": in_units, "time": in_seconds, "count_of": _count},
        found=findings,
        evaluated=Evaluated.of(findings.evaluation),
        worst=[(each, advice_for(each)) for each in worst],
        flags=flags_for(worst),
        summary=_summary(findings.layers),
        num_pictured=min(len(findings.layers), _NUM_PICTURED),
    )


def page_data(findings: Findings) -> dict[str, Any]:
    """What the page's script draws from: columns of layers, pictures by a layer's number, and curves."""
    layers = findings.layers
    columns: dict[str, list[Any]] = {
        "name": [each.name for each in layers],
        "stack": [each.place.stack for each in layers],
        "depth": [each.place.depth for each in layers],
        "kind": [each.place.kind for each in layers],
        "expert": [each.place.expert for each in layers],
        "weights": [each.weights for each in layers],
        "activations": [each.activations for each in layers],
        "observers": [", ".join(dict.fromkeys(each.observers.values())) for each in layers],
        "shape": [" \u00d7 ".join(map(str, each.shape)) for each in layers],
    }
    for figure in _FIGURES:
        columns[figure] = [_rounded(getattr(each, figure)) for each in layers]
    return {
        "columns": columns,
        "pictures": {number: layers[number].pictures for number in _pictured(layers)},
        "seconds": None if findings.seconds is None else _timings(findings.seconds),
        "curve": Evaluated.of(findings.evaluation).curve,
    }


def in_seconds(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _timings(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(value, 3) for phase, value in seconds.items()}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summary(layers: Iterable[Layer]) -> dict[str, float]:
    """Figures of all layers together."""
    found: dict[str, float] = {}
    every = list(layers)
    for figure in ("weight_db", "gain_db", "output_db", "above_optimum"):
        values = [value for each in every if (value := getattr(each, figure)) is not None]
        if values:
            found |= {f"{figure}_median": median(values), f"{figure}_least": min(values), f"{figure}_most": max(values)}
    return found


def _pictured(layers: list[Layer]) -> list[int]:
    """The numbers of layers whose pictures are in the page: all, or the worst of them."""
    numbers = [number for number, each in enumerate(layers) if each.pictures]
    if len(numbers) <= _NUM_PICTURED:
        return numbers
    quality = {number: found for number in numbers if (found := layers[number].quality_db) is not None}
    return sorted(sorted(numbers, key=lambda number: quality.get(number, 1e9))[:_NUM_PICTURED])


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else round(value, 5)
