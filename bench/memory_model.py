"""A Llama of random weights on disk, of any number of layers, a file for each: never in memory as a whole.

python -m bench.memory_model LAYERS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

HIDDEN, WIDE, VOCABULARY, HEADS = 2048, 5632, 32000, 16
_DTYPE = torch.bfloat16


def write_model(num_layers: int, folder: Path) -> int:
    """Write the model, and give the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=2048,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}
    total = 0
    for number in range(num_layers + 1):
        file = f"model-{number + 1:05}-of-{num_layers + 1:05}.safetensors"
        tensors = _outside(generator) if number == 0 else _layer(f"model.layers.{number - 1}", generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(VOCABULARY, folder)
    return total


def write_tokenizer(num_words: int, folder: Path) -> None:
    """Write a tokenizer of made-up words: the peer asks for one, also where it is given token ids."""
    words = {f"t{i}": i for i in range(num_words)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
    tokenizer.pad_token = "t0"
    tokenizer.save_pretrained(folder)


def _outside(generator: torch.Generator) -> dict[str, Tensor]:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: _random(VOCABULARY, HIDDEN, generator) for name in names} | {"model.norm.weight": _ones()}


def _layer(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    rows_and_columns = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }
    matrices = {f"{name}.{each}.weight": _random(*shape, generator) for each, shape in rows_and_columns.items()}
    return matrices | {f"{name}.{each}.weight": _ones() for each in ("input_layernorm", "post_attention_layernorm")}


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(_DTYPE)


def _ones() -> Tensor:
    return torch.ones(HIDDEN, dtype=_DTYPE)


if __name__ == "__main__":
    write_model(int(sys.argv[1]), Path(sys.argv[2]))
