"""GPTQModifier: what it says no to, which formats it rounds to, what that gains, and what it tells of failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from scalewright import GPTQModifier, QuantizationModifier, Recipe, oneshot
from scalewright.calibration.taps import Masks
from scalewright.errors import DataError, NonFiniteError, RecipeError
from scalewright.modifiers import gptq_layer
from scalewright.modifiers.figures import Sample
from scalewright.modifiers.gptq import Rounding
from scalewright.modifiers.gptq_layer import GPTQLayer, Hessian
from scalewright.modifiers.shown import Shown
from scalewright.numerics.hessian import factor
from scalewright.observers.optimal import OptimalObserver
from scalewright.oneshot import Result

# T tokens, R rows (output channels), C columns (input channels).

COLUMNS, ROWS, VOCAB = 128, 96, 200
IDS = torch.randint(1, VOCAB, (8, 48), generator=torch.Generator().manual_seed(1))
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of weights takes time, and is tested elsewhere."""
    for name in ("above_optimum", "gain_over_minmax"):
        monkeypatch.setattr(Sample, name, lambda _: None)


class Chain(nn.Module):
    """Linear layers, one after the other. Channels of their inputs hang together, and some are much stronger."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        mix = torch.randn(COLUMNS, COLUMNS, generator=generator) * torch.logspace(0, -1.5, COLUMNS)
        self.embed = nn.Embedding(VOCAB, COLUMNS)
        self.embed.weight.data = torch.randn(VOCAB, COLUMNS, generator=generator) @ mix / COLUMNS**0.5
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def one(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Chain:
    torch.manual_seed(0)
    return Chain(nn.Linear(COLUMNS, rows)).to(dtype)


def several(count: int = 3) -> Chain:
    torch.manual_seed(0)
    return Chain(*(nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(count)))


def quantised(model: nn.Module, modifier: Any, **given: Any) -> Result:
    return oneshot(model, recipe=modifier, dataset=given.pop("dataset", IDS), **given)


def notes_of(result: Result) -> list[str]:
    return [note for note in result.notes if not note.startswith(("data:", "dtype:"))]


def lost(model: Chain, original: Chain) -> float:
    """What the output of the last layer has lost, by its weight alone."""
    with torch.no_grad():
        x_TC = original.embed(IDS).flatten(0, 1).float()
        error_RC = (model.layers[-1].weight - original.layers[-1].weight).float()
        return float((x_TC @ error_RC.T).square().sum())


def message(kind: type[Exception] = RecipeError, **given: Any) -> str:
    with pytest.raises(kind) as caught:
        GPTQModifier(**given)
    return str(caught.value)


# ---- knobs -----------------------------------------------------------------------------------------------------------


def test_knobs_are_those_that_users_know():
    assert GPTQModifier(scheme="W4A16").rounding == Rounding(128, 0.01, True, 0, 0.0)
    given = {"block_size": 64, "dampening_frac": 0, "actorder": "none", "refinements": 3, "correction": 1}
    assert GPTQModifier(scheme="W4A16", **given).rounding == Rounding(64, 0, False, 3, 1)
    assert GPTQModifier(scheme="W4A16").data == "needed"


NUMBERS = [
    ("block_size", 0, "whole number from 1 on"),
    ("block_size", 1.5, "whole number from 1 on"),
    ("block_size", True, "whole number from 1 on"),
    ("block_size", "128", "whole number from 1 on"),
    ("refinements", -1, "whole number from 0 on"),
    ("refinements", 2.0, "whole number from 0 on"),
    ("dampening_frac", -0.1, "number from 0 on"),
    ("dampening_frac", math.nan, "number from 0 on"),
    ("dampening_frac", math.inf, "number from 0 on"),
    ("dampening_frac", "little", "number from 0 on"),
    ("correction", 1.1, "number from 0 to 1"),
    ("correction", -0.1, "number from 0 to 1"),
    ("correction", False, "number from 0 to 1"),
]


@pytest.mark.parametrize(("name", "value", "what"), NUMBERS)
def test_numbers_that_mean_nothing_are_refused(name, value, what):
    assert message(scheme="W4A16", **{name: value}) == f"{name}: expected a {what}, got {value!r}."
    with pytest.raises(RecipeError) as caught:
        Recipe.of({"GPTQModifier": {"scheme": "W4A16", name: value}})
    assert str(caught.value).startswith(f"recipe.GPTQModifier: {name}: expected a {what}")


def test_what_it_does_not_have_is_refused():
    assert message(scheme="W4A16", dampening=0.1).startswith(
        "GPTQModifier has no 'dampening'. Did you mean 'dampening_frac'? It has: targets, ignore, scheme, "
    )
    words = "GPTQModifier: there are no weights to round. Give weights, or use QuantizationModifier."
    assert message(input_activations={"num_bits": 8}) == words
    assert message(kv_cache_scheme={"num_bits": 8, "type": "float"}) == words


def test_it_needs_data_and_says_so():
    with pytest.raises(DataError) as caught:
        oneshot(one(), recipe=GPTQModifier(weights=INT4))
    assert str(caught.value) == (
        "GPTQModifier rounds weights with their inputs in mind, which are found by watching data. Give a dataset, or "
        "do without: QuantizationModifier in a recipe, quality fast or balanced on the command line."
    )
    with pytest.raises(DataError) as caught:
        quantised(one(), GPTQModifier(weights=INT4), pipeline="data_free")
    assert str(caught.value) == (
        "GPTQModifier rounds weights with their inputs in mind, so it cannot be run data_free. Use sequential, or "
        "leave the pipeline out."
    )


# ---- the order of columns --------------------------------------------------------------------------------------------


def test_columns_are_ordered_unless_it_is_said_not_to():
    for given, is_ordered in (({}, True), ({"actorder": "static"}, True), ({"actorder": "weight"}, True)):
        assert GPTQModifier(scheme="W4A16", **given).rounding.is_ordered == is_ordered
    for none in ("none", None):
        modifier = GPTQModifier(scheme="W4A16", actorder=none)
        assert not modifier.rounding.is_ordered
        again = Recipe.of(Recipe.of(modifier).to_yaml()).modifiers[0]
        assert not again.rounding.is_ordered
    assert not Recipe.of("GPTQModifier:\n  scheme: W4A16\n  actorder: null").modifiers[0].rounding.is_ordered


@pytest.mark.parametrize("inside", [None, "static", "weight", "STATIC"])
def test_weights_may_say_that_columns_are_ordered(inside):
    modifier = GPTQModifier(weights={**INT4, "actorder": inside})
    assert modifier.rounding.is_ordered
    assert modifier.groups[0].scheme.weights.actorder == (None if inside is None else inside.lower())
    assert GPTQModifier(weights={**INT4, "actorder": inside}, actorder="static").rounding.is_ordered
    if inside is None:
        assert not GPTQModifier(weights={**INT4, "actorder": inside}, actorder="none").rounding.is_ordered
    else:
        for none in ("none", None):
            words = f"actorder: weights say '{inside.lower()}', and the modifier none. Keep one of them."
            assert message(weights={**INT4, "actorder": inside}, actorder=none) == words


@pytest.mark.parametrize("groups", [False, True])
def test_weights_may_say_that_columns_are_not_ordered(groups):
    weights = {**INT4, "actorder": False}
    given = {"config_groups": {"some": {"targets": ["Linear"], "weights": weights}}} if groups else {"weights": weights}
    modifier = GPTQModifier(**given)
    assert not modifier.rounding.is_ordered
    assert not Recipe.of(Recipe.of(modifier).to_yaml()).modifiers[0].rounding.is_ordered
    assert message(**given, actorder="static") == (
        "actorder: weights say false, and the modifier 'static'. Keep one of them."
    )


def test_weights_do_not_say_both():
    groups = {
        name: {"targets": [name], "weights": {**INT4, "actorder": order}}
        for name, order in (("a", False), ("b", "static"))
    }
    assert message(config_groups=groups) == (
        "actorder: weights say 'static', and other weights false. Keep one of them."
    )


def test_a_table_of_rows_is_rounded_to_the_nearest_and_said_to_be():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(16, 32), nn.Linear(32, 32)

        def forward(self, input_ids):
            return self.layer(self.table(input_ids))

    modifier = GPTQModifier(weights=INT4, targets=["Embedding", "Linear"])
    words = "table: picks rows by number, so GPTQ rounds its weight to the nearest."
    ids = torch.arange(16).view(2, 8)
    for pipeline in ("auto", "sequential"):  # a model without blocks goes layer by layer
        found = oneshot(Words(), recipe=modifier, dataset=ids, pipeline=pipeline)
        assert [note for note in found.notes if "table" in note] == [words]


def test_orders_that_there_are_not_are_refused():
    assert message(scheme="W4A16", actorder="group") == (
        "actorder: there is no 'group'. Choices: static, weight, none."
    )
    assert message(scheme="W4A16", actorder="statc") == (
        "actorder: there is no 'statc'. Did you mean 'static'? Choices: static, weight, none."
    )
    assert message(scheme="W4A16", actorder=True) == "actorder: there is no True. Choices: static, weight, none."
    assert message(weights={**INT4, "actorder": "group"}) == (
        "weights: there is no actorder 'group'. Choices: weight, static."
    )
    assert message(weights=INT4, input_activations={"num_bits": 8, "actorder": "static"}) == (
        "input_activations: actorder is for weights. Leave it out."
    )


def test_each_knob_changes_something():
    def weights_with(**given: Any) -> Tensor:
        model = several(2)
        quantised(model, GPTQModifier(weights={**INT4, "observer": "memoryless_minmax"}, **given))
        return torch.cat([layer.weight.detach() for layer in model.layers])

    plain = weights_with()
    for given in ({"actorder": None}, {"dampening_frac": 0.5}, {"refinements": 1}, {"correction": 0.5}):
        assert not torch.equal(weights_with(**given), plain), given
    for given in ({"actorder": "weight"}, {"block_size": 32}):  # it is the same to the last bits
        assert float((weights_with(**given) == plain).float().mean()) > 0.98


# ---- formats ---------------------------------------------------------------------------------------------------------


def integers(num_bits: int, *, symmetric: bool, strategy: str) -> dict[str, Any]:
    group = {"group_size": 32} if strategy == "group" else {}
    return {"weights": {"num_bits": num_bits, "symmetric": symmetric, "strategy": strategy, **group}}


FORMATS: dict[str, dict[str, Any]] = {
    f"int{bits} {strategy}{'' if symmetric else ' affine'}": integers(bits, symmetric=symmetric, strategy=strategy)
    for bits in range(2, 9)
    for symmetric in (True, False)
    for strategy in ("channel", "group")
}
FORMATS["int8 tensor"] = {"weights": {"num_bits": 8, "strategy": "tensor"}}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}
FORMATS["fp8 blocks"] = {"weights": BLOCKS}
SCHEMES = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "W8A8", "W4AFP8"]
FORMATS |= {name: {"scheme": name} for name in SCHEMES}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that were to be stored."""
    found: list[Tensor] = []
    rounded = GPTQLayer._rounded
    monkeypatch.setattr(GPTQLayer, "_rounded", lambda *args: (found.append(rounded(*args)), found[-1])[1])
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loses_less_than_by_rounding_to_the_nearest(name, wanted):
    given = {**FORMATS[name], "weight_observer": "memoryless_minmax"}
    original, nearest = one(), one()
    quantised(nearest, QuantizationModifier(**given))
    plain, losses = lost(nearest, original), []
    for refinements in (0, 2):
        model = one()
        result = quantised(model, GPTQModifier(**given, refinements=refinements))
        assert result.pipeline == "sequential" and not notes_of(result)
        losses.append(lost(model, original))
        # What is stored is what was meant, and what the model has.
        (layer,) = result.layers
        compressor = BaseCompressor.get_value_from_registry(layer.scheme.format)
        restored = compressor.decompress(dict(layer.compressed), layer.scheme)["weight"]
        assert torch.equal(restored.float(), model.layers[0].weight.detach())
        tolerance = 2**-8 if restored.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(wanted[-1], restored.float(), rtol=tolerance, atol=1e-7)
    assert losses[0] < 0.55 * plain and losses[1] < 1.01 * losses[0]  # a little may be owed to the damping


@pytest.mark.parametrize("observer", ["optimal", "memoryless_mse", "imatrix_mse"])
@pytest.mark.parametrize("num_bits", [3, 4])
def test_any_observer_of_weights_will_do(observer, num_bits):
    given = {"weights": {**INT4, "num_bits": num_bits, "observer": observer}}
    original, nearest, model = one(), one(), one()
    quantised(nearest, QuantizationModifier(**given))
    result = quantised(model, GPTQModifier(**given))
    assert result.layers[0].observers == {"weight": observer} and not notes_of(result)
    assert lost(model, original) < 0.7 * lost(nearest, original)


def test_scales_are_weighted_by_the_strength_of_inputs(monkeypatch):
    seen: list[Tensor] = []
    observe = GPTQLayer.observe_weight

    def look(self: GPTQLayer, **given: Any) -> None:
        observe(self, **given)
        seen.append(self.importance.channel_importance)

    monkeypatch.setattr(GPTQLayer, "observe_weight", look)
    quantised(one(), GPTQModifier(weights={**INT4, "observer": "imatrix_mse"}))
    with torch.no_grad():
        expected = one().embed(IDS).flatten(0, 1).square().mean(dim=0)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("refinements", [0, 2])
def test_scales_may_be_negative(refinements):
    model, original = one(), one()
    with torch.no_grad():
        for each in (model, original):  # the largest values are positive, for which a negative scale has one code more
            each.layers[0].weight[::2] = each.layers[0].weight[::2].abs()
    given = {"weights": INT4, "weight_observer": {"name": "optimal", "signed": True}, "refinements": refinements}
    (layer,) = quantised(model, GPTQModifier(**given)).layers
    negative = layer.compressed["weight_scale"] < 0
    assert bool(negative[::2].any()) and not bool(negative.all())
    positive = one()
    positive.layers[0].weight.data.copy_(original.layers[0].weight)
    quantised(positive, GPTQModifier(weights=INT4, refinements=refinements))
    assert lost(model, original) < lost(positive, original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4 group", "int8 channel affine", "FP8", "NVFP4A16", "MXFP4"])
def test_models_in_16_bits(name, dtype, wanted):
    given = {**FORMATS[name], "weight_observer": "memoryless_minmax"}
    original, nearest, model = (one(dtype=dtype) for _ in range(3))
    quantised(nearest, QuantizationModifier(**given))
    result = quantised(model, GPTQModifier(**given, refinements=2, correction=0.5))
    assert model.layers[0].weight.dtype == dtype and not notes_of(result)
    assert lost(model, original) < 0.6 * lost(nearest, original)
    (layer,) = result.layers
    compressor = BaseCompressor.get_value_from_registry(layer.scheme.format)
    restored = compressor.decompress(dict(layer.compressed), layer.scheme)["weight"]
    assert torch.equal(restored.to(dtype), model.layers[0].weight)
    assert float((wanted[0].to(restored.dtype) == restored).float().mean()) > 0.995


# ---- refining and making up for losses -------------------------------------------------------------------------------


def test_each_refinement_loses_less():
    original, losses = one(), []
    for refinements in range(4):
        model = one()
        given = {"weights": {**INT4, "num_bits": 3, "observer": "memoryless_minmax"}, "dampening_frac": 1e-6}
        quantised(model, GPTQModifier(**given, refinements=refinements))
        losses.append(lost(model, original))
    assert losses[0] > losses[1] > losses[2] > losses[3] and losses[3] < 0.97 * losses[0]


def output_lost(model: Chain) -> float:
    with torch.no_grad():
        return float((model(IDS) - several()(IDS)).square().sum())


def test_a_share_of_what_earlier_layers_lost_is_made_up_for():
    given = {"weights": {"num_bits": 3, "strategy": "channel", "observer": "memoryless_minmax"}}
    losses = {}
    for correction in (0.0, 0.5, 1.0):
        model = several()
        result = quantised(model, GPTQModifier(**given, correction=correction))
        losses[correction] = output_lost(model)
        assert not notes_of(result)
    assert losses[0.5] < 0.95 * losses[0.0] and losses[1.0] < losses[0.5]


def test_the_first_layer_has_nothing_to_make_up_for():
    with_it, without = several(), several()
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    quantised(with_it, GPTQModifier(**given, correction=1.0))
    quantised(without, GPTQModifier(**given))
    assert torch.equal(with_it.layers[0].weight, without.layers[0].weight)
    assert not torch.equal(with_it.layers[1].weight, without.layers[1].weight)


def test_basic_knows_no_losses_and_says_so():
    model, again = several(), several()
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    result = quantised(model, GPTQModifier(**given, correction=0.5), pipeline="basic")
    assert result.pipeline == "basic"
    assert notes_of(result) == [
        "layers.0 and 2 more: what it would be given by the model as it was is not known, so it does not make up for "
        "what earlier layers lost."
    ]
    assert not notes_of(quantised(again, GPTQModifier(**given), pipeline="basic"))
    for one_layer, other in zip(model.layers, again.layers, strict=True):
        assert torch.equal(one_layer.weight, other.weight)


@pytest.mark.parametrize("pipeline", ["basic", "auto"])
def test_each_layer_loses_less_in_both_pipelines(pipeline):
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    nearest, model = several(), several()
    quantised(nearest, QuantizationModifier(**given), pipeline="data_free")
    quantised(model, GPTQModifier(**given), pipeline=pipeline)
    assert output_lost(model) < 0.6 * output_lost(nearest)


# ---- what cannot be done is said -------------------------------------------------------------------------------------


def test_channels_without_input_are_rounded_to_the_nearest():
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    dead = [3, 40, 41, 127]
    nearest, model = one(), one()
    for each in (nearest, model):
        each.embed.weight.data[:, dead] = 0
    quantised(nearest, QuantizationModifier(**given))
    result = quantised(model, GPTQModifier(**given))
    assert not notes_of(result)
    assert torch.equal(model.layers[0].weight[:, dead], nearest.layers[0].weight[:, dead])
    assert not torch.equal(model.layers[0].weight, nearest.layers[0].weight)


def test_where_all_inputs_are_zero_all_is_rounded_to_the_nearest():
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    nearest, model = one(), one()
    for each in (nearest, model):
        each.embed.weight.data.zero_()
    quantised(nearest, QuantizationModifier(**given))
    quantised(model, GPTQModifier(**given))
    assert torch.equal(model.layers[0].weight, nearest.layers[0].weight)


@pytest.mark.parametrize("name", ["int4 group", "int4 group affine", "int8 channel", "FP8", "NVFP4A16", "MXFP4"])
def test_rows_and_groups_of_zeros_stay_zeros(name):
    model = one()
    with torch.no_grad():
        model.layers[0].weight[3] = 0
        model.layers[0].weight[5, :32] = 0
    quantised(model, GPTQModifier(**FORMATS[name], refinements=2, correction=0.5))
    weight = model.layers[0].weight
    assert bool(weight.isfinite().all()) and not bool(weight[3].any())


def test_few_tokens_are_said():
    nearest, model = one(), one()
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    quantised(nearest, QuantizationModifier(**given))
    result = quantised(model, GPTQModifier(**given, correction=0.5, refinements=1), dataset=IDS[:1, :31])
    assert notes_of(result) == ["layers.0: saw 31 tokens, and GPTQ needs 32 or more. It was rounded to the nearest."]
    assert torch.equal(model.layers[0].weight, nearest.layers[0].weight)
    assert not notes_of(quantised(one(), GPTQModifier(**given), dataset=IDS[:1, :32]))


def test_more_damping_than_was_asked_for_is_said():
    result = quantised(one(), GPTQModifier(weights=INT4, dampening_frac=0), dataset=IDS[:1])  # 48 tokens, 128 channels
    (note,) = notes_of(result)
    words = "layers.0: its Hessian was not positive definite with dampening_frac 0, and got "
    assert note.startswith(words) and 0 < float(note.removeprefix(words).removesuffix(".")) <= 0.01
    assert not notes_of(quantised(one(), GPTQModifier(weights=INT4), dataset=IDS[:1]))


def test_a_hessian_that_cannot_be_factored_is_said(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("its Hessian is not positive definite, even with 1 of its mean added to it")

    monkeypatch.setattr(gptq_layer, "factor", fail)
    nearest, model = one(), one()
    given = {"weights": {**INT4, "observer": "memoryless_minmax"}}
    quantised(nearest, QuantizationModifier(**given))
    result = quantised(model, GPTQModifier(**given, correction=0.5))
    assert notes_of(result) == [
        "layers.0: its Hessian is not positive definite, even with 1 of its mean added to it. Give more, or other, "
        "samples. It was rounded to the nearest."
    ]
    assert torch.equal(model.layers[0].weight, nearest.layers[0].weight)


@pytest.mark.parametrize("observer", ["memoryless_minmax", "optimal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20])
def test_inputs_that_are_no_numbers_are_an_error(observer, value):
    model = one()
    model.embed.weight.data[5, 7] = value
    model.embed.weight.data[:, 9] = value
    with pytest.raises(NonFiniteError) as caught:
        quantised(model, GPTQModifier(weights={**INT4, "observer": observer}))
    assert str(caught.value) == (
        "layers.0: its input has NaN or Inf in it, or numbers too large to be squared in fp32. Mend the data."
    )


@pytest.mark.parametrize("correction", [0, 0.5])
def test_a_weight_that_is_no_number_is_found_where_it_stands(correction):
    model = several(2)
    model.layers[1].weight.data[3, 4] = math.nan
    with pytest.raises(
        NonFiniteError, match=r"^layers\.1\.weight: 1 NaN and 0 Inf among .* the first at index \(3, 4\)"
    ):
        quantised(model, GPTQModifier(weights=INT4, correction=correction))


# ---- whole models ----------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32, "observer": "memoryless_minmax"}


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=dtype).eval()


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(config).eval()


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """The calls of a function that layers use."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(gptq_layer, name)
    monkeypatch.setattr(gptq_layer, name, lambda *args, **given: (calls.append(args), function(*args, **given))[1])
    return calls


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_layers_with_the_same_input_share_their_hessian(pipeline, monkeypatch):
    products, factors = counting(monkeypatch, "add_outer_"), counting(monkeypatch, "factor")
    modifier = GPTQModifier(weights=GROUPS, ignore=["lm_head"])
    quantised(llama(), modifier, pipeline=pipeline, batch_size=2)
    # 4 batches, 2 blocks; q/k/v, o, gate/up, down, instead of seven
    assert (len(products), len(factors)) == (4 * 2 * 4, 2 * 4)
    products.clear()
    quantised(mixtral(), modifier, pipeline=pipeline, batch_size=2)
    assert len(products) == 4 * 2 * (2 + 1 + 4)  # all experts have one input


def test_what_was_lost_is_shared_too(monkeypatch):
    products, corrections = counting(monkeypatch, "add_outer_"), counting(monkeypatch, "corrected")
    quantised(llama(), GPTQModifier(weights=GROUPS, ignore=["lm_head"], correction=0.5), batch_size=2)
    # In each of two blocks: both sums of four inputs, and for two layers that of what their output is added to.
    assert (len(products), len(corrections)) == (2 * (4 * 2 + 2) * 4, 14)


def test_layers_of_which_one_makes_up_for_losses_and_the_other_not(monkeypatch):
    recipe = [
        GPTQModifier(weights=GROUPS, targets=["re:.*[kv]_proj"], correction=0.5),
        GPTQModifier(weights=GROUPS, targets=["re:.*[qo]_proj"]),
    ]
    corrections = counting(monkeypatch, "corrected")
    model, without = llama(), llama()
    assert not notes_of(quantised(model, recipe))
    assert len(corrections) == 4
    quantised(without, GPTQModifier(weights=GROUPS, targets=["re:.*self_attn.*_proj"]))
    names = [f"model.layers.1.self_attn.{each}_proj" for each in "qkv"]
    # The first block has nothing to make up for but in its last layer, which does not: it gives the same in both.
    same = [torch.equal(model.get_submodule(name).weight, without.get_submodule(name).weight) for name in names]
    assert same == [True, False, False]


def test_each_weight_is_searched_once(monkeypatch):
    search, searched = OptimalObserver.search, []
    monkeypatch.setattr(OptimalObserver, "search", lambda self, *args: (searched.append(1), search(self, *args))[1])
    modifier = GPTQModifier(scheme="NVFP4A16", ignore=["lm_head"], correction=0.5)
    assert not notes_of(quantised(llama(torch.bfloat16), modifier))
    assert len(searched) == 14  # although q, k and v, and gate and up, share a scale that comes from all of them


def test_padding_changes_nothing(monkeypatch):
    found: list[list[Tensor]] = []

    def note(hessian_CC: Tensor, **given: Any) -> Any:
        found[-1].append(hessian_CC.triu())
        return factor(hessian_CC, **given)

    monkeypatch.setattr(gptq_layer, "factor", note)
    lengths = [10, 33, 48, 7, 20, 48, 31, 15]
    samples = [row[:length] for row, length in zip(IDS, lengths, strict=True)]
    for batch_size, is_masked in ((8, True), (1, True), (8, False)):
        model = llama()
        model.model.embed_tokens.weight.data[0] = 0
        model.model.embed_tokens.weight.data[0, 5] = 40
        found.append([])
        modifier = GPTQModifier(weights=GROUPS, ignore=["lm_head"])
        with monkeypatch.context() as patch:
            if not is_masked:
                patch.setattr(Masks, "of", lambda *_: None)
            quantised(model, modifier, dataset=samples, batch_size=batch_size, pipeline="basic")
    padded, alone, unmasked = found
    assert len(padded) == len(alone) == len(unmasked) == 8  # q, k and v share one, as gate and up do
    for hessian, by_itself, without_masks in zip(padded, alone, unmasked, strict=True):
        scale = float(hessian.abs().max())
        torch.testing.assert_close(hessian / scale, by_itself / scale, rtol=1e-3, atol=1e-4)
        assert float((hessian - without_masks).abs().max()) > 0.1 * scale


def test_an_expert_with_few_tokens_is_named_and_rounded_to_the_nearest():
    def routed() -> nn.Module:
        model = mixtral()
        with torch.no_grad():
            for block in model.model.layers:
                block.mlp.gate.weight[2:] *= 0.3  # they are chosen by few
        return model

    model, nearest = routed(), routed()
    modifier = GPTQModifier(weights=GROUPS, ignore=["lm_head"])
    result = quantised(model, modifier, dataset=IDS[:1], moe_calibrate_all_experts=False)
    few = [
        note
        for note in notes_of(result)
        if note.endswith(" tokens, and GPTQ needs 32 or more. It was rounded to the nearest.")
    ]
    assert few and all(".mlp.experts." in note for note in few)
    quantised(nearest, QuantizationModifier(weights=GROUPS, ignore=["lm_head"]))
    named = {note for layer in result.layers for note in layer.notes}
    names = {note.partition(":")[0] for note in named if "GPTQ needs 32" in note}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".experts." in name:
            is_nearest = torch.equal(module.weight, nearest.get_submodule(name).weight)
            assert is_nearest == (name in names), name
    shown_all = quantised(routed(), modifier, dataset=IDS[:1])
    assert not [note for note in notes_of(shown_all) if "GPTQ needs 32" in note]


KV = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_several_modifiers_share_a_stage(correction, tmp_path):
    recipe = [
        GPTQModifier(weights=GROUPS, targets=["re:.*mlp.*_proj"], correction=correction, refinements=1),
        QuantizationModifier(weights=GROUPS, targets=["re:.*self_attn.*_proj"], kv_cache_scheme=KV),
    ]
    model, nearest = llama(), llama()
    result = quantised(model, recipe, output_dir=tmp_path / "out")
    assert (result.pipeline, notes_of(result)) == ("sequential", [])
    assert result.why == "GPTQModifier rounds each layer for what the quantised layers before it really give it"
    quantised(nearest, QuantizationModifier(weights=GROUPS, ignore=["lm_head"]), pipeline="data_free")
    for name, module in nearest.named_modules():
        if name.endswith("_proj"):
            is_same = torch.equal(module.weight, model.get_submodule(name).weight)
            assert is_same == ("self_attn" in name), name
    assert all(float(block.self_attn.k_scale) > 0 for block in model.model.layers)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "NVFP4", "MXFP4A16"])
def test_what_is_written_is_read_back(scheme, tmp_path):
    model = llama(torch.bfloat16)
    group = {"group_size": 32} if scheme == "W4A16" else {}
    modifier = GPTQModifier(scheme=scheme, **group, ignore=["lm_head"], correction=0.5, refinements=1)
    quantised(model, modifier, output_dir=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_the_table_has_what_a_layer_gains(monkeypatch):
    monkeypatch.undo()
    (layer,) = quantised(one(), GPTQModifier(weights=INT4)).layers
    assert layer.gain_db > 3 and layer.output_db > layer.weight_db and layer.above_optimum is None


def test_a_factor_is_that_of_all_tokens_that_were_added():
    """Also of those that come when a layer with the same input has been rounded already."""
    hessian = Hessian(8, torch.device("cpu"), with_cross=False)
    hessian.roundings.add(Rounding(refinements=1))  # who rounds so wants all of it, so that it stays
    for seed in range(2):
        hessian.add(Shown(torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))), None)
        found = hessian.factor(Rounding(is_ordered=False))
        torch.testing.assert_close(found.upper_CC @ found.upper_CC.T, hessian.matrix + torch.diag(found.added_C))


@pytest.mark.parametrize(
    ("roundings", "stays"),
    [
        ([Rounding()], False),
        ([Rounding(), Rounding(block_size=32)], False),  # one factor does for both
        ([Rounding(), Rounding(refinements=1)], True),
        ([Rounding(), Rounding(damping=0.1)], True),
    ],
)
def test_a_hessian_goes_with_its_factor_unless_somebody_wants_more_of_it(roundings, stays):
    hessian = Hessian(8, torch.device("cpu"), with_cross=False)
    hessian.roundings.update(roundings)
    hessian.add(Shown(torch.randn(64, 8, generator=torch.Generator().manual_seed(0))), None)
    strengths = hessian.strengths.clone()
    found = hessian.factor(roundings[0])
    assert all((hessian.factor(each) is found) is (each.damping == found.damping) for each in roundings)
    assert torch.equal(hessian.strengths, strengths)
    assert (hessian._sum_CC is not None) is stays
