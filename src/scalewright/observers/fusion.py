"""Layers that a loader merges into one matrix, and so must share one global scale."""

from __future__ import annotations

from torch.nn import Module

from scalewright.numerics.layout import strategy_of
from scalewright.observers.base import Observer

FUSED_LAYER_NAMES: tuple[tuple[str, ...], ...] = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def fuse_weight_observers(model: Module) -> None:
    """Fuse the `weight_observer`s of layers that are merged on loading, where all of them are TENSOR_GROUP."""
    for submodule in model.modules():
        for names in FUSED_LAYER_NAMES:
            observers = [getattr(getattr(submodule, name, None), "weight_observer", None) for name in names]
            fusible = [
                each for each in observers if isinstance(each, Observer) and strategy_of(each.args) == "tensor_group"
            ]
            if len(fusible) == len(names):
                Observer.fuse(fusible)
