"""Mixtures of experts: fused 3-D weights become a linear layer for each expert and projection.

transformers keeps the weights of all experts of a layer in one tensor. Scales, and checkpoints, belong to single
matrices, so such modules are taken apart: the matrices stay where they are in memory and become the weights of linear
layers, under the names that checkpoints of the architecture have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Expert(nn.Module):
    """One expert: `down(gate(x) * up(x))`, with the gating of the module that it was taken from."""

    def __init__(self, fused: nn.Module, index: int, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        self._fused = [fused]  # in a list, so that it is no submodule
        gate_up, down = fused.gate_up_proj[index], fused.down_proj[index]
        if fused.is_transposed:
            gate_up, down = gate_up.T, down.T
        gate, up = gate_up.chunk(2, dim=0)
        biases: list[Tensor | None] = [None, None, None]
        if fused.has_bias:
            biases = [*fused.gate_up_proj_bias[index].chunk(2), fused.down_proj_bias[index]]
        for name, weight, bias in zip(self._names, (gate, up, down), biases, strict=True):
            setattr(self, name, _linear(weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        """What the expert makes of tokens [T, hidden]; hooks on its layers see them."""
        gate, up, down = (getattr(self, name) for name in self._names)
        gated: Tensor = down(self._fused[0]._apply_gate(torch.cat([gate(x), up(x)], dim=-1)))
        return gated

    def unseen(self, x: Tensor) -> Tensor:
        """The same, past all hooks."""
        gate, up, down = (getattr(self, name).forward for name in self._names)
        gated: Tensor = down(self._fused[0]._apply_gate(torch.cat([gate(x), up(x)], dim=-1)))
        return gated


class UnfusedExperts(nn.ModuleList):
    """The experts of one layer, in place of the module that had them in one tensor.

    While `shows_all` is set, every expert is shown every token; what flows on comes from the chosen ones as ever.
    """

    shows_all = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, hidden], the experts chosen for each [T, k], and how much each of them counts."""
        output = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            assert isinstance(expert, Expert)
            token, choice = torch.where(top_k_index == index)
            if self.shows_all:
                expert(hidden_states)
            if len(token):
                chosen = (expert.unseen if self.shows_all else expert)(hidden_states[token])
                weighted = chosen * top_k_weights[token, choice, None]
                output.index_add_(0, token, weighted.to(output.dtype))
        return output


def unfuse_experts(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """Take all fused experts of `model` apart, in place: the modules that were replaced, by name, and notes."""
    replaced: dict[str, nn.Module] = {}
    notes: list[str] = []
    names = _names_in_checkpoints(model)
    for name, module in list(model.named_modules()):
        if not _is_fused(module):
            continue
        if not (module.has_gate and module.is_concatenated) or getattr(module, "has_post_expert_norm", False):
            notes.append(
                f"{name}: the weights of {type(module).__name__} cannot be taken apart, so they stay as they are."
            )
            continue
        experts = [Expert(module, index, names) for index in range(module.gate_up_proj.shape[0])]
        model.set_submodule(name, UnfusedExperts(experts))
        replaced[name] = module
    return replaced, notes


@contextmanager
def showing_all_tokens(model: nn.Module, *, on: bool) -> Iterator[None]:
    """While inside, experts are shown every token."""
    experts = [module for module in model.modules() if isinstance(module, UnfusedExperts)] if on else []
    for each in experts:
        each.shows_all = True
    try:
        yield
    finally:
        for each in experts:
            each.shows_all = False


def _is_fused(module: nn.Module) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in weights) and hasattr(module, "_apply_gate")


def _names_in_checkpoints(model: nn.Module) -> tuple[str, str, str]:
    """What checkpoints of this architecture call an expert's gate, up and down projections."""
    names: dict[str, list[str]] = {}
    for each in _conversions(model):
        for target in each.target_patterns:
            sources = [pattern.removesuffix(".weight").rsplit(".", 1)[-1] for pattern in each.source_patterns]
            names[target.rsplit(".", 1)[-1]] = sources
    gate_up, down = names.get("gate_up_proj", []), names.get("down_proj", [])
    if len(gate_up) == 2 and len(down) == 1:
        return gate_up[0], gate_up[1], down[0]
    return "gate_proj", "up_proj", "down_proj"


def _conversions(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config = getattr(model, "config", None)
    kinds = [getattr(each, "model_type", None) for each in (config, getattr(config, "text_config", None))]
    return [each for kind in kinds if kind for each in get_checkpoint_conversion_mapping(kind) or []]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
