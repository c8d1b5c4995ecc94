"""How much of a model is left: perplexity, KL divergence and agreement with the original, and what it writes."""

from scalewright.evaluation.evaluating import Evaluation, evaluate
from scalewright.evaluation.figures import Figure, PositionBin
from scalewright.evaluation.generation import Generation, Habits, Pair, Text
from scalewright.evaluation.scoring import WorstSample, WorstToken

__all__ = [
    "Evaluation",
    "Figure",
    "Generation",
    "Habits",
    "Pair",
    "PositionBin",
    "Text",
    "WorstSample",
    "WorstToken",
    "evaluate",
]
