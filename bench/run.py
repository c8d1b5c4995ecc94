"""Runs the benchmark: `make bench`, or `python -m bench.run --peer .venv-peer/bin/python`.

Two workers live as long as the run, one in our environment and one in the peer's. They take turns on the same weights:
while one is timed the other waits for its next line. Results go to `bench/results/` after every step, and from there
into the tables of `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from bench import judge, runs, tables
from bench.arena import Arena, Entry, Tried, Work, Worker
from bench.cases import (
    CASES,
    GROWTH_CASES,
    GROWTH_MILLIONS,
    MINMAX_FORMATS,
    MINMAX_OBSERVERS,
    MINMAX_WEIGHTS,
    MODEL,
    THREADS,
    WEIGHTS,
    Case,
    Format,
    Weights,
    growing_weights,
)
from scalewright.numerics.optimum import exact_optimum

OPTIMUM_GROUPS = 2048
EXPECTED_SECONDS = {"nvfp4_expanded_mse": 24.0, "memoryless_mse": 1.3, "imatrix_mse": 0.4}  # the peer's, for time left

Row = dict[str, Any]


# ---- searches: both sides, and the exact optimum ---------------------------------------------------------------


def search_rows(arena: Arena, work: Work, *, cases: Sequence[Case]) -> list[Row]:
    """A row for each of the cases, which share one peer."""
    minmax = arena.first_run(Entry("peer", "memoryless_minmax"), work)
    peer = arena.first_run(Entry("peer", cases[0].peer), work)
    ours = [arena.first_run(Entry("ours", case.ours, case.knobs), work) for case in cases]
    able = [each for each in (peer, *ours) if each.problem is None]
    seconds: dict[str, dict[int, float]] = {}
    for threads in THREADS:
        for each, least in zip(able, arena.best_seconds(able, work, threads=threads), strict=True):
            seconds.setdefault(each.entry.name, {})[threads] = least

    rows: list[Row] = []
    for case, own in zip(cases, ours, strict=True):
        row: Row = {"case": case.name, "norm": case.norm, "is_weighted": case.is_weighted}
        problem = own.problem or peer.problem or minmax.problem
        if problem is not None:
            rows.append({**row, "problem": problem})
            continue
        lost = [errors_of(each, work, case.norm) for each in (own, peer, minmax)]
        distances = above_optimum(work, own, lost[:2]) if case.norm == 2 else [None, None]
        for side, tried, errors, distance in zip(("ours", "peer"), (own, peer), lost[:2], distances, strict=True):
            row[side] = {
                "observer": tried.entry.observer,
                "seconds": seconds[tried.entry.name],
                "error": total(errors),
                "above_optimum": distance,
                "extra_bytes": tried.extra_bytes,
            }
        rows.append({**row, "minmax_error": total(lost[2])})
    return rows


def errors_of(tried: Tried, work: Work, norm: float) -> dict[str, Tensor]:
    """What each position of each weight loses."""
    return {
        name: judge.errors(x_PG, tried.qparams_of(name), work.args, norm=norm, weights_PG=weights_PG)
        for name, (x_PG, weights_PG) in work.groups().items()
    }


def total(errors: Mapping[str, Tensor]) -> float:
    """The loss of all weights together."""
    return sum(float(each.sum()) for each in errors.values())


def above_optimum(work: Work, ours: Tried, lost: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """How far each loss lies above the least possible one, as a share of it, on some groups of every weight.

    Under a global scale, the optimum is that of the group scales under ours, which comes from the true maximum.
    """
    least, losses, groups = 0.0, [0.0 for _ in lost], work.groups()
    for name, (x_PG, weights_PG) in groups.items():
        picked = torch.linspace(0, len(x_PG) - 1, min(len(x_PG), OPTIMUM_GROUPS // len(groups))).long()
        exact = exact_optimum(
            x_PG[picked].unsqueeze(0),
            work.args,
            weights_NQG=None if weights_PG is None else weights_PG[picked].unsqueeze(0),
            global_scale=ours.qparams_of(name).get("global_scale"),
        )
        least += float(exact.error_Q.sum())
        losses = [loss + float(each[name][picked].sum()) for loss, each in zip(losses, lost, strict=True)]
    return [loss / least - 1 for loss in losses]


# ---- min-max, and growth ---------------------------------------------------------------------------------------


def minmax_rows(arena: Arena, work: Work) -> list[Row]:
    """Seconds of each min-max observer on both sides, and of the plainest pass over the same tensor."""
    entries = [Entry("ours", "torch.sum")]
    entries += [Entry(side, observer) for observer in MINMAX_OBSERVERS for side in ("ours", "peer")]
    tried = [arena.first_run(entry, work) for entry in entries]
    problem = next((each.problem for each in tried if each.problem), None)
    if problem is not None:
        return [{"observer": observer, "problem": problem} for observer in MINMAX_OBSERVERS]
    rows: list[Row] = [{"observer": observer, "seconds": {}} for observer in MINMAX_OBSERVERS]
    for threads in THREADS:
        plain, *least = arena.best_seconds(tried, work, threads=threads)
        for row, ours, peer in zip(rows, least[0::2], least[1::2], strict=True):
            row["seconds"][threads] = {"sum": plain, "ours": ours, "peer": peer}
    return rows


def growth_rows(arena: Arena, work: Work, *, case: Case) -> list[Row]:
    """Our seconds, one thread."""
    tried = arena.first_run(Entry("ours", case.ours, case.knobs), work)
    if tried.problem is not None:
        return [{"case": case.name, "problem": tried.problem}]
    return [{"case": case.name, "seconds": arena.best_seconds([tried], work, threads=1)[0]}]


# ---- the whole run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A part of the run: rows about some weights, for one of the result files."""

    topic: str
    title: str
    weights: Weights
    form: Format
    labels: Row
    measure: Callable[[Arena, Work], list[Row]]
    is_weighted: bool = False
    expected_seconds: float = 5.0


def all_steps(is_wanted: Callable[[str], bool]) -> Iterator[Step]:
    """Everything whose name is wanted, weights by weights."""
    for weights in WEIGHTS:
        name = f"{weights.name} {weights.dtype}"
        labels = {"weights": weights.name, "dtype": weights.dtype, "group_size": weights.group_size}
        for (form, peer, is_weighted), sharing in groupby(CASES, key=lambda case: case.shared):
            cases = [case for case in sharing if is_wanted(f"search: {case.name}, {name}")]
            title = f"search: {cases[0].name}{' and others' if len(cases) > 1 else ''}, {name}" if cases else ""
            measure, seconds = partial(search_rows, cases=cases), 7 * EXPECTED_SECONDS[peer]
            if cases:
                yield Step("search", title, weights, weights.fit(form), labels, measure, is_weighted, seconds)
    for weights in MINMAX_WEIGHTS:
        for strategy, form in MINMAX_FORMATS.items():
            title = f"minmax: {strategy}, {weights.name} {weights.dtype}"
            labels = {"strategy": strategy, "weights": weights.name, "dtype": weights.dtype}
            if is_wanted(title):
                yield Step("minmax", title, weights, form, labels, minmax_rows)
    for millions in GROWTH_MILLIONS:
        weights = growing_weights(millions)
        for case in (case for case in CASES if case.name in GROWTH_CASES):
            title = f"growth: {case.name}, {weights.name}"
            if is_wanted(title):
                measure = partial(growth_rows, case=case)
                yield Step("growth", title, weights, case.form, {"millions": millions}, measure)


def run(steps: Sequence[Step], arena: Arena, machine: Row, *, keep: bool, quick: bool, console: Console) -> list[str]:
    """Take all steps, writing results after each; returns the problems met."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    problems: list[str] = []
    laid_out: Weights | None = None
    topics = {step.topic for step in steps}
    results: dict[str, dict[tuple[Any, ...], Row]] = {
        topic: {tables.key_of(row): row for row in tables.read_results(topic)["rows"] if keep} for topic in topics
    }
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=3600) as progress:
        task = progress.add_task("", total=sum(step.expected_seconds for step in steps))
        for step in steps:
            progress.update(task, description=step.title)
            begun = time.perf_counter()
            if laid_out is not step.weights:
                tensors, file = arena.lay_out(step.weights)
                laid_out = step.weights
            work = Work(tensors, file, step.form, step.is_weighted)
            for found in step.measure(arena, work):
                row = {**step.labels, **found, "date": date.today().isoformat(), "quick": quick}
                results[step.topic][tables.key_of(row)] = row
                problems += [found["problem"]] if "problem" in found else []
            tables.write_results(step.topic, machine, list(results[step.topic].values()))
            progress.advance(task, step.expected_seconds)
            console.print(f"{time.perf_counter() - begun:6.1f} s  {step.title}", highlight=False)
    return problems


def machine_of(workers: Mapping[str, Worker]) -> Row:
    """The machine and the software, by kind and not by name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        **{side: worker.versions for side, worker in workers.items()},
    }


def main() -> int:
    """Run the benchmark, or parts of it, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="the interpreter of the peer's environment")
    parser.add_argument("--only", action="append", default=[], help="a part of a name, such as optimal, int4 or minmax")
    parser.add_argument("--quick", action="store_true", help="one turn each: rough, and marked as such")
    options = parser.parse_args()
    console = Console()

    def is_wanted(name: str) -> bool:
        return not options.only or any(each in name for each in options.only)

    steps = list(all_steps(is_wanted))
    are_runs_wanted = any(is_wanted(title) for title in runs.titles())
    if not steps and not are_runs_wanted:
        parser.error(f"nothing is called {' or '.join(options.only)}.")
    if not MODEL.is_dir():
        console.print(f"There is no model in {os.path.relpath(MODEL)}: its rows are left out.")
        steps = [step for step in steps if step.weights.name != MODEL.name]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        pythons = {"ours": sys.executable, "peer": options.peer}
        workers = {
            side: stack.enter_context(Worker(python, side, folder / f"{side}.log")) for side, python in pythons.items()
        }
        machine = machine_of(workers)
        keep = bool(options.only)
        other = [
            topic
            for topic in {step.topic for step in steps} | ({"runs"} if are_runs_wanted else set())
            if tables.read_results(topic)["machine"] not in (None, machine)
        ]
        if keep and other:
            parser.error(
                f"bench/results/{other[0]}.json comes from another machine or other versions. Run without --only."
            )
        arena = Arena(workers, folder, quick=options.quick)
        problems = run(steps, arena, machine, keep=keep, quick=options.quick, console=console) if steps else []
    if are_runs_wanted:
        problems += runs.run_all(options.peer, machine, is_wanted, keep=keep, quick=options.quick, console=console)
    tables.main()
    for problem, count in Counter(problems).items():
        console.print(f"Not measured ({count} rows): {problem}", highlight=False, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
