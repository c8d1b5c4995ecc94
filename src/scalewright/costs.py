"""What a run will take, reckoned from the shapes of its layers: memory, and time on this machine.

Memory is what is there together at the worst moment of a run: the process itself, the weights of a block, what is made
of the largest layer, what flows. Time is work divided by rates, which short measurements find: a matrix product, and
the search for the scales of a small random weight under each scheme.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from scalewright.calibration.plan import Plan, largest_block
from scalewright.modifiers.gptq_layer import GPTQLayer
from scalewright.modifiers.layers import WatchedLayer
from scalewright.numerics.products import linear
from scalewright.observers import make_observer
from scalewright.observers.fusion import FUSED_LAYER_NAMES

MB = 10**6
_PROBE = (256, 1024)
_SEARCH = 48 * MB  # what a search takes beside the weight, at the most (docs/benchmarks.md)
_IMPORTED = 50 * MB  # what is imported on the way
_LIVE = 3  # inputs and outputs of a layer that are there while its block is run
_PER_WEIGHT = 4.0  # bytes for each weight of the layer that is being stored
_FACTOR = 2  # matrices that a Hessian becomes on its way to a factor
_ROUNDING = 16.0  # bytes for each weight of the layer that GPTQ rounds
_STORING = 1.2e-8  # seconds to store a weight, and to see what it lost
_ROUNDING_SECONDS = 5e-8  # for each weight that GPTQ rounds, or refines, column by column
_SLOWER = 2.0  # how much slower factors are made than products of matrices
_BYTES_PER_SECOND = 1e9  # of a disk


@dataclass(frozen=True)
class Run:
    """All of a run that its costs depend on."""

    plans: Sequence[Plan]
    num_tokens: int
    batch_tokens: int
    hidden_size: int
    """Of what flows between blocks."""
    gathering_passes: int = 0
    is_streamed: bool = False
    """Whether the model stays on disk."""
    room: int | None = None
    """Bytes of memory for what waits between blocks; the rest waits in a file."""

    @property
    def model(self) -> nn.Module:
        """The model, without its weights perhaps."""
        return self.plans[0].model

    @cached_property
    def element_size(self) -> int:
        """Bytes of a weight, and of a value that flows."""
        return max((each.element_size() for each in self.model.parameters()), default=4)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(run: Run) -> int:
    """What a run has in memory at the most, about."""
    process = process_bytes() + _IMPORTED
    whole = 0 if run.is_streamed else run.plans[0].bytes_before()
    return process + whole + max(_peak_of(run, plan) for plan in run.plans)


def process_bytes() -> int:
    """What this process has in memory now."""
    return int(psutil.Process().memory_info().rss)


def _peak_of(run: Run, plan: Plan) -> int:
    """What a stage adds to the process and a model in memory."""
    quantised = [layer for layer in plan.layers if layer.scheme.weights is not None]
    storing = max((_SEARCH + _PER_WEIGHT * layer.weight.numel() for layer in quantised), default=0.0)
    if not _has_passes(run, plan):
        return round(storing + (_largest_together(plan) if run.is_streamed else 0))
    alone = max(_bytes_of(layer.module.parameters()) for layer in plan.layers)
    weights = max(alone, largest_block([plan])) if run.is_streamed else 0
    waiting = _waiting_bytes(run, plan) if run.room is None else min(_waiting_bytes(run, plan), run.room)
    widths = [sum(layer.weight.shape) for layer in quantised]
    live = _LIVE * run.batch_tokens * max(widths, default=run.hidden_size) * run.element_size
    rounding = max((_rounding_bytes(layer, run) for layer in quantised if isinstance(layer, GPTQLayer)), default=0.0)
    return round(weights + waiting + max(live, storing, rounding))


def _has_passes(run: Run, plan: Plan) -> bool:
    """Whether data flows through the model, in a stage or before it."""
    return plan.pipeline != "data_free" or run.gathering_passes > 0


def spilt_bytes(run: Run) -> int:
    """What waits between blocks in a file, because memory has no room for it."""
    most = max(_waiting_bytes(run, plan) for plan in run.plans)
    return 0 if run.room is None else max(0, most - run.room)


def _waiting_bytes(run: Run, plan: Plan) -> int:
    """What waits between blocks: all samples, and once more as they would be without quantising, if that is wanted."""
    if not _has_passes(run, plan) or not (plan.pipeline == "sequential" or run.is_streamed):
        return 0
    streams = 2 if any(layer.wants_unquantised for layer in plan.layers) else 1
    return streams * run.num_tokens * run.hidden_size * run.element_size


def _largest_together(plan: Plan) -> int:
    """Bytes of the layers that are quantised together: those that a loader merges, or one alone."""
    sets: dict[Any, int] = {}
    for layer in plan.layers:
        sets[_set_of(layer)] = sets.get(_set_of(layer), 0) + _bytes_of(layer.module.parameters())
    return max(sets.values(), default=0)


def _rounding_bytes(layer: GPTQLayer, run: Run) -> float:
    """What GPTQ has in memory for a layer: its Hessian and what becomes of it, and the weight some times over.

    Whether a layer's output is added to a stream shows only when it is run; those with most inputs mostly are.
    """
    rows, columns = layer.weight.shape
    kept = 4.0 * run.batch_tokens * columns
    if not layer.wants_unquantised:
        return 4.0 * (1 + _FACTOR) * columns**2 + _ROUNDING * layer.weight.numel() + kept
    rows = rows if layer.wants_stream else 0
    sums = 4.0 * columns * (columns + rows)
    streams = 4.0 * run.batch_tokens * (columns + 2 * rows)
    return 4.0 * (1 + _FACTOR) * columns**2 + _ROUNDING * layer.weight.numel() + kept + sums + streams


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """How fast this machine is."""

    passes: float
    """Operations a second in passes, which are of the model's dtype."""
    products: float
    """The same in fp32: Hessians, and what is made of them."""
    search: Callable[[QuantizationArgs], float]
    """Seconds to find the scale of one weight."""

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Rates:
        """By short trials, here and now."""
        known: dict[str, float] = {}

        def search(args: QuantizationArgs) -> float:
            if repr(args) not in known:
                known[repr(args)] = _search_seconds(args)
            return known[repr(args)]

        return cls(_flops(dtype), _flops(torch.float32), search)


def seconds(run: Run, rates: Rates) -> tuple[float, float]:
    """How long a run takes on this machine, about: work that ranks share, and what each of them does."""
    gathering = 2.0 * run.gathering_passes * _weights_run(run, run.plans[0]) * run.num_tokens / rates.passes
    of_stages = sum(_data_seconds(run, plan, rates) + _weight_seconds(plan, rates) for plan in run.plans)
    moved = run.plans[0].bytes_before() / _BYTES_PER_SECOND
    return gathering + of_stages, moved


def _weights_run(run: Run, plan: Plan) -> int:
    """Weights that each token is multiplied with."""
    blocks = [run.model.get_submodule(name) for name in plan.blocks]
    inside = {id(each): each.numel() for block in blocks for each in block.parameters() if each.dim() > 1}
    weights = (getattr(layer.module, "weight", None) for layer in plan.layers)  # attention has none
    return sum(inside.values()) or sum(each.numel() for each in weights if isinstance(each, torch.Tensor))


def _data_seconds(run: Run, plan: Plan, rates: Rates) -> float:
    """Passes, and what is made of what they show."""
    rounded = [layer for layer in plan.layers if isinstance(layer, GPTQLayer)]
    streams = 2 if any(layer.wants_unquantised for layer in rounded) else 1
    passes = {"data_free": 0, "basic": 1, "sequential": streams if rounded else 2}[plan.pipeline]
    hessians = sum(
        layer.weight.shape[-1] ** 2 * (3 if layer.wants_unquantised else 1) for layer in _one_of_each_input(rounded)
    )
    passing = 2.0 * passes * _weights_run(run, plan) / rates.passes
    return run.num_tokens * (passing + hessians / rates.products)


def _weight_seconds(plan: Plan, rates: Rates) -> float:
    """What is done to weights, once they are known."""
    total = 0.0
    for layer in plan.layers:
        if layer.scheme.weights is not None:
            total += layer.weight.numel() * (rates.search(layer.scheme.weights) + _STORING)
        if isinstance(layer, GPTQLayer):
            rows, columns = layer.weight.shape
            total += _SLOWER * 2.0 * rows * columns**2 * (1 + 2 * layer.rounding.refinements) / rates.products
            total += rows * columns * (1 + layer.rounding.refinements) * _ROUNDING_SECONDS
    rounded = [layer for layer in plan.layers if isinstance(layer, GPTQLayer)]
    cubes = sum(each.weight.shape[-1] ** 3 for each in _one_of_each_input(rounded))
    return total + _SLOWER * 2.0 * cubes / rates.products


def _one_of_each_input(layers: Iterable[GPTQLayer]) -> list[GPTQLayer]:
    """Layers, but only one of those that are given the same input, as far as their names tell."""
    return list({_set_of(layer): layer for layer in layers}.values())


def _set_of(layer: WatchedLayer) -> tuple[str, tuple[str, ...]]:
    """What layers have in common that belong together."""
    parent, _, own = layer.name.rpartition(".")
    return parent, next((names for names in FUSED_LAYER_NAMES if own in names), (own,))


def _flops(dtype: torch.dtype) -> float:
    x, weight = (torch.randn(*shape).to(dtype) for shape in ((512, 1024), (1024, 1024)))
    best = min(_timed(lambda: linear(x, weight)) for _ in range(3))
    return 2 * 512 * 1024 * 1024 / best


def _search_seconds(args: QuantizationArgs) -> float:
    """Seconds for one weight."""
    weight = torch.randn(_PROBE)
    best = min(_timed(lambda: make_observer("weight", args)(weight).get_qparams()) for _ in range(2))
    return best / weight.numel()


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
