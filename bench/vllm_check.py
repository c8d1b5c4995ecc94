"""Shows that vLLM serves our checkpoints: `make vllm`.

A small trained model is quantised, and each checkpoint is loaded by vLLM (on the CPU, in an environment of its own) and
by transformers. They must agree on the log-probability of every token of some texts, and mostly on a greedy
continuation. Results go to `bench/results/vllm.json` and into `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench import tables
from scalewright.oneshot import oneshot

ROOT = Path(__file__).resolve().parents[1]
_HEAD = {"ignore": ["lm_head"]}
_GROUPS = {"group_size": 64}
_SIGNED = {"weight_observer": {"name": "optimal", "signed": True}}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "W8A8": {"QuantizationModifier": {"scheme": "W8A8", **_HEAD}},
    "W8A8, smoothed": {"SmoothQuantModifier": {}, "QuantizationModifier": {"scheme": "W8A8", **_HEAD}},
    "W8A8, signed scales": {"QuantizationModifier": {"scheme": "W8A8", **_SIGNED, **_HEAD}},
    "W8A8, GPTQ": {"GPTQModifier": {"scheme": "W8A8", "correction": 0.5, **_HEAD}},
    "W8A8_DYNAMIC": {"QuantizationModifier": {"scheme": "W8A8_DYNAMIC", **_HEAD}},
    "W4A8": {"QuantizationModifier": {"scheme": "W4A8", **_GROUPS, **_HEAD}},
    "W4A8, signed scales": {"QuantizationModifier": {"scheme": "W4A8", **_GROUPS, **_SIGNED, **_HEAD}},
    "W4A8, GPTQ, signed scales": {
        "GPTQModifier": {"scheme": "W4A8", "correction": 0.5, "refinements": 2, **_GROUPS, **_SIGNED, **_HEAD}
    },
    "FP8_DYNAMIC": {"QuantizationModifier": {"scheme": "FP8_DYNAMIC", **_HEAD}},
}
NUM_GREEDY, MOST_OFF = 60, 0.05
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class Row:
    """How one checkpoint fared."""

    scheme: str
    num_tokens: int
    mean_off: float
    most_off: float
    greedy_agreement: float
    loss_vllm: float
    loss_transformers: float

    @property
    def is_served(self) -> bool:
        """Whether both loaders read the same model."""
        return self.mean_off <= MOST_OFF and self.greedy_agreement > 0.5


def main() -> int:
    """Check every scheme; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, type=Path, help="the Python of the environment that has vLLM")
    parser.add_argument("--model", type=Path, help="a model instead of the one that is trained on the spot")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = options.model or trained_model(folder / "model")
        prompts = some_prompts(model, folder)
        for name, recipe in (*RECIPES.items(), ("as it is", None)):
            print(f"{name} ...", flush=True)
            rows.append(check(name, recipe, model, prompts, folder, options.vllm))
    show(rows)
    result = {"date": str(date.today()), "model": options.model.name if options.model else "trained on the spot"}
    result["rows"] = [asdict(row) for row in rows]
    (ROOT / "bench" / "results" / "vllm.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    tables.main()
    return 0 if all(row.is_served for row in rows) else 1


def trained_model(folder: Path) -> Path:
    """A small model that was trained just now."""
    subprocess.run([sys.executable, ROOT / "examples" / "small_model.py", folder], check=True)
    return folder


def some_prompts(model: Path, folder: Path) -> list[list[int]]:
    """Token ids of texts that the model was not calibrated with."""
    sys.path.insert(0, str(ROOT / "examples"))
    from small_model import read_bytes, samples_of  # noqa: PLC0415 (examples are no package)

    size = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    if size == 256:
        return samples_of(read_bytes(), 8, length=96, seed=99)
    return torch.randint(3, size, (8, 96), generator=torch.Generator().manual_seed(9)).tolist()


def check(
    name: str, recipe: dict[str, Any] | None, model: Path, prompts: list[list[int]], folder: Path, vllm: Path
) -> Row:
    """One checkpoint through both loaders; without a recipe the model as it is."""
    checkpoint = model
    if recipe is not None:
        checkpoint = folder / name
        calibration = some_prompts_for_calibration(model)
        oneshot(model, recipe=recipe, dataset=calibration, output_dir=checkpoint)
    questions, answers = folder / "prompts.json", folder / "answers.json"
    questions.write_text(json.dumps(prompts), encoding="utf-8")
    command = [str(vllm), str(ROOT / "bench" / "vllm_worker.py"), str(checkpoint), str(questions), str(answers)]
    ran = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{name}: vLLM failed.\n{ran.stderr[-3000:]}")
    theirs = json.loads(answers.read_text(encoding="utf-8"))
    loaded, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True, dtype=torch.bfloat16)
    assert not info["missing_keys"], info["missing_keys"]
    off, losses, agreements = [], [[], []], []
    with torch.no_grad():
        for prompt, answer in zip(prompts, theirs, strict=True):
            ids = torch.tensor([prompt])
            log_probs = loaded(ids).logits.float().log_softmax(-1)[0, :-1]
            own = log_probs.gather(1, ids[0, 1:, None])[:, 0]
            other = torch.tensor(answer["log_probs"])
            off.append((own - other).abs())
            losses[0].append(-other.mean())
            losses[1].append(-own.mean())
            greedy = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_GREEDY,
                min_new_tokens=NUM_GREEDY,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :]
            agreements.append((greedy == torch.tensor(answer["greedy"])).float().mean())
    every = torch.cat(off)
    return Row(
        name,
        len(every),
        float(every.mean()),
        float(every.max()),
        float(torch.stack(agreements).mean()),
        float(torch.stack(losses[0]).mean()),
        float(torch.stack(losses[1]).mean()),
    )


def some_prompts_for_calibration(model: Path) -> list[list[int]]:
    """Token ids to calibrate with."""
    from small_model import read_bytes, samples_of  # noqa: PLC0415

    size = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    if size == 256:
        return samples_of(read_bytes(), 64, seed=7)
    return torch.randint(3, size, (64, 128), generator=torch.Generator().manual_seed(8)).tolist()


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(
        "checkpoint", "tokens", "mean |Δ log p|", "largest", "greedy text agrees", "loss, vLLM", "transformers"
    )
    for row in rows:
        table.add_row(
            row.scheme,
            str(row.num_tokens),
            f"{row.mean_off:.4f}",
            f"{row.most_off:.3f}",
            f"{row.greedy_agreement:.0%}",
            f"{row.loss_vllm:.4f}",
            f"{row.loss_transformers:.4f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
