"""The observer `optimal`: what its knobs do, where importance comes from, fused partners, and scales with a sign."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from safetensors.torch import load_file
from torch import Tensor, nn

from scalewright.observers import Observer, OptimalObserver, sync_statistics

INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
INT3 = QuantizationArgs(num_bits=3, strategy="group", group_size=32)
INT2 = QuantizationArgs(num_bits=2, strategy="group", group_size=32)
INT8 = QuantizationArgs(num_bits=8, strategy="channel")
AFFINE = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
MXFP4 = preset_name_to_scheme("MXFP4", ["Linear"]).weights
FORMATS = {"int4": INT4, "int2": INT2, "int8": INT8, "affine": AFFINE, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
SYMMETRIC_INTEGERS = {"int2": INT2, "int3": INT3, "int4": INT4, "int8": INT8}

MODEL = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories15M" / "model.safetensors"


def make(args: QuantizationArgs = INT4, base_name: str = "weight", **knobs: Any) -> OptimalObserver:
    return OptimalObserver(base_name, args, **knobs)


def another(name: str, args: QuantizationArgs = INT4, **knobs: Any) -> Observer:
    return Observer.load_from_registry(name, base_name="weight", args=args, **knobs)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uneven_input(columns: int = 128, seed: int = 5) -> Tensor:
    """Inputs of which a few channels are far stronger than the others."""
    order = gaussian(columns, seed=seed + 1).argsort()
    return gaussian(40, columns, seed=seed) * torch.logspace(-1, 1, columns)[order]


def losses(weight: Tensor, qparams: Any, args: QuantizationArgs, *, norm: float = 2.0, importance: Any = 1.0) -> Tensor:
    """What each element loses when compressed-tensors reads it back, float64."""
    scale = qparams["scale"].float()
    back = fake_quantize(weight.float(), scale, qparams["zero_point"], args, global_scale=qparams["global_scale"])
    return (back - weight.float()).double().abs().pow(norm) * importance


def lost(weight: Tensor, observer: Observer, **measure: Any) -> float:
    return float(losses(weight, observer(weight).get_qparams(), observer.args, **measure).sum())


def lost_by_group(weight: Tensor, qparams: Any, args: QuantizationArgs) -> Tensor:
    return losses(weight, qparams, args).unflatten(-1, (-1, args.group_size or weight.shape[-1])).sum(dim=-1)


def differ(one: Observer, other: Observer) -> bool:
    return not torch.equal(one.get_qparams()["scale"], other.get_qparams()["scale"])


def assert_same_qparams(one: Observer, other: Observer) -> None:
    torch.testing.assert_close(one.get_qparams(), other.get_qparams(), rtol=0, atol=0)


# ---- knobs -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones():
    observer = make()
    defaults = {"candidates": 32, "refits": 1, "norm": 2.4, "importance": "auto", "signed": False}
    assert {knob: getattr(observer, knob) for knob in defaults} == defaults
    assert [knob.name for knob in OptimalObserver.knobs] == list(defaults)


@pytest.mark.parametrize("fmt", ["int4", "int2", "affine", "fp8"])
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_more_candidates_lose_less(fmt, norm):
    weight, args = gaussian(64, 128), FORMATS[fmt]
    few, usual, many = (lost(weight, make(args, candidates=n, norm=norm), norm=norm) for n in (3, 10, 60))
    assert usual < few
    assert many < usual * 1.002  # the search ends near the best, not always on it


@pytest.mark.parametrize("fmt", ["int4", "affine", "fp8"])
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_refining_the_best_scale_loses_less(fmt, norm):
    weight, args = gaussian(64, 128), FORMATS[fmt]
    none, thrice = (lost(weight, make(args, refits=n, norm=norm), norm=norm) for n in (0, 3))
    assert thrice < none


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_scales_of_a_short_format_need_neither_candidates_nor_refits(fmt):
    weight, args = gaussian(16, 128), FORMATS[fmt]
    assert_same_qparams(make(args, candidates=2, refits=0)(weight), make(args, candidates=50, refits=9)(weight))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_norm_is_what_the_search_makes_small(fmt):
    weight, args = gaussian(64, 128), FORMATS[fmt]
    weight[:, ::17] *= 3
    square, high = make(args, norm=2.0, candidates=40), make(args, norm=6.0, candidates=40)
    for norm, best, other in ((2.0, square, high), (6.0, high, square)):
        assert lost(weight, best, norm=norm) < lost(weight, other, norm=norm)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_group_loses_more_than_with_min_max(fmt):
    weight, args = gaussian(32, 128), FORMATS[fmt]
    found = lost_by_group(weight, make(args, norm=2.0)(weight).get_qparams(), args)
    plain = lost_by_group(weight, another("memoryless_minmax", args)(weight).get_qparams(), args)
    assert bool((found <= plain * (1 + 1e-5)).all())
    assert float(found.sum()) < 0.999 * float(plain.sum())


# ---- importance --------------------------------------------------------------------------------------------------


def test_importance_is_collected_from_the_modules_inputs():
    layer, observer = nn.Linear(128, 8), make()
    observer.attach(layer)
    first, second = gaussian(2, 5, 128), gaussian(3, 128, seed=1)
    layer(first)
    layer(second)
    expected = (first.square().sum(dim=(0, 1)) + second.square().sum(dim=0)) / 13
    torch.testing.assert_close(observer.channel_importance, expected)
    assert observer._imatrix_count == 13


@pytest.mark.parametrize("name", ["optimal", "imatrix_mse"])
def test_what_was_collected_waits_on_the_module_for_the_next_observer(name):
    layer, first, second = nn.Linear(128, 8), another(name), make()
    first.attach(layer)
    layer(uneven_input())
    first.detach(layer)
    assert not layer._forward_pre_hooks
    second.attach(layer)
    assert not layer._forward_pre_hooks and not hasattr(layer, "_imatrix_sum")
    torch.testing.assert_close(second.channel_importance, first.channel_importance, rtol=0, atol=0)


def test_importance_of_two_halves_adds_up():
    weight, x = gaussian(16, 128), uneven_input()
    one, other, both = make(), make(), make()
    one.observe_input(x[:10])
    other.observe_input(x[10:])
    both.observe_input(x)
    one.merge(other)
    torch.testing.assert_close(one.channel_importance, both.channel_importance)
    torch.testing.assert_close(one(weight).get_qparams(), both(weight).get_qparams(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_importance_makes_the_error_of_the_output_small(fmt):
    weight, args, x = gaussian(32, 128), FORMATS[fmt], uneven_input()
    weighed, blind = make(args), make(args, importance="off")
    for observer in (weighed, blind):
        observer.observe_input(x)
    importance = weighed.channel_importance
    norm = 2.4 if args.num_bits == 2 else 2.0
    measure = {"norm": norm, "importance": importance}
    assert lost(weight, weighed, **measure) < 0.99 * lost(weight, blind, **measure)
    assert weighed.notes() == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_importance_that_is_off_is_not_used(fmt):
    weight, args = gaussian(16, 128), FORMATS[fmt]
    observer = make(args, importance="off")
    observer.observe_input(uneven_input())
    assert_same_qparams(observer(weight), make(args)(weight))


def test_importance_that_is_off_is_not_collected():
    layer, observer = nn.Linear(128, 8), make(importance="off")
    observer.attach(layer)
    assert not layer._forward_pre_hooks and not hasattr(layer, "_imatrix_sum")
    layer(uneven_input())
    assert observer.channel_importance is None
    observer(layer.weight)
    observer.detach(layer)
    assert not hasattr(layer, "_imatrix_sum")


def test_importance_that_is_off_leaves_what_stands_on_the_module_to_the_next_observer():
    layer, first, between, last = nn.Linear(128, 8), make(), make(importance="off"), make()
    first.attach(layer)
    layer(uneven_input())
    first.detach(layer)
    between.attach(layer)
    between.detach(layer)
    last.attach(layer)
    torch.testing.assert_close(last.channel_importance, first.channel_importance, rtol=0, atol=0)


def test_a_note_says_when_there_was_no_importance_unless_none_was_wanted():
    weight, observer = gaussian(16, 128), make()
    observer.label = "model.layers.0.mlp.up_proj.weight"
    observer(weight)
    note = "model.layers.0.mlp.up_proj.weight: no importance was collected, so all errors weigh the same."
    assert observer.notes() == [note]
    observer.observe_input(uneven_input())
    assert observer(weight).notes() == []
    assert make(importance="off")(weight).notes() == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_with_importance_errors_are_squared_except_at_two_bits(fmt):
    weight, args = gaussian(32, 128), FORMATS[fmt]

    def weighed(norm: float) -> OptimalObserver:
        observer = make(args, norm=norm)
        observer.observe_input(uneven_input())
        return observer(weight)

    assert differ(weighed(2.0), weighed(6.0)) == (args.num_bits == 2)


@pytest.mark.parametrize("fmt", ["int4", "int2", "affine", "fp8", "nvfp4", "mxfp4"])
def test_large_weights_of_silent_channels_do_not_widen_the_range(fmt):
    weight, x, args = gaussian(16, 128).clamp(-2, 2), torch.ones(4, 128), FORMATS[fmt]
    weight[:, ::32], x[:, ::32] = 20.0, 0.0
    norm = 2.4 if args.num_bits == 2 else 2.0
    observers = [make(args), another("imatrix_mse", args, norm=norm, grid=40)]
    for observer in observers:
        observer.observe_input(x)
    found, shrunk = (lost(weight, each, norm=norm, importance=x.square().mean(dim=0)) for each in observers)
    assert found <= 1.05 * shrunk
    assert lost(weight, make(args, importance="off"), norm=norm, importance=x.square().mean(dim=0)) >= found


# ---- fused partners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_weighed", [False, True])
def test_fused_partners_share_a_global_scale_and_are_searched_under_it(is_weighed):
    weights = [gaussian(8, 64), gaussian(8, 64, seed=1) * 2.7]
    pair = [make(NVFP4, norm=2.0) for _ in weights]
    Observer.fuse(pair)
    importance: Any = 1.0
    for observer, weight in zip(pair, weights, strict=True):
        if is_weighed:
            observer.observe_input(uneven_input(64))
            importance = observer.channel_importance
        observer(weight)
    global_scale = torch.tensor([448 * 6 / float(torch.stack(weights).abs().max())])
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for observer, weight in zip(pair, weights, strict=True):
        found = observer.get_qparams()
        torch.testing.assert_close(found["global_scale"], global_scale, rtol=1e-6, atol=0)
        errors = []
        for scale in every:
            tried = {**found, "scale": torch.full_like(found["scale"], float(scale))}
            loss = losses(weight, tried, NVFP4, importance=importance)
            errors.append(loss.unflatten(-1, (-1, 16)).sum(dim=-1))
        mine = losses(weight, found, NVFP4, importance=importance).unflatten(-1, (-1, 16)).sum(dim=-1)
        torch.testing.assert_close(mine, torch.stack(errors).amin(dim=0), rtol=1e-5, atol=0)


def test_the_search_under_a_partners_global_scale_is_another_one():
    weight, partner = gaussian(16, 64), gaussian(16, 64, seed=1) * 2.7
    alone, fused, large = make(NVFP4)(weight), make(NVFP4)(weight), make(NVFP4)(partner)
    Observer.fuse([fused, large])
    shared = fused.get_qparams()
    rescaled = alone.get_qparams()["scale"] / alone.get_global_scale() * shared["global_scale"]
    stored = rescaled.to(torch.float8_e4m3fn).float()
    assert not torch.equal(stored, shared["scale"])
    lossy = {**shared, "scale": stored}
    assert losses(weight, shared, NVFP4, norm=2.4).sum() < losses(weight, lossy, NVFP4, norm=2.4).sum()


# ---- a scale with a sign -----------------------------------------------------------------------------------------


def is_negative(observer: Observer) -> Tensor:
    return observer.get_qparams()["scale"] < 0


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("fmt", SYMMETRIC_INTEGERS)
def test_negative_scales_stand_where_they_lose_less(fmt, norm):
    weight, args = gaussian(64, 128), SYMMETRIC_INTEGERS[fmt]
    signed, plain = (make(args, norm=norm, signed=signed)(weight) for signed in (True, False))
    assert 0.1 < float(is_negative(signed).float().mean()) < 0.9
    assert not is_negative(plain).any()
    found, before = (
        losses(weight, each.get_qparams(), args, norm=norm).unflatten(-1, (-1, args.group_size or 128)).sum(dim=-1)
        for each in (signed, plain)
    )
    assert bool((found <= before * (1 + 1e-5)).all())
    assert bool((found < before * (1 - 1e-3))[is_negative(signed)].any())
    assert bool((found[~is_negative(signed)] == before[~is_negative(signed)]).all())


def test_signed_scales_at_four_bits_lose_several_percent_less():
    weight = gaussian(128, 128)
    assert lost(weight, make(norm=2.0, signed=True)) < 0.96 * lost(weight, make(norm=2.0))


def test_importance_weighs_on_the_sign_too():
    weight, x = gaussian(64, 128), uneven_input()
    observers = [make(signed=True), make()]
    for observer in observers:
        observer.observe_input(x)
    signed, plain = (lost(weight, each, importance=observers[0].channel_importance) for each in observers)
    assert signed < 0.97 * plain
    blind = make(signed=True, norm=2.0)(weight)
    assert not torch.equal(is_negative(observers[0]), is_negative(blind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sign_changes_neither_dtype_nor_shape(dtype):
    weight = gaussian(16, 128).to(dtype)
    signed, plain = make(signed=True)(weight).get_qparams(), make()(weight).get_qparams()
    assert (signed["scale"] < 0).any()
    for name in ("scale", "zero_point"):
        assert signed[name].dtype == plain[name].dtype and signed[name].shape == plain[name].shape
    assert signed["scale"].dtype == dtype
    assert not signed["zero_point"].any()


def test_a_negative_scale_gives_the_lowest_code_to_the_positive_side():
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.arange(1.0, 9.0)  # 8 is one more than the highest code
    observer = make(norm=2.0, signed=True)(weight)
    torch.testing.assert_close(observer.get_qparams()["scale"], torch.tensor([[-1.0]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(fake_quantize(weight, args=INT4, **observer.get_qparams()), weight, rtol=1e-5, atol=0)
    assert make(norm=2.0, signed=True)(-weight).get_qparams()["scale"] > 0


def test_rows_of_zeros_have_a_sound_scale():
    weight = gaussian(16, 128)
    weight[3] = 0
    observer = make(signed=True)(weight)
    qparams = observer.get_qparams()
    assert is_negative(observer).any()
    assert torch.isfinite(qparams["scale"]).all() and (qparams["scale"][3] > 0).all()
    assert not fake_quantize(weight, args=INT4, **qparams)[3].any()
    assert any("4 of 64 qparam positions saw nothing but zeros" in note for note in observer.notes())
    assert (make(signed=True)(torch.zeros(4, 128)).get_qparams()["scale"] > 0).all()


def test_reset_forgets_the_sign():
    observer = make(signed=True)(gaussian(16, 128))
    assert observer.scale_sign is not None
    observer.reset()
    assert observer.scale_sign is None
    observer.min_vals, observer.max_vals = torch.full((2, 4), -1.0), torch.full((2, 4), 1.0)
    assert (observer.get_qparams()["scale"] > 0).all()


def test_another_weight_brings_another_sign():
    observer = make(signed=True)
    for weight in (gaussian(16, 128), gaussian(8, 128, seed=1), torch.full((8, 128), -8.0)):
        assert_same_qparams(observer(weight), make(signed=True)(weight))


def test_a_range_set_by_hand_is_obeyed_with_a_positive_scale():
    observer = make(signed=True)(gaussian(16, 128))
    assert is_negative(observer).any()
    observer.min_vals, observer.max_vals = torch.full((16, 4), -3.0), torch.full((16, 4), 2.0)
    torch.testing.assert_close(observer.get_qparams()["scale"], torch.full((16, 4), 3 / 7.5))


@pytest.mark.parametrize("fmt", ["affine", "fp8", "nvfp4", "mxfp4"])
def test_formats_that_gain_nothing_by_a_sign_have_none(fmt):
    weight, args = gaussian(16, 128), FORMATS[fmt]
    assert_same_qparams(make(args, signed=True)(weight), make(args)(weight))


def test_activations_have_no_sign():
    args = QuantizationArgs(num_bits=4, strategy="tensor")
    batches = [-gaussian(2, 8, 32).abs(), gaussian(2, 8, 32, seed=1).abs() * 3]
    signed, plain = make(args, "input", signed=True), make(args, "input")
    for batch in batches:
        assert_same_qparams(signed(batch), plain(batch))


def test_codes_and_scale_read_back_alike_in_fake_quantise_and_by_hand():
    weight = gaussian(16, 128)
    qparams = make(signed=True)(weight).get_qparams()
    scale = qparams["scale"].repeat_interleave(32, dim=1)
    codes = (weight / scale).round().clamp(-8, 7)
    assert codes[scale < 0].min() == -8 and codes.max() == 7
    torch.testing.assert_close(fake_quantize(weight, args=INT4, **qparams), codes * scale, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_under_a_partners_global_scale_leaves_the_sign_as_it_was(dtype):
    # Scales of whole-number formats under a global scale are rounded anew for each one, and a few change their sign.
    args = QuantizationArgs(num_bits=3, strategy="tensor_group", group_size=16)
    weight, partner = gaussian(64, 256).to(dtype), (gaussian(64, 256, seed=1) * 2.7).to(dtype)
    observer, plain = make(args, norm=2.0, signed=True)(weight), make(args, norm=2.0)(weight)
    alone, sign = observer.get_qparams(), copy.deepcopy(observer.scale_sign)
    for each in (observer, plain):
        Observer.fuse([each, make(args)(partner)])
    fused = observer.get_qparams()
    assert not torch.equal(fused["global_scale"], alone["global_scale"])
    torch.testing.assert_close(observer.scale_sign, sign, rtol=0, atol=0)
    found, before = (lost_by_group(weight, each, args) for each in (fused, plain.get_qparams()))
    assert bool((found <= before * (1 + 1e-5)).all())
    observer._fused_observers = set()
    torch.testing.assert_close(observer.get_qparams(), alone, rtol=0, atol=0)


# ---- merging, syncing, copying -----------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("fmt", ["int4", "nvfp4"])
def test_merging_sides_that_saw_the_same_weight_changes_no_qparam(fmt, signed):
    weight, args = gaussian(16, 128), FORMATS[fmt]
    one, other, alone = (make(args, signed=signed)(weight) for _ in range(3))
    assert_same_qparams(one.merge(other), alone)
    assert_same_qparams(make(args, signed=signed).merge(other), alone)
    assert_same_qparams(other.merge(make(args, signed=signed)), alone)


def test_merged_importance_counts_for_the_weight_that_is_seen_next():
    weight, x = gaussian(16, 128), uneven_input()
    one, other, both = make(signed=True), make(signed=True), make(signed=True)
    one.observe_input(x[:20])
    other.observe_input(x[20:])
    both.observe_input(x)
    merged = one.merge(other)(weight)
    torch.testing.assert_close(merged.get_qparams(), both(weight).get_qparams(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("signed", [False, True])
def test_syncing_without_ranks_changes_nothing(signed):
    observer = make(signed=signed)(gaussian(16, 128))
    before = observer.get_qparams()
    assert observer.sync_activation_stats() == []
    sync_statistics([observer, make(signed=signed)])
    torch.testing.assert_close(observer.get_qparams(), before, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", ["int4", "nvfp4"])
def test_a_deep_copy_has_the_same_qparams_and_a_life_of_its_own(fmt):
    weight, args = gaussian(16, 128), FORMATS[fmt]
    observer = make(args, signed=True)
    observer.observe_input(uneven_input())
    observer(weight)
    before, twin = observer.get_qparams(), copy.deepcopy(observer)
    assert_same_qparams(twin, observer)
    twin(weight * 3)
    twin.observe_input(uneven_input())
    torch.testing.assert_close(observer.get_qparams(), before, rtol=0, atol=0)
    assert observer._imatrix_count == 40


# ---- real weights ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_weights() -> dict[str, Tensor]:
    """Some Linear weights of a trained model, one of each kind from its first and its last layer."""
    tensors = load_file(MODEL)
    return {
        name: value.float() for name, value in tensors.items() if "proj" in name and ("s.0." in name or "s.5." in name)
    }


@pytest.mark.real_model
@pytest.mark.skipif(not MODEL.is_file(), reason="the trained model stories15M does not lie beside the project")
@pytest.mark.parametrize(("args", "of_minmax"), [(INT4, 0.93), (INT3, 0.87), (NVFP4, 0.85)], ids=["W4", "W3", "NVFP4"])
def test_it_loses_less_than_min_max_and_the_grid_search_on_real_weights(real_weights, args, of_minmax):
    assert len(real_weights) == 14
    for layer, weight in real_weights.items():
        found = lost(weight, make(args, norm=2.0))
        searched = lost(weight, another("memoryless_mse", args, norm=2.0))
        plain = lost(weight, another("memoryless_minmax", args))
        assert found < searched < plain, layer
        assert found < of_minmax * plain, layer


@pytest.mark.real_model
@pytest.mark.skipif(not MODEL.is_file(), reason="the trained model stories15M does not lie beside the project")
@pytest.mark.parametrize("args", [INT4, INT3, NVFP4], ids=["W4", "W3", "NVFP4"])
def test_with_importance_it_loses_less_than_imatrix_mse_on_real_weights(real_weights, args):
    for layer, weight in real_weights.items():
        x = uneven_input(weight.shape[1])
        found, other = make(args), another("imatrix_mse", args)
        for observer in (found, other):
            observer.observe_input(x)
        importance = found.channel_importance
        assert lost(weight, found, importance=importance) < 0.97 * lost(weight, other, importance=importance), layer
