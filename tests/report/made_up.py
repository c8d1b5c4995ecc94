"""Checkpoint folders as runs leave them, made up: as many layers as one likes, in no time."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

KINDS = (
    *(f"self_attn.{each}_proj" for each in "qkvo"),
    *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
)
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><b onmouseover="window.hacked = 3">\'{{ 7 * 7 }}%{x}${y}&lt;',
    "<a href='javascript:window.hacked=4'>\u2028\u2029<!--",
)

EVALUATION = {
    "kl": {"value": 0.0312, "error": 0.0004},
    "perplexity": {"value": 8.125, "error": 0.05},
    "original_perplexity": {"value": 7.9, "error": None},
    "agreement": 0.93,
    "generation": {"verdict": "It writes as the original does."},
    "positions": [{"first": 1, "last": 8, "kl": {"value": 0.5, "error": 0.1}, "agreement": {"value": 0.9}}],
}


def layer_names(num_blocks: int, *, num_experts: int = 0) -> list[str]:
    """The names of a Llama's layers, or of a Mixtral's."""
    if not num_experts:
        return [f"model.layers.{block}.{kind}" for block in range(num_blocks) for kind in KINDS]
    return [
        f"model.layers.{block}.mlp.experts.{expert}.{kind}_proj"
        for block in range(num_blocks)
        for expert in range(num_experts)
        for kind in ("gate", "up", "down")
    ]


def row(name: str, chance: random.Random, **given: Any) -> dict[str, Any]:
    """A layer as scalewright.json has it."""
    return {
        "name": name,
        "weights": "int4, groups of 128",
        "activations": "as they are",
        "observers": {"weight": "optimal"},
        "shape": [256, 128],
        "weight_db": 20 + chance.random(),
        "gain_db": chance.random(),
        "output_db": 15 + 10 * chance.random(),
        "above_optimum": chance.random() / 100,
        "num_tokens": chance.randrange(4096),
    } | given


def picture(chance: random.Random) -> dict[str, Any]:
    """A histogram as a run keeps it."""
    counts = [round(1e4 * 2 ** -(((each - 32) / 8) ** 2)) + chance.randrange(9) for each in range(64)]
    ends = {"from": -1.0, "to": 1.0, "below": 1, "above": 0, "min": -1.5, "max": 1.2}
    ratios = [0] * 16 + [chance.randrange(9) for _ in range(8)] + [0] * 6
    return ends | {"counts": counts, "chosen": [-1.1, 1.0], "typical": [-0.5, 0.4], "ratios": ratios}


def write_run(folder: Path, rows: Sequence[Mapping[str, Any]], *, has_pictures: bool = True, **given: Any) -> Path:
    """A folder with the files that the page is made from, and a checkpoint of one layer."""
    folder.mkdir(parents=True)
    run = {
        "pipeline": "basic",
        "why": "one pass",
        "num_samples": 8,
        "num_tokens": 4096,
        "seed": 0,
        "bytes_before": 100_000,
        "versions": {"scalewright": "1.0", "torch": "2.0"},
        "notes": [],
        "recipe": {"default_stage": {}},
        "layers": list(rows),
    } | given
    (folder / "scalewright.json").write_text(json.dumps(run))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    if has_pictures:
        chance = random.Random(1)
        pictures = {each["name"]: {"weight": picture(chance), "input": picture(chance)} for each in rows}
        (folder / "scalewright_pictures.json").write_text(json.dumps(pictures))
    name = rows[0]["name"] if rows else "lm_head"
    tensors = {
        f"{name}.weight_packed": torch.zeros(256, 16, dtype=torch.int32),
        f"{name}.weight_scale": torch.zeros(256, 1, dtype=torch.bfloat16),
        f"{name}.weight_shape": torch.tensor([256, 128]),
        "model.norm.weight": torch.zeros(128),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
