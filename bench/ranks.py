"""How much faster two ranks are than one: `make bench-ranks`, which writes bench/results/ranks.json.

Each rank has one thread. What is timed is the call of `oneshot` on the first rank, from a model in memory and token ids
to a checkpoint on disk. One and two ranks take turns, and the best time of each counts.

On a machine that others use, wall time says little. So processor time is written down, too: for two ranks that of the
slower one between two meetings, summed up over all meetings, which is what a quiet machine would take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright import GPTQModifier, QuantizationModifier, oneshot
from scalewright.calibration.heartbeats import Watch

RESULTS = Path(__file__).with_name("results") / "ranks.json"
WORLDS = (1, 2)
ROUNDS = 2
NUM_SAMPLES, LENGTH = 64, 256
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CASES: dict[str, Any] = {
    "FP8, static": lambda: QuantizationModifier(scheme="FP8", ignore=["lm_head"]),
    "W4A16, optimal with importance": lambda: QuantizationModifier(weights=INT4, ignore=["lm_head"]),
    "W4A16, GPTQ": lambda: GPTQModifier(weights=INT4, ignore=["lm_head"]),
    "W4A16, GPTQ, correction .5": lambda: GPTQModifier(weights=INT4, ignore=["lm_head"], correction=0.5),
}


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="cases whose name has this in it; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(*given.worker, num_samples=given.samples)
        return
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}
    for case in (each for each in CASES if not given.only or any(part in each for part in given.only)):
        turns: dict[int, list[dict[str, float]]] = {world: [] for world in WORLDS}
        load = os.getloadavg()[0]
        for _ in range(given.rounds):
            for world in WORLDS:
                turns[world].append(run(case, world, given.samples))
        best = {world: min(each, key=lambda seconds: seconds["whole"]) for world, each in turns.items()}
        for world, each in turns.items():
            best[world]["processor"] = min(seconds["processor"] for seconds in each)
        speeds = {kind: round(best[1][kind] / best[2][kind], 2) for kind in ("whole", "processor")}
        found[case] = {"seconds": best, "speed": speeds, "load_before": round(load, 1)}
        print(f"{case}: {best[1]} on one rank, {best[2]} on two: {speeds} times as fast")
        told = {"date": date.today().isoformat(), "samples": [given.samples, LENGTH], "model": SIZES, "rows": found}
        RESULTS.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def run(case: str, world: int, num_samples: int) -> dict[str, float]:
    """Seconds by phase, and of the whole, as the first rank sees them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.ranks", "--samples", str(num_samples), "--worker", case, folder]
        if world > 1:
            command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds: dict[str, float] = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
        files = [Path(folder) / f"processor{rank}.json" for rank in range(world)]
        spent = [json.loads(each.read_text(encoding="utf-8")) for each in files]
    return {**seconds, "processor": round(sum(map(max, zip(*spent, strict=True))), 2)}


def work(case: str, folder: str, *, num_samples: int) -> None:
    """One run, on one of the ranks."""
    torch.set_num_threads(1)
    is_first = os.environ.get("RANK", "0") == "0"
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()
    ids = torch.randint(SIZES["vocab_size"], (num_samples, LENGTH))
    marks = [time.process_time()]
    wait = Watch.wait

    def wait_and_mark(self: Watch, work: Any) -> None:
        marks.append(time.process_time())
        wait(self, work)

    Watch.wait = wait_and_mark  # type: ignore[method-assign]
    began = time.perf_counter()
    result = oneshot(model, recipe=CASES[case](), dataset=ids, output_dir=Path(folder) / "out")
    whole = time.perf_counter() - began
    marks.append(time.process_time())
    spent = [later - before for before, later in pairwise(marks)]
    (Path(folder) / f"processor{os.environ.get('RANK', '0')}.json").write_text(json.dumps(spent), encoding="utf-8")
    if is_first:
        seconds = {**result.seconds, "whole": whole}
        text = json.dumps({name: round(each, 2) for name, each in seconds.items()})
        (Path(folder) / "seconds.json").write_text(text, encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
