"""Observations in files, on the command line and as a page: read back to the last bit, and never believed unchecked."""

from __future__ import annotations

import base64
import copy
import inspect
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from scalewright.cli import app
from scalewright.errors import MergeError, ObservationsError, OutputError
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.observing import Observations, merge_files, observe
from scalewright.observing.files import packed
from scalewright.report.observations import observations_page

IDS = torch.randint(1, 96, (6, 24), generator=torch.Generator().manual_seed(1)).tolist()
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
EVIL = "<img src=x onerror=alert(1)></script>"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seen(model: Path) -> Observations:
    return observe(model, IDS, batch_size=1)


@pytest.fixture(scope="module")
def content(seen: Observations, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(seen.save(tmp_path_factory.mktemp("file") / "a.json").read_text())


def data_file(path: Path, samples: list[list[int]]) -> Path:
    path.write_text("\n".join(json.dumps({"input_ids": each}) for each in samples))
    return path


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4", "FP8_DYNAMIC"])
def test_what_is_written_is_read_back_to_the_last_bit(model: Path, scheme: str, tmp_path: Path) -> None:
    found = observe(model, IDS, observers=["static_minmax", "balanced_mse", "minmax", "optimal"], scheme=scheme)
    again = Observations.load(found.save(tmp_path / "new" / "a.json"))
    assert packed(again.records) == packed(found.records)
    assert again.to_dict() == found.to_dict() and again.layers == found.layers
    assert (again.origin, again.model, again.scheme) == ("a.json", "tiny", scheme)
    both, directly = again.merge(found), found.merge(found.merge())
    assert packed(both.records) == packed(directly.records) and both[DOWN].tokens == 2 * found[DOWN].tokens


def test_an_average_without_what_it_is_merged_by_is_refused(model: Path, tmp_path: Path) -> None:
    path = observe(model, IDS, observers="minmax", targets=[QUERY]).save(tmp_path / "a.json")
    content = json.loads(path.read_text())
    statistics = content["records"]["layers"][QUERY]["observers"]["minmax"]["statistics"]
    for name in [name for name in statistics if not name.endswith("_vals")]:
        del statistics[name]
    path.write_text(json.dumps(content))
    with pytest.raises(ObservationsError) as caught:
        Observations.load(path)
    assert str(caught.value) == (
        f"{path}: {QUERY}: observer 'minmax' has the statistics min_vals, max_vals, and should have min_vals, "
        "max_vals, first_min, first_max, added_min, added_max, num_averaged. "
        "Give a file that `scalewright observe` has written."
    )


def test_an_average_that_does_not_follow_from_its_parts_is_refused(model: Path, tmp_path: Path) -> None:
    path = observe(model, IDS, observers="minmax", targets=[QUERY]).save(tmp_path / "a.json")
    content = json.loads(path.read_text())
    statistics = content["records"]["layers"][QUERY]["observers"]["minmax"]["statistics"]
    statistics["min_vals"] = statistics["max_vals"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ObservationsError, match=r"minmax\.min_vals is not what follows from the other statistics\. Give"
    ):
        Observations.load(path)


def test_an_average_set_by_hand_survives_a_file(model: Path, tmp_path: Path) -> None:
    found = observe(model, IDS, observers="minmax", targets=[QUERY])
    observer = found.records[QUERY].observers["minmax"]
    observer.min_vals, observer.max_vals = torch.tensor([-2.0]), torch.tensor([3.0])
    again = Observations.load(found.save(tmp_path / "a.json")).records[QUERY].observers["minmax"]
    assert (again.min_vals.tolist(), again.max_vals.tolist(), int(again.num_averaged)) == ([-2.0], [3.0], 1)


def test_a_layer_without_tokens_survives_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixture = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1))
    found = observe(mixture, [IDS[0][:1]])
    unseen = [name for name, record in found.records.items() if not record.input.num_tokens]
    assert len(unseen) == 9
    again = Observations.load(found.save(tmp_path / "a.json"))
    assert packed(again.records) == packed(found.records) and again.experts == found.experts
    more = again.merge(observe(mixture, IDS))
    assert more.num_tokens == 1 + 6 * 24 and more[QUERY].tokens == 1 + 6 * 24


def test_layers_that_share_an_input_share_it_in_the_file(content: dict[str, Any]) -> None:
    layers = content["records"]["layers"]
    query, key, down = (layers[name] for name in (QUERY, QUERY.replace("q_proj", "k_proj"), DOWN))
    assert query["input"] == key["input"] != down["input"]
    counts = {each["statistics"]["counts"] for name, each in query["observers"].items() if name != "static_minmax"}
    assert len(counts) == 2  # those of balanced_mse are weighted
    assert all(key == _digest(each) for key, each in content["records"]["tensors"].items())


def _digest(stored: dict[str, Any]) -> str:
    from hashlib import sha256

    raw = zlib.decompress(base64.b64decode(stored["data"]))
    return sha256(f"{stored['dtype']} {stored['shape']} ".encode() + raw).hexdigest()[:24]


def test_a_file_is_for_others_to_read_too(seen: Observations, content: dict[str, Any]) -> None:
    assert content["version"] == 1 and content["num_tokens"] == 144
    assert {key: content[key] for key in seen.to_dict()} == seen.to_dict()
    layer = content["layers"][0]
    assert layer["name"] == QUERY and layer["input"]["choices"]["percentile"]["kept"]["db"] > 20
    assert layer["weight"]["choices"]["optimal"]["db"] > 30


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *way, last = path.split("/")
        place = content
        for each in way:
            place = place[each]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return change


def spoiled(name: str, **given: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the stored tensor that the query's input has under a name."""

    def change(content: dict[str, Any]) -> None:
        seen = content["records"]["layers"][QUERY]["input"]
        key = next(iter(seen["strengths"].values()))["counts"] if name == "counts" else seen[name]
        content["records"]["tensors"][key] |= given

    return change


def zipped(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


LAYER = f"records/layers/{QUERY}"
LEAST = f"{QUERY}: least values of the input"
NONE = {"num_observed": 0, "observed_dtype": None, "statistics": {}}


def strength(num_tokens: int, counts: str) -> dict[str, Any]:
    return {"num_tokens": num_tokens, "counts": counts, "signal": "0", "noise": None}


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no version": (set_at("version", ...), "there is no 'version' in it"),
    "another version": (set_at("version", 2), "is of version 2, and version 1 can be read"),
    "no records": (set_at("records", ...), "records: Field required"),
    "records that are none": (
        set_at("records", {"layers": [], "tensors": {}}),
        "layers: Input should be a valid dictionary",
    ),
    "tokens in words": (set_at("num_tokens", "many"), "num_tokens: Input should be a valid integer"),
    "an unknown scheme": (set_at("scheme", "W9"), "there is no scheme 'W9'."),
    "an unknown key": (set_at(f"{LAYER}/more", 1), f"layers.{QUERY}.more: Extra inputs are not permitted"),
    "a number that takes for ever": (
        set_at(f"{LAYER}/input/sums", ["1e999999999"] * 4),
        f"layers.{QUERY}.input.sums.0: String should match pattern '^-?[0-9]{{1,2000}}(/[1-9][0-9]{{0,2000}})?$'",
    ),
    "too few sums": (
        set_at(f"{LAYER}/input/sums", ["1"]),
        f"{QUERY}: 144 tokens of 32 channels have 4608 values and 1 sums of powers",
    ),
    "too many tokens": (
        set_at(f"{LAYER}/input/num_tokens", 145),
        f"{QUERY}: 145 tokens of 32 channels have 4608 values and 4 sums of powers",
    ),
    "a range that is gone": (set_at(f"{LAYER}/input/lo", None), f"{QUERY}: there are tokens, and no range"),
    "a tensor that is gone": (set_at(f"{LAYER}/input/lo", "0"), f"{LEAST} is not in the file"),
    "an odd strength": (
        set_at(f"{LAYER}/input/strengths/1e9", strength(0, "")),
        f"{QUERY}: '1e9' is no class of strength",
    ),
    "no strengths": (set_at(f"{LAYER}/input/strengths", {}), f"{QUERY}: 144 tokens were seen, and 0 have a strength"),
    "no base64": (spoiled("lo", data="?"), f"{LEAST} cannot be decoded"),
    "no zlib": (spoiled("lo", data="AAAA"), f"{LEAST} cannot be decoded"),
    "too short": (spoiled("lo", data=zipped(b"1234")), f"{LEAST} has not the 128 bytes that its shape takes"),
    "a bomb": (spoiled("lo", data=zipped(bytes(1 << 24))), f"{LEAST} has not the 128 bytes that its shape takes"),
    "too large": (
        spoiled("lo", shape=[1 << 40]),
        f"{LEAST} would take 4398046511104 bytes, and 268435456 are the most that is read",
    ),
    "another shape": (
        spoiled("lo", shape=[2, 16]),
        f"{LEAST} is torch.float32 of shape (2, 16), and should be torch.float32 of shape (32,)",
    ),
    "another dtype": (
        spoiled("lo", dtype="int64", shape=[16]),
        f"{LEAST} is torch.int64 of shape (16,), and should be torch.float32 of shape (32,)",
    ),
    "not a number": (spoiled("lo", data=zipped(b"\xff" * 128)), f"{LEAST} has NaN, Inf or negative counts in it"),
    "a negative count": (
        spoiled("counts", data=zipped(b"\xff" * 8 * 65536)),
        f"{QUERY}: counts of the input has NaN, Inf or negative counts in it",
    ),
    "counts of nothing": (
        set_at(f"{LAYER}/input/strengths", {"0": strength(144, "zeros")}),
        f"{QUERY}: 4608 values were seen, and 0 are counted",
    ),
    "an unknown observer": (set_at(f"{LAYER}/observers/mine", NONE), f"{QUERY}: there is no observer 'mine'."),
    "statistics that are not its own": (
        set_at(f"{LAYER}/observers/static_minmax/statistics/counts", "zeros"),
        f"{QUERY}: observer 'static_minmax' has the statistics min_vals, max_vals, counts",
    ),
    "statistics that are lacking": (
        set_at(f"{LAYER}/observers/percentile/statistics/counts", ...),
        f"{QUERY}: observer 'percentile' has the statistics min_vals, max_vals",
    ),
    "infinity": (
        set_at(f"{LAYER}/weight/lo", float("inf")),
        f"layers.{QUERY}.weight.lo: Input should be a finite number",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_was_changed_is_refused(case: str, content: dict[str, Any], tmp_path: Path) -> None:
    change, words = BROKEN[case]
    broken = copy.deepcopy(content)
    broken["records"]["tensors"]["zeros"] = {"dtype": "int64", "shape": [65536], "data": zipped(bytes(8 * 65536))}
    change(broken)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ObservationsError) as caught:
        Observations.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {words}") and text.endswith(
        ". Give a file that `scalewright observe` has written."
    )
    assert "\n" not in text


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)). Give"),
        (b"\xff\xfe\xff", "is no JSON ("),
        (b"[" * 100_000, "is no JSON ("),
        (b"[]", "there is no 'version' in it. Give"),
    ],
)
def test_what_is_no_such_file_is_refused(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(raw)
    with pytest.raises(ObservationsError) as caught:
        Observations.load(path)
    assert str(caught.value).startswith(f"{path}: {words}")
    with pytest.raises(ObservationsError, match=r"gone\.json: there is no such file\."):
        Observations.load(tmp_path / "gone.json")


def test_files_are_written_whole_and_not_over_others(seen: Observations, tmp_path: Path) -> None:
    path = seen.save(tmp_path / "a.json")
    with pytest.raises(OutputError) as caught:
        seen.save(path)
    assert str(caught.value) == f"{path}: exists already. Give another name, or overwrite."
    seen.save(path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(MergeError) as twice:
        merge_files([path, tmp_path / "." / "a.json"])
    assert str(twice.value) == f"{path}: is given twice. What it has must be added once."


# ---- the command line ------------------------------------------------------------------------------------------------


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["observe", *(str(each) for each in words)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    if code:
        assert result.stdout == "" and result.stderr.count("\n") == 1
        return result.stderr.removeprefix("error ").removesuffix("\n")
    assert result.stderr == ""
    return result.stdout


def test_a_table_of_layers_and_notes_are_shown(model: Path, tmp_path: Path) -> None:
    data = data_file(tmp_path / "ids.jsonl", IDS)
    output = run(model, "--data", data, "--samples", 6)
    lines = output.splitlines()
    assert lines[0].strip() == "tiny: 7 layers, 144 tokens; dB of signal to noise under W8A8"
    assert max(map(len, lines)) <= 140 and "…" not in output
    assert next(line.split()[0] for line in lines if line.strip().startswith("model.")) == QUERY
    assert "note ids.jsonl: 144 tokens are little to calibrate with" in output
    worst = [
        line.split()[0] for line in run(model, "--data", data, "--worst-first").splitlines() if " model." in f" {line}"
    ]
    found = json.loads(run(model, "--data", data, "--json"))
    kept = {
        each["name"]: min(
            max(min(choice["kept"].values()) for choice in each["input"]["choices"].values()),
            max(choice["db"] for choice in each["weight"]["choices"].values()),
        )
        for each in found["layers"]
    }
    assert [kept[name] for name in worst if name in kept] == sorted(kept.values())
    assert found["out"] is None and found["experts"] == {}


def test_files_are_merged_and_become_pages(model: Path, tmp_path: Path) -> None:
    for name, some in (("a", IDS[:2]), ("b", IDS[2:]), ("whole", IDS)):
        data = data_file(tmp_path / f"{name}.jsonl", some)
        output = run(model, "--data", data, "--batch-size", 1, "--out", tmp_path / f"{name}.json")
        tokens = 24 * len(some)
        assert output.endswith(f"{tmp_path / name}.json is written (7 layers of tiny; {tokens} tokens).\n")
    run("--merge", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "both.json")
    both, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("both", "whole"))
    assert both["records"] == whole["records"] and both["layers"] == whole["layers"]
    run("--merge", tmp_path / "both.json", "--out", tmp_path / "page.html", "--json")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("MODEL",), "a model is observed by running data through it. Give a dataset."),
        (("MODEL", "OTHER", "--data", "x"), "2 models were given. Give one, or files and --merge."),
        ((__file__,), f"{__file__}: is a file, and no model. Give --merge for files that observe has written."),
        (("--merge", "nowhere", "other"), "nowhere: there is no such file."),
        (
            ("--merge", "a", "--data", "x", "--scheme", "FP8"),
            "--data, --scheme: files are merged, and no model is run. Leave it out, or --merge.",
        ),
        (("MODEL", "--out", "a.txt"), "a.txt: is neither .json nor .html. Give a file that ends in one of them."),
        (
            ("MODEL", "--data", "x", "--observer", "optimall"),
            "there is no observer 'optimall'. Did you mean 'optimal'? ",
        ),
        (("MODEL", "--data", "x", "--scheme", "W8A9"), "there is no scheme 'W8A9'. Did you mean 'W8A8'? "),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], expected: str) -> None:
    assert run(*words, code=2).startswith(expected)


OPTIONS: dict[str, tuple[list[str], str, Any]] = {
    "--scheme": (["FP8"], "scheme", "FP8"),
    "--observer": (["mse", "--observer", "percentile"], "observers", ["mse", "percentile"]),
    "--ignore": (["a", "--ignore", "b"], "ignore", ["a", "b"]),
    "--samples": (["3"], "num_calibration_samples", 3),
    "--seq-len": (["5"], "max_seq_length", 5),
    "--batch-size": (["7"], "batch_size", 7),
    "--column": (["mine"], "column", "mine"),
    "--split": (["test"], "split", "test"),
    "--pack": ([], "pack", True),
    "--tokenizer": (["other"], "tokenizer", "other"),
    "--seed": (["9"], "seed", 9),
    "--device": (["meta"], "device", "meta"),
    "--dtype": (["float16"], "dtype", "float16"),
    "--strict": ([], "strict", True),
    "--trust-remote-code": ([], "trust_remote_code", True),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_reach_the_observing(option: str, seen: Observations, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def note(model: str, dataset: str, **keywords: Any) -> Observations:
        given.update(keywords, model=model, dataset=dataset)
        return seen

    monkeypatch.setattr("scalewright.observing.observe", note)
    values, name, expected = OPTIONS[option]
    run("MODEL", "--data", "some.txt", "--json")
    assert (given["model"], given["dataset"]) == ("MODEL", "some.txt") and given[name] != expected
    known = inspect.signature(observe).parameters
    plain = {each: known[each].default for each in given if each not in ("model", "dataset", "on_step")}
    assert {each: given[each] for each in plain} == {**plain, "ignore": LEFT_ALONE}
    assert set(known) - set(given) == {"targets"}
    run("MODEL", "--data", "some.txt", "--json", option, *values)
    assert given[name] == expected


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(seen: Observations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model with evil names."""
    records = {f"{EVIL}.{i}.{name}": record for i, (name, record) in enumerate(seen.records.items())}
    evil = Observations(records, EVIL, seen.scheme, seen.observers, 144, (0,), run_notes=(f"{EVIL}: a note",))
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(observations_page(evil), encoding="utf-8")
    return path


def test_names_are_escaped_and_nothing_is_loaded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text and "&lt;img src=x onerror=alert(1)&gt;" in text
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=(\S+)", text) == ['"data:,">']
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text)
    assert data is not None
    found = json.loads(data[1])
    assert found["layers"][0]["name"] == f"{EVIL}.0.{QUERY}"
    for layer, picture in zip(found["layers"], found["pictures"], strict=True):
        assert sum(picture["counts"]) == layer["tokens"] * layer["shape"][1]
        assert picture["from"] == pytest.approx(layer["min"], rel=0.005)
        assert picture["to"] == pytest.approx(layer["max"], rel=0.005)


def test_experts_are_spoken_of_where_there_are_some(seen: Observations) -> None:
    assert not seen.experts and "Of experts" not in observations_page(seen)
    records = {f"model.layers.0.mlp.experts.{i}.up_proj": each for i, each in enumerate(seen.records.values())}
    mixture = Observations(records, "mine", seen.scheme, seen.observers, 144, (0,))
    assert mixture.experts and "Of experts the worst is shown." in observations_page(mixture)


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
def test_a_browser_draws_the_page(page: Path) -> None:
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000")
    done = subprocess.run(
        [CHROMIUM, *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ":CONSOLE" not in done.stderr
    root, body = done.stdout.split("<body>")
    assert 'data-drawn="yes"' in root
    assert body.count("js-plotly-plot") >= 2
    assert "<img src=x" not in body and body.count("<tr>") >= 7
