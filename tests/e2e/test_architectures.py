"""Many architectures, tiny and random: what `oneshot` writes of them is what transformers reads back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from read_back import IN_BF16, assert_loads_to_the_same, loaded, log_probs, some_ids
from safetensors import safe_open
from torch import Tensor, nn

from scalewright.calibration.experts import Expert
from scalewright.calibration.targets import routers
from scalewright.checkpoint.loading import load_model
from scalewright.checkpoint.verifying import verify_checkpoint
from scalewright.errors import ModelError, RecipeError
from scalewright.modifiers.base import LEFT_ALONE, OUTPUT_HEAD
from scalewright.oneshot import Result, oneshot
from scalewright.quality import recipe_for

VOCAB, HIDDEN = 96, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "output_router_logits": False}
FP8_STATES = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
SCHEMES = {
    "W4A16": {"scheme": "W4A16", "group_size": 32},
    "W4A16_ASYM": {"scheme": "W4A16_ASYM", "group_size": 32, "ignore": [*LEFT_ALONE]},
    "W8A16": {"scheme": "W8A16", "group_size": 32},
    "W8A8": {"scheme": "W8A8"},
    "W8A8_DYNAMIC": {"scheme": "W8A8_DYNAMIC"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4": {"scheme": "MXFP4"},
}


@dataclass(frozen=True)
class Kind:
    """How a model of one architecture is built, what loads it, and how to ask it."""

    build: Callable[[bool], nn.Module]
    auto: Any = transformers.AutoModelForCausalLM
    batch: Callable[[int], dict[str, Tensor]] = lambda seed: {"input_ids": torch.tensor(some_ids(seed=seed))}


def causal(kind: str, **given: Any) -> Kind:
    def build(tied: bool) -> nn.Module:
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **given, "tie_word_embeddings": tied})
        return transformers.AutoModelForCausalLM.from_config(config)

    return Kind(build)


LINEAR_ATTENTION = {
    f"linear_{each}": size
    for each, size in {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}.items()
}


def gpt2(tied: bool) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4, tie_word_embeddings=tied
    )
    return transformers.GPT2LMHeadModel(config)


def t5(tied: bool) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.T5ForConditionalGeneration(config)


def from_text_to_text(seed: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor(some_ids(seed=seed)),
        "decoder_input_ids": torch.tensor(some_ids(length=12, seed=seed + 10)),
    }


def llava(tied: bool) -> nn.Module:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            projection_dim=HIDDEN,
        ),
        image_token_index=VOCAB - 1,
        vision_feature_layer=-1,
        tie_word_embeddings=tied,
    )
    return transformers.LlavaForConditionalGeneration(config)


def with_an_image(seed: int) -> dict[str, Tensor]:
    """Each row has four patches of an image."""
    ids = torch.tensor(some_ids(VOCAB - 1, seed=seed))
    ids[:, 1:5] = VOCAB - 1
    pixels = torch.randn(len(ids), 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "pixel_values": pixels}


KINDS = {
    "llama": causal("llama"),
    "qwen3": causal("qwen3"),
    "gemma3": causal("gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "mixtral": causal("mixtral", num_local_experts=4, **MOE),
    "qwen3_moe": causal("qwen3_moe", num_experts=4, moe_intermediate_size=32, **MOE),
    "granitemoe": causal("granitemoe", num_local_experts=4, **MOE),
    "llama4": causal("llama4_text", num_local_experts=4, intermediate_size_mlp=96, **MOE),
    "phimoe": causal("phimoe", num_local_experts=4, **MOE),
    "qwen2_moe": causal(
        "qwen2_moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, **MOE
    ),
    "olmo_hybrid": causal("olmo_hybrid", layer_types=["linear_attention", "full_attention"], **LINEAR_ATTENTION),
    "kimi_linear": causal(
        "kimi_linear",
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["sparse", "sparse"],
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        linear_num_heads=4,
        linear_head_dim=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "gpt2": Kind(gpt2),
    "t5": Kind(t5, transformers.AutoModelForSeq2SeqLM, from_text_to_text),
    "llava": Kind(llava, transformers.AutoModelForImageTextToText, with_an_image),
}
EXPERTS = ("mixtral", "qwen3_moe")


def built(kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return KINDS[kind].build(tied).eval()
    finally:
        torch.set_default_dtype(before)


def batch_of(kind: str, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = KINDS[kind].batch(seed)
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()}


def modifiers(*given: dict[str, Any]) -> dict[str, Any]:
    """A recipe with a stage for each of some modifiers."""
    return {
        f"part{i}_stage": {"modifiers": {"QuantizationModifier": {"ignore": [OUTPUT_HEAD], **each}}}
        for i, each in enumerate(given)
    }


def quantised(
    kind: str,
    folder: Path,
    *stages: dict[str, Any],
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    by_path: bool = True,
) -> Result:
    """A model of that kind, quantised and written to `folder / "out"`."""
    model: Any = built(kind, tied=tied, dtype=dtype)
    if by_path:
        model.save_pretrained(folder / "model")
        model = load_model(folder / "model", dtype=dtype)
    return oneshot(
        model, recipe=modifiers(*stages), dataset=[batch_of(kind, 1, dtype)], dtype=dtype, output_dir=folder / "out"
    )


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"gpt2", "phimoe", "qwen2_moe", "olmo_hybrid", "kimi_linear"}))
def test_a_model_on_disk_becomes_what_it_becomes_in_memory(kind, tmp_path):
    """All batches go through a block before the next, in any architecture."""
    recipe = modifiers(SCHEMES["W4A16" if kind in EXPERTS else "W8A8"])
    given = {"recipe": recipe, "dataset": [batch_of(kind, seed, torch.float32) for seed in (1, 2)]}
    built(kind).save_pretrained(tmp_path / "model")
    oneshot(tmp_path / "model", output_dir=tmp_path / "streamed", **given)
    oneshot(load_model(tmp_path / "model"), output_dir=tmp_path / "whole", **given)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "streamed" / file.name).read_bytes() == file.read_bytes(), file.name


def assert_reads_back(kind: str, folder: Path, result: Result, dtype: torch.dtype = torch.float32) -> None:
    inputs = batch_of(kind, 2, dtype)
    auto = KINDS[kind].auto
    assert_loads_to_the_same(result, folder / "out", inputs, dtype=dtype, tolerance=1e-3, auto=auto)


def notes_of(result: Result) -> list[str]:
    return [note for note in result.notes if not note.startswith("data: ")]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "config.json").read_text())["quantization_config"]


def targets_of(folder: Path) -> dict[str, list[str]]:
    return {group: each["targets"] for group, each in config_of(folder)["config_groups"].items()}


# ---- every architecture, every kind of scheme ------------------------------------------------------------------------

READ_EXACTLY = [
    (kind, scheme, tied)
    for kind, schemes in {
        "qwen3": ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"),
        "gemma3": ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"),
        "llava": ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"),
        "t5": ("W8A8", "FP8_DYNAMIC"),
        "mixtral": ("W4A16", "W8A16"),
        "qwen3_moe": ("W4A16", "W8A16"),
        "llama4": ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "NVFP4A16"),
    }.items()
    for scheme in schemes
    for tied in (False, True)
    if not tied or scheme == ("W4A16" if kind in EXPERTS else "W8A8")
]


@pytest.mark.parametrize(("kind", "scheme", "tied"), READ_EXACTLY)
def test_transformers_reads_what_was_quantised(kind, scheme, tied, tmp_path):
    dtype = torch.bfloat16 if scheme in IN_BF16 else torch.float32
    before = log_probs(built(kind, tied=tied, dtype=dtype), batch_of(kind, 2, dtype))
    result = quantised(kind, tmp_path, SCHEMES[scheme], tied=tied, dtype=dtype)
    assert_reads_back(kind, tmp_path, result, dtype)
    assert not notes_of(result)
    moved = (log_probs(result.model, batch_of(kind, 2, dtype)) - before).abs().max()
    assert moved > 1e-2, "too little was quantised to tell"


@pytest.mark.parametrize("kind", ["mixtral", "llava", "qwen3"])
def test_a_model_object_is_written_like_one_from_a_folder(kind, tmp_path):
    for by_path in (True, False):
        result = quantised(kind, tmp_path / str(by_path), SCHEMES["W4A16"], by_path=by_path)
        assert_reads_back(kind, tmp_path / str(by_path), result)
    with safe_open(tmp_path / "True" / "out" / "model.safetensors", "pt") as one:
        assert any("weight_packed" in name for name in one.offset_keys())


def test_the_experts_of_mixtral_have_the_names_of_its_checkpoints(tmp_path):
    quantised("mixtral", tmp_path, SCHEMES["W4A16"])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = {name for name in file.offset_keys() if ".layers.0.block_sparse_moe.experts.3." in name}
    kinds = ("weight_packed", "weight_scale", "weight_shape")
    assert names == {
        f"model.layers.0.block_sparse_moe.experts.3.{each}.{kind}" for each in ("w1", "w2", "w3") for kind in kinds
    }


@pytest.mark.parametrize(
    "given",
    [
        {"kv_cache_scheme": FP8_STATES},
        {"config_groups": {"a": {"targets": ["MixtralAttention"], "input_activations": FP8_STATES}}},
    ],
    ids=["kv cache", "queries"],
)
def test_experts_are_read_where_states_alone_are_quantised(given, tmp_path):
    assert_reads_back("mixtral", tmp_path, quantised("mixtral", tmp_path, given))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_kv_cache_is_read_back(kind, tmp_path):
    before = log_probs(built(kind), batch_of(kind, 2, torch.float32))
    result = quantised(kind, tmp_path, {**SCHEMES["FP8_DYNAMIC"], "kv_cache_scheme": FP8_STATES})
    assert_reads_back(kind, tmp_path, result)
    read = loaded(tmp_path / "out")
    scale = read.get_submodule("model.layers.1.self_attn").k_scale
    assert torch.equal(scale, result.model.get_submodule("model.layers.1.self_attn").k_scale)
    assert not torch.equal(log_probs(read, batch_of(kind, 2, torch.float32)), before)


def test_queries_are_read_back(tmp_path):
    group = {"targets": ["Qwen3Attention"], "input_activations": FP8_STATES}
    assert_reads_back("qwen3", tmp_path, quantised("qwen3", tmp_path, {"config_groups": {"a": group}}))


@pytest.mark.parametrize("kind", ["phimoe", "llama4", "qwen2_moe"])
def test_a_scheme_alone_leaves_routers_as_they_are(kind, tmp_path):
    """Transformers cannot load Phi's if they are packed, and vLLM no quantised ones."""
    model = built(kind)
    spared = routers(model)
    result = oneshot(
        model,
        recipe=recipe_for("balanced", "W4A16", group_size=32),
        dataset=[batch_of(kind, 1, torch.float32)],
        output_dir=tmp_path / "out",
    )
    assert len(spared) == 2 and not spared & {layer.name for layer in result.layers}
    assert_reads_back(kind, tmp_path, result)


def test_experts_of_llama_4_are_read_one_by_one_where_they_are_left_alone(tmp_path):
    result = quantised("llama4", tmp_path, {**SCHEMES["W8A8_DYNAMIC"], "ignore": ["*.experts.*", OUTPUT_HEAD]})
    assert_reads_back("llama4", tmp_path, result)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        kept = [name for name in file.offset_keys() if ".experts." in name]
    assert len(kept) == 24 and all(name.endswith("_proj.weight") for name in kept)
    assert not any(".experts." in layer.name for layer in result.layers)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "FP8_DYNAMIC"])
def test_what_transformers_puts_together_is_read_beside_quantised_layers(scheme, tmp_path):
    """Convolutions of linear attention, which checkpoints have in three."""
    result = quantised("olmo_hybrid", tmp_path, SCHEMES[scheme])
    assert_reads_back("olmo_hybrid", tmp_path, result)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {f"model.layers.0.linear_attn.{each}_conv1d.weight" for each in "qkv"} <= set(file.offset_keys())
    assert not notes_of(result) and verify_checkpoint(tmp_path / "out") == []


def test_packed_experts_beside_what_transformers_puts_together_are_named(tmp_path):
    result = quantised("kimi_linear", tmp_path / "packed", SCHEMES["W4A16"])
    assert notes_of(result) == [
        "model.layers.0.mlp.experts and 1 more: vLLM reads such experts beside "
        "model.layers.0.self_attn.conv1d.weight, transformers does not: it looks for packed weights wherever it puts "
        "several together. For transformers use FP8_DYNAMIC, or ignore the experts."
    ]
    alone = {**SCHEMES["W4A16"], "ignore": ["*.experts.*", OUTPUT_HEAD]}
    for name, given in {"plain": SCHEMES["FP8_DYNAMIC"], "alone": alone}.items():
        result = quantised("kimi_linear", tmp_path / name, given)
        without_activations_of_experts(result)
        assert_reads_back("kimi_linear", tmp_path / name, result)
        assert not any("puts several together" in note for note in notes_of(result))


def test_weights_that_checkpoints_have_in_one_tensor_are_refused_before_the_work(tmp_path):
    config = transformers.AutoConfig.for_model("hrm_text", **SIZES, num_layers_per_stack=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError) as caught:
        oneshot(model, recipe=modifiers(SCHEMES["W8A8_DYNAMIC"]), output_dir=tmp_path / "out")
    assert str(caught.value) == (
        "model.L_module.layers.0.self_attn.q_proj: checkpoints of HrmTextForCausalLM have its weight in one tensor "
        "with others, which takes no scales. Use a packed format (W4A16, W8A16), or ignore this layer."
    )


# ---- experts: what vLLM reads and transformers does not --------------------------------------------------------------


def without_activations_of_experts(result: Result) -> None:
    """Experts as transformers runs them."""
    for expert in (each for each in result.model.modules() if isinstance(each, Expert)):
        for layer in expert.children():
            layer.quantization_enabled = False


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8_DYNAMIC", "MXFP4"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_weights_of_experts_are_read_back_and_it_is_said_that_their_activations_are_not(kind, scheme, tmp_path):
    dtype = torch.bfloat16 if scheme in IN_BF16 else torch.float32
    result = quantised(kind, tmp_path, SCHEMES[scheme], dtype=dtype)
    without_activations_of_experts(result)
    read = loaded(tmp_path / "out", dtype=dtype)
    fused = read.get_submodule("model.layers.1.mlp.experts")
    for i, expert in enumerate(result.model.get_submodule("model.layers.1.mlp.experts")):
        gate, up, down = (each.weight for each in expert.children())
        assert torch.equal(fused.gate_up_proj[i], torch.cat([gate, up])) and torch.equal(fused.down_proj[i], down)
    if dtype == torch.float32:  # in bf16 the router may choose otherwise by a rounding
        inputs = batch_of(kind, 2, dtype)
        torch.testing.assert_close(log_probs(read, inputs), log_probs(result.model, inputs), rtol=0, atol=1e-3)
    assert notes_of(result) == [
        "model.layers.0.mlp.experts and 1 more: vLLM quantises the activations of experts, transformers leaves them as "
        "they are."
    ]


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ({"scheme": "NVFP4A16"}, "it has no place for their global scales"),
        ({"scheme": "W4A16_ASYM", "group_size": 32}, "it has no place for their zero points"),
        ({"scheme": "MXFP8"}, "it has one scale for each row of theirs, and not several"),
        ({"scheme": "W4A8", "group_size": 32}, "it has one scale for each row of theirs, and not several"),
        ({"weights": FP8_GROUPS}, "it has one scale for each row of theirs, and not several"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.get("scheme", "FP8 in groups"),
)
def test_experts_that_transformers_cannot_read_are_named(scheme, why, tmp_path):
    result = quantised("mixtral", tmp_path, scheme, dtype=torch.bfloat16)
    assert notes_of(result) == [
        f"model.layers.0.mlp.experts and 1 more: vLLM reads such experts, transformers does not: {why}. For "
        "transformers use W4A16, W8A16 or FP8_DYNAMIC."
    ]
    # It is so indeed: when this is no longer so, the note can go.
    with pytest.raises((RuntimeError, AssertionError)):
        loaded(tmp_path / "out", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            SCHEMES["W8A8"],
            "model.layers.0.mlp.experts.0.w1: vLLM has no experts with static INT8 activations, and transformers "
            "leaves activations of experts as they are. Use W8A8_DYNAMIC.",
        ),
        (
            {**SCHEMES["W4A16"], "ignore": [OUTPUT_HEAD, "*.experts.*.w2"]},
            "model.layers.0.mlp.experts.0.w2: would be stored in another way than model.layers.0.mlp.experts.0.w1, and "
            "loaders know one for all experts of a layer. Treat them alike.",
        ),
        (
            {"config_groups": {"FP8_DYNAMIC": ["*.experts.3.w3"], "W8A16": ["Linear"]}, "group_size": 32},
            "model.layers.0.mlp.experts.3.w3: would be stored in another way than model.layers.0.mlp.experts.0.w1, and "
            "loaders know one for all experts of a layer. Treat them alike.",
        ),
    ],
    ids=["static", "partly", "mixed"],
)
def test_experts_that_nobody_can_read_are_refused_before_the_work(given, words):
    seen: list[str] = []
    with pytest.raises(ModelError) as caught:
        oneshot(
            built("mixtral"),
            recipe=modifiers(given),
            dataset=[batch_of("mixtral", 1, torch.float32)],
            on_step=lambda phase, *_: seen.append(phase),
        )
    assert str(caught.value) == words
    assert not {"calibrating", "quantising"} & set(seen)


def test_experts_of_one_layer_alone_are_named(tmp_path):
    result = quantised("mixtral", tmp_path, {**SCHEMES["W4A16"], "ignore": [OUTPUT_HEAD, "layers.1.mlp.*"]})
    assert notes_of(result) == [
        "model.layers.1.mlp.experts: its experts have another scheme than those of model.layers.0.mlp.experts, or "
        "none. vLLM reads that, transformers has one scheme for all experts. For transformers treat all experts alike."
    ]
    assert r"re:model\.layers\.1\.mlp\.experts\..*" in config_of(tmp_path)["ignore"]


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_experts_that_checkpoints_have_in_one_tensor_stay_as_they_are(scheme, tmp_path):
    result = quantised("granitemoe", tmp_path, SCHEMES[scheme])
    assert notes_of(result) == [
        f"model.layers.{i}.block_sparse_moe.experts: loaders of GraniteMoeForCausalLM look for all of its experts in "
        "one tensor (input_linear), so they stay as they are."
        for i in range(2)
    ]
    assert len(result.layers) == 8
    assert_reads_back("granitemoe", tmp_path, result)


def test_experts_that_transformers_has_in_one_tensor_in_checkpoints_too_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("scalewright.calibration.experts.get_checkpoint_conversion_mapping", lambda _: None)
    result = oneshot(
        built("qwen3_moe"), recipe=modifiers(SCHEMES["W4A16"]), dataset=[batch_of("qwen3_moe", 1, torch.float32)]
    )
    assert notes_of(result) == [
        "model.layers.0.mlp.experts and 1 more: transformers does not read single experts of Qwen3MoeForCausalLM, "
        "because it has all of a layer in one tensor in its checkpoints, too. Ignore them, unless they are for vLLM."
    ]


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_that_are_ignored_are_read_as_they_are(kind, scheme, tmp_path):
    dtype = torch.bfloat16 if scheme in IN_BF16 else torch.float32
    given = {**SCHEMES[scheme], "ignore": [OUTPUT_HEAD, "re:.*experts.*"]}
    result = quantised(kind, tmp_path, given, dtype=dtype)
    assert len(result.layers) == 8
    assert_reads_back(kind, tmp_path, result, dtype)
    assert r"re:.*\.experts\..*" in config_of(tmp_path)["ignore"], "vLLM would take them for layers of a group"


@pytest.mark.parametrize(
    "groups",
    [
        {"FP8_DYNAMIC": ["*.self_attn.*"], "W8A16": ["Linear"]},
        {"FP8_DYNAMIC": ["Linear"], "W8A16": ["re:.*experts.*"]},
        {"FP8_DYNAMIC": ["Linear"], "W8A16": ["re:.*mlp.*"]},
        {"FP8_DYNAMIC": ["re:.*(?<!experts.)self_attn.*"], "W8A16": ["re:.*mlp.*"]},
    ],
    ids=["class", "pattern", "a pattern for names in memory", "a pattern of others that has the word"],
)
def test_experts_have_a_scheme_of_their_own(groups, tmp_path):
    result = quantised("qwen3_moe", tmp_path, {"config_groups": groups, "group_size": 32})
    assert_reads_back("qwen3_moe", tmp_path, result)
    experts = [layer for layer in result.layers if "experts" in layer.name]
    assert len(experts) == 24 and all(layer.scheme.weights.type == "int" for layer in experts)


def test_patterns_hold_for_the_names_in_the_checkpoint_too(tmp_path):
    groups = {"FP8_DYNAMIC": ["Linear"], "W8A16": ["re:.*mlp.*"]}  # in checkpoints it is block_sparse_moe
    result = quantised("mixtral", tmp_path, {"config_groups": groups, "group_size": 32})
    assert_reads_back("mixtral", tmp_path, result)
    assert targets_of(tmp_path) == {
        "group_0": [f"model.layers.{i}.self_attn.{each}_proj" for i in range(2) for each in "qkvo"],
        "group_1": [r"re:.*\.experts\.\d+\..*"],
    }


# ---- weights that must not be packed ---------------------------------------------------------------------------------

UNPACKED = (
    "transformers cannot load packed weights here, because {} asks for unpacked ones while it is set up. Use 8 bits "
    "(W8A16, W8A8, FP8_DYNAMIC), or ignore this layer."
)


@pytest.mark.parametrize(
    ("kind", "given", "where"),
    [
        ("t5", SCHEMES["W4A16"], "encoder.block.0.layer.0.SelfAttention.q: " + UNPACKED.format("T5ForConditional…")),
        ("t5", {"scheme": {"NVFP4A16": ["lm_head"]}, "ignore": []}, "lm_head: " + UNPACKED.format("T5ForConditional…")),
        (
            "llama",
            {"scheme": {"W4A16": ["Embedding"]}, "group_size": 32},
            "model.embed_tokens: " + UNPACKED.format("LlamaForCausalLM"),
        ),
    ],
    ids=["t5", "head of t5", "embedding"],
)
def test_packed_weights_that_transformers_cannot_load_are_refused_before_the_work(kind, given, where, tmp_path):
    with pytest.raises(ModelError) as caught:
        quantised(kind, tmp_path, given)
    assert str(caught.value) == where.replace("T5ForConditional…", "T5ForConditionalGeneration")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("symmetric", [True, False])
def test_eight_bits_stay_unpacked_where_they_must(symmetric, tmp_path):
    args = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
    result = quantised("t5", tmp_path, {"config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}})
    assert_reads_back("t5", tmp_path, result)
    assert config_of(tmp_path)["config_groups"]["group_0"]["format"] == "int-quantized"
    quantised("qwen3", tmp_path / "other", SCHEMES["W8A16"])
    assert config_of(tmp_path / "other")["config_groups"]["group_0"]["format"] == "pack-quantized"


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "given",
    [
        {"input_activations": {"num_bits": 8}},
        {"input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"}},
        {"output_activations": {"num_bits": 8, "type": "float"}},
    ],
    ids=["static inputs", "dynamic inputs", "outputs"],
)
def test_activations_alone_are_read_back(given, kind, tmp_path):
    result = quantised(kind, tmp_path, {"targets": ["re:.*o_proj", "re:.*down_proj"], **given})
    assert len(result.layers) == 4
    assert_reads_back(kind, tmp_path, result)


# ---- GPT-2, which has no linear layers -------------------------------------------------------------------------------


def test_a_model_whose_layers_have_no_format_is_refused():
    with pytest.raises(RecipeError) as caught:
        oneshot(built("gpt2"), scheme="W8A8_DYNAMIC")
    assert str(caught.value) == (
        "the recipe means no layer of this model. Name linear layers or embeddings in targets. targets Linear: all "
        "that they mean is ignored, or belongs to other groups. transformer.h.0.attn.c_attn and 7 more: "
        "compressed-tensors has no format for Conv1D, so it stays as it is."
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "given",
    [{"scheme": "W8A8", "ignore": []}, {"scheme": {"W8A16": ["Embedding"]}, "group_size": 32}],
    ids=["head", "embeddings"],
)
def test_what_gpt2_has_besides_is_read_back(given, tied, tmp_path):
    result = quantised("gpt2", tmp_path, given, tied=tied)
    assert len(result.layers) in (1, 2)
    assert_reads_back("gpt2", tmp_path, result)


@pytest.mark.parametrize("weights", [{"num_bits": 8, "strategy": "channel"}, FP8_GROUPS], ids=["int8", "fp8"])
def test_what_embeddings_have_besides_their_weight_is_read_back(weights, tmp_path):
    """Gemma multiplies by a number that its checkpoints do not have; compressed-tensors makes a parameter of it."""
    result = quantised("gemma3", tmp_path, {"weights": weights, "targets": ["Embedding", "Linear"]}, tied=True)
    assert "model.embed_tokens" in {layer.name for layer in result.layers}
    assert_reads_back("gemma3", tmp_path, result)
    assert not verify_checkpoint(tmp_path / "out", against=tmp_path / "model")


# ---- several stages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages",
    [
        (
            {"scheme": "W8A8", "ignore": ["re:.*mlp.*", OUTPUT_HEAD]},
            {"scheme": "W4A16", "group_size": 32, "ignore": ["re:.*self_attn.*", OUTPUT_HEAD]},
        ),
        (
            {"scheme": {"FP8_DYNAMIC": ["re:.*self_attn.*"]}},
            {"config_groups": {"W8A16": ["*.down_proj"], "W4A16": ["re:.*mlp.*"]}, "group_size": 32},
        ),
        ({"scheme": "FP8_DYNAMIC"}, {"kv_cache_scheme": FP8_STATES}),
        (
            {"scheme": {"W8A8": ["re:.*self_attn.*"]}},  # which loaders could take for attention itself
            {"config_groups": {"a": {"targets": ["Qwen3Attention"], "input_activations": FP8_STATES}}},
        ),
    ],
    ids=["both say Linear", "mixed precision", "layers, then states", "one within the other"],
)
@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_stages_are_read_back(stages, pipeline, tmp_path):
    result = oneshot(
        built("qwen3"),
        recipe=modifiers(*stages),
        dataset=[batch_of("qwen3", 1, torch.float32)],
        pipeline=pipeline,
        output_dir=tmp_path / "out",
    )
    assert len(result.layers) in (10, 14, 16)
    assert_reads_back("qwen3", tmp_path, result)


def test_where_two_stages_say_the_same_word_names_are_written(tmp_path):
    first = {"scheme": "W8A8", "ignore": ["re:.*mlp.*", OUTPUT_HEAD]}
    second = {"scheme": "FP8_DYNAMIC", "ignore": ["re:.*self_attn.*", OUTPUT_HEAD]}
    quantised("qwen3", tmp_path, first, second)
    layers = [f"model.layers.{i}." for i in range(2)]
    assert targets_of(tmp_path) == {
        "group_0": [f"{each}self_attn.{name}_proj" for each in layers for name in "qkvo"],
        "group_1": [f"{each}mlp.{name}_proj" for each in layers for name in ("gate", "up", "down")],
    }
    assert config_of(tmp_path)["ignore"] == ["lm_head"]


def test_stages_may_share_the_experts_among_them(tmp_path):
    first = {**SCHEMES["W8A16"], "ignore": [OUTPUT_HEAD, "layers.1.*"]}
    quantised("qwen3_moe", tmp_path, first, {**SCHEMES["W4A16"], "ignore": [OUTPUT_HEAD, "layers.0.*"]})
    for i, targets in enumerate(targets_of(tmp_path).values()):
        assert len(targets) == 4 + 12 and all(each.startswith(f"model.layers.{i}.") for each in targets)


def test_a_layer_of_two_stages_is_refused_before_the_work():
    seen: list[str] = []
    with pytest.raises(RecipeError) as caught:
        oneshot(
            built("qwen3"),
            recipe=modifiers(SCHEMES["FP8_DYNAMIC"], SCHEMES["W4A16"]),
            on_step=lambda phase, *_: seen.append(phase),
        )
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj: two stages mean it, and it can be quantised once. Use ignore in one of them."
    )
    assert "quantising" not in seen


def test_a_model_that_is_quantised_is_not_quantised_again():
    model = built("qwen3")
    oneshot(model, recipe=modifiers({"scheme": {"FP8_DYNAMIC": ["re:.*self_attn.*"]}}))
    with pytest.raises(ModelError) as caught:
        oneshot(model, recipe=modifiers({"scheme": {"FP8_DYNAMIC": ["re:.*mlp.*"]}}))
    assert str(caught.value) == "model.layers.0.self_attn.q_proj: is quantised already. Give the original model."


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_path", [True, False], ids=["path", "object"])
def test_what_is_ignored_is_written_as_in_memory_and_as_in_the_checkpoint(by_path, tmp_path):
    given = {**SCHEMES["FP8_DYNAMIC"], "ignore": ["re:.*lm_head", "re:.*projector.*"]}
    quantised("llava", tmp_path, given, by_path=by_path)
    assert set(config_of(tmp_path)["ignore"]) == {
        *("lm_head", "model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"),
        *("language_model.lm_head", "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
    }


def test_a_pattern_that_does_not_fit_the_names_in_the_checkpoint_is_written_as_names(tmp_path):
    result = quantised("llava", tmp_path, {"scheme": {"FP8_DYNAMIC": [r"re:model\.language_model\..*mlp.*"]}})
    assert_reads_back("llava", tmp_path, result)
    layers = [f"layers.{i}.mlp.{each}_proj" for i in range(2) for each in ("gate", "up", "down")]
    assert targets_of(tmp_path) == {
        "group_0": [
            f"{prefix}.{each}" for prefix in ("model.language_model", "language_model.model") for each in layers
        ]
    }
