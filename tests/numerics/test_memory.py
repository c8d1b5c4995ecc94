"""What a search needs beside its input and its answer does not grow with the tensor."""

from __future__ import annotations

from collections import Counter
from weakref import finalize

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalewright.numerics import scales
from scalewright.numerics.extremes import min_max
from scalewright.numerics.layout import flatten_for_calibration
from scalewright.numerics.optimal import optimal_range
from scalewright.numerics.scales import global_scale_of, stored_qparams
from scalewright.numerics.search import search_range, shrink_candidates

FORMATS = {
    "int4": QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=16),
    "asymmetric": QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=16),
    "nvfp4": preset_name_to_scheme("NVFP4A16", ["Linear"]).weights,
    "mxfp4": preset_name_to_scheme("MXFP4A16", ["Linear"]).weights,
}
COLUMNS = 2048
FEW, MANY = 1024, 3072  # rows; few of them are more than what is worked on at a time


class Meter(TorchDispatchMode):
    """The most bytes that tensors take at once which are made inside; what torch makes for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}
        self._owners: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and (_place(each) not in given or _place(each) in self._sizes):
                self._sizes[_place(each)] = each.untyped_storage().nbytes()
                self._owners[_place(each)] += 1
                finalize(each, self._let_go, _place(each))
        self.most = max(self.most, sum(self._sizes.values()))
        return made

    def _let_go(self, place: int) -> None:
        self._owners[place] -= 1
        if not self._owners[place]:
            del self._sizes[place]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def best_range(x_NQG, lo_Q, hi_Q, args, global_scale):
    return optimal_range(x_NQG, lo_Q, hi_Q, args, norm=2.0, global_scale=global_scale)


def shrunken_range(x_NQG, lo_Q, hi_Q, args, global_scale):
    candidates = shrink_candidates(maxshrink=0.2, grid=100)
    return search_range(x_NQG, lo_Q, hi_Q, args, candidates_K2=candidates, norm=2.0, global_scale=global_scale)


def qparams(x_NQG, lo_Q, hi_Q, args, global_scale):
    return stored_qparams(lo_Q, hi_Q, args, global_scale=global_scale)


def most_bytes(work, args, rows: int) -> int:
    weight = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    x_NQG = flatten_for_calibration(weight, "weight", args)
    lo_Q, hi_Q = min_max(x_NQG)
    global_scale = global_scale_of(weight.abs().max()) if args.strategy == "tensor_group" else None
    with Meter() as meter:
        answer = work(x_NQG, lo_Q, hi_Q, args, global_scale)
    assert meter.most >= lo_Q.numel() * 4 and answer is not None
    return meter.most


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("work", [best_range, shrunken_range, qparams])
def test_only_the_answer_grows(work, name, monkeypatch):
    monkeypatch.setattr(scales, "_AT_A_TIME", 1 << 14)
    args = FORMATS[name]
    assert args is not None
    positions = (MANY - FEW) * COLUMNS // int(args.group_size)
    _, before, after = (most_bytes(work, args, rows) for rows in (FEW, FEW, MANY))  # tables are made once, and stay
    assert after - before <= 16 * positions  # four numbers for each: the ends of a range, and what is said of them
