"""Draws `docs/accuracy.svg` from the rows of `bench/results/accuracy.json`: KL against bits per weight.

A panel for each model, colours for ways to find scales, shapes for schemes. It measures nothing, and needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Row = Mapping[str, Any]

WIDTH, HEIGHT, PANEL_HEIGHT = 440, 520, 340  # of a panel, its margins included; of the picture; of the plotted part
LEFT, RIGHT, TOP = 66, 18, 52
INK, FAINT, GRID = "#1f2933", "#52606d", "#e4e7eb"
APART = 0.2  # in bits: schemes of the same width stand side by side


@dataclass(frozen=True)
class Series:
    """A way to find scales: the contestants that it stands for, of which the best counts; all of the side's if none."""

    label: str
    side: str
    contestants: tuple[str, ...]
    colour: str


# Blue is ours, orange the peer's; the darker, the more is done.
SERIES = (
    Series("llm-compressor, min-max", "peer", ("memoryless_minmax", "static_minmax"), "#f5c28b"),
    Series("llm-compressor, imatrix_mse", "peer", ("imatrix_mse",), "#ec8a2f"),
    Series("llm-compressor, its best recipe", "peer", (), "#a84300"),
    Series("scalewright, fast", "ours", ("fast",), "#9ccbf2"),
    Series("scalewright, balanced", "ours", ("balanced",), "#3d8fdb"),
    Series("scalewright, best", "ours", ("best",), "#0b3d78"),
)
LINE = ("W2A16", "W3A16", "W4A16")
SHAPES = {
    **dict.fromkeys(LINE, "circle"),
    "NVFP4A16": "diamond",
    "NVFP4": "triangle",
    "W8A8 static": "square",
    "FP8": "cross",
}
OUTLINES = {
    "diamond": ((0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0)),
    "triangle": ((0, -6), (6, 5), (-6, 5)),
    "square": ((-4.6, -4.6), (4.6, -4.6), (4.6, 4.6), (-4.6, 4.6)),
    "cross": ((-5, -3), (-3, -5), (0, -2), (3, -5), (5, -3), (2, 0), (5, 3), (3, 5), (0, 2), (-3, 5), (-5, 3), (-2, 0)),
}


@dataclass(frozen=True)
class Axes:
    """Where bits and KL lie in a panel."""

    left: float
    bits: tuple[float, float]
    ticks: Sequence[float]
    """Round numbers of KL, from below the least to above the largest."""

    def x(self, bits: float) -> float:
        """From the left."""
        least, most = self.bits
        return self.left + LEFT + (bits - least) / (most - least) * (WIDTH - LEFT - RIGHT)

    def y(self, kl: float) -> float:
        """From the top."""
        least, most = (math.log10(each) for each in (self.ticks[0], self.ticks[-1]))
        return TOP + (most - math.log10(kl)) / (most - least) * PANEL_HEIGHT


def svg(rows: Sequence[Row]) -> str:
    """The picture; one that says so if there is nothing to draw."""
    drawn = [row for row in rows if row["scheme"] in SHAPES and row["kl"] > 0]
    models = list(dict.fromkeys(row["weights"] for row in drawn))
    width = WIDTH * max(2, len(models))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        "<title>KL to the unquantised model against bits per weight</title>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    if not drawn:
        return "\n".join([*parts, _text(width / 2, HEIGHT / 2, "Not measured.", anchor="middle"), "</svg>", ""])
    ticks = _ticks([row["kl"] for row in drawn])
    bits = math.floor(min(row["bits"] for row in drawn)), math.ceil(max(row["bits"] for row in drawn) + APART)
    for number, model in enumerate(models):
        axes = Axes(number * WIDTH, bits, ticks)
        parts += [*_frame(axes, model), *_points(axes, [row for row in drawn if row["weights"] == model])]
    return "\n".join([*parts, *_legend(width), "</svg>", ""])


def _frame(axes: Axes, model: str) -> Iterator[str]:
    left, right, bottom = axes.x(axes.bits[0]), axes.x(axes.bits[1]), TOP + PANEL_HEIGHT
    yield _text((left + right) / 2, TOP - 22, model, anchor="middle", size=16, weight="bold")
    for kl in axes.ticks:
        yield _line(left, axes.y(kl), right, axes.y(kl), GRID)
        yield _text(left - 8, axes.y(kl) + 4, f"{kl:g}", anchor="end", size=12, fill=FAINT)
    for bits in range(math.ceil(axes.bits[0]), math.floor(axes.bits[1]) + 1):
        yield _line(axes.x(bits), TOP, axes.x(bits), bottom, GRID)
        yield _text(axes.x(bits), bottom + 18, str(bits), anchor="middle", size=12, fill=FAINT)
    yield _text((left + right) / 2, bottom + 38, "bits per weight, scales included", anchor="middle")
    middle = f"{axes.left + 18:g} {TOP + PANEL_HEIGHT / 2:g}"
    yield f'<text transform="translate({middle}) rotate(-90)" text-anchor="middle" fill="{INK}">KL (log scale)</text>'


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, ... from the last that is below all values to the first that is above them."""
    decades = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    below, above = [each for each in ticks if each < min(values)], [each for each in ticks if each > max(values)]
    return [each for each in ticks if below[-1] <= each <= above[0]]


def _points(axes: Axes, rows: Sequence[Row]) -> Iterator[str]:
    places = _places(rows)
    for series in SERIES:
        best = {scheme: kl for scheme in places if (kl := _kl(rows, series, scheme)) is not None}
        path = [(axes.x(places[name]), axes.y(best[name])) for name in LINE if name in best]
        if len(path) > 1:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
            yield f'<polyline points="{corners}" fill="none" stroke="{series.colour}" stroke-width="2"/>'
        for scheme, kl in best.items():
            yield _mark(SHAPES[scheme], axes.x(places[scheme]), axes.y(kl), series.colour)


def _kl(rows: Sequence[Row], series: Series, scheme: str) -> float | None:
    """The least KL of the series in a scheme."""
    found = [row for row in rows if row["scheme"] == scheme and row["side"] == series.side]
    return min(
        (row["kl"] for row in found if not series.contestants or row["contestant"] in series.contestants), default=None
    )


def _places(rows: Sequence[Row]) -> dict[str, float]:
    """The bits of each scheme; where others have them, too, the next place to the right that is free."""
    places: dict[str, float] = {}
    for scheme in SHAPES:
        bits = [row["bits"] for row in rows if row["scheme"] == scheme]
        if bits:
            taken = [] if scheme in LINE else list(places.values())
            near = (min(bits) + step * APART / 10 for step in range(100))
            places[scheme] = next(x for x in near if all(abs(x - other) > APART - 1e-6 for other in taken))
    return places


def _legend(width: float) -> Iterator[str]:
    top = TOP + PANEL_HEIGHT + 66
    columns = [width / 2 - 390, width / 2 - 130, width / 2 + 110]
    for number, series in enumerate(SERIES):
        x, y = columns[number // 3], top + number % 3 * 22
        yield _line(x, y, x + 22, y, series.colour, width=2)
        yield _mark("circle", x + 11, y, series.colour)
        yield _text(x + 32, y + 4, series.label)
    names = [("circle", "W2A16, W3A16, W4A16"), *((SHAPES[name], name) for name in SHAPES if name not in LINE)]
    for number, (shape, name) in enumerate(names):
        x, y = columns[2] + number // 3 * 190, top + number % 3 * 22
        yield _mark(shape, x + 11, y, FAINT)
        yield _text(x + 26, y + 4, name)


def _mark(shape: str, x: float, y: float, colour: str) -> str:
    style = f'fill="{colour}" stroke="#ffffff" stroke-width="0.8"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}/>'
    corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in OUTLINES[shape])
    return f'<polygon points="{corners}" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal", fill: str = INK
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{fill}">{escape(words)}</text>'
