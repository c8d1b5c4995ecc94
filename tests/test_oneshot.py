"""oneshot: what it refuses, and what it says of a run that a user should know."""

import json
import re

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from scalewright import GPTQModifier, QuantizationModifier, oneshot
from scalewright.checkpoint.verifying import verify_checkpoint
from scalewright.errors import (
    CalibrationError,
    DataError,
    ModelError,
    OutputError,
    RecipeError,
    ScalewrightError,
    StrictError,
)
from scalewright.modifiers.schemes import scheme_named, scheme_names
from scalewright.planning import plan_of

IDS = torch.randint(0, 96, (8, 24), generator=torch.Generator().manual_seed(1))


def tiny_llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Flat(nn.Module):
    """An embedding and two linear layers, of which the second is left out where no token is 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(input_ids))
        return self.second(hidden) if bool((input_ids == 1).any()) else hidden


def refused(kind: type[ScalewrightError], model: object = None, **keywords: object) -> str:
    with pytest.raises(kind) as caught:
        oneshot(Flat() if model is None else model, **keywords)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_module_that_takes_no_mask_is_given_none():
    with_one = torch.cat([torch.ones(8, 1, dtype=torch.int64), IDS], dim=1)
    result = oneshot(Flat(), scheme="W8A8", dataset=[row[: 4 + i] for i, row in enumerate(with_one)], batch_size=8)
    by_hand = oneshot(Flat(), scheme="W8A8", dataset=[row[: 4 + i] for i, row in enumerate(with_one)], batch_size=1)
    assert [layer.name for layer in result.layers] == ["first", "second"]
    torch.testing.assert_close(result.model.first.input_scale, by_hand.model.first.input_scale)


@pytest.mark.parametrize("observer", ["minmax", "mse", "static_minmax", "balanced_mse"])
def test_scales_of_activations_do_not_depend_on_the_size_of_batches(observer):
    inputs = {"num_bits": 8, "strategy": "tensor", "observer": observer}
    recipe = QuantizationModifier(targets=["Linear"], weights={"num_bits": 8}, input_activations=inputs)
    rows = [row[: 4 + i] for i, row in enumerate(IDS)]  # the rest of a batch is padding

    def scale(batch_size: int) -> torch.Tensor:
        found = oneshot(tiny_llama(), recipe=recipe, dataset=rows, batch_size=batch_size).model
        return found.get_submodule("model.layers.0.self_attn.q_proj").input_scale

    torch.testing.assert_close(scale(8), scale(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(scale(3), scale(1), rtol=1e-6, atol=0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_recipe_and_a_scheme_say_it_once():
    both = refused(RecipeError, recipe=QuantizationModifier(scheme="W4A16"), scheme="W4A16")
    assert both == "a recipe and a scheme both say what to do. Keep one of them."
    assert refused(RecipeError) == "nothing says what to do. Give a recipe or a scheme."


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_pipeline_that_runs_data_needs_some(pipeline):
    message = refused(DataError, scheme="W8A8_DYNAMIC", pipeline=pipeline)
    assert message == f"the {pipeline} pipeline runs data through the model. Give a dataset."


def test_static_scales_need_data():
    words = (
        "the recipe has static activation scales, which are found by watching data. Give a dataset, or use a scheme "
    )
    assert refused(DataError, scheme="W8A8") == f"{words}with dynamic activations."
    message = refused(DataError, scheme="W8A8", dataset=IDS, pipeline="data_free")
    assert message == (
        "the recipe has static activation scales, so it cannot be run data_free. Leave the pipeline out, or make them "
        "dynamic."
    )


def test_blocks_that_are_not_there_are_named():
    keywords = {"scheme": "W8A8", "dataset": [{"input_ids": torch.ones_like(IDS)}], "pipeline": "sequential"}
    assert refused(ModelError, **keywords) == (
        "no repeated blocks were found in this model. Name them in sequential_targets, or use basic."
    )
    message = refused(ModelError, **keywords, sequential_targets="Block")
    assert message == "sequential_targets: 'Block' matches no module. Name blocks by class, name or pattern."
    assert oneshot(Flat(), **keywords, sequential_targets=["first", "second"]).pipeline == "sequential"


def test_text_needs_a_tokenizer():
    message = refused(DataError, scheme="W8A8", dataset=["Once upon a time"])
    assert message == "data: there is text in it, and no tokenizer. Give a tokenizer, or token ids."


def test_a_layer_that_saw_nothing_is_named():
    ids = [{"input_ids": IDS + (IDS == 1)}]
    assert refused(CalibrationError, scheme="W8A8", dataset=ids) == (
        "second: saw 0 tokens in calibration, so it has no input scale. Add samples, make its activations dynamic, or "
        "ignore it."
    )


class Router(nn.Linear):
    """Gives more than one tensor, as routers of mixtures of experts do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return scores, scores.argmax(dim=-1)


class Routed(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(64, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids)
        scores, _ = self.router(hidden)
        return hidden * scores.amax(dim=-1, keepdim=True)


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "W8A8_DYNAMIC"])
def test_a_linear_layer_that_gives_several_tensors_is_quantised(scheme):
    result = oneshot(Routed(), scheme=scheme, dataset=[{"input_ids": torch.ones_like(IDS)}])
    found = {layer.name: layer for layer in result.layers}
    assert found["router"].weight_db > 20
    assert found["router"].output_db is None, "there is no one output to be measured"


def test_a_device_without_values_is_refused():
    message = refused(ModelError, scheme="W8A8_DYNAMIC", device="meta")
    assert message == "device: 'meta' cannot be used here (it has no values). Use cpu, or leave it out."


def test_a_device_that_is_not_there_is_refused():
    message = refused(ModelError, scheme="W8A8_DYNAMIC", device="nowhere")
    assert message.startswith("device: 'nowhere' cannot be used here (")
    assert message.endswith("). Use cpu, or leave it out.")


def test_a_dtype_that_models_are_not_in_is_refused():
    message = refused(ModelError, "nowhere", scheme="W8A8_DYNAMIC", dtype="bfloat61")
    assert message == "dtype: there is no 'bfloat61'. Did you mean 'bfloat16'? Use auto, float32, bfloat16, float16."


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_model_object_becomes_the_dtype_that_is_asked_for(dtype):
    angles = tiny_llama().model.rotary_emb.inv_freq
    result = oneshot(tiny_llama(), scheme="FP8_DYNAMIC", dtype=dtype)
    assert torch.equal(result.model.model.rotary_emb.inv_freq, angles), "no loader would round them"
    assert {each.dtype for each in result.model.parameters() if each.ndim == 2 and each.shape[1] > 1} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("field", ["targets", "ignore"])
def test_what_matches_nothing_is_refused_if_strict(field):
    given = {"targets": ["Linear"], "ignore": []}
    recipe = QuantizationModifier(scheme="W8A8_DYNAMIC", **{**given, field: [*given[field], "third"]})
    note = f"{field}: 'third' matches no module."
    assert oneshot(Flat(), recipe=recipe).notes == [note]
    assert refused(StrictError, recipe=recipe, strict=True) == note


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_layer_that_loses_by_static_scales_is_named_with_what_would_not():
    model = Flat()
    with torch.no_grad():
        model.embed.weight[2] *= 500  # loud, and not among the first tokens, by which outputs are judged
    quiet, loud = IDS.clamp(min=3), torch.full((1, 24), 2)
    for ids in (quiet, loud):
        ids[:, 0] = 1
    recipe = QuantizationModifier(scheme="W8A8", activation_observer="static_minmax")
    result = oneshot(model, recipe=recipe, dataset=[{"input_ids": ids} for ids in (quiet, loud)])
    notes = [note for note in result.notes if note.startswith("first: ")]
    figures = {layer.name: layer.output_db for layer in result.layers}
    static, _, dynamic = (
        notes[0]
        .removeprefix("first: its output keeps ")
        .partition(" dB with one static scale for all tokens, and would keep ")
    )
    assert float(static) == pytest.approx(figures["first"], abs=0.05) and float(static) < 20
    assert dynamic.endswith(" dB with W8A8_DYNAMIC.") and float(dynamic.split()[0]) > 35
    assert not any(
        "W8A8_DYNAMIC" in note for note in oneshot(Flat(), recipe=recipe, dataset=[{"input_ids": quiet}]).notes
    )


def with_a_loud_channel(times: float, *, is_made_up_for: bool) -> nn.Module:
    """A model one of whose hidden channels comes out of norms so many times as loud; weights may make up for it."""
    model: nn.Module = tiny_llama()
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, layers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[7] *= times
            for layer in layers if is_made_up_for else ():
                layer.weight.data[:, 7] /= times
    return model


@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
@pytest.mark.parametrize("is_made_up_for", [False, True])
def test_a_layer_whose_channels_drown_beside_a_loud_one_is_named_with_what_would_help(modifier, is_made_up_for):
    model = with_a_loud_channel(100, is_made_up_for=is_made_up_for)
    result = oneshot(model, recipe=modifier(scheme="W8A8", ignore=["lm_head"]), dataset=IDS)
    (layer,) = (each for each in result.layers if each.name == "model.layers.0.self_attn.q_proj")
    (note,) = (note for note in result.notes if note.startswith(f"{layer.name}: "))
    figures = re.fullmatch(
        rf"{layer.name}: half of its input channels keep less than (-?\d+\.\d) dB in INT8, beside channel 7, which is "
        r"(\d+) times as loud; its output keeps (\d+\.\d) dB, and would keep (\d+\.\d) dB with W8A8_DYNAMIC\. Leave "
        r"its inputs as they are \(W8A16: (\d+\.\d) dB\), use FP8, or ignore it\.",
        note,
    )
    assert figures is not None, note
    channels, times, static, dynamic, plain = map(float, figures.groups())
    assert channels < 10 and times > 50
    assert (static, dynamic) == pytest.approx((layer.output_db, layer.dynamic_db), abs=0.05)
    assert dynamic < static + 6 <= plain


@pytest.mark.parametrize("quality", ["balanced", "best"])
def test_a_layer_whose_channels_would_drown_is_smoothed(quality):
    result = oneshot(with_a_loud_channel(100, is_made_up_for=True), scheme="W8A8", quality=quality, dataset=IDS)
    (layer,) = (each for each in result.layers if each.name == "model.layers.0.self_attn.q_proj")
    assert layer.output_db > 30 and not any("channels keep less" in note for note in result.notes)


def test_channels_that_are_about_as_loud_as_each_other_are_not_spoken_of():
    for model, scheme in ((tiny_llama(), "W8A8"), (with_a_loud_channel(100, is_made_up_for=True), "FP8")):
        assert not any("channels" in note for note in oneshot(model, scheme=scheme, dataset=IDS).notes)


BF16_NOTE = (
    "dtype: transformers restores NVFP4 and MX weights in bfloat16, and this model is in {0}. "
    "Load the checkpoint with dtype=torch.bfloat16, or quantise it in bfloat16."
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4", "MXFP8"])
def test_formats_that_are_restored_in_bf16_are_loaded_in_it(scheme, dtype, tmp_path):
    note = BF16_NOTE.format(str(dtype).removeprefix("torch."))
    result = oneshot(tiny_llama(dtype), scheme=scheme, output_dir=tmp_path / "out")
    assert result.notes == [note]
    assert json.loads((tmp_path / "out" / "scalewright.json").read_text())["notes"] == [note]
    with pytest.raises(RuntimeError, match="same dtype"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=IDS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert loaded(input_ids=IDS).logits.isfinite().all()
    assert refused(StrictError, tiny_llama(dtype), scheme=scheme, strict=True) == note
    assert oneshot(tiny_llama(torch.bfloat16), scheme=scheme, strict=True).notes == []


@pytest.mark.parametrize("name", [name for name in scheme_names() if scheme_named(name).weights is not None])
def test_the_note_on_bf16_is_there_where_weights_are_restored_in_it(name):
    result = oneshot(tiny_llama(), scheme=name, dataset=IDS)
    layer = result.layers[0]
    compressor = BaseCompressor.get_value_from_registry(layer.scheme.format)
    restored = compressor.decompress(dict(layer.compressed), layer.scheme)["weight"]
    has_note = BF16_NOTE.format("float32") in result.notes
    assert has_note == (restored.dtype == torch.bfloat16)


def test_a_plan_has_the_note_too():
    recipe = QuantizationModifier(scheme="MXFP4", ignore=["lm_head"])
    assert plan_of(tiny_llama(), recipe).notes == [BF16_NOTE.format("float32")]
    assert plan_of(tiny_llama(), recipe, dtype="bfloat16").notes == []


def test_a_note_that_holds_for_several_stages_is_there_once():
    def stage(target: str) -> dict[str, object]:
        return {"modifiers": {"QuantizationModifier": {"scheme": "MXFP4", "targets": [target]}}}

    recipe = {"a_stage": stage("*.q_proj"), "b_stage": stage("*.k_proj")}
    assert oneshot(tiny_llama(), recipe=recipe).notes == [BF16_NOTE.format("float32")]


# ---- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["data_free", "basic", "sequential"])
def test_steps_count_up_to_the_end_and_name_all_layers(pipeline, tmp_path):
    steps: list[tuple[str, str, int, int]] = []
    dataset = None if pipeline == "data_free" else [{"input_ids": IDS[:4]}, {"input_ids": IDS[4:]}]
    result = oneshot(
        tiny_llama(),
        scheme="W4A16",
        recipe=None,
        dataset=dataset,
        pipeline=pipeline,
        output_dir=tmp_path / "out",
        on_step=lambda *step: steps.append(step),
    )
    by_phase = {phase: [step for step in steps if step[0] == phase] for phase, *_ in steps}
    assert list(by_phase) == ["loading", *["calibrating"] * (dataset is not None), "quantising", "writing"]
    assert {what for _, what, *_ in by_phase["quantising"]} == {layer.name for layer in result.layers}
    for phase, total in (("calibrating", IDS.numel()), ("quantising", 7)):
        found = by_phase.get(phase, [])
        done = [step[2] for step in found]
        assert done == sorted(done) and {step[3] for step in found} <= {total}
        assert not found or (done[0], done[-1]) == (0, total)


class Blocks(nn.Module):
    """Three blocks, of which the second is left out where no token is 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for i, block in enumerate(self.blocks):
            hidden = block(hidden) if i != 1 or bool((input_ids == 1).any()) else hidden
        return hidden


def test_steps_of_blocks_count_each_block_and_batch():
    steps: list[tuple[str, str, int, int]] = []
    half = IDS.numel() // 2
    oneshot(
        Blocks(),
        scheme="W8A8",
        dataset=[{"input_ids": torch.full((4, 24), token)} for token in (1, 2)],
        pipeline="sequential",
        sequential_targets="blocks.*",
        on_step=lambda *step: steps.append(step),
    )
    shown = [(what, done / half) for phase, what, done, _ in steps if phase == "calibrating"]
    batches = [("blocks.0", 0), ("blocks.0", 1), ("blocks.1", 2), ("blocks.2", 4), ("blocks.2", 5)]
    assert shown == [step for what, done in batches for step in ((what, done), (what, done + 1))]
    assert {total for phase, *_, total in steps if phase == "calibrating"} == {6 * half}


# ---- what is written ------------------------------------------------------------------------------------------------


def files_of(folder) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_a_checkpoint_is_the_same_when_it_is_written_and_when_it_is_saved_later(scheme, tmp_path):
    at_once = oneshot(tiny_llama(), scheme=scheme, dataset=IDS, output_dir=tmp_path / "at_once")
    later = oneshot(tiny_llama(), scheme=scheme, dataset=IDS).save(tmp_path / "later")
    copied = at_once.save(tmp_path / "copied")
    first = files_of(tmp_path / "at_once")
    assert first == files_of(copied) and first.keys() == files_of(later).keys()
    assert first["model.safetensors"] == (later / "model.safetensors").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["at_once", "copied", "later"]


def test_a_checkpoint_that_was_taken_away_cannot_be_copied(tmp_path):
    result = oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(OutputError) as caught:
        result.save(tmp_path / "second")
    assert str(caught.value) == (
        f"{tmp_path / 'second'}: the checkpoint was written to {tmp_path / 'first'}, and is not there any more. "
        "Run again to write it here."
    )
    assert [each.name for each in tmp_path.iterdir()] == ["moved"]


def test_weights_keep_their_place_in_memory_unless_they_share_it():
    model = tiny_llama()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    places = {name: each.weight.data_ptr() for name, each in layers.items()}
    whole = torch.randn(2, 128, 128)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(whole[0])
    oneshot(model, scheme="W8A8_DYNAMIC")
    for name, each in layers.items():
        if "q_proj" not in name:
            assert each.weight.data_ptr() == places[name], name
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() != whole.data_ptr()


class Shared(nn.Module):
    """A module that is there by two names, and an embedding whose weight the head shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 64)
        block = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([block, nn.Linear(64, 64), block])
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("targets", [["Linear"], ["blocks.0"], ["re:blocks.0$"]])
def test_a_module_that_is_there_by_two_names_is_stored_by_both(targets, tmp_path):
    recipe = QuantizationModifier(scheme="W8A8", targets=targets, ignore=["head"])
    result = oneshot(Shared(), recipe=recipe, dataset=IDS, output_dir=tmp_path / "out")

    assert verify_checkpoint(tmp_path / "out") == []
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["blocks.0.weight"].dtype == torch.int8
    for each in ("weight", "weight_scale", "input_scale", "bias"):
        torch.testing.assert_close(tensors[f"blocks.2.{each}"], tensors[f"blocks.0.{each}"], rtol=0, atol=0)
    torch.testing.assert_close(tensors["head.weight"], tensors["embed.weight"], rtol=0, atol=0)
    assert [layer.name for layer in result.layers].count("blocks.0") == 1


def test_the_second_name_of_a_module_is_no_name_for_a_recipe():
    notes = oneshot(Shared(), recipe=QuantizationModifier(scheme="W8A16", group_size=64, ignore=["blocks.2"])).notes

    assert "ignore: 'blocks.2' means blocks.2, which is blocks.0 by another name. Name that." in notes


FREE = "data: nothing is calibrated with it (data_free: {}). Leave it out, or use a recipe that looks at it."


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"scheme": "FP8_DYNAMIC"}, "weights are all there is to see"),
        ({"scheme": "W8A16", "quality": "fast"}, "weights are all there is to see"),
        ({"scheme": "W4A16", "pipeline": "data_free"}, "asked for"),
    ],
)
def test_data_that_nothing_looks_at_is_named_in_runs_and_plans(keywords, why):
    assert oneshot(tiny_llama(), dataset=IDS, **keywords).notes == [FREE.format(why)]
    assert refused(StrictError, tiny_llama(), dataset=IDS, **keywords, strict=True) == FREE.format(why)
    if "quality" not in keywords:
        scheme, *_ = keywords.values()
        plan = plan_of(
            tiny_llama(), QuantizationModifier(scheme=scheme), has_data=True, pipeline=keywords.get("pipeline", "auto")
        )
        assert FREE.format(why) in plan.notes


def test_data_that_is_looked_at_is_not():
    assert not any("nothing is calibrated" in note for note in oneshot(tiny_llama(), scheme="W4A16", dataset=IDS).notes)


def test_options_of_data_that_was_not_given_are_named():
    notes = oneshot(tiny_llama(), scheme="W4A16", column="text", batch_size=4).notes

    assert notes == ["batch_size, column: there is no data to use it for. Give some, or leave it out."]


def test_blocks_that_nothing_goes_through_are_named():
    note = "sequential_targets: the pipeline is {}, and goes through no blocks. Ask for sequential, or leave them out."
    blocks = {"sequential_targets": "LlamaDecoderLayer"}

    assert note.format("data_free") in oneshot(tiny_llama(), scheme="W4A16", **blocks).notes
    assert note.format("basic") in oneshot(tiny_llama(), scheme="W8A8", dataset=IDS, **blocks).notes
    assert (
        note.format("basic")
        in plan_of(tiny_llama(), QuantizationModifier(scheme="W8A8"), has_data=True, **blocks).notes
    )
    through = oneshot(tiny_llama(), scheme="W8A8", dataset=IDS, pipeline="sequential", **blocks)
    assert not any("sequential_targets" in each for each in through.notes)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_calibration_samples": "5"}, "num_calibration_samples: expected a whole number from 1 on, got '5'."),
        ({"batch_size": 1.5}, "batch_size: expected a whole number from 1 on, got 1.5."),
        ({"max_seq_length": 0}, "max_seq_length: is 0. Use 1 or more."),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5."),
        ({"split": "test"}, "data: has no splits. Leave split 'test' out."),
    ],
)
def test_numbers_of_data_that_are_none_are_refused(keywords, message):
    assert refused(DataError, scheme="W8A8", dataset=IDS, **keywords) == message


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("x", "seed: expected a whole number, got 'x'."),
        (None, "seed: expected a whole number, got None."),
        (2**64, f"seed: {2**64} is too large for a generator. Use one of up to 63 bits."),
    ],
)
def test_a_seed_that_no_generator_takes_is_refused_also_without_data(seed, message):
    assert refused(DataError, scheme="FP8_DYNAMIC", seed=seed) == message


def test_an_output_that_is_no_path_is_refused():
    message = refused(OutputError, scheme="FP8_DYNAMIC", output_dir=5)
    assert message == "output_dir: 5 is no path. Give the folder that the checkpoint is to go to."


@pytest.mark.parametrize("scheme", [5, ["W4A16"]])
def test_a_scheme_that_is_no_name_is_refused(scheme):
    assert refused(RecipeError, scheme=scheme).startswith(f"scheme: expected a name, got {scheme!r}. Schemes: FP8, ")


def test_a_pipeline_that_is_no_name_is_refused():
    message = refused(RecipeError, scheme="FP8_DYNAMIC", pipeline=None)
    assert message == "there is no pipeline 'None'. Pipelines: auto, data_free, basic, sequential."


@pytest.mark.parametrize("size", [-5, float("nan"), "8 XB"])
def test_memory_that_is_no_size_is_refused(size):
    message = refused(RecipeError, scheme="FP8_DYNAMIC", max_memory=size)
    assert message == f"max_memory: '{size}' is no size. Write it as 8GB or 512MiB."


def test_a_dtype_of_integers_is_refused():
    message = refused(ModelError, scheme="FP8_DYNAMIC", dtype=torch.int8)
    assert message.startswith("dtype: there is no 'int8'.")


@pytest.mark.parametrize("model", [5, None, object()])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(
        ModelError, match=rf"^model: {type(model).__name__} is none\. Give a module, a folder or a name"
    ):
        oneshot(model, scheme="FP8_DYNAMIC")


def test_a_model_without_values_is_refused():
    message = refused(ModelError, Flat().to("meta"), scheme="FP8_DYNAMIC")
    assert message == "embed.weight: is on the device meta, and has no values. Load the model with its weights."


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_a_weight_without_elements_is_named(shape):
    message = refused(ModelError, nn.Sequential(nn.Linear(*shape)), scheme="FP8_DYNAMIC")
    assert message == f"0.weight: has no elements ({shape[1]} x {shape[0]}). Ignore this layer."
