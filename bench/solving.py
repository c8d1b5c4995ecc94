"""GPTQ's solving alone, beside the peer's: `make bench-solving`.

Both sides are given the same weights, the same sum of x xT over tokens, and the same min-max scales, and round: the
factor of the Hessian is part of it, collecting it is not. They take turns, a process each, and the best time counts.
What is lost, sum of d H dT, is computed here in float64. The same file is the contestant:

    python -m bench.solving ours | peer REQUEST.safetensors ANSWER.safetensors
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((1024, 1024), (2816, 1024), (1024, 2816), (2048, 2048), (5632, 2048), (2048, 5632))  # rows, columns
THREADS = (1, 2)
ROUNDS, TURNS = 2, 3
NUM_TOKENS = 8192
ARGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": "static"}
BLOCK_SIZE, DAMPING = 128, 0.01

# R rows and C columns of the weight.


def main() -> None:
    """Measure all shapes, and write results and page."""
    if len(sys.argv) == 4 and sys.argv[1] in CONTESTANTS:
        contest(*sys.argv[1:])
        return
    from bench import tables  # noqa: PLC0415 (contestants do not need it)

    options = _options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            request = Path(folder) / "request.safetensors"
            problem = problem_of(shape)
            for threads in THREADS:
                save_file(problem, request, {"threads": str(threads)})
                row = {"rows": shape[0], "columns": shape[1], "threads": threads}
                for _ in range(ROUNDS):
                    for side, python in (("ours", sys.executable), ("peer", options.peer)):
                        found = _turn(side, python, request, Path(folder) / "answer.safetensors", problem)
                        row[side] = min(found, row.get(side, found), key=lambda each: float(each["seconds"]))
                rows.append(row)
                Console(stderr=True).print(row)
    tables.write_results("solving", {"date": str(date.today())}, rows)
    tables.main()


def problem_of(shape: tuple[int, int]) -> dict[str, Tensor]:
    """A weight, scales for it, and the Hessian of inputs whose channels differ in strength and have much in common."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_columns = shape
    weight_RC = torch.randn(shape, generator=generator)
    inputs_TC = torch.randn(NUM_TOKENS, num_columns // 4, generator=generator) @ torch.randn(
        num_columns // 4, num_columns, generator=generator
    )
    inputs_TC += torch.randn(NUM_TOKENS, num_columns, generator=generator)
    inputs_TC *= torch.randn(num_columns, generator=generator).exp()
    groups = weight_RC.reshape(num_rows, -1, int(str(ARGS["group_size"])))
    scale = groups.abs().amax(dim=-1) / 7.5
    return {"weight": weight_RC, "scale": scale, "hessian": (inputs_TC.T @ inputs_TC) / NUM_TOKENS}


def _turn(side: str, python: str, request: Path, answer: Path, problem: dict[str, Tensor]) -> dict[str, float]:
    command = [python, "-m", "bench.solving", side, str(request), str(answer)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with safe_open(answer, "pt") as file:
        seconds = float(file.metadata()["seconds"])
        rounded_RC: Tensor = file.get_tensor("rounded")
    off_RC = (rounded_RC - problem["weight"]).double()
    return {"seconds": seconds, "error": float(((off_RC @ problem["hessian"].double()) * off_RC).sum())}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="the interpreter of the peer's environment")
    return parser.parse_args()


# ---- the contestants -------------------------------------------------------------------------------------------------


def contest(side: str, request: str, answer: str) -> None:
    """Solve the problem of a request some times, and write the best time and what was found."""
    with safe_open(request, "pt") as file:
        torch.set_num_threads(int(file.metadata()["threads"]))
    given = load_file(request)
    solve = CONTESTANTS[side]
    best, rounded_RC = float("inf"), given["weight"]
    with torch.no_grad():
        for _ in range(TURNS):
            fresh = {name: each.clone() for name, each in given.items()}
            started = time.perf_counter()
            rounded_RC = solve(fresh["weight"], fresh["hessian"], fresh["scale"])
            best = min(best, time.perf_counter() - started)
    save_file({"rounded": rounded_RC.contiguous()}, answer, {"seconds": str(best)})


def _ours(weight_RC: Tensor, hessian_CC: Tensor, scale_RG: Tensor) -> Tensor:
    from scalewright.modifiers.gptq_layer import codebook  # noqa: PLC0415 (the peer's environment has none of it)
    from scalewright.numerics.gptq import round_columns  # noqa: PLC0415
    from scalewright.numerics.hessian import factor  # noqa: PLC0415

    args = QuantizationArgs(**ARGS)
    qparams: Any = {"scale": scale_RG, "zero_point": torch.zeros_like(scale_RG), "global_scale": None}
    found = factor(hessian_CC, damping=DAMPING, is_ordered=True)
    book = codebook(args, qparams, tuple(weight_RC.shape))
    return round_columns(weight_RC.T.contiguous(), found, book, block_size=BLOCK_SIZE).T.contiguous()


def _peer(weight_RC: Tensor, hessian_CC: Tensor, scale_RG: Tensor) -> Tensor:
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight  # noqa: PLC0415

    found = quantize_weight(
        weights=weight_RC.unsqueeze(0),
        hessians=hessian_CC.unsqueeze(0),
        scale=scale_RG.unsqueeze(0),
        zero_point=torch.zeros_like(scale_RG).unsqueeze(0),
        global_scale=None,
        quant_args=QuantizationArgs(**ARGS),
        blocksize=BLOCK_SIZE,
        percdamp=DAMPING,
    )
    rounded_RC: Tensor = found[0][0]
    return rounded_RC


CONTESTANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": _ours, "peer": _peer}


if __name__ == "__main__":
    main()
