"""Peak memory of whole runs from a model on disk, beside the peer's: `make bench-memory`.

A peak is what the system says of a process at its end (VmHWM): all that was resident at once, mapped files included.
Models are made on the spot, with random weights, and taken away again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import tables
from bench.memory_model import VOCABULARY, write_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "memory.json"
DEPTHS, DEEP = (4, 8, 16), 30
SAMPLES, LENGTH = 16, 256
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


@dataclass(frozen=True)
class MemoryCase:
    """A recipe, and the memory that it may take on a model of any depth."""

    name: str
    recipe: Mapping[str, Any]
    limit: float
    """GB."""
    modifier: str = "QuantizationModifier"
    samples: int = 0
    peer: Mapping[str, Any] | None = None
    """What the peer is given, if it has another name for the same."""


def _group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group: dict[str, Any] = {"weights": dict(weights), "targets": ["Linear"]}
    if inputs is not None:
        group["input_activations"] = dict(inputs)
    return {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_STATIC = {**INT8, "strategy": "tensor", "dynamic": False}
_CHANNEL = {**INT8, "strategy": "channel"}
CASES = (
    MemoryCase(
        "W4A16, data-free",
        _group({**INT4, "observer": "optimal"}),
        1.2,
        peer=_group({**INT4, "observer": "memoryless_minmax"}),
    ),
    MemoryCase("NVFP4A16, data-free", {"scheme": "NVFP4A16", "targets": ["Linear"], "ignore": ["lm_head"]}, 1.2),
    MemoryCase("NVFP4", {"scheme": "NVFP4", "targets": ["Linear"], "ignore": ["lm_head"]}, 1.2, samples=SAMPLES),
    MemoryCase("W8A8, static", _group(_CHANNEL, _STATIC), 2.0, samples=SAMPLES),
    MemoryCase("W4A16, GPTQ", _group(INT4), 2.0, modifier="GPTQModifier", samples=SAMPLES),
)


def main() -> None:
    """Run all of it, and write results, table and page."""
    options = _options()
    console = Console(stderr=True)
    done = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if options.go_on and RESULTS.exists() else []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for depth in sorted({*DEPTHS, DEEP} if not options.depths else options.depths):
            model = Path(folder) / f"model-{depth}"
            num_bytes = write_model(depth, model)
            for case, side in _runs(options, depth):
                known = {"case": case.name, "side": side, "layers": depth}
                if any(all(row[key] == value for key, value in known.items()) for row in done):
                    continue
                answer = _run(side, case, model, Path(folder), options)
                row = {**known, "model_bytes": num_bytes, "limit": case.limit if side == "ours" else None, **answer}
                done.append(row)
                console.print(f"{depth:3} layers, {case.name}, {side}: {answer['peak_bytes'] / 1e9:.2f} GB")
                RESULTS.write_text(json.dumps({"date": str(date.today()), "rows": done}, indent=1), encoding="utf-8")
            shutil.rmtree(model)
    tables.main()


def _runs(options: argparse.Namespace, depth: int) -> Iterator[tuple[MemoryCase, str]]:
    for case in CASES:
        if options.only and options.only not in case.name:
            continue
        yield case, "ours"
        if options.peer and depth != DEEP:
            yield case, "peer"


def _run(side: str, case: MemoryCase, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    recipe = case.peer if side == "peer" and case.peer is not None else case.recipe
    request = {
        **asdict(case),
        "recipe": recipe,
        "model": str(model),
        "out": str(out),
        "threads": options.threads,
        "length": LENGTH,
        "vocabulary": VOCABULARY,
    }
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    python = sys.executable if side == "ours" else options.peer
    command = [python, "-m", "bench.memory_worker", side, str(request_file), str(answer_file)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    shutil.rmtree(out)
    answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    return answer


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="the peer's interpreter; without it ours runs alone")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--depths", type=int, nargs="*", help="numbers of layers instead of 4, 8, 16 and 30")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--go-on", action="store_true", help="keep the rows that there are")
    parser.add_argument("--folder", help="where models of up to 4 GB are written for a while")
    return parser.parse_args()


if __name__ == "__main__":
    main()
