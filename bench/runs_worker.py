"""A contestant in whole runs: one process that quantises one model once, in our environment or in the peer's.

    python -m bench.runs_worker ours | peer REQUEST.json ANSWER.json

What is timed is the call of `oneshot`, from a model in memory and token ids to a checkpoint on disk. Importing and
loading come before.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.worker import PACKAGES, start_measuring_memory, status


def main() -> None:
    """Do what the request says, and write the answer."""
    side, request_file, answer_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    package = PACKAGES[side]
    oneshot = importlib.import_module(package).oneshot
    modifier = modifier_named(package, request["modifier"])(**request["recipe"])
    ids = load_file(request["tokens"])["ids"]
    model = AutoModelForCausalLM.from_pretrained(request["model"])
    for each in model.parameters():  # a mapped file would become memory only when somebody reads it
        each.data = each.data.clone()
    data, options = data_for(side, ids)
    options["tokenizer"] = AutoTokenizer.from_pretrained(request["model"])
    options |= {"max_seq_length": ids.shape[1], "num_calibration_samples": len(ids), "output_dir": request["out"]}
    gc.collect()
    before = start_measuring_memory()
    started = time.perf_counter()
    oneshot(model=model, dataset=data, recipe=[modifier], **options)
    seconds = time.perf_counter() - started
    extra = None if before is None else status("VmHWM") - before
    names = (package, "torch", "transformers", "compressed-tensors")
    answer = {"seconds": seconds, "extra_bytes": extra, "versions": {name: version(name) for name in names}}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def modifier_named(package: str, name: str) -> Any:
    """A modifier's class; the peer keeps each kind in a package of its own."""
    home = {"GPTQModifier": "gptq", "QuantizationModifier": "quantization"}[name]
    return getattr(importlib.import_module(f"{package}.modifiers.{home}"), name)


def data_for(side: str, ids: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The same tokens in the form that a side takes, and what else it has to be given for them."""
    if side == "ours":
        return ids, {}
    from datasets import Dataset  # noqa: PLC0415 (only the peer needs it here)

    columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    return Dataset.from_dict(columns), {"shuffle_calibration_samples": False}


if __name__ == "__main__":
    main()
