"""Scalewright: finds the scales that lose least when a language model is written in few bits."""

from scalewright.errors import ScalewrightError
from scalewright.observers import Observer

__version__ = "0.1.0.dev0"

__all__ = ["Observer", "ScalewrightError", "__version__"]
