"""What the commands print: tables, lines, errors. Results go to stdout; errors to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENAMETOOLONG
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scalewright.errors import RankError, ScalewrightError

out_console = Console(width=None if Console().is_terminal else 140)
err_console = Console(stderr=True)


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
        table.add_column(column, justify="right", no_wrap=True)
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


def new_table(title: str, first: str, *others: str) -> Table:
    """A table whose first column is never cut."""
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name in _FIGURES else "left")
    return table


def tell(notes: list[str]) -> None:
    """Print the notes of a run."""
    for note in notes:
        say(note, "note ", style="yellow")


def say(text: str, head: str = "", *, style: str = "", console: Console = out_console) -> None:
    """Print a line as it is: brackets in it are no markup. Without a terminal it stays one line."""
    console.print(Text.assemble((head, style), text), soft_wrap=not console.is_terminal)


@contextmanager
def failing_politely(out: Path | None = None, *, is_quiet: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A user's mistake is one line and exit code 2. Who stops a run that writes to `out` is told how to go on.

    `is_quiet` is asked whether somebody else says it.
    """
    try:
        yield
    except ScalewrightError as error:
        if not is_quiet():
            say(str(error), "error ", style="bold red", console=err_console)
        raise typer.Exit(1 if isinstance(error, RankError) else 2) from None
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            raise
        say(f"{error.filename}: is too long for a name.", "error ", style="bold red", console=err_console)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if is_quiet():
            raise typer.Exit(1) from None
        where = None if out is None else out.resolve()
        partial_folder = None if where is None else where.parent / f"{where.name}.partial"
        if partial_folder is not None and partial_folder.exists():
            say(
                f"stopped; finished layers are in {partial_folder}. The same command goes on from there.",
                console=err_console,
            )
        else:
            say("stopped; nothing was written.", console=err_console)
        raise typer.Exit(1) from None
