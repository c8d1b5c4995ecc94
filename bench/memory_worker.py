"""A contestant in `make bench-memory`: one process that quantises one model on disk once, and says its peak.

python -m bench.memory_worker ours | peer REQUEST.json ANSWER.json
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

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
    at_start = status("VmHWM")
    started = time.perf_counter()
    oneshot(model=request["model"], recipe=[modifier], **options)
    answer = {"peak_bytes": status("VmHWM"), "at_start": at_start, "seconds": time.perf_counter() - started}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
