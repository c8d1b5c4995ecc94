"""A contestant: a process that observes weights when it is told to, in our environment or in the peer's.

    python -m bench.worker ours | peer

It reads one JSON request a line and answers each with one JSON line. Tensors come and go in safetensors files. It knows
nothing of how answers are judged.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKAGES = {"ours": "scalewright", "peer": "llmcompressor"}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    """Answer requests until there are no more."""
    package = PACKAGES[sys.argv[1]]
    # What a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    observer_class = importlib.import_module(f"{package}.observers").Observer
    versions = {name: version(name) for name in (package, "torch", "compressed-tensors")}
    print(json.dumps(versions), file=answers)
    for line in sys.stdin:
        try:
            answer = measure(observer_class, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def measure(observer_class: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do the work of `request` up to `repeats` times, while less than `budget` seconds have passed.

    Answers with the seconds of each time (the sum over the weights of the file) or, if `memory` is asked for, with the
    most that was needed for any of them. The first qparams go to the file `save`.
    """
    torch.set_num_threads(request["threads"])
    tensors = load_file(request["file"])
    names = sorted(name.removeprefix("weight.") for name in tensors if name.startswith("weight."))
    seconds: list[float] = []
    extra_bytes: list[int | None] = []
    found: dict[str, Tensor] = {}
    if request["memory"]:  # code that is loaded on the first call is no memory of the work
        weight, inputs = tensors[f"weight.{names[0]}"], tensors[f"inputs.{names[0]}"]
        prepare(observer_class, request, weight[:64], inputs)()
    gc.collect()
    begun = time.perf_counter()
    while not seconds or (len(seconds) < request["repeats"] and time.perf_counter() - begun < request["budget"]):
        seconds.append(0.0)
        for name in names:
            work = prepare(observer_class, request, tensors[f"weight.{name}"], tensors[f"inputs.{name}"])
            before = start_measuring_memory() if request["memory"] else None
            started = time.perf_counter()
            qparams = work()
            seconds[-1] += time.perf_counter() - started
            extra_bytes.append(None if before is None else status("VmHWM") - before)
            found |= {f"{name}.{key}": value.clone() for key, value in qparams.items() if value is not None}
    if request["save"]:
        save_file({name: value.contiguous() for name, value in found.items()}, request["save"])
    known = [each for each in extra_bytes if each is not None]
    return {"seconds": seconds, "extra_bytes": max(known) if known else None}


def prepare(
    observer_class: Any, request: Mapping[str, Any], weight: Tensor, inputs: Tensor
) -> Callable[[], Mapping[str, Tensor | None]]:
    """The work to be timed. Every call gets a layer and an observer that have not been seen before."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    fresh = linear.weight.data
    if request["observer"] == "torch.sum":
        return lambda: {"sum": torch.sum(fresh)}
    args = quantization_args(request["form"])
    observer = observer_class.load_from_registry(request["observer"], base_name="weight", args=args, **request["knobs"])
    if request["is_weighted"]:
        observer.attach(linear)
        linear(inputs)
    return lambda: observer(fresh).get_qparams()


def quantization_args(form: Mapping[str, Any]) -> QuantizationArgs:
    """What the JSON form of a format stands for."""
    if "preset" in form:
        return preset_name_to_scheme(form["preset"], ["Linear"]).weights.model_copy(deep=True)
    return QuantizationArgs(**form)


def start_measuring_memory() -> int | None:
    """Resident bytes now; from here on the system keeps their maximum. None where it cannot.

    Memory that was freed but kept by the allocator is given back first: reused, it would not count.
    """
    if not CLEAR_REFS.exists():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5", encoding="ascii")
    return status("VmRSS")


def status(field: str) -> int:
    """A field of this process's memory, in bytes."""
    (line,) = (line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
