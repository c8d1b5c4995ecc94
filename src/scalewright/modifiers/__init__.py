"""Named changes to a model: what a recipe asks for."""

from scalewright.modifiers.base import Modifier
from scalewright.modifiers.gptq import GPTQModifier
from scalewright.modifiers.imatrix import IMatrixGatherer
from scalewright.modifiers.quantization import QuantizationModifier
from scalewright.modifiers.smoothquant import SmoothQuantModifier

__all__ = ["GPTQModifier", "IMatrixGatherer", "Modifier", "QuantizationModifier", "SmoothQuantModifier"]
