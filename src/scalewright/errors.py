"""Every exception that Scalewright raises on purpose.

    ScalewrightError
    ├── LayoutError            (ValueError)      a tensor and a strategy do not fit together
    ├── NonFiniteError         (ValueError)      NaN or Inf where a number is needed
    ├── KnobError              (ValueError)      an observer's knob is unknown or out of range
    ├── ImportanceError        (ValueError)      importance was demanded and is missing or unusable
    ├── RegistrationError      (ValueError)      a class that cannot be registered under that name
    ├── UnknownObserverError   (KeyError)        no observer has that name
    ├── NoStatisticsError      (AssertionError)  qparams were asked for before anything was seen
    ├── StaleWeightError       (RuntimeError)    a weight was changed between observing and reading
    ├── MergeError             (ValueError)      statistics that do not belong together
    ├── ObservationsError      (ValueError)      a file of observations that cannot be read
    ├── RecipeError            (ValueError)      a recipe that cannot mean anything
    ├── ModelError             (ValueError)      a model that cannot be loaded, run or quantised as asked
    ├── CalibrationError       (ValueError)      calibration did not show what is needed
    ├── DataError              (ValueError)      calibration data that cannot be used
    ├── OutputError            (ValueError)      a result that cannot be written where it was asked for
    ├── RankError              (RuntimeError)    another rank has failed, is lost, or has something else to do
    └── StrictError            (ValueError)      a note, where notes are errors

A message reads ``<where>: <what is wrong, with both numbers>. <what to do>.`` Deep code raises the short
fact; whoever knows the place adds it once, with `at`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

_Error = TypeVar("_Error", bound="ScalewrightError")


class ScalewrightError(Exception):
    """Base of all errors that are about what the user gave, not about our own mistakes."""

    # KeyError would show its message quoted; ours are sentences.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def at(self: _Error, where: str) -> _Error:
        """The same error, saying where it happened."""
        return type(self)(f"{where}: {self}")


class LayoutError(ScalewrightError, ValueError):
    """A tensor's shape, its base name and the quantisation strategy do not fit together."""


class NonFiniteError(ScalewrightError, ValueError):
    """NaN or Inf in a tensor that scales are to be computed from."""


class KnobError(ScalewrightError, ValueError):
    """A keyword that an observer does not have, or a value outside its bounds."""


class ImportanceError(ScalewrightError, ValueError):
    """A strict importance-weighted observer has no usable importance."""


class RegistrationError(ScalewrightError, ValueError):
    """A name that another class has already, or a class that is no observer."""


class UnknownObserverError(ScalewrightError, KeyError):
    """A name that is not in the observer registry."""


class NoStatisticsError(ScalewrightError, AssertionError):
    """Quantisation parameters were asked for before a value was observed."""


class StaleWeightError(ScalewrightError, RuntimeError):
    """A weight that must be searched again was changed after it was observed."""


class MergeError(ScalewrightError, ValueError):
    """Two sets of statistics that cannot be made one."""


class ObservationsError(ScalewrightError, ValueError):
    """A file of observations that cannot be read."""


class RecipeError(ScalewrightError, ValueError):
    """A recipe, or a modifier, that cannot mean anything. `key` is the way to the entry that is wrong."""

    def __init__(self, message: str, *, key: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.key = key

    def within(self, *key: str | int) -> RecipeError:
        """The same error, of an entry that lies under `key`."""
        return RecipeError(str(self), key=(*key, *self.key))


class ModelError(ScalewrightError, ValueError):
    """A model that cannot be loaded, run or quantised as asked."""


class CalibrationError(ScalewrightError, ValueError):
    """Calibration did not show what a layer needs."""


class DataError(ScalewrightError, ValueError):
    """Calibration data that cannot be used."""


class OutputError(ScalewrightError, ValueError):
    """A result that cannot be written where it was asked for."""


class RankError(ScalewrightError, RuntimeError):
    """A rank has failed, is lost or does something else, so that the others cannot go on. The message names it."""


class StrictError(ScalewrightError, ValueError):
    """A note that would only be shown, where notes are errors."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence that names the nearest of the `known` names, with a space before it; empty when none is near."""
    in_small_letters = {each.lower(): each for each in known}
    close = get_close_matches(str(name).lower(), in_small_letters, n=1)
    return f" Did you mean '{in_small_letters[close[0]]}'?" if close else ""
