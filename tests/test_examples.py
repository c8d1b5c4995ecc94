"""The scripts in examples/ run from start to end, as a user would run them, and print what they promise."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scalewright import evaluate
from scalewright.observers import Observer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DEMO_MODEL = EXAMPLES / "demo_model"

PROMISED = {
    "observe_weights.py": (
        *("INT4, groups of 32", "INT8, one scale for each row", "NVFP4, groups of 16", "Activations"),
        *("memoryless_minmax", "memoryless_mse", "imatrix_mse", "optimal", "nvfp4_expanded_mse"),
        *("static_minmax", "minmax", "mse", "percentile", "entropy", "histogram_mse", "balanced_mse"),
    ),
    "one_call.py": ("basic", "42, from model.layers.0.self_attn.q_proj", "none", "perplexity", "KL"),
    "mixed_recipe.py": (
        *("20 layers: int8, per channel", "10 layers: int4, groups of 64", "5 layers: int4, groups of 32"),
        "8 layers: as they are, from model.layers.5.self_attn.q_proj to lm_head",
    ),
    "gptq_best.py": ("GPTQModifier", "correction: 0.5", "fast: KL", "best: KL"),
    "nvfp4.py": ("self_attn.q_proj", "mlp.up_proj", "F8_E4M3", "global scale"),
    "fp8_kv_cache.py": ("8 bits", "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"),
    "importance_file.py": ("imatrix.safetensors", "W4A16: data_free, 42 layers", "NVFP4A16: data_free, 42 layers"),
    "custom_observer.py": ("static_minmax", "rms_clip"),
    "own_module.py": ("blocks.0.1", "blocks.2.3", "the same object: True"),
    "python_text.py": ('The "if" statement', "<|endoftext|>"),
    "small_model.py": ("bits a byte before",),
}
ARGUMENTS = {"small_model.py": ("{scratch}", "--steps", "3"), "python_text.py": ("calibration",)}
IN_THEIR_OWN_PROCESS = ("observe_weights.py", "small_model.py")  # they set what is global to a process
WITH_A_TEST_OF_THEIR_OWN = ("demo.py", "train_demo_model.py")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, as a script in it sees it; what a script does to logging and to the registry is undone."""
    classes, names = dict(Observer._classes), dict(Observer._names)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(Observer, "_classes", classes)
    monkeypatch.setattr(Observer, "_names", names)
    state = torch.random.get_rng_state()
    yield EXAMPLES
    torch.random.set_rng_state(state)
    logging.disable(logging.NOTSET)
    for script in EXAMPLES.glob("*.py"):
        sys.modules.pop(script.stem, None)


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=300)


def assert_prints_what_it_promises(done: subprocess.CompletedProcess[str], script: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert_has(done.stdout, PROMISED[script])
    assert max(map(len, done.stdout.splitlines())) <= 100


def assert_has(printed: str, promised: tuple[str, ...]) -> None:
    for words in promised:
        assert re.search(rf"(?<!\w){re.escape(words)}(?!\w)", printed), f"{words!r} is not in the output"
    assert not re.search(r"(?<![.\w])(nan|inf)\b", printed)


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PROMISED, *WITH_A_TEST_OF_THEIR_OWN}


@pytest.mark.parametrize("script", IN_THEIR_OWN_PROCESS)
def test_an_example_runs_as_it_is(script: str, tmp_path: Path) -> None:
    arguments = [each.format(scratch=tmp_path / "out") for each in ARGUMENTS.get(script, ())]
    assert_prints_what_it_promises(run(EXAMPLES / script, *arguments), script)


@pytest.mark.parametrize("script", sorted(set(PROMISED) - set(IN_THEIR_OWN_PROCESS)))
def test_a_short_example_runs_as_it_is(
    script: str,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *ARGUMENTS.get(script, ())])
    runpy.run_path(str(examples / script), run_name="__main__")
    printed = capsys.readouterr()
    assert_has(printed.out, PROMISED[script])
    assert printed.err == ""
    assert list(tmp_path.iterdir()) == [], "an example left files behind"


# ---- the demo --------------------------------------------------------------------------------------------------------


def test_the_demo(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "out"), "--samples", "4", "--rows", "3"])
    runpy.run_path(str(examples / "demo.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert_has(
        printed, ("demo_model", "model.layers.0.self_attn.q_proj", "where to look", "out/W4A16-best/report.html")
    )
    notes = re.findall(r"^note .*", printed, re.MULTILINE)
    assert len(notes) == 1 and re.match(r"note \(balanced, best\) data: \d+ tokens are little to", notes[0])
    figures = re.findall(
        r"^ +(fast|balanced|best) +([\d.]+) +([\d.]+) ± [\d.]+ +[\d.]+% +[\d.]+ MB", printed, re.MULTILINE
    )
    assert [each[0] for each in figures] == ["fast", "balanced", "best"]
    divergence = {name: float(kl) for name, _, kl in figures}
    assert 0 < divergence["best"] < divergence["fast"]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["W4A16-balanced", "W4A16-best", "W4A16-fast"]


def test_the_demo_asks_for_texts_with_another_model(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(examples / "demo.py"), run_name="__main__")
    assert "Give --calibration and --held-out, too." in capsys.readouterr().err


def test_a_mistake_in_the_demo_is_one_line(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "out"), "--scheme", "W4A17"])
    with pytest.raises(SystemExit, match=r"error there is no scheme 'W4A17'\. Did you mean 'W4A16'\?"):
        runpy.run_path(str(examples / "demo.py"), run_name="__main__")


def test_the_demo_model_is_small_and_trained(examples: Path) -> None:
    from python_text import held_out_texts

    assert sum(each.stat().st_size for each in DEMO_MODEL.iterdir()) < 4e6
    learned = json.loads((DEMO_MODEL / "training.json").read_text(encoding="utf-8"))
    asked = {"num_samples": 8, "max_seq_length": 256, "pack": True, "generate": False}
    perplexity = evaluate(DEMO_MODEL, dataset=held_out_texts(), **asked).perplexity.value
    assert perplexity < learned["perplexity"]["frequencies"] / 8 < learned["perplexity"]["untrained"] / 8
    assert 0.5 < perplexity / learned["perplexity"]["trained"] < 2  # help pages are not the same in every Python


def test_no_paragraph_that_is_held_out_was_learned(examples: Path) -> None:
    from python_text import calibration_texts, held_out_texts, key_of

    judged, seen = (
        [key_of(each) for text in texts for each in text.split("\n\n") if each.strip()]
        for texts in (held_out_texts(), calibration_texts())
    )
    assert len(judged) > 100 and len(seen) > 1000
    assert not set(judged) & set(seen)
    assert len(set(judged)) == len(judged) and len(set(seen)) == len(seen)


def test_a_demo_model_can_be_trained(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_demo_model as training

    read = list(zip(range(3), training.docstrings(), strict=False))
    assert len(read) == 3 and all(text.strip() for _, text in read)
    monkeypatch.setattr(training, "docstrings", lambda: iter(["A docstring.", "Another one."]))
    monkeypatch.setattr(training, "calibration_texts", lambda: ["if and else and while. " * 200])
    monkeypatch.setattr(training, "held_out_texts", lambda: ["else and if and while. " * 100])
    monkeypatch.setattr(training, "CONFIG", {**training.CONFIG, "num_hidden_layers": 1})
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["train_demo_model.py", str(tmp_path / folder), "--steps", "10"])
        training.main()
    assert "step 10: loss" in capsys.readouterr().out
    learned = json.loads((tmp_path / "one" / "training.json").read_text(encoding="utf-8"))
    assert learned["steps"] == 10
    assert learned["perplexity"]["trained"] < learned["perplexity"]["untrained"] / 2
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two")]
    assert weights[0] == weights[1]


# ---- observers at work -----------------------------------------------------------------------------------------------


def test_a_model_is_trained_where_none_lies_beside_the_repository(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "examples"
    folder.mkdir(parents=True)
    done = run(Path(shutil.copy(EXAMPLES / "observe_weights.py", folder)))
    assert_prints_what_it_promises(done, "observe_weights.py")
    learned = re.match(r"Weights: a small model .*\(([\d.]+) bits a letter before and ([\d.]+)\s+after\)", done.stdout)
    assert learned and float(learned[1]) > 6 and float(learned[2]) < 4
    names = ("memoryless_minmax", "memoryless_mse", "imatrix_mse", "optimal", "nvfp4_expanded_mse")
    shares = {name: [] for name in names}
    for name, share in re.findall(r"(\w+) +[\d.]+ +[\d.]+ +(\d+)% +[\d.]+ *$", done.stdout, re.MULTILINE):
        shares[name].append(int(share))
    assert [len(each) for each in shares.values()] == [9, 9, 9, 9, 3]  # three layers, three formats; one in NVFP4 only
    assert set(shares["memoryless_minmax"]) == {100}
    assert max(shares["nvfp4_expanded_mse"]) < 100
    assert sum(shares["optimal"]) < sum(shares["imatrix_mse"])


def test_a_folder_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(EXAMPLES / "observe_weights.py", "--model", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no such folder" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
