"""Which observer a tensor gets when nobody names one: that which measures best on real models.

A named observer is obeyed to the letter.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationType

from scalewright.numerics.layout import strategy_of
from scalewright.observers.base import Observer
from scalewright.observers.histogram import BalancedMSEObserver

_MANY_BITS = 8
_FOR_MANY_BITS = {"importance": "off", "norm": 3.0}


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
    """The observer that `args` name, or the default if they name none; `args.observer_kwargs` are its knobs.

    By default importance is not asked for where weights have 8 bits or more: it would take a pass over the data, and
    gain nothing that could be measured. The norm is 3 there, which is quicker than 2.4 and loses no more
    (docs/design.md).
    """
    knobs: dict[str, Any] = {}
    if args.observer is None and base_name == "weight" and args.num_bits >= _MANY_BITS:
        knobs = {name: value for name, value in _FOR_MANY_BITS.items() if name not in (args.observer_kwargs or {})}
    name = args.observer or default_observer(base_name, args)
    observer: Observer = Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)
    return observer
