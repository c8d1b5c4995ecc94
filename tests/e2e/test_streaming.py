"""A model that is given by its path is never in memory as a whole, and the checkpoint is the same."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from e2e.read_back import log_probs, some_ids
from scalewright import oneshot
from scalewright.calibration.scratch import Scratch, WaitingRoom
from scalewright.checkpoint.loading import load_model
from scalewright.checkpoint.mapped import MappedFiles, can_map
from scalewright.checkpoint.memory import in_bytes, room_for_activations
from scalewright.errors import RecipeError

pytestmark = pytest.mark.skipif(not can_map(), reason="only Linux tells what is mapped")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = some_ids(rows=12)


def written(folder: Path, kind: str) -> Path:
    """A model on disk: in several files or in one, in several dtypes, tied or not, with experts or without."""
    torch.manual_seed(0)
    if kind == "experts":
        config = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES)
        MixtralForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="300KB")
    elif kind == "tied":
        LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES)).half().save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: written(tmp_path_factory.mktemp(kind), kind) for kind in ("shards", "tied", "experts")}


def modifier(name: str, **fields: object) -> dict[str, object]:
    return {"modifiers": {name: fields}}


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GPTQ_ATTENTION = {
    "GPTQModifier": {"config_groups": {"group_0": {"weights": W4, "targets": ["re:.*layers.0.self_attn.*proj"]}}}
}
W8A8_MLP = {"QuantizationModifier": {"scheme": "W8A8", "targets": ["re:.*layers.[12].mlp.*proj"]}}
W8A16_MLP = {"QuantizationModifier": {"scheme": "W8A16", "targets": ["re:.*mlp.*proj"]}}
W8A8_HEAD = {"QuantizationModifier": {"scheme": "W8A8", "targets": ["re:.*lm_head", "re:.*layers.0.mlp.*proj"]}}
GATHERED_ATTENTION = {
    "IMatrixGatherer": {"targets": ["re:.*self_attn.*proj"]},
    "QuantizationModifier": {"scheme": "W8A8", "targets": ["re:.*self_attn.*proj"], "weight_observer": "imatrix_mse"},
}


def stages(*given: dict[str, object]) -> dict[str, object]:
    return {f"part{i}_stage": {f"part{i}_modifiers": each} for i, each in enumerate(given)}


SMOOTHED = {"SmoothQuantModifier": {}, "QuantizationModifier": {"scheme": "W8A8", "targets": ["re:.*mlp.*proj"]}}
STAGES = {
    "first_stage": {"first_modifiers": {"QuantizationModifier": {"scheme": "W8A8", "targets": ["re:.*mlp.*proj"]}}},
    "second_stage": {
        "second_modifiers": {
            "GPTQModifier": {"config_groups": {"group_0": {"weights": W4, "targets": ["re:.*self_attn.*proj"]}}}
        }
    },
}
GATHERED = {
    "modifiers": {
        "IMatrixGatherer": {"ignore": ["lm_head"]},
        "QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"], "weight_observer": "imatrix_mse"},
    }
}
CASES = {
    "data-free": ("shards", {"scheme": "W4A16", "quality": "fast"}),
    "data-free experts": ("experts", {"scheme": "FP8_DYNAMIC"}),
    "importance": ("tied", {"scheme": "W4A16", "dataset": IDS}),
    "scales that layers in different files share": ("shards", {"scheme": "NVFP4", "dataset": IDS}),
    "experts": ("experts", {"scheme": "W4A16", "dataset": IDS}),
    "static": ("shards", {"scheme": "W8A8", "dataset": IDS}),
    "one after the other": ("tied", {"scheme": "W8A8", "dataset": IDS, "pipeline": "sequential"}),
    "gptq": ("shards", {"scheme": "W4A16", "quality": "best", "dataset": IDS}),
    "gptq of experts": ("experts", {"scheme": "W4A16", "quality": "best", "dataset": IDS}),
    "two stages": ("shards", {"recipe": STAGES, "dataset": IDS}),
    "data-free after gptq": ("shards", {"recipe": stages(GPTQ_ATTENTION, W8A16_MLP), "dataset": IDS}),
    "static after gptq": ("shards", {"recipe": stages(GPTQ_ATTENTION, W8A8_MLP), "dataset": IDS}),
    "gathered after static": ("shards", {"recipe": stages(W8A8_HEAD, GATHERED_ATTENTION), "dataset": IDS}),
    "gptq after a finished head": ("tied", {"recipe": stages(W8A8_HEAD, GPTQ_ATTENTION), "dataset": IDS}),
    "smoothed": ("shards", {"recipe": stages(SMOOTHED), "dataset": IDS}),
    "smoothed, in half precision": ("tied", {"recipe": stages(SMOOTHED), "dataset": IDS}),
    "smoothed after gptq": ("shards", {"recipe": stages(GPTQ_ATTENTION, SMOOTHED), "dataset": IDS}),
    "gptq of what was smoothed": ("shards", {"scheme": "W8A8", "quality": "best", "dataset": IDS}),
    "smoothed experts": ("experts", {"scheme": "W8A8_DYNAMIC", "quality": "best", "dataset": IDS}),
    "gathered before": ("shards", {"recipe": GATHERED, "dataset": IDS}),
    "kv cache": (
        "tied",
        {
            "recipe": modifier(
                "QuantizationModifier",
                scheme="FP8",
                ignore=["lm_head"],
                kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            ),
            "dataset": IDS,
        },
    ),
    "one block alone": (
        "shards",
        {"recipe": modifier("QuantizationModifier", scheme="W8A8", targets=["re:.*layers.1.*proj"]), "dataset": IDS},
    ),
    "experts stay": (
        "experts",
        {"recipe": modifier("QuantizationModifier", scheme="W8A16", targets=["re:.*self_attn.*proj"])},
    ),
    "embeddings": (
        "tied",
        {"recipe": modifier("QuantizationModifier", scheme="W8A16", targets=["Linear", "Embedding"])},
    ),
    "another dtype": ("shards", {"scheme": "W8A8", "dataset": IDS, "dtype": "bfloat16"}),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_is_that_of_a_model_in_memory(case, models, tmp_path):
    kind, given = CASES[case]
    oneshot(models[kind], output_dir=tmp_path / "streamed", **given)
    in_memory = load_model(models[kind], dtype=given.get("dtype", "auto"))
    oneshot(in_memory, output_dir=tmp_path / "whole", **{key: given[key] for key in given if key != "dtype"})
    streamed, whole = contents(tmp_path / "streamed"), contents(tmp_path / "whole")
    assert streamed.keys() == whole.keys()
    assert [name for name in whole if streamed[name] != whole[name]] == []


def test_a_model_that_is_published_in_fp8_is_read_as_what_it_stands_for(tmp_path):
    folder = tmp_path / "fp8"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"intermediate_size": 192})).bfloat16()
    state, meant = dict(model.state_dict()), {}
    for name, weight in list(state.items()):
        if "proj" in name:
            state[name], state[f"{name}_scale_inv"], meant[name] = in_fp8(weight)
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    read = load_model(folder)
    for name, weight in meant.items():
        torch.testing.assert_close(read.get_parameter(name).detach(), weight, rtol=2**-7, atol=1e-6)
    oneshot(folder, scheme="FP8", dataset=IDS, output_dir=tmp_path / "streamed")
    oneshot(read, scheme="FP8", dataset=IDS, output_dir=tmp_path / "whole")
    assert contents(tmp_path / "streamed") == contents(tmp_path / "whole")


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in FP8 with a scale for each block of 128 by 128, these scales, and what they stand for."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    whole = torch.zeros(rows * 128, columns * 128)
    whole[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = whole.view(rows, 128, columns, 128).abs().amax(dim=(1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    return codes, scale, (codes.float() * spread).bfloat16()


@pytest.mark.parametrize("case", ["importance", "one after the other", "gptq"])
def test_what_flows_between_blocks_may_lie_in_a_file(case, models, tmp_path, monkeypatch):
    rooms = []
    monkeypatch.setattr(
        importlib.import_module("scalewright.oneshot"),
        "WaitingRoom",
        lambda *args: rooms.append(WaitingRoom(*args)) or rooms[-1],
    )
    monkeypatch.setattr("scalewright.calibration.scratch._SMALL", 1)
    kind, given = CASES[case]
    oneshot(models[kind], output_dir=tmp_path / "in memory", batch_size=3, **given)
    assert rooms[0].num_placed == 0
    oneshot(models[kind], output_dir=tmp_path / "in files", max_memory="1KB", batch_size=3, **given)
    assert rooms[1].room == 0 and rooms[1].num_placed > 10
    assert contents(tmp_path / "in memory") == contents(tmp_path / "in files")


def test_nothing_of_the_model_stays_in_memory(models, tmp_path):
    result = oneshot(models["shards"], scheme="W4A16", quality="best", dataset=IDS, output_dir=tmp_path / "out")
    assert result.files is not None
    for module in result.in_memory.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            assert result.files.place_of(module.weight) is not None
            assert module.weight_scale.device.type == "meta"


def test_the_model_of_the_result_is_what_was_written(models, tmp_path):
    result = oneshot(models["shards"], scheme="W8A16", output_dir=tmp_path / "out")
    in_memory = oneshot(load_model(models["shards"]), scheme="W8A16").model
    ids = torch.tensor(some_ids(seed=2))
    torch.testing.assert_close(log_probs(result.model, ids), log_probs(in_memory, ids), rtol=0, atol=1e-4)
    assert result.model is result.model


def test_the_files_of_the_model_are_not_changed(models, tmp_path):
    before = contents(models["experts"])
    oneshot(models["experts"], scheme="W4A16", quality="best", dataset=IDS, output_dir=tmp_path / "out")
    assert contents(models["experts"]) == before


def test_a_model_that_somebody_else_has_loaded_stays_as_it_is(models, tmp_path):
    theirs = load_model(models["shards"])
    with torch.no_grad():
        for each in theirs.parameters():
            each.mul_(2)
    before = {name: each.clone() for name, each in theirs.state_dict().items()}
    oneshot(models["shards"], scheme="FP8_DYNAMIC", output_dir=tmp_path / "out")
    for name, each in theirs.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_nothing_is_left_beside_the_output(models, tmp_path):
    oneshot(models["experts"], scheme="FP8_DYNAMIC", output_dir=tmp_path / "out", max_memory=0)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_tensors_in_files_are_the_same_tensors(tmp_path):
    room = WaitingRoom(Scratch(tmp_path), 0)
    value = torch.randn(128, 256)
    before, seen_elsewhere = value.clone(), [value]
    room.take(({"hidden": value}, 3))
    room.take(value)
    assert room.num_placed == 1 and torch.equal(value, before) and seen_elsewhere[0] is value
    value += 1  # what is written to it stays, though its memory is given back
    room.take(value)
    assert torch.equal(value, before + 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_by_another_name_is_seen(tmp_path):
    """A tensor that somebody has in another shape is not moved: what is written there must be seen here."""
    room = WaitingRoom(Scratch(tmp_path), 0)
    value = torch.zeros(128, 256)
    flat = value.view(-1)
    room.take(value)
    flat += 1
    assert value.eq(1).all() and room.num_placed == 0


def test_files_that_wait_are_not_open(tmp_path):
    """There may be many thousands of them, and a process may have about a thousand open."""
    before = len(os.listdir("/proc/self/fd"))
    scratch = Scratch(tmp_path)
    placed = [scratch.place(torch.full((64,), each), is_shared=each % 2 == 0) for each in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(tensor.eq(each).all() for each, tensor in enumerate(placed))


def test_tensors_can_wait_while_a_model_is_in_inference_mode(tmp_path):
    room = WaitingRoom(Scratch(tmp_path), 0)
    value = torch.ones(128, 256)
    with torch.inference_mode():
        room.take(value)
    assert value.eq(1).all() and not value.is_inference()
    value += 1
    assert room.num_placed == 1


def test_memory_is_used_first_and_again(tmp_path):
    one = torch.zeros(64, 1024)
    room = WaitingRoom(Scratch(tmp_path), 2 * one.nbytes)
    room.take([one, torch.zeros(64, 1024)])  # the second dies at once
    other = torch.zeros(64, 1024)
    room.take(other)
    assert room.num_placed == 0
    another = torch.zeros(64, 1024)
    room.take((one, other, another))
    assert room.num_placed == 1


@pytest.mark.parametrize("kind", ["a view", "a parameter", "small"])
def test_what_others_may_have_stays_where_it_is(kind, tmp_path):
    whole = torch.zeros(1024, 1024)
    value = {"a view": whole[:512], "a parameter": torch.nn.Parameter(whole), "small": torch.zeros(8)}[kind]
    pointer, room = value.data_ptr(), WaitingRoom(Scratch(tmp_path), 0)
    room.take(value)
    assert value.data_ptr() == pointer and room.num_placed == 0


def test_tensors_of_files_are_known_by_their_place(models):
    files = MappedFiles(Scratch(models["shards"]))
    with files.catching():
        model = load_model(models["shards"])
    index = json.loads((models["shards"] / "model.safetensors.index.json").read_text())["weight_map"]
    for name, each in model.named_parameters():
        place = files.place_of(each)
        assert place is not None and place.file.name == index[name]
        assert place.read() == each.detach().numpy().tobytes()
    whole = model.model.layers[0].mlp.up_proj.weight
    assert files.place_of(whole[:8]) is None and files.place_of(whole.T) is None
    assert files.place_of(whole.detach().clone()) is None


def test_memory_comes_back_as_the_file_has_it(models):
    files = MappedFiles(Scratch(models["shards"]))
    with files.catching():
        model = load_model(models["shards"])
    weight = model.model.layers[1].mlp.down_proj.weight.detach()
    before = weight.clone()
    weight.zero_()
    files.give_back([weight])
    pages = weight.view(-1)[4096:-4096]  # the first and the last page may hold others, too
    assert torch.equal(pages, before.view(-1)[4096:-4096])


@pytest.mark.parametrize(
    ("size", "expected"),
    [("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5g", 1_500_000_000), ("123", 123), (77, 77), (None, None)],
)
def test_sizes(size, expected):
    assert in_bytes(size) == expected


@pytest.mark.parametrize("size", ["much", "8XB", "-1GB", ""])
def test_what_is_no_size(size, models, tmp_path):
    with pytest.raises(RecipeError, match=f"^max_memory: '{size}' is no size. Write it as 8GB or 512MiB.$"):
        oneshot(models["shards"], scheme="W8A16", max_memory=size, output_dir=tmp_path / "out")


def test_room_is_what_blocks_leave():
    assert room_for_activations(0, 10**6) == 0
    assert room_for_activations(10**12, 10**9) - room_for_activations(10**12, 2 * 10**9) == pytest.approx(2e9, rel=0.05)
    assert room_for_activations(None, 0) > 0
