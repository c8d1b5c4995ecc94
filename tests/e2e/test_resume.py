"""Runs that are killed, and go on: what is written in the end is what an uninterrupted run writes, byte for byte."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright.checkpoint.journal import partial_of
from scalewright.modifiers import GPTQModifier, QuantizationModifier, SmoothQuantModifier
from scalewright.oneshot import oneshot

SEED = 0
KILLS = 6  # of each case
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
CASES: dict[str, Callable[[], Any]] = {
    "data-free": lambda: QuantizationModifier(weights=GROUP, ignore=["lm_head"]),
    "static": lambda: QuantizationModifier(scheme="W8A8", ignore=["lm_head"], kv_cache_scheme=KV),
    "nvfp4": lambda: QuantizationModifier(scheme="NVFP4", ignore=["lm_head"]),
    "static in sequence": lambda: QuantizationModifier(scheme="FP8", ignore=["lm_head"]),
    "gptq": lambda: GPTQModifier(weights=GROUP, ignore=["lm_head"], refinements=1),
    "gptq that makes up": lambda: GPTQModifier(scheme="W8A8", ignore=["lm_head"], correction=0.5),
    "smoothed": lambda: [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])],
    "smoothed, gptq": lambda: [SmoothQuantModifier(), GPTQModifier(scheme="W8A8", ignore=["lm_head"], correction=0.5)],
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
DATA_FREE = ("data-free",)


def save_model(folder: Path) -> None:
    torch.manual_seed(SEED)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)


def quantise(case: str, folder: str, out: str, kill: tuple[int, float] | None = None) -> None:
    """One run, which may kill its own process: when so many layers are done, and so many seconds later."""
    torch.set_num_threads(1)

    def on_step(phase: str, what: str, done: int, total: int) -> None:
        if kill is not None and phase == "quantising" and done == kill[0]:
            threading.Timer(kill[1], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    data = None if case in DATA_FREE else torch.randint(64, (12, 24), generator=torch.Generator().manual_seed(1))
    oneshot(
        folder,
        recipe=CASES[case](),
        dataset=data,
        output_dir=out,
        num_calibration_samples=12,
        batch_size=3,
        pipeline="sequential" if case == "static in sequence" else "auto",
        on_step=on_step,
    )
    os._exit(0)  # nobody kills a process that is done


def start(case: str, model: Path, out: Path, kill: tuple[int, float] | None = None) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.test_resume"])
    process = context.Process(target=quantise, args=(case, str(model), str(out), kill))
    process.start()
    return process


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_again_and_again_writes_the_same_bytes(case: str, model: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    start(case, model, whole).join(120)
    assert not partial_of(whole).exists()
    chance = random.Random(f"{SEED} {case}")
    done = []
    for layer in sorted(chance.sample(range(13), KILLS)):
        process = start(case, model, out, (layer, chance.uniform(0.0, 0.005)))
        process.join(120)
        assert process.exitcode == -signal.SIGKILL and not out.exists()
        done.append(len(list(partial_of(out).glob("0*.safetensors"))))
        assert done[-1] >= layer
    assert done == sorted(done)  # what was done is never done again from the beginning
    start(case, model, out).join(120)
    assert files_of(out) == files_of(whole)
    assert not partial_of(out).exists()
