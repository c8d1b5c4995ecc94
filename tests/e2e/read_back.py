"""What tests of checkpoints share: what a model says of some batches, and whether transformers reads the same back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

# transformers decompresses these to bf16, whatever the model is.
IN_BF16 = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP8")


def some_ids(vocabulary: int = 96, *, rows: int = 8, length: int = 24, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (rows, length), generator=generator).tolist()


@torch.no_grad()
def log_probs(model: nn.Module, inputs: Tensor | dict[str, Any]) -> Tensor:
    """Of each token, given token ids or all that the model wants."""
    batch = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    return model(**batch).logits.float().log_softmax(dim=-1)


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32, auto: Any = AutoModelForCausalLM) -> nn.Module:
    """The model that transformers makes of a checkpoint, in which nothing may be missing or too much."""
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(info.values()), {kind: sorted(map(str, keys))[:3] for kind, keys in info.items() if keys}
    return model


def assert_loads_to_the_same(
    result: Any,
    folder: Path,
    inputs: Tensor | dict[str, Any],
    *,
    dtype: torch.dtype,
    tolerance: float,
    auto: Any = AutoModelForCausalLM,
) -> None:
    """What transformers reads is the model in memory."""
    read = log_probs(loaded(folder, dtype=dtype, auto=auto), inputs)
    torch.testing.assert_close(read, log_probs(result.model, inputs), rtol=0, atol=tolerance)
