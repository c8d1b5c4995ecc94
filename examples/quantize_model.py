"""A small trained model from start to finish: quantised, written, read back by transformers, and measured.

    python examples/quantize_model.py [--scheme W4A16] [--model FOLDER --text FILE]

Without a model, the one that lies beside the repository is taken, and where there is none, a small one is trained on
the spot; the first line of the output says which.
"""

from __future__ import annotations

import argparse
import io
import logging
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from small_model import read_bytes, samples_of, trained
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from scalewright import QuantizationModifier, oneshot
from scalewright.checkpoint.loading import load_model
from scalewright.cli.shown import layers_table

BESIDE = Path(__file__).resolve().parents[2] / "shared"
MODEL, TEXT = BESIDE / "models" / "stories15M", BESIDE / "data" / "tinystories_calib.txt"
NUM_SAMPLES, NUM_HELD_OUT, LENGTH = 64, 16, 128


def main() -> None:
    """Quantise, save, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--model", type=Path, default=MODEL if MODEL.is_dir() else None)
    parser.add_argument("--text", type=Path, default=TEXT if TEXT.is_file() else None)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    console = Console()

    model, samples, what = small_model(options.model, options.text)
    console.print(f"the model: {what}")
    held_out = torch.tensor(samples[:NUM_HELD_OUT])
    before = log_probs(model, held_out)

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "quantised"
        groups = {"group_size": 32} if options.scheme.upper().startswith(("W2", "W3", "W4")) else {}
        recipe = QuantizationModifier(scheme=options.scheme, targets=["Linear"], ignore=["lm_head"], **groups)
        calibration = samples[NUM_HELD_OUT:]
        result = oneshot(
            model, recipe=recipe, dataset=calibration, num_calibration_samples=len(calibration), output_dir=out
        )
        console.print(layers_table(result.to_dict()["layers"]))
        for note in result.notes:
            console.print(f"[yellow]note[/] {escape(note)}", highlight=False)
        size = sum(each.stat().st_size for each in out.iterdir())
        with redirect_stderr(io.StringIO()):  # the loader's bars
            loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=model.dtype)
            read_back = log_probs(loaded, held_out)
    after = log_probs(result.model, held_out)
    console.print(f"pipeline              {result.pipeline}: {result.why}")
    console.print(f"seconds               {sum(result.seconds.values()):.1f} in all", highlight=False)
    console.print(
        f"checkpoint            {size / 1e6:.1f} MB, read by transformers; {len(info['missing_keys'])} keys missing"
    )
    console.print(
        f"read back             log-probabilities differ by {float((read_back - after).abs().max()):.1g} at most"
    )
    console.print(
        f"perplexity            {perplexity(before, held_out):.3f} before, {perplexity(after, held_out):.3f} after"
    )
    console.print(f"KL to the original    {float((before.exp() * (before - after)).sum(-1).mean()):.4f}")


def small_model(folder: Path | None, text: Path | None) -> tuple[nn.Module, list[list[int]], str]:
    """A model, samples of tokens for it, and what there is to say of it."""
    if folder is not None and text is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [each.strip() for each in text.read_text(encoding="utf-8").split("<|endoftext|>")]
        ids = [tokenizer(each, truncation=True, max_length=LENGTH)["input_ids"] for each in texts]
        samples = [each for each in ids if len(each) == LENGTH][: NUM_HELD_OUT + NUM_SAMPLES]
        return load_model(folder), samples, folder.name
    tokens = read_bytes()
    model, bits = trained(tokens, 120)
    what = f"a small one that was trained just now ({bits[0]:.1f} bits a byte before and {bits[1]:.1f} after)"
    return model.float(), samples_of(tokens, NUM_HELD_OUT + NUM_SAMPLES), what


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Of every token of the vocabulary at every place."""
    logits: Tensor = model(input_ids=ids).logits
    return logits.float().log_softmax(dim=-1)


def perplexity(log_prob: Tensor, ids: Tensor) -> float:
    """Of the tokens that follow."""
    return float(log_prob[:, :-1].gather(2, ids[:, 1:, None]).mean().neg().exp())


if __name__ == "__main__":
    main()
