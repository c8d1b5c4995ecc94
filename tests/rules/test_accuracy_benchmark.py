"""What `make bench-accuracy` compares, how it judges, and how results become a table and a chart. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalewright.modifiers import QuantizationModifier

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"cpu": "C", "cores": 1, "system": "S", "ours": {"a": "1"}, "peer": {"b": "2"}}


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.accuracy")


@pytest.fixture
def tables(accuracy: ModuleType) -> ModuleType:
    return accuracy.tables


@pytest.fixture
def chart(accuracy: ModuleType) -> ModuleType:
    return accuracy.tables.accuracy_chart


def row_of(scheme: str, side: str, contestant: str, kl: float, **others: Any) -> dict[str, Any]:
    return {
        **{"weights": "M", "scheme": scheme, "side": side, "contestant": contestant, "kl": kl, "perplexity": 7.5},
        **{"top1": 0.875, "seconds": 2.0, "extra_bytes": 1, "bits": 4.5, "num_samples": 128, "num_tokens": 19207},
        **{"group_size": 32, "perplexity_before": 7.25, "threads": 2, "date": "2020-01-01", "quick": False, **others},
    }


# ---- the table and the chart -----------------------------------------------------------------------------------


def accuracy_lines(tables: ModuleType, rows: list[dict[str, Any]]) -> list[str]:
    nothing = {"machine": None, "rows": []}
    results = {**dict.fromkeys(tables.TOPICS, nothing), "accuracy": {"machine": MACHINE, "rows": rows}}
    return tables.markdown(results).split("### Accuracy")[1].split("### vLLM")[0].splitlines()


def test_rows_are_sorted_by_scheme_and_kl_beside_the_best_peer(tables: ModuleType) -> None:
    rows = [
        row_of("W4A16", "peer", "GPTQ", 0.05),
        row_of("W4A16", "peer", "memoryless_minmax", 0.15),
        row_of("W4A16", "ours", "best", 0.03, quick=True),
        row_of("W3A16", "ours", "best", 1.5, seconds=0.25, busy=True, cpu="D"),
        row_of("W3A16", "peer", "mse", 2.5, seconds=3.0, busy=True, clock="processor"),
        {name: each for name, each in row_of("W3A16", "ours", "mse", 2.75).items() if name != "seconds"},
        row_of("unquantised", "none", "bf16", 0.000371),
        {"weights": "M", "scheme": "W3A16", "side": "peer", "contestant": "GPTQ", "problem": "M: it broke"},
    ]
    rows[-1] |= {"date": "2020-01-01", "quick": False}
    lines = accuracy_lines(tables, rows)
    assert [line for line in lines if line.startswith("| W")] == [
        "| W4A16 | **ours `best`~** | 0.0300 | **0.60** | 7.500 | 87.5% | 2.00 s |",
        "| W4A16 | peer `GPTQ` | 0.0500 | 1.00 | 7.500 | 87.5% | 2.00 s |",
        "| W4A16 | peer `memoryless_minmax` | 0.150 | 3.00 | 7.500 | 87.5% | 2.00 s |",
        "| W3A16 | **ours `best`** | 1.50 | **0.60** | 7.500 | 87.5% | † ≈ 250 ms |",
        "| W3A16 | peer `mse` | 2.50 | 1.00 | 7.500 | 87.5% | ‡ 3.00 s |",
        "| W3A16 | **ours `mse`** | 2.75 | **1.10** | 7.500 | 87.5% |  |",
    ]
    terms = (
        "**M**, groups of 32: 128 samples, 19,207 tokens judged, 2 threads. "
        "Unquantised: perplexity 7.250 (in bf16 KL 0.000371). † is on another machine (D), whose seconds compare with "
        "each other alone."
    )
    assert terms in lines
    assert not any("unquantised" in line for line in lines)


def test_each_model_has_a_table_with_its_own_best_peer(tables: ModuleType) -> None:
    rows = [row_of("FP8", side, "mse", kl, weights=model) for model, side, kl in (
        ("A", "peer", 0.02), ("A", "ours", 0.01), ("B", "peer", 0.005), ("B", "ours", 0.01)
    )]  # fmt: skip
    ratios = [line.split(" | ")[3] for line in accuracy_lines(tables, rows) if line.startswith("| FP8")]
    assert ratios == ["**0.50**", "1.00", "1.00", "**2.00**"]


def test_the_chart_is_what_the_result_file_says(tables: ModuleType, chart: ModuleType) -> None:
    rows = [row for row in tables.read_results("accuracy")["rows"] if "problem" not in row]
    assert tables.CHART.read_text(encoding="utf-8") == chart.svg(rows), "run `python -m bench.tables`"


def marks(picture: str, colour: str) -> list[tuple[float, float]]:
    """Where the circles of a colour are, those of the legend aside."""
    found = [each for each in ElementTree.fromstring(picture).iter() if each.get("fill") == colour]
    circles = [(float(each.get("cx", 0)), float(each.get("cy", 0))) for each in found if each.tag.endswith("circle")]
    return circles[:-1]


def test_points_lie_where_bits_and_kl_say(chart: ModuleType) -> None:
    rows = [
        row_of("W2A16", "peer", "GPTQ", 1.0, bits=2.5),
        row_of("W3A16", "peer", "GPTQ", 0.1, bits=3.5),
        row_of("W4A16", "peer", "GPTQ", 0.01, bits=4.5),
        row_of("W4A16", "peer", "memoryless_minmax", 0.1, bits=4.5),
        row_of("W4A16", "ours", "best", 0.001, bits=4.5),
        row_of("W4A16", "ours", "optimal", 0.0001, bits=4.5),
    ]
    colours = {(each.side, *each.contestants): each.colour for each in chart.SERIES}
    picture = chart.svg(rows)
    (x2, y2), (x3, y3), (x4, y4) = marks(picture, colours["peer",])
    assert x4 - x3 == pytest.approx(x3 - x2, abs=0.2) and x3 > x2 + 20
    assert y4 - y3 == pytest.approx(y3 - y2, abs=0.2) and y3 > y2 + 20, "less is lower, on a log scale"
    ((_, plain),) = marks(picture, colours["peer", "memoryless_minmax", "static_minmax"])
    assert plain == y3, "the same KL is as high"
    ((_, best),) = marks(picture, colours["ours", "best"])
    assert best - y4 == pytest.approx(y4 - y3, abs=0.2)
    assert marks(picture, colours["ours", "fast"]) == []


@pytest.mark.parametrize("int4", [4.5, 5.0])
def test_schemes_of_one_width_stand_side_by_side(int4: float, chart: ModuleType) -> None:
    schemes = {"W4A16": int4, "NVFP4A16": 4.5, "NVFP4": 4.5, "W8A8 static": 8.01, "FP8": 8.0}
    places = chart._places([row_of(scheme, "peer", "mse", 0.1, bits=bits) for scheme, bits in schemes.items()])
    assert places["W4A16"] == int4 and places["W8A8 static"] == 8.01
    assert min(b - a for a, b in pairwise(sorted(places.values()))) > chart.APART - 1e-3
    assert max(places[scheme] - bits for scheme, bits in schemes.items()) < 2.2 * chart.APART


def test_a_chart_of_nothing_says_so(chart: ModuleType) -> None:
    assert "Not measured." in "".join(ElementTree.fromstring(chart.svg([])).itertext())


# ---- what is compared ------------------------------------------------------------------------------------------


def test_titles_are_different_and_every_scheme_has_both_sides_and_all_words(accuracy: ModuleType) -> None:
    cases = accuracy.all_cases()
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles)
    assert "stories15M, W8A8 static, peer, mse" in titles
    for model in ("stories15M", "SmolLM2-135M"):
        for scheme in ("W4A16", "W3A16", "W2A16", "NVFP4A16", "NVFP4", "W8A8 static", "FP8"):
            own = [title for title in titles if title.startswith(f"{model}, {scheme}, ")]
            assert {f"{model}, {scheme}, ours, {word}" for word in ("fast", "balanced", "best")} <= set(own)
            assert any(", peer, GPTQ" in title for title in own)


def test_our_recipes_with_named_observers_are_recipes(accuracy: ModuleType) -> None:
    for case in accuracy.all_cases():
        wanted = case.recipe()
        if case.contestant.side == "ours" and wanted.get("modifier") == "QuantizationModifier":
            (group,) = QuantizationModifier(**json.loads(json.dumps(wanted["fields"]))).groups
            assert group.scheme.weights.observer == case.contestant.weights
            if case.contestant.inputs is not None:
                assert group.scheme.input_activations.observer == case.contestant.inputs


def test_recipes_say_scheme_groups_and_observers(accuracy: ModuleType) -> None:
    recipes = {case.title: case.recipe() for case in accuracy.all_cases()}
    assert recipes["SmolLM2-135M, W3A16, ours, best"] == {
        **{"quality": "best", "scheme": "W3A16", "options": {"group_size": 64}},
    }
    assert recipes["stories15M, W8A8 static, ours, fast"] == {"quality": "fast", "scheme": "W8A8", "options": {}}
    gptq = recipes["stories15M, W4A16, peer, GPTQ + imatrix_mse"]
    weights = gptq["fields"]["config_groups"]["group_0"]["weights"]
    assert gptq["modifier"] == "GPTQModifier" and gptq["fields"]["ignore"] == ["lm_head"]
    assert (weights["num_bits"], weights["group_size"], weights["observer"]) == (4, 32, "imatrix_mse")
    static = recipes["stories15M, W8A8 static, ours, balanced_mse"]["fields"]["config_groups"]["group_0"]
    assert static["input_activations"]["observer"] == "balanced_mse" and "observer" not in static["weights"]
    assert static["input_activations"]["strategy"] == "tensor" and static["weights"]["strategy"] == "channel"


class Letters:
    """A tokenizer whose tokens are letters."""

    bos_token_id = 1

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for each in text]}


def test_a_story_is_a_row_and_running_text_is_cut(accuracy: ModuleType) -> None:
    stories = accuracy.rows_of(Letters(), "ab\n<|endoftext|>\n\n<|endoftext|>cdefg<|endoftext|>h", 2, 4)
    assert stories == [[1, 97, 98], [1, 99, 100, 101]]
    assert accuracy.rows_of(Letters(), "abcdefgh", 2, 3) == [[97, 98, 99], [100, 101, 102]]
    for text in ("a<|endoftext|>b", "abcdefg", "abcdefgh"):
        with pytest.raises(ValueError, match="fewer than 3 rows of 3 tokens"):
            accuracy.rows_of(Letters(), text, 3, 3)


# ---- the judge -------------------------------------------------------------------------------------------------


@pytest.fixture
def subject(accuracy: ModuleType, tmp_path: Path) -> Any:
    """A random model, with rows of different lengths."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, initializer_range=0.5))
    model.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1 + 0.2 * torch.randn_like(each))
    model.save_pretrained(tmp_path / "after")
    rows = [torch.randint(50, (length,)).tolist() for length in (9, 4, 12)]
    return accuracy.Subject(tmp_path / "before", rows, rows)


def test_the_judge_agrees_with_the_definition(accuracy: ModuleType, subject: Any, tmp_path: Path) -> None:
    judge = accuracy.Judge(subject, tmp_path / "logits")
    assert not (tmp_path / "logits").exists()
    p, q = (LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after"))
    kl, loss, agreed, loss_before = [], [], [], []
    with torch.no_grad():
        for row in subject.judged:
            ids = torch.tensor([row])
            log_p, log_q = (each(ids).logits[0].double().log_softmax(dim=-1) for each in (p, q))
            for position, target in enumerate(row[1:]):
                kl.append(float((log_p[position].exp() * (log_p[position] - log_q[position])).sum()))
                agreed.append(float(log_p[position].argmax() == log_q[position].argmax()))
                loss.append(-float(log_q[position, target]))
                loss_before.append(-float(log_p[position, target]))
    assert judge.num_tokens == len(kl) == 22
    mean = {name: torch.tensor(each).mean() for name, each in (("kl", kl), ("loss", loss), ("agreed", agreed))}
    assert 0.2 < mean["agreed"] < 1 and mean["kl"] > 0.05, "the models must differ, and not in everything"
    found = judge.judge(tmp_path / "after", torch.float32)
    assert found["kl"] == pytest.approx(float(mean["kl"]), rel=1e-4)
    assert found["top1"] == pytest.approx(float(mean["agreed"]))
    assert found["perplexity"] == pytest.approx(float(mean["loss"].exp()), rel=1e-4)
    assert judge.perplexity == pytest.approx(float(torch.tensor(loss_before).mean().exp()), rel=1e-4)
    same = judge.judge(subject.folder, torch.float32)
    assert same == {"kl": pytest.approx(0, abs=1e-6), "perplexity": judge.perplexity, "top1": 1.0}
    assert 0 < judge.judge(subject.folder, torch.bfloat16)["kl"] < found["kl"]


@pytest.mark.parametrize("what", ["a tensor is gone", "a tensor too many", "not finite"])
def test_a_checkpoint_that_is_not_whole_is_refused(
    what: str, accuracy: ModuleType, subject: Any, tmp_path: Path
) -> None:
    judge, file = accuracy.Judge(subject, tmp_path / "logits"), tmp_path / "after" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if what == "a tensor is gone":
        del tensors[name]
    elif what == "a tensor too many":
        tensors[f"{name}_scale"] = torch.ones(1)
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not finite" if what == "not finite" else "does not load all of the checkp"):
        judge.judge(tmp_path / "after", torch.float32)


def test_bits_are_those_of_the_stored_layers(accuracy: ModuleType, tmp_path: Path) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    save_file({"a.weight": torch.zeros(4, 64), "b.weight": torch.zeros(9, 9)}, tmp_path / "before" / "m.safetensors")
    stored = {"a.weight_packed": torch.zeros(4, 8, dtype=torch.int32), "a.weight_scale": torch.zeros(4, 2)}
    stored |= {"a.weight_shape": torch.zeros(2, dtype=torch.int64), "b.weight": torch.zeros(9, 9)}
    save_file(stored, tmp_path / "after" / "m.safetensors")
    assert accuracy.bits_per_weight(tmp_path / "after", tmp_path / "before") == 4 + 32 / 32


# ---- the runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_results(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "accuracy.json"


def test_a_row_that_fails_is_a_problem_and_the_next_one_is_measured(
    accuracy: ModuleType, tables: ModuleType, subject: Any, fresh_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def quantise(case: Any, given: Any, python: str, folder: Path, **_: Any) -> dict[str, Any]:
        seen.append(len(json.loads(fresh_results.read_text())["rows"]) if fresh_results.exists() else 0)
        if case.contestant.name == "balanced":
            raise RuntimeError(f"ImportError: no 'quality' in {ROOT}/src/x.py")
        (folder / "checkpoint").symlink_to(subject.folder.parent / "after")
        return {"seconds": 1.5, "extra_bytes": None}

    monkeypatch.setattr(accuracy, "folder_of", lambda *_: subject.folder)
    monkeypatch.setattr(accuracy, "subject_of", lambda *_, **__: subject)
    monkeypatch.setattr(accuracy, "quantise", quantise)
    monkeypatch.setattr(accuracy, "bits_per_weight", lambda *_: 4.5)
    cases = [case for case in accuracy.all_cases() if case.title.startswith("stories15M, W4A16, ours, ")][:3]
    kept = [row_of("W4A16", "peer", "GPTQ", 0.5, weights="stories15M")]
    with Console().capture():
        problems = accuracy.run_all(
            *(cases, {"ours": "python"}, MACHINE, kept),
            **{"marks": {"cpu": "D"}, "smollm2": Path(), "threads": 1, "quick": False, "console": Console()},
        )
    assert problems == ["stories15M, W4A16, ours, balanced: ImportError: no 'quality' in x.py"]
    rows = tables.read_results("accuracy")["rows"]
    assert [row["contestant"] for row in rows] == ["GPTQ", "fast", "balanced", "best"]
    assert seen == [0, 2, 3], "results are written after every row"
    assert rows[2]["problem"] == problems[0] and "kl" not in rows[2]
    assert rows[1] == {
        **{"weights": "stories15M", "scheme": "W4A16", "side": "ours", "contestant": "fast", "kl": rows[3]["kl"]},
        **{"perplexity": rows[3]["perplexity"], "top1": rows[3]["top1"], "seconds": 1.5, "extra_bytes": None},
        **{"bits": 4.5, "num_samples": 3, "num_tokens": 22, "group_size": 32, "threads": 1, "quick": False},
        **{"perplexity_before": rows[3]["perplexity_before"], "date": rows[3]["date"], "cpu": "D"},
    }


def titles(accuracy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: Any, *options: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["accuracy", "--peer", "python", "--list", *options])
    assert accuracy.main() == 0
    return capsys.readouterr().out.splitlines()


def test_missing_rows_are_those_without_a_sound_result(
    accuracy: ModuleType, tables: ModuleType, fresh_results: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"weights": "stories15M"}
    problem = {**own, "scheme": "W4A16", "side": "ours", "contestant": "best", "problem": "p", "quick": False}
    rows = [row_of("W4A16", "ours", "fast", 0.1, **own), row_of("W4A16", "ours", "balanced", 0.1, **own, quick=True)]
    tables.write_results("accuracy", MACHINE, [*rows, problem])
    only = ("--only", "stories15M, W4A16, ours, b", "--only", "stories15M, W4A16, ours, f")
    everything = [f"stories15M, W4A16, ours, {name}" for name in ("fast", "balanced", "best")]
    assert titles(accuracy, capsys, monkeypatch, *only) == everything
    assert titles(accuracy, capsys, monkeypatch, *only, "--missing") == everything[1:]
    assert titles(accuracy, capsys, monkeypatch, *only, "--missing", "--quick") == everything[2:]
    assert len(titles(accuracy, capsys, monkeypatch)) == len(accuracy.all_cases())
    with pytest.raises(SystemExit):
        titles(accuracy, capsys, monkeypatch, "--only", "W5A16")
    assert "nothing is called W5A16" in capsys.readouterr().err


def test_a_worker_that_dies_leaves_its_last_words(
    accuracy: ModuleType, subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "dying.py"
    worker.write_text("import sys\nprint('ValueError: too few', 'after it', sep='\\n', file=sys.stderr)\nsys.exit(3)\n")
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\nexec {sys.executable} {worker}\n")
    shell.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^ValueError: too few$"):
        accuracy.quantise(accuracy.all_cases()[0], subject, str(shell), tmp_path, threads=1)


def case_called(accuracy: ModuleType, title: str) -> Any:
    (case,) = [case for case in accuracy.all_cases() if case.title == title]
    return case


def test_the_worker_knows_modifiers_and_words_for_quality(accuracy: ModuleType, monkeypatch: Any) -> None:
    worker = importlib.import_module("bench.accuracy_worker")
    case = case_called(accuracy, "stories15M, W8A8 static, ours, entropy")
    (modifier,) = worker.recipe_of("scalewright", case.recipe())
    assert modifier.groups[0].scheme.input_activations.observer == "entropy"
    quality = SimpleNamespace(recipe_for=lambda *args, **options: (args, options))
    monkeypatch.setitem(sys.modules, "some_package", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "some_package.quality", quality)
    wanted = case_called(accuracy, "SmolLM2-135M, W2A16, ours, best").recipe()
    assert worker.recipe_of("some_package", wanted) == (("best", "W2A16"), {"group_size": 64})


def test_what_the_worker_writes_can_be_judged(
    accuracy: ModuleType, subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = importlib.import_module("bench.accuracy_worker")
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(50)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0").save_pretrained(subject.folder)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def run(command: list[str], **_: Any) -> Any:
        monkeypatch.setattr(sys, "argv", command[2:])
        worker.main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(accuracy.subprocess, "run", run)
    judge = accuracy.Judge(subject, tmp_path / "logits")
    found = {}
    for scheme in ("W4A16", "W3A16", "NVFP4A16"):
        case = case_called(accuracy, f"stories15M, {scheme}, ours, optimal")
        found[scheme] = accuracy.measure(case, subject, judge, {"ours": "python"}, threads=1)
    assert 0 < found["W4A16"]["kl"] < found["W3A16"]["kl"]
    assert [each["bits"] for each in found.values()] == pytest.approx([5, 4, 4.5], abs=0.1)
    assert all(each["seconds"] > 0 for each in found.values())
