"""Scalewright: finds the scales that lose least when a language model is written in few bits."""

from scalewright.errors import ScalewrightError
from scalewright.evaluation import evaluate
from scalewright.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
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
    "__version__",
    "evaluate",
    "observe",
    "oneshot",
]
