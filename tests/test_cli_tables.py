"""Tables: whatever the width of the terminal, what is in them can be read."""

import io

import pytest
from rich.console import Console

from scalewright.cli.tables import add_numbers, new_table, show_table

NAMES = [f"model.layers.{i}.self_attn.{name}" for i in (0, 17) for name in ("q_proj", "o_proj")]


def printed(table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show_table(table, console)
    return console.file.getvalue().splitlines()


def table_of(num_columns: int):
    table = new_table("What is measured", "layer", "observers")
    for column in range(num_columns):
        add_numbers(table, f"weight\nnumber\n{column:05}")
    for row, name in enumerate(NAMES):
        table.add_row(
            name, "weight: optimal, input: nvfp4_expanded_mse", *(f"{row}{i:03}.5" for i in range(num_columns))
        )
    table.caption = "the end"
    return table


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140, 300])
@pytest.mark.parametrize("num_columns", [0, 1, 4, 12])
def test_nothing_is_cut_and_no_line_is_too_long(width, num_columns):
    lines = printed(table_of(num_columns), width)

    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= width
    for word in ("weight:", "optimal,", "input:", "nvfp4_expanded_mse"):
        assert text.count(word) >= len(NAMES)
    for column in range(num_columns):
        assert text.count(f"{column:05}") == 1
        assert all(f" {row}{column:03}.5 " in f"{text} " for row in range(len(NAMES)))
    assert text.count("What is measured") == text.count("the end") == 1


def test_each_part_names_its_rows():
    lines = printed(table_of(12), 80)

    num_parts = sum("layer" in line and "model" not in line for line in lines)
    assert num_parts > 1
    assert all(sum(name in line for line in lines) == num_parts for name in NAMES)


def test_what_fits_is_one_table():
    assert sum(NAMES[0] in line for line in printed(table_of(4), 140)) == 1
