"""The command line, in this process and as a command: what it prints, writes, and exits with."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from scalewright.cli import app

IDS = torch.randint(0, 96, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random model on disk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Token ids, for which no tokenizer is needed."""
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": each}) for each in IDS))
    return path


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(each) for each in words])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.output


def error_of(*words: object) -> str:
    """The one line that a mistake gets; exit code 2, and no traceback."""
    output = run(*words, code=2)
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error ")]
    assert len(lines) == 1, output
    return lines[0].removeprefix("error ")


def test_quantize_writes_a_checkpoint_and_prints_the_table_of_layers(model, data, tmp_path):
    output = run("quantize", model, "--scheme", "FP8", "--data", data, "--out", tmp_path / "out", "--samples", 8)
    assert output.count("_proj") == 14
    assert "static_minmax" in output and "out is written (basic: one pass over the data" in output.replace("\n", " ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config is not None


def test_quantize_for_machines_prints_nothing_but_json(model, tmp_path):
    output = run("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", "--json")
    found = json.loads(output[output.index("{") :])
    assert found["pipeline"] == "data_free" and len(found["layers"]) == 14
    assert {"weight_db", "gain_db", "output_db", "above_optimum", "observers"} <= set(found["layers"][0])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--scheme", "W4A17"), "there is no scheme 'W4A17'. Did you mean 'W4A16'?"),
        (("--scheme", "W4A16", "--observer", "msee"), "msee"),
        (("--scheme", "W4A16", "--group-size", 96), "128 columns do not divide into groups of 96 (remainder 32)"),
        (("--scheme", "W8A8", "--group-size", 32), "the scheme's weights have no groups"),
        (("--scheme", "FP8"), "which are found by watching data. Give a dataset"),
        (("--scheme", "FP8", "--data", "no/such.txt"), "no/such.txt"),
        (("--scheme", "W4A16", "--pipeline", "quick"), "there is no pipeline 'quick'"),
        ((), "give either --scheme or --recipe."),
        (("--recipe", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--recipe", "nowhere.yaml", "--scheme", "W4A16"), "give either --scheme or --recipe."),
        (("--recipe", "nowhere.yaml", "--group-size", 32), "--group-size: the recipe says that."),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(model, tmp_path, words, expected):
    assert expected in error_of("quantize", model, "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_there_is_refused_before_any_work(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    words = ("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out")
    assert error_of(*words).endswith("out: exists already and is not empty. Give another folder, or overwrite.")
    run(*words, "--overwrite")
    assert not (tmp_path / "out" / "mine").exists()
    (tmp_path / "file").touch()
    assert error_of("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "file").endswith("Give a folder.")


def test_an_output_that_cannot_be_written_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written to." in error_of("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out")


def test_a_full_disk_is_noticed_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    message = error_of("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out")
    assert re.search(r"the checkpoint takes about [\d.]+ GB, and 0.0 GB are free. Make room", message)


def test_notes_are_errors_if_strict(model, tmp_path):
    words = ("quantize", model, "--scheme", "W4A16", "--ignore", "head_lm", "--out", tmp_path / "out")
    assert "note ignore: 'head_lm' matches no module." in run(*words)
    assert error_of(*words, "--strict", "--overwrite") == "ignore: 'head_lm' matches no module."


@pytest.mark.parametrize("name", ["nowhere", "./nowhere"])
def test_a_model_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert name in error_of("quantize", name, "--scheme", "W4A16", "--out", tmp_path / "out")


def test_a_folder_without_a_model(tmp_path):
    message = error_of("plan", tmp_path, "--scheme", "W4A16")
    assert message.endswith("there is no config.json in it. Give the folder of a Hugging Face model.")


def test_a_model_that_is_quantised_already(model, tmp_path):
    run("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "once")
    message = error_of("quantize", tmp_path / "once", "--scheme", "W4A16", "--out", tmp_path / "twice")
    assert message.endswith("is quantised already. Give the original.")


def test_plan_says_what_would_happen_and_writes_nothing(model, tmp_path):
    before = sorted(tmp_path.rglob("*")), sorted(model.rglob("*"))
    output = run("plan", model, "--scheme", "NVFP4")
    for expected in ("optimal", "static_minmax", "basic: one pass", "4.50 bits", "size", "memory", "time"):
        assert expected in output
    found = json.loads(run("plan", model, "--scheme", "W4A16", "--json"))
    assert found["pipeline"] == "data_free" and found["groups"][0]["count"] == 14
    assert found["bits_per_weight"] == 4.125
    assert (sorted(tmp_path.rglob("*")), sorted(model.rglob("*"))) == before


def test_the_size_of_the_plan_is_that_of_the_checkpoint(model, tmp_path):
    found = json.loads(run("plan", model, "--scheme", "W4A16", "--json"))
    run("quantize", model, "--scheme", "W4A16", "--dtype", "float32", "--out", tmp_path / "out")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    # Scales are as wide as the weights were: 32 bits in this model, where plans count 16.
    assert 0.9 < found["bytes_after"] / size < 1.0


def test_schemes_and_observers_are_tables():
    schemes = {row["name"]: row for row in json.loads(run("schemes", "--json"))}
    assert schemes["W8A8"]["needs_data"] and not schemes["W8A8_DYNAMIC"]["needs_data"]
    assert "W4A16" in run("schemes") and "int4, groups of 128" in run("schemes")
    observers = {row["name"]: row for row in json.loads(run("observers", "--json"))}
    assert "optimal" in observers and "balanced_mse" in run("observers")


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "scalewright"], [str(Path(sys.executable).parent / "scalewright")]]
)
def test_the_command_runs(command):
    ran = subprocess.run([*command, "schemes"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "FP8_DYNAMIC" in ran.stdout
    ran = subprocess.run([*command, "quantise"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "quantise" in ran.stderr
