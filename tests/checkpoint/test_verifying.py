"""Good checkpoints have no problem; a good one that was broken, in whatever way, has just the one that names it."""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import (
    IN_BF16,
    INDEX,
    OTHER_SIZES,
    RECIPES,
    WEIGHTS,
    config,
    copied,
    header,
    put,
    quantise,
    raw,
    save_model,
    scheme,
    sharded,
    tensors,
    then,
    with_json,
    write,
)
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import initialize_module_for_quantization
from compressed_tensors.utils import get_direct_state_dict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from scalewright.checkpoint.folder import DTYPES
from scalewright.checkpoint.formats import stored_tensors
from scalewright.checkpoint.shards import tensors_in
from scalewright.checkpoint.smoothed import Powers
from scalewright.checkpoint.values import is_same
from scalewright.checkpoint.verifying import Problem, asks_for_signed_scales, examine, verify_checkpoint
from scalewright.cli import app
from scalewright.errors import ModelError, OutputError
from scalewright.modifiers.schemes import scheme_named, scheme_names
from scalewright.oneshot import oneshot

L = "model.layers.0."
UP, DOWN, GATE, Q = f"{L}mlp.up_proj", f"{L}mlp.down_proj", f"{L}mlp.gate_proj", f"{L}self_attn.q_proj"
NORM, EMBEDDING = f"{L}input_layernorm.weight", "model.embed_tokens.weight"
LAST = "model-00004-of-00004.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The checkpoint of a recipe, and the model that it was made of; both are made once."""
    folder = tmp_path_factory.mktemp("good")

    def find(name: str) -> tuple[Path, Path]:
        sizes = OTHER_SIZES.get(name, {})
        dtype = torch.bfloat16 if name in IN_BF16 else torch.float32
        model = folder / f"model {dtype} {sizes}"
        if not model.exists():
            save_model(model, dtype=dtype, **sizes)
        if not (folder / name).exists():
            quantise(model, folder / name, RECIPES[name])
        return folder / name, model

    return find


def problems_of(folder: Path, model: Path | None = None) -> list[str]:
    return [str(each) for each in verify_checkpoint(folder, against=model)]


# ---- good ones -------------------------------------------------------------------------------------------------------

LAYERS = {"kv cache": 1, "states per head": 1, "FP8 and kv cache": 8, "head": 8, "embedding": 1}


@pytest.mark.parametrize("name", RECIPES)
def test_a_good_checkpoint_has_no_problem(good, name):
    out, model = good(name)
    found = examine(out, against=model)
    assert [str(each) for each in found.problems] == []
    assert found.notes == []
    assert found.num_layers == LAYERS.get(name, 7)


# ---- broken ones -----------------------------------------------------------------------------------------------------

# What was broken; how; how many problems that makes, and the first of them. "…" is what others have to say.
BROKEN = {
    "a scale deleted": (
        "W4A16",
        tensors(lambda state: state.pop(f"{UP}.weight_scale")),
        1,
        f"{UP}.weight_scale: is missing from the files: group_0 (int4, groups of 32; pack-quantized; 96 x "
        "64) has weight_packed, weight_scale and weight_shape.",
    ),
    "a scale of zero": (
        "W4A16",
        put(f"{UP}.weight_scale", (3, 1), 0.0),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is zero.",
    ),
    "a negative scale": (
        "W4A16",
        put(f"{UP}.weight_scale", (3, 1), -0.25),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is negative (-0.25), and the recipe asks for no "
        "signed scales.",
    ),
    "a scale that is NaN": (
        "W4A16",
        put(f"{UP}.weight_scale", (3, 1), float("nan")),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is NaN.",
    ),
    "a scale that is infinite": (
        "W4A16",
        put(f"{UP}.weight_scale", (3, 1), float("inf")),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is infinite.",
    ),
    "a scale that was flushed": (
        "W4A16",
        put(f"{UP}.weight_scale", (3, 1), 1e-40),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is flushed: below 1.2e-38, and arithmetic units "
        "may take that for zero.",
    ),
    "scales of zero in e4m3": (
        "NVFP4",
        tensors(lambda state: state[f"{UP}.weight_scale"].view(torch.uint8)[0].zero_()),
        1,
        f"{UP}.weight_scale: 4 of 384 scales, the first at [0, 0], are zero.",
    ),
    "a scale that is NaN in e4m3": (
        "NVFP4",
        tensors(lambda state: state[f"{UP}.weight_scale"].view(torch.uint8)[5, 2].fill_(127)),
        1,
        f"{UP}.weight_scale: 1 of 384 scales, at [5, 2], is NaN.",
    ),
    "a scale that is NaN in e8m0": (
        "MXFP4",
        tensors(lambda state: state[f"{UP}.weight_scale"][5, 1].fill_(255)),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [5, 1], is NaN.",
    ),
    "a scale that was flushed in e8m0": (
        "MXFP8",
        tensors(lambda state: state[f"{UP}.weight_scale"][5, 1].zero_()),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [5, 1], is flushed: below 1.2e-38, and arithmetic units "
        "may take that for zero.",
    ),
    "a negative input scale of a signed recipe": (
        "W8A8",
        then(
            put(f"{UP}.input_scale", (0,), -0.1),
            lambda folder: (folder / "recipe.yaml").write_text("weight_observer: {name: optimal, signed: true}"),
        ),
        1,
        f"{UP}.input_scale: is negative (-0.1), and only scales of weights may be.",
    ),
    "an input scale missing": (
        "W8A8",
        tensors(lambda state: state.pop(f"{DOWN}.input_scale")),
        1,
        f"{DOWN}.input_scale: is missing from the files: group_0 (int8, per channel; inputs int8, per "
        "tensor; int-quantized; 64 x 96) has input_scale, weight and weight_scale.",
    ),
    "an input scale that was flushed": (
        "W8A8",
        put(f"{UP}.input_scale", (0,), 1e-39),
        1,
        f"{UP}.input_scale: is flushed: below 1.2e-38, and arithmetic units may take that for zero.",
    ),
    "a global scale missing": (
        "NVFP4",
        tensors(lambda state: state.pop(f"{DOWN}.weight_global_scale")),
        1,
        f"{DOWN}.weight_global_scale: is missing from the files: group_0 (fp4, groups of 16, under a "
        "global scale; inputs fp4, groups of 16, under a global scale, dynamic group scales; nvfp4-pack-"
        "quantized; 64 x 96) has input_global_scale, weight_global_scale, weight_packed and weight_scale.",
    ),
    "a global scale of the inputs that is infinite": (
        "NVFP4",
        put(f"{DOWN}.input_global_scale", (0,), float("inf")),
        1,
        f"{DOWN}.input_global_scale: is infinite.",
    ),
    "gate and up with two global scales": (
        "NVFP4",
        then(put(f"{GATE}.weight_global_scale", (0,), 1000.0), put(f"{UP}.weight_global_scale", (0,), 1234.5)),
        2,  # and the first is not the one that was written, either
        f"{UP}.weight_global_scale: is 1234.5, and that of {GATE} is 1000. Loaders take one for both.",
    ),
    "a key scale missing": (
        "FP8 and kv cache",
        tensors(lambda state: state.pop(f"{L}self_attn.k_scale")),
        1,
        f"{L}self_attn.k_scale: is missing from the files: kv_cache_scheme (fp8, per tensor) has k_scale and v_scale.",
    ),
    "a value scale of zero": (
        "kv cache",
        put(f"{L}self_attn.v_scale", (0,), 0.0),
        1,
        f"{L}self_attn.v_scale: is zero.",
    ),
    "query scales of another shape": (
        "states per head",
        tensors(lambda state: state.update({f"{L}self_attn.q_scale": torch.ones(1)})),
        1,
        f"{L}self_attn.q_scale: has the shape [1], and not [4, 1, 1], as group_0 (fp8, attn_head) has it.",
    ),
    "a shape changed": (
        "W4A16",
        tensors(lambda state: state.update({f"{UP}.weight_scale": state[f"{UP}.weight_scale"][:, :1]})),
        1,
        f"{UP}.weight_scale: has the shape [96, 1], and not [96, 2], as group_0 (int4, groups of 32; pack-"
        "quantized; 96 x 64) has it.",
    ),
    "a scale for each row where there is one for all": (
        "FP8",
        tensors(lambda state: state.update({f"{UP}.weight_scale": torch.ones(96, 1)})),
        1,
        f"{UP}.weight_scale: has the shape [96, 1], and not [1], as group_0 (fp8, per tensor; inputs fp8, "
        "per tensor; float-quantized; 96 x 64) has it.",
    ),
    "rows cut off": (
        "W8A8_DYNAMIC",
        tensors(lambda state: state.update({f"{UP}.weight": state[f"{UP}.weight"][:32]})),
        1,
        f"{UP}.weight: has the shape [32, 64], and not [96, 64], as group_0 (int8, per channel; inputs "
        "int8, per token, dynamic; int-quantized; 96 x 64) has it.",
    ),
    "a dtype changed": (
        "W4A16",
        tensors(lambda state: state.update({f"{UP}.weight_packed": state[f"{UP}.weight_packed"].long()})),
        1,
        f"{UP}.weight_packed: is I64, and not I32, as group_0 (int4, groups of 32; pack-quantized; 96 x 64) has it.",
    ),
    "scales that are integers": (
        "W4A16",
        tensors(lambda state: state.update({f"{UP}.weight_scale": state[f"{UP}.weight_scale"].int()})),
        1,
        f"{UP}.weight_scale: is I32, and not BF16 or F16 or F32, as group_0 (int4, groups of 32; pack-"
        "quantized; 96 x 64) has it.",
    ),
    "a weight that is not quantised": (
        "FP8",
        tensors(lambda state: state.update({f"{UP}.weight": state[f"{UP}.weight"].float()})),
        1,
        f"{UP}.weight: is F32, and not F8_E4M3, as group_0 (fp8, per tensor; inputs fp8, per tensor; "
        "float-quantized; 96 x 64) has it.",
    ),
    "a weight beside its packed self": (
        "W4A16",
        tensors(lambda state: state.update({f"{UP}.weight": torch.zeros(96, 64)})),
        1,
        f"{UP}.weight: is left over: group_0 (int4, groups of 32; pack-quantized; 96 x 64) has "
        "weight_packed, weight_scale and weight_shape.",
    ),
    "a zero point where there should be none": (
        "W4A16",
        tensors(lambda state: state.update({f"{UP}.weight_zero_point": torch.zeros(12, 2, dtype=torch.int32)})),
        1,
        f"{UP}.weight_zero_point: is left over: group_0 (int4, groups of 32; pack-quantized; 96 x 64) has "
        "weight_packed, weight_scale and weight_shape.",
    ),
    "zero points missing": (
        "W4A16_ASYM",
        tensors(lambda state: state.pop(f"{UP}.weight_zero_point")),
        1,
        f"{UP}.weight_zero_point: is missing from the files: group_0 (int4, groups of 32, asymmetric; "
        "pack-quantized; 96 x 64) has weight_packed, weight_scale, weight_shape and weight_zero_point.",
    ),
    "a zero point out of range": (
        "W4A8",
        put(f"{UP}.weight_zero_point", (7, 1), 9),
        1,
        f"{UP}.weight_zero_point: 1 of 192 values is outside of -8 to 7, the range of 4 bits, such as 9.",
    ),
    "a code out of range": (
        "W4A8",
        put(f"{UP}.weight", (7, 1), -128),
        1,
        f"{UP}.weight: 1 of 6144 values is outside of -8 to 7, the range of 4 bits, such as -128.",
    ),
    "a code that is no number": (
        "FP8_DYNAMIC",
        tensors(lambda state: state[f"{UP}.weight"].view(torch.uint8)[7, 1].fill_(255)),
        1,
        f"{UP}.weight: 1 of 6144 values is NaN.",
    ),
    "bits behind the codes": (
        "narrow",
        put(f"{L}mlp.down_proj.weight_packed", (2, -1), -1),
        1,
        f"{DOWN}.weight_packed: behind 84 values of 3 bits there are 4 bits to spare, and 1 of 64 last "
        "words have others than zeros there.",
    ),
    "bits behind the zero points": (
        "narrow",
        put(f"{L}mlp.up_proj.weight_zero_point", (-1, 0), -1),
        1,
        f"{UP}.weight_zero_point: behind 84 values of 3 bits there are 4 bits to spare, and 1 of 1 last "
        "words have others than zeros there.",
    ),
    "a weight_shape that lies": (
        "W4A16",
        put(f"{UP}.weight_shape", (1,), 32),
        1,
        f"{UP}.weight_shape: says [96, 32], and the weight has the shape [96, 64].",
    ),
    "a layer without any of its tensors": (
        "W4A16",
        tensors(lambda state: [state.pop(f"{UP}.weight_{each}") for each in ("packed", "scale", "shape")]),
        3,
        f"{UP}.weight_packed: is missing from the files: group_0 (int4, groups of 32; pack-quantized; 96 x"
        " 64) has weight_packed, weight_scale and weight_shape.",
    ),
    "a tensor of nobody": (
        "W4A16",
        tensors(lambda state: state.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)})),
        1,
        "model.layers.7.mlp.up_proj.weight: is left over: nothing in the model has that name.",
    ),
    "a norm missing": (
        "W4A16",
        tensors(lambda state: state.pop(NORM)),
        1,
        f"{NORM}: is missing from the files.",
    ),
    "a norm that is NaN": (
        "W4A16",
        put(NORM, (5,), float("nan")),
        1,
        f"{NORM}: 1 of 64 values is NaN.",
    ),
    "an embedding that is infinite": (
        "W4A16",
        put(EMBEDDING, (5, 5), float("inf")),
        1,
        f"{EMBEDDING}: 1 of 3072 values is infinite.",
    ),
    "an embedding of another shape": (
        "W4A16",
        tensors(lambda state: state.update({EMBEDDING: state[EMBEDDING][:, :32]})),
        1,
        f"{EMBEDDING}: has the shape [48, 32], and [48, 64] is that of the model.",
    ),
    "a norm in bytes": (
        "W4A16",
        tensors(lambda state: state.update({NORM: state[NORM].to(torch.int8)})),
        1,
        f"{NORM}: is I8, and no quantised layer has it.",
    ),
    "the head missing, which is not shared": (
        "W4A16",
        tensors(lambda state: state.pop("lm_head.weight")),
        1,
        "lm_head.weight: is missing from the files.",
    ),
    "fewer bits by the configuration": (
        "W4A16",
        scheme(lambda group: group["weights"].update(num_bits=3)),
        7,
        f"{Q}.weight_packed: has the shape [64, 8], and not [64, 6], as group_0 (int3, groups of 32; pack-"
        "quantized; 64 x 64) has it.",
    ),
    "fewer bits for integers in bytes": (
        "W8A8_DYNAMIC",
        scheme(lambda group: group["weights"].update(num_bits=4)),
        7,
        f"{Q}.weight: … of 4096 values are outside of -8 to 7, the range of 4 bits, such as -128.",
    ),
    "other groups by the configuration": (
        "W4A16",
        scheme(lambda group: group["weights"].update(group_size=16)),
        7,
        f"{Q}.weight_scale: has the shape [64, 2], and not [64, 4], as group_0 (int4, groups of 16; pack-"
        "quantized; 64 x 64) has it.",
    ),
    "zero points by the configuration": (
        "W8A8_DYNAMIC",
        scheme(lambda group: group["weights"].update(symmetric=False)),
        7,
        f"{Q}.weight_zero_point: is missing from the files: group_0 (int8, per channel, asymmetric; inputs"
        " int8, per token, dynamic; int-quantized; 64 x 64) has weight, weight_scale and "
        "weight_zero_point.",
    ),
    "another strategy by the configuration": (
        "W8A8_DYNAMIC",
        scheme(lambda group: group["weights"].update(strategy="tensor")),
        7,
        f"{Q}.weight_scale: has the shape [64, 1], and not [1], as group_0 (int8, per tensor; inputs int8,"
        " per token, dynamic; int-quantized; 64 x 64) has it.",
    ),
    "static inputs by the configuration": (
        "FP8_DYNAMIC",
        scheme(lambda group: group["input_activations"].update(dynamic=False, strategy="tensor")),
        7,
        f"{Q}.input_scale: is missing from the files: group_0 (fp8, per channel; inputs fp8, per tensor; "
        "float-quantized; 64 x 64) has input_scale, weight and weight_scale.",
    ),
    "a class that is none of transformers'": (
        "W4A16",
        then(config(lambda found: found.update(architectures=["Mine"])), put(f"{UP}.weight_scale", (3, 1), 0.0)),
        1,
        f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is zero.",
    ),
    "dynamic inputs by the configuration": (
        "W8A8",
        scheme(lambda group: group["input_activations"].update(dynamic=True, strategy="token")),
        7,
        f"{DOWN}.input_scale: is left over: group_0 (int8, per channel; inputs int8, per token, dynamic; "
        "int-quantized; 64 x 96) has weight and weight_scale.",
    ),
    "floats by the configuration": (
        "W4A16",
        scheme(lambda group: group["weights"].update(type="float")),
        15,
        f"{Q}: there are no float weights of 4 bits in the format 'pack-quantized', as config.json asks for.",
    ),
    "another format by the configuration": (
        "W4A16",
        config(lambda found: found["quantization_config"].update(format="int-quantized")),
        1,
        "config.json: says that the format is 'int-quantized', and layers are stored as pack-quantized.",
    ),
    "another format of the group": (
        "W8A8_DYNAMIC",
        scheme(lambda group: group.update(format="pack-quantized")),
        22,
        "config.json: says that the format is 'int-quantized', and layers are stored as pack-quantized.",
    ),
    "a head that is not ignored": (
        "W4A16",
        config(lambda found: found["quantization_config"].update(ignore=[])),
        5,
        "lm_head.weight_packed: is missing from the files: group_0 (int4, groups of 32; pack-quantized; "
        "48 x 64) has weight_packed, weight_scale and weight_shape.",
    ),
    "a layer that is ignored": (
        "W4A16",
        config(lambda found: found["quantization_config"]["ignore"].append(UP)),
        5,
        f"{UP}.weight: is missing from the files.",
    ),
    "targets that mean nothing": (
        "kv cache",
        config(lambda found: found["quantization_config"].update(kv_cache_scheme=None)),
        3,
        f"{L}self_attn.k_scale: is left over: nothing in the model has that name.",
    ),
    "a pattern that is none": (
        "W4A16",
        scheme(lambda group: group.update(targets=["re:*("])),
        1,
        "config.json: its quantization_config cannot be read (…).",
    ),
    "a status that is not reached": (
        "W4A16",
        config(lambda found: found["quantization_config"].update(quantization_status="frozen")),
        1,
        "config.json: says that quantization_status is 'frozen', and not 'compressed'.",
    ),
    "no method": (
        "W4A16",
        config(lambda found: found["quantization_config"].pop("quant_method")),
        1,
        "config.json: has no quant_method in its quantization_config, so loaders do not know who reads it.",
    ),
    "zeros that are said to be left out": (
        "W4A16",
        config(lambda found: found["quantization_config"].update(sparsity_config={"format": "sparse-24-bitmask"})),
        1,
        "config.json: says that zeros are left out (sparse-24-bitmask), and no tensor tells where they were.",
    ),
    "another kind of model": (
        "W4A16",
        config(lambda found: found.update(model_type="gpt2")),
        1,
        "config.json: no model can be built of it (LlamaForCausalLM is no model of the type 'gpt2').",
    ),
    "a tokenizer that is cut": ("W4A16", write("tokenizer.json", '{"model": '), 1, "tokenizer.json: is no JSON (…)."),
    "settings of a tokenizer that are none": (
        "W4A16",
        write("tokenizer_config.json", "[]"),
        1,
        "tokenizer_config.json: is no JSON object.",
    ),
    "a strategy that there is not": (
        "W4A16",
        scheme(lambda group: group["weights"].update(strategy="sideways")),
        1,
        "config.json: its quantization_config cannot be read (config_groups.group_0.weights.strategy: …).",
    ),
    "no quantization_config": (
        "W4A16",
        config(lambda found: found.pop("quantization_config")),
        1,
        f"config.json: has no quantization_config, and there is {DOWN}.weight_shape in the files.",
    ),
    "more layers by the configuration": (
        "W4A16",
        config(lambda found: found.update(num_hidden_layers=10**9)),
        1,
        "config.json: no model can be built of it (num_hidden_layers is 1000000000, and there are 26 tensors).",
    ),
    "a size that is none": (
        "W4A16",
        config(lambda found: found.update(hidden_size="wide")),
        1,
        "config.json: no model can be built of it (…).",
    ),
    "a configuration that is no JSON": (
        "W4A16",
        raw(lambda text: text[:-5], "config.json"),
        1,
        "config.json: is no JSON (…).",
    ),
    "no configuration": (
        "W4A16",
        lambda folder: (folder / "config.json").unlink(),
        1,
        "config.json: is missing.",
    ),
    "a recipe that is no YAML": (
        "W4A16",
        lambda folder: (folder / "recipe.yaml").write_text("a: ["),
        1,
        "recipe.yaml: is no YAML (…).",
    ),
    "a record without layers": (
        "W4A16",
        with_json("scalewright.json", lambda found: found.update(layers={})),
        1,
        "scalewright.json: has no list of layers.",
    ),
    "a record of one layer less": (
        "W4A16",
        with_json("scalewright.json", lambda found: found["layers"].pop()),
        1,
        f"{DOWN}: is quantised by config.json, and not by scalewright.json.",
    ),
    "a record of other shapes": (
        "W4A16",
        with_json("scalewright.json", lambda found: found["layers"][5].update(shape=[2, 3])),
        1,
        f"{UP}: has the shape [2, 3] by scalewright.json, and [96, 64] by config.json.",
    ),
    "a shard cut": (
        "W4A16",
        raw(lambda text: text[:-100]),
        1,
        f"{WEIGHTS}: is cut short: model.norm.weight ends at byte 47304, and the file has 47204.",
    ),
    "bytes behind the last tensor": (
        "W4A16",
        raw(lambda text: text + b"more"),
        1,
        f"{WEIGHTS}: has 47308 bytes, and its last tensor ends at 47304.",
    ),
    "no bytes at all": (
        "W4A16",
        raw(lambda text: b""),
        1,
        f"{WEIGHTS}: has 0 bytes, too few for a safetensors file.",
    ),
    "a header longer than the file": (
        "W4A16",
        raw(lambda text: struct.pack("<Q", 2**63) + text[8:]),
        1,
        f"{WEIGHTS}: has 47304 bytes, and says that its header alone takes 9223372036854775808.",
    ),
    "a header that is garbage": (
        "W4A16",
        raw(lambda text: text[:8] + b"\xff" * 40 + text[48:]),
        1,
        f"{WEIGHTS}: its header is no JSON (…).",
    ),
    "a tensor twice in one file": (
        "W4A16",
        raw(lambda text: text.replace(b'"model.norm.weight"', b'"lm_head.weight"   ', 1)),
        1,
        f"{WEIGHTS}: 'lm_head.weight' is twice in its header.",
    ),
    "tensors that overlap": (
        "W4A16",
        header(
            lambda found: found[NORM].update(
                shape=[65], data_offsets=[found[NORM]["data_offsets"][0], found[NORM]["data_offsets"][1] + 4]
            )
        ),
        1,
        f"{WEIGHTS}: {DOWN}.weight_packed begins at byte 27817, before {NORM} ends at 27821: they overlap.",
    ),
    "bytes of no tensor": (
        "W4A16",
        header(lambda found: found.pop(NORM)),
        1,
        f"{WEIGHTS}: the bytes from 27455 to 27711 belong to no tensor.",
    ),
    "a tensor behind the end": (
        "W4A16",
        header(lambda found: found[NORM].update(data_offsets=[2**40, 2**40 + 256])),
        1,
        f"{WEIGHTS}: is cut short: {NORM} ends at byte 1099511630921, and the file has 47545.",
    ),
    "a tensor of other bytes than its shape": (
        "W4A16",
        header(lambda found: found[NORM].update(shape=[63])),
        1,
        f"{WEIGHTS}: {NORM} has 256 bytes, and F32 of shape [63] takes 252.",
    ),
    "a tensor of a dtype that there is not": (
        "W4A16",
        header(lambda found: found[NORM].update(dtype="F7")),
        1,
        f"{WEIGHTS}: {NORM} has the dtype 'F7', which is none that a checkpoint has.",
    ),
    "a tensor of a negative size": (
        "W4A16",
        header(lambda found: found[NORM].update(shape=[-1])),
        1,
        f"{WEIGHTS}: {NORM} has the shape [-1] and the data_offsets [24688, 24944], which make no sense.",
    ),
    "a file that is missing": (
        "W4A16",
        then(sharded, lambda folder: (folder / LAST).unlink()),
        1,
        f"{LAST}: is missing; by {INDEX} it has the tensors of 3 names.",
    ),
    "a file outside of the folder": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found["weight_map"].update({NORM: "../secret.safetensors"}))),
        2,
        f"{INDEX}: names the file '../secret.safetensors', which is outside of the folder. It is not looked at.",
    ),
    "a file of the whole machine": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found["weight_map"].update({NORM: "/etc/passwd"}))),
        2,
        f"{INDEX}: names the file '/etc/passwd', which is outside of the folder. It is not looked at.",
    ),
    "an index that names another file": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found["weight_map"].update({NORM: LAST}))),
        2,
        f"{NORM}: is in model-00002-of-00004.safetensors, and {INDEX} does not say so.",
    ),
    "an index without a tensor": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found["weight_map"].pop(NORM))),
        1,
        f"{NORM}: is in model-00002-of-00004.safetensors, and {INDEX} does not say so.",
    ),
    "an index with another size": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found["metadata"].update(total_size=7))),
        1,
        f"{INDEX}: says that total_size is 7, and all tensors together have 44656 bytes.",
    ),
    "an index without a map": (
        "W4A16",
        then(sharded, with_json(INDEX, lambda found: found.update(weight_map=[1]))),
        1,
        f"{INDEX}: has no weight_map that names a file for each tensor.",
    ),
    "no index": (
        "W4A16",
        then(sharded, lambda folder: (folder / INDEX).unlink()),
        5,
        f"{WEIGHTS}: is missing, and there is no {INDEX} that names other files.",
    ),
    "a tensor in two files": (
        "W4A16",
        then(sharded, tensors(lambda state: state.update({NORM: torch.ones(64)}), LAST)),
        1,
        f"{NORM}: is in two files, model-00002-of-00004.safetensors and {LAST}.",
    ),
    "a file that the index does not know": (
        "W4A16",
        then(sharded, lambda folder: (folder / "model.safetensors").write_bytes(b"")),
        1,
        f"{WEIGHTS}: is not in {INDEX}.",
    ),
    "settings for generation that were cut off": (
        "W4A16",
        write("generation_config.json", '{"eos_token_id": 2,'),
        1,
        "generation_config.json: is no JSON (…).",
    ),
    "a pipe instead of a file": (
        "W4A16",
        then(lambda folder: (folder / WEIGHTS).unlink(), lambda folder: os.mkfifo(folder / WEIGHTS)),
        1,
        f"{WEIGHTS}: is no file.",
    ),
}


MEANT = "Put it back; if that was meant, take it out of 'settings' there."


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found_out(good, name, tmp_path):
    recipe, breaking, count, words = BROKEN[name]
    out = copied(good(recipe)[0], tmp_path / "out")
    breaking(out)
    found = [each for each in problems_of(out) if not each.endswith(MEANT)]  # with and without a record of settings
    assert re.fullmatch(re.escape(words).replace("…", ".+"), found[0]), found[0]
    assert len(found) == count, found


# ---- other good ones -------------------------------------------------------------------------------------------------


def test_a_good_checkpoint_in_several_files_has_no_problem(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    sharded(out)
    assert len(list(out.glob("*.safetensors"))) == 4
    assert problems_of(out, good("W4A16")[1]) == []


@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*experts.*"]], ids=["quantised", "as they were"])
def test_experts_are_found_by_the_names_of_their_checkpoints(ignore, tmp_path):
    model = save_model(tmp_path / "model", "mixtral", num_local_experts=2, num_experts_per_tok=1)
    out = quantise(model, tmp_path / "out", {"scheme": "W4A16", "group_size": 32, "ignore": ignore})
    found = examine(out, against=model)
    assert [*map(str, found.problems), *found.notes] == []
    assert found.num_layers == 4 + 6 * (len(ignore) == 1)
    lost = f"{L}block_sparse_moe.experts.1.w3.weight{'_scale' if len(ignore) == 1 else ''}"
    tensors(lambda state: state.pop(lost))(out)
    assert [each.where for each in verify_checkpoint(out)] == [lost]


def test_experts_share_their_global_scales_too(tmp_path):
    model = save_model(tmp_path / "model", "mixtral", num_local_experts=2, num_experts_per_tok=1, dtype=torch.bfloat16)
    out = quantise(model, tmp_path / "out", {"scheme": "NVFP4A16"})
    assert problems_of(out, model) == []
    put(f"{L}block_sparse_moe.experts.1.w3.weight_global_scale", (0,), 5.0)(out)
    assert [each.where for each in verify_checkpoint(out)] == [f"{L}block_sparse_moe.experts.1.w3.weight_global_scale"]


@pytest.mark.parametrize("recipe", ["W8A8_DYNAMIC", "head", "embedding"])
def test_shared_weights_may_be_stored_once(recipe, tmp_path):
    model = save_model(tmp_path / "model", tie_word_embeddings=True)
    out = quantise(model, tmp_path / "out", RECIPES[recipe])
    found = examine(out, against=model)
    assert [*map(str, found.problems), *found.notes] == []


@pytest.mark.parametrize("has_record", [True, False])
def test_shared_weights_that_are_stored_twice_are_one_weight(has_record, tmp_path):
    model = save_model(tmp_path / "model", tie_word_embeddings=True)
    out = quantise(model, tmp_path / "out", RECIPES["W4A16"])
    if not has_record:
        (out / "scalewright.json").unlink()
    tensors(lambda state: state.update({"lm_head.weight": state[EMBEDDING].clone()}))(out)
    assert problems_of(out) == []
    put("lm_head.weight", (3, 3), 0.5)(out)
    assert problems_of(out) == [
        f"lm_head.weight: is tied to {EMBEDDING}, and has other values. Loaders differ in which they take."
    ]


def test_a_model_may_have_untied_what_its_configuration_ties(tmp_path):
    """Such a model has two weights to transformers, and so has its checkpoint."""
    model = save_model(tmp_path / "model", tie_word_embeddings=True)
    tensors(lambda state: state.update({"lm_head.weight": state[EMBEDDING] * 2}))(model)
    out = quantise(model, tmp_path / "out", RECIPES["W4A16"])
    assert problems_of(out, model) == []


def test_signed_scales_are_those_of_a_recipe_that_asks_for_them(tmp_path):
    model = save_model(tmp_path / "model")
    given = {"scheme": "W4A16", "group_size": 32, "weight_observer": {"name": "optimal", "signed": True}}
    out = quantise(model, tmp_path / "out", {**given, "correction": 0.5, "refinements": 2}, modifier="GPTQModifier")
    assert problems_of(out, model) == []
    (out / "recipe.yaml").unlink()
    found = problems_of(out)
    assert len(found) == 7 and all("and the recipe asks for no signed scales" in each for each in found)


def test_recipes_that_refer_to_themselves_are_looked_through_once():
    loop = {"a": [1, {"b": None}]}
    loop["a"][1]["b"] = loop
    assert not asks_for_signed_scales(loop)
    loop["a"].append({"signed": True})
    assert asks_for_signed_scales(loop)
    assert not asks_for_signed_scales({"signed": "no", "a": [{"signed": False}]})


@pytest.mark.parametrize("recipe", ["W4A16", "W8A8_DYNAMIC", "NVFP4A16", "MXFP8", "signed"])
def test_rows_that_are_as_good_as_zero_are_no_problem(recipe, tmp_path):
    """Training leaves rows of zeros, and of numbers so small that their scales are subnormal."""
    torch.manual_seed(0)
    model = save_model(tmp_path / "model", dtype=torch.bfloat16 if recipe in IN_BF16 else torch.float32)
    tensors(lambda state: state[f"{UP}.weight"][3:6].mul_(torch.tensor([[0.0], [1e-39], [1e-30]])))(model)
    assert problems_of(quantise(model, tmp_path / "out", RECIPES[recipe]), model) == []


class Mine(torch.nn.Module):
    """A hand-written model, with a mask that is infinite where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32, bias=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x):
        return self.second(self.first(x).relu())


BY_NAMES = (
    "config.json: no model was built of it (it names no architecture of transformers), so layers are those that the "
    "names tell."
)


@pytest.mark.parametrize("scheme_name", ["W4A16", "NVFP4A16", "FP8_DYNAMIC", "W4A16_ASYM"])
def test_where_no_model_can_be_built_names_have_to_do(scheme_name, tmp_path):
    torch.manual_seed(0)
    recipe = {"scheme": scheme_name, **({"group_size": 32} if scheme_name.startswith("W4") else {})}
    out = tmp_path / "out"
    oneshot(Mine(), recipe={"modifiers": {"QuantizationModifier": recipe}}, output_dir=out)
    found = examine(out)
    assert ([*map(str, found.problems)], found.notes, found.num_layers) == ([], [BY_NAMES], 2)
    tensors(lambda state: (state.pop("first.weight_scale"), state.update({"second.input_scale": torch.ones(1)})))(out)
    found = verify_checkpoint(out)
    assert [each.where for each in found] == ["first.weight_scale", "second.input_scale"]
    assert found[0].what.startswith("is missing from the files: group_0 (")
    assert found[1].what.startswith("is left over: group_0 (")
    (out / "scalewright.json").unlink()  # without the record, tensors alone tell
    assert [each.where for each in verify_checkpoint(out)][-1] == "second.input_scale"


# ---- beside the original ---------------------------------------------------------------------------------------------


def one_scale_times(factor: float) -> Callable[[Path], None]:
    return tensors(lambda state: state[f"{UP}.weight_scale"][3, 1].mul_(factor))


KEEPS = (
    rf"{re.escape(UP)}: keeps \d+\.\d+ dB of its weight beside the original, and scalewright\.json claims \d+\.\d+\."
)
CHANGED = re.escape(f"{EMBEDDING}: is not quantised, and yet it is not what the original has.")


@pytest.mark.parametrize(
    ("breaking", "words"),
    [(one_scale_times(2), KEEPS), (one_scale_times(1.1), KEEPS), (put(EMBEDDING, (3, 3), 0.5), CHANGED)],
    ids=["a scale doubled", "a scale a tenth larger", "an embedding changed"],
)
def test_what_is_sound_and_yet_not_the_original_is_found_beside_it(good, breaking, words, tmp_path):
    out, model = good("W4A16")
    out = copied(out, tmp_path / "out")
    breaking(out)
    with_json("scalewright.json", lambda told: told.pop("digests"))(out)
    assert problems_of(out) == []
    (found,) = problems_of(out, model)
    assert re.fullmatch(words, found)


@pytest.mark.parametrize(
    "name",
    [name for name, (*_, words) in BROKEN.items() if words.startswith(("model-", WEIGHTS))],
)
def test_files_that_cannot_be_read_are_no_more_than_that_beside_the_original(good, name, tmp_path):
    recipe, breaking, count, words = BROKEN[name]
    out, model = good(recipe)
    out = copied(out, tmp_path / "out")
    breaking(out)
    found = problems_of(out, model)
    assert re.fullmatch(re.escape(words).replace("…", ".+"), found[0]), found[0]
    assert len(found) == count, found


def not_written(name: str) -> str:
    return (
        f"{name}: is not the tensor that was written, by scalewright.json. Copy the checkpoint again, or run again; if "
        "that was meant, take it out of 'digests' there."
    )


def one_bit_of(name: str) -> Callable[[Path], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[name].view(torch.uint8).reshape(-1)[5] ^= 1

    return tensors(change)


@pytest.mark.parametrize("factor", [2, 1.1, 1.01])
def test_a_scale_that_is_not_what_was_written_is_found_without_the_original(good, factor, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    one_scale_times(factor)(out)
    assert problems_of(out) == [not_written(f"{UP}.weight_scale")]


@pytest.mark.parametrize(
    "name", [f"{UP}.weight_packed", f"{UP}.weight_scale", NORM, EMBEDDING, "model.norm.weight", "lm_head.weight"]
)
def test_a_bit_that_was_changed_is_found_without_the_original(good, name, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    one_bit_of(name)(out)
    assert problems_of(out) == [not_written(name)]
    with_json("scalewright.json", lambda told: told["digests"].pop(name))(out)  # as the message has it
    assert problems_of(out) == []


def test_the_same_bytes_in_another_dtype_are_another_tensor(good, tmp_path):
    out = copied(good("NVFP4")[0], tmp_path / "out")
    tensors(lambda state: state.update({NORM: state[NORM].view(torch.float16)}))(out)
    assert problems_of(out) == [not_written(NORM)]


def test_other_problems_do_not_hide_what_was_changed(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    put(f"{UP}.weight_scale", (3, 1), 0.0)(out)
    one_bit_of(NORM)(out)
    assert problems_of(out) == [f"{UP}.weight_scale: 1 of 192 scales, at [3, 1], is zero.", not_written(NORM)]


def test_a_tensor_that_only_the_record_knows_is_missed(tmp_path):
    """No model can be built of it, so nobody else knows that there was a buffer."""
    torch.manual_seed(0)
    out = tmp_path / "out"
    oneshot(
        Mine(), recipe={"modifiers": {"QuantizationModifier": {"scheme": "W8A16", "group_size": 32}}}, output_dir=out
    )
    tensors(lambda state: state.pop("mask"))(out)
    assert problems_of(out) == ["mask: is missing from the files, and was written, by scalewright.json."]


# ---- settings that fit every shape -----------------------------------------------------------------------------------


def generation(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return with_json("generation_config.json", change)


def heads(number: int) -> Callable[[Any], object]:
    return lambda found: found.update(
        num_attention_heads=number, num_key_value_heads=number // 2, head_dim=64 // number
    )


# Recipe; how; the keys that differ, with what they are and what they were.
CHANGED = {
    "an angle": (
        "W4A16",
        config(lambda found: found["rope_parameters"].update(rope_theta=500000.0)),
        ["rope_parameters.rope_theta is 500000.0, and was written as 10000.0"],
    ),
    "an epsilon": (
        "W4A16",
        config(lambda found: found.update(rms_norm_eps=0.1)),
        ["rms_norm_eps is 0.1, and was written as 1e-06"],
    ),
    "other heads of the same size together": (
        "W4A16",
        config(heads(8)),
        [
            "head_dim is 8, and was written as 16",
            "num_attention_heads is 8, and was written as 4",
            "num_key_value_heads is 4, and was written as 2",
        ],
    ),
    "another activation": (
        "W4A16",
        config(lambda found: found.update(hidden_act="relu")),
        ['hidden_act is "relu", and was written as "silu"'],
    ),
    "a tie": (
        "W4A16",
        config(lambda found: found.update(tie_word_embeddings=True)),
        ["tie_word_embeddings is true, and was written as false"],
    ),
    "another end": (
        "W4A16",
        then(
            config(lambda found: found.update(eos_token_id=7)), generation(lambda found: found.update(eos_token_id=7))
        ),
        [
            "config.json: eos_token_id is 7, and was written as 2",
            "generation_config.json: eos_token_id is 7, and was written as 2",
        ],
    ),
    "several ends": (
        "W4A16",
        generation(lambda found: found.update(eos_token_id=[2, 7])),
        ["generation_config.json: eos_token_id is [2, 7], and was written as 2"],
    ),
    "no beginning": (
        "W4A16",
        generation(lambda found: found.pop("bos_token_id")),
        ["generation_config.json: bos_token_id is gone, and was written as 1"],
    ),
    "fewer positions": (
        "W4A16",
        config(lambda found: found.update(max_position_embeddings=8)),
        ["max_position_embeddings is 8, and was written as 32"],
    ),
    "another dtype": (
        "W4A16",
        config(lambda found: found.update(dtype="bfloat16")),
        ['dtype is "bfloat16", and was written as "float32"'],
    ),
    "true for one": (
        "W4A16",
        generation(lambda found: found.update(bos_token_id=True)),
        ["generation_config.json: bos_token_id is true, and was written as 1"],
    ),
    "fewer bits of inputs that are not stored": (
        "W8A8_DYNAMIC",
        scheme(lambda group: group["input_activations"].update(num_bits=4)),
        ["quantization_config.config_groups.group_0.input_activations.num_bits is 4, and was written as 8"],
    ),
    "a group of keys that is gone": (
        "W4A16",
        config(lambda found: found.pop("rope_parameters")),
        ['rope_parameters is gone, and was written as {"rope_theta": 10000.0, "rope_type": "default"}'],
    ),
    "a long one": (
        "W4A16",
        config(lambda found: found.update(hidden_act="x" * 100)),
        [f'hidden_act is "{"x" * 59}..., and was written as "silu"'],
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_that_is_not_what_was_written_is_named_with_what_it_was(good, name, tmp_path):
    recipe, breaking, keys = CHANGED[name]
    out = copied(good(recipe)[0], tmp_path / "out")
    breaking(out)
    told = [f"{key if '.json: ' in key else f'config.json: {key}'}, by scalewright.json. {MEANT}" for key in keys]
    found = problems_of(out)
    assert found[len(found) - len(told) :] == told
    if name not in ("a group of keys that is gone", "a long one"):  # of which no model can be built
        assert len(found) == len(told)
    for file in ("config.json", "generation_config.json"):  # as the message has it
        with_json("scalewright.json", lambda told, file=file: told["settings"].pop(file))(out)
    assert all(not each.endswith(MEANT) for each in problems_of(out))


def saved_again(folder: Path) -> None:
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    GenerationConfig.from_pretrained(folder).save_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [
        saved_again,
        config(lambda found: found.update(transformers_version="4.57.1", _name_or_path="me/mine")),
        config(lambda found: found["quantization_config"].update(version="0.14.0")),
        config(lambda found: found.update(torch_dtype=found.pop("dtype"))),
        config(lambda found: found["rope_parameters"].update(rope_theta=10000)),
        config(lambda found: [found.update({key: found.pop(key)}) for key in sorted(found, reverse=True)]),
        generation(lambda found: found.update(_from_model_config=False, transformers_version="5")),
        write("chat_template.jinja", "{{ messages }}"),
        with_json("scalewright.json", lambda told: told.pop("settings")),
        then(
            with_json("scalewright.json", lambda told: told.pop("settings")),
            config(lambda found: found.update(hidden_act="relu")),
        ),
    ],
    ids=["again", "version", "format", "earlier", "number", "order", "generation", "template", "none", "an older one"],
)
def test_what_is_no_other_model_is_not_talked_about(good, change, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    change(out)
    found = examine(out)
    assert ([str(each) for each in found.problems], found.notes) == ([], [])


def test_settings_that_were_added_are_a_note(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    config(lambda found: found.update(sliding_window=4))(out)
    config(lambda found: found["rope_parameters"].update(factor=2.0))(out)
    generation(lambda found: found.update(temperature=0.7, do_sample=True))(out)
    found = examine(out)
    assert found.problems == []
    config(lambda told: told.update({f"{'x' * 100}{each:02}": 0 for each in range(12)}))(out)
    assert (
        f"{'x' * 60}..., " in examine(out).notes[0] and " and 4 more besides what was written" in examine(out).notes[0]
    )
    rest = "besides what was written; what that does is not verified."
    assert found.notes == [
        f"config.json: has sliding_window, rope_parameters.factor {rest}",
        f"generation_config.json: has temperature, do_sample {rest}",
    ]


def test_how_text_is_drawn_is_a_note(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    with_json(
        "scalewright.json", lambda told: told["settings"]["generation_config.json"].update(temperature=0.6, top_k=5)
    )(out)
    generation(lambda found: found.update(temperature=0.7))(out)
    found = examine(out)
    assert found.problems == []
    assert found.notes == [
        "generation_config.json: temperature is 0.7, and was written as 0.6.",
        "generation_config.json: top_k is gone, and was written as 5.",
    ]


def test_settings_of_generation_that_are_missing_are_missed(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    (out / "generation_config.json").unlink()
    assert problems_of(out) == [
        "generation_config.json: is missing, and was written, by scalewright.json. Copy the checkpoint again."
    ]


@pytest.mark.parametrize("settings_", [[], 3, {"config.json": 3}, "x", {"no such file": None}])
def test_a_record_whose_settings_make_no_sense_says_nothing(good, settings_, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    with_json("scalewright.json", lambda told: told.update(settings=settings_))(out)
    assert problems_of(out) == ["scalewright.json: its settings are no objects by the names of files."]


def test_a_record_names_no_other_file(good, tmp_path):
    (tmp_path / "secret.json").write_text('{"a": 1}')
    out = copied(good("W4A16")[0], tmp_path / "out")
    with_json("scalewright.json", lambda told: told["settings"].update({"../secret.json": {"a": 2}}))(out)
    assert problems_of(out) == []


# ---- files beside them -----------------------------------------------------------------------------------------------


def tokenizer_of_words(ends: str = "</s>") -> PreTrainedTokenizerFast:
    """A tokenizer whose words are those of the tiny models."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 47)}, ends: 47}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token=ends, chat_template="{{ messages }}"
    )


@pytest.fixture(scope="module")
def with_words(tmp_path_factory):
    """A checkpoint that has a tokenizer."""
    model = save_model(tmp_path_factory.mktemp("words") / "model")
    tokenizer_of_words().save_pretrained(model)
    return quantise(model, model.parent / "out", RECIPES["W8A8_DYNAMIC"])


def not_the_file(name: str, *, is_edited: bool = False) -> str:
    meant = (
        "If nobody meant that, copy the checkpoint again."
        if is_edited
        else "Copy the checkpoint again; if that was meant, take it out of 'files' there."
    )
    return f"{name}: is not the file that was written, by scalewright.json. {meant}"


def test_another_vocabulary_is_found(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    assert examine(out).problems == [] and examine(out).notes == []
    with_json("tokenizer.json", lambda told: told["model"]["vocab"].update(w1=2, w2=1))(out)
    assert problems_of(out) == [not_the_file("tokenizer.json")]
    with_json("scalewright.json", lambda told: told["files"].pop("tokenizer.json"))(out)  # as the message has it
    assert problems_of(out) == []


def test_another_end_that_is_saved_by_transformers_is_found(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    tokenizer_of_words(ends="<end>").save_pretrained(out)
    assert problems_of(out) == [not_the_file("tokenizer.json")]


def test_a_chat_template_that_was_edited_is_a_note(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.save_pretrained(out)
    assert examine(out).notes == []
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(out)
    found = examine(out)
    assert found.problems == []
    assert found.notes == [not_the_file("chat_template.jinja", is_edited=True)]


def test_a_file_of_the_tokenizer_that_is_gone_is_missed(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    (out / "tokenizer.json").unlink()
    assert problems_of(out) == [
        "tokenizer.json: is missing, and was written, by scalewright.json. Copy the checkpoint again."
    ]


def test_a_file_that_is_broken_is_told_once(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    (out / "tokenizer.json").write_text("[]")
    assert problems_of(out) == ["tokenizer.json: is no JSON object."]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    (out / "chat_template.jinja").unlink()
    os.mkfifo(out / "chat_template.jinja")
    assert problems_of(out) == ["chat_template.jinja: is no file."]


@pytest.mark.parametrize("name", ["../secret.txt", "/dev/zero", "", "a/../../secret.txt", "x" * 300])
def test_a_record_names_no_file_elsewhere(with_words, name, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    out = copied(with_words, tmp_path / "out")
    with_json("scalewright.json", lambda told: told["files"].update({name: "0"}))(out)
    assert problems_of(out) == []


@pytest.mark.parametrize("files", [[], 3, "x", {"tokenizer.json": 3}])
def test_a_record_whose_files_make_no_sense_says_nothing(with_words, files, tmp_path):
    out = copied(with_words, tmp_path / "out")
    with_json("scalewright.json", lambda told: told.update(files=files))(out)
    assert problems_of(out) == ["scalewright.json: its files are no texts by the names of files."]


def test_pages_and_evaluations_that_come_later_are_nobodys_business(with_words, tmp_path):
    out = copied(with_words, tmp_path / "out")
    for name in ("report.html", "scalewright_evaluation.json", "README.md"):
        (out / name).write_text("{}")
    assert examine(out).problems == [] and examine(out).notes == []


# ---- digests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digests", [None, [], {}, {NORM: 3}, "x", {"no such tensor": None}])
def test_a_record_whose_digests_make_no_sense_says_nothing(good, digests, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    with_json("scalewright.json", lambda told: told.update(digests=digests))(out)
    one_bit_of(NORM)(out)
    problems = [] if digests in (None, {}) else ["scalewright.json: its digests are no texts by the names of tensors."]
    assert problems_of(out) == problems


def test_the_original_may_be_a_name_on_the_hub(good, tmp_path, monkeypatch):
    out, model = good("W4A16")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert verify_error(out, "someone/tiny") == "someone/tiny: there is no such folder."
    cached = tmp_path / "cache" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    copied(model, cached / "snapshots" / ("0" * 40))
    assert verify_checkpoint(out, against="someone/tiny") == []
    tensors(lambda found: found[NORM].mul_(2))(cached / "snapshots" / ("0" * 40))
    assert [each.where for each in verify_checkpoint(out, against="someone/tiny")] == [NORM]


def verify_error(out: Path, against: str) -> str:
    with pytest.raises(ModelError) as caught:
        verify_checkpoint(out, against=against)
    return str(caught.value)


def test_another_model_is_not_the_original(good, tmp_path):
    other = save_model(tmp_path / "other", initializer_range=0.3)
    found = problems_of(good("W4A16")[0], other)
    assert len(found) == 7 + 2  # norms are ones in both
    wide = save_model(tmp_path / "wide", intermediate_size=128)
    assert f"{UP}: has the shape [96, 64], and the original [128, 64]." in problems_of(good("W4A16")[0], wide)


def test_weights_in_another_dtype_are_held_against_what_the_run_was_given(good, tmp_path):
    _, model = good("W8A8_DYNAMIC")
    out = tmp_path / "out"
    given = {"modifiers": {"QuantizationModifier": RECIPES["W8A16"]}}
    oneshot(model, recipe=given, dtype="bfloat16", output_dir=out)
    assert problems_of(out, model) == []


def test_large_weights_are_compared_some_rows_at_a_time(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, out, original = torch.nn.Sequential(torch.nn.Linear(64, 300)), tmp_path / "out", tmp_path / "original"
    original.mkdir()
    save_file(model.state_dict(), original / WEIGHTS)
    (original / "config.json").write_text("{}")
    recipe = {"modifiers": {"QuantizationModifier": {"scheme": "W4A16_ASYM", "group_size": 32}}}
    oneshot(model, recipe=recipe, output_dir=out)
    monkeypatch.setattr("scalewright.checkpoint.values._ELEMENTS", 1000)
    assert problems_of(out, original) == []
    put("0.weight_scale", (299, 1), 1.0)(out)
    assert len(problems_of(out, original)) == 1


def test_an_original_that_cannot_be_compared_with_is_an_error(good, tmp_path):
    out, _ = good("W4A16")
    for folder, words in (
        (out, f"{out}: is quantised already. Give the original."),
        (tmp_path / "none", f"{tmp_path / 'none'}: there is no such folder."),
    ):
        with pytest.raises(ModelError) as caught:
            verify_checkpoint(out, against=folder)
        assert str(caught.value) == words


def test_what_the_original_does_not_have_is_a_note(good, tmp_path):
    out, model = good("W4A16")
    model = copied(model, tmp_path / "model")
    tensors(lambda state: (state.pop(f"{UP}.weight"), state.pop("model.norm.weight")))(model)
    found = examine(out, against=model)
    assert found.problems == []
    assert found.notes == [
        f"{UP}.weight: is not in the original, so it was not compared.",
        "model.norm.weight: is not in the original, so it was not compared.",
    ]


# ---- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [name for name in scheme_names() if name != "UNQUANTIZED"])
def test_layers_are_stored_as_compressed_tensors_stores_them(name, symmetric):
    torch.manual_seed(0)
    scheme = scheme_named(name)
    if scheme.weights.type == "int":
        scheme.weights = scheme.weights.model_copy(update={"symmetric": symmetric})
    rows, columns = 72, 256
    layer = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    initialize_module_for_quantization(layer, scheme, force_zero_point=False)
    for each, parameter in layer.named_parameters():
        if each != "weight":
            parameter.data.fill_(1)
    stored_as = infer_module_format(type(layer), scheme)
    state = {each: tensor for each, tensor in get_direct_state_dict(layer).items() if tensor is not None}
    stored = BaseCompressor.get_value_from_registry(stored_as.value).compress(state, scheme)
    rules = stored_tensors(scheme, stored_as.value, (rows, columns))
    assert {each: tuple(tensor.shape) for each, tensor in stored.items()} == {
        each: rule.shape for each, rule in rules.items()
    }
    for each, tensor in stored.items():
        assert tensor.dtype in [DTYPES[dtype] for dtype in rules[each].dtypes], each


# ---- in a run, and on the command line -------------------------------------------------------------------------------


def test_a_checkpoint_with_a_problem_does_not_get_its_name(good, tmp_path, monkeypatch):
    running = importlib.import_module("scalewright.oneshot")
    save = running.save_checkpoint

    def save_and_break(model, layers, draft, **given):
        save(model, layers, draft, **given)
        for name in (UP, DOWN):
            put(f"{name}.weight_scale", (3, 1), 0.0)(draft)

    out, (_, model) = tmp_path / "out", good("W4A16")
    with monkeypatch.context() as patched:
        patched.setattr(running, "save_checkpoint", save_and_break)
        with pytest.raises(OutputError) as caught:
            quantise(model, out, RECIPES["W4A16"])
    draft = tmp_path / "out.partial" / "checkpoint"
    assert str(caught.value) == (
        f"{out}: is not written, because 2 problems were found in the checkpoint: {UP}.weight_scale: 1 of 192 scales, "
        f"at [3, 1], is zero. It lies in {draft}; `scalewright verify {draft}` shows all of it."
    )
    assert not out.exists()
    assert problems_of(quantise(model, out, RECIPES["W4A16"])) == []


def test_a_copy_is_verified_too(good, tmp_path):
    _, model = good("W8A8_DYNAMIC")
    given = {"modifiers": {"QuantizationModifier": RECIPES["W8A8_DYNAMIC"]}}
    result = oneshot(model, recipe=given, output_dir=tmp_path / "out")
    put(f"{UP}.weight_scale", (3, 0), 0.0)(tmp_path / "out")
    with pytest.raises(OutputError, match="a problem was found in the checkpoint"):
        result.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def invoke(*words: object, code: int) -> str:
    result = CliRunner().invoke(app, ["verify", *map(str, words)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.output


def test_the_command_exits_with_what_it_found(good, tmp_path):
    out, model = good("W4A16")
    assert invoke(out, "--against", model, code=0) == f"{out}: 26 tensors, 7 quantised layers, no problem found.\n"
    assert json.loads(invoke(out, "--json", code=0)) == {
        "problems": [],
        "notes": [],
        "num_tensors": 26,
        "num_layers": 7,
        "out": str(out),
    }
    broken = copied(out, tmp_path / "[bold]out")
    for name in (UP, DOWN):
        put(f"{name}.weight_scale", (3, 1), 0.0)(broken)
    assert invoke(broken, code=1) == (
        f"problem {UP}.weight_scale: 1 of 192 scales, at [3, 1], is zero.\n"
        f"problem {DOWN}.weight_scale: 1 of 192 scales, at [3, 1], is zero.\n"
    )
    assert json.loads(invoke(broken, "--json", code=1))["problems"] == [
        {"where": f"{name}.weight_scale", "what": "1 of 192 scales, at [3, 1], is zero."} for name in (UP, DOWN)
    ]


def test_what_is_no_checkpoint_is_an_error(good, tmp_path):
    (tmp_path / "empty").mkdir()
    other = copied(good("W4A16")[0], tmp_path / "other")
    config(lambda found: found["quantization_config"].update(quant_method="gptq"))(other)
    _, model = good("W4A16")
    for folder, words in (
        (tmp_path / "none", "there is no such folder."),
        (tmp_path / "empty", "is no checkpoint. There is no config.json in it, and no safetensors."),
        (model, "is not quantised. There is no quantization_config in its config.json."),
        (other, "is quantised by 'gptq', and only compressed-tensors can be verified."),
    ):
        assert invoke(folder, code=2).replace("\n", "") == f"error {folder}: {words}".replace("\n", "")


def test_transforms_are_not_verified_and_that_is_said(good, tmp_path):
    out = copied(good("W4A16")[0], tmp_path / "out")
    with_json("scalewright.json", lambda told: told.pop("settings"))(out)
    config(lambda found: found["quantization_config"].update(transform_config={"config_groups": {}}))(out)
    assert examine(out).notes == []
    rotation = {"type": "hadamard", "apply": []}
    config(lambda found: found["quantization_config"].update(transform_config={"config_groups": {"u": rotation}}))(out)
    assert examine(out).notes == ["config.json: has a transform_config; what it does to the model is not verified."]


def test_names_are_shown_as_they_are_and_cannot_play_tricks():
    assert str(Problem("a\x1b[2J\ud800", "is [bold]ü[/bold].")) == "a\\x1b[2J\\ud800: is [bold]ü[/bold]."


# ---- whatever bytes there are ----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def victim(good, tmp_path):
    return copied(good("W4A16")[0], tmp_path / "victim")


def examined(folder: Path) -> None:
    """No error but one that says that it is no checkpoint."""
    with suppress(ModelError):
        found = examine(folder)
        assert all(str(each).isprintable() for each in found.problems)
        json.dumps(found.to_dict())


SLOWLY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOWLY
@given(st.binary(max_size=40), st.integers(0, 4000))
def test_mangled_bytes_of_a_header(victim, noise, place):
    whole = (victim / WEIGHTS).read_bytes()
    (victim / WEIGHTS).write_bytes(whole[:place] + noise + whole[place + len(noise) :])
    examined(victim)
    (victim / WEIGHTS).write_bytes(whole)


def replaced(found, ways, value):
    """`value` in the place of an entry of nested data, which `ways` lead to."""
    keys = list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else []
    if not keys:
        return value
    key = list(keys)[ways[0] % len(keys)]
    found[key] = replaced(found[key], ways[1:], value) if len(ways) > 1 else value
    return found


@SLOWLY
@given(st.lists(st.integers(0, 50), min_size=1, max_size=3), JSON)
def test_mangled_entries_of_a_header(victim, ways, value):
    whole = (victim / WEIGHTS).read_bytes()
    header(lambda found: replaced(found, ways, value))(victim)
    examined(victim)
    (victim / WEIGHTS).write_bytes(whole)


@SLOWLY
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), JSON)
def test_mangled_entries_of_a_configuration(victim, ways, value):
    whole = (victim / "config.json").read_text()
    found = json.loads(whole)
    inside = found["quantization_config"] if ways[0] % 2 else found
    replaced(inside, ways, value)
    (victim / "config.json").write_text(json.dumps(found))
    examined(victim)
    (victim / "config.json").write_text(whole)


@pytest.mark.parametrize("file", ["config.json", "recipe.yaml", "scalewright.json", INDEX, WEIGHTS])
@pytest.mark.parametrize("text", [b"", b"\0" * 100, b"[" * 5_000, b'{"a": 1}', b"[1]", b"\xff\xfe", b"&a [*a]"])
def test_files_of_anything(victim, file, text):
    (victim / file).write_bytes(text)
    examined(victim)


# ---- smoothed weights ------------------------------------------------------------------------------------------------


SAMPLES = torch.randint(0, 48, (4, 16), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def smoothed(tmp_path_factory):
    """A model whose channels are uneven, and a checkpoint of it that was smoothed."""
    where = tmp_path_factory.mktemp("smoothed")
    model = save_model(where / "model", num_hidden_layers=2)
    tensors = load_file(model / "model.safetensors")
    for name, each in tensors.items():
        if name.endswith("layernorm.weight"):
            each[::7] *= 30
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    recipe = {"SmoothQuantModifier": {}, "QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head", "*.1.mlp.*"]}}
    oneshot(model, recipe={"modifiers": recipe}, dataset=SAMPLES, output_dir=where / "good", batch_size=2)
    return model, where / "good"


def record(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        told = json.loads((folder / "scalewright.json").read_text())
        change(told)
        (folder / "scalewright.json").write_text(json.dumps(told))

    return edit


SAID = "scalewright.json: its smoothing"
SMOOTHED_NORM, SMOOTHED_LAYER = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj"
NOT_WHAT_IT_WAS = f"{SMOOTHED_NORM}: is not quantised, and yet it is not what the original has."
ZEROS = base64.b64encode(zlib.compress(bytes(64))).decode()
BOMB = base64.b64encode(zlib.compress(bytes(1 << 24), 9)).decode()
OUTSIDE = base64.b64encode(zlib.compress(bytes([100] * 64))).decode()


def test_a_smoothed_checkpoint_is_held_against_what_the_original_became(smoothed, tmp_path):
    model, good = smoothed
    assert verify_checkpoint(good, against=model) == []
    told = json.loads((good / "scalewright.json").read_text())["smoothing"]
    assert told[SMOOTHED_NORM].keys() == {"rows"}
    assert told["model.layers.0.self_attn.v_proj.weight"].keys() == {"rows", "columns"}
    assert not any("layers.1.mlp" in name for name in told)  # nothing rounds its inputs
    powers = memoryview(zlib.decompress(base64.b64decode(told[SMOOTHED_NORM]["rows"]))).cast("b")
    assert len(powers) == 64 and all(each < 0 for each in powers[::7])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told.pop("smoothing"), NOT_WHAT_IT_WAS),
        (
            lambda told: told["smoothing"].pop(f"{SMOOTHED_LAYER}.weight"),
            f"{SMOOTHED_LAYER}: keeps ",
        ),
        (
            lambda told: told["smoothing"][SMOOTHED_NORM].update(rows=ZEROS),
            NOT_WHAT_IT_WAS,
        ),
        (
            lambda told: told["smoothing"][SMOOTHED_NORM].update(rows=OUTSIDE),
            "scalewright.json: its smoothing has powers beyond all that smoothing does.",
        ),
        (
            lambda told: told["smoothing"][f"{SMOOTHED_LAYER}.weight"].update(rows=ZEROS[:-4]),
            "scalewright.json: its smoothing cannot be unpacked",
        ),
        (
            lambda told: told["smoothing"]["model.layers.0.mlp.down_proj.weight"].update(columns=ZEROS),
            "model.layers.0.mlp.down_proj.weight: by scalewright.json 64 columns of it are smoothed, and its shape is "
            "[64, 96].",
        ),
        (
            lambda told: told["smoothing"][SMOOTHED_NORM].update(rows=BOMB),
            f"{SMOOTHED_NORM}: by scalewright.json 65 rows of it are smoothed, and its shape is [64].",
        ),
        (lambda told: told.update(smoothing=[1]), f"{SAID} is no object."),
        (lambda told: told.update(smoothing={"a": 3}), f"{SAID} has 3, and not rows and columns."),
        (lambda told: told.update(smoothing={"a": {"rows": 3}}), f"{SAID} has 3, and not a text."),
        (lambda told: told.update(smoothing={"a": {"rows": "no base"}}), f"{SAID} cannot be unpacked"),
    ],
)
def test_a_record_that_tells_another_smoothing_is_found_out(smoothed, change, words, tmp_path):
    model, good = smoothed
    broken = Path(shutil.copytree(good, tmp_path / "out"))
    record(change)(broken)
    assert any(str(each).startswith(words) for each in verify_checkpoint(broken, against=model))
    assert verify_checkpoint(broken) == []  # nobody needs it who does not compare


def test_short_texts_that_would_be_gigabytes_are_not_kept(smoothed, tmp_path):
    model, good = smoothed
    broken = Path(shutil.copytree(good, tmp_path / "out"))
    record(lambda told: told["smoothing"].update({f"none.{number}": {"rows": BOMB} for number in range(64)}))(broken)
    tracemalloc.start()
    try:
        assert verify_checkpoint(broken, against=model) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_powers_for_what_nobody_smooths_do_not_fit(tmp_path):
    powers = Powers(rows=torch.ones(4, dtype=torch.int8))
    assert powers.misfit((4, 3)) is None
    assert powers.misfit((4, 3, 4)) == "4 rows of it are smoothed, and its shape is [4, 3, 4]"
    for dtype in (torch.float8_e4m3fn, torch.int8):
        save_file({"a": torch.ones(4, 3).to(dtype), "b": torch.ones(4, 3).to(dtype)}, tmp_path / "some.safetensors")
        tensors = tensors_in(tmp_path / "some.safetensors")
        assert is_same(tensors["a"], tensors["b"])
        assert not is_same(tensors["a"], tensors["b"], powers)
