"""How much of a model is left: `make bench-accuracy`, or `python -m bench.accuracy --peer .venv-peer/bin/python`.

Each row is a model, a scheme and a contestant: one of our words for quality, one of our observers, or a recipe of the
peer's, all with the same calibration tokens. Every run is a process of its own. Its checkpoint is loaded by
transformers and judged here, for both sides in the same way, beside the logits of the model as it was, in fp32. Results
are written after every row to `bench/results/accuracy.json`, and in the end into `docs/benchmarks.md` and
`docs/accuracy.svg`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from math import exp, isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import tables
from bench.arena import Worker
from bench.run import machine_of
from scalewright.numerics.divergence import agreements, divergences, losses

# T tokens that are predicted, V entries of the vocabulary.

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scalewright-bench"
STORY_END = "<|endoftext|>"
CHARACTERS_PER_TOKEN = 16  # more than any text has
QUICK_SAMPLES = 8

Row = dict[str, Any]


# ---- what is compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, the texts that it is calibrated with and judged by, and how much of them."""

    name: str
    group_size: int
    num_samples: int
    num_judged: int
    length: int
    texts: tuple[str, str]


@dataclass(frozen=True)
class Contestant:
    """A way to find scales: a word for quality, or a modifier with observers of weights and of static inputs."""

    side: str
    name: str
    quality: str | None = None
    modifier: str = "QuantizationModifier"
    weights: str | None = None
    inputs: str | None = None
    is_smoothed: bool = False
    """Whether a SmoothQuantModifier comes first, with the strength that both sides recommend."""


@dataclass(frozen=True)
class Scheme:
    """How weights and inputs are written, and who competes; the name is that which our recipes know."""

    name: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    contestants: Sequence[Contestant]
    title: str = ""
    needs_bf16: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether the size of groups is the model's affair."""
        return bool(self.weights.get("strategy") == "group")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: Model
    scheme: Scheme
    contestant: Contestant

    @property
    def labels(self) -> Row:
        """What the row is about."""
        scheme = self.scheme.title or self.scheme.name
        return {
            "weights": self.model.name,
            "scheme": scheme,
            "side": self.contestant.side,
            "contestant": self.contestant.name,
        }

    @property
    def title(self) -> str:
        """The same in one line: what `--only` looks at."""
        return ", ".join(self.labels.values())

    def recipe(self) -> Row:
        """What the worker is asked for."""
        group_size = {"group_size": self.model.group_size} if self.scheme.is_grouped else {}
        who = self.contestant
        if who.quality is not None:
            return {"quality": who.quality, "scheme": self.scheme.name, "options": group_size}
        group: Row = {"targets": ["Linear"], "weights": {**self.scheme.weights, **group_size}}
        if self.scheme.inputs is not None:
            group["input_activations"] = dict(self.scheme.inputs)
        for part, observer in (("weights", who.weights), ("input_activations", who.inputs)):
            if observer is not None:
                group[part]["observer"] = observer
        fields = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        return {"modifier": who.modifier, "fields": fields, "smoothing": STRENGTH if who.is_smoothed else None}


def rounded(side: str, *observers: str) -> list[Contestant]:
    """Observers of weights, which are rounded to the nearest."""
    return [Contestant(side, name, weights=name) for name in observers]


def corrected(side: str, *observers: str | None) -> list[Contestant]:
    """GPTQ with an observer of weights, or with the side's own choice."""
    return [
        Contestant(side, f"GPTQ + {name}" if name else "GPTQ", modifier="GPTQModifier", weights=name)
        for name in observers
    ]


def static(side: str, *observers: str) -> list[Contestant]:
    """Observers of static inputs, and of weights where they are meant for these, too."""
    both = ("static_minmax", "minmax", "mse")
    return [Contestant(side, name, weights=name if name in both else None, inputs=name) for name in observers]


MODELS = (
    Model("stories15M", 32, 128, 100, 256, ("tinystories_calib.txt", "tinystories_eval.txt")),
    Model("SmolLM2-135M", 64, 64, 12, 512, ("wiki_calib.txt", "wikitext2_test.txt")),
)

STRENGTH = 0.8  # of smoothing, as in llm-compressor's example of W8A8
# Numbers as they travel to the workers: keywords of QuantizationArgs.
INT = {"type": "int", "symmetric": True, "dynamic": False}
INT8 = {**INT, "num_bits": 8}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
FP4 |= {"scale_dtype": "torch.float8_e4m3fn", "dynamic": False}

WORDS = [Contestant("ours", quality, quality=quality) for quality in ("fast", "balanced", "best")]
NAMED = ("memoryless_minmax", "mse", "imatrix_mse")

SCHEMES = (
    *(
        Scheme(
            f"W{num_bits}A16",
            {**INT, "num_bits": num_bits, "strategy": "group"},
            None,
            [
                *rounded("peer", *NAMED),
                *corrected("peer", None, "mse", "imatrix_mse"),
                *(*WORDS, *rounded("ours", *NAMED, "optimal"), *corrected("ours", None)),
            ],
        )
        for num_bits in (4, 3, 2)
    ),
    Scheme(
        "NVFP4A16",
        FP4,
        None,
        [
            *rounded("peer", *NAMED, "nvfp4_expanded_mse", "nvfp4_expanded_imatrix"),
            *corrected("peer", None, "imatrix_mse", "nvfp4_expanded_imatrix"),
            *(*WORDS, *rounded("ours", *NAMED, "nvfp4_expanded_mse", "optimal"), *corrected("ours", None)),
        ],
        needs_bf16=True,
    ),
    Scheme(
        "NVFP4",
        FP4,
        {**FP4, "dynamic": "local", "observer": "static_minmax"},
        [
            *rounded("peer", "memoryless_minmax", "nvfp4_expanded_mse", "nvfp4_expanded_imatrix"),
            *corrected("peer", None, "nvfp4_expanded_imatrix"),
            *(*WORDS, *rounded("ours", "memoryless_minmax", "nvfp4_expanded_mse", "optimal")),
        ],
        needs_bf16=True,
    ),
    Scheme(
        "W8A8",
        {**INT8, "strategy": "channel"},
        {**INT8, "strategy": "tensor"},
        [
            *static("peer", "static_minmax", "minmax", "mse"),
            Contestant("peer", "GPTQ + mse", modifier="GPTQModifier", weights="mse", inputs="mse"),
            Contestant("peer", "SmoothQuant + mse", weights="mse", inputs="mse", is_smoothed=True),
            Contestant("peer", "SmoothQuant + GPTQ", modifier="GPTQModifier", inputs="static_minmax", is_smoothed=True),
            *WORDS,
            *static("ours", "static_minmax", "minmax", "mse", "histogram_mse", "percentile", "entropy", "balanced_mse"),
            Contestant("ours", "SmoothQuant + mse", weights="mse", inputs="mse", is_smoothed=True),
        ],
        title="W8A8 static",
    ),
    Scheme(
        "FP8",
        FP8,
        FP8,
        [
            *static("peer", "static_minmax", "minmax", "mse"),
            Contestant("peer", "GPTQ + static_minmax", modifier="GPTQModifier", inputs="static_minmax"),
            *(*WORDS, *static("ours", "static_minmax", "minmax", "mse", "histogram_mse")),
        ],
    ),
    # What computing in bf16 alone costs, which transformers does with NVFP4.
    Scheme("unquantised", {}, None, [Contestant("none", "bf16")], needs_bf16=True),
)


def all_cases() -> list[Case]:
    """Every row, model by model."""
    return [
        Case(model, scheme, contestant) for model in MODELS for scheme in SCHEMES for contestant in scheme.contestants
    ]


# ---- models and texts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model in a folder, with rows of tokens to calibrate on and others to judge by."""

    folder: Path
    calibration: list[list[int]]
    judged: list[list[int]]


def subject_of(model: Model, folder: Path, *, quick: bool) -> Subject:
    """The model with its texts; a few of them if it is to be quick."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    counts = (QUICK_SAMPLES, QUICK_SAMPLES) if quick else (model.num_samples, model.num_judged)
    calibration, judged = (
        rows_of(tokenizer, (SHARED / "data" / name).read_text(encoding="utf-8"), count, model.length)
        for name, count in zip(model.texts, counts, strict=True)
    )
    return Subject(folder, calibration, judged)


def rows_of(tokenizer: Any, text: str, count: int, length: int) -> list[list[int]]:
    """The first `count` rows of a text.

    Stories: one each, behind the token of beginning, cut off at `length`. Running text: one piece of `length` after the
    other.
    """

    def ids_of(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    if STORY_END in text:
        stories = [story for each in text.split(STORY_END) if (story := each.strip())][:count]
        rows = [[tokenizer.bos_token_id, *ids_of(story)][:length] for story in stories]
    else:
        ids = ids_of(text[: CHARACTERS_PER_TOKEN * count * length])
        rows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:count]
    if len(rows) < count:
        raise ValueError(f"the text has fewer than {count} rows of {length} tokens.")
    return rows


def folder_of(model: Model, smollm2: Path) -> Path:
    """Where the model is; SmolLM2 is fetched if it is not there yet."""
    if not model.name.startswith("SmolLM2"):
        folder = SHARED / "models" / model.name
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no model in {os.path.relpath(folder, ROOT)}.")
        return folder
    if not (smollm2 / "config.json").exists():
        fetch_smollm2(smollm2)
    return smollm2


def fetch_smollm2(folder: Path) -> None:
    """Make the model with the script that lies beside the others; what it needs is installed for this once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages, made = Path(scratch) / "packages", Path(scratch) / "model"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), "gguf", "accelerate"], check=True)
        script = SHARED / "models" / "get_smollm2.py"
        paths = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, str(script), str(made)], env={**os.environ, "PYTHONPATH": paths}, check=True)
        made.rename(folder)


# ---- the judge -------------------------------------------------------------------------------------------------


class Judge:
    """Compares checkpoints with the model as it was, whose log-probabilities wait in a file without a name."""

    def __init__(self, subject: Subject, file: Path) -> None:
        self._rows = [torch.tensor([row]) for row in subject.judged]
        self.num_tokens = sum(row.shape[1] - 1 for row in self._rows)
        model = load_whole(subject.folder, torch.float32)
        num_words = model.get_output_embeddings().weight.shape[0]
        size = self.num_tokens * num_words
        self._log_p_TV = torch.from_file(str(file), shared=True, size=size).view(self.num_tokens, num_words)
        file.unlink()  # it stays as long as it is mapped, and gigabytes are not left behind if the run is ended
        loss = 0.0
        for found_TV, log_q_TV, targets_T in self._predictions(model):
            found_TV.copy_(log_q_TV)
            loss += loss_of(log_q_TV, targets_T)
        self.perplexity = exp(loss / self.num_tokens)

    def judge(self, checkpoint: Path, dtype: torch.dtype) -> dict[str, float]:
        """KL(model as it was || checkpoint), perplexity, and agreement on the likeliest token, over all tokens."""
        divergence = loss = agreed = 0.0
        for log_p_TV, log_q_TV, targets_T in self._predictions(load_whole(checkpoint, dtype)):
            loss += loss_of(log_q_TV, targets_T)
            agreed += float(agreements(log_p_TV, log_q_TV).sum())
            divergence += float(divergences(log_p_TV, log_q_TV).sum(dtype=torch.float64))
        kl, mean_loss, top1 = (each / self.num_tokens for each in (divergence, loss, agreed))
        if not isfinite(kl) or not isfinite(mean_loss):
            raise ValueError("the checkpoint gives logits that are not finite.")
        return {"kl": kl, "perplexity": exp(mean_loss), "top1": top1}

    @torch.no_grad()
    def _predictions(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each row: where the log-probabilities of the model as it was stand, those of `model`, and what came."""
        done = 0
        for row in self._rows:
            log_q_TV = model(input_ids=row, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
            num_found = len(log_q_TV)
            yield self._log_p_TV[done : done + num_found], log_q_TV, row[0, 1:]
            done += num_found


def loss_of(log_q_TV: Tensor, targets_T: Tensor) -> float:
    """The sum of negative log-probabilities of what came."""
    return float(losses(log_q_TV, targets_T).sum(dtype=torch.float64))


def load_whole(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it, or an error if a part of it was not found."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    wrong = {what: sorted(info[what]) for what in ("missing_keys", "mismatched_keys", "unexpected_keys") if info[what]}
    if wrong:
        raise ValueError(f"transformers does not load all of the checkpoint: {wrong}.")
    return model.eval()


def bits_per_weight(checkpoint: Path, original: Path) -> float:
    """What a quantised weight takes in the files of the checkpoint, scales included; their `weight_shape` is not."""
    stored, shapes = tensors_in(checkpoint), tensors_in(original)
    layers = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    kinds = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
    num_bytes = sum(stored.get(f"{layer}.{kind}", (0, 0))[1] for layer in layers for kind in kinds)
    return 8 * num_bytes / sum(shapes[f"{layer}.weight"][0] for layer in layers)


def tensors_in(folder: Path) -> dict[str, tuple[int, int]]:
    """The number of elements and of bytes of each tensor in the files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                found[name] = tensor.numel(), tensor.nbytes
    return found


# ---- the runs --------------------------------------------------------------------------------------------------


def run_all(
    cases: Sequence[Case],
    pythons: Mapping[str, str],
    machine: Row,
    kept: Sequence[Row],
    *,
    smollm2: Path,
    threads: int,
    quick: bool,
    console: Console,
    busy: bool = False,
    marks: Row | None = None,
) -> list[str]:
    """Measure all cases, writing results after each; returns the problems met.

    Each row gets the `marks`.
    """
    rows = {tables.key_of(row): row for row in kept}
    order = {tables.key_of(case.labels): number for number, case in enumerate(all_cases())}
    problems = []
    for model, own in groupby(cases, key=lambda case: case.model):
        with tempfile.TemporaryDirectory(prefix="bench-accuracy-") as scratch:
            try:
                subject = subject_of(model, folder_of(model, smollm2), quick=quick)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                problems.append(f"{model.name}: {in_one_line(error)}")
                continue
            with quiet():
                judge = Judge(subject, Path(scratch) / "logits")
            console.print(f"{model.name}: {judge.num_tokens:,} tokens, perplexity {judge.perplexity:.3f}", style="bold")
            for case in own:
                try:
                    with quiet():
                        found = measure(case, subject, judge, pythons, threads=threads, busy=busy)
                except Exception as error:
                    found = {"problem": f"{case.title}: {in_one_line(error)}"}
                    problems.append(found["problem"])
                row = {**case.labels, **found, "num_samples": len(subject.calibration), "group_size": model.group_size}
                row |= {"num_tokens": judge.num_tokens, "perplexity_before": judge.perplexity, "threads": threads}
                row |= (
                    {"date": date.today().isoformat(), "quick": quick}
                    | (marks or {})
                    | ({"busy": True} if busy else {})
                )
                rows[tables.key_of(row)] = row
                tables.write_results("accuracy", machine, [rows[key] for key in sorted(rows, key=order.__getitem__)])
                console.print(line_about(row, list(rows.values())), highlight=False)
    return problems


def quiet() -> redirect_stderr[io.StringIO]:
    """Keeps the progress bars of loaders from standing between our lines."""
    return redirect_stderr(io.StringIO())


def measure(
    case: Case, subject: Subject, judge: Judge, pythons: Mapping[str, str], *, threads: int, busy: bool = False
) -> Row:
    """Quantise once, and judge what came of it."""
    dtype = torch.bfloat16 if case.scheme.needs_bf16 else torch.float32
    if case.contestant.side not in pythons:
        return judge.judge(subject.folder, dtype)
    with tempfile.TemporaryDirectory(prefix="bench-accuracy-") as scratch:
        folder = Path(scratch)
        found = quantise(case, subject, pythons[case.contestant.side], folder, threads=threads, busy=busy)
        checkpoint = folder / "checkpoint"
        return {**judge.judge(checkpoint, dtype), **found, "bits": bits_per_weight(checkpoint, subject.folder)}


def quantise(case: Case, subject: Subject, python: str, folder: Path, *, threads: int, busy: bool = False) -> Row:
    """What a worker answers; RuntimeError with its last words if it does not."""
    request = {"model": str(subject.folder), "rows": subject.calibration, "threads": threads, "busy": busy}
    request |= {"recipe": case.recipe(), "out": str(folder / "checkpoint")}
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    files = [str(folder / name) for name in ("request.json", "answer.json")]
    command = [python, "-m", "bench.accuracy_worker", case.contestant.side, *files]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"ended with code {ran.returncode} and no word"]
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
        raise RuntimeError((raised or lines)[-1])
    answer: Row = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def in_one_line(error: Exception) -> str:
    """What went wrong, without the folders of this machine."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(?<!\w)/(?:[\w.+-]+/)+", "", text)[:300]


def line_about(row: Row, rows: Sequence[Row]) -> str:
    """A row as it is printed."""
    title = ", ".join(str(row[name]) for name in ("weights", "scheme", "side", "contestant"))
    if "problem" in row:
        return f"[red]{row['problem'].replace('[', chr(92) + '[')}[/]"
    best = tables.best_peers(rows).get((row["weights"], row["scheme"]))
    ratio = f" ({row['kl'] / best:.2f}x)" if best else ""
    seconds = f", {row['seconds']:.1f} s" if "seconds" in row else ""
    style = {"ours": "cyan", "peer": "yellow"}.get(row["side"], "white")
    figures = f"KL [bold]{row['kl']:.4f}[/]{ratio}, perplexity {row['perplexity']:.3f}, top-1 {row['top1']:.1%}"
    return f"[{style}]{title}[/]: {figures}{seconds}"


def main() -> int:
    """Measure all rows, or some, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="the interpreter of the peer's environment")
    parser.add_argument("--only", action="append", default=[], help='a part of a title, such as "stories15M, W4A16"')
    parser.add_argument("--missing", action="store_true", help="only rows that were not measured yet")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SAMPLES} samples: rough, and marked as such")
    parser.add_argument("--busy", action="store_true", help="other work runs beside: seconds are the processor's")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--smollm2", type=Path, default=CACHE / "SmolLM2-135M", help="where SmolLM2 is, or is put")
    parser.add_argument("--list", action="store_true", help="print the titles, and measure nothing")
    options = parser.parse_args()
    console = Console(soft_wrap=True)

    named = [case for case in all_cases() if not options.only or any(each in case.title for each in options.only)]
    if not named:
        parser.error(f"nothing is called {' or '.join(options.only)}.")
    results = tables.read_results("accuracy")
    is_partial = bool(options.only or options.missing)
    known = {tables.key_of(case.labels) for case in all_cases()}
    kept = [row for row in results["rows"] if is_partial and tables.key_of(row) in known]
    sound = {tables.key_of(row) for row in kept if "problem" not in row and (options.quick or not row["quick"])}
    cases = [case for case in named if not (options.missing and tables.key_of(case.labels) in sound)]
    if options.list:
        print(*(case.title for case in cases), sep="\n")
        return 0

    torch.set_num_threads(options.threads)
    pythons = {"ours": sys.executable, "peer": options.peer}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        workers = {
            side: stack.enter_context(Worker(python, side, folder / f"{side}.log")) for side, python in pythons.items()
        }
        machine = machine_of(workers)
    first = results["machine"] if is_partial else None
    try:
        marks = tables.elsewhere(first, machine)
    except ValueError as error:
        parser.error(f"the rows of bench/results/accuracy.json {error}. Run without --only and --missing.")
    try:
        problems = run_all(
            cases,
            pythons,
            first or machine,
            kept,
            marks=marks,
            smollm2=options.smollm2.resolve(),
            threads=options.threads,
            quick=options.quick,
            console=console,
            busy=options.busy,
        )
    finally:
        tables.main()
    for problem in problems:
        console.print(f"Not measured: {problem}", highlight=False, markup=False, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
