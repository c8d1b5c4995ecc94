"""A contestant in accuracy: one process that quantises one model once, in our environment or in the peer's.

    python -m bench.accuracy_worker ours | peer REQUEST.json ANSWER.json

It writes a checkpoint and says what that took: what is timed is the call of `oneshot`, from a model in memory (in fp32)
and token ids to files. It knows nothing of how checkpoints are judged.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.worker import PACKAGES, start_measuring_memory, status

SMOOTHS = {"scalewright": "modifiers.smoothquant", "llmcompressor": "modifiers.transform.smoothquant"}
MODULES = {"QuantizationModifier": "modifiers.quantization", "GPTQModifier": "modifiers.gptq"}


def main() -> None:
    """Do what the request says, and write the answer."""
    side, request_file, answer_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    package = PACKAGES[side]
    oneshot = importlib.import_module(package).oneshot
    recipe = recipe_of(package, request["recipe"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    for each in model.parameters():  # a mapped file would become memory only when somebody reads it
        each.data = each.data.clone()
    rows: list[list[int]] = request["rows"]
    data, options = data_for(side, rows)
    options["tokenizer"] = AutoTokenizer.from_pretrained(request["model"])
    options |= {"max_seq_length": max(map(len, rows)), "num_calibration_samples": len(rows)}
    gc.collect()
    # Where other work runs beside, what the process itself has used says more than what has passed meanwhile.
    clock = time.process_time if request["busy"] else time.perf_counter
    told = {"clock": "processor"} if request["busy"] else {}
    before = start_measuring_memory()
    started = clock()
    oneshot(model=model, dataset=data, recipe=recipe, output_dir=request["out"], **options)
    seconds = clock() - started
    extra = None if before is None else status("VmHWM") - before
    Path(answer_file).write_text(json.dumps({"seconds": seconds, "extra_bytes": extra, **told}), encoding="utf-8")


def recipe_of(package: str, wanted: Mapping[str, Any]) -> Any:
    """A modifier with its fields, or the recipe that stands behind one of our words for quality."""
    if "quality" in wanted:
        recipe_for = importlib.import_module(f"{package}.quality").recipe_for
        return recipe_for(wanted["quality"], wanted["scheme"], **wanted["options"])
    module = importlib.import_module(f"{package}.{MODULES[wanted['modifier']]}")
    modifiers = [getattr(module, wanted["modifier"])(**wanted["fields"])]
    if wanted["smoothing"] is not None:
        smooths = importlib.import_module(f"{package}.{SMOOTHS[package]}").SmoothQuantModifier
        modifiers.insert(0, smooths(smoothing_strength=wanted["smoothing"]))
    return modifiers


def data_for(side: str, rows: Sequence[Sequence[int]]) -> tuple[Any, dict[str, Any]]:
    """The same tokens in the form that a side takes, and what else it has to be given for them."""
    if side == "ours":
        return [list(row) for row in rows], {}
    from datasets import Dataset  # noqa: PLC0415 (only the peer needs it here)

    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    return Dataset.from_dict(columns), {"shuffle_calibration_samples": False}


if __name__ == "__main__":
    main()
