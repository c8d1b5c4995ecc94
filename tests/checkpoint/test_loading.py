"""Models of strangers: what is not to be loaded is refused in words, before anybody else reads it."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright import oneshot
from scalewright.checkpoint.loading import empty_model, load_model
from scalewright.checkpoint.reading import load_checkpoint
from scalewright.errors import ModelError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    where = {name: file for file, own in files.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "model")


def refused(folder, load=load_model) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    return str(caught.value)


def change(file, **entries):
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_a_sound_model_is_loaded(folder):
    assert next(load_model(folder).parameters()).device.type == "cpu"
    assert next(empty_model(folder).parameters()).device.type == "meta"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
@pytest.mark.parametrize("load", [load_model, load_checkpoint, empty_model])
def test_pickled_weights_are_never_read(name, load, folder, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was loaded"))
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / name).write_bytes(b"\x80\x04.")
    assert refused(folder, load) == (
        f"{folder}: its weights are in {name}, and reading pickled files can run code that is hidden in them. Save the "
        "model as safetensors where you trust it: from_pretrained(...).save_pretrained(FOLDER)."
    )


def test_pickled_weights_beside_others_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was loaded"))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    load_model(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(name, folder):
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    change(folder / INDEX, weight_map=where | {"model.norm.weight": name})
    assert refused(folder) == (
        f"{folder}: {INDEX}: names the file '{name}', which is outside of the folder. It is not looked at."
    )


def test_an_index_that_makes_no_sense_is_named(folder):
    change(folder / INDEX, weight_map=[1])
    assert refused(folder) == f"{folder}: {INDEX}: has no weight_map that names a file for each tensor."
    (folder / INDEX).write_text("{")
    assert refused(folder).startswith(f"{folder}: {INDEX}: is no JSON")


def test_a_file_that_is_missing_or_cut_is_named(folder):
    whole = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(whole[:-100])
    assert refused(folder).startswith(f"{folder / FIRST}: is cut short: ")
    (folder / FIRST).write_bytes(b"\xff" * 100)
    assert refused(folder).startswith(f"{folder / FIRST}: has 100 bytes, and says that its header alone takes ")
    (folder / FIRST).unlink()
    assert refused(folder).startswith(f"{folder}: {FIRST}: is missing; by {INDEX} it has the tensors of ")


def test_a_configuration_of_more_layers_than_there_are_tensors_is_refused_at_once(folder):
    change(folder / "config.json", num_hidden_layers=10**8)
    for load in (load_model, load_checkpoint, empty_model):
        assert refused(folder, load).startswith(
            f"{folder / 'config.json'}: num_hidden_layers is 100000000, and there are "
        )


@pytest.mark.parametrize(
    "where",
    [
        {"ignore": ["re:(.*)*!"]},
        {"config_groups": {"group_0": {"targets": ["Linear", "re:(.*)*!"]}}},
        {"transform_config": {"config_groups": {"a": {"apply": [{"targets": ["re:(.*)*!"]}]}}}},
    ],
)
def test_a_pattern_that_a_loader_would_never_be_done_with_is_named(where, folder):
    change(folder / "config.json", quantization_config={"quant_method": "compressed-tensors", **where})
    assert re.fullmatch(
        rf"{re.escape(str(folder / 'config.json'))}: 're:\(\.\*\)\*!' takes longer than 1 s to compare with '[\w.]+'\. "
        "Write it without repeats inside of repeats.",
        refused(folder, load_checkpoint),
    )


@pytest.mark.parametrize(
    "entries",
    [
        {"vocab_size_per_layer_input": 262_144},  # Gemma 3n
        {"shared_expert_intermediate_size": 5632},  # Qwen1.5-MoE-A2.7B, which has 4659 tensors
        {"expert_ffn_hidden_size": 8192, "block_size": 8192, "share_expert_dim": 8192},
        {"depthwise_separable_out_channel": 8192},
        {"num_experts": 16_384},  # Doge, whose experts are the rows of one tensor
    ],
)
def test_sizes_of_parts_are_not_their_number(entries, folder):
    change(folder / "config.json", **entries)
    load_model(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"intermediate_size": -1},
        {"hidden_size": 60},
        {"model_type": "nothing"},
        {"model_type": 3},
        {"architectures": 3},
        {"rope_scaling": 3},
        {"dtype": "float3"},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("load", [load_model, empty_model])
def test_whatever_a_configuration_says_there_is_no_other_error(entries, load, folder):
    change(folder / "config.json", **entries)
    said = f"{folder}: cannot be loaded ("
    try:
        load(folder)
    except ModelError as error:
        said = str(error)
    assert said.startswith(f"{folder}: cannot be loaded (") and "\n" not in said


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "{", '{"model_type": ' + "[" * 100000])
def test_a_configuration_that_is_none_is_refused(text, folder):
    (folder / "config.json").write_text(text)
    assert refused(folder).startswith(f"{folder}: cannot be loaded (")


def test_a_link_that_leads_nowhere_does_no_harm_where_nobody_reads_it(folder, tmp_path):
    (folder / "extra.json").symlink_to("nowhere")
    oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to("nowhere")
    with pytest.raises(ModelError, match=f"{FIRST}: is missing"):
        oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "other")


@pytest.mark.parametrize("text", ["garbage", "{}", "[" * 100_000, ""])
def test_a_tokenizer_that_cannot_be_loaded_is_a_note(text, folder, tmp_path):
    assert oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "none").notes == []
    (folder / "tokenizer.json").write_text(text)
    result = oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    assert result.notes == [f"{folder / 'tokenizer.json'}: cannot be loaded, so the checkpoint has no tokenizer."]


def test_a_name_that_no_file_system_takes_is_no_model(tmp_path):
    with pytest.raises(ModelError, match="there is no such folder"):
        oneshot("x" * 300, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")


def test_a_model_that_lacks_a_tensor_is_not_quantised(folder, tmp_path):
    tensors = load_file(folder / FIRST)
    lost = next(name for name in tensors if "proj" in name)
    save_file({name: each for name, each in tensors.items() if name != lost}, folder / FIRST, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        oneshot(folder, scheme="FP8_DYNAMIC", output_dir=tmp_path / "out")
    assert str(caught.value) == (
        f"{folder}: lacks 1 of its tensors ({lost}), and would have random numbers instead. Give a whole model."
    )


def test_tensors_that_are_not_read_are_a_note(folder, tmp_path):
    change(folder / "config.json", num_hidden_layers=1)
    notes = oneshot(folder, scheme="FP8_DYNAMIC", output_dir=tmp_path / "out").notes
    some = ", ".join(f"model.layers.1.{name}.weight" for name in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj"))
    assert notes[0] == f"{folder}: 9 of its tensors are not read ({some} and 6 more)."


def test_a_reason_that_goes_on_in_the_next_line_is_told_whole(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    said = refused(tmp_path)
    assert said.startswith(f"{tmp_path}: cannot be loaded (Validation error for field 'hidden_size': ")
    assert "\n" not in said and not said.endswith(":).") and ".)." not in said
