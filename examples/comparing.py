"""What a quantised model has lost: perplexity and KL divergence, on texts that were not used to calibrate it.

The other examples import it.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, BATCH = 256, 8


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tokens."""

    num_tokens: int
    perplexity_before: float
    perplexity: float
    kl: float
    top1: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity_before:.3f} -> {self.perplexity:.3f}, KL {self.kl:.4f}, "
            f"the same first choice for {self.top1:.1%} of {self.num_tokens:,} tokens"
        )


@torch.no_grad()
def log_probs(model: nn.Module, rows: Tensor) -> Tensor:
    """Of every token of the vocabulary, at every place but the last of each row."""
    return torch.cat([model(input_ids=ids).logits[:, :-1].float().log_softmax(-1) for ids in rows.split(BATCH)])


def compare(before: Tensor, after: Tensor, rows: Tensor) -> Comparison:
    """Perplexity of both, mean KL(before || after), and how often both would choose the same token."""
    losses = [-each.gather(2, rows[:, 1:, None]).double().mean() for each in (before, after)]
    divergence = (before.exp() * (before - after)).sum(-1).double().mean()
    same = (before.argmax(-1) == after.argmax(-1)).double().mean()
    return Comparison(before[..., 0].numel(), *(float(each.exp()) for each in losses), float(divergence), float(same))


def rows_of(texts: list[str], folder: Path, *, length: int = LENGTH, most: int | None = None) -> Tensor:
    """The texts in rows of tokens, with the tokenizer that lies in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    tokens = torch.tensor([token for each in ids for token in (tokenizer.eos_token_id, *each)])
    return tokens[: len(tokens) // length * length].view(-1, length)[:most]


def load(folder: Path) -> nn.Module:
    """A checkpoint, quantised or not, as transformers reads it; a key that is missing is an error.

    It computes in fp32, which is faster on most CPUs; weights are the bf16 numbers that the checkpoint stands for.
    """
    with redirect_stderr(io.StringIO()), torch.no_grad():  # the loader's bars
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
        if info["missing_keys"]:
            raise ValueError(f"{folder}: {len(info['missing_keys'])} keys are missing.")
        model(input_ids=torch.zeros(1, 1, dtype=torch.long))  # weights are unpacked at the first pass
    return nn.Module.float(model)  # transformers has no conversion of its own for quantised models
