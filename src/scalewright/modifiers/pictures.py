"""What the values of a layer look like, small enough to be kept with it: histograms, and the range that was chosen.

A picture is plain data, so that it goes through a journal and into a file as it is:

    from, to, counts       how many values of a sample lie in each of 64 bins; `below` and `above` are what lies outside
    min, max               of the values: those of the sample, or all that were seen
    chosen, typical        the ends of the widest range that can be stored, and of the median one, or None
    ratios                 how many scales are so many twentieths of min-max's, or None

A few values that are far from all others would leave one bin for the rest, so bins end a little outside the middle
99.9 % of the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.modifiers.figures import some_rows
from scalewright.modifiers.shown import Shown
from scalewright.numerics.extremes import is_finite, min_max
from scalewright.numerics.grids import E4M3, grid_of
from scalewright.numerics.layout import flatten_for_calibration, strategy_of
from scalewright.numerics.scales import candidate_qparams, effective_scale, stored_dtype
from scalewright.observers.base import QParamsDict

Picture = dict[str, Any]

NUM_BINS = 64
NUM_RATIOS = 30
PER_RATIO = 20  # a scale that is as large as min-max's is in the bin of this number
_VALUES = 1 << 14
_FEW = 1 << 12  # values whose middle is looked for
_OUTSIDE = 0.0005  # of the values, on either side


class Seen:
    """How many tokens a layer was given, and the ends of their values."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.low = math.inf
        self.high = -math.inf

    def look(self, shown: Shown, chosen: Tensor | None = None) -> None:
        """Look at some tokens. Where only some are meant for the layer, `chosen` by their places, these are counted."""
        num_tokens, low, high = shown.once("ends", lambda: _ends(shown))
        if chosen is not None:
            num_tokens = len(chosen) if shown.mask is None else int(shown.mask.reshape(-1).bool()[chosen].sum())
        self.num_tokens += num_tokens
        self.low, self.high = min(self.low, low), max(self.high, high)

    def told(self) -> list[float]:
        """What other ranks must know of it."""
        return [self.num_tokens, self.low, self.high]

    def heard(self, everyone: Sequence[Sequence[float]]) -> None:
        """Take over what all ranks have `told`."""
        self.num_tokens = int(sum(each[0] for each in everyone))
        self.low, self.high = min(each[1] for each in everyone), max(each[2] for each in everyone)


def weight_picture(weight: Tensor, args: QuantizationArgs, qparams: QParamsDict) -> Picture | None:
    """The picture of a weight [R, C] as it was, and of the ranges that its scales stand for, on a sample of rows."""
    strategy, global_scale = strategy_of(args), qparams["global_scale"]
    scale, zero_point = effective_scale(qparams["scale"], global_scale), qparams["zero_point"]
    rows = some_rows(weight)[::2]
    some = seen = weight[rows].float()
    if strategy == "tensor":
        seen = weight
    elif strategy == "block":
        assert args.block_structure is not None
        height, middle = args.block_structure[0], len(scale) // 2
        seen = weight[middle * height : (middle + 1) * height]
        scale, zero_point = scale[middle : middle + 1], zero_point[middle : middle + 1]
    else:
        scale, zero_point = scale[rows], zero_point[rows]
    low_Q, high_Q = min_max(flatten_for_calibration(seen, "weight", args))
    least, most = (float(each) for each in torch.aminmax(some))
    picture = _histogram(some, min(least, float(low_Q.min())), max(most, float(high_Q.max())))
    if picture is None:
        return None
    dtype = stored_dtype(weight.dtype, args)
    plain = effective_scale(
        candidate_qparams(low_Q, high_Q, args, global_scale=global_scale, dtype=dtype)[0], global_scale
    )
    ratios = (scale.reshape(-1).abs() / plain.reshape(-1) * PER_RATIO).round().clamp(0, NUM_RATIOS - 1)
    counts = torch.bincount(ratios.int(), minlength=NUM_RATIOS).tolist()
    return picture | _ranges(scale, zero_point, args) | {"ratios": counts if sum(counts) > 1 else None}


def input_picture(
    sample: Tensor, seen: Seen, args: QuantizationArgs | None, qparams: QParamsDict | None
) -> Picture | None:
    """The picture of a layer's inputs: a sample of its tokens [T, C], and the static range, if it has one."""
    step = max(1, sample.numel() // _VALUES)
    picture = _histogram(sample[::step].float(), seen.low, seen.high)
    if picture is None or args is None or qparams is None:
        return picture
    global_scale = qparams["global_scale"]
    if global_scale is not None:  # groups find their scales while the model runs, up to the largest that there is
        end = _short(float(E4M3.high * grid_of(args).high / global_scale.float().min()))
        return picture | {"chosen": [-end, end]}
    return picture | _ranges(qparams["scale"].float(), qparams["zero_point"], args)


def _histogram(values: Tensor, low: float, high: float) -> Picture | None:
    flat = values.reshape(-1)
    if not len(flat) or not (math.isfinite(low) and math.isfinite(high) and is_finite(flat)):
        return None
    few = flat[:: len(flat) // _FEW | 1]  # an odd step comes to all columns
    outside = max(1, round(len(few) * _OUTSIDE))
    ends = [float(torch.kthvalue(few, place).values) for place in (outside, len(few) - outside + 1)]
    margin = (ends[1] - ends[0]) / 4
    # Bins get the ends that are kept, so that a reader finds the same values in them.
    start, stop = _short(max(low, ends[0] - margin)), _short(min(high, ends[1] + margin))
    if start >= stop:  # all values are the same
        start, stop = _short(start - abs(start) / 2 - 1e-6), _short(stop + abs(stop) / 2 + 1e-6)
    # torch.histc takes four times as long. In fp32 the tiniest values would overflow on the way.
    places = ((flat.double() - start) * (NUM_BINS / (stop - start))).floor_().clamp_(-1, NUM_BINS).int().add_(1)
    below, *counts, above = torch.bincount(places, minlength=NUM_BINS + 2).tolist()
    return {
        "from": start,
        "to": stop,
        "counts": counts,
        "below": below,
        "above": above,
        "min": _short(low),
        "max": _short(high),
        "chosen": None,
        "typical": None,
        "ratios": None,
    }


def _ranges(scale: Tensor, zero_point: Tensor, args: QuantizationArgs) -> Picture:
    grid = grid_of(args)
    point = torch.zeros_like(scale) if args.symmetric else zero_point.float().reshape(scale.shape)
    ends = [((end - point) * scale).reshape(-1) for end in (grid.low, grid.high)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)  # a negative scale turns them round
    typical = [_short(float(each.median())) for each in (low, high)]
    return {
        "chosen": [_short(float(low.min())), _short(float(high.max()))],
        "typical": typical if len(low) > 1 else None,
    }


def _ends(shown: Shown) -> tuple[int, float, float]:
    """How many tokens count, and the least and the largest of their values."""
    value = shown.value
    tokens = value.reshape(-1, value.shape[-1]) if shown.mask is None else value[shown.mask.bool()]
    if not tokens.numel():
        return 0, math.inf, -math.inf
    low, high = min_max(tokens.reshape(1, 1, -1))
    return len(tokens), float(low), float(high)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
