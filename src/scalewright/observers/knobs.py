"""Knobs: what a user may turn on an observer.

A knob is declared once, on the class that has it; validation, error texts, the docs table and the command line all
read that declaration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from scalewright.errors import KnobError, did_you_mean

KnobValue = bool | int | float | str


@dataclass(frozen=True)
class Knob:
    """One setting of an observer: its type is that of its default.

    `low` and `high` bound a number, both ends included; `above` is a bound that is not included itself.
    `changes` says what turning it does: the "result", or only the "time" that the same result takes.
    """

    name: str
    default: KnobValue
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    changes: str = "result"

    @property
    def bounds(self) -> str:
        """The values that the knob takes, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return " or ".join(self.choices)
        if isinstance(self.default, str):
            return "text"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        parts = [f"above {self.above:g}"] if self.above is not None else []
        parts += [f"at least {self.low:g}"] if self.low is not None else []
        parts += [f"at most {self.high:g}"] if self.high is not None else []
        return " ".join([kind, " and ".join(parts)]).strip()

    def parse(self, value: Any) -> KnobValue:
        """`value` as this knob's type, or KnobError."""
        if isinstance(self.default, bool) or self.choices or isinstance(self.default, str):
            fits = isinstance(value, type(self.default)) and (not self.choices or value in self.choices)
        else:
            fits = isinstance(value, Real) and not isinstance(value, bool) and self._holds(float(value))
        if not fits:
            raise KnobError(f"{self.name} must be {self.bounds}, got {value!r}")
        return type(self.default)(value)

    def _holds(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (not isinstance(self.default, int) or float(value).is_integer())
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def with_defaults(knobs: tuple[Knob, ...], **defaults: KnobValue) -> tuple[Knob, ...]:
    """The same knobs with other defaults, for an observer that is a tuned variant of another."""
    assert set(defaults) <= {knob.name for knob in knobs}
    return tuple(replace(knob, default=defaults.get(knob.name, knob.default)) for knob in knobs)


def parse_knobs(observer_name: str, knobs: tuple[Knob, ...], given: Mapping[str, Any]) -> dict[str, KnobValue]:
    """A value for every knob: the given one, checked, or the default. A name that is no knob is an error."""
    names = {knob.name for knob in knobs}
    for name in given:
        if name not in names:
            has = f"Knobs: {', '.join(sorted(names))}" if names else "It has none"
            raise KnobError(f"observer '{observer_name}' has no knob '{name}'.{did_you_mean(name, names)} {has}.")
    try:
        return {knob.name: knob.parse(given.get(knob.name, knob.default)) for knob in knobs}
    except KnobError as error:
        raise KnobError(f"observer '{observer_name}': {error}.") from None
