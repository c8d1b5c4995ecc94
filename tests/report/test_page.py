"""The page: it has every layer and the numbers of the run, whatever is missing, and no markup but its own."""

import html
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from made_up import EVALUATION, HOSTILE, layer_names, row, write_run
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from scalewright.checkpoint.memory import in_units
from scalewright.cli import app
from scalewright.errors import DataError, ModelError, OutputError
from scalewright.oneshot import oneshot
from scalewright.report.drawing import as_script
from scalewright.report.evaluated import Evaluated, Measured
from scalewright.report.page import in_seconds, page_of, write_report
from scalewright.report.reading import read_folder


class Reader(HTMLParser):
    """Tags of a page, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._within = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        self.text += "" if self._within else data


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def words_of(page: str) -> str:
    return " ".join(Reader(page).text.split())


def rows(*names: str, **given) -> list[dict]:
    chance = random.Random(0)
    return [row(name, chance, **given) for name in names]


def test_a_run_its_page_and_its_timings_agree(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 96, (6, 20)).tolist()
    (tmp_path / "ids.jsonl").write_text("\n".join(json.dumps({"input_ids": each}) for each in ids))
    out = tmp_path / "out"
    words = ["quantize", tmp_path / "model", "--scheme", "FP8", "--data", tmp_path / "ids.jsonl", "--out", out]
    done = CliRunner().invoke(app, [*map(str, words), "--report", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["report"] == str(out / "report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    run, data = json.loads((out / "scalewright.json").read_text()), data_of(page)
    columns = data["columns"]
    assert columns["name"] == [each["name"] for each in run["layers"]] and len(columns["name"]) == 14
    for figure in ("weight_db", "output_db", "num_tokens"):
        assert columns[figure] == pytest.approx([each[figure] for each in run["layers"]], abs=1e-4)
    assert set(columns["num_tokens"]) == {6 * 20}
    pictures = json.loads((out / "scalewright_pictures.json").read_text())
    assert [data["pictures"][str(number)] for number in range(14)] == [pictures[name] for name in columns["name"]]
    assert set(data["seconds"]) == {"load", "data", "calibrate", "save"}
    parameters = sum(
        each.numel()
        for each in AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4)).parameters()
    )
    assert run["bytes_before"] == 4 * parameters
    stored = read_folder(out)
    quantised = [each for each in stored.layers if each.bits is not None]
    assert len(quantised) == 14 and stored.bits == pytest.approx(8, abs=0.1)
    assert f"{in_units(run['bytes_before'])} before" in words_of(page)
    # A page that is made later knows the time, and takes what `eval` has found.
    (tmp_path / "eval.json").write_text(json.dumps(EVALUATION))
    again = CliRunner().invoke(app, ["report", str(out), "--evaluation", str(tmp_path / "eval.json")])
    assert (again.exit_code, again.stdout.split()) == (0, [str(out / "report.html"), "is", "written."])
    later = (out / "report.html").read_text(encoding="utf-8")
    assert data_of(later)["seconds"] == data["seconds"] and "0.03120 ± 0.00040" in words_of(later)


def test_a_run_without_report_keeps_no_timings_and_the_page_says_so(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4))
    oneshot(model, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "scalewright_pictures.json" in names and not names & {"scalewright_timings.json", "report.html"}
    page = write_report(tmp_path / "out", tmp_path / "elsewhere" / "page.html")
    assert {each.name for each in (tmp_path / "out").iterdir()} == names
    assert "not kept; quantize --report keeps it" in words_of(page.read_text(encoding="utf-8"))


def test_a_thousand_layers_are_all_there_in_a_page_of_sane_size(tmp_path):
    names = [*layer_names(143), "lm_head"]
    page = write_report(write_run(tmp_path / "out", rows(*names)))
    assert data_of(page.read_text(encoding="utf-8"))["columns"]["name"] == names
    assert len(names) == 1002 and page.stat().st_size < 3.5e6


def test_of_very_many_layers_the_worst_are_pictured(tmp_path, monkeypatch):
    monkeypatch.setattr("scalewright.report.page._NUM_PICTURED", 20)
    given = rows(*layer_names(4, num_experts=3))
    given[-1]["output_db"], given[0]["output_db"], given[1]["output_db"] = 1.0, 99.0, None
    page = page_of(read_folder(write_run(tmp_path / "out", given)))
    data = data_of(page)
    assert len(data["columns"]["name"]) == 36 and len(data["pictures"]) == 20
    assert "35" in data["pictures"] and "0" not in data["pictures"]
    assert "The 20 worst layers are here." in words_of(page)


def test_names_of_models_are_never_markup(tmp_path):
    names = [f"model.layers.{number}.{text}" for number, text in enumerate(HOSTILE)]
    notes = [f"{name}: a note" for name in names]
    folder = write_run(
        tmp_path / "out",
        rows(*names, weights=HOSTILE[0], activations=HOSTILE[1], observers={"weight": HOSTILE[2]}),
        notes=notes,
        pipeline=HOSTILE[0],
        why=HOSTILE[1],
        versions={HOSTILE[2]: HOSTILE[3]},
        num_samples=HOSTILE[0],
        seed=HOSTILE[1],
        recipe={HOSTILE[0]: HOSTILE[1]},
    )
    (folder / "config.json").write_text(json.dumps({"architectures": [HOSTILE[0]]}))
    evaluation = EVALUATION | {"generation": {"verdict": HOSTILE[0]}}
    hostile = page_of(read_folder(folder, seconds={HOSTILE[0]: 1.0}, evaluation=evaluation))
    tame = write_run(tmp_path / "tame", rows(*(f"model.layers.{number}.x" for number in range(4))), notes=notes)
    expected = page_of(read_folder(tame, seconds={"load": 1.0}, evaluation=EVALUATION))
    plain = [(tag, set(given)) for tag, given in Reader(expected).tags]
    assert [(tag, set(given)) for tag, given in Reader(hostile).tags] == plain
    assert data_of(hostile)["columns"]["name"] == names
    shown = Reader(hostile).text
    assert all(note in shown for note in notes)
    assert HOSTILE[2].replace("{{ 7 * 7 }}", "49") not in html.unescape(hostile)


@pytest.mark.parametrize(("modifier", "is_told"), [("QuantizationModifier", True), ("GPTQModifier", False)])
def test_large_values_are_not_blamed_for_what_gptq_takes_into_the_bargain(modifier, is_told, tmp_path):
    rows = [row("model.layers.0.mlp.up_proj", random.Random(0), weight_db=16.9, output_db=26.4)]
    recipe = {"default_stage": {"default_modifiers": [{modifier: {"scheme": "W4A16"}}]}}
    page = write_report(write_run(tmp_path / "run", rows, recipe=recipe))
    assert ("a few large values decide" in page.read_text(encoding="utf-8")) is is_told


def test_json_in_a_script_tag_is_what_it_was():
    given = {"<!--": ["</script>", "&amp;", "\u2028", 'a"b\\', "ü"]}
    text = as_script(given)
    assert json.loads(text) == given
    assert not re.search(r"[<>&\u2028]", text)


@pytest.mark.parametrize(
    "missing", ["weight_db", "gain_db", "output_db", "above_optimum", "num_tokens", "shape", "weights"]
)
def test_a_figure_that_is_missing_breaks_nothing(missing, tmp_path):
    given = rows(*layer_names(1))
    for each in given:
        del each[missing]
    page = page_of(read_folder(write_run(tmp_path / "out", given, has_pictures=False)))
    assert len(data_of(page)["columns"]["name"]) == 7


@pytest.mark.parametrize(
    "strange", [None, "much", [], {}, float("nan"), float("inf"), -1, True, 10**400], ids=lambda each: str(each)[:6]
)
def test_figures_that_are_not_what_they_should_be_are_left_out(strange, tmp_path):
    figures = ("weight_db", "gain_db", "output_db", "above_optimum", "num_tokens", "observers", "weights", "shape")
    folder = write_run(tmp_path / "out", rows(*layer_names(1), **dict.fromkeys(figures, strange)), bytes_before=strange)
    picture = {"weight": {"counts": strange, "from": 0}, "input": strange}
    (folder / "scalewright_pictures.json").write_text(json.dumps({layer_names(1)[0]: picture}))
    (folder / "scalewright_timings.json").write_text(json.dumps({"load": strange}))
    evaluation = dict.fromkeys(EVALUATION, strange)
    data = data_of(page_of(read_folder(folder, evaluation=evaluation)))
    assert len(data["columns"]["name"]) == 7 and data["pictures"] == {}


def test_a_phase_that_took_no_time_is_no_phase_that_is_unknown(tmp_path):
    folder = write_run(tmp_path / "out", rows(*layer_names(1)))
    kept = {"load": 0.1, "data": 0.0, "save": 0}
    (folder / "scalewright_timings.json").write_text(json.dumps(kept))
    assert data_of(page_of(read_folder(folder)))["seconds"] == kept


@pytest.mark.parametrize("part", ["chosen", "typical", "ratios", "below", "above"])
@pytest.mark.parametrize("strange", [5, "ab", [1], [None, None], ["<b>", "x"], {"a": 1}, [0, float("nan")], True, -1])
def test_parts_of_a_picture_that_are_not_what_they_should_be_are_left_out(part, strange, tmp_path):
    folder, name = write_run(tmp_path / "out", rows(*layer_names(1))), layer_names(1)[0]
    whole = json.loads((folder / "scalewright_pictures.json").read_text())[name]["weight"]
    (folder / "scalewright_pictures.json").write_text(json.dumps({name: {"weight": whole | {part: strange}}}))
    found = data_of(page_of(read_folder(folder)))["pictures"]["0"]["weight"]
    assert {key: each for key, each in found.items() if key != part} == {
        key: each for key, each in whole.items() if key != part
    }
    is_right = {"ratios": strange == [1], "below": strange == 5, "above": strange == 5}.get(part, False)
    assert found[part] == (strange if is_right else None if part in ("chosen", "typical", "ratios") else 0)


def test_a_layer_that_gives_nothing_but_zeros_is_not_the_worst(tmp_path):
    given = rows(*layer_names(1))
    given[3] |= {"weight_db": 21.0, "output_db": float("nan")}  # no signal, and no noise
    found = read_folder(write_run(tmp_path / "out", given))
    assert (found.layers[3].output_db, found.layers[3].quality_db) == (None, 21.0)
    assert data_of(page_of(found))["columns"]["output_db"][3] is None


def test_a_run_that_left_nothing_but_names_has_a_page(tmp_path):
    folder = write_run(tmp_path / "out", [], has_pictures=False)
    (folder / "scalewright.json").write_text(json.dumps({"layers": [{"name": "a"}, "b", {"name": 3}, {}]}))
    assert data_of(page_of(read_folder(folder)))["columns"]["name"] == ["a"]


# ---- checkpoints of others, and what is no checkpoint ----------------------------------------------------------------


def test_a_checkpoint_of_another_tool_is_told_by_its_files(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"format": "pack-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.layers.0.mlp.up_proj.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(64, 1, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight_shape": torch.tensor([64, 128]),
        "model.layers.0.mlp.down_proj.weight_packed": torch.zeros(128, 32, dtype=torch.uint8),
        "model.layers.0.mlp.down_proj.weight_scale": torch.zeros(128, 4, dtype=torch.uint8),
        "model.norm.weight": torch.zeros(128),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_folder(tmp_path)
    layers = {each.name.rpartition(".")[2]: (each.shape, each.bits) for each in found.layers}
    packed = 64 * 16 * 4 + 64 * 2 + 2 * 8
    assert layers == {"up_proj": ((64, 128), 8 * packed / 8192), "down_proj": ((128, 64), 8 * (4096 + 512) / 8192)}
    assert found.bytes_after == packed + 4096 + 512 + 512
    assert found.bits == 8 * (packed + 4096 + 512) / 16384
    page = page_of(found)
    assert "No scalewright.json lies beside this checkpoint, so another tool has written it." in words_of(page)
    assert 'id="heat"' not in page and 'id="worst"' not in page


def test_experts_that_files_call_otherwise_have_bits(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    oneshot(AutoModelForCausalLM.from_config(config), scheme="W4A16", output_dir=tmp_path / "out")
    found = read_folder(tmp_path / "out")
    assert {each.name.split(".")[3] for each in found.layers} == {"self_attn", "mlp"}  # and block_sparse_moe in files
    assert [each.name for each in found.layers if each.bits is None] == []
    assert found.bits == pytest.approx(4.25, abs=0.05)
    weights = sum(each.shape[0] * each.shape[1] for each in found.layers)
    assert sum(each.bits * each.shape[0] * each.shape[1] for each in found.layers) == pytest.approx(
        found.bits * weights
    )


@pytest.mark.parametrize(
    ("scheme", "bits"), [("MXFP4A16", 4.25), ("MXFP6A16", 6.25), ("MXFP8A16", 8.25), ("NVFP4A16", 4.5)]
)
def test_small_floats_in_bytes_are_counted(scheme, bits, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4), dtype=torch.bfloat16)
    result = oneshot(model, scheme=scheme, output_dir=tmp_path / "out")
    shapes = {each.name: tuple(each.shape) for each in result.layers}
    assert read_folder(tmp_path / "out").bits == pytest.approx(bits, abs=0.01)
    (tmp_path / "out" / "scalewright.json").unlink()  # as another tool would leave it
    found = read_folder(tmp_path / "out")
    assert {each.name: each.shape for each in found.layers} == shapes
    assert found.bits == pytest.approx(bits, abs=0.01)


def test_what_cannot_be_reported_on_is_said(tmp_path):
    def error_of(error=ModelError, **given) -> str:
        with pytest.raises(error) as caught:
            write_report(given.pop("folder", folder), **given)
        return str(caught.value)

    folder = tmp_path / "none"
    assert error_of() == f"{folder}: is no folder. Give one that `quantize` has written."
    folder.mkdir()
    assert error_of() == (
        f"{folder}: has neither scalewright.json nor a quantization_config in config.json, so it is no quantised "
        "checkpoint. Give a folder that `quantize` has written."
    )
    (folder / "scalewright.json").write_text("[]")
    file = folder / "scalewright.json"
    assert error_of() == f"{file}: has a list in it, and an object is needed. Quantise again."
    file.write_text("{")
    assert error_of().startswith(f"{file}: cannot be read (")
    file.write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert error_of().startswith(f"{folder / 'model.safetensors'}: cannot be read (")
    (folder / "model.safetensors").unlink()
    assert error_of(OutputError, file=tmp_path) == f"{tmp_path}: is a folder. Give a file."
    assert error_of(OutputError, file=file / "page.html") == f"{file / 'page.html'}: {file} cannot be written to."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory). Give what `eval --json` has printed."),
        ("{", "is no JSON. Give what `eval --json` has printed."),
        ("[1]", "has neither kl, perplexity nor agreement in it. Give what `eval --json` has printed."),
        (
            '{"kl": "low"}',
            "has neither kl, perplexity nor agreement in it. Give what `eval --json` has printed.",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_used_is_said(text, said, tmp_path):
    from scalewright.report.evaluated import read_evaluation

    if text is not None:
        (tmp_path / "eval.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_evaluation(tmp_path / "eval.json")
    assert str(caught.value) == f"{tmp_path / 'eval.json'}: {said}"


# ---- small things ----------------------------------------------------------------------------------------------------


def test_what_eval_found_is_shown_as_far_as_it_goes(tmp_path):
    folder = write_run(tmp_path / "out", rows(*layer_names(1)))
    for key, value in EVALUATION.items():
        page = words_of(page_of(read_folder(folder, evaluation={key: value})))
        assert "How much of the model is left" in page, key
    whole = words_of(page_of(read_folder(folder, evaluation=EVALUATION)))
    for text in (
        "0.03120 ± 0.00040",
        "8.125 ± 0.050",
        "7.9 of the original",
        "93.0 %",
        "It writes as the original does.",
    ):
        assert text in whole
    assert Evaluated.of(EVALUATION).curve == [{"at": 4.5, "kl": 0.5, "error": 0.1, "agreement": 0.9}]
    assert "How much of the model is left" not in words_of(page_of(read_folder(folder)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_samples": 16, "num_tokens": 4080}, "16 samples, 4,080 tokens"),
        ({"model": "elsewhere/S4"}, "elsewhere/S4"),
        (
            {"model": "S4<b>", "against": "M", "num_samples": 16, "num_tokens": 4080},
            "S4<b> beside M: 16 samples, 4,080 tokens",
        ),
        ({"model": 3, "num_samples": "many", "num_tokens": None}, None),
    ],
)
def test_the_page_tells_what_was_evaluated(given, said, tmp_path):
    folder = write_run(tmp_path / "out", rows(*layer_names(1)))
    page = words_of(page_of(read_folder(folder, evaluation=EVALUATION | given)))
    assert said in page if said else "measured on" not in page
    assert not Evaluated.of(given).has_any


def test_numbers_have_as_many_digits_as_they_deserve():
    assert [Measured(*each).in_words for each in ((0.03124, 0.0004), (8.1, None), (12345.6, 120.0), (0.5, 0.0))] == [
        *("0.03124 ± 0.00040", "8.1", "12346 ± 120", "0.5000 ± 0.0000"),
    ]
    assert [in_units(each) for each in (12, 1500, 60.8e6, 2e9, 1.5e13)] == [
        "12 bytes",
        "1.5 kB",
        "60.8 MB",
        "2 GB",
        "15,000 GB",
    ]
    assert [in_seconds(each) for each in (3.21, 250, 7500)] == ["3.2 s", "4 min 10 s", "2 h 5 min"]


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    page = page_of(read_folder(write_run(tmp_path / "out", rows(*layer_names(1)))))
    for tag, given in Reader(page).tags:
        assert "src" not in given, tag
        assert (given.get("href") or "data:").startswith("data:"), tag
    styles = list(Path(__file__).parents[2].glob("src/scalewright/report/*.css"))
    assert len(styles) == 3
    assert not any(re.search(r"@import|url\(", each.read_text()) for each in styles)
