"""Models that look at one token and know the next: what they say, and write, can be worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

VOCAB = 64


class Bigram(PreTrainedModel, GenerationMixin):
    """Logits are a row of a table."""

    config_class = PretrainedConfig

    def __init__(self, table: Tensor) -> None:
        sizes = {"num_hidden_layers": 1, "hidden_size": 1, "num_attention_heads": 1}  # caches ask for them
        super().__init__(PretrainedConfig(vocab_size=len(table), max_position_embeddings=VOCAB, **sizes))
        self.table = nn.Embedding.from_pretrained(table)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table(input_ids))


def bigram(seed: int = 0, sharpness: float = 2.0, vocab: int = VOCAB) -> Bigram:
    """A random table."""
    return Bigram(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * sharpness)


def following(next_ids: list[int], sharpness: float = 10.0) -> Bigram:
    """Each token is followed by the one that is given for it, almost for certain."""
    return Bigram(torch.eye(VOCAB)[next_ids] * sharpness)
