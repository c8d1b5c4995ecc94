"""Search observers: which range they choose, how it joins what was seen before, and what NVFP4 asks of them."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import nn

from scalewright.numerics.extremes import min_max
from scalewright.numerics.layout import flatten_for_calibration
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers import (
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    NVFP4ExpandedMSEObserver,
    Observer,
)
from scalewright.observers.mse import RangeSearchObserver

INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
INT4_AFFINE = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
INT8_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
FP8_CHANNEL = QuantizationArgs(num_bits=8, type="float", strategy="channel")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
NAMES = ["memoryless_mse", "mse", "imatrix_mse", "nvfp4_expanded_mse"]


def make(name: str, args: QuantizationArgs = INT4, base_name: str = "weight", **knobs) -> RangeSearchObserver:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape)


def lost(weight: torch.Tensor, qparams, args: QuantizationArgs, norm: float) -> torch.Tensor:
    """What compressed-tensors loses with these qparams."""
    read_back = fake_quantize(
        weight, qparams["scale"], qparams["zero_point"], args, global_scale=qparams["global_scale"]
    )
    return (read_back - weight).double().abs().pow(norm).sum()


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("memoryless_mse", {"maxshrink": 0.20, "patience": 5, "grid": 100.0, "norm": 2.4, "expand": 1.0}),
        (
            "mse",
            {
                "maxshrink": 0.20,
                "patience": 5,
                "grid": 100.0,
                "norm": 2.4,
                "expand": 1.0,
                "averaging_constant": 0.01,
                "avg_constant": 0.01,
            },
        ),
        (
            "imatrix_mse",
            {"maxshrink": 0.95, "patience": 5, "grid": 20.0, "norm": 3.0, "expand": 1.0, "strict": False},
        ),
        (
            "nvfp4_expanded_mse",
            {"maxshrink": 1 - 0.8 / 1.8, "patience": 1000, "grid": 200.0, "norm": 2.4, "expand": 1.8},
        ),
    ],
)
def test_the_defaults_are_the_documented_ones(name, defaults):
    observer = make(name)
    assert {knob: getattr(observer, knob) for knob in defaults} == defaults


@pytest.mark.parametrize("args", [INT4, INT4_AFFINE, FP8_CHANNEL, NVFP4], ids=["int4", "affine", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_search_loses_no_more_than_min_max_by_its_own_measure(name, args):
    weight = gaussian(8, 64)
    observer, plain = make(name, args), make("memoryless_minmax", args)
    searched = lost(weight, observer(weight).get_qparams(), args, observer.norm)
    unsearched = lost(weight, plain(weight).get_qparams(), args, observer.norm)
    assert searched <= unsearched * (1 + 1e-6)
    if args in (INT4, NVFP4):
        assert searched < unsearched * 0.97


@pytest.mark.parametrize("name", NAMES)
def test_the_range_is_the_one_that_the_search_finds_for_the_knobs(name):
    weight = gaussian(8, 64)
    knobs = {"maxshrink": 0.5, "grid": 40, "norm": 1.0, "expand": 1.25}
    observer = make(name, **knobs)(weight)
    flat = flatten_for_calibration(weight, "weight", INT4)
    found = search_range(
        flat,
        *min_max(flat),
        INT4,
        candidates_K2=shrink_candidates(maxshrink=0.5, grid=40, expand=1.25),
        norm=1.0,
    )
    torch.testing.assert_close(observer.min_vals, found.lo_Q, rtol=0, atol=0)
    torch.testing.assert_close(observer.max_vals, found.hi_Q, rtol=0, atol=0)
    assert observer.max_vals.dtype == torch.float32
    for knob, other in (("maxshrink", 0.1), ("grid", 7), ("norm", 3.0), ("expand", 1.0)):
        assert (make(name, **{**knobs, knob: other})(weight).max_vals != observer.max_vals).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_few_bits_is_searched_for_the_scale_that_its_dtype_stores(dtype):
    weight = (gaussian(40, 32) * 2.0**-16).to(dtype)
    knobs = {"grid": 400, "maxshrink": 0.2, "norm": 2.0}
    qparams = make("memoryless_mse", **knobs)(weight).get_qparams()
    assert qparams["scale"].dtype == dtype
    in_fp32 = make("memoryless_mse", **knobs)(weight.float()).get_qparams()
    in_fp32["scale"] = in_fp32["scale"].to(dtype).float()
    qparams["scale"] = qparams["scale"].float()
    searched = lost(weight.float(), qparams, INT4, 2.0)
    assert searched < lost(weight.float(), in_fp32, INT4, 2.0)


def test_a_weight_takes_the_place_of_the_weight_before():
    observer = make("memoryless_mse")
    observer(gaussian(4, 64) * 50)
    observer(gaussian(6, 64))
    alone = make("memoryless_mse")(gaussian(6, 64))
    torch.testing.assert_close(observer.get_qparams(), alone.get_qparams(), rtol=0, atol=0)


def test_memoryless_on_activations_holds_the_widest_range_of_all_batches():
    batches = [gaussian(4, 8, 32, seed=seed) * size for seed, size in enumerate((1.0, 3.0, 0.5))]
    observer = make("memoryless_mse", INT8_TENSOR, "input")
    singles = []
    for batch in batches:
        observer(batch)
        singles.append(make("memoryless_mse", INT8_TENSOR, "input")(batch))
    torch.testing.assert_close(observer.max_vals, torch.stack([each.max_vals for each in singles]).amax(dim=0))
    torch.testing.assert_close(observer.min_vals, torch.stack([each.min_vals for each in singles]).amin(dim=0))
    assert observer.true_absmax == max(batch.abs().max() for batch in batches)


def test_the_moving_average_is_of_the_ranges_that_each_batch_finds():
    batches = [gaussian(4, 8, 32, seed=seed) * (seed + 1) for seed in range(3)]
    observer = MovingAverageMSEObserver("input", INT8_TENSOR, averaging_constant=0.5)
    expected = None
    for batch in batches:
        observer(batch)
        found = make("memoryless_mse", INT8_TENSOR, "input")(batch).max_vals
        expected = found if expected is None else expected * 0.5 + found * 0.5
    torch.testing.assert_close(observer.max_vals, expected)


# ---- NVFP4 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_global_scale_comes_from_the_true_maximum_and_not_from_the_chosen_range(name):
    weight = gaussian(8, 64) / 4
    weight[0, :16] = 5.0
    weight[0, 0] = 5.4  # a scale that gives up on this one holds the other fifteen exactly
    observer = make(name, NVFP4)(weight)
    expected = torch.tensor([448 * 6 / 5.4])
    torch.testing.assert_close(observer.get_qparams()["global_scale"], expected, rtol=1e-6, atol=0)
    assert observer.max_vals.max() < 5.3


def test_the_expanded_search_reaches_beyond_the_largest_value_and_loses_less():
    weight = gaussian(16, 64)
    expanded, plain = make("nvfp4_expanded_mse", NVFP4)(weight), make("memoryless_mse", NVFP4)(weight)
    assert isinstance(expanded, NVFP4ExpandedMSEObserver) and isinstance(expanded, MemorylessMSEObserver)
    _, hi = min_max(flatten_for_calibration(weight, "weight", NVFP4))
    assert (expanded.max_vals > hi).any() and (expanded.max_vals < hi).any()
    assert not (plain.max_vals > hi).any()
    assert lost(weight, expanded.get_qparams(), NVFP4, 2.4) < lost(weight, plain.get_qparams(), NVFP4, 2.4)


def test_reading_twice_and_reading_beside_a_partner_changes_no_statistics():
    one, other = make("memoryless_mse", NVFP4), make("memoryless_mse", NVFP4)
    one(gaussian(4, 32))
    alone = one.get_qparams()
    statistics = one.min_vals.clone(), one.max_vals.clone(), one.true_absmax.clone()
    Observer.fuse([one, other])
    other(gaussian(4, 32) * 7)
    fused = one.get_qparams()
    assert (fused["global_scale"] != alone["global_scale"]).all()
    torch.testing.assert_close((one.min_vals, one.max_vals, one.true_absmax), statistics, rtol=0, atol=0)
    torch.testing.assert_close(one.get_qparams(), fused, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_ranges_set_by_hand_are_obeyed(name):
    weight = gaussian(4, 32)
    observer = make(name, NVFP4)(weight)
    lo, hi = min_max(flatten_for_calibration(weight, "weight", NVFP4))
    observer.min_vals, observer.max_vals = lo, hi
    partner = make(name, NVFP4)
    Observer.fuse([observer, partner])
    partner(weight * 7)
    plain, plain_partner = make("memoryless_minmax", NVFP4)(weight), make("memoryless_minmax", NVFP4)(weight * 7)
    Observer.fuse([plain, plain_partner])
    torch.testing.assert_close(observer.get_qparams(), plain.get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_wider_ranges_set_by_hand_are_not_cut_off_by_the_global_scale(name):
    weight = gaussian(4, 32)
    observer = make(name, NVFP4)(weight)
    lo, hi = min_max(flatten_for_calibration(weight, "weight", NVFP4))
    observer.min_vals, observer.max_vals = lo * 10, hi * 10
    qparams = observer.get_qparams()
    wanted = torch.maximum(-lo, hi) * 10 / 6
    torch.testing.assert_close(qparams["scale"] / qparams["global_scale"], wanted, rtol=2**-4, atol=0)


@pytest.mark.parametrize("ending", ["reset", "detach"])
def test_the_weight_is_kept_only_until_the_work_is_done(ending):
    observer, weight = make("memoryless_mse", NVFP4), gaussian(4, 32)
    observer(weight)
    assert observer._searched is not None
    observer.reset() if ending == "reset" else observer.detach(nn.Linear(32, 4))
    assert observer._searched is None
    assert observer.has_statistics == (ending == "detach")


@pytest.mark.parametrize(("args", "base_name"), [(INT4, "weight"), (NVFP4, "input")], ids=["int4", "activation"])
def test_nothing_is_kept_where_no_partner_can_change_the_answer(args, base_name):
    observer = make("memoryless_mse", args, base_name)
    observer(gaussian(4, 32))
    assert observer._searched is None


def test_merging_two_observers_takes_the_larger_maximum():
    one, other = make("memoryless_mse", NVFP4, "input"), make("memoryless_mse", NVFP4, "input")
    one(gaussian(4, 32))
    other(gaussian(4, 32) * 3)
    both = make("memoryless_mse", NVFP4, "input")
    both(gaussian(4, 32))
    both(gaussian(4, 32) * 3)
    torch.testing.assert_close(one.merge(other).get_qparams()["global_scale"], both.get_qparams()["global_scale"])
    assert one.true_absmax == gaussian(4, 32).abs().max() * 3
