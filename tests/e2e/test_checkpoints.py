"""oneshot -> checkpoint -> transformers: the same log-probabilities as those of the model in memory."""

import json
from pathlib import Path

import pytest
import torch
from read_back import IN_BF16, assert_loads_to_the_same, log_probs, some_ids
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scalewright.errors import OutputError
from scalewright.modifiers.layers import WatchedLayer
from scalewright.oneshot import oneshot

BESIDE = Path(__file__).resolve().parents[3] / "shared"
STORIES, STORIES_TEXT = BESIDE / "models" / "stories15M", BESIDE / "data" / "tinystories_calib.txt"

FP8_KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
RECIPES = {
    "W4A16": {"scheme": "W4A16", "group_size": 32},
    "W4A16_ASYM": {"scheme": "W4A16_ASYM", "group_size": 32},
    "W3A16": {"scheme": "W3A16", "group_size": 32},
    "W4A8": {"scheme": "W4A8", "group_size": 32},
    "W8A16": {"scheme": "W8A16", "group_size": 32},
    "W8A8": {"scheme": "W8A8"},
    "W8A8_DYNAMIC": {"scheme": "W8A8_DYNAMIC"},
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "NVFP4": {"scheme": "NVFP4"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4": {"scheme": "MXFP4"},
    "MXFP8": {"scheme": "MXFP8"},
    "kv cache": {"kv_cache_scheme": FP8_KV_CACHE},
    "FP8 and kv cache": {"scheme": "FP8", "kv_cache_scheme": FP8_KV_CACHE},
    "mixed": {
        "config_groups": {"W8A8_DYNAMIC": ["re:.*self_attn.*"], "W8A16": ["*.down_proj"], "FP8_DYNAMIC": ["Linear"]}
    },
}

WEIGHTS_ALONE = {"W8A16", "W8A8_DYNAMIC", "FP8_DYNAMIC", "MXFP8", "mixed"}
"""Those for which no data is looked at: 8-bit weights are not weighted, and activations are dynamic."""


def recipe_of(name: str) -> dict:
    return {"modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], **RECIPES[name]}}}


def tiny_llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_reads_what_was_quantised_in_memory(name, tmp_path):
    dtype = torch.bfloat16 if name in IN_BF16 else torch.float32
    model = tiny_llama(dtype)
    before = log_probs(model, torch.tensor(some_ids(seed=2)))
    result = oneshot(model, recipe=recipe_of(name), dataset=some_ids(), output_dir=tmp_path / "out")
    assert_loads_to_the_same(
        result,
        tmp_path / "out",
        torch.tensor(some_ids(seed=2)),
        dtype=dtype,
        tolerance=0 if dtype.itemsize == 2 else 1e-5,
    )
    after = log_probs(result.model, torch.tensor(some_ids(seed=2)))
    assert not torch.equal(before, after), "nothing was quantised"


@pytest.mark.real_model
@pytest.mark.skipif(not STORIES.is_dir(), reason="the trained model stories15M does not lie beside the project")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("MXFP8", "W8A16", "W4A8", "mixed")])
def test_a_trained_model_is_read_as_it_was_quantised(name, tmp_path):
    dtype = torch.bfloat16 if name in IN_BF16 else torch.float32
    result = oneshot(
        STORIES,
        recipe=recipe_of(name),
        dataset=STORIES_TEXT,
        num_calibration_samples=8,
        max_seq_length=64,
        dtype=dtype,
        output_dir=tmp_path / "out",
    )
    ids = torch.tensor(some_ids(32000, rows=2, length=48, seed=3))
    assert_loads_to_the_same(result, tmp_path / "out", ids, dtype=dtype, tolerance=1e-3)
    assert result.num_samples == (0 if result.pipeline == "data_free" else 8)
    assert (result.pipeline == "data_free") == (name in WEIGHTS_ALONE)


def test_what_is_written_beside_the_weights(tmp_path):
    result = oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "recipe.yaml", "scalewright.json"} <= names
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["quantization_status"]) == ("int-quantized", "compressed")
    assert config["ignore"] == ["lm_head"]
    again = oneshot(tiny_llama(), recipe=tmp_path / "out" / "recipe.yaml")
    assert again.recipe == result.recipe
    saved = json.loads((tmp_path / "out" / "scalewright.json").read_text())
    assert len(saved["layers"]) == 14 and saved["layers"][0]["weight_db"] > 30


def test_the_stored_tensors_have_the_shapes_that_loaders_expect(tmp_path):
    oneshot(
        tiny_llama(torch.bfloat16),
        recipe={"modifiers": {"QuantizationModifier": {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}}},
        output_dir=tmp_path / "out",
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        found = {
            name.removeprefix("model.layers.0.mlp.down_proj."): (
                file.get_slice(name).get_dtype(),
                file.get_slice(name).get_shape(),
            )
            for name in file.offset_keys()
            if "layers.0.mlp.down_proj" in name
        }
    assert found == {
        "weight_packed": ("I32", [128, 32]),
        "weight_scale": ("BF16", [128, 8]),
        "weight_shape": ("I64", [2]),
    }


def test_a_shared_head_that_is_quantised_gets_a_weight_of_its_own(tmp_path):
    model = tiny_llama(tied=True)
    result = oneshot(
        model, recipe={"modifiers": {"QuantizationModifier": {"scheme": "W8A8_DYNAMIC"}}}, output_dir=tmp_path / "out"
    )
    assert result.notes == ["lm_head: shared its weight with model.embed_tokens, and has its own now."]
    ids = torch.tensor(some_ids(seed=2))
    assert_loads_to_the_same(result, tmp_path / "out", ids, dtype=torch.float32, tolerance=1e-5)


def test_an_embedding_can_be_quantised(tmp_path):
    recipe = {"modifiers": {"QuantizationModifier": {"scheme": {"W8A16": ["Embedding"]}, "group_size": 32}}}
    result = oneshot(tiny_llama(), recipe=recipe, output_dir=tmp_path / "out")
    assert [layer.name for layer in result.layers] == ["model.embed_tokens"]
    ids = torch.tensor(some_ids(seed=2))
    assert_loads_to_the_same(result, tmp_path / "out", ids, dtype=torch.float32, tolerance=1e-5)


def test_a_tied_head_stays_tied(tmp_path):
    result = oneshot(tiny_llama(tied=True), scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.offset_keys()
    ids = torch.tensor(some_ids(seed=2))
    assert_loads_to_the_same(result, tmp_path / "out", ids, dtype=torch.float32, tolerance=1e-5)


def test_settings_of_generation_are_written_as_they_were_read(tmp_path):
    """Many models have a temperature and no do_sample, which transformers reads and does not save."""
    tiny_llama().save_pretrained(tmp_path / "model")
    settings = {"temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    oneshot(tmp_path / "model", scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in settings} == settings


def test_a_folder_that_is_there_is_left_alone_unless_it_may_be_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists already and is not empty"):
        oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=out)
    assert (out / "mine.txt").read_text() == "precious"
    oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=out, overwrite=True)
    assert not (out / "mine.txt").exists() and (out / "config.json").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["model", ".", "link"])
def test_a_folder_that_holds_the_model_is_not_replaced(place, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(OutputError, match="the model is in it, and would be lost") as caught:
        oneshot(tmp_path / "model", scheme="W8A8_DYNAMIC", output_dir=tmp_path / place, overwrite=True)
    assert str(caught.value).startswith(f"{tmp_path / place}: ")
    assert (tmp_path / "model" / "model.safetensors").exists()
    oneshot(tmp_path / "model", scheme="W8A8_DYNAMIC", output_dir=tmp_path / "model" / "out.json")
    assert (tmp_path / "model" / "out.json" / "config.json").exists()


@pytest.mark.parametrize("place", [".", "..", "../here"])
def test_the_folder_that_one_is_in_is_not_replaced(place, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="you are in it, and it would be replaced"):
        oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=place, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["here"] and not any((tmp_path / "here").iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_as_output_stays_one(is_there, tmp_path):
    target = tmp_path / "disk" / "there"
    (target if is_there else target.parent).mkdir(parents=True)
    (tmp_path / "out").symlink_to(target)
    oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and (target / "config.json").exists()
    assert [each.name for each in target.parent.iterdir()] == ["there"]


def test_a_place_that_can_be_no_folder_is_refused_before_any_work(tmp_path):
    script = tmp_path / "script"
    script.touch(mode=0o755)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, reason in {
        "x" * 300: r"cannot be a folder \(File name too long\)",
        "x" * 250: r"cannot be a folder \(File name too long\)",
        "loop": "cannot be a folder",
        "script/out": "script cannot be written to",
    }.items():
        with pytest.raises(OutputError, match=reason):
            oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=tmp_path / place)


def test_a_run_whose_writing_failed_goes_on_and_computes_nothing_again(tmp_path, monkeypatch):
    def fail(*args, **keywords):
        raise OSError("the disk is full")

    def quantise(name: str) -> dict[str, bytes]:
        oneshot(tiny_llama(), scheme="W8A8_DYNAMIC", output_dir=tmp_path / name)
        return {each.name: each.read_bytes() for each in (tmp_path / name).iterdir()}

    whole = quantise("whole")
    with monkeypatch.context() as broken:
        broken.setattr(LlamaForCausalLM, "save_pretrained", fail)
        with pytest.raises(OutputError, match=r"cannot be written \(the disk is full\)"):
            quantise("out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.partial", "whole"]
    monkeypatch.setattr(WatchedLayer, "finish", fail)
    assert quantise("out") == whole
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "whole"]
