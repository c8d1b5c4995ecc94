"""Good checkpoints of a tiny random model, and ways to break them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scalewright.checkpoint.shards import tensors_in, write_shards
from scalewright.oneshot import oneshot

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FP8_STATES = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
PER_HEAD = {**FP8_STATES, "strategy": "attn_head"}
INT4_BYTES = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}
RECIPES: dict[str, dict[str, Any]] = {
    "W4A16": {"scheme": "W4A16", "group_size": 32},
    "W4A16_ASYM": {"scheme": "W4A16_ASYM", "group_size": 32},
    "W3A16": {"scheme": "W3A16", "group_size": 32},
    "W5A16 by rows": {"weights": {"num_bits": 5, "type": "int", "strategy": "channel", "symmetric": False}},
    "narrow": {"weights": {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": False}},
    "W8A16": {"scheme": "W8A16", "group_size": 32},
    "W4A8": {"weights": INT4_BYTES, "input_activations": INT8_TOKENS},
    "W8A8": {"scheme": "W8A8"},
    "W8A8_DYNAMIC": {"scheme": "W8A8_DYNAMIC"},
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8_BLOCK": {"weights": BLOCKS},
    "NVFP4": {"scheme": "NVFP4"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4": {"scheme": "MXFP4"},
    "MXFP6": {"scheme": "MXFP6A16"},
    "MXFP8": {"scheme": "MXFP8"},
    "kv cache": {"kv_cache_scheme": FP8_STATES},
    "FP8 and kv cache": {"scheme": "FP8", "kv_cache_scheme": FP8_STATES},
    "states per head": {"config_groups": {"a": {"targets": ["LlamaAttention"], "input_activations": PER_HEAD}}},
    "mixed": {
        "config_groups": {"W8A8_DYNAMIC": ["re:.*self_attn.*"], "W8A16": ["*.down_proj"], "FP8_DYNAMIC": ["Linear"]},
        "group_size": 32,
    },
    "signed": {"scheme": "W4A16", "group_size": 32, "weight_observer": {"name": "optimal", "signed": True}},
    "head": {"scheme": "W8A8_DYNAMIC", "ignore": []},
    "embedding": {"scheme": {"W8A16": ["Embedding"]}, "group_size": 32},
}
OTHER_SIZES = {"narrow": {"intermediate_size": 84}}  # 84 values of 3 bits leave bits to spare
IN_BF16 = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP6", "MXFP8")
IDS = torch.randint(0, 48, (4, 16), generator=torch.Generator().manual_seed(1)).tolist()


def save_model(folder: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A random model on disk."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def quantise(model: Path, out: Path, recipe: dict[str, Any], *, modifier: str = "QuantizationModifier") -> Path:
    given = {"modifiers": {modifier: {"ignore": ["lm_head"], **recipe}}}
    oneshot(model, recipe=given, dataset=IDS, output_dir=out)
    return out


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


# ---- ways to break ---------------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensors(change: Callable[[dict[str, Tensor]], object], file: str = WEIGHTS) -> Callable[[Path], None]:
    """Tensors of a file are changed, and it is written anew."""

    def breaking(folder: Path) -> None:
        state = load_file(folder / file)
        change(state)
        save_file({name: each.contiguous() for name, each in state.items()}, folder / file, metadata={"format": "pt"})

    return breaking


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    """One number of a tensor is another one."""

    def change(state: dict[str, Tensor]) -> None:
        as_bytes = state[name].dtype == torch.float8_e4m3fn
        whole = state[name].float() if as_bytes else state[name]
        whole[place] = value
        state[name] = whole.to(state[name].dtype)

    return tensors(change)


def with_json(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def breaking(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        change(found)
        (folder / file).write_text(json.dumps(found))

    return breaking


def config(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return with_json("config.json", change)


def scheme(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """The one group of the configuration is changed."""
    return config(lambda found: change(found["quantization_config"]["config_groups"]["group_0"]))


def header(change: Callable[[Any], object], file: str = WEIGHTS) -> Callable[[Path], None]:
    """The header of a file is changed, and no byte behind it."""

    def breaking(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        found = json.loads(raw[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return breaking


def raw(change: Callable[[bytes], bytes], file: str = WEIGHTS) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def write(file: str, text: str) -> Callable[[Path], None]:
    """A file has another text."""

    def run(folder: Path) -> None:
        (folder / file).write_text(text)

    return run


def sharded(folder: Path) -> None:
    """The same tensors in several files, with an index."""
    whole = (folder / WEIGHTS).rename(folder / "all.safetensors")
    write_shards(folder, tensors_in(whole), max_bytes=16_000)
    whole.unlink()


def then(*steps: Callable[[Path], object]) -> Callable[[Path], None]:
    def breaking(folder: Path) -> None:
        for step in steps:
            step(folder)

    return breaking
