"""Smoothing: what is found in a model, what it leaves alone, and that the model says the same afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from calibration.zoo import HIDDEN, SMALL, Animal, assert_same, text_batches, traces, zoo
from scalewright import IMatrixGatherer, QuantizationModifier, SmoothQuantModifier, oneshot
from scalewright.calibration.links import Trial
from scalewright.calibration.plan import make_plan
from scalewright.calibration.smoothing import Smoothing, smooth
from scalewright.cli.progress import _UNITS
from scalewright.errors import DataError, RecipeError, StrictError
from scalewright.importance import gather_importance, save_importance
from scalewright.modifiers import GPTQModifier, Modifier

HEAD = ["lm_head", "head", "re:.*gate$", "re:.*router$"]
Q, K, V, OUT = (f"self_attn.{each}_proj" for each in "qkvo")
GATE, UP, DOWN = (f"mlp.{each}_proj" for each in ("gate", "up", "down"))
LLAMA = {"input_layernorm": [Q, K, V], V: [OUT], "post_attention_layernorm": [GATE, UP], UP: [DOWN]}


def static(**given: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"scheme": "W8A8", "ignore": HEAD, **given})


def smoothed(animal: Animal, modifier: SmoothQuantModifier | None = None, **given: Any) -> Smoothing:
    plan = make_plan(animal.model, [static(**given)], has_data=True)
    return smooth(animal.model, plan, modifier or SmoothQuantModifier(), animal.batches)


def made_uneven(model: nn.Module) -> nn.Module:
    """A model in which some channels are much louder than others."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            factor = torch.exp2(2 * torch.randn(len(weight), generator=generator))
            weight.data.mul_(factor if weight.ndim == 1 else factor[:, None] if "Linear" in repr(module) else 1)
    return model


def links_in(block: str, expected: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    givers = {f"{block}.{each}" for each in expected}
    return givers, {f"{block}.{each}" for some in expected.values() for each in some}


EXPERTS = {f"mlp.experts.{i}.w3": [f"mlp.experts.{i}.w2"] for i in range(4)}
QWEN_EXPERTS = {f"mlp.experts.{i}.up_proj": [f"mlp.experts.{i}.down_proj"] for i in range(4)}
ATTENTION = {each: LLAMA[each] for each in ("input_layernorm", V)}
FOUND = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gemma3": {V: [OUT], UP: [DOWN]},  # its norms multiply by 1 + weight
    "mixtral": {**ATTENTION, **EXPERTS},
    "qwen3_moe": {**ATTENTION, **QWEN_EXPERTS},
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_gives_layers_their_channels_is_found(kind):
    animal = zoo(kind)
    found = smoothed(animal)
    for block in animal.blocks:
        givers, layers = links_in(block, FOUND[kind])
        assert {each for each in found.outputs if each.startswith(f"{block}.")} == givers
        assert {each for each in found.inputs if each.startswith(f"{block}.")} == layers
    assert found.notes == []


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "t5", "llava", "llama4"])
def test_the_model_says_the_same_bit_for_bit_and_nothing_stays_on_it(kind):
    animal = zoo(kind)
    made_uneven(animal.model)
    # Experts are taken apart first: their products are summed up in another order.
    plan = make_plan(animal.model, [static()], has_data=True)
    expected = [animal.model(**batch) for batch in animal.batches]
    before, weights = traces(animal.model), {k: v.clone() for k, v in animal.model.state_dict().items()}
    found = smooth(animal.model, plan, SmoothQuantModifier(), animal.batches)
    assert found.inputs and found.outputs and any(bool(each.any()) for each in found.inputs.values())
    for batch, each in zip(animal.batches, expected, strict=True):
        assert_same(animal.model(**batch), each)
    after = traces(animal.model)
    for name, module in before.items():
        kept = [each for number, each in enumerate(module) if number != 3] if isinstance(module, tuple) else module
        now = after[name]
        assert ([each for number, each in enumerate(now) if number != 3] if isinstance(now, tuple) else now) == kept
    # What was changed is what is told.
    for name, weight in animal.model.state_dict().items():
        module, _, local = name.rpartition(".")
        told = weights[name]
        if module in found.outputs:
            factor = torch.exp2(found.outputs[module].float())
            told = told * (factor if told.ndim == 1 else factor[:, None])
        if module in found.inputs and local == "weight":
            told = told * torch.exp2(found.inputs[module].float())
        assert torch.equal(weight, told), name


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3"])
def test_in_float16_the_same_is_found_and_what_small_numbers_lose_is_little(kind):
    animal, single = zoo(kind), zoo(kind)
    for each in (animal.model, single.model):
        made_uneven(each).half().float()
    animal.model.half()
    plan = make_plan(animal.model, [static()], has_data=True)
    expected = [animal.model(**batch).logits.detach() for batch in animal.batches]
    before = traces(animal.model)
    found = smooth(animal.model, plan, SmoothQuantModifier(), animal.batches)
    assert found.outputs.keys() == smoothed(single).outputs.keys()
    assert found.notes == []
    for batch, each in zip(animal.batches, expected, strict=True):
        got = animal.model(**batch).logits.detach()
        assert got.dtype == torch.float16
        assert float((got - each).float().norm()) < 0.01 * float(each.float().norm())
    assert all(each.dtype == torch.float16 for each in animal.model.parameters())
    assert traces(animal.model).keys() == before.keys()


def test_loud_channels_are_made_quieter():
    animal = zoo("llama")
    made_uneven(animal.model)
    plain = oneshot(copy.deepcopy(animal.model), recipe=static(), dataset=animal.batches)
    even = oneshot(animal.model, recipe=[SmoothQuantModifier(), static()], dataset=animal.batches)
    gains = [one.output_db - other.output_db for one, other in zip(even.layers, plain.layers, strict=True)]
    assert min(gains) > -1 and sum(gains) / len(gains) > 3
    assert even.smoothing.inputs.keys() == {each.name for each in even.layers}
    assert not plain.smoothing.inputs


def test_padding_is_not_looked_at():
    animal, other = zoo("llama"), zoo("llama")
    ids = other.batches[0]["input_ids"]
    ids[other.batches[0]["attention_mask"] == 0] = 5
    other.model.model.embed_tokens.weight.data[5] *= 100
    animal.model.model.embed_tokens.weight.data[5] *= 100
    for batch in (*animal.batches, *other.batches):
        batch["input_ids"][(batch["attention_mask"] == 1) & (batch["input_ids"] == 5)] = 6
    one, two = smoothed(animal), smoothed(other)
    assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in one.inputs)


class Clamped(nn.Module):
    """A block whose second layer is given what is cut off at a limit, and that may tell the next block what it gave."""

    def __init__(self, limit: float, *, tells: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.limit = limit
        self.tells = tells

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        given = torch.relu(self.first(x))
        for each in told:  # passes by the output of the block before
            x = x + each
        told[:] = [given] if self.tells else []
        return x + self.second(given.clamp(max=self.limit))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, told = self.embed(input_ids), list[Tensor]()
        for block in self.blocks:
            x = block(x, told)
        return x


def stack_of(*blocks: nn.Module, kind: type[Stack] = Stack) -> Animal:
    torch.manual_seed(0)
    model = kind(*blocks).eval()
    return Animal(model, text_batches(), [f"blocks.{i}" for i in range(len(blocks))])


def test_relu_passes_factors_on_and_a_limit_does_not():
    found = smoothed(stack_of(Clamped(1e9), Clamped(1e9)))
    assert found.outputs.keys() == {"blocks.0.first", "blocks.1.first"}
    assert found.inputs.keys() == {"blocks.0.second", "blocks.1.second"}
    assert not smoothed(stack_of(Clamped(1.0), Clamped(1.0))).inputs
    # What holds in one block need not hold in the next one.
    found = smoothed(stack_of(Clamped(1e9), Clamped(1.0)))
    assert found.inputs.keys() == {"blocks.0.second"}


class Numbered(nn.Module):
    """A norm before the first of two layers that differ by a number, a ReLU before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def test_layers_whose_names_differ_by_a_number_are_two_kinds():
    found = smoothed(stack_of(Numbered(), Numbered()))
    assert found.outputs.keys() == {f"blocks.{i}.{each}" for i in range(2) for each in ("norm", "fc1")}
    assert found.inputs.keys() == {f"blocks.{i}.{each}" for i in range(2) for each in ("fc1", "fc2")}


class Parted(nn.Module):
    """One layer gives two others their inputs, with rows of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        one, other = self.both(x).chunk(2, dim=-1)
        return x + self.first(torch.relu(one)) + self.second(torch.relu(other).flip(1))


def test_a_layer_that_gives_two_others_their_channels_is_told_of_with_both():
    animal = stack_of(Parted(), Parted())
    made_uneven(animal.model)
    before = {name: each.clone() for name, each in animal.model.state_dict().items()}
    found = smoothed(animal)
    for block in animal.blocks:
        first_C, second_C = (found.inputs[f"{block}.{each}"] for each in ("first", "second"))
        assert bool(first_C.any()) and bool(second_C.any())
        powers_R = found.outputs[f"{block}.both"]
        assert torch.equal(powers_R, -torch.cat([first_C, second_C]))
        told = before[f"{block}.both.weight"] * torch.exp2(powers_R.float())[:, None]
        assert torch.equal(animal.model.get_submodule(f"{block}.both").weight, told)


def test_where_nothing_can_be_smoothed_it_is_said():
    assert smoothed(stack_of(Clamped(1.0), Clamped(1.0))).notes == [
        "SmoothQuantModifier: nothing could be smoothed. No norm or layer was found whose channels go into layers "
        "with integer inputs and nowhere else. Leave it out (quality fast does), or use scales for each token "
        "(W8A8_DYNAMIC)."
    ]


class Narrow(nn.Module):
    """A layer with two input channels, which nothing in front of it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.two = nn.Linear(2, HIDDEN)

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        return torch.tanh(self.first(x))[..., :HIDDEN] + self.two(x[..., :2].detach().clone())


def test_a_trial_of_few_channels_says_something():
    assert not smoothed(stack_of(*(Narrow() for _ in range(3)))).inputs


def test_a_first_block_of_zeros_does_not_say_what_holds_in_the_others():
    animal = zoo("llama")
    first = animal.model.get_submodule(animal.blocks[0])
    first.self_attn.o_proj.weight.data.zero_()
    first.mlp.down_proj.weight.data.zero_()
    found = smoothed(animal)
    assert {f"{animal.blocks[1]}.{each}" for each in LLAMA} <= found.outputs.keys()
    assert not {f"{animal.blocks[0]}.{each}" for each in (V, UP)} & found.outputs.keys()


class Many(nn.Module):
    """Sixteen pairs of layers with a ReLU between them, of which one may have a limit, too."""

    def __init__(self, limited: int | None = None) -> None:
        super().__init__()
        pairs = ({"first": nn.Linear(HIDDEN, HIDDEN), "second": nn.Linear(HIDDEN, HIDDEN)} for _ in range(16))
        self.pairs = nn.ModuleList(map(nn.ModuleDict, pairs))
        self.limited = limited

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        for number, pair in enumerate(self.pairs):
            given = torch.relu(pair["first"](x))
            x = x + pair["second"](given.clamp(max=0.1) if number == self.limited else given)
        return x


def test_links_that_do_not_hold_are_found_by_halves(monkeypatch):
    tried: list[int] = []
    is_same = Trial._is_same
    monkeypatch.setattr(
        Trial, "_is_same", lambda self, links, **how: tried.append(len(links)) or is_same(self, links, **how)
    )
    found = smoothed(stack_of(Many(), Many(3)))
    expected = {f"blocks.{i}.pairs.{j}.first" for i in range(2) for j in range(16)} - {"blocks.1.pairs.3.first"}
    assert found.outputs.keys() == expected
    assert len(tried) < 16


def weights_of(animal: Animal) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in animal.model.state_dict().items()}


def is_as_before(animal: Animal, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(each, before[name]) for name, each in animal.model.state_dict().items())


def test_what_a_block_puts_into_a_list_that_it_is_given_counts_as_what_it_gives():
    animal = stack_of(*(Clamped(1e9, tells=True) for _ in range(3)))
    before = weights_of(animal)
    assert not smoothed(animal).inputs and is_as_before(animal, before)
    mixed = smoothed(stack_of(Clamped(1e9), Clamped(1e9, tells=True), Clamped(1e9)))
    assert mixed.inputs.keys() == {"blocks.0.second", "blocks.2.second"}
    assert mixed.notes == []


def sharing_keys_and_values() -> Animal:
    config = transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 6, "intermediate_size": 48},
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 6,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    return Animal(model, text_batches(), [f"model.layers.{i}" for i in range(6)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_later_blocks_use_again_are_left_alone_and_others_are_not(dtype):
    animal = sharing_keys_and_values()
    animal.model.to(dtype)
    expected = [animal.model(**batch) for batch in animal.batches]
    found = smoothed(animal)
    assert found.notes == []
    assert found.outputs and not any(each.endswith("v_proj") for each in found.outputs)
    for batch, each in zip(animal.batches, expected, strict=True):
        assert_same(animal.model(**batch), each)


class Wrapped:
    """What torch does not know how to look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(Clamped):
    def forward(self, x: Any, told: list[Tensor]) -> Any:
        return Wrapped(super().forward(x.value, told))


class Unwrapping(Stack):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = Wrapped(self.embed(input_ids))
        for block in self.blocks:
            x = block(x, [])
        return x.value


def test_blocks_whose_output_cannot_be_looked_at_are_left_alone():
    animal = stack_of(Wrapping(1.0), Wrapping(1.0), kind=Unwrapping)
    before = weights_of(animal)
    assert not smoothed(animal).inputs and is_as_before(animal, before)


class Keeping(Clamped):
    """A block that keeps what it gave its second layer."""

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        for each in told:
            x = x + each
        self.kept = torch.relu(self.first(x))
        return x + self.second(self.kept)


class Telling(Stack):
    """Tells each block, and its caller, what the block before has kept."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, told = self.embed(input_ids), list[Tensor]()
        for block in self.blocks:
            x = block(x, told)
            told = [block.kept]
        return x + told[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("count", "note"),
    [
        (3, "blocks.1: is given other numbers when what comes before it is smoothed, so nothing is smoothed."),
        (1, "Telling: says something else when it is smoothed, so nothing is smoothed."),
    ],
)
def test_what_passes_by_a_blocks_output_is_noticed_and_everything_put_back(count, note, dtype):
    animal = stack_of(*(Keeping(1e9) for _ in range(count)), kind=Telling)
    made_uneven(animal.model).to(dtype)
    before = weights_of(animal)
    found = smoothed(animal)
    assert not found.inputs and not found.outputs
    assert found.notes == [note]
    assert is_as_before(animal, before)


def test_weights_that_are_shared_are_left_alone():
    animal = zoo("llama")
    first, second = (animal.model.get_submodule(block) for block in animal.blocks)
    second.input_layernorm.weight = first.input_layernorm.weight
    found = smoothed(animal)
    assert found.outputs.keys() == {
        f"{block}.{each}" for block in animal.blocks for each in (V, "post_attention_layernorm", UP)
    }


def test_layers_that_were_quantised_before_are_left_alone():
    animal = zoo("llama")
    recipe = [
        {"a_stage": {"a_modifiers": [static(targets=["re:.*up_proj", "re:.*q_proj"])]}},
        {"b_stage": {"b_modifiers": [SmoothQuantModifier(), static(targets=["re:.*down_proj", "re:.*[kv]_proj"])]}},
        {"c_stage": {"c_modifiers": [SmoothQuantModifier(), static(targets=["re:.*o_proj"])]}},
    ]
    result = oneshot(animal.model, recipe=recipe, dataset=animal.batches)
    assert not result.smoothing.inputs
    assert sum("nothing could be smoothed" in note for note in result.notes) == 1


@pytest.mark.parametrize(
    ("mappings", "expected"),
    [
        ([[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]], ["input_layernorm"]),
        ([[["re:.*down_proj"], "re:.*up_proj"], [["*.o_proj"], "*.v_proj"]], [UP, V]),
        ([[["re:.*q_proj"], "re:.*input_layernorm"]], []),  # keys and values are given the same
    ],
)
def test_mappings_say_which(mappings, expected):
    animal = zoo("llama")
    found = smoothed(animal, SmoothQuantModifier(mappings=mappings))
    assert found.outputs.keys() == {f"{block}.{each}" for block in animal.blocks for each in expected}


def test_targets_and_ignored_layers_are_those_of_the_recipe():
    animal = zoo("llama")
    found = smoothed(animal, SmoothQuantModifier(targets=["re:.*mlp.*"], ignore=["re:.*layers.1.*"]))
    assert found.inputs.keys() == {f"model.layers.0.{each}" for each in (GATE, UP, DOWN)}


def test_layers_beside_those_that_are_meant_take_their_share_of_what_a_norm_loses():
    animal = zoo("llama")
    made_uneven(animal.model)
    expected = [animal.model(**batch) for batch in animal.batches]
    found = smoothed(animal, targets=["re:.*q_proj"], ignore=[])
    assert found.inputs.keys() == {f"{block}.{each}" for block in animal.blocks for each in (Q, K, V)}
    for batch, each in zip(animal.batches, expected, strict=True):
        assert_same(animal.model(**batch), each)


def test_layers_of_few_bits_do_not_pay_for_what_their_neighbours_gain():
    for bits, is_left_alone in ((4, True), (8, False)):
        animal = zoo("llama")
        weights = {"num_bits": bits, "strategy": "channel"}
        others = QuantizationModifier(targets=["re:.*[kv]_proj"], weights=weights)
        plan = make_plan(
            animal.model, [static(targets=["re:.*(q|o|gate|up|down)_proj"], ignore=[]), others], has_data=True
        )
        found = smooth(animal.model, plan, SmoothQuantModifier(), animal.batches)
        assert ("model.layers.0.input_layernorm" not in found.outputs) is is_left_alone
        assert "model.layers.0.post_attention_layernorm" in found.outputs


def test_importance_that_was_gathered_from_the_model_as_it_was_is_that_of_the_smoothed_one(tmp_path):
    animal, other = zoo("llama"), zoo("llama")
    weighted = static(weight_observer="imatrix_mse")
    kept: dict[str, Any] = {}
    for each, where in ((animal, "data"), (other, "file")):
        made_uneven(each.model)
        gatherer = IMatrixGatherer(ignore=HEAD)
        if where == "file":
            save_importance(gather_importance(each.model, each.batches, ignore=["lm_head"]), tmp_path / "i.safetensors")
            gatherer = IMatrixGatherer(file=tmp_path / "i.safetensors", ignore=HEAD)
        oneshot(each.model, recipe=[SmoothQuantModifier(), gatherer, weighted], dataset=each.batches)
        kept[where] = each.model.state_dict()
    for name, each in kept["data"].items():
        torch.testing.assert_close(kept["file"][name], each)


# ---- what is refused, and what is said -------------------------------------------------------------------------------


def refused(kind: type[Exception], *modifiers: Modifier, dataset: Any = "batches", **given: Any) -> str:
    animal = zoo("llama")
    with pytest.raises(kind) as caught:
        oneshot(animal.model, recipe=list(modifiers), dataset=animal.batches if dataset else None, **given)
    return str(caught.value)


def test_what_cannot_be_is_refused():
    dynamic = QuantizationModifier(scheme="W8A8_DYNAMIC", ignore=HEAD)
    assert refused(DataError, SmoothQuantModifier(), dynamic, dataset=None) == (
        "SmoothQuantModifier runs data through the model. Give a dataset, or leave it out."
    )
    assert refused(DataError, SmoothQuantModifier(), dynamic, pipeline="data_free") == (
        "SmoothQuantModifier runs data through the model, so the recipe cannot be run data_free. Leave the pipeline "
        "out."
    )
    assert refused(RecipeError, SmoothQuantModifier()) == (
        "the recipe smooths inputs, and there is nothing in it that quantises them. Add a QuantizationModifier or a "
        "GPTQModifier."
    )
    both = [SmoothQuantModifier(), SmoothQuantModifier(targets=["*.up_proj"])]
    assert refused(RecipeError, *both, static()) == (
        "model.layers.0.mlp.up_proj: two SmoothQuantModifiers mean it. Use ignore, or narrower targets."
    )


NO_INTEGERS = (
    "SmoothQuantModifier: means no layer whose inputs the recipe rounds to integers, so nothing is smoothed. Leave it "
    "out, or use a scheme such as W8A8."
)


def test_what_has_no_use_for_it_is_said():
    for given in ({"scheme": "W8A16", "group_size": 16}, {"scheme": "FP8_DYNAMIC"}):
        animal = zoo("llama")
        recipe = [SmoothQuantModifier(), QuantizationModifier(**given, ignore=["lm_head"])]
        assert NO_INTEGERS in oneshot(animal.model, recipe=recipe).notes
        assert refused(StrictError, *recipe, strict=True, dataset=None) == NO_INTEGERS
    late = {
        "a_stage": {"a_modifiers": [static()]},
        "b_stage": {"b_modifiers": [SmoothQuantModifier()]},
    }
    animal = zoo("llama")
    result = oneshot(animal.model, recipe=late, dataset=animal.batches)
    assert not result.smoothing.inputs
    assert (
        "SmoothQuantModifier: nothing that comes after it quantises, so it is not run. Put it before the modifier that "
        "does." in result.notes
    )
    animal = zoo("llama")
    modifier = SmoothQuantModifier(ignore=["re:.*nothing"], mappings=[[["re:.*q_proj"], "re:.*nowhere"]])
    notes = oneshot(animal.model, recipe=[modifier, static()], dataset=animal.batches).notes
    assert "SmoothQuantModifier.ignore: 're:.*nothing' matches no module of this model." in notes
    assert "SmoothQuantModifier.mappings: 're:.*nowhere' matches no module of this model." in notes


@pytest.mark.parametrize("scheme", ["W8A8_DYNAMIC", "INT8"])
def test_scales_for_each_token_gain_by_it_too(scheme):
    animal = zoo("llama")
    made_uneven(animal.model)
    plain = oneshot(
        copy.deepcopy(animal.model), recipe=GPTQModifier(scheme=scheme, ignore=HEAD), dataset=animal.batches
    )
    recipe = [SmoothQuantModifier(), GPTQModifier(scheme=scheme, ignore=HEAD)]
    even = oneshot(animal.model, recipe=recipe, dataset=animal.batches)
    assert sum(one.output_db - other.output_db for one, other in zip(even.layers, plain.layers, strict=True)) > 0


def test_progress_is_that_of_smoothing():
    animal, said = zoo("llama"), dict[str, list[tuple[int, int]]]()

    def on_step(phase: str, what: str, done: int, total: int) -> None:
        said.setdefault(phase, []).append((done, total))

    oneshot(animal.model, recipe=[SmoothQuantModifier(), static()], dataset=animal.batches, on_step=on_step)
    assert {"smoothing", "calibrating", "quantising"} <= said.keys()
    assert said["smoothing"] == sorted(said["smoothing"]) and said["smoothing"][-1][0] == said["smoothing"][-1][1] > 0
    assert _UNITS["smoothing"] == "tokens"  # so that a terminal shows the time left
