"""What is kept of a layer's values: histograms that add up, ranges that are those of the stored scales, tokens."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from scalewright.modifiers.pictures import NUM_BINS, PER_RATIO, Seen, input_picture, weight_picture
from scalewright.modifiers.schemes import scheme_named
from scalewright.modifiers.shown import Shown
from scalewright.observers import make_observer
from scalewright.oneshot import oneshot

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
IDS = torch.randint(0, 96, (6, 20), generator=torch.Generator().manual_seed(1))
FORMATS = {
    "int4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4 affine": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int8 of one scale": {"num_bits": 8, "strategy": "tensor"},
    "fp8 blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "nvfp4": scheme_named("NVFP4").weights.model_dump(),
    "mxfp4": scheme_named("MXFP4").weights.model_dump(),
}


def some_weight(*, rows: int = 48) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(3))


def make_observer_named(fmt: str, observer: str):
    return make_observer("weight", QuantizationArgs(**FORMATS[fmt]).model_copy(update={"observer": observer}))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_histogram_has_every_value_of_the_sample(fmt):
    weight = some_weight()
    args = QuantizationArgs(**FORMATS[fmt])
    found = weight_picture(weight, args, make_observer("weight", args)(weight).get_qparams())
    assert len(found["counts"]) == NUM_BINS
    assert found["below"] + sum(found["counts"]) + found["above"] == weight[::2].numel()
    assert found["min"] <= found["from"] < found["to"] <= found["max"]
    width = (found["to"] - found["from"]) / NUM_BINS
    centres = torch.tensor([found["from"] + (number + 0.5) * width for number in range(NUM_BINS)])
    counts = torch.tensor(found["counts"])
    assert abs(float((counts * centres).sum() / counts.sum())) < 0.1
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_of_min_max_are_all_of_min_maxs_size(fmt):
    weight = some_weight()
    observer = make_observer_named(fmt, "memoryless_minmax")
    found = weight_picture(weight, observer.args, observer(weight).get_qparams())
    if fmt == "int8 of one scale":
        assert found["ratios"] is None and found["typical"] is None
    else:
        assert found["ratios"][PER_RATIO] == sum(found["ratios"]) > 1


@pytest.mark.parametrize("fmt", ["int4", "int4 affine", "int8", "int8 of one scale"])
def test_the_chosen_range_is_what_the_stored_scales_can_hold(fmt):
    weight = some_weight()
    args = QuantizationArgs(**FORMATS[fmt])
    qparams = make_observer("weight", args)(weight).get_qparams()
    found = weight_picture(weight, args, qparams)
    half = 2 ** (args.num_bits - 1)
    rows = slice(None) if fmt == "int8 of one scale" else torch.linspace(0, 47, 48).long()[::2]
    scale, point = qparams["scale"][rows], qparams["zero_point"][rows].float()
    ends = [float(((-half - point) * scale).min()), float(((half - 1 - point) * scale).max())]
    assert found["chosen"] == pytest.approx(ends, rel=1e-4)


def test_a_negative_scale_turns_its_range_round():
    args = QuantizationArgs(**FORMATS["int4"])
    scale = torch.full((48, 2), -0.5)
    found = weight_picture(
        some_weight(), args, {"scale": scale, "zero_point": torch.zeros_like(scale), "global_scale": None}
    )
    assert (found["chosen"], found["typical"]) == ([-3.5, 4.0], [-3.5, 4.0])


@pytest.mark.parametrize("value", [0.0, 3.0, -1e38, 1e-45], ids=str)
@pytest.mark.parametrize("fmt", ["int4", "int4 affine", "int8 of one scale"])
def test_strange_weights_have_pictures_too(fmt, value):
    weight = torch.full((48, 64), value)
    weight[0, 0] = -value
    args = QuantizationArgs(**FORMATS[fmt])
    found = weight_picture(weight, args, make_observer("weight", args)(weight).get_qparams())
    assert found["below"] + sum(found["counts"]) + found["above"] == weight[::2].numel()
    assert "Infinity" not in json.dumps(found) and "NaN" not in json.dumps(found)


def test_inputs_show_the_ends_of_all_tokens_and_the_static_range():
    seen, sample = Seen(), torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    seen.look(Shown(sample.reshape(2, 20, 64)))
    seen.look(Shown(torch.full((1, 1, 64), 50.0)))
    args = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False)
    qparams = {"scale": torch.tensor([0.02]), "zero_point": torch.tensor([0]), "global_scale": None}
    found = input_picture(sample, seen, args, qparams)
    assert (found["max"], found["chosen"], seen.num_tokens) == (50.0, [-2.56, 2.54], 41)
    assert found["to"] < 10
    assert input_picture(sample, seen, None, None)["chosen"] is None
    sample[0, 0] = float("nan")
    assert input_picture(sample, seen, args, qparams) is None


def test_the_range_under_a_global_scale_is_the_widest_that_there_is():
    args = scheme_named("NVFP4").input_activations
    seen, sample = Seen(), torch.randn(40, 64)
    seen.look(Shown(sample))
    qparams = {"scale": torch.ones(1), "zero_point": torch.zeros(1), "global_scale": torch.tensor([448 * 6 / 5.0])}
    assert input_picture(sample, seen, args, qparams)["chosen"] == [-5.0, 5.0]


def test_masked_tokens_and_those_of_other_experts_do_not_count():
    seen = Seen()
    value, mask = torch.arange(4.0).reshape(1, 4, 1), torch.tensor([[1, 1, 0, 1]])
    seen.look(Shown(value[:, :3], mask[:, :3]))
    assert (seen.num_tokens, seen.low, seen.high) == (2, 0.0, 1.0)
    seen.look(Shown(value, mask), torch.tensor([1, 2]))
    assert (seen.num_tokens, seen.high) == (3, 3.0)
    seen.look(Shown(value, None), torch.tensor([1, 2]))
    assert seen.num_tokens == 5
    seen.look(Shown(value, torch.zeros(1, 4)))
    assert (seen.num_tokens, seen.high) == (5, 3.0)


def test_a_run_without_data_has_pictures_of_weights_alone():
    torch.manual_seed(0)
    result = oneshot(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), scheme="W8A8_DYNAMIC")
    assert {tuple(layer.pictures) for layer in result.layers} == {("weight",)}
    assert {layer.num_tokens for layer in result.layers} == {None}


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_experts_know_how_many_tokens_chose_them_whether_or_not_they_see_all(pipeline):
    def counts(*, shows_all: bool) -> dict[str, int]:
        torch.manual_seed(0)
        config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        result = oneshot(
            AutoModelForCausalLM.from_config(config),
            recipe={"modifiers": {"QuantizationModifier": {"scheme": "FP8", "ignore": ["lm_head"]}}},
            dataset=[{"input_ids": each} for each in (IDS[0].tolist(), IDS[1, :12].tolist())],
            batch_size=2,
            pipeline=pipeline,
            moe_calibrate_all_experts=shows_all,
        )
        return {layer.name: layer.num_tokens for layer in result.layers}

    seeing_all, seeing_own = counts(shows_all=True), counts(shows_all=False)
    experts = {name: count for name, count in seeing_all.items() if ".experts." in name}
    assert len(experts) == 24 and len(set(experts.values())) > 1
    assert sum(experts.values()) == 3 * 2 * 2 * 32  # projections, layers, experts of a token, tokens without padding
    if pipeline == "basic":
        assert seeing_own == seeing_all
    assert {count for name, count in seeing_all.items() if "self_attn" in name} == {32}
