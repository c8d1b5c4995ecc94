"""What the outputs of layers are added to: found in a block, kept for each pass, and made up for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from zoo import HIDDEN, Animal, zoo

from scalewright.calibration.pipelines import Calibration
from scalewright.calibration.steps import Unit, steps_from_words, steps_in_words, steps_of
from scalewright.calibration.streams import Streams
from scalewright.modifiers.gptq import Rounding
from scalewright.modifiers.gptq_layer import GPTQLayer, Hessian
from scalewright.modifiers.schemes import scheme_named
from scalewright.modifiers.shown import Shown
from scalewright.numerics.gptq import corrected


def w4() -> QuantizationScheme:
    scheme = scheme_named("W4A16")
    assert scheme.weights is not None
    scheme.weights.observer, scheme.weights.group_size = "memoryless_minmax", 16
    return scheme


MAKING_UP = Rounding(correction=1.0)


def layers_of(model: nn.Module, kind: type[GPTQLayer] = GPTQLayer, rounding: Rounding = MAKING_UP) -> list[GPTQLayer]:
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [kind(name, module, w4(), rounding) for name, module in linears]


# ---- which tensor it is ----------------------------------------------------------------------------------------------


def found_in(animal: Animal) -> dict[str, str | None]:
    """The stream of each layer of the last block after a run."""
    layers = layers_of(animal.model)
    Calibration(animal.model, list(layers), animal.batches, animal.blocks).run("sequential")
    block = animal.blocks[-1]
    return {
        layer.name.removeprefix(f"{block}."): layer.stream and layer.stream.removeprefix(block).lstrip(".")
        for layer in layers
        if layer.name.startswith(f"{block}.") and layer.stream is not None
    }


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_and_mlp_are_added_to_the_stream(name: str) -> None:
    expected = {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"}
    assert found_in(zoo(name)) == expected


def test_outputs_that_are_changed_before_they_are_added_have_no_stream() -> None:
    assert found_in(zoo("gemma3")) == {}  # a norm stands behind each


class Block(nn.Module):
    """A layer with something before it, and a sum behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.other, self.layer = nn.LayerNorm(HIDDEN), nn.Identity(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        stream = x * 2
        if self.kind == "nobody is given it":
            return stream + self.layer(self.norm(x))
        if self.kind == "changed in between":
            value = self.layer(self.norm(stream))
            return stream.mul_(0.5) + value
        if self.kind == "given later":
            value = self.layer(self.norm(x))
            return self.other(stream) + value
        if self.kind == "scaled":
            return torch.add(stream, self.layer(self.norm(stream)), alpha=0.5)
        if self.kind == "of another shape":
            return self.layer(self.norm(stream)) + self.other(stream[:, :1])
        value = self.layer(self.norm(stream))
        return value + stream if self.kind == "from the left" else stream.add_(value)


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("from the left", "norm"),
        ("in place", "norm"),
        ("nobody is given it", None),
        ("changed in between", None),
        ("given later", None),
        ("scaled", None),
        ("of another shape", None),
    ],
)
def test_a_stream_is_what_a_module_before_the_layer_was_given(kind: str, stream: str | None) -> None:
    model = nn.ModuleDict({"block": Block(kind)})
    model["block"].first = nn.Linear(HIDDEN, HIDDEN)  # a second step
    block, value = model["block"], torch.randn(1, 4, HIDDEN)
    forward = block.forward
    block.forward = lambda x: forward(block.first(x))
    layers = [GPTQLayer(f"block.{name}", block.get_submodule(name), w4(), MAKING_UP) for name in ("first", "layer")]
    unit = Unit("block", block, list(layers))
    with torch.no_grad():
        steps = steps_of(model, unit, lambda: block(value))
    assert len(steps) == 2 and layers[0].stream is None
    assert layers[1].stream == (stream and f"block.{stream}")
    words = steps_in_words(unit, steps)
    told = [GPTQLayer(each.name, each.module, w4(), MAKING_UP) for each in layers]
    steps_from_words(model, Unit("block", block, list(told)), words)
    assert [each.stream for each in told] == [each.stream for each in layers]
    assert not block.norm._forward_pre_hooks and not block.layer._forward_hooks and not block._forward_pre_hooks


# ---- what is kept of it ----------------------------------------------------------------------------------------------


class Noted(GPTQLayer):
    """Notes what its output will be added to."""

    def start(self) -> None:
        super().start()
        self.beside: dict[str, list[Tensor]] = {"is": [], "should": []}

    def _add(self, shown: Shown) -> None:
        if shown.beside is not None:
            self.beside["is"].append(shown.beside.clone())
        super()._add(shown)

    def _keep_unquantised(self, shown: Shown) -> None:
        if shown.beside is not None:
            self.beside["should"].append(shown.beside.clone())
        super()._keep_unquantised(shown)

    def finish(self) -> Any:
        self.kept, self.had_beside = self.beside, self.inputs is not None and self.inputs.beside_CR is not None
        return super().finish()


def test_layers_are_shown_what_flows_past_them_in_both_models() -> None:
    animal = zoo("llama")
    original = copy.deepcopy(animal.model)
    layers = layers_of(animal.model, Noted)
    Calibration(animal.model, list(layers), animal.batches, animal.blocks).run("sequential")
    expected: dict[str, dict[str, list[Tensor]]] = {}
    for key, model in (("should", original), ("is", animal.model)):
        for block in animal.blocks:
            for name, norm in (("self_attn.o_proj", "input_layernorm"), ("mlp.down_proj", "post_attention_layernorm")):
                kept = expected.setdefault(f"{block}.{name}", {}).setdefault(key, [])
                model.get_submodule(f"{block}.{norm}").register_forward_pre_hook(
                    lambda _, args, kept=kept: kept.append(args[0].clone())
                )
        with torch.no_grad():
            for batch in animal.batches:
                model(**batch)
    found = {layer.name: layer.kept for layer in layers if layer.had_beside}
    assert found.keys() == expected.keys()
    for name, by_key in expected.items():
        for key, tensors in by_key.items():
            assert len(tensors) == len(animal.batches) == len(found[name][key])
            for one, other in zip(found[name][key], tensors, strict=True):
                assert torch.equal(one, other), (name, key)
    last = expected[f"{animal.blocks[-1]}.mlp.down_proj"]
    assert not torch.equal(last["is"][0], last["should"][0])


def test_nothing_is_kept_for_who_does_not_ask() -> None:
    animal = zoo("llama")
    layers = layers_of(animal.model, Noted, Rounding())
    Calibration(animal.model, list(layers), animal.batches, animal.blocks).run("sequential")
    assert not any(layer.had_beside or layer.kept["is"] for layer in layers)


def test_a_layer_whose_inputs_are_quantised_leaves_the_stream_alone() -> None:
    """Static scales cut off loud tokens, and making up for these would spoil all others."""
    for name, is_wanted in (("W4A16", True), ("W8A8", False), ("NVFP4", False)):
        layer = GPTQLayer("layer", nn.Linear(HIDDEN, HIDDEN), scheme_named(name), MAKING_UP)
        assert layer.wants_unquantised and layer.wants_stream == is_wanted
    layer.stream = "somewhere"
    value = tensors(40)[0]
    layer.start()
    for _, see in layer.sees_unquantised():
        see(Shown(value, beside=value))
    next(see for _, see in layer._sees_for_weights())(Shown(value, beside=value))
    assert layer.inputs is not None and layer.inputs.beside_CR is None and layer.inputs.cross_CC is not None


def test_a_stream_is_kept_until_all_have_seen_it() -> None:
    model = nn.ModuleDict({"norm": nn.Identity(), "one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    layers = [GPTQLayer(name, model[name], w4(), MAKING_UP) for name in ("one", "two")]
    for layer in layers:
        layer.stream = "norm"
    streams = Streams(model)
    with streams.running():
        streams.watch(layers)
        for number in range(2):
            streams.enter(number)
            model["norm"](torch.full((1, 4), float(number)))
        assert [float(streams.of(layers[0], number)[0, 0]) for number in range(2)] == [0, 1]
        streams.forget(layers[:1])
        assert streams.of(layers[1], 1) is not None
        streams.forget(layers)
        assert streams.of(layers[1], 1) is None and not model["norm"]._forward_pre_hooks
        streams.watch(layers)
    assert not model["norm"]._forward_pre_hooks


# ---- what is made up for ---------------------------------------------------------------------------------------------


def seen(pairs: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]], mask: Tensor | None = None) -> GPTQLayer:
    """A layer that was shown pairs of inputs, each with what its output is added to."""
    torch.manual_seed(1)
    layer = GPTQLayer("layer", nn.Linear(HIDDEN, HIDDEN, bias=False), w4(), MAKING_UP)
    layer.stream = "somewhere"
    layer.start()
    ((_, see_unquantised),) = layer.sees_unquantised()
    see = next(see for _, see in layer._sees_for_weights())
    for should, should_beside, value, beside in pairs:
        see_unquantised(Shown(should, mask, beside=should_beside))
        see(Shown(value, mask, beside=beside))
    return layer


def tensors(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, HIDDEN, generator=generator) for _ in range(4)]


def test_the_target_makes_up_for_the_stream_too() -> None:
    should, should_beside, value, beside = tensors(2, 40)
    mask = torch.ones(2, 40)
    mask[0, :7] = 0
    layer = seen([(should, should_beside, value, beside)], mask)
    x, x_q, r, r_q = (each[mask.bool()] for each in (should, value, should_beside, beside))
    hessian = layer.inputs
    assert hessian is not None and hessian.cross_CC is not None
    weight_CR = layer.weight.detach().T.contiguous()
    factor = hessian.factor(layer.rounding)
    expected = corrected(weight_CR, x_q.T @ (x - x_q), factor, share=1.0, beside_CR=x_q.T @ (r - r_q)).T
    torch.testing.assert_close(layer.target, expected, rtol=1e-3, atol=1e-4)
    without = corrected(weight_CR, hessian.cross_CC, factor, share=1.0).T
    assert float((layer.target - without).abs().max()) > 0.01


def test_a_stream_that_is_not_known_of_all_passes_is_not_made_up_for() -> None:
    should, should_beside, value, beside = tensors(40)
    whole = (should, should_beside, value, beside)
    assert seen([whole, whole]).inputs.beside_CR is not None
    for lacking in (
        (should, None, value, beside),
        (should, should_beside, value, None),
        (should, should_beside[:3], value, beside),
        (should, should_beside[:, :5], value, beside[:, :5]),
    ):
        for order in ([whole, lacking], [lacking, whole]):
            layer = seen(order)
            assert layer.inputs.beside_CR is None and layer.inputs.cross_CC is not None
            assert torch.isfinite(layer.target).all()


def test_layers_with_a_stream_have_a_hessian_of_their_own() -> None:
    value = tensors(40)[0]
    one, other = (GPTQLayer(name, nn.Linear(HIDDEN, HIDDEN), w4(), MAKING_UP) for name in ("one", "other"))
    one.stream = "somewhere"
    shown = Shown(value, beside=value)
    for layer in (one, other):
        layer.start()
        for _, see in layer.sees_unquantised():
            see(shown)
        next(see for _, see in layer._sees_for_weights())(shown)
    assert one.inputs is not other.inputs
    assert one.inputs.beside_CR is not None and other.inputs.beside_CR is None


def test_what_ranks_have_of_a_stream_adds_up_where_all_have_it() -> None:
    should, should_beside, value, beside = tensors(40)
    hessian = seen([(should, should_beside, value, beside)]).inputs
    told = hessian.told()
    strips = sum(each.numel() for each in hessian.strips(7))
    merged = Hessian.merged(hessian, [told, told], torch.device("cpu"))
    assert merged.beside_CR is not None and merged.beside_CR.shape == (HIDDEN, HIDDEN)
    another = Hessian.merged(None, [told, told], torch.device("cpu"))
    assert another.beside_CR is not None and another.beside_CR.shape == (HIDDEN, HIDDEN)
    lost = Hessian.merged(hessian, [told, [*told[:4], 0, told[5]]], torch.device("cpu"))
    assert lost.beside_CR is None and lost.cross_CC is not None
    assert sum(each.numel() for each in lost.strips(7)) == strips - HIDDEN * HIDDEN
