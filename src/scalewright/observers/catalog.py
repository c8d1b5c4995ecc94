"""The registry as a table, for the docs and the command line."""

from __future__ import annotations

from scalewright.numerics.layout import STRATEGIES
from scalewright.observers.base import Observer

_ALL_STRATEGIES = tuple(dict.fromkeys(strategy for some in STRATEGIES.values() for strategy in some))
COLUMNS = ("name", "what it finds", "watches", "strategies", "knobs (defaults)", "merge", "ordered")


def registered_observers() -> dict[str, type[Observer]]:
    """Every registered observer class by its name, in alphabetical order."""
    return {name: Observer.get_value_from_registry(name) for name in sorted(Observer.registered_names())}


def observer_rows() -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each registered observer."""
    return [
        (
            name,
            next(iter((cls.__doc__ or "").strip().splitlines()), ""),
            ", ".join(cls.watches),
            ", ".join(_strategies_of(cls)),
            ", ".join(f"{knob.name} ({_shown(knob.default)})" for knob in cls.knobs) or "none",
            ", ".join(f"{statistic}: {rule}" for statistic, rule in cls.merge_rules.items()),
            "yes" if cls.ordered else "no",
        )
        for name, cls in registered_observers().items()
    ]


def _strategies_of(cls: type[Observer]) -> tuple[str, ...]:
    if cls.strategies:
        return cls.strategies
    return STRATEGIES["weight"] if cls.watches == ("weights",) else _ALL_STRATEGIES


def observers_markdown() -> str:
    """The table of all observers and the table of their knobs, in Markdown."""
    lines = [_markdown_row(COLUMNS), _markdown_row(["---"] * len(COLUMNS))]
    lines += [_markdown_row(row) for row in observer_rows()]
    lines += ["", _markdown_row(("observer", "knob", "default", "takes", "what it does")), _markdown_row(["---"] * 5)]
    for name, cls in registered_observers().items():
        lines += [_markdown_row((name, knob.name, _shown(knob.default), knob.bounds, knob.help)) for knob in cls.knobs]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
