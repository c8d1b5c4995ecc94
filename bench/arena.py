"""Where the contestants meet: two worker processes that take turns on the same tensors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import judge
from bench.cases import Format, Weights
from bench.worker import quantization_args

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, SLOW_ROUNDS, SLOW_SECONDS = 4, 2, 5.0
REPEATS, BUDGET = 20, 0.3  # how often, and for how many seconds, an entry repeats its work in one turn


@dataclass(frozen=True)
class Entry:
    """One observer of one side."""

    side: str
    observer: str
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Says all of it."""
        return f"{self.side}, {self.observer}{dict(self.knobs) or ''}"


@dataclass(frozen=True)
class Work:
    """What entries compete on: weights, and the format that they are to be written in."""

    tensors: Mapping[str, Tensor]
    file: Path
    form: Format
    is_weighted: bool = False

    @property
    def args(self) -> QuantizationArgs:
        """The format in the words of compressed-tensors."""
        return quantization_args(self.form)

    def groups(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Each weight as [P, G], with the importance of its elements if that counts."""
        groups: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name in [name.removeprefix("weight.") for name in self.tensors if name.startswith("weight.")]:
            weight, inputs = self.tensors[f"weight.{name}"], self.tensors[f"inputs.{name}"]
            importance = judge.importance_of(inputs, len(weight))
            weights_PG = judge.groups_of(importance, self.args) if self.is_weighted else None
            groups[name] = judge.groups_of(weight, self.args), weights_PG
        return groups


@dataclass(frozen=True)
class Tried:
    """What came of an entry's first run: qparams, time and memory, or a problem."""

    entry: Entry
    qparams: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    extra_bytes: int | None = None
    problem: str | None = None

    def qparams_of(self, name: str) -> dict[str, Tensor]:
        """Scale, zero point and, if there is one, global scale of the weight called `name`."""
        return {key.removeprefix(f"{name}."): each for key, each in self.qparams.items() if key.startswith(f"{name}.")}


class Worker:
    """One of the two processes; it ends with the `with` block."""

    def __init__(self, python: str, side: str, log: Path) -> None:
        self._side, self._log = side, log
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "bench.worker", side],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
            )
        self.versions = self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last_words = self._log.read_text(encoding="utf-8").strip().splitlines()[-15:]
            raise RuntimeError("\n".join([f"the worker '{self._side}' has died. It said:", *last_words]))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Arena:
    """The workers, and the folder that tensors go through."""

    def __init__(self, workers: Mapping[str, Worker], folder: Path, *, quick: bool) -> None:
        self._workers, self._folder, self._quick = workers, folder, quick

    def lay_out(self, weights: Weights) -> tuple[dict[str, Tensor], Path]:
        """The tensors of `weights`, and the file where workers find them."""
        tensors, file = weights.tensors(), self._folder / "weights.safetensors"
        save_file(tensors, file)
        return tensors, file

    def first_run(self, entry: Entry, work: Work) -> Tried:
        """Let an entry run once, for its qparams and its memory; this also warms it up."""
        file = self._folder / "qparams.safetensors"
        answer = self._ask(entry, work, threads=1, repeats=1, memory=True, save=str(file))
        if "error" in answer:
            return Tried(entry, problem=f"{entry.name}: {answer['error']}")
        return Tried(entry, load_file(file), answer["seconds"][0], answer["extra_bytes"])

    def best_seconds(self, tried: Sequence[Tried], work: Work, *, threads: int) -> list[float]:
        """The best time of each, all taking turns; fewer turns where one of them is slow."""
        is_slow = any(each.seconds > SLOW_SECONDS for each in tried)
        times: list[list[float]] = [[] for _ in tried]
        for _ in range(1 if self._quick else SLOW_ROUNDS if is_slow else ROUNDS):
            for each, own in zip(tried, times, strict=True):
                answer = self._ask(each.entry, work, threads=threads, repeats=REPEATS)
                if "error" in answer:
                    raise RuntimeError(f"{each.entry.name}: {answer['error']}")
                own.extend(answer["seconds"])
        return [min(own) for own in times]

    def _ask(
        self, entry: Entry, work: Work, *, threads: int, repeats: int, memory: bool = False, save: str | None = None
    ) -> dict[str, Any]:
        request = {
            **{"observer": entry.observer, "knobs": dict(entry.knobs)},
            **{"file": str(work.file), "form": dict(work.form), "is_weighted": work.is_weighted},
            **{"threads": threads, "repeats": repeats, "budget": BUDGET, "memory": memory, "save": save},
        }
        return self._workers[entry.side].ask(request)
