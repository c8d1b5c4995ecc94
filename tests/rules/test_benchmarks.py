"""The tables of the benchmark page come from the result files, and the judge behind them is right. Nothing is timed."""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme

from scalewright.observers import Observer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
FORMATS = {
    "int4": INT4,
    "int4 asymmetric": INT4.model_copy(update={"symmetric": False}),
    "int3 channel": QuantizationArgs(num_bits=3, strategy="channel"),
    "int8 tensor": QuantizationArgs(num_bits=8, strategy="tensor"),
    "NVFP4": preset_name_to_scheme("NVFP4", ["Linear"]).weights,
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"bench.{name}")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("tables", monkeypatch)


@pytest.fixture
def results(tables: ModuleType) -> dict[str, Any]:
    return {topic: tables.read_results(topic) for topic in (*tables.TOPICS, *tables.OTHERS)}


# ---- the tables ------------------------------------------------------------------------------------------------


def test_the_tables_are_what_the_result_files_say(tables: ModuleType, results: dict[str, Any]) -> None:
    assert tables.generated_part(PAGE) == tables.markdown(results), "run `python -m bench.tables`"


def test_the_table_on_paper_is_what_its_results_say(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = load("scaling", monkeypatch)
    told = json.loads(scaling.FILE.read_text(encoding="utf-8"))
    assert tables.generated_part(scaling.PAGE.read_text(encoding="utf-8")) == scaling.markdown(told)
    told["rows"][0]["seconds"]["8"] = 49 * 3600
    assert "| 2 days |" in scaling.markdown(told)
    told["rows"][0]["seconds"]["8"] = 47 * 3600
    assert "| 47.0 h |" in scaling.markdown(told)


@pytest.mark.parametrize("topic", ["search", "minmax", "growth", "runs", "accuracy"])
def test_every_topic_was_measured_and_another_figure_gives_another_table(
    topic: str, tables: ModuleType, results: dict[str, Any]
) -> None:
    changed = copy.deepcopy(results)
    row = next(row for row in changed[topic]["rows"] if "problem" not in row)
    figures = {"search": row.get("ours"), "minmax": row.get("seconds", {}), "runs": row.get("ours")}.get(topic, row)
    figures["seconds" if topic != "minmax" else "1"] = {
        "search": {"1": 1234.0, "2": 1234.0},
        "minmax": {"sum": 1.0, "ours": 1234.0, "peer": 1.0},
        "growth": 1234.0,
        "runs": 1234.0,
        "accuracy": 1234.0,
    }[topic]
    assert tables.markdown(changed) != tables.markdown(results)


def test_a_case_that_could_not_be_measured_is_named(tables: ModuleType, results: dict[str, Any]) -> None:
    row = {"case": "some case", "problem": "there is no observer 'some'", "date": "2020-01-01", "quick": False}
    with_problem = {**results, "search": {**results["search"], "rows": [*results["search"]["rows"], row]}}
    assert "- there is no observer 'some'" in tables.markdown(with_problem).splitlines()


def test_ratios_say_who_wins(tables: ModuleType) -> None:
    side = {"observer": "o", "above_optimum": None, "extra_bytes": 3 << 20}
    row = {
        **{"case": "c", "norm": 2.4, "is_weighted": False, "weights": "W", "dtype": "fp32", "group_size": 128},
        "ours": {**side, "seconds": {"1": 0.05, "2": 0.4}, "error": 6.0},
        "peer": {**side, "seconds": {"1": 1.2, "2": 0.3}, "error": 8.0, "above_optimum": 0.0123},
        **{"minmax_error": 10.0, "date": "2020-01-01", "quick": True},
    }
    nothing = {"machine": None, "rows": []}
    machine = {"cpu": "C", "cores": 1, "system": "S", "ours": {"a": "1"}, "peer": {"b": "2"}}
    run_side = {"extra_bytes": 5 << 20, "loss": 2.5}
    run = {
        **{"case": "r", "weights": "M", "loss_before": 2.25, "date": "2020-01-01", "quick": False},
        **{"ours": {**run_side, "seconds": 2.0}, "peer": {**run_side, "seconds": 6.0, "loss": 2.75}},
    }
    found = {"search": [row], "minmax": [], "growth": [], "runs": [run], "accuracy": []}
    lines = tables.markdown(
        {topic: {"machine": machine if rows else None, "rows": rows} for topic, rows in found.items()}
    )
    assert "| c | `o` | **24x** | **0.75x** | **0.750** | 1 |" in lines
    assert "| c~ | W fp32 | 1.20 s | 50.0 ms | **24x** | 300 ms | 400 ms | **0.75x** |" in lines
    assert "| 0.8000 | 0.6000 | **0.7500** | +1.23% |  | 3 MB | 3 MB |" in lines
    assert "| r | M | 6.00 s | 2.00 s | **3.0x** | 5 MB | 5 MB | +0.5000 | +0.2500 |" in lines
    assert lines.count("Not measured.") == 8
    told = "1 cores, S. Ours: a 1. Peer: b 2."
    assert f"Measured on 2020-01-01: C, {told}" in lines
    other = {**machine, "cpu": "D"}
    lines = tables.markdown(
        {
            **dict.fromkeys(tables.TOPICS, nothing),
            **{
                "search": {"machine": machine, "rows": [row]},
                "runs": {"machine": other, "rows": [{**run, "cpu": "E"}]},
            },
        }
    )
    assert "† on another machine (E); both sides of a row are of one run." in lines
    assert "| r | † M | 6.00 s | 2.00 s |" in lines
    assert f"Measured on 2020-01-01 (searches): C, {told}" in lines
    assert f"Measured on 2020-01-01 (whole runs): D, {told}" in lines
    served = {"scheme": None, "mean_off": 0.01, "most_off": 0.2, "greedy_agreement": 0.75}
    served |= {"loss_vllm": 1.5, "loss_transformers": 1.25}
    lines = tables.markdown({**dict.fromkeys(tables.TOPICS, nothing), "vllm": {"rows": [served]}})
    assert "| as it was | 0.0100 | 0.200 | 75% | 1.5000 | 1.2500 |" in lines
    chosen = {"weights": "M", "case": "balanced", "scheme": "W3A16/W4A16", "contestant": "chosen, bits of W4A16"}
    chosen |= {"bits": 4.4987, "kl": 0.0123, "foreseen": 0.00456, "top1": 0.875, "quick": True}
    lines = tables.markdown({**dict.fromkeys(tables.TOPICS, nothing), "budget": {"rows": [chosen]}})
    assert "| M | balanced | W3/W4 | **chosen, bits of W4A16~** | 4.499 | 0.0123 | 0.00456 | 87.5% |" in lines
    peaks = [
        {"case": "c", "side": side, "layers": depth, "model_bytes": depth * 10**8, "peak_bytes": peak, "seconds": 2.0}
        for side, depth, peak in (("peer", 4, 9e8), ("ours", 4, 5e8), ("ours", 8, 6e8))
    ]
    peaks[1]["foretold_bytes"] = 4e8
    lines = tables.markdown({**dict.fromkeys(tables.TOPICS, nothing), "memory": {"rows": peaks}})
    assert "| recipe | side | 4 layers, 0.40 GB | 8 layers, 0.80 GB | the deepest took |" in lines
    assert "| c | **ours** | 0.50 (0.40) | 0.60 | 2 s |\n| c | peer | 0.90 |  | 2 s |" in lines
    solved = [
        {"rows": 8, "columns": 4, "threads": threads, "ours": {"seconds": 0.5, "error": 2.0}, "peer": peer}
        for threads, peer in ((1, {"seconds": 2.0, "error": 4.0}), (2, {"seconds": 1.5, "error": 4.0}))
    ]
    lines = tables.markdown({**dict.fromkeys(tables.TOPICS, nothing), "solving": {"rows": solved}})
    assert "| weight | peer, 1 thread | ours | faster | peer, 2 threads | ours | faster | our error / peer's |" in lines
    assert "| 8 x 4 | 2.00 s | 500 ms | **4.0x** | 1.50 s | 500 ms | **3.0x** | 0.500 |" in lines
    seconds = {"1": {"whole": 6.0}, "2": {"whole": 4.0}}
    played = {"c": {"seconds": seconds, "speed": {"whole": 1.5, "processor": 1.75}}}
    lines = tables.markdown({**dict.fromkeys(tables.TOPICS, nothing), "ranks": {"rows": played}})
    assert "| c | 6.00 s | 4.00 s | **1.5x** | 1.8x |" in lines


def test_results_name_no_machine_and_no_place(tables: ModuleType) -> None:
    for topic in tables.TOPICS:
        text = (tables.RESULTS / f"{topic}.json").read_text(encoding="utf-8")
        assert not re.search(r"/(home|work|tmp|root|Users|usr|opt)/", text)
        assert set(tables.read_results(topic)["machine"]) == {"cpu", "cores", "system", "ours", "peer"}


def test_figures_survive_being_written_and_read(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    tables.write_results("search", {"cores": 2}, [{"seconds": {1: 0.123456789}, "error": 12, "above": None}])
    read = tables.read_results("search")
    assert read == {"machine": {"cores": 2}, "rows": [{"seconds": {"1": 0.123457}, "error": 12, "above": None}]}
    assert tables.read_results("minmax") == {"machine": None, "rows": []}


# ---- the judge -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [2, 2.4, 3])
@pytest.mark.parametrize("args", FORMATS.values(), ids=FORMATS)
def test_the_judge_agrees_with_compressed_tensors(
    args: QuantizationArgs, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = load("judge", monkeypatch)
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 64), torch.randn(8, 64) * torch.linspace(0.1, 3, 64)
    qparams = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)(weight).get_qparams()
    given = {name: value for name, value in qparams.items() if value is not None}
    lost_RC = (fake_quantize(weight, args=args, **qparams).double() - weight.double()).abs().pow(norm)
    importance_RC = judge.importance_of(inputs, len(weight))
    torch.testing.assert_close(importance_RC[3], inputs.double().square().sum(dim=0) / 8)
    x_PG, w_PG = (judge.groups_of(each, args) for each in (weight, importance_RC))
    assert x_PG.shape[0] == qparams["scale"].numel()
    for weights_PG, expected_RC in ((None, lost_RC), (w_PG, lost_RC * importance_RC)):
        actual_P = judge.errors(x_PG, given, args, norm=norm, weights_PG=weights_PG)
        expected_P = expected_RC.reshape(x_PG.shape).sum(dim=1)
        torch.testing.assert_close(actual_P, expected_P, rtol=1e-4, atol=0)


def test_the_judge_takes_negative_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = load("judge", monkeypatch)
    x_PG = torch.tensor([[8.0, -7.0, 0.4]])
    qparams = {"scale": torch.tensor([[-1.0]]), "zero_point": torch.zeros(1, 1, dtype=torch.int8)}
    lost = judge.errors(x_PG, qparams, INT4, norm=2)
    torch.testing.assert_close(lost, torch.tensor([0.16], dtype=torch.float64), rtol=1e-6, atol=0)


# ---- the cases -------------------------------------------------------------------------------------------------


def test_cases_that_share_a_peer_stand_together_and_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load("cases", monkeypatch)
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert set(cases.GROWTH_CASES) <= set(names)
    keys = [str(case.shared) for case in cases.CASES]
    runs = [key for index, key in enumerate(keys) if index == 0 or keys[index - 1] != key]
    assert len(set(runs)) == len(runs), "a peer would be measured twice"


def test_weights_are_the_same_whenever_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load("cases", monkeypatch)
    weights = cases.Weights("W", "bf16", lambda: {"a": cases.heavy_tailed(64, 128)}, group_size=32)
    once, again = weights.tensors(), weights.tensors()
    assert sorted(once) == ["inputs.a", "weight.a"]
    assert once["weight.a"].dtype == torch.bfloat16 and once["inputs.a"].shape == (64, 128)
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name])
    assert weights.fit(cases.INT3) == {"num_bits": 3, "strategy": "group", "group_size": 32}
    assert weights.fit(cases.NVFP4) == cases.NVFP4
