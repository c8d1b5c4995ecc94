"""Trains a small Llama on the spot, for want of a better one: it reads bytes, and learns from a text that is at hand.

    python examples/small_model.py FOLDER [--text FILE] [--steps 400]

A minute or two on two cores. Without a text it learns from Python's own help pages. Its shape (heads of 64, and
a hidden size of 256) is one that all loaders take. There is no tokenizer: tokens are bytes, and 0 begins a sample.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LENGTH, BATCH = 128, 16


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    model, bits = trained(read_bytes(options.text), options.steps)
    logging.disable_progress_bar()
    model.save_pretrained(options.folder)
    print(f"{options.folder.name}: {bits[0]:.1f} bits a byte before, {bits[1]:.1f} after {options.steps} steps")


def read_bytes(text: Path | None = None) -> Tensor:
    """A text as tokens."""
    data = text.read_bytes() if text is not None else "".join(topics.values()).encode()
    return torch.tensor(list(data))


def samples_of(tokens: Tensor, count: int, *, length: int = LENGTH, seed: int = 1) -> list[list[int]]:
    """Pieces of a text, each begun with 0."""
    starts = torch.randint(len(tokens) - length, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [[0, *tokens[start : start + length - 1].tolist()] for start in starts]


def trained(tokens: Tensor, steps: int) -> tuple[LlamaForCausalLM, tuple[float, float]]:
    """A model that has learned from the tokens, and its bits for each byte before and after."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for step in range(steps):
        batch = torch.tensor(samples_of(tokens, BATCH, seed=step + 2))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
    return model.eval().to(torch.bfloat16), (losses[0], sum(losses[-20:]) / len(losses[-20:]))


if __name__ == "__main__":
    main()
