"""A small trained model from start to finish: quantised, written, read back, measured, and shown on a page.

    python examples/demo.py [--scheme W4A16] [--out build/demo] [--model FOLDER --calibration FILE --held-out FILE]

This is what `make demo` runs. The model lies in `examples/demo_model` (`train_demo_model.py` has trained it); the text
is Python's own help, so nothing is fetched. With `--model`, another one takes its place, and brings its texts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from python_text import END, calibration_texts, held_out_texts
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scalewright import Result, ScalewrightError, evaluate, oneshot
from scalewright.cli.progress import progress_shown
from scalewright.cli.tables import layers_table, show_table
from scalewright.evaluation import Evaluation
from scalewright.quality import recipe_for
from scalewright.report.page import write_report

HERE = Path(__file__).resolve().parent
DEMO_MODEL = HERE / "demo_model"
QUALITIES = ("fast", "balanced", "best")
NUM_SAMPLES, NUM_ROWS, LENGTH = 32, 32, 256


def main() -> None:
    """Quantise in three qualities, and tell what is left of the model in each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "demo")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--calibration", type=Path, help="a .txt file, documents between <|endoftext|>")
    parser.add_argument("--held-out", type=Path, help="the same, of texts to judge by")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help="to calibrate with")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help="of 256 tokens, to judge by")
    options = parser.parse_args()
    if options.model != DEMO_MODEL and not (options.calibration and options.held_out):
        parser.error("--model: another model wants other texts. Give --calibration and --held-out, too.")
    logging.disable(logging.WARNING)
    console = Console(highlight=False, width=None if Console().is_terminal else 100)
    began = time.monotonic()

    calibration = calibration_texts() if options.calibration is None else read(options.calibration)
    judged = held_out_texts() if options.held_out is None else read(options.held_out)
    console.print(f"[bold]the model[/]  {describe(options.model)}")
    console.print(f"[bold]the texts[/]  {len(calibration)} to calibrate with, {len(judged)} others to judge by")

    runs: dict[str, tuple[Result, Evaluation]] = {}
    for quality in QUALITIES:
        folder = options.out / f"{options.scheme}-{quality}"
        with_data = {
            "dataset": calibration,
            "num_calibration_samples": options.samples,
            "max_seq_length": LENGTH,
        }
        with progress_shown(quiet=not console.is_terminal) as on_step:
            result = oneshot(
                options.model,
                scheme=options.scheme,
                quality=quality,
                output_dir=folder,
                overwrite=True,
                restart=True,
                on_step=on_step,
                **(with_data if quality != "fast" or needs_data(options.scheme) else {}),
            )
        runs[quality] = (
            result,
            evaluate(
                folder,
                against=options.model,
                dataset=judged,
                num_samples=options.rows,
                max_seq_length=LENGTH,
                pack=True,
                generate=quality == "best",
            ),
        )

    best, measured = runs["best"]
    report = write_report(best.output_dir, seconds=best.seconds, evaluation=measured.to_dict())
    console.print("[bold]layer by layer[/]  what `best` has made of them")
    show_table(layers_table(best.to_dict()["layers"]), console)
    for note in dict.fromkeys(note for result, _ in runs.values() for note in result.notes):
        named = ", ".join(quality for quality, (result, _) in runs.items() if note in result.notes)
        console.print(f"[yellow]note[/] ({named}) {escape(note)}")
    console.print(qualities_table(options.scheme, runs, size_of(options.model)))
    said = "it babbles" if measured.babbles else "it writes as the original does"
    console.print(f"[bold]in its own words[/]  200 tokens after each of some beginnings: {said}")
    console.print("[bold]where to look[/]")
    console.print(f"  {escape(str(shortest(report)))}  the report: open it in a browser")
    for quality, (result, _) in runs.items():
        console.print(
            f"  {escape(str(shortest(result.output_dir)))}  the checkpoint, {quality}: transformers and vLLM load it"
        )
    console.print(f"  {escape(str(shortest(best.output_dir / 'scalewright.json')))}  every layer's figures, as JSON")
    console.print(f"  {escape(str(shortest(best.output_dir / 'recipe.yaml')))}  the recipe that `best` stands for")
    console.print(f"done in {time.monotonic() - began:.0f} s")


def qualities_table(scheme: str, runs: dict[str, tuple[Result, Evaluation]], size_before: int) -> Table:
    """What each quality has lost, and how long it took."""
    first = next(iter(runs.values()))[1]
    title = f"{scheme} in three qualities, judged by {first.num_tokens:,} tokens of the other texts"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("quality")
    for name in ("perplexity", "KL to the original", "same first choice", "size", "seconds"):
        table.add_column(name, justify="right")
    table.add_row("as it was", f"{first.original_perplexity.value:.3f}", "", "", f"{size_before / 1e6:.2f} MB", "")
    for quality, (result, found) in runs.items():
        table.add_row(
            quality,
            f"{found.perplexity.value:.3f}",
            f"{found.kl.value:.4f} ± {found.kl.error:.4f}",
            f"{found.agreement.value:.1%}",
            f"{size_of(result.output_dir) / 1e6:.2f} MB",
            f"{sum(result.seconds.values()):.1f}",
        )
    return table


def describe(folder: Path) -> str:
    """What `training.json` says of a model, if it has one."""
    told = folder / "training.json"
    if not told.is_file():
        return escape(folder.name)
    learned = json.loads(told.read_text(encoding="utf-8"))
    perplexity = learned["perplexity"]
    return (
        f"{escape(folder.name)}, {learned['parameters'] / 1e6:.1f} M parameters; perplexity "
        f"{perplexity['trained']:.1f} on pages it has not seen ({perplexity['frequencies']:.0f}, if it knew no more "
        "than how frequent tokens are)"
    )


def needs_data(scheme: str) -> bool:
    """Whether even the fastest recipe for a scheme looks at data."""
    return any(modifier.data == "needed" for modifier in recipe_for("fast", scheme).modifiers)


def read(file: Path) -> list[str]:
    """The documents of a text file."""
    return [each for each in file.read_text(encoding="utf-8").split(END) if each.strip()]


def size_of(folder: Path) -> int:
    """Bytes of the tensors."""
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


def shortest(path: Path) -> Path:
    """The path as seen from here, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    try:
        main()
    except ScalewrightError as error:
        sys.exit(f"error {error}")
