"""Turns `bench/results/*.json` into the tables and the chart of `docs/benchmarks.md`: `python -m bench.tables`.

It computes ratios and words, and measures nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import accuracy_chart

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
CHART = PAGE.parent / "accuracy.svg"
BEGIN, END = "<!-- begin: generated -->", "<!-- end: generated -->"
NAMES = {
    "search": "searches",
    "minmax": "min-max",
    "growth": "growth",
    "runs": "whole runs",
    "accuracy": "accuracy",
}
TOPICS = tuple(NAMES)
OTHERS = ("vllm", "solving", "budget", "memory", "ranks")
LABELS = ("case", "observer", "strategy", "weights", "dtype", "millions", "scheme", "side", "contestant")
MODEL_WEIGHTS = 7e9  # in the Linear layers of an 8B model

Row = Mapping[str, Any]


# ---- results ---------------------------------------------------------------------------------------------------


def key_of(row: Row) -> tuple[Any, ...]:
    """What a row is about: a newer row with the same key takes its place."""
    return tuple(row.get(label) for label in LABELS)


def read_results(topic: str) -> dict[str, Any]:
    """A result file; one without rows where nothing was measured yet."""
    path = RESULTS / f"{topic}.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"machine": None, "rows": [], **results}


def elsewhere(first: Row | None, machine: Row) -> Row:
    """What a row says of the machine it was measured on, if that is not the one of most rows; ValueError if the
    software is not the same.
    """
    if first is None or first == machine:
        return {}
    if any(first[side] != machine[side] for side in ("ours", "peer")):
        raise ValueError("come from other versions")
    return {"cpu": machine["cpu"]}


def write_results(topic: str, machine: Row, rows: Iterable[Row]) -> None:
    """Write a result file, with figures cut to what can be meant."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rows": [_rounded(row) for row in rows]}, indent=1)
    (RESULTS / f"{topic}.json").write_text(text + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---- tables ----------------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Row]) -> str:
    """All tables, from the results of each topic."""
    search, minmax, growth, runs, accuracy = (results[topic]["rows"] for topic in TOPICS)
    rows = [*search, *minmax, *growth, *runs, *accuracy]
    parts = [
        *_measured_on(results),
        *(
            ["`~` marks figures of a quick run: one turn each, or few samples."]
            if any(row["quick"] for row in rows)
            else []
        ),
        *_problems(rows),
        *("### At a glance", _glance_table(_sound(search))),
        *("### Searches: seconds", _seconds_table(_sound(search))),
        *("### Searches: what is lost, and memory", _error_table(_sound(search))),
        *("### Min-max", *_elsewhere_in_words(minmax), _minmax_table(_sound(minmax))),
        *("### How time grows", _growth_table(_sound(growth), _sound(search))),
        *("### Whole runs", *_elsewhere_in_words(runs), _runs_table(_sound(runs))),
        *("### Accuracy", *_accuracy(_sound(accuracy))),
        *("### GPTQ: solving alone", _solving_table(results.get("solving", {}))),
        *("### A budget of bits", _budget_table(results.get("budget", {}))),
        *("### Memory", _memory_table(results.get("memory", {}))),
        *("### Ranks", _ranks_table(results.get("ranks", {}))),
        *("### vLLM", _vllm_table(results.get("vllm", {}))),
    ]
    return "\n\n".join(parts)


def _measured_on(results: Mapping[str, Row]) -> list[str]:
    """When and on what the topics were measured; which of them, where machines differ."""
    topics = [topic for topic in TOPICS if results[topic]["rows"]]
    by_machine = {json.dumps(results[topic]["machine"]): results[topic]["machine"] for topic in topics}
    lines = []
    for machine in by_machine.values():
        own = [topic for topic in topics if results[topic]["machine"] == machine]
        ours, peer = (
            ", ".join(f"{name} {version}" for name, version in machine[side].items()) for side in ("ours", "peer")
        )
        days = sorted({row["date"] for topic in own for row in results[topic]["rows"]})
        when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
        what = "" if len(by_machine) == 1 else f" ({', '.join(NAMES[topic] for topic in own)})"
        lines.append(
            f"Measured {when}{what}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}. Ours: {ours}. "
            f"Peer: {peer}."
        )
    return lines or ["Nothing was measured yet."]


def _problems(rows: Sequence[Row]) -> list[str]:
    lines = sorted({f"- {row['problem']}" for row in rows if "problem" in row})
    return ["**Not measured:**\n\n" + "\n".join(lines)] if lines else []


def _sound(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "problem" not in row]


def _glance_table(rows: Sequence[Row]) -> str:
    lines = []
    for case in _in_order(row["case"] for row in rows):
        same = [row for row in rows if row["case"] == case]
        speeds = [[_speed(row, threads) for row in same] for threads in ("1", "2")]
        errors = [row["ours"]["error"] / row["peer"]["error"] for row in same]
        cells = [case, f"`{same[0]['peer']['observer']}`", *(_range(each, "x") for each in speeds), _range(errors)]
        lines.append([*cells, str(len(same))])
    head = ["ours", "peer's", "faster, 1 thread", "faster, 2 threads", "our error / peer's", "kinds of weights"]
    return _table(head, lines)


def _seconds_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in _by_case(rows):
        cells = [_case(row), _weights(row)]
        for threads in ("1", "2"):
            seconds = (row[side]["seconds"][threads] for side in ("peer", "ours"))
            cells += [*map(_seconds, seconds), f"**{_factor(_speed(row, threads))}x**"]
        lines.append(cells)
    head = ["ours", "weights", "peer, 1 thread", "ours", "faster", "peer, 2 threads", "ours", "faster"]
    return _table(head, lines)


def _error_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in _by_case(rows):
        sides = [row["peer"], row["ours"]]
        measure = f"Σ{'w·' if row['is_weighted'] else ''}\\|d\\|^{row['norm']:g}"
        cells = [_case(row), _weights(row), measure]
        cells += [f"{side['error'] / row['minmax_error']:.4f}" for side in sides]
        cells += [f"**{row['ours']['error'] / row['peer']['error']:.4f}**"]
        cells += ["" if side["above_optimum"] is None else f"{side['above_optimum']:+.2%}" for side in sides]
        cells += ["" if side["extra_bytes"] is None else f"{side['extra_bytes'] / 2**20:.0f} MB" for side in sides]
        lines.append(cells)
    head = ["ours", "weights", "measure", "peer / min-max", "ours / min-max", "ours / peer"]
    return _table([*head, "peer above optimum", "ours", "peer's memory", "ours"], lines)


def _minmax_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [
            f"`{row['observer']}`{'~' if row['quick'] else ''}",
            row["strategy"],
            f"{marks(row)}{row['weights']} {row['dtype']}",
        ]
        for threads in ("1", "2"):
            seconds = row["seconds"][threads]
            cells += [_seconds(seconds["peer"]), _seconds(seconds["ours"])]
            cells += [f"**{_factor(seconds['peer'] / seconds['ours'])}x**", f"{seconds['sum'] / seconds['ours']:.0%}"]
        lines.append(cells)
    head = ["observer", "scales", "weights", "peer, 1 thread", "ours", "faster", "of `torch.sum`"]
    return _table([*head, "peer, 2 threads", "ours", "faster", "of `torch.sum`"], lines)


def _growth_table(rows: Sequence[Row], search: Sequence[Row]) -> str:
    sizes = sorted({row["millions"] for row in rows})
    lines = []
    for case in _in_order(row["case"] for row in rows):
        nanoseconds = {
            row["millions"]: row["seconds"] / row["millions"] / 2**20 * 1e9 for row in rows if row["case"] == case
        }
        mark = "~" if any(row["quick"] for row in rows if row["case"] == case) else ""
        cells = [f"{case}{mark}", *(f"{nanoseconds[size]:.1f}" if size in nanoseconds else "" for size in sizes)]
        cells += [f"{max(nanoseconds.values()) / min(nanoseconds.values()):.2f}"]
        cells += [_duration(nanoseconds[max(nanoseconds)] * 1e-9 * MODEL_WEIGHTS)]
        peers = [row for row in search if (row["case"], row["weights"], row["dtype"]) == (case, "Gaussian", "fp32")]
        cells += [_duration(peers[0]["peer"]["seconds"]["1"] / 2**22 * MODEL_WEIGHTS) if peers else ""]
        lines.append(cells)
    head = ["ours", *(f"{size} M" for size in sizes), "most / least"]
    return _table([*head, "8B model, ours", "8B model, peer"], lines)


def _runs_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        sides = [row["peer"], row["ours"]]
        cells = [_case(row), f"{marks(row)}{row['weights']}", *(_seconds(side["seconds"]) for side in sides)]
        cells += [f"**{_factor(sides[0]['seconds'] / sides[1]['seconds'])}x**"]
        cells += ["" if side["extra_bytes"] is None else f"{side['extra_bytes'] / 2**20:.0f} MB" for side in sides]
        cells += ["" if side["loss"] is None else f"{side['loss'] - row['loss_before']:+.4f}" for side in sides]
        lines.append(cells)
    head = ["recipe", "model", "peer", "ours", "faster", "peer's memory", "ours", "peer's loss", "ours"]
    return _table(head, lines)


def _elsewhere_in_words(rows: Sequence[Row]) -> list[str]:
    """Which machine the mark of some rows stands for."""
    others = _in_order(row["cpu"] for row in rows if "cpu" in row)
    return [f"† on another machine ({' and '.join(others)}); both sides of a row are of one run."] if others else []


def _accuracy(rows: Sequence[Row]) -> list[str]:
    """For each model what was measured, and a table."""
    if not rows:
        return [_table([], [])]
    parts = [f"![KL against bits per weight, ours and the peer's]({CHART.name})"]
    for model in _in_order(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == model]
        quantised = [row for row in own if row["side"] in ("ours", "peer")]
        parts += [_accuracy_terms(model, own), _accuracy_table(quantised)]
    return parts


def _accuracy_terms(model: str, rows: Sequence[Row]) -> str:
    threads, samples, tokens, groups = (
        " or ".join(f"{each:,}" for each in sorted({row[name] for row in rows}))
        for name in ("threads", "num_samples", "num_tokens", "group_size")
    )
    threads += " thread" if threads == "1" else " threads"
    elsewhere = " and ".join(_in_order(row["cpu"] for row in rows if "cpu" in row))
    note = f" † is on another machine ({elsewhere}), whose seconds compare with each other alone." if elsewhere else ""
    in_bf16 = [row for row in rows if row["side"] == "none"]
    floor = f" (in bf16 KL {_digits(in_bf16[0]['kl'])})" if in_bf16 else ""
    return (
        f"**{model}**, groups of {groups}: {samples} samples, {tokens} tokens judged, {threads}. "
        f"Unquantised: perplexity {rows[0]['perplexity_before']:.3f}{floor}.{note}"
    )


def _accuracy_table(rows: Sequence[Row]) -> str:
    """Scheme by scheme, the nearest to the model as it was first; the ratio is that of KL to the peer's best."""
    schemes, best = _in_order(row["scheme"] for row in rows), best_peers(rows)
    lines = []
    for row in sorted(rows, key=lambda row: (schemes.index(row["scheme"]), row["kl"])):
        peer = best.get((row["weights"], row["scheme"]))
        ratio = "" if peer is None else f"{row['kl'] / peer:.2f}"
        name, is_ours = f"{row['side']} `{row['contestant']}`{'~' if row['quick'] else ''}", row["side"] == "ours"
        cells = [row["scheme"], f"**{name}**" if is_ours else name, _digits(row["kl"])]
        cells += [f"**{ratio}**" if is_ours and ratio else ratio, f"{row['perplexity']:.3f}", f"{row['top1']:.1%}"]
        lines.append([*cells, f"{marks(row)}{_seconds(row['seconds'])}" if "seconds" in row else ""])
    return _table(["scheme", "contestant", "KL", "/ best peer", "perplexity", "top-1", "seconds"], lines)


def best_peers(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """The least KL that any recipe of the peer has, for each model and scheme."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["side"] == "peer" and "problem" not in row:
            key = row["weights"], row["scheme"]
            best[key] = min(row["kl"], best.get(key, row["kl"]))
    return best


def _budget_table(measured: Row) -> str:
    """What schemes for all layers lose beside those that were chosen; its rows come from `make bench-budget`."""
    rows = measured.get("rows", [])
    cases = _in_order((row["weights"], row["case"], row["scheme"]) for row in rows)
    lines = []
    for row in sorted(rows, key=lambda row: (cases.index((row["weights"], row["case"], row["scheme"])), row["bits"])):
        is_chosen = row["contestant"].startswith("chosen")
        name = f"{row['contestant']}{'~' if row['quick'] else ''}"
        cells = [row["weights"], row["case"], row["scheme"].replace("A16", ""), f"**{name}**" if is_chosen else name]
        foreseen = "" if row["foreseen"] is None else _digits(row["foreseen"])
        lines.append([*cells, f"{row['bits']:.3f}", _digits(row["kl"]), foreseen, f"{row['top1']:.1%}"])
    return _table(["model", "quality", "schemes", "recipe", "bits", "KL", "foreseen", "top-1"], lines)


def _solving_table(measured: Row) -> str:
    """GPTQ's rounding, given Hessians and scales; its rows come from `make bench-solving`."""
    by_shape: dict[str, dict[int, Row]] = {}
    for row in measured.get("rows", []):
        by_shape.setdefault(f"{row['rows']} x {row['columns']}", {})[row["threads"]] = row
    lines = []
    for shape, found in by_shape.items():
        cells = [shape]
        for row in found.values():
            ours, peer = row["ours"], row["peer"]
            speed = f"**{_factor(peer['seconds'] / ours['seconds'])}x**"
            cells += [_seconds(peer["seconds"]), _seconds(ours["seconds"]), speed]
        last = found[max(found)]
        lines.append([*cells, f"{last['ours']['error'] / last['peer']['error']:.3f}"])
    threads = sorted({row["threads"] for row in measured.get("rows", [])})
    heads = [head for each in threads for head in (f"peer, {each} thread{'s' * (each > 1)}", "ours", "faster")]
    return _table(["weight", *heads, "our error / peer's"], lines)


def _memory_table(measured: Row) -> str:
    """Peaks of runs on models of some depths; its rows come from `make bench-memory`."""
    rows = measured.get("rows", [])
    depths = {row["layers"]: row["model_bytes"] for row in rows}
    lines = []
    for case, side in _in_order((row["case"], row["side"]) for row in sorted(rows, key=lambda row: row["side"])):
        same = {row["layers"]: row for row in rows if (row["case"], row["side"]) == (case, side)}
        cells = [case, f"**{side}**" if side == "ours" else side]
        for depth in sorted(depths):
            row = same.get(depth)
            peak = "" if row is None else f"{row['peak_bytes'] / 1e9:.2f}"
            cells.append(f"{peak} ({row['foretold_bytes'] / 1e9:.2f})" if row and row.get("foretold_bytes") else peak)
        lines.append([*cells, *(f"{row['seconds']:.0f} s" for row in [same[max(same)]])])
    heads = [f"{depth} layers, {depths[depth] / 1e9:.2f} GB" for depth in sorted(depths)]
    return _table(["recipe", "side", *heads, "the deepest took"], lines)


def _ranks_table(measured: Row) -> str:
    """Two ranks of one thread beside one; its rows come from `make bench-ranks`."""
    lines = [
        [
            case,
            *(_seconds(row["seconds"][count]["whole"]) for count in ("1", "2")),
            f"**{_factor(row['speed']['whole'])}x**",
            f"{_factor(row['speed']['processor'])}x",
        ]
        for case, row in measured.get("rows", {}).items()
    ]
    return _table(["recipe", "1 rank", "2 ranks", "faster", "by processor time of a rank"], lines)


def _vllm_table(served: Row) -> str:
    """How the checkpoints fare in vLLM; its rows come from `make vllm`."""
    lines = [
        [
            row["scheme"] or "as it was",
            f"{row['mean_off']:.4f}",
            f"{row['most_off']:.3f}",
            f"{row['greedy_agreement']:.0%}",
            f"{row['loss_vllm']:.4f}",
            f"{row['loss_transformers']:.4f}",
        ]
        for row in served.get("rows", [])
    ]
    head = ["scheme", "mean \\|Δ log p\\|", "most", "same greedy tokens", "loss, vLLM", "loss, transformers"]
    return _table(head, lines)


# ---- words -----------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return "Not measured."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---" for _ in head], *lines))


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _by_case(rows: Sequence[Row]) -> list[Row]:
    cases = _in_order(row["case"] for row in rows)
    return sorted(rows, key=lambda row: cases.index(row["case"]))


def _case(row: Row) -> str:
    return f"{row['case']}{'~' if row['quick'] else ''}"


def _weights(row: Row) -> str:
    return f"{row['weights']} {row['dtype']}"


def _speed(row: Row, threads: str) -> float:
    """How many times as fast as the peer."""
    ratio: float = row["peer"]["seconds"][threads] / row["ours"]["seconds"][threads]
    return ratio


def _factor(value: float) -> str:
    """Two digits at least, and none that mean nothing."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def _range(values: Sequence[float], unit: str = "") -> str:
    ends = [_factor(each) if unit else f"{each:.3f}" for each in (min(values), max(values))]
    return f"**{' to '.join(_in_order(ends))}{unit}**"


def marks(row: Row) -> str:
    """What stands before the seconds of a row: that it was on another machine, or that other work ran beside."""
    beside = "‡ " if row.get("clock") == "processor" else "≈ " if row.get("busy") else ""
    return ("† " if "cpu" in row else "") + beside


def _seconds(value: float) -> str:
    """Three significant digits, in seconds or milliseconds."""
    value, unit = (value, "s") if value >= 1 else (value * 1e3, "ms")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, whatever the size."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


# ---- the page --------------------------------------------------------------------------------------------------


def generated_part(page: str) -> str:
    """What stands between the markers of `page`."""
    return page.split(BEGIN)[1].split(END, maxsplit=1)[0].strip()


def main() -> int:
    """Rewrite the generated part of the page."""
    page = PAGE.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        print(f"docs/{PAGE.name}: the markers {BEGIN} and {END} must stand in it once each.", file=sys.stderr)
        return 2
    generated = markdown({topic: read_results(topic) for topic in (*TOPICS, *OTHERS)})
    before, after = page.split(BEGIN, maxsplit=1)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}", encoding="utf-8")
    CHART.write_text(accuracy_chart.svg(_sound(read_results("accuracy")["rows"])), encoding="utf-8")
    print(f"docs/{PAGE.name}, docs/{CHART.name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
