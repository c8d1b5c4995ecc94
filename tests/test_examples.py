"""The scripts in examples/ run from start to end, as a user would run them, and print what they promise."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

PROMISED = {
    "observe_weights.py": (
        *("INT4, groups of 32", "INT8, one scale for each row", "NVFP4, groups of 16", "Activations"),
        *("memoryless_minmax", "memoryless_mse", "imatrix_mse", "optimal", "nvfp4_expanded_mse"),
        *("static_minmax", "minmax", "mse", "percentile", "entropy", "histogram_mse", "balanced_mse"),
    ),
    "quantize_model.py": (
        "the model",
        "model.layers.0.self_attn.q_proj",
        "optimal",
        "0 keys missing",
        "perplexity",
        "KL",
    ),
    "small_model.py": ("bits a byte before",),
}
ARGUMENTS = {"small_model.py": ("{scratch}", "--steps", "3")}


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=300)


def assert_prints_what_it_promises(done: subprocess.CompletedProcess[str], script: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in PROMISED[script]:
        assert re.search(rf"(?<!\w){re.escape(words)}(?!\w)", done.stdout), f"{words!r} is not in the output"
    assert not re.search(r"\b(nan|inf)\b", done.stdout, re.IGNORECASE)
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("script", PROMISED)
def test_an_example_runs_as_it_is(script: str, tmp_path: Path) -> None:
    arguments = [each.format(scratch=tmp_path / "out") for each in ARGUMENTS.get(script, ())]
    assert_prints_what_it_promises(run(EXAMPLES / script, *arguments), script)


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
