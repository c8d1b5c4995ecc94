"""What a budget of bits buys: `make bench-budget`, or `python -m bench.budget --only stories15M`.

For each model and quality: every scheme of a set for all layers, and the choice of `share_out` with as many bits as one
of these takes, or between two of them. Both are quantised with the same calibration tokens, written, loaded by
transformers and judged as in `bench.accuracy`; bits are counted in the files. Results go to `bench/results/budget.json`
after each row, and into `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import tables
from bench.accuracy import CACHE, MODELS, Judge, Model, Subject, bits_per_weight, folder_of, quiet, subject_of
from scalewright import oneshot
from scalewright.budget import share_out
from scalewright.quality import recipe_for
from scalewright.sensitivity import Sensitivity, measure_sensitivity

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, a set of schemes, how they are rounded, and budgets: each the bits of a scheme, and some more."""

    model: Model
    schemes: tuple[str, ...]
    quality: str
    budgets: tuple[tuple[str, float], ...]

    @property
    def title(self) -> str:
        """What `--only` looks at."""
        return f"{self.model.name}, {self.quality}, {'/'.join(self.schemes)}"


THREE = ("W3A16", "W4A16", "W8A16")
FIVE = ("W3A16", "W4A16", "W5A16", "W6A16", "W8A16")
CASES = (
    Case(MODELS[0], THREE, "balanced", (("W4A16", 0.0), ("W4A16", 0.5))),
    Case(MODELS[0], FIVE, "balanced", (("W4A16", 0.0), ("W5A16", 0.0))),
    Case(MODELS[0], THREE, "best", (("W4A16", 0.0),)),
    Case(MODELS[1], THREE, "balanced", (("W4A16", 0.0),)),
)


def recipes_of(case: Case, found: Sensitivity) -> list[tuple[str, Any, float | None]]:
    """All that is compared: what it is called, its recipe, and the KL that was foreseen."""
    size = case.model.group_size
    uniform = [(f"{each} for all", recipe_for(case.quality, each, group_size=size), None) for each in case.schemes]
    chosen = []
    for scheme, more in case.budgets:
        allocation = share_out(found, found.bits_of(scheme) + more)
        chosen.append((f"chosen, bits of {scheme}{f' + {more:g}' if more else ''}", allocation.recipe, allocation.loss))
    return [*uniform, *chosen]


def measure(recipe: Any, subject: Subject, judge: Judge) -> Row:
    """Quantise, and judge what came of it."""
    with tempfile.TemporaryDirectory(prefix="bench-budget-") as scratch:
        out = Path(scratch) / "checkpoint"
        started = time.perf_counter()
        oneshot(load(subject), recipe=recipe, dataset=subject.calibration, output_dir=out, **lengths(subject))
        seconds = time.perf_counter() - started
        judged = judge.judge(out, torch.float32)
        return {**judged, "seconds": seconds, "bits": bits_per_weight(out, subject.folder)}


def load(subject: Subject) -> Any:
    """The model in fp32, as in `bench.accuracy`."""
    return AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32)


def lengths(subject: Subject) -> Row:
    """How many samples there are, and how long they are."""
    rows = subject.calibration
    return {"max_seq_length": max(map(len, rows)), "num_calibration_samples": len(rows)}


def run(case: Case, rows: list[Row], *, smollm2: Path, threads: int, quick: bool) -> None:
    """Measure a case; rows that are there already stay."""
    subject = subject_of(case.model, folder_of(case.model, smollm2), quick=quick)
    with tempfile.TemporaryDirectory(prefix="bench-budget-") as scratch, quiet():
        judge = Judge(subject, Path(scratch) / "logits")
        started = time.perf_counter()
        options = {"schemes": case.schemes, "quality": case.quality, "group_size": case.model.group_size}
        found = measure_sensitivity(load(subject), subject.calibration, **options, **lengths(subject))
        measuring = time.perf_counter() - started
        for name, recipe, foreseen in recipes_of(case, found):
            labels = {"weights": case.model.name, "scheme": "/".join(case.schemes), "contestant": name}
            labels["case"] = case.quality
            row = {**labels, **measure(recipe, subject, judge), "foreseen": foreseen, "measuring_seconds": measuring}
            row |= {"num_samples": len(subject.calibration), "num_tokens": judge.num_tokens, "threads": threads}
            row |= {"group_size": case.model.group_size, "date": date.today().isoformat(), "quick": quick}
            rows[:] = [each for each in rows if tables.key_of(each) != tables.key_of(row)] + [row]
            tables.write_results("budget", machine(), rows)
            print(f"{case.title}: {name}: KL {row['kl']:.4f} with {row['bits']:.3f} bits", flush=True)


def machine() -> Row:
    """Where it was measured."""
    return {"cores": os.cpu_count(), "system": platform.system(), "torch": torch.__version__.partition("+")[0]}


def main(words: Sequence[str] | None = None) -> int:
    """Measure all cases, or some, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help='a part of a title, such as "stories15M, best"')
    parser.add_argument("--quick", action="store_true", help="8 samples: rough, and marked as such")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--smollm2", type=Path, default=CACHE / "SmolLM2-135M", help="where SmolLM2 is, or is put")
    options = parser.parse_args(words)
    cases = [case for case in CASES if not options.only or any(each in case.title for each in options.only)]
    if not cases:
        parser.error(f"nothing is called {' or '.join(options.only)}.")
    torch.set_num_threads(options.threads)
    rows: list[Row] = list(tables.read_results("budget")["rows"])
    for case in cases:
        run(case, rows, smollm2=options.smollm2.resolve(), threads=options.threads, quick=options.quick)
    tables.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
