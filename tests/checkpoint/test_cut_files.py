"""A mapped file that is cut short while it is read gives an error in words, where the system would end the process.

Most of it runs in processes of its own: a fault that is not caught would end that of the tests.
"""

import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright.checkpoint.mapped import can_map

pytestmark = pytest.mark.skipif(not can_map(), reason="nobody tells here what is mapped")

LAYER = "model.layers.1.self_attn.q_proj"
TOKENS = "[list(range(i, i + 32)) for i in range(8)]"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "model")


def run(code, folder):
    """Run some lines; `folder` and `cut()`, which cuts its weights short, are there."""
    head = f"""
        import os, sys, torch
        torch.set_num_threads(2)  # faults in threads of torch are to be outlived, too
        from pathlib import Path
        from scalewright import errors, oneshot
        folder = Path({str(folder)!r})
        weights = folder / "model.safetensors"

        def cut(size=4096):
            os.truncate(weights, size)
    """
    lines = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300, check=False)


def quantising(options, *, at):
    return f"""
        def on_step(phase, what, done, _):
            if (phase, what) == {at!r} and weights.stat().st_size > 4096:
                cut()
        try:
            oneshot(folder, {options}, output_dir=folder.parent / "out", on_step=on_step)
        except errors.ModelError as error:
            print(error)
            sys.exit(1)
    """


@pytest.mark.parametrize(
    "options",
    [
        "scheme='W4A16', quality='fast'",
        f"scheme='W8A8', quality='fast', dataset={TOKENS}, pipeline='sequential'",
        f"scheme='W4A16', quality='best', dataset={TOKENS}",
    ],
    ids=["data-free", "static", "GPTQ"],
)
def test_a_source_that_is_cut_short_is_named_and_what_was_finished_is_kept(options, folder, tmp_path):
    whole = folder.parent / "whole.safetensors"
    shutil.copy2(folder / "model.safetensors", whole)
    done = run(quantising(options, at=("quantising", LAYER)), folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout == (
        f"{folder / 'model.safetensors'}: was cut short, to 4,096 bytes, while it was read, so nobody knows which "
        "weights were read. Put the file back, with its time (cp -p), and run the same again: a run into a folder goes "
        "on with what it had finished, or begins anew with restart.\n"
    )
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial").rglob("*.safetensors"))  # the first block

    shutil.copy2(whole, folder / "model.safetensors")
    again = f"""
        for name in ("out", "undisturbed"):
            oneshot(folder, {options}, output_dir=folder.parent / name)
    """
    done = run(again, folder)
    assert done.returncode == 0, done.stderr
    for file in sorted((tmp_path / "undisturbed").iterdir()):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    "call",
    [
        f"oneshot(folder, scheme='W8A8', dataset={TOKENS})",
        f"scalewright.observe(folder, {TOKENS})",
        f"scalewright.evaluate(folder, dataset={TOKENS}, generate=0)",
    ],
    ids=["oneshot without an output", "observe", "evaluate"],
)
def test_all_that_reads_models_names_a_file_that_is_cut_short(call, folder):
    """Cut when the first module is called, so that its weights are read behind the end."""
    done = run(
        f"""
        import scalewright
        from torch import nn
        pre_hook = nn.modules.module.register_module_forward_pre_hook
        pre_hook(lambda *_: cut() if weights.stat().st_size > 4096 else None)
        try:
            {call}
        except errors.ModelError as error:
            print(error)
            sys.exit(1)
        """,
        folder,
    )
    assert done.returncode == 1, done.stderr
    assert "was cut short, to 4,096 bytes" in done.stdout


def test_other_faults_end_the_process_as_ever(folder):
    """Of a file that is none of a model, say."""
    done = run(
        """
        import mmap
        from scalewright.checkpoint.cut_files import outliving_cuts
        other = folder / "other.bin"
        other.write_bytes(bytes(8192))
        with outliving_cuts(), other.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 8192)
            os.truncate(other, 0)
            print(mapped[5000])
        """,
        folder,
    )
    assert done.returncode == -signal.SIGBUS


def test_nothing_is_left_behind(folder):
    """A fault after a run ends the process as before it; one that comes again within another run is named again."""
    done = run(
        """
        from safetensors import safe_open
        from scalewright.checkpoint.cut_files import outliving_cuts

        def read():
            with safe_open(weights, framework="pt") as file:
                tensors = [file.get_tensor(key) for key in file.keys()]
            cut()
            return sum(float(each.sum()) for each in tensors)

        whole = weights.read_bytes()
        for _ in range(2):
            weights.write_bytes(whole)
            try:
                with outliving_cuts():
                    with outliving_cuts():
                        read()
            except errors.ModelError as error:
                print("named")
        weights.write_bytes(whole)
        with outliving_cuts():
            pass
        print("nothing was cut", flush=True)
        read()
        """,
        folder,
    )
    assert done.stdout.split("\n")[:3] == ["named", "named", "nothing was cut"], done.stderr
    assert done.returncode == -signal.SIGBUS


def test_threads_that_fault_at_the_same_place_at_once_are_all_outlived(folder):
    """Whoever comes second finds zeros there, and no file."""
    done = run(
        """
        from safetensors import safe_open
        from scalewright.checkpoint.cut_files import _guard, outliving_cuts
        with safe_open(weights, framework="pt") as file:
            tensor = file.get_tensor("lm_head.weight")
        try:
            with outliving_cuts():
                cut()
                print(_guard._put_zeros(tensor.data_ptr()), _guard._put_zeros(tensor.data_ptr()))
                print(_guard._put_zeros(0))
        except errors.ModelError as error:
            print("named")
        """,
        folder,
    )
    assert done.stdout == "True True\nFalse\nnamed\n", done.stderr


def test_what_went_wrong_after_zeros_were_read_went_wrong_because_of_them(folder):
    done = run(
        """
        from safetensors import safe_open
        from scalewright.checkpoint.cut_files import outliving_cuts
        with safe_open(weights, framework="pt") as file:
            tensor = file.get_tensor("lm_head.weight")
        try:
            with outliving_cuts():
                cut()
                raise RuntimeError(f"all {int(tensor.sum())}")
        except errors.ModelError as error:
            print(repr(error.__cause__))
        """,
        folder,
    )
    assert done.stdout == "RuntimeError('all 0')\n", done.stderr
