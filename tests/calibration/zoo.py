"""Tiny models with random weights, one of each kind, and batches of a few padded samples for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

HIDDEN = 32
VOCAB = 64
LENGTHS = ((5, 9), (9, 3), (7, 7))  # of the samples of each batch; the last has no padding

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Animal:
    """A model, batches for it, and the names of its blocks."""

    model: nn.Module
    batches: list[dict[str, Any]]
    blocks: list[str]


def zoo(name: str) -> Animal:
    """A new model of that kind, which may be changed."""
    return copy.deepcopy(_built(name))


@cache
def _built(name: str) -> Animal:
    torch.manual_seed(0)
    return ANIMALS[name]()


def padded(lengths: tuple[int, ...], seed: int, *, left: bool = False) -> dict[str, Tensor]:
    """Random token ids, padded, and their mask."""
    ids, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long), torch.zeros(len(lengths), max(lengths))
    generator = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        where = slice(-length, None) if left else slice(0, length)
        ids[row, where] = torch.randint(3, VOCAB - 1, (length,), generator=generator)
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask.long()}


def text_batches() -> list[dict[str, Any]]:
    return [padded(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def without_padding(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each sample alone, and without its padding. For batches of token ids and masks."""
    alone = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            sample = {}
            for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
                if ids in batch:
                    counts = batch[mask][row].bool()
                    sample[ids], sample[mask] = (batch[each][row][counts].unsqueeze(0) for each in (ids, mask))
            alone.append(sample)
    return alone


def _causal(kind: str, **given: Any) -> Callable[[], Animal]:
    def build() -> Animal:
        config = transformers.AutoConfig.for_model(kind, **{**SMALL, **given})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        return Animal(model, text_batches(), [f"model.layers.{i}" for i in range(config.num_hidden_layers)])

    return build


def _gpt2() -> Animal:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    return Animal(model, text_batches(), ["transformer.h.0", "transformer.h.1"])


def _t5() -> Animal:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    batches = text_batches()
    for seed, (batch, lengths) in enumerate(zip(batches, ((8, 4), (2, 9), (3, 6)), strict=True)):
        target = padded(lengths, 10 + seed)  # the second batch's is as long as its source, with another mask
        batch |= {f"decoder_{name}": each for name, each in target.items()}
    blocks = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]
    return Animal(transformers.T5ForConditionalGeneration(config).eval(), batches, blocks)


def _llava() -> Animal:
    image_token = VOCAB - 1
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            projection_dim=HIDDEN,
        ),
        image_token_index=image_token,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    batches = text_batches()
    for batch in batches[:2]:  # the last has no image
        batch["input_ids"][:, :3] = torch.tensor([image_token, image_token, 5])
        batch["input_ids"][0, 3:5] = image_token
        batch["pixel_values"] = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        batch["input_ids"][1, :2] = 6
    model = transformers.LlavaForConditionalGeneration(config).eval()
    blocks = [f"model.vision_tower.encoder.layers.{i}" for i in range(3)]
    blocks += [f"model.language_model.layers.{i}" for i in range(2)]
    return Animal(model, batches, blocks)


class Block(nn.Module):
    """Changes its input in place, wants a keyword, and gives back a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, *, side: Tensor, extra: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        x += 0.1 * extra["by"][0]
        x.mul_(1.01)
        out = x + self.second(torch.tanh(self.first(x) + side))
        return out, {"side": side * 0.9 + out.mean()}


class Odd(nn.Module):
    """Side inputs between blocks, a block that is called twice, one block under two names, switches of grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.between = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.again = self.blocks[1]
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        side, scale = torch.zeros_like(x), 1 + 0.1 * float(attention_mask.sum())
        with torch.set_grad_enabled(bool(len(input_ids) % 2)):
            for block in self.blocks:
                kept = x.clone()
                x, more = block(x, side=side, extra={"by": [kept / scale]})
                side = more["side"] + torch.relu(self.between(kept))
            x, _ = self.again(x, side=side, extra={"by": [kept]})
        return self.head(x)


def _odd() -> Animal:
    return Animal(Odd().eval(), text_batches(), [f"blocks.{i}" for i in range(3)])


_MOE = {"num_experts_per_tok": 2, "output_router_logits": False}

ANIMALS: dict[str, Callable[[], Animal]] = {
    "llama": _causal("llama"),
    "qwen3": _causal("qwen3"),
    "gemma3": _causal("gemma3_text", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": _gpt2,
    "mixtral": _causal("mixtral", num_local_experts=4, **_MOE),
    "qwen3_moe": _causal("qwen3_moe", num_experts=4, moe_intermediate_size=32, **_MOE),
    "llama4": _causal("llama4_text", num_local_experts=4, intermediate_size_mlp=96, **_MOE),
    "t5": _t5,
    "llava": _llava,
    "odd": _odd,
}


# ---- looking at a model ----------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> dict[str, Any]:
    """All that calibration may have left on a model: attributes, hooks, modes, settings."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if isinstance(value, dict) and "hooks" in key}
        tensors = {key: id(value) for key, value in (*module._parameters.items(), *module._buffers.items())}
        forward = vars(module).get("forward")
        found[name] = (type(module), sorted(vars(module)), hooks, tensors, forward, module.training)
        config = getattr(module, "config", None)
        found[f"{name} config"] = None if config is None else _plain(config)
    return found


def _plain(config: Any) -> dict[str, Any]:
    return {key: _plain(each) if hasattr(each, "to_dict") else repr(each) for key, each in vars(config).items()}


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors in what a model gave back."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [each for part in output for each in tensors_of(part)] if isinstance(output, list | tuple) else []


def assert_same(output: Any, expected: Any) -> None:
    """Bit for bit."""
    have, want = tensors_of(output), tensors_of(expected)
    assert len(have) == len(want) > 0
    for one, other in zip(have, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class Counter:
    """How often modules are called, while hooked."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.calls = dict.fromkeys(names, 0)
        self._hooks = [model.get_submodule(name).register_forward_hook(self._count(name)) for name in names]

    def _count(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self.calls[name] += 1

        return count

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
