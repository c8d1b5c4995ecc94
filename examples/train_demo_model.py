"""Trains the small language model that the repository carries in `examples/demo_model`.

    python examples/train_demo_model.py FOLDER [--steps 1300]

It learns English about Python from text that every Python installation has: the help pages (`pydoc_data.topics`), less
those that are held out, and the docstrings of the standard library, which are parsed and never run. A Llama of 6
layers (hidden size 128, heads of 64) with a byte-level BPE of 1024 tokens; about ten minutes on one quiet core. The
folder is written every 250 steps, and `training.json` in it has the perplexity on the pages that were held out, beside
that of guessing by the frequency of tokens alone. The same Python, torch and number of steps give the same model.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import platform
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from python_text import END, calibration_texts, held_out_texts, key_of, without_repeats
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY, LENGTH, BATCH = 1024, 256, 8
EVERY = 250
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * LENGTH,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def main() -> None:
    """Train the tokenizer, then the model, and say what it has learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1300)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums then have one order, and the model is the same again
    logging.disable_progress_bar()

    pages, judged = calibration_texts(), held_out_texts()
    seen = {key_of(each) for text in (*pages, *judged) for each in text.split("\n\n")}
    docs = without_repeats(docstrings(), seen)
    tokenizer = trained_tokenizer([*pages, *docs])
    tokenizer.save_pretrained(options.folder)
    # The pages count twice: they are what the model will be asked about.
    train = tokens_of([*pages, *docs, *pages], tokenizer)
    held_out = tokens_of(judged, tokenizer)
    held_out = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)
    print(f"{len(train):,} tokens to learn from, {held_out.numel():,} held out")

    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    learned = {
        "steps": 0,
        "parameters": model.num_parameters(),
        "training_tokens": len(train),
        "held_out_tokens": held_out.numel(),
        "perplexity": {
            "untrained": perplexity(model, held_out),
            "frequencies": unigram_perplexity(train, held_out),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    save(model, options.folder, learned)
    fit(model, train, held_out, options.steps, options.folder, learned)


def fit(
    model: LlamaForCausalLM, train: Tensor, held_out: Tensor, steps: int, folder: Path, learned: dict[str, object]
) -> None:
    """Take the steps; now and then say how far it has come, and save."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps, pct_start=max(2 / steps, min(0.1, 50 / steps)), anneal_strategy="cos"
    )
    generator = torch.Generator().manual_seed(1)
    began, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        starts = torch.randint(len(train) - LENGTH, (BATCH, 1), generator=generator)
        batch = train[starts + torch.arange(LENGTH)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % EVERY == 0 or step == steps:
            saved = {**learned, "steps": step}
            saved["perplexity"] = {**learned["perplexity"], "trained": perplexity(model, held_out)}
            save(model, folder, saved)
            print(
                f"step {step}: loss {sum(losses[-EVERY:]) / len(losses[-EVERY:]):.3f}, perplexity on held-out pages "
                f"{saved['perplexity']['trained']:.2f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library's modules, classes and functions, one text for each file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("**/*.py")):
        if {"test", "tests", "site-packages", "lib2to3", "idlelib", "pydoc_data"} & set(path.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        if any(found):
            yield "\n\n".join(each for each in found if each)


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; token 0 ends a text and begins the next."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONFIG["max_position_embeddings"],
    )


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All texts in one row, each begun with token 0."""
    return torch.tensor([token for text in texts for token in (0, *tokenizer(text, verbose=False)["input_ids"])])


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Of every token of the rows but the first ones."""
    losses = [model(input_ids=each, labels=each).loss for each in rows.split(BATCH)]
    sizes = torch.tensor([float(len(each)) for each in rows.split(BATCH)])
    return math.exp(float((torch.stack(losses) * sizes).sum() / sizes.sum()))


def unigram_perplexity(train: Tensor, rows: Tensor) -> float:
    """What guessing by the frequency of tokens reaches."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[rows[:, 1:]].mean()))


def save(model: LlamaForCausalLM, folder: Path, learned: dict[str, object]) -> None:
    """The model in bf16, and what it has learned."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(learned, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
