"""Scalewright: finds the scales that lose least when a language model is written in few bits.

Names are looked up when they are asked for: torch and transformers take seconds to import, and the command line should
not wait for them to print its help.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from scalewright.errors import ScalewrightError
    from scalewright.evaluation import evaluate
    from scalewright.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier, SmoothQuantModifier
    from scalewright.observers import Observer
    from scalewright.observing import observe
    from scalewright.oneshot import Result, oneshot
    from scalewright.recipe import Recipe

__version__ = "0.1.0.dev0"

__all__ = [
    "GPTQModifier",
    "IMatrixGatherer",
    "Observer",
    "QuantizationModifier",
    "Recipe",
    "Result",
    "ScalewrightError",
    "SmoothQuantModifier",
    "__version__",
    "evaluate",
    "observe",
    "oneshot",
]

_HOMES = {
    "GPTQModifier": "modifiers",
    "IMatrixGatherer": "modifiers",
    "Observer": "observers",
    "QuantizationModifier": "modifiers",
    "Recipe": "recipe",
    "Result": "oneshot",
    "ScalewrightError": "errors",
    "SmoothQuantModifier": "modifiers",
    "evaluate": "evaluation",
    "observe": "observing",
    "oneshot": "oneshot",
}


class _Package(_ModuleType):
    """A package whose names come when they are asked for. `oneshot` is the function, not the module that it is in."""

    def __getattr__(self, name: str) -> _Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'scalewright' has no attribute '{name}'")
        found = getattr(_import_module(f"scalewright.{_HOMES[name]}"), name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: _Any) -> None:
        # Python sets a module as an attribute of its package when it has been imported.
        is_home = isinstance(value, _ModuleType) and _HOMES.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_home else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


_sys.modules[__name__].__class__ = _Package
