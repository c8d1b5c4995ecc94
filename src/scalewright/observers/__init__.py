"""Observers: they watch a tensor, keep small statistics, and give scale, zero point and global scale."""

from scalewright.numerics.layout import flatten_for_calibration
from scalewright.observers.base import Observer, QParamsDict
from scalewright.observers.defaults import default_observer, make_observer
from scalewright.observers.fusion import FUSED_LAYER_NAMES, fuse_weight_observers
from scalewright.observers.histogram import (
    BalancedMSEObserver,
    EntropyObserver,
    HistogramMSEObserver,
    PercentileObserver,
)
from scalewright.observers.imatrix import IMatrixMSEObserver
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import sync_statistics
from scalewright.observers.minmax import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from scalewright.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from scalewright.observers.optimal import OptimalObserver

__all__ = [
    "FUSED_LAYER_NAMES",
    "BalancedMSEObserver",
    "EntropyObserver",
    "HistogramMSEObserver",
    "IMatrixMSEObserver",
    "Knob",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "OptimalObserver",
    "PercentileObserver",
    "QParamsDict",
    "StaticMinMaxObserver",
    "default_observer",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "make_observer",
    "sync_statistics",
]
