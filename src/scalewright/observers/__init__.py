"""Observers: they watch a tensor, keep small statistics, and give scale, zero point and global scale."""

from scalewright.numerics.layout import flatten_for_calibration
from scalewright.observers.base import Observer, QParamsDict
from scalewright.observers.fusion import FUSED_LAYER_NAMES, fuse_weight_observers
from scalewright.observers.histogram import EntropyObserver, HistogramMSEObserver, PercentileObserver
from scalewright.observers.imatrix import IMatrixMSEObserver
from scalewright.observers.knobs import Knob
from scalewright.observers.merging import sync_statistics
from scalewright.observers.minmax import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from scalewright.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from scalewright.observers.optimal import OptimalObserver

__all__ = [
    "FUSED_LAYER_NAMES",
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
    "flatten_for_calibration",
    "fuse_weight_observers",
    "sync_statistics",
]
