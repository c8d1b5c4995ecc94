"""Whole runs, from a model in memory to a checkpoint on disk, beside the peer's: part of `make bench`.

Every run is a process of its own, because both sides keep things for the next run. They take turns, and the best time
counts. How good the checkpoints are is judged here, for both sides in the same way: transformers loads them, and the
loss on text that nobody was calibrated with is compared with that of the model as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench import tables
from bench.cases import MODEL
from bench.memory_model import write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DATA = MODEL.parents[1] / "data"
ROUNDS = 2
THREADS = 2
NUM_SAMPLES, LENGTH = 32, 256
EVAL_SAMPLES = 64

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
E4M3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, **E4M3}
PER_CHANNEL, PER_TENSOR = {**INT8, "strategy": "channel"}, {**INT8, "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True)
class RunCase:
    """A recipe that both sides are given: a scheme, or how weights and inputs are quantised."""

    name: str
    scheme: str | None = None
    weights: Mapping[str, Any] | None = None
    inputs: Mapping[str, Any] | None = None
    modifier: str = "QuantizationModifier"

    def recipe(self, group_size: int) -> dict[str, Any]:
        """The fields of the modifier; groups are as large as the model allows."""
        if self.scheme is not None:
            return {"scheme": self.scheme, "targets": ["Linear"], "ignore": ["lm_head"]}
        assert self.weights is not None
        weights = dict(self.weights)
        if weights["strategy"] == "group":
            weights["group_size"] = group_size
        group = {"targets": ["Linear"], "weights": weights, "input_activations": self.inputs and dict(self.inputs)}
        return {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


CASES = (
    RunCase("W4A16, `mse`", weights={**INT4, "observer": "mse"}),
    RunCase("W4A16, `imatrix_mse`", weights={**INT4, "observer": "imatrix_mse"}),
    RunCase("W4A16, `memoryless_minmax`", weights={**INT4, "observer": "memoryless_minmax"}),
    RunCase("W4A16", weights=INT4),
    RunCase("W4A16, GPTQ", weights={**INT4, "observer": "memoryless_minmax"}, modifier="GPTQModifier"),
    RunCase("W4A16, GPTQ, `imatrix_mse`", weights={**INT4, "observer": "imatrix_mse"}, modifier="GPTQModifier"),
    RunCase("W8A8 static", weights=PER_CHANNEL, inputs=PER_TENSOR),
    RunCase(
        "W8A8 static, `minmax`",
        weights={**PER_CHANNEL, "observer": "minmax"},
        inputs={**PER_TENSOR, "observer": "minmax"},
    ),
    RunCase("INT8 (dynamic)", scheme="INT8"),
    RunCase("FP8", scheme="FP8"),
    RunCase(
        "FP8, `memoryless_minmax`",
        weights={**FP8, "strategy": "tensor", "observer": "memoryless_minmax"},
        inputs={**FP8, "strategy": "tensor", "dynamic": False, "observer": "static_minmax"},
    ),
    RunCase(
        "FP8_DYNAMIC, `memoryless_minmax`",
        weights={**FP8, "strategy": "channel", "observer": "memoryless_minmax"},
        inputs={**FP8, "strategy": "token", "dynamic": True},
    ),
    RunCase("FP8_DYNAMIC", scheme="FP8_DYNAMIC"),
    RunCase("NVFP4", scheme="NVFP4"),
    RunCase(
        "NVFP4, `memoryless_minmax`",
        weights={**NVFP4, "observer": "memoryless_minmax"},
        inputs={**NVFP4, "dynamic": "local", "observer": "static_minmax"},
    ),
    RunCase("NVFP4A16", scheme="NVFP4A16"),
)


@dataclass(frozen=True)
class Subject:
    """A model to be quantised, in a folder, with tokens to calibrate on and others to judge by."""

    name: str
    folder: Path
    group_size: int
    calibration: Tensor
    held_out: Tensor | None = None


def subjects(folder: Path) -> Iterator[Subject]:
    """A random model with layers of a usual size, and a small trained one if it is there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 512},
    )
    random_model = folder / "random"
    LlamaForCausalLM(config).save_pretrained(random_model)
    write_tokenizer(config.vocab_size, random_model)
    yield Subject("6 layers of 1024", random_model, 128, torch.randint(config.vocab_size, (NUM_SAMPLES, LENGTH)))
    if MODEL.is_dir() and DATA.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        calibration, held_out = (
            rows_of(tokenizer, DATA / f"tinystories_{part}.txt", count)
            for part, count in (("calib", NUM_SAMPLES), ("eval", EVAL_SAMPLES))
        )
        yield Subject(MODEL.name, MODEL, 32, calibration, held_out)


def rows_of(tokenizer: Any, file: Path, count: int) -> Tensor:
    """The first documents of a file, each behind its token of beginning, one after the other and cut into rows."""
    documents = file.read_text(encoding="utf-8").split("<|endoftext|>")[: 4 * count]
    ids = [
        id_
        for each in documents
        for id_ in [tokenizer.bos_token_id, *tokenizer(each.strip(), add_special_tokens=False)["input_ids"]]
    ]
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


def run_all(
    peer: str,
    machine: Mapping[str, Any],
    is_wanted: Callable[[str], bool],
    *,
    keep: bool,
    quick: bool,
    console: Console,
) -> list[str]:
    """Measure every wanted case, writing results after each; returns the problems met."""
    rows = {tables.key_of(row): row for row in tables.read_results("runs")["rows"] if keep}
    problems = []
    with tempfile.TemporaryDirectory(prefix="bench-runs-") as scratch:
        folder = Path(scratch)
        for subject in subjects(folder):
            before = loss_of(subject.folder, subject.held_out)
            for case in CASES:
                title = f"runs: {case.name}, {subject.name}"
                if not is_wanted(title):
                    continue
                found = measure(
                    case, subject, {"ours": sys.executable, "peer": peer}, folder, rounds=1 if quick else ROUNDS
                )
                problems += [found["problem"]] if "problem" in found else []
                row = {"case": case.name, "weights": subject.name, "loss_before": before, **found}
                row |= {"date": date.today().isoformat(), "quick": quick}
                rows[tables.key_of(row)] = row
                tables.write_results("runs", machine, list(rows.values()))
                seconds = [found[side]["seconds"] for side in ("peer", "ours")] if "problem" not in found else []
                console.print(title, *(f"{each:.2f} s" for each in seconds), highlight=False)
    return problems


def titles() -> list[str]:
    """The names of all that can be measured here."""
    return [f"runs: {case.name}, {name}" for name in ("6 layers of 1024", MODEL.name) for case in CASES]


def measure(
    case: RunCase, subject: Subject, pythons: Mapping[str, str], folder: Path, *, rounds: int
) -> dict[str, Any]:
    """Best seconds, least of the memory peaks and loss of both sides, which take turns."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
    losses: dict[str, float | None] = {}
    for _ in range(rounds):
        for side, python in pythons.items():
            with tempfile.TemporaryDirectory(dir=folder) as out:
                try:
                    answers[side].append(one_run(case, subject, side, python, Path(out)))
                except RuntimeError as error:
                    return {"problem": f"{side}, {case.name}, {subject.name}: {error}"}
                if side not in losses:
                    # transformers restores NVFP4 in bf16, and then all must be in it
                    dtype = torch.bfloat16 if case.name.startswith("NVFP4") else torch.float32
                    losses[side] = loss_of(Path(out) / "checkpoint", subject.held_out, dtype=dtype)
    return {
        side: {
            "seconds": min(each["seconds"] for each in own),
            "extra_bytes": min((each["extra_bytes"] for each in own if each["extra_bytes"] is not None), default=None),
            "loss": losses[side],
        }
        for side, own in answers.items()
    }


def one_run(case: RunCase, subject: Subject, side: str, python: str, folder: Path) -> dict[str, Any]:
    """What a worker answers; RuntimeError with its last words if it does not."""
    request = {"model": str(subject.folder), "tokens": str(folder / "tokens.safetensors"), "threads": THREADS}
    request |= {"out": str(folder / "checkpoint"), "recipe": case.recipe(subject.group_size), "modifier": case.modifier}
    save_file({"ids": subject.calibration.contiguous()}, request["tokens"])
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    command: Sequence[str] = [
        python,
        "-m",
        "bench.runs_worker",
        side,
        str(folder / "request.json"),
        str(folder / "answer.json"),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or ["no word"])[-1])
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


@torch.no_grad()
def loss_of(checkpoint: Path, rows: Tensor | None, *, dtype: torch.dtype = torch.float32) -> float | None:
    """Mean negative log-probability of the held-out tokens, with transformers as the loader; None without any."""
    if rows is None:
        return None
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    losses = [float(model(input_ids=each, labels=each).loss) for each in rows.split(8)]
    return sum(losses) / len(losses)
