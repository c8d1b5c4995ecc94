"""Mixtures of experts: fused 3-D weights become a linear layer for each expert and projection.

transformers keeps the weights of all experts of a layer in one tensor. Scales, and checkpoints, belong to single
matrices, so such modules are taken apart: the matrices stay where they are in memory and become the weights of linear
layers, under the names that checkpoints of the architecture have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_Linear = Callable[[Tensor], Tensor]
_FUSED = ("gate_up_proj", "down_proj")
_ONE_OF_ALL = "experts.*."  # in patterns of transformers


class Expert(nn.Module):
    """One expert: `down(gate(x) * up(x))`, with the gating of the module that it was taken from."""

    def __init__(self, fused: Any, index: int, names: Sequence[str]) -> None:
        super().__init__()
        self.tokens: Tensor | None = None
        """Which tokens of the batch it is given just now; None for all of them."""
        self.chosen_by: Tensor | None = None
        """Which tokens of those that it is given just now have chosen it; None for all of them."""
        self._names = tuple(names)
        self._gating = [_without_weights(fused)]  # in a list, so that it is no submodule
        gate_up, down = fused.gate_up_proj[index], fused.down_proj[index]
        if fused.is_transposed:
            gate_up, down = gate_up.T.contiguous(), down.T.contiguous()
        biases = (None, None, None)
        if fused.has_bias:
            biases = (*fused.gate_up_proj_bias[index].chunk(2), fused.down_proj_bias[index])
        for name, weight, bias in zip(self._names, (*gate_up.chunk(2), down), biases, strict=True):
            self.add_module(name, _linear(weight, bias))

    @property
    def is_watched(self) -> bool:
        """Whether anybody has a hook on one of its layers."""
        return any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.children())

    def forward(self, x: Tensor, tokens: Tensor | None = None, *, chosen_by: Tensor | None = None) -> Tensor:
        """What the expert makes of some of the batch's tokens [T, hidden]; hooks on its layers see them."""
        self.tokens, self.chosen_by = tokens, chosen_by
        try:
            return self._through(x, *(getattr(self, name) for name in self._names))
        finally:
            self.tokens = self.chosen_by = None

    def unseen(self, x: Tensor) -> Tensor:
        """The same, past all hooks."""
        return self._through(x, *(getattr(self, name).forward for name in self._names))

    def _through(self, x: Tensor, gate: _Linear, up: _Linear, down: _Linear) -> Tensor:
        return down(self._gating[0]._apply_gate(torch.cat([gate(x), up(x)], dim=-1)))


class UnfusedExperts(nn.ModuleList):
    """The experts of one layer, in place of the module that had them in one tensor.

    While `shows_all` is set, experts that somebody watches are shown every token; what flows on comes from the chosen
    ones as ever.
    """

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.shows_all = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, hidden], the experts chosen for each [T, k], and how much each of them counts."""
        output = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            assert isinstance(expert, Expert)
            shows_all = self.shows_all and expert.is_watched
            token, choice = torch.where(top_k_index == index)
            if shows_all:
                expert(hidden_states, chosen_by=token)
            if len(token):
                chosen = hidden_states[token]
                chosen = expert.unseen(chosen) if shows_all else expert(chosen, token)
                weighted = chosen * top_k_weights[token, choice, None]
                output.index_add_(0, token, weighted.to(output.dtype))
        return output


def unfuse_experts(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """Take all fused experts of `model` apart, in place: the modules that were replaced, by name, and notes."""
    replaced: dict[str, nn.Module] = {}
    notes: list[str] = []
    names, whole = _names_in_checkpoints(model), _name_of_all(model)
    for name, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        if not _can_be_unfused(module):
            notes.append(
                f"{name}: the weights of {type(module).__name__} cannot be taken apart, so they stay as they are."
            )
            continue
        if whole is not None:
            notes.append(
                f"{name}: loaders of {type(model).__name__} look for all of its experts in one tensor ({whole}), so "
                "they stay as they are."
            )
            continue
        weight = module.gate_up_proj
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            model.set_submodule(name, UnfusedExperts(Expert(module, index, names) for index in range(len(weight))))
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


def is_fused(module: nn.Module) -> bool:
    """Whether it has matrices of several experts in one tensor."""
    return "expert" in type(module).__name__.lower() and any(
        each.ndim == 3 for each in module.parameters(recurse=False)
    )


def _can_be_unfused(module: nn.Module) -> bool:
    """Whether it says how its tensors are laid out, and that is one of the layouts which are known here."""
    has = {name: getattr(module, name, None) for name in ("has_gate", "is_concatenated", "has_post_expert_norm")}
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        has == {"has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}
        and all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in weights)
        and hasattr(module, "_apply_gate")
    )


def _without_weights(module: nn.Module) -> Any:
    """The module for its methods alone; its tensors are not kept alive."""
    bare = copy(module)
    bare._parameters = {}
    return bare


def are_read_apart(model: nn.Module) -> bool:
    """Whether transformers reads weights of single experts from checkpoints of this architecture."""
    sources = _sources(model)
    return all(any(_ONE_OF_ALL in each for each in sources.get(name, [])) for name in _FUSED)


def _names_in_checkpoints(model: nn.Module) -> tuple[str, str, str]:
    """What checkpoints of this architecture call an expert's gate, up and down projections."""
    sources = _sources(model)
    gate_up, down = ([_last_name(each) for each in sources.get(name, [])] for name in _FUSED)
    if len(gate_up) == 2 and len(down) == 1:
        return gate_up[0], gate_up[1], down[0]
    return "gate_proj", "up_proj", "down_proj"


def _name_of_all(model: nn.Module) -> str | None:
    """What checkpoints call the first tensor of all experts of a layer, if they have such a tensor by another name.

    Single experts have no names then that any loader knows.
    """
    sources = [] if are_read_apart(model) else _sources(model).get(_FUSED[0], [])
    names = [_last_name(each) for each in sources if _ONE_OF_ALL not in each]
    return names[0] if names and names != [_FUSED[0]] else None


def _sources(model: nn.Module) -> dict[str, list[str]]:
    """What transformers puts each tensor of fused experts together from; patterns, by the last part of its name."""
    return {
        _last_name(target): list(each.source_patterns)
        for each in _conversions(model)
        for target in each.target_patterns
        if _last_name(target) in _FUSED
    }


def _last_name(pattern: str) -> str:
    return pattern.replace("\\", "").removesuffix(".weight").rsplit(".", 1)[-1]


def _conversions(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    kinds = [getattr(each, "model_type", None) for each in (config, getattr(config, "text_config", None))]
    mapping: Any = get_checkpoint_conversion_mapping
    return [each for kind in kinds if kind for each in mapping(kind) or []]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
