"""Which observer a tensor gets when nobody names one: that which measures best on real models.

A named observer is obeyed to the letter.
"""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationType

from scalewright.numerics.layout import strategy_of
from scalewright.observers.base import Observer
from scalewright.observers.histogram import BalancedMSEObserver


def default_observer(base_name: str, args: QuantizationArgs) -> str:
    """The registry name of the observer for a tensor whose `args` name none.

    Weights: `optimal`. Static activations and attention states: `static_minmax` for floating-point formats, where
    nothing that clips does better, and `balanced_mse` for integers, where it serves the strategy.
    """
    if base_name == "weight":
        return "optimal"
    is_counted = args.type == QuantizationType.INT and strategy_of(args) in BalancedMSEObserver.strategies
    return "balanced_mse" if is_counted else "static_minmax"


def make_observer(base_name: str, args: QuantizationArgs) -> Observer:
    """The observer that `args` name, or the default if they name none; `args.observer_kwargs` are its knobs."""
    name = args.observer or default_observer(base_name, args)
    observer: Observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    return observer
