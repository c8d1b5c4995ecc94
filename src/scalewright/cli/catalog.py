"""`scalewright schemes` and `scalewright observers`: what is on offer."""

from __future__ import annotations

import json
from dataclasses import asdict

from scalewright.cli.app import app
from scalewright.cli.options import AsJson
from scalewright.cli.tables import new_table, show_table


@app.command()
def schemes(as_json: AsJson = False) -> None:
    """Show all schemes."""
    from scalewright.modifiers.schemes import scheme_rows

    rows = scheme_rows()
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = new_table("Schemes", "scheme", "weights", "activations", "bits", "needs data")
    for row in rows:
        table.add_row(row.name, row.weights, row.activations, f"{row.bits:.2f}", "yes" if row.needs_data else "no")
    show_table(table)


@app.command()
def observers(as_json: AsJson = False) -> None:
    """Show all observers."""
    from scalewright.observers.catalog import COLUMNS, observer_rows

    if as_json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in observer_rows()]))
        return
    table = new_table("Observers", "name", "what it finds", "watches", "knobs (defaults)")
    for name, what, watches, _, knobs, *_ in observer_rows():
        table.add_row(name, what, watches, knobs)
    show_table(table)
