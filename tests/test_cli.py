"""The command line, in this process and as a command: what it prints, writes, and exits with."""

import importlib
import inspect
import io
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from command_line import error_of, invoke, run
from scalewright.cli import app, main
from scalewright.cli import progress as shown_progress
from scalewright.errors import OutputError
from scalewright.importance import gather_importance
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.schemes import scheme_names
from scalewright.observers import Observer
from scalewright.oneshot import oneshot

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


def test_help_shows_commands_in_the_order_in_which_they_are_needed():
    shown = CliRunner().invoke(app, ["--help"]).output
    commands = ["plan", "quantize", "eval", "report", "verify", "observe", "importance", "schemes", "observers"]
    assert re.findall(r"^\W*(" + "|".join(commands) + r") {2,}", shown, re.MULTILINE) == commands


def test_quantize_writes_a_checkpoint_and_prints_the_table_of_layers(model, data, tmp_path):
    output = run("quantize", model, "--scheme", "FP8", "--data", data, "--out", tmp_path / "out", "--samples", 8)
    assert output.count("_proj") == 14
    assert "static_minmax" in output and "out is written (basic: one pass over the data" in output.replace("\n", " ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config is not None


def test_quantize_for_machines_prints_nothing_but_json(model, tmp_path):
    found = json.loads(run("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", "--json"))
    assert found["pipeline"] == "data_free" and len(found["layers"]) == 14
    assert {"weight_db", "gain_db", "output_db", "above_optimum", "observers"} <= set(found["layers"][0])


SCHEMES, OBSERVERS = ", ".join(scheme_names()), ", ".join(sorted(Observer.registered_names()))
MISTAKES = [
    (("--scheme", "W4A17"), f"there is no scheme 'W4A17'. Did you mean 'W4A16'? Schemes: {SCHEMES}."),
    (
        ("--scheme", "W4A16", "--observer", "msee"),
        f"there is no observer 'msee'. Did you mean 'mse'? Observers: {OBSERVERS}.",
    ),
    (
        ("--scheme", "W4A16", "--group-size", 96),
        "model.layers.0.self_attn.q_proj.weight: 128 columns do not divide into groups of 96 (remainder 32). "
        "Use group_size 64 or 128, or ignore this layer.",
    ),
    (
        ("--scheme", "W8A8", "--group-size", 32),
        "group_size: the scheme's weights have no groups. Leave it out.",
    ),
    (
        ("--scheme", "W4A16", "--pipeline", "quick"),
        "there is no pipeline 'quick'. Pipelines: auto, data_free, basic, sequential.",
    ),
    (
        ("--scheme", "W4A16", "--pipeline", "sequentail"),
        "there is no pipeline 'sequentail'. Did you mean 'sequential'? Pipelines: auto, data_free, basic, sequential.",
    ),
    (
        ("--scheme", "W4A16", "--pipeline", "basic"),
        "the basic pipeline runs data through the model. Give a dataset.",
    ),
    (
        ("--scheme", "FP8", "--data", "ids.jsonl", "--pipeline", "data_free"),
        "the recipe has static activation scales, so it cannot be run data_free. Leave the pipeline out, or make them "
        "dynamic.",
    ),
    (
        ("--scheme", "W4A16", "--data", "ids.jsonl", "--pipeline", "sequential", "--sequential-targets", "Block"),
        "sequential_targets: ['Block'] matches no module. Name blocks by class, name or pattern.",
    ),
    (
        ("--scheme", "W4A16", "--dtype", "float33"),
        "dtype: there is no 'float33'. Did you mean 'float32'? Use auto, float32, bfloat16, float16.",
    ),
    (
        ("--scheme", "W4A16", "--quality", "BEST"),
        "there is no quality 'BEST'. Did you mean 'best'? Use fast, balanced, best.",
    ),
    (("--scheme", "W4A16", "--quality", ""), "there is no quality ''. Use fast, balanced, best."),
    (
        ("--scheme", "W4A16", "--data", "two words"),
        "data: 'two words' is neither a file nor a dataset. Give texts as a list of them.",
    ),
    (
        ("--scheme", "W4A16", "--data", "texts.jsonl", "--tokenizer", "ids.jsonl"),
        "ids.jsonl: is a file. Give the folder of a tokenizer, or its name on the hub.",
    ),
    ((), "give either --scheme or --recipe."),
    (("--recipe", "nowhere.yaml", "--scheme", "W4A16"), "give either --scheme or --recipe."),
    (
        ("--recipe", "nowhere.yaml"),
        "nowhere.yaml: cannot be read (No such file or directory). Give the path of a recipe.",
    ),
    (
        ("--recipe", "nowhere.yaml", "--group-size", 32),
        "--group-size: the recipe says that. Leave it out, or change the recipe.",
    ),
    (
        ("--recipe", "nowhere.yaml", "--importance", "mine.safetensors"),
        "--importance: the recipe says that. Leave it out, or change the recipe.",
    ),
    (
        ("--scheme", "W4A16", "--importance", "nowhere.safetensors"),
        "nowhere.safetensors: there is no such file.",
    ),
    (
        ("--recipe", "nowhere.yaml", "--observer", "mse", "--ignore", "a"),
        "--observer, --ignore: the recipe says that. Leave it out, or change the recipe.",
    ),
]


@pytest.fixture
def no_work(monkeypatch):
    """From here on nothing may be calibrated or quantised."""

    def refuse(*args, **keywords):
        raise AssertionError("work was begun")

    monkeypatch.setattr("scalewright.calibration.pipelines.Calibration.run", refuse)


@pytest.fixture
def no_loading(monkeypatch):
    """From here on no model may be loaded, either."""

    def refuse(*args, **keywords):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(sys.modules["scalewright.oneshot"], "load_all", refuse)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["quantize", "plan"])
@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_are_one_line_and_exit_code_2_before_any_work(
    model, tmp_path, tmp_path_factory, monkeypatch, command, words, expected
):
    monkeypatch.chdir(tmp_path_factory.mktemp("data"))
    Path("ids.jsonl").write_text('{"input_ids": [1, 2, 3]}')
    Path("texts.jsonl").write_text('{"text": "Once upon a time."}')
    out = ("--out", tmp_path / "out") if command == "quantize" else ()
    assert error_of(command, model, *out, *words) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--scheme", "FP8"),
            r"the recipe has static activation scales, which are found by watching data\. Give a dataset, or use a "
            r"scheme with dynamic activations\.",
        ),
        (("--scheme", "FP8", "--data", "no/such.txt"), r"no/such\.txt: there is no such file\."),
        (
            ("--scheme", "W4A16", "--device", "nowhere"),
            r"device: 'nowhere' cannot be used here \(.+\)\. Use cpu, or .*",
        ),
    ],
)
def test_mistakes_that_only_a_run_can_show(model, tmp_path, words, expected):
    assert re.fullmatch(expected, error_of("quantize", model, "--out", tmp_path / "out", *words))
    assert list(tmp_path.iterdir()) == []


def test_text_for_which_there_is_no_tokenizer(model, tmp_path):
    (tmp_path / "calib.txt").write_text("Once upon a time.")
    words = ("quantize", model, "--scheme", "FP8", "--data", tmp_path / "calib.txt", "--out", tmp_path / "out")
    assert error_of(*words) == "data: there is text in it, and no tokenizer. Give a tokenizer, or token ids."
    nowhere = error_of(*words, "--tokenizer", tmp_path / "nowhere")
    assert nowhere == (
        f"{tmp_path / 'nowhere'}: there is no tokenizer that could be loaded. Give the folder of a tokenizer, or its "
        "name on the hub."
    )


def test_what_is_wrong_with_data_is_said(model, tmp_path):
    ids = tmp_path / "ids.jsonl"
    words = ("quantize", model, "--scheme", "FP8", "--data", ids, "--out", tmp_path / "out")
    ids.write_text(json.dumps({"input_ids": [1, 2, 96]}))
    assert error_of(*words) == (
        "ids.jsonl: token id 96 is outside the model's vocabulary of 96 tokens. Use the model's own tokenizer."
    )
    ids.write_text(json.dumps({"input_ids": list(range(32))}))
    few = "ids.jsonl: 512 samples were asked for, and there are 1."
    assert f"note {few}\n" in run(*words)
    little = "ids.jsonl: 32 tokens are little to calibrate with; scales may not fit other text. Give 2048 or more."
    assert f"note {little}\n" in run(*words, "--samples", 1, "--overwrite")
    assert error_of(*words, "--overwrite", "--strict") == few
    assert error_of(*words, "--column", "input_idz", "--overwrite") == (
        "ids.jsonl: there is no column 'input_idz'. Did you mean 'input_ids'? Columns: input_ids. "
        "Name one of them as column."
    )


BAD_DATA = {
    "nothing": "",
    "no JSON": "{",
    "a mix": '{"input_ids": [1, 2]}\n{"text": "once"}',
    "no column": '{"story": [1, 2]}',
    "text without a tokenizer": '{"text": "once"}',
    "outside the vocabulary": '{"input_ids": [1, 2, 96]}',
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("what", BAD_DATA)
def test_a_plan_says_of_data_what_a_run_would(model, tmp_path, what):
    file = tmp_path / "ids.jsonl"
    file.write_text(BAD_DATA[what])
    words = (model, "--scheme", "W4A16", "--data", file)
    assert error_of("plan", *words) == error_of("quantize", *words, "--out", tmp_path / "out")


def test_a_plan_tells_how_little_data_there_is_and_reckons_with_that(model, tmp_path):
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": list(range(32))}) for _ in range(3)))
    words = (model, "--scheme", "W8A8", "--data", file)
    shown = run("plan", *words)
    assert f"note {file.name}: 512 samples were asked for, and there are 3.\n" in shown
    assert f"note {file.name}: 96 tokens are little to calibrate with; " in shown
    assert "data       3 samples, 96 tokens\n" in shown
    planned, done = (
        json.loads(run(command, *words, "--json", *more))
        for command, more in (("plan", ()), ("quantize", ("--out", tmp_path / "out")))
    )
    assert planned["notes"] == done["notes"]
    assert [planned[each] for each in ("num_samples", "num_tokens")] == [3, 96]
    assert error_of("plan", *words, "--strict") == planned["notes"][0]


def test_a_plan_tells_of_options_that_no_data_is_there_for(model, tmp_path):
    words = (model, "--scheme", "W8A16", "--seq-len", 64, "--column", "text", "--split", "test")
    done = json.loads(run("quantize", *words, "--out", tmp_path / "out", "--json"))
    expected = "max_seq_length, column, split: there is no data to use it for. Give some, or leave it out."
    assert json.loads(run("plan", *words, "--json"))["notes"] == done["notes"] == [expected]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_mistake_in_a_recipe_has_its_file_and_line(model, tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    path.write_text('{"modifiers":\n  {"QuantizationModifier":\n    {"scheme": "W4A16",\n     "ignored": []}}}')
    message = error_of("quantize", model, "--recipe", path, "--out", tmp_path / "out")
    assert message.startswith(f"mine.{suffix}:4: QuantizationModifier has no 'ignored'. Did you mean 'ignore'? It has:")


@pytest.mark.usefixtures("no_loading")
def test_an_output_that_is_there_is_refused_before_any_work(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    words = ("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out")
    assert error_of(*words) == (
        f"{tmp_path / 'out'}: exists already and is not empty. Give another folder, or overwrite."
    )
    assert (tmp_path / "out" / "mine").exists()
    file = tmp_path / "out" / "mine"
    assert error_of("quantize", model, "--scheme", "W4A16", "--out", file) == f"{file}: is a file. Give a folder."


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "MODEL", "--scheme", "W4A16"),
        ("importance", "MODEL", "--data", "data.txt"),
        ("observe", "MODEL", "--data", "data.txt"),
        ("report", "MODEL"),
    ],
    ids=lambda words: words[0],
)
def test_an_output_without_a_name_is_refused_before_any_work(model, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    words = [model if word == "MODEL" else word for word in command]
    assert error_of(*words, "--out", "") == "--out: '' is no name. Say where to write."
    assert list(tmp_path.iterdir()) == []


def test_an_output_without_a_name_is_refused_in_python(model):
    with pytest.raises(
        OutputError, match=r"^output_dir: '' is no path\. Give the folder that the checkpoint is to go to\.$"
    ):
        oneshot(model, scheme="W4A16", output_dir="")


def test_an_output_that_is_there_is_replaced_if_asked_for(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    run("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", "--overwrite")
    assert not (tmp_path / "out" / "mine").exists() and (tmp_path / "out" / "config.json").exists()


@pytest.mark.usefixtures("no_loading")
def test_an_output_that_cannot_be_written_is_refused_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    out = tmp_path / "new" / "out"
    message = error_of("quantize", model, "--scheme", "W4A16", "--out", out)
    assert message == f"{out}: {tmp_path} cannot be written to. Give another folder."


@pytest.mark.usefixtures("no_work")
def test_a_full_disk_is_noticed_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    message = error_of("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out")
    words = (
        r"out: the checkpoint takes about [\d.]+ kB and finished layers [\d.]+ kB until it is complete, and 1 kB "
        r"are free\. Make room, or give another folder\."
    )
    assert re.search(words + "$", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["ignore", "targets"])
def test_what_matches_nothing_is_a_note_and_an_error_if_strict(model, tmp_path, kind):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"QuantizationModifier": {"scheme": "W8A16", kind: ["Linear", "head_[lm]"]}}))
    if kind == "ignore":
        recipe.write_text(json.dumps({"QuantizationModifier": {"scheme": "W8A16", kind: ["lm_head", "head_[lm]"]}}))
    note = f"{kind}: 'head_[lm]' matches no module."
    words = ("--recipe", recipe)
    out = ("--out", tmp_path / "out")
    assert f"note {note}\n" in run("quantize", model, *words, *out)  # brackets are no markup
    assert f"note {note}\n" in run("plan", model, *words)
    assert error_of("quantize", model, *words, *out, "--strict", "--overwrite") == note
    assert error_of("plan", model, *words, "--strict") == note


def test_a_recipe_that_means_no_layer(model, tmp_path):
    message = error_of("plan", model, "--scheme", "W4A16", "--ignore", "*[a-z]*")
    assert message.startswith("the recipe means no layer of this model.")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "models/nowhere/", "my/models/nowhere"])
def test_a_model_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error_of("quantize", name, "--scheme", "W4A16", "--out", tmp_path / "out")
    assert message == (
        f"{name}: there is no such folder, and no model of that name could be loaded. Give the folder of a Hugging "
        "Face model, or its name on the hub."
    )


def test_why_a_name_that_may_be_one_of_the_hub_could_not_be_loaded_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error_of("quantize", "models/nowhere", "--scheme", "W4A16", "--out", tmp_path / "out")
    head, _, end = message.partition(" (")
    assert head == "models/nowhere: there is no such folder, and no model of that name could be loaded"
    assert end.endswith("). Give the folder of a Hugging Face model, or its name on the hub.")


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_no_generator_takes_is_refused(seed, model, tmp_path):
    words = ("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", "--seed", seed)
    assert "Invalid value for '--seed'" in invoke(*words, code=2).stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["verify"], ["report"], ["observe", "--merge"], ["importance", "--merge", "--out", "x"]]
)
def test_a_name_that_is_too_long_is_said(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of(*words, "x" * 300) == f"{'x' * 300}: is too long for a name."


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
    assert found["bits_per_weight"] == 4 + 32 / 128  # scales are as wide as the weights were
    assert (sorted(tmp_path.rglob("*")), sorted(model.rglob("*"))) == before


def test_the_size_of_the_plan_is_that_of_the_checkpoint(model, tmp_path):
    found = json.loads(run("plan", model, "--scheme", "W4A16", "--json"))
    run("quantize", model, "--scheme", "W4A16", "--dtype", "float32", "--out", tmp_path / "out")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0.97 < found["bytes_after"] / size < 1.0


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
    ran = subprocess.run([*command, "quantise"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "") and "quantise" in ran.stderr


# ---- importance ------------------------------------------------------------------------------------------------------


def test_importance_is_gathered_into_a_file_that_quantize_takes(model, data, tmp_path):
    out = tmp_path / "imatrix.safetensors"
    output = run("importance", model, "--data", data, "--out", out)
    assert output.splitlines()[-1] == f"{out} is written (14 layers of {model.name}; 192 tokens)."
    assert "note ids.jsonl: 512 samples were asked for, and there are 8.\n" in output
    words = ("quantize", model, "--scheme", "W4A16", "--group-size", 32, "--json", "--out")
    found = json.loads(run(*words, tmp_path / "from_file", "--importance", out))
    assert (found["pipeline"], found["why"]) == ("data_free", "all importance that it uses was gathered before")
    assert found["num_samples"] == 0 and found["notes"] == []
    run(*words, tmp_path / "from_data", "--data", data)
    run(*words, tmp_path / "without")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("from_file", "from_data", "without")]
    assert weights[0] == weights[1] != weights[2]
    plan = json.loads(run("plan", model, "--scheme", "W4A16", "--importance", out, "--json"))
    assert plan["why"] == found["why"]


def test_importance_for_machines(model, data, tmp_path):
    out = tmp_path / "imatrix.safetensors"
    words = ("--samples", 2, "--seq-len", 5, "--ignore", "*.down_proj", "--seed", 3)
    found = json.loads(run("importance", model, "--data", data, "--out", out, *words, "--json"))
    assert (found["out"], found["num_tokens"], found["seeds"], len(found["layers"])) == (str(out), 10, [3], 13)
    assert {row["tokens"] for row in found["layers"]} == {10}


def test_files_of_importance_are_merged(model, tmp_path):
    for name, some in (("a", IDS[:3]), ("b", IDS[3:]), ("whole", IDS)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"input_ids": each}) for each in some))
        run("importance", model, "--data", path, "--out", tmp_path / name)
    output = run("importance", "--merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both")
    assert output == f"{tmp_path / 'both'} is written (14 layers of {model.name}; 192 tokens).\n"
    both, whole = load_file(tmp_path / "both"), load_file(tmp_path / "whole")
    assert both.keys() == whole.keys()
    for name, each in both.items():
        torch.testing.assert_close(each, whole[name], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("MODEL",), "importance is found by running data through the model. Give a dataset."),
        (("MODEL", "OTHER", "--data", "x"), "2 models were given. Give one, or files and --merge."),
        ((__file__,), f"{__file__}: is a file, and no model. Give --merge for files that importance has written."),
        (("--merge", "nowhere", "other"), "nowhere: there is no such file."),
        (
            ("--merge", "a", "b", "--data", "x", "--seed", 1, "--no-pack"),
            "--data, --seed, --pack: files are merged, and no model is run. Leave it out, or --merge.",
        ),
    ],
)
def test_mistakes_with_importance_are_one_line(words, expected, tmp_path):
    assert error_of("importance", *words, "--out", tmp_path / "out") == expected
    assert list(tmp_path.iterdir()) == []


def test_importance_that_is_there_is_not_replaced_unless_asked_for(model, data, tmp_path):
    out = tmp_path / "imatrix.safetensors"
    out.write_text("mine")
    words = ("importance", model, "--data", data, "--out", out)
    assert error_of(*words) == f"{out}: exists already. Give another name, or overwrite."
    assert out.read_text() == "mine"
    run(*words, "--overwrite")
    copy = tmp_path / "copy"
    run("importance", "--merge", out, "--out", copy)
    assert error_of("importance", "--merge", out, "--out", copy) == (
        f"{copy}: exists already. Give another name, or overwrite."
    )
    assert load_file(copy).keys() == load_file(out).keys()


# ---- options ---------------------------------------------------------------------------------------------------------

SHARED_OPTIONS = {
    "--recipe": (["mine.yaml"], "recipe", Path("mine.yaml")),
    "--samples": ([7], "num_calibration_samples", 7),
    "--seq-len": ([9], "max_seq_length", 9),
    "--batch-size": ([3], "batch_size", 3),
    "--pipeline": (["sequential"], "pipeline", "sequential"),
    "--sequential-targets": (["a", "--sequential-targets", "b"], "sequential_targets", ["a", "b"]),
    "--max-memory": (["2GB"], "max_memory", "2GB"),
    "--dtype": (["float16"], "dtype", "float16"),
    "--strict": ([], "strict", True),
    "--trust-remote-code": ([], "trust_remote_code", True),
}
OPTIONS = {
    **SHARED_OPTIONS,
    "--data": (["some.txt"], "dataset", "some.txt"),
    "--out": (["out"], "output_dir", Path("out")),
    "--overwrite": ([], "overwrite", True),
    "--restart": ([], "restart", True),
    "--column": (["prompt"], "column", "prompt"),
    "--split": (["test"], "split", "test"),
    "--pack": ([], "pack", True),
    "--no-pack": ([], "pack", False),
    "--tokenizer": (["other"], "tokenizer", "other"),
    "--seed": ([5], "seed", 5),
    "--no-moe-calibrate-all-experts": ([], "moe_calibrate_all_experts", False),
    "--device": (["cpu"], "device", "cpu"),
}
NOT_SAID = ("on_step", "ranks")  # what a command makes for itself
TAKEN_OTHERWISE = {"model", "scheme", "quality", *NOT_SAID}


class StopError(Exception):
    """Ends a command where its work would begin."""


def given_to(monkeypatch, module: str, name: str, *words: object) -> dict[str, object]:
    """The keywords that a command calls a function with."""
    found: dict[str, object] = {}

    def keep(model, recipe=None, **keywords):
        found.update(keywords, model=model, recipe=recipe)
        raise StopError

    monkeypatch.setattr(importlib.import_module(module), name, keep)
    result = CliRunner().invoke(app, [str(each) for each in words])
    assert isinstance(result.exception, StopError), result.output
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_quantize_reach_oneshot(option, monkeypatch):
    values, name, expected = OPTIONS[option]
    words = ["quantize", "MODEL", "--out", "OUT", "--recipe", "other.yaml"]
    defaults = given_to(monkeypatch, "scalewright.oneshot", "oneshot", *words)
    assert defaults["model"] == "MODEL" and defaults[name] != expected
    assert given_to(monkeypatch, "scalewright.oneshot", "oneshot", *words, option, *values)[name] == expected
    known = inspect.signature(oneshot).parameters
    asked = {each: known[each].default for each in defaults if each not in ("model", "recipe", "output_dir", *NOT_SAID)}
    assert {each: defaults[each] for each in asked} == asked, "the defaults are those of oneshot"


def test_quantize_has_an_option_for_whatever_oneshot_takes():
    taken = {name for _, name, _ in OPTIONS.values()}
    assert taken | TAKEN_OTHERWISE == set(inspect.signature(oneshot).parameters)


@pytest.mark.parametrize("option", SHARED_OPTIONS)
def test_options_of_plan_reach_the_plan(option, monkeypatch):
    values, name, expected = SHARED_OPTIONS[option]
    name = {"num_calibration_samples": "num_samples"}.get(name, name)
    words = ["plan", "MODEL", "--recipe", "other.yaml", option, *values]
    assert given_to(monkeypatch, "scalewright.planning", "plan_of", *words)[name] == expected


def test_a_plan_knows_of_ranks_and_disk(model, monkeypatch):
    words = ("plan", model, "--scheme", "W4A16")
    assert given_to(monkeypatch, "scalewright.planning", "plan_of", *words, "--ranks", 8)["num_ranks"] == 8
    monkeypatch.undo()
    found = json.loads(run(*words, "--json"))
    assert found["bytes_after"] < found["disk_bytes"] < 2 * found["bytes_after"]


def test_a_scheme_with_its_options_is_a_recipe(monkeypatch):
    words = ["--scheme", "W4A16", "--group-size", 32, "--observer", "mse", "--ignore", "a", "--ignore", "b"]
    recipe = given_to(monkeypatch, "scalewright.planning", "plan_of", "plan", "MODEL", *words)["recipe"]
    assert recipe.modifiers[0].given == {
        "targets": ["Linear"],
        "scheme": "W4A16",
        "group_size": 32,
        "weight_observer": "mse",
        "ignore": ["a", "b"],
    }


IMPORTANCE_OPTIONS = {
    name: OPTIONS[name]
    for name in OPTIONS
    if name not in ("--recipe", "--pipeline", "--sequential-targets", "--data", "--out", "--restart", "--max-memory")
} | {"--out": (["out"], "output_file", Path("out")), "--ignore": (["a", "--ignore", "b"], "ignore", ["a", "b"])}


@pytest.mark.parametrize("option", IMPORTANCE_OPTIONS)
def test_options_of_importance_reach_the_gathering(option, monkeypatch):
    values, name, expected = IMPORTANCE_OPTIONS[option]
    words = ["importance", "MODEL", "--data", "some.txt", "--out", "OUT"]
    defaults = given_to(monkeypatch, "scalewright.importance", "gather_importance", *words)
    assert (defaults["model"], defaults["recipe"]) == ("MODEL", "some.txt") and defaults[name] != expected
    assert given_to(monkeypatch, "scalewright.importance", "gather_importance", *words, option, *values)[name] == (
        expected
    )
    known = inspect.signature(gather_importance).parameters
    asked = {
        each: known[each].default for each in defaults if each not in ("model", "recipe", "output_file", *NOT_SAID)
    }
    assert {each: defaults[each] for each in asked} == asked


def test_importance_has_an_option_for_whatever_gathering_takes():
    taken = {name for _, name, _ in IMPORTANCE_OPTIONS.values()}
    assert taken | {"model", "dataset", "targets", *NOT_SAID} == set(inspect.signature(gather_importance).parameters)


def test_importance_goes_before_the_scheme(monkeypatch):
    words = ["plan", "MODEL", "--scheme", "W4A16", "--importance", "mine", "--ignore", "a"]
    gatherer, modifier = given_to(monkeypatch, "scalewright.planning", "plan_of", *words)["recipe"].modifiers
    assert gatherer.given == {"file": "mine", "ignore": ["a"]}
    signed = {"weight_observer": {"name": "optimal", "signed": True}}
    assert modifier.given == {**signed, "targets": ["Linear"], "scheme": "W4A16", "ignore": ["a"]}


def test_samples_are_packed_if_asked_for(model, data, tmp_path):
    words = ("quantize", model, "--scheme", "FP8", "--data", data, "--seq-len", 32, "--json", "--out")
    num_samples = {
        option: json.loads(run(*words, tmp_path / f"out{option}", option))["num_samples"]
        for option in ("--pack", "--no-pack")
    }
    assert num_samples == {"--pack": len(IDS) * len(IDS[0]) // 32, "--no-pack": len(IDS)}


def test_a_plan_depends_on_what_it_is_told(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text(json.dumps([list(range(80))] * 512))
    monkeypatch.setattr("scalewright.costs.process_bytes", lambda: 0)

    def found(*words):
        return json.loads(run("plan", model, "--scheme", "NVFP4", "--json", *words))

    plain = found("--samples", 4096)
    assert found("--samples", 4096, "--dtype", "bfloat16")["bytes_before"] * 2 == plain["bytes_before"]
    assert found("--samples", 4096, "--batch-size", 4096)["peak_bytes"] > plain["peak_bytes"]
    blocks = ("--pipeline", "sequential", "--data", "ids.json", "--sequential-targets")
    assert found(*blocks, "LlamaMLP", "--sequential-targets", "LlamaAttention")["blocks"] == 4
    assert found(*blocks, "LlamaDecoderLayer")["blocks"] == 2
    memory = {
        length: found("--pipeline", "sequential", "--data", "ids.json", "--seq-len", length)["peak_bytes"]
        for length in (32, 64, 4096)
    }
    assert memory[32] < memory[64] == memory[4096], "the model has 64 positions"


def test_a_plan_for_a_budget_tells_what_is_chosen(model, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    words = ("plan", model, "--bits", 5, "--schemes", "W4A16,W8A16", "--data", ids)
    told = run(*words)
    found = json.loads(run(*words, "--json"))["chosen"]
    assert found["bits"] <= 5 and set(found["schemes"].values()) == {"W4A16", "W8A16"}
    assert f"\n{found['bits']:.3f} bits for each weight (W4A16 for " in told


def test_a_folder_of_data_is_read_without_a_word(model, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(json.dumps({"input_ids": each}) for each in IDS))
    words = ("plan", model, "--scheme", "W8A8", "--data", tmp_path / "texts")
    assert "data       8 samples, 192 tokens\n" in run(*words)


# ---- what a user sees ------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What goes to the screen of a user who sits at a terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(shown_progress, "err_console", Console(file=screen, force_terminal=True, width=100))
    return screen


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_progress_shows_layers_and_throughput(model, data, tmp_path, terminal, pipeline):
    words = ("--scheme", "FP8", "--data", data, "--pipeline", pipeline, "--out", tmp_path / "out", "--samples", 8)
    stdout = run("quantize", model, *words)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    last = [line.rstrip() for line in shown.splitlines() if line.strip()][-4:]
    assert [line.split()[0] for line in last] == ["loading", "calibrating", "quantising", "writing"]
    assert re.search(r"100 %, [\d,.]+ tokens/s, \d+ s +model\.layers\.1 ", last[1] + " ")
    assert re.search(r"100 %, [\d,.]+ layers/s, \d+ s +model\.layers\.1\.mlp\.down_proj$", last[2])
    assert last[0].endswith("LlamaForCausalLM") and last[3].endswith("out")
    assert "calibrating" not in stdout and stdout.count("_proj") == 14


def test_machines_are_shown_no_progress(model, tmp_path, terminal):
    found = json.loads(run("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", "--json"))
    assert found["out"] == str(tmp_path / "out") and terminal.getvalue() == ""


def test_a_pace_says_how_fast_and_how_long_yet():
    now = [0.0]
    progress = Progress(get_time=lambda: now[0])
    progress.add_task("calibrating", total=10_000)
    [task] = progress.tasks

    def step(seconds: float, done: int) -> str:
        now[0] += seconds
        progress.update(task.id, completed=done)
        return shown_progress._Pace().render(task).plain.strip()

    assert step(0, 0) == "0 %"
    assert step(1, 2000) == "20 %, 2,000 tokens/s, 4 s left"
    assert step(999, 4000) == "40 %, 4.0 tokens/s, 25 min 0 s left"
    assert step(1000, 10_000) == "100 %, 5.0 tokens/s, 33 min 20 s"
    assert step(500, 10_000) == "100 %, 5.0 tokens/s, 33 min 20 s", "the clock stops at the end"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7800, "2 h 10 min")]
)
def test_time_in_words(seconds, words):
    assert shown_progress.in_time(seconds) == words


def test_a_figure_that_no_layer_has_takes_no_column(model, tmp_path):
    output = run("quantize", model, "--scheme", "W8A8_DYNAMIC", "--out", tmp_path / "out")
    assert "weight dB" in output and "output dB" not in output


def test_a_row_of_the_plan_stands_under_its_heads(model):
    lines = run("plan", model, "--scheme", "W4A16").splitlines()
    head = next(line for line in lines if "such as" in line)
    row = next(line for line in lines if "q_proj" in line)
    assert row.index("model.layers.0.self_attn.q_proj") == head.index("such as")
    assert row[head.index("layers") :].startswith("14 ")


# ---- exit codes ------------------------------------------------------------------------------------------------------


def test_who_stops_a_run_is_told_how_to_go_on(model, tmp_path, monkeypatch):
    out, finish = tmp_path / "out", WatchedLayer.finish
    words = ("quantize", model, "--scheme", "W4A16", "--group-size", 16, "--out", out)

    def stop(layer):
        if layer.name.endswith("layers.1.self_attn.q_proj"):
            raise KeyboardInterrupt
        return finish(layer)

    monkeypatch.setattr(WatchedLayer, "finish", stop)
    result = invoke(*words, code=1)
    assert result.stderr.replace("\n", "") == (
        f"stopped; finished layers are in {out}.partial. The same command goes on from there."
    )
    monkeypatch.setattr(WatchedLayer, "finish", finish)
    changed = error_of(*words, "--observer", "mse")
    assert changed == (
        f"{out}.partial: was begun with another recipe. Run it as before to go on, or use restart to begin anew."
    )
    run(*words)
    assert out.is_dir() and not (tmp_path / "out.partial").exists()


def test_a_command_that_is_stopped_while_it_gets_ready_has_no_traceback(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("scalewright.modifiers.schemes.scheme_rows", stop)
    monkeypatch.setattr(sys, "argv", ["scalewright", "schemes"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr()) == (1, ("", "stopped; nothing was written.\n"))


@pytest.mark.parametrize("words", [("--out", "~/mine"), ("--out=~/mine",)])
def test_home_is_not_a_folder_of_that_name(words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["scalewright", "quantize", str(model), "--scheme", "W8A16", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "mine" / "config.json").is_file()


def test_an_output_without_the_letters_does_not_end_a_command(model, tmp_path, monkeypatch):
    out, screen = tmp_path / "ü\udcff", io.BytesIO()
    run("quantize", model, "--scheme", "W8A16", "--out", out, "--json")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["scalewright", "verify", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert screen.getvalue().endswith(rb"\xfc\udcff: 49 tensors, 14 quantised layers, no problem found." + b"\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_is_full_is_an_error_in_words():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "scalewright", "--version"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr.replace("\n", " ")) == (
        1,
        "error the output cannot be written (No space left on device). Make room, or send it somewhere else. ",
    )


def test_the_version_is_told():
    assert run("--version") == f"scalewright {version('scalewright')}\n"


@pytest.mark.parametrize(("error", "words"), [(KeyboardInterrupt, "stopped; nothing was written.\n"), (OSError, "")])
def test_what_breaks_or_is_stopped_has_exit_code_1(error, words, model, tmp_path, monkeypatch):
    def fail(*args, **keywords):
        raise error

    monkeypatch.setattr("scalewright.calibration.pipelines.Calibration.run", fail)
    result = invoke("quantize", model, "--scheme", "W4A16", "--out", tmp_path / "out", code=1)
    assert (result.stdout, result.stderr) == ("", words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("command", ["quantize", "plan"])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_data_that_is_not_there_is_said_before_the_model_is_loaded(model, tmp_path, command, scheme):
    out = ("--out", tmp_path / "out") if command == "quantize" else ()
    missing = tmp_path / "missing.txt"
    assert error_of(command, model, "--scheme", scheme, "--data", missing, *out) == f"{missing}: there is no such file."


def test_a_plan_for_a_device_that_is_not_there_is_refused(model):
    assert error_of("plan", model, "--scheme", "W8A16", "--device", "gpu").startswith(
        "device: 'gpu' cannot be used here"
    )
