"""One page on what was observed of a model: it needs no network, and no file beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scalewright.numerics.histogram import code_values
from scalewright.observing import Observations
from scalewright.observing.figures import OUTLIER, Kept, LayerFigures, worst_first
from scalewright.observing.records import InputRecord
from scalewright.report.drawing import render

_NUM_BINS = 121  # an odd number: zero, where many values are, has a bin of its own when the range is even
_NUM_PICTURED = 1000  # layers with a histogram: more would make the page slow to open


def observations_page(found: Observations) -> str:
    """The page as text."""
    worst = worst_first(found.layers)[0]
    return render(
        "observations",
        _data(found),
        found=found,
        worst=worst if math.isfinite(worst.worst_db) else None,
        num_outliers=sum(bool(each.input and each.input.channels.outliers) for each in found.layers),
        outlier=OUTLIER,
        num_pictured=_NUM_PICTURED,
    )


def _data(found: Observations) -> dict[str, Any]:
    """What the page's script draws from."""
    worst = worst_first(found.layers)
    pictured = {each.name for each in worst[:_NUM_PICTURED]}
    return {
        "worst": found.layers.index(worst[0]),
        "layers": [_row(each) for each in found.layers],
        "pictures": [
            _picture(found.records[each.name].input) if each.name in pictured else None for each in found.layers
        ],
        "experts": [{"name": name, "tokens": list(tokens.values())} for name, tokens in found.experts.items()],
    }


def _row(layer: LayerFigures) -> dict[str, Any]:
    seen, weight = layer.input, layer.weight
    row: dict[str, Any] = {
        "name": layer.name,
        "tokens": layer.tokens,
        "weight_ratio": _short(weight.channels.ratio),
        "weight_kurtosis": _short(weight.kurtosis),
        "weight_db": None if weight.best is None else _short(weight.best[1]),
        "weights": [[name, _short(each.db), _short(each.share)] for name, each in weight.choices.items()],
        "shape": list(weight.shape),
    }
    if seen is None:
        return row
    return row | {
        "min": _short(seen.min),
        "max": _short(seen.max),
        "ratio": _short(seen.channels.ratio),
        "outliers": [[channel, _short(ratio)] for channel, ratio in seen.channels.outliers[:8]],
        "num_outliers": len(seen.channels.outliers),
        "dead": len(seen.channels.dead),
        "kurtosis": _short(seen.kurtosis),
        "static_db": None if seen.best is None else _short(seen.best[1]),
        "dynamic_db": None if seen.dynamic is None else _short(seen.dynamic.least),
        "dynamic": _both(seen.dynamic),
        "lost": _short(seen.lost_by_one_scale) if seen.best is not None else None,
        "choices": [
            [name, _short(each.low), _short(each.high), *_both(each.kept)] for name, each in seen.choices.items()
        ],
    }


def _picture(seen: InputRecord) -> dict[str, Any] | None:
    """A histogram of all values that were seen."""
    if not seen.num_tokens:
        return None
    counts_C = seen.all_counts().numpy()
    values, counts = code_values().numpy()[counts_C > 0].astype(np.float64), counts_C[counts_C > 0]
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins, _ = np.histogram(values, _NUM_BINS, (low, high), weights=counts)
    return {"from": low, "to": high, "counts": [int(each) for each in bins]}


def _both(kept: Kept | None) -> list[float | None]:
    return [None, None] if kept is None else [_short(kept.db), _short(kept.token_db)]


def _short(value: float | None) -> float | None:
    """Six digits; None where there is no number."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
