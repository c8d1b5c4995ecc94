"""Experts that were taken apart: the same numbers under the names of checkpoints, and who is shown which tokens."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from zoo import HIDDEN, SMALL, Animal, assert_same, zoo

from scalewright.calibration.experts import Expert, UnfusedExperts, showing_all_tokens, unfuse_experts

MOE = ["mixtral", "qwen3_moe"]
HOMES = {"llama4": "feed_forward"}  # of experts, where that is not mlp


def logits(animal: Animal) -> list[Tensor]:
    with torch.no_grad():
        return [animal.model(**batch).logits for batch in animal.batches]


@pytest.mark.parametrize("name", [*MOE, "llama4"])
def test_the_output_is_that_of_the_fused_experts(name: str) -> None:
    animal = zoo(name)
    expected = logits(animal)
    replaced, notes = unfuse_experts(animal.model)
    assert sorted(replaced) == [f"model.layers.{i}.{HOMES.get(name, 'mlp')}.experts" for i in range(2)] and not notes
    for output, fused in zip(logits(animal), expected, strict=True):
        torch.testing.assert_close(output, fused, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MOE)
def test_the_matrices_are_those_of_the_fused_weights_and_lie_where_they_lay(name: str) -> None:
    animal = zoo(name)
    fused = animal.model.get_submodule("model.layers.1.mlp.experts")
    unfuse_experts(animal.model)
    names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for i, expert in enumerate(animal.model.get_submodule("model.layers.1.mlp.experts")):
        gate, up, down = (expert.get_submodule(each).weight for each in names)
        assert torch.equal(torch.cat([gate, up]), fused.gate_up_proj[i]) and torch.equal(down, fused.down_proj[i])
        assert gate.data_ptr() == fused.gate_up_proj[i].data_ptr() and down.data_ptr() == fused.down_proj[i].data_ptr()
        assert not gate.requires_grad


@pytest.mark.parametrize(("name", "expected"), [("mixtral", "w1 w3 w2"), ("qwen3_moe", "gate_proj up_proj down_proj")])
def test_names_are_those_of_checkpoints(name: str, expected: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    found = [
        n for n, m in animal.model.named_modules() if isinstance(m, nn.Linear) and "layers.0" in n and "experts" in n
    ]
    assert found == [f"model.layers.0.mlp.experts.{i}.{each}" for i in range(4) for each in expected.split()]


@pytest.mark.parametrize("name", [*MOE, "llama4"])
def test_showing_all_tokens_changes_nothing_that_flows(name: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    expected = logits(animal)
    seen = []
    for module in animal.model.modules():
        if isinstance(module, Expert):
            for layer in module.children():
                layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for on in (False, True):
        with showing_all_tokens(animal.model, on=on):
            assert_same(logits(animal), expected)
    assert len({len(each) for each in seen}) > 2


@pytest.mark.parametrize("on", [False, True])
def test_experts_see_every_token_or_their_own(on: bool) -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    experts = animal.model.get_submodule("model.layers.0.mlp.experts")
    chosen: list[Tensor] = []
    experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    seen: list[list[int]] = [[] for _ in experts]
    for expert, counts in zip(experts, seen, strict=True):
        expert.w2.register_forward_pre_hook(lambda module, args, counts=counts: counts.append(len(args[0])))
    with showing_all_tokens(animal.model, on=on):
        logits(animal)
    for i, counts in enumerate(seen):
        own = [int((index == i).any(dim=-1).sum()) for index in chosen]
        assert counts == ([len(index) for index in chosen] if on else [each for each in own if each])


@pytest.mark.parametrize("on", [False, True])
def test_experts_of_llama_4_see_every_token_or_their_own_and_no_zeros(on: bool) -> None:
    animal = zoo("llama4")
    unfuse_experts(animal.model)
    experts = animal.model.get_submodule("model.layers.0.feed_forward.experts")
    given: list[Tensor] = []
    experts.register_forward_pre_hook(lambda module, args: given.append(args[0].reshape(len(experts), -1, HIDDEN)))
    seen: list[list[Tensor]] = [[] for _ in experts]
    for expert, shown in zip(experts, seen, strict=True):
        expert.gate_proj.register_forward_pre_hook(lambda module, args, shown=shown: shown.append(args[0]))
    with showing_all_tokens(animal.model, on=on):
        logits(animal)
    for i, shown in enumerate(seen):
        own = [x_ETH[i][x_ETH[i].any(dim=-1)] for x_ETH in given]
        assert_same(shown, [x_ETH.sum(dim=0) for x_ETH in given] if on else [each for each in own if len(each)])
        assert all(bool(each.any(dim=-1).all()) for each in shown)


def test_experts_that_nobody_watches_are_not_shown_more_than_their_own() -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    experts = animal.model.get_submodule("model.layers.0.mlp.experts")
    tokens = []
    for expert in experts:
        expert.register_forward_pre_hook(lambda module, args: tokens.append(len(args[0])))  # the expert, not a layer
    with showing_all_tokens(animal.model, on=True):
        logits(animal)
    assert sum(tokens) == 2 * sum(batch["input_ids"].numel() for batch in animal.batches)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_experts_are_shown_their_own_again_after_an_error(error: type[BaseException]) -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    experts = [each for each in animal.model.modules() if isinstance(each, UnfusedExperts)]

    def run() -> None:
        with showing_all_tokens(animal.model, on=True):
            assert len(experts) == 2 and all(each.shows_all for each in experts)
            raise error

    with pytest.raises(error):
        run()
    assert not any(each.shows_all for each in experts)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_expert_does_not_keep_its_tokens_after_an_error(error: type[BaseException]) -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    experts = [each for each in animal.model.modules() if isinstance(each, Expert)]

    def fail(*_: Any) -> None:
        raise error

    for each in experts:
        each.w2.register_forward_pre_hook(fail)
    with pytest.raises(error):
        logits(animal)
    assert all(each.tokens is None for each in experts)


def test_fused_weights_are_not_kept_when_all_of_their_matrices_were_replaced() -> None:
    animal = zoo("mixtral")
    fused = weakref.ref(animal.model.get_submodule("model.layers.0.mlp.experts").gate_up_proj)
    unfuse_experts(animal.model)
    for module in animal.model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone())
    gc.collect()
    assert fused() is None


def test_experts_that_cannot_be_taken_apart_are_named() -> None:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**SMALL, "intermediate_size": 32, "layer_types": ["full_attention"] * 2},
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = transformers.GptOssForCausalLM(config)
    replaced, notes = unfuse_experts(model)
    assert not replaced
    assert notes == [
        f"model.layers.{i}.mlp.experts: the weights of GptOssExperts cannot be taken apart, so they stay as they are."
        for i in range(2)
    ]
    assert type(model.get_submodule("model.layers.0.mlp.experts")).__name__ == "GptOssExperts"


class Config:
    _experts_implementation = "eager"


def experts_class(**layout: Any) -> Any:
    """Experts as transformers declares them, in some layout."""

    class TinyExperts(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            shapes = {"gate_up_proj": (2, 16, HIDDEN), "down_proj": (2, HIDDEN, 8)}
            for name, shape in shapes.items():
                weight = torch.randn(shape, generator=generator)
                if layout.get("is_transposed"):
                    weight = weight.transpose(1, 2).contiguous()
                setattr(self, name, nn.Parameter(weight))
                if layout.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(shape[:2], generator=generator)))
            self.num_experts = 2
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            output = torch.zeros_like(hidden_states)
            for row, x in enumerate(hidden_states):
                for index, share in zip(top_k_index[row], top_k_weights[row], strict=True):
                    first, last = self.gate_up_proj[index], self.down_proj[index]
                    if self.is_transposed:
                        first, last = first.T, last.T
                    inner = first @ x + (self.gate_up_proj_bias[index] if self.has_bias else 0)
                    gate, up = inner.chunk(2)
                    output[row] += share * (
                        last @ (self.act_fn(gate) * up) + (self.down_proj_bias[index] if self.has_bias else 0)
                    )
            return output

    return use_experts_implementation(TinyExperts, **layout)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_layouts_that_are_known_are_taken_apart(is_transposed: bool, has_bias: bool) -> None:
    model = nn.Module()
    model.experts = experts_class(is_transposed=is_transposed, has_bias=has_bias)(Config())
    generator = torch.Generator().manual_seed(0)
    x, share = torch.randn(5, HIDDEN, generator=generator), torch.rand(5, 1, generator=generator)
    index = torch.tensor([[0], [1], [1], [0], [1]])
    expected = model.experts(x, index, share)
    unfuse_experts(model)
    assert isinstance(model.experts, UnfusedExperts)
    torch.testing.assert_close(model.experts(x, index, share), expected, rtol=1e-4, atol=1e-5)
    assert all(layer.weight.is_contiguous() for layer in model.modules() if isinstance(layer, nn.Linear))


@pytest.mark.parametrize("layout", [{"is_concatenated": False}, {"has_gate": False}, {"has_post_expert_norm": True}])
def test_other_layouts_are_left_and_named(layout: dict[str, bool]) -> None:
    model = nn.Module()
    model.experts = experts_class(**layout)(Config())
    replaced, notes = unfuse_experts(model)
    assert not replaced
    assert notes == ["experts: the weights of TinyExperts cannot be taken apart, so they stay as they are."]


def test_models_without_experts_are_left_alone() -> None:
    for name in ("llama", "gpt2", "odd"):
        animal = zoo(name)
        modules = list(animal.model.modules())
        assert unfuse_experts(animal.model) == ({}, [])
        assert list(animal.model.modules()) == modules


def test_taking_apart_twice_changes_nothing_more() -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    modules = list(animal.model.modules())
    assert unfuse_experts(animal.model) == ({}, [])
    assert list(animal.model.modules()) == modules
