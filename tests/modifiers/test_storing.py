"""A weight that is stored some rows at a time is the weight that is stored at once."""

import copy
from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor, nn

from scalewright.modifiers import storing
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.numerics import native

SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4", "W4AFP8"]


@pytest.mark.parametrize("rows", [128, 300, 264])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_in_pieces_are_stored_as_the_whole_is(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Linear(256, rows, bias=True)
    scheme = scheme_named(name)
    scheme.input_activations = None  # nothing is seen here
    layer = WatchedLayer("layer", module, scheme)
    state: dict[str, Tensor] = {}
    seen: list[slice] = []

    def at_once(
        given: dict[str, Tensor], _scheme: object, _format: object, take: Callable[..., None], **_: object
    ) -> dict[str, Tensor]:
        state.update({name: each.clone() for name, each in given.items()})
        take(slice(None), given["weight"].detach(), None)
        return given

    monkeypatch.setattr("scalewright.modifiers.layers.store", at_once)
    layer.start()
    layer.observe_weight()
    layer.finish()
    layer.stop()
    compressor = BaseCompressor.get_value_from_registry(layer.format.value)
    whole = compressor.compress(dict(state), layer.scheme)
    expected = compressor.decompress(dict(whole), layer.scheme)["weight"]
    restored = torch.empty_like(expected)

    lost: list[tuple[float, float]] = []

    def take(part: slice, values: Tensor, loss: tuple[float, float] | None) -> None:
        seen.append(part)
        restored[part] = values
        lost.extend([] if loss is None else [loss])

    monkeypatch.setattr(storing, "_ELEMENTS", 128 * 256)
    stored = storing.store(state, layer.scheme, layer.format, take)
    tensors = {key: each for key, each in whole.items() if isinstance(each, Tensor)}
    assert stored.keys() == tensors.keys()
    for key, each in tensors.items():
        assert stored[key].dtype == each.dtype
        assert torch.equal(stored[key].view(torch.uint8), each.contiguous().view(torch.uint8)), key
    assert torch.equal(restored, expected)
    assert len(seen) == (1 if name == "FP8_BLOCK" else rows // 128)
    if lost:  # found on the way
        before = state["weight"].double()
        exact = float(before.square().sum()), float((before - expected.double()).square().sum())
        assert [sum(each) for each in zip(*lost, strict=True)] == pytest.approx(exact, rel=1e-6)
        in_place = {**state, "weight": state["weight"].clone()}
        again = storing.store(in_place, layer.scheme, layer.format, lambda *_: None, into=in_place["weight"])
        assert torch.equal(in_place["weight"], expected)
        assert all(torch.equal(again[key].view(torch.uint8), stored[key].view(torch.uint8)) for key in stored)


@pytest.mark.parametrize("name", [*SCHEMES, "MXFP8A16"])
def test_a_layer_that_is_restored_is_the_layer_that_was_finished(name: str) -> None:
    """Its weight and all qparams, though some are stored as codes, or packed: zero points, and scales of MX formats."""
    torch.manual_seed(0)
    scheme = scheme_named(name)
    scheme.input_activations = None  # nothing is seen here
    module = nn.Linear(256, 128, bias=True)
    module.weight.data += 0.02  # so that zero points are not zero
    finished, restored = (WatchedLayer("layer", each, scheme) for each in (module, copy.deepcopy(module)))
    finished.start()
    finished.observe_weight()
    done = finished.finish()
    finished.stop()
    restored.restore(done.compressed, done.record())
    expected, found = (dict(each.module.named_parameters()) for each in (finished, restored))
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        torch.testing.assert_close(found[each].data, value.data, rtol=0, atol=0)


@pytest.mark.skipif(native.kernels() == "torch", reason="needs the compiled loops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["W4A16", "W8A16", "INT8", "FP8", "FP8_DYNAMIC"])
def test_what_is_done_in_one_pass_is_what_compressed_tensors_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = scheme_named(name)
    stored_as = WatchedLayer("layer", nn.Linear(256, 96), scheme).format
    num_scales = {"group": 256 // int(scheme.weights.group_size or 256), "channel": 1}.get(scheme.weights.strategy)
    scale = (0.1 * torch.randn((96, num_scales) if num_scales else (1,))).to(dtype)
    given = {"weight": torch.randn(96, 256).to(dtype), "weight_scale": scale, "bias": torch.zeros(96)}
    found = storing._in_one_pass(given, scheme, stored_as, None)
    assert found is not None
    stored, restored, _ = storing._by_the_book(given, scheme, stored_as)
    assert found[0].keys() == stored.keys()
    for key, each in stored.items():
        assert found[0][key].dtype == each.dtype
        assert torch.equal(found[0][key].view(torch.uint8), each.contiguous().view(torch.uint8)), key
    assert torch.equal(found[1].view(torch.uint8), restored.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "NVFP4", "MXFP4", "FP8_BLOCK"])
def test_what_cannot_be_done_in_one_pass_is_left_to_compressed_tensors(name: str) -> None:
    scheme = scheme_named(name)
    stored_as = WatchedLayer("layer", nn.Linear(256, 128), scheme).format
    given = {"weight": torch.randn(128, 256), "weight_scale": torch.ones(128, 2)}
    if not scheme.weights.symmetric:
        given["weight_zero_point"] = torch.zeros(128, 2, dtype=torch.int8)
    assert storing._in_one_pass(given, scheme, stored_as, None) is None


@pytest.mark.parametrize("size", [0.0, 1e-6])
@pytest.mark.parametrize("name", ["MXFP8A16", "MXFP6A16", "MXFP4A16"])
def test_powers_of_two_that_fp16_does_not_have_are_no_zeros(name: str, size: float) -> None:
    """E8m0 has 2^-127; fp16, in which the scales of a model in fp16 wait to be stored, ends at 2^-24."""
    torch.manual_seed(0)
    module = nn.Linear(64, 4, bias=False, dtype=torch.float16)
    module.weight.data[0] = size
    layer = WatchedLayer("layer", module, scheme_named(name))
    layer.start()
    layer.observe_weight()
    layer.finish()
    layer.stop()
    torch.testing.assert_close(module.weight[0].float(), torch.full((64,), size), rtol=0.1, atol=0)
