"""What models take that are too large to be tried here, on paper: `make bench-scaling`.

The shapes are real, the rates are measured on this machine, and the reckoning is that of `scalewright plan`. Results go
to `bench/results/scaling.json` and into `docs/scaling.md`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from bench.tables import BEGIN, END, RESULTS
from scalewright.planning import PlanReport, plan_of
from scalewright.quality import recipe_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
FILE = RESULTS / "scaling.json"
SAMPLES, LENGTH = 512, 2048
MEMORY = "8GB"  # beyond which what flows between blocks waits on disk
RANKS = (1, 8, 64)
MODELS: dict[str, PretrainedConfig] = {
    "70B, dense": LlamaConfig(
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    ),
    "1T, 384 experts": DeepseekV3Config(
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8},
        **{"n_group": 1, "topk_group": 1, "vocab_size": 163840, "first_k_dense_replace": 1},
    ),
}
RECIPES = {
    "W4A16, `fast`": ("fast", "W4A16"),
    "FP8, static": ("balanced", "FP8"),
    "W4A16, `best`": ("best", "W4A16"),
}

Row = dict[str, Any]


def main() -> int:
    """Reckon all of it, and write results and table."""
    console = Console(stderr=True)
    rows: list[Row] = []
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config.dtype = torch.bfloat16
            config.save_pretrained(folder)
            for recipe, (quality, scheme) in RECIPES.items():
                rows.append(row_of(name, recipe, plan(folder, quality, scheme)))
                console.print(rows[-1])
    told = {"date": date.today().isoformat(), "threads": torch.get_num_threads(), "rows": rows}
    FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN, maxsplit=1)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{markdown(told)}\n\n{END}{after}", encoding="utf-8")
    return 0


def plan(folder: str, quality: str, scheme: str) -> PlanReport:
    """On one rank."""
    given: dict[str, Any] = {
        "has_data": quality != "fast",
        "num_samples": SAMPLES,
        "max_seq_length": LENGTH,
        "max_memory": MEMORY,
    }
    return plan_of(folder, recipe_for(quality, scheme), **given)


def row_of(model: str, recipe: str, planned: PlanReport) -> Row:
    """What is told of a model and a recipe."""
    own = planned.seconds - planned.shared_seconds
    return {
        "model": model,
        "recipe": recipe,
        "bytes_before": planned.bytes_before,
        "bytes_after": planned.bytes_after,
        "disk_bytes": planned.disk_bytes,
        "peak_bytes": planned.peak_bytes,
        "seconds": {str(ranks): round(own + planned.shared_seconds / ranks) for ranks in RANKS},
    }


def markdown(told: Row) -> str:
    """The table."""
    head = ["model", "recipe", "from", "to", "memory of a rank", "disk besides the model"]
    head += [f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks in RANKS]
    lines = [
        [
            row["model"],
            row["recipe"],
            *(f"{row[key] / 1e9:.0f} GB" for key in ("bytes_before", "bytes_after")),
            f"{row['peak_bytes'] / 1e9:.1f} GB",
            f"{row['disk_bytes'] / 1e9:.0f} GB",
            *(in_words(row["seconds"][str(ranks)]) for ranks in RANKS),
        ]
        for row in told["rows"]
    ]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---" for _ in head], *lines))
    return f"Reckoned on {told['date']}, with rates of {told['threads']} threads of a CPU.\n\n{table}"


def in_words(seconds: float) -> str:
    """Minutes, hours or days."""
    hours = seconds / 3600
    if hours < 1:
        return f"{seconds / 60:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


if __name__ == "__main__":
    sys.exit(main())
