"""What `eval` has found, as far as the page shows it. What is missing, or is not what it should be, is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalewright.errors import DataError

_LARGEST = 1e300


@dataclass(frozen=True)
class Measured:
    """A number, and its standard error if that is known."""

    value: float
    error: float | None = None

    @property
    def in_words(self) -> str:
        """`.0312 ± .0004` and the like, with as many digits as the error leaves."""
        digits = 4 if self.error is None or self.error <= 0 else max(0, min(6, 1 - math.floor(math.log10(self.error))))
        whole = f"{self.value:.4g}" if self.error is None else f"{self.value:.{digits}f}"
        return whole if self.error is None else f"{whole} ± {self.error:.{digits}f}"

    @property
    def in_percent(self) -> str:
        """The same of a share, as `88.7 ± 0.4 %`."""
        error = None if self.error is None else 100 * self.error
        return f"{Measured(100 * self.value, error).in_words} %"


@dataclass(frozen=True)
class Evaluated:
    """Figures of the whole model."""

    kl: Measured | None = None
    perplexity: Measured | None = None
    original_perplexity: Measured | None = None
    agreement: Measured | None = None
    verdict: str = ""
    """Of what the model writes."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """KL, its error and agreement by position."""
    measured_on: str = field(default="", compare=False)
    """Which model, and how much data: an evaluation may be of another checkpoint than the page. No figure by itself."""

    @property
    def has_any(self) -> bool:
        """Whether there is anything to show."""
        return self != Evaluated()

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> Evaluated:
        """From the plain data of `evaluate(...).to_dict()`."""
        if found is None:
            return cls()
        generation = found.get("generation")
        verdict = generation.get("verdict") if isinstance(generation, dict) else None
        return cls(
            _measured(found.get("kl")),
            _measured(found.get("perplexity")),
            _measured(found.get("original_perplexity")),
            _measured(found.get("agreement")),
            verdict if isinstance(verdict, str) else "",
            _curve(found.get("positions")),
            _measured_on(found),
        )


def read_evaluation(file: Path) -> dict[str, Any]:
    """What `eval --json` has printed, from a file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}). Give what `eval --json` has printed."
        ) from None
    except (ValueError, RecursionError):
        raise DataError(f"{file}: is no JSON. Give what `eval --json` has printed.") from None
    if not isinstance(found, dict) or not Evaluated.of(found).has_any:
        raise DataError(f"{file}: has neither kl, perplexity nor agreement in it. Give what `eval --json` has printed.")
    return found


def _measured(found: Any) -> Measured | None:
    value, error = (found.get("value"), found.get("error")) if isinstance(found, dict) else (found, None)
    number = _number(value)
    return None if number is None else Measured(number, _number(error))


def _measured_on(found: Mapping[str, Any]) -> str:
    """`OUT beside MODEL: 16 samples, 4,080 tokens`, as far as it is known."""
    names = " beside ".join(each for key in ("model", "against") if isinstance(each := found.get(key), str))
    counts = ((key, _number(found.get(f"num_{key}"))) for key in ("samples", "tokens"))
    return ": ".join(filter(None, (names, ", ".join(f"{each:,.0f} {key}" for key, each in counts if each is not None))))


def _curve(found: Any) -> list[dict[str, float]]:
    points = []
    for each in found if isinstance(found, list) else []:
        if not isinstance(each, dict):
            continue
        kl, agreement = _measured(each.get("kl")), _measured(each.get("agreement"))
        first, last = _number(each.get("first")), _number(each.get("last"))
        if kl is not None and first is not None:
            point = {"at": first if last is None else (first + last) / 2, "kl": kl.value}
            point |= {} if kl.error is None else {"error": kl.error}
            points.append(point if agreement is None else point | {"agreement": agreement.value})
    return points


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    return float(value) if is_number else None
