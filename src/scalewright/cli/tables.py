"""Tables, as wide as the terminal: no number and no word is cut; what does not fit side by side is shown in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import measure_renderables
from rich.table import Column, Table
from rich.text import Text

from scalewright.cli.shown import out_console

_WIDE = 10_000  # more than any cell has


def show_table(table: Table, console: Console = out_console) -> None:
    """Print a table; one that is too wide in several, each with the first column."""
    for part in _parts(table, console):
        console.print(part)


def new_table(title: str, first: str, *others: str) -> Table:
    """A table whose first column has the names of things."""
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in others:
        add_numbers(table, name) if name in _FIGURES else table.add_column(name)
    return table


def add_numbers(table: Table, head: str | Text) -> None:
    """Add a column of numbers."""
    table.add_column(head, justify="right", no_wrap=True)


def layers_table(rows: list[dict[str, Any]]) -> Table:
    """The table of layers that `quantize` prints; what all of them have in common stands above it."""
    words = [
        {
            "weights": row["weights"],
            "activations": row["activations"],
            "observers": ", ".join(row["observers"].values()),
        }
        for row in rows
    ]
    varying = [key for key in words[0] if len({row[key] for row in words}) > 1]
    common = "; ".join(f"{key}: {words[0][key]}" for key in words[0] if key not in varying)
    shown = [each for each in _FIGURES if any(row[_FIGURES[each][0]] is not None for row in rows)]
    table = new_table(f"{len(rows)} layers; {common}" if common else f"{len(rows)} layers", "layer", *varying, *shown)
    for row, in_words in zip(rows, words, strict=True):
        figures = ("" if row[key] is None else form.format(row[key]) for key, form, _ in (_FIGURES[i] for i in shown))
        table.add_row(row["name"], *(in_words[key] for key in varying), *figures)
    table.caption = "\n".join(f"{each}: {_FIGURES[each][2]}" for each in shown)
    return table


_FIGURES = {
    "weight dB": ("weight_db", "{:.1f}", "signal to noise of the weight"),
    "gain": ("gain_db", "{:+.2f}", "what the weight gains over min-max, errors weighted as in the search"),
    "output dB": ("output_db", "{:.1f}", "signal to noise of the layer's output, on calibration data"),
    "above best": ("above_optimum", "{:.2%}", "how much more the weight loses than the least possible"),
}


def sensitivity_table(found: Any, chosen: Mapping[str, str]) -> Table:
    """The table of `plan --sensitivity`: groups of layers by schemes, worst first; chosen schemes are marked."""
    title = f"What {len(found.groups)} groups of layers lose, alone: KL in nats for each token, times 1000"
    table = new_table(title, "layers that share a scheme")
    for column in ("weights", *found.schemes):
        add_numbers(table, column)
    for group in found.worst_first:
        cells = [f"{1e3 * group.losses[each]:.3g}" for each in found.schemes]
        marks = ["*" if chosen.get(group.name) == each else " " for each in found.schemes] if chosen else [""] * 9
        marked = [f"{cell}{mark}" for cell, mark in zip(cells, marks, strict=False)]
        table.add_row(Text(group.name), f"{group.num_weights:,}", *marked)
    table.add_section()
    losses = {each: sum(group.losses[each] for group in found.groups) for each in found.schemes}
    pad = " " if chosen else ""
    table.add_row("all", "", *(f"{1e3 * each:.3g}{pad}" for each in losses.values()))
    table.add_row("bits for each weight", "", *(f"{found.bits_of(each):.2f}{pad}" for each in found.schemes))
    table.caption = f"measured on {found.num_tokens:,} tokens" + ("; * is chosen" if chosen else "")
    return table


# ---- widths ----------------------------------------------------------------------------------------------------------


def _parts(table: Table, console: Console) -> Iterator[Table]:
    """The table itself where it fits; otherwise as many tables as it takes, with widths that cut nothing."""
    first, *others = table.columns
    whole = sum(_bounds(each, console, is_first=each is first)[1] for each in table.columns)
    if whole + _between(table, table.columns) <= console.width:
        yield table
        return
    groups: list[list[Column]] = [[]]
    for column in others:
        if groups[-1] and _needed(table, [first, *groups[-1], column], console) > console.width:
            groups.append([])
        groups[-1].append(column)
    for i, group in enumerate(groups):
        part = Table(*(copy(each) for each in (first, *group)), box=table.box, padding=table.padding)
        part.rows = table.rows
        part.title, part.title_justify = (table.title if i == 0 else None), table.title_justify
        part.caption, part.caption_justify = (table.caption if group is groups[-1] else None), table.caption_justify
        _set_widths(part, console)
        yield part


def _needed(table: Table, columns: Sequence[Column], console: Console) -> int:
    """The width that the columns take at least, with what stands between them."""
    return sum(_bounds(each, console, is_first=each is columns[0])[0] for each in columns) + _between(table, columns)


def _between(table: Table, columns: Sequence[Column]) -> int:
    _, right, _, left = table.padding
    return len(columns) * (left + right + 1) + 1


def _bounds(column: Column, console: Console, *, is_first: bool) -> tuple[int, int]:
    """The width of a column's longest word, and of its longest line. Names in the first column, and heads that say so,
    may be folded.
    """
    wide = console.options.update(width=_WIDE)
    found = measure_renderables(console, wide, [column.header, *column.cells])
    if is_first:
        return min(found.maximum, console.width // 2), found.maximum
    if isinstance(column.header, Text) and column.header.overflow == "fold":
        return measure_renderables(console, wide, list(column.cells)).minimum, found.maximum
    return found.maximum if column.no_wrap else found.minimum, found.maximum


def _set_widths(table: Table, console: Console) -> None:
    """Share out the width of the terminal: each column has what it needs, and the narrowest grow first."""
    bounds = [_bounds(each, console, is_first=i == 0) for i, each in enumerate(table.columns)]
    widths = [least for least, _ in bounds]
    for _ in range(console.width - _between(table, table.columns) - sum(widths)):
        growing = [i for i, (_, most) in enumerate(bounds) if widths[i] < most]
        if not growing:
            break
        widths[min(growing, key=lambda i: widths[i])] += 1
    for column, width, (_, most) in zip(table.columns, widths, bounds, strict=True):
        column.width = width
        if width < most:
            column.no_wrap, column.overflow = False, "fold"
