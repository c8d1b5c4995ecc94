"""A contestant in `make bench-memory`: one process that quantises one model on disk once, and says its peak.

python -m bench.memory_worker ours | peer REQUEST.json ANSWER.json
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.runs_worker import data_for, modifier_named
from bench.worker import PACKAGES, status


def main() -> None:
    """Do what the request says, and write the answer."""
    side, request_file, answer_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    package = PACKAGES[side]
    oneshot = importlib.import_module(package).oneshot
    modifier = modifier_named(package, request["modifier"])(**request["recipe"])
    options = {"output_dir": request["out"]}
    if request["samples"]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, request["vocabulary"], (request["samples"], request["length"]), generator=generator)
        data, more = data_for(side, ids)
        options |= more | {
            "dataset": data,
            "max_seq_length": request["length"],
            "num_calibration_samples": request["samples"],
        }
    foretold = _foretold(request, modifier) if side == "ours" else {}
    at_start = status("VmHWM")
    started = time.perf_counter()
    oneshot(model=request["model"], recipe=[modifier], **options)
    seconds = time.perf_counter() - started
    answer = {"peak_bytes": status("VmHWM"), "at_start": at_start, "seconds": seconds, **foretold}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _foretold(request: Mapping[str, Any], modifier: Any) -> dict[str, float]:
    """What `scalewright plan` says of the run."""
    from scalewright.planning import plan_of  # noqa: PLC0415 (the peer's environment has none of it)

    has_data = bool(request["samples"])
    planned = plan_of(
        request["model"],
        [modifier],
        has_data=has_data,
        num_samples=request["samples"] or 1,
        max_seq_length=request["length"],
    )
    return {"foretold_bytes": planned.peak_bytes, "foretold_seconds": planned.seconds}


if __name__ == "__main__":
    main()
