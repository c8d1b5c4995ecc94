"""Mixtures of experts: fused 3-D weights become a linear layer for each expert and projection.

transformers keeps the weights of all experts of a layer in one tensor. Scales, and checkpoints, belong to single
matrices, so such modules are taken apart: the matrices stay where they are in memory and become the weights of linear
layers, under the names that checkpoints of the architecture have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_Linear = Callable[[Tensor], Tensor]
_FUSED = ("gate_up_proj", "down_proj")
_ONE_OF_ALL = "experts.*."  # in patterns of transformers
_SORTED = "Llama4TextExperts"


class Expert(nn.Module):
    """One expert: `down(gate(x) * up(x))`, with the gating of the module that it was taken from."""

    def __init__(self, fused: Any, index: int, names: Sequence[str]) -> None:
        """`fused` has the weights, and says how they lie and what is between them."""
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

    are_linear_in_transformers: ClassVar[bool] = False
    """Whether transformers, too, takes them apart before it loads a quantised model, quantised experts or not."""

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.shows_all = False


class ChosenExperts(UnfusedExperts):
    """Those that are told which tokens have chosen whom."""

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


class SortedExperts(UnfusedExperts):
    """Those of Llama 4: each is given as many rows as there are tokens, and those of tokens that are not its own are
    zeros, of which it makes zeros.
    """

    are_linear_in_transformers: ClassVar[bool] = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Rows [E * T, hidden], expert by expert, tokens already multiplied by how much their expert counts."""
        x_ETH = hidden_states.reshape(len(self), -1, hidden_states.shape[-1])
        output_ETH = torch.zeros_like(x_ETH)
        for index, expert in enumerate(self):
            assert isinstance(expert, Expert)
            shows_all = self.shows_all and expert.is_watched
            token = x_ETH[index].any(dim=-1).nonzero()[:, 0]
            if shows_all:
                expert(x_ETH.sum(dim=0), chosen_by=token)  # each token as strong as its own experts are given it
            if len(token):
                chosen = x_ETH[index, token]
                output_ETH[index, token] = expert.unseen(chosen) if shows_all else expert(chosen, token)
        return output_ETH.reshape(-1, x_ETH.shape[-1])


class _SortedLayout:
    """How `Llama4TextExperts` has its weights, in the words of other modules of transformers."""

    is_transposed = True
    has_bias = False

    def __init__(self, fused: Any) -> None:
        self.gate_up_proj, self.down_proj = fused.gate_up_proj, fused.down_proj
        self._activation = fused.act_fn

    def without_weights(self) -> _SortedLayout:
        """The same for what is between the weights alone."""
        bare = copy(self)
        del bare.gate_up_proj, bare.down_proj
        return bare

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = up * self._activation(gate)
        return activated


def unfuse_experts(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """Take all fused experts of `model` apart, in place: the modules that were replaced, by name, and notes."""
    replaced: dict[str, nn.Module] = {}
    notes: list[str] = []
    names, whole = _names_in_checkpoints(model), _name_of_all(model)
    for name, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        if type(module).__name__ == _SORTED:
            layout, names_there = _SortedLayout(module), ("gate_proj", "up_proj", "down_proj")
            with torch.no_grad():
                each_alone = (Expert(layout, index, names_there) for index in range(len(layout.gate_up_proj)))
                model.set_submodule(name, SortedExperts(each_alone))
            replaced[name] = module
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
            model.set_submodule(name, ChosenExperts(Expert(module, index, names) for index in range(len(weight))))
        replaced[name] = module
    return replaced, notes


def put_back(model: nn.Module, replaced: Mapping[str, nn.Module], quantised: Iterable[str]) -> None:
    """Put experts that were taken apart back where none of them is quantised and loaders look for one tensor."""
    names = list(quantised)
    for name, fused in replaced.items():
        apart = model.get_submodule(name)
        if isinstance(apart, UnfusedExperts) and apart.are_linear_in_transformers:
            continue
        if not any(each.startswith(f"{name}.") for each in names):
            model.set_submodule(name, fused)


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


def num_experts(module: nn.Module, name: str) -> int:
    """How many experts it is made of; none if it is something else."""
    if isinstance(module, UnfusedExperts) or (isinstance(module, nn.ModuleList) and name.endswith("experts")):
        return len(module)
    shapes = [each.shape for each in module.parameters(recurse=False) if each.ndim == 3] if is_fused(module) else []
    return shapes[0][0] if shapes else 0


def _can_be_unfused(module: nn.Module) -> bool:
    """Whether it says how its tensors are laid out, and that is one of the layouts which are known here."""
    has = {name: getattr(module, name, None) for name in ("has_gate", "is_concatenated", "has_post_expert_norm")}
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        has == {"has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}
        and all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in weights)
        and hasattr(module, "_apply_gate")
    )


def _without_weights(module: Any) -> Any:
    """The module for its methods alone; its tensors are not kept alive."""
    if isinstance(module, _SortedLayout):
        return module.without_weights()
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


def put_together(model: nn.Module) -> str | None:
    """A tensor that transformers makes of several in checkpoints, other than those of experts, if there is one."""
    names = list(model.state_dict())
    for each in _conversions(model):
        is_joined = len(each.source_patterns) > 1 and all(x.endswith(".weight") for x in each.source_patterns)
        if is_joined and not any(_last_name(target) in _FUSED for target in each.target_patterns):
            pattern = re.compile("|".join(f"(?:{target})" for target in each.target_patterns))
            found = next((name for name in names if pattern.search(name)), None)
            if found is not None:
                return found
    return None


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
