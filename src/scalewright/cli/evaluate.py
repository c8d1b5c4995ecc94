"""`scalewright eval`: how much of a model is left."""

from __future__ import annotations

import json
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from scalewright.cli.app import app
from scalewright.cli.options import (
    AsJson,
    Reading,
    data_option,
    run_option,
    with_options,
)
from scalewright.cli.progress import progress_shown
from scalewright.cli.shown import failing_politely, say, tell
from scalewright.cli.tables import new_table, show_table

if TYPE_CHECKING:
    from scalewright.evaluation import Evaluation, Figure, Generation

_BARS = "▁▂▃▄▅▆▇█"
_NUM_WORST = 3
_ROOM = 60


@app.command("eval")
@with_options
def evaluate(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder with a model, quantised or not, or its name on the hub.")
    ],
    against: Annotated[
        str | None, typer.Option(help="The original, to compare with.", show_default="perplexity alone")
    ] = None,
    reading: Reading,
    samples: Annotated[int, data_option(min=1, help="How many samples to evaluate on.")] = 128,
    no_generate: Annotated[
        bool, run_option("--no-generate", help="Do not let the models write, which tells whether one babbles.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html into the checkpoint, with what was found in it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how much of a model is left: perplexity, KL and agreement with the original, and what it writes.

    Exit code 1 if it babbles.
    """
    from scalewright.evaluation import evaluate as run
    from scalewright.report.page import write_report
    from scalewright.report.reading import read_folder

    with failing_politely(), progress_shown(quiet=as_json) as on_step:
        if report:
            read_folder(Path(model))  # says no before the work
        found = run(
            model,
            against=against,
            dataset=reading.data,
            num_samples=samples,
            generate=not no_generate,
            on_step=on_step,
            **reading.keywords(),
        )
        page = write_report(model, evaluation=found.to_dict()) if report else None
    if as_json:
        print(json.dumps(found.to_dict() | ({} if page is None else {"report": str(page)}), allow_nan=False))
    else:
        _show(found)
        if page is not None:
            say(f"{page} is written.")
    if found.babbles:
        raise typer.Exit(1)


def _show(found: Evaluation) -> None:
    show_table(_table(found))
    if found.positions:
        for line in (*_curves(found), "", *_worst(found), ""):
            say(line)
    tell(found.notes)
    if found.generation is not None:
        say(found.generation.verdict, f"{found.model} ", style="bold red" if found.babbles else "green")


def _table(found: Evaluation) -> Table:
    """Both models side by side."""
    names = [found.model] if found.against is None else [found.against, found.model]
    title = f"{found.num_samples:,} samples, {found.num_tokens:,} tokens; ± standard error over the samples"
    table = new_table(title, "", *names)
    for name, column in zip(names, table.columns[1:], strict=True):
        column.header, column.justify = Text(name, overflow="fold"), "right"
    rows = [("perplexity", _told(found.original_perplexity), _told(found.perplexity))]
    if found.against is not None:
        rows += [
            ("loss", "", _told(found.loss_increase, sign="+")),
            ("KL(original ‖ model)", "", _told(found.kl)),
            ("same likeliest token", "", _told(found.agreement, unit="%")),
        ]
    if found.generation is not None:
        rows += _written(found.generation)
    for name, *figures in rows:
        table.add_row(name, *figures[-len(names) :])
    return table


def _written(found: Generation) -> list[tuple[str, str, str]]:
    """What is known of the greedy texts."""
    rows = []
    for title, name, form in (
        ("greedy text: repeats", "repeated", "{:.0%}"),
        ("  its longest loop", "longest_loop", "{} tokens"),
        ("  its perplexity", "perplexity", "{:.4g}"),
    ):
        original = "" if found.original is None else form.format(getattr(found.original, name))
        rows.append((title, original, form.format(getattr(found.quantised, name))))
    if found.agreement is not None:
        apart = sorted(each.diverges_at for each in found.pairs if each.diverges_at is not None)
        where = " to ".join(dict.fromkeys(map(str, (apart[0], apart[-1])))) if apart else ""
        rows.append(("  the same choice in it", "", f"{found.agreement:.1%}"))
        rows.append(("  first difference", "", f"token {where}" if where else "nowhere"))
    return rows


def _told(figure: Figure | None, *, sign: str = "", unit: str = "") -> str:
    """`4.51 ± 0.23`: a number as exact as its error, of which two digits are shown."""
    if figure is None:
        return ""
    factor = 100 if unit == "%" else 1
    if not figure.error or figure.error < 1e-9 * abs(figure.value):  # none, or that of rounding
        return f"{factor * figure.value:{sign}.4g}{unit}"
    error = factor * figure.error
    places = max(0, 1 - floor(log10(error)))
    return f"{factor * figure.value:{sign}.{places}f}{unit} ± {error:.{places}f}{unit}"


def _curves(found: Evaluation) -> list[str]:
    """KL and agreement over the positions of tokens, a bar for each bin."""
    kl, agreement = ([getattr(each, name).value for each in found.positions] for name in ("kl", "agreement"))
    last = f"{found.positions[-1].last:,}"
    places = f"1{last:>{max(len(kl) - 1, len(last) + 1)}}"
    return [
        f"KL         {_bars(kl, least=0)}  up to {max(kl):.3g}",
        f"agreement  {_bars(agreement, least=min(agreement))}  {min(agreement):.1%} to {max(agreement):.1%}",
        f"position   {places}",
    ]


def _bars(values: list[float], *, least: float) -> str:
    """The values as bars of eight heights, between `least` and the largest."""
    room = max(values) - least
    steps = (round((each - least) / room * (len(_BARS) - 1)) if room > 0 else 0 for each in values)
    return "".join(_BARS[each] for each in steps)


def _worst(found: Evaluation) -> list[str]:
    """Where the models are furthest apart."""
    lines = [
        f"KL {each.kl:.3g} in “{_cut(each.text)}” ({each.num_tokens} token{'s' * (each.num_tokens != 1)})"
        for each in found.worst_samples[:_NUM_WORST]
    ]
    lines += [
        f"KL {each.kl:.3g} after “{_cut(each.before)}”: “{each.original}” ({each.original_probability:.0%}) "
        + ("is still likeliest" if each.quantised == each.original else f"became “{each.quantised}”")
        + f" ({each.quantised_probability:.0%})"
        for each in found.worst_tokens[:_NUM_WORST]
    ]
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _ROOM else f"{text[: _ROOM - 1]}…"
