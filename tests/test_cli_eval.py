"""`scalewright eval`: what it prints, and exits with."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from scalewright import oneshot
from scalewright.cli import app, shown
from scalewright.cli import evaluate as command
from scalewright.evaluation import Evaluation, Figure, PositionBin, WorstSample, WorstToken, evaluate
from scalewright.report.evaluated import Evaluated
from scalewright.report.page import write_report

IDS = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()


def save(folder: Path, seed: int, initializer_range: float = 0.5) -> Path:
    """A random model that is sure of what it says."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=32, initializer_range=initializer_range, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A model, another one, and data."""
    root = tmp_path_factory.mktemp("eval")
    data = root / "ids.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": each}) for each in IDS))
    return save(root / "one", 0), save(root / "other", 1), data


def invoke(*words: object, code: int = 0):
    result = CliRunner().invoke(app, ["eval", *(str(each) for each in words)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def test_both_models_stand_side_by_side(folders):
    model, _, data = folders
    result = invoke(model, "--against", model, "--data", data, "--samples", 8)
    assert result.stderr == ""
    words = " ".join(result.stdout.split())
    told = command._told(evaluate(model, dataset=IDS, generate=False).perplexity)
    assert f"perplexity {told} {told} " in words
    assert (
        "8 samples, 184 tokens" in words and "same likeliest token 100%" in words and "KL(original ‖ model) 0" in words
    )
    assert "first difference nowhere" in words and "does not babble" in words
    assert re.search(r"KL +▁{23} +up to 0\n", result.stdout), "a bar for each position"


def test_for_machines_there_is_nothing_but_json(folders):
    model, other, data = folders
    result = invoke(model, "--against", other, "--data", data, "--no-generate", "--json", "--seq-len", 12)
    found = json.loads(result.stdout)
    again = evaluate(str(model), against=str(other), dataset=data, generate=False, max_seq_length=12)
    assert found == json.loads(again.to_json())
    assert (found["num_samples"], found["num_tokens"], found["generation"]) == (8, 88, None)


def test_what_was_found_goes_into_the_page_and_into_later_ones(folders, tmp_path):
    model, _, data = folders
    out = tmp_path / "out"
    oneshot(str(model), scheme="W8A8_DYNAMIC", output_dir=out)
    words = (out, "--against", model, "--data", data, "--no-generate", "--report")
    assert f"{out / 'report.html'} is written." in invoke(*words).stdout.replace("\n", " ").replace("  ", " ")
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["report"] == str(out / "report.html")
    kl = Evaluated.of(found).kl.in_words
    assert kl in (out / "report.html").read_text(encoding="utf-8")
    assert kl in write_report(out, tmp_path / "later.html").read_text(encoding="utf-8")


def test_a_page_on_what_is_no_checkpoint_is_refused_before_the_work(folders, monkeypatch):
    model, _, data = folders
    monkeypatch.setattr("scalewright.evaluation.evaluate", lambda *_, **__: pytest.fail("it was evaluated"))
    said = invoke(model, "--data", data, "--report", code=2).stderr
    assert "has neither scalewright.json nor a quantization_config" in " ".join(said.split())


def test_a_babbler_ends_with_1(folders):
    model, other, data = folders
    result = invoke(model, "--against", other, "--data", data, code=1)
    assert f"{model} babbles: " in result.stdout.replace("\n", "")
    found = json.loads(invoke(model, "--against", other, "--data", data, "--json", code=1).stdout)
    assert found["generation"]["babbles"]
    invoke(model, "--against", other, "--data", data, "--no-generate")


def test_a_model_alone_has_a_column_of_its_own(folders):
    model, _, data = folders
    output = invoke(model, "--data", data, "--no-generate").stdout
    assert "perplexity" in output and "KL" not in output and "▁" not in output


def test_data_to_judge_by_is_not_called_calibration_data():
    shown = CliRunner().invoke(app, ["eval", "--help"]).output
    assert "--data" in shown and "alibrat" not in shown


def test_mistakes_are_one_line_and_end_with_2(folders, tmp_path):
    model, _, data = folders
    result = invoke(model, code=2)
    assert result.stderr == "error a model is evaluated by running data through it. Give a dataset.\n"
    wide = LlamaForCausalLM(LlamaConfig(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    wide.save_pretrained(tmp_path / "wide")
    line = invoke(tmp_path / "wide", "--against", model, "--data", data, code=2).stderr
    told = f"error {tmp_path / 'wide'}: has 80 logits for each token, and {model} has 64."
    assert line == f"{told} Compare models of one vocabulary.\n"
    line = invoke(model, "--against", tmp_path / "wide", "--data", data, code=2).stderr
    assert line.startswith(f"error {model}: has 64 logits for each token, and {tmp_path / 'wide'} has 80.")
    assert "no column 'txt'" in invoke(model, "--data", data, "--column", "txt", code=2).stderr


def test_names_and_texts_are_no_markup():
    figure = Figure(0.5, 0.25)
    sample = WorstSample("[red]text[/red]", 9, 0.5, 0.5)
    token = WorstToken("[bold]x", "[/]", "[blue]", 0.5, "[link=a]", 0.25, 2.0)
    bins = [PositionBin(1, 9, 9, figure, figure)]
    found = Evaluation(
        "[red]m", "[/]o", 1, 9, figure, figure, figure, figure, figure, bins, [sample], [token], None, ["[dim]n"], 0
    )
    with shown.out_console.capture() as captured:
        command._show(found)
    for text in ("[red]m", "[/]o", "[red]text[/red]", "[bold]x", "[blue]", "[link=a]", "[dim]n"):
        assert text in captured.get()


@pytest.mark.parametrize(
    ("figure", "options", "text"),
    [
        (Figure(4.5064, 0.2314), {}, "4.51 ± 0.23"),
        (Figure(0.009469, 0.0002412), {}, "0.00947 ± 0.00024"),
        (Figure(19109.2, 1562.1), {}, "19109 ± 1562"),
        (Figure(0.947, 0.0029), {"unit": "%"}, "94.70% ± 0.29%"),
        (Figure(0.01, 0.0014), {"sign": "+"}, "+0.0100 ± 0.0014"),
        (Figure(0.5, None), {}, "0.5"),
        (Figure(9.97, 3e-16), {}, "9.97"),
        (None, {}, ""),
    ],
)
def test_a_number_is_as_exact_as_its_error(figure, options, text):
    assert command._told(figure, **options) == text
