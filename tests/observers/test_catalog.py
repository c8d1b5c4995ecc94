"""The registry as a table: a row for each observer, true to what the classes say."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright.numerics.layout import STRATEGIES
from scalewright.observers import Observer, StaticMinMaxObserver
from scalewright.observers.catalog import COLUMNS, observer_rows, observers_markdown, registered_observers
from scalewright.observers.registry import NamedObservers

OURS = {
    "entropy",
    "histogram_mse",
    "imatrix_mse",
    "memoryless_minmax",
    "memoryless_mse",
    "minmax",
    "mse",
    "nvfp4_expanded_mse",
    "percentile",
    "static_minmax",
}


def row(name: str) -> dict[str, str]:
    return next(dict(zip(COLUMNS, cells, strict=True)) for cells in observer_rows() if cells[0] == name)


def cells_of(line: str) -> list[str]:
    return line.strip("|").replace("\\|", "").split("|")


def test_every_registered_observer_has_a_row_and_rows_are_in_order():
    names = [cells[0] for cells in observer_rows()]
    assert set(names) >= OURS
    assert names == sorted(names) == list(registered_observers())


def test_the_name_in_the_table_loads_the_class():
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    for name, cls in registered_observers().items():
        assert type(Observer.load_from_registry(name, args=args)) is cls


def test_knobs_stand_with_their_defaults():
    assert row("minmax")["knobs (defaults)"] == "averaging_constant (0.01)"
    assert row("static_minmax")["knobs (defaults)"] == "none"
    assert row("imatrix_mse")["knobs (defaults)"] == (
        "maxshrink (0.95), patience (5), grid (20), norm (3), expand (1), strict (false)"
    )


def test_strategies_are_those_that_the_observer_serves():
    assert row("percentile")["strategies"] == "tensor, attn_head"
    every = set(row("mse")["strategies"].split(", "))
    assert every == {strategy for some in STRATEGIES.values() for strategy in some}


def test_merge_rules_and_order_are_told():
    assert row("static_minmax")["merge"] == "min_vals: min, max_vals: max"
    assert row("minmax")["merge"] == (
        "min_vals: derived, max_vals: derived, first_min: first, first_max: first, "
        "added_min: decayed, added_max: decayed, num_averaged: sum"
    )
    assert row("mse")["merge"] == row("minmax")["merge"] + ", true_absmax: max"
    assert "counts: sum" in row("entropy")["merge"]
    assert "_imatrix_sum: sum" in row("imatrix_mse")["merge"]
    assert {name for name in registered_observers() if row(name)["ordered"] == "yes"} >= {"minmax", "mse"}
    assert row("static_minmax")["ordered"] == row("percentile")["ordered"] == "no"


def test_what_it_finds_is_the_first_sentence_of_the_class():
    for name in OURS:
        text = row(name)["what it finds"]
        assert text and registered_observers()[name].__doc__.startswith(text)


def test_the_markdown_has_a_line_for_each_observer_and_each_knob():
    text = observers_markdown()
    table, knobs = text.strip().split("\n\n")
    lines, knob_lines = table.splitlines(), knobs.splitlines()
    assert len(lines) == 2 + len(registered_observers())
    assert len(knob_lines) == 2 + sum(len(cls.knobs) for cls in registered_observers().values())
    assert {len(cells_of(line)) for line in lines} == {len(COLUMNS)}
    assert {len(cells_of(line)) for line in knob_lines} == {5}
    assert any(line.startswith("| mse | maxshrink | 0.2 | a number at least 0 and at most 1 | ") for line in knob_lines)
    assert text.endswith("|\n")


def test_a_bar_in_a_text_does_not_break_the_table():
    (line,) = [line for line in observers_markdown().splitlines() if line.startswith("| entropy | The")]
    assert r"\|x\|" in line


@pytest.fixture
def own_registry(monkeypatch):
    """A registry that forgets, when the test is over, what was registered in it."""
    for table in ("_names", "_classes"):
        monkeypatch.setattr(NamedObservers, table, dict(getattr(NamedObservers, table)))


@pytest.mark.usefixtures("own_registry")
def test_an_observer_of_somebody_else_gets_a_row_the_moment_it_is_registered():
    @Observer.register("tabled_minmax")
    class TabledObserver(StaticMinMaxObserver):
        """The range of everything, for a test."""

        ordered = True

    assert row("tabled_minmax")["what it finds"] == "The range of everything, for a test."
    assert row("tabled_minmax")["ordered"] == "yes"
    observer = Observer.load_from_registry("Tabled-MinMax", args=QuantizationArgs(num_bits=8, strategy="tensor"))
    assert isinstance(observer, TabledObserver)
    assert observer(torch.ones(2, 2)).has_statistics
    assert row("static_minmax")["ordered"] == "no"
