"""Which modules a recipe means.

A target or an ignored name is one of:

- `Linear`: the name of a class, or of one of its bases;
- `model.layers.3.mlp.down_proj`: the exact name of a module;
- `layers.1.*`: a shell wildcard, for the whole name or for what follows one of its dots;
- `re:.*mlp.*`: a regular expression that matches from the beginning of the name.

Where several groups mean one module, an exact name goes before a pattern and a pattern before a class; then the first
of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.utils import InternalModule, match_targets
from torch import nn

from scalewright.errors import LayoutError, ModelError, RecipeError
from scalewright.modifiers.quantization import Group, QuantizationModifier
from scalewright.numerics.layout import check_divides, strategy_of

_WILDCARDS = re.compile(r"[*?\[]")
QUANTIZABLE = (nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class Target:
    """A module that is to be quantised, and how."""

    name: str
    module: nn.Module
    group: str
    scheme: QuantizationScheme


@dataclass
class Targets:
    """All modules that a modifier means, in the order of the model, and what the user should know of it."""

    layers: list[Target] = field(default_factory=list)
    attention: list[tuple[str, nn.Module, QuantizationArgs, bool]] = field(default_factory=list)
    """Attention modules, the format of their keys and values, and whether queries have it, too."""
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve_targets(model: nn.Module, modifier: QuantizationModifier) -> Targets:
    """The modules that `modifier` means."""
    found = Targets()
    patterns = {target: Pattern.of(target) for group in modifier.groups for target in group.targets}
    ignores = {name: Pattern.of(name) for name in modifier.ignore}
    hits: set[str] = set()
    odd: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, InternalModule) or not name:
            continue
        matching = {target for target, pattern in patterns.items() if pattern.means(name, module)}
        ignoring = {each for each, pattern in ignores.items() if pattern.means(name, module)}
        hits |= matching | ignoring
        if _is_attention(module):
            asked = [
                group for group in modifier.groups if matching & set(group.targets) and group.scheme.weights is None
            ]
            if asked and not ignoring and asked[0].scheme.input_activations is not None:
                found.attention.append((name, module, asked[0].scheme.input_activations, True))
            elif modifier.kv_cache is not None and not ignoring:
                found.attention.append((name, module, modifier.kv_cache, False))
            continue
        if not isinstance(module, QUANTIZABLE):
            if (matching or _is_like_linear(module)) and not ignoring and _has_matrix(module):
                odd.setdefault(type(module).__name__, []).append(name)
            continue
        if matching and ignoring:
            found.ignored.append(name)
        elif matching:
            group = min(modifier.groups, key=lambda group: _rank(group, matching, patterns))
            found.layers.append(Target(name, module, group.name, group.scheme))
    if modifier.kv_cache is not None and not found.attention:
        found.notes.append("kv_cache_scheme: no attention module with a kv cache was found in this model.")
    for kind, given in (("targets", patterns), ("ignore", ignores)):
        found.notes += [f"{kind}: '{each}' matches no module." for each in given if each not in hits]
    found.notes += [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: compressed-tensors has no format for "
        f"{kind}, so it stays as it is."
        for kind, names in odd.items()
    ]
    return found


def check_layers(layers: Iterable[Target]) -> None:
    """Say no to layers that their scheme does not fit."""
    for layer in layers:
        weights, inputs = layer.scheme.weights, layer.scheme.input_activations
        shape = tuple(layer.module.weight.shape)
        if isinstance(layer.module, nn.Embedding) and (
            inputs is not None or layer.scheme.output_activations is not None
        ):
            raise ModelError(
                f"{layer.name}: what goes into an embedding are token ids, which have no scale. Give it a scheme of "
                "weights alone, such as W8A16, or ignore it."
            )
        for args, what in ((weights, "weight"), (inputs, "input")):
            if args is None or strategy_of(args) not in ("group", "tensor_group", "block"):
                continue
            size = args.block_structure[1] if strategy_of(args) == "block" else args.group_size
            try:
                check_divides(shape[-1], int(size))
            except LayoutError as error:
                raise error.at(f"{layer.name}.{what}") from None


@dataclass(frozen=True)
class Pattern:
    """One target or ignored name, ready to be compared. `specificity` is least for exact names."""

    text: str
    regex: re.Pattern[str] | None
    specificity: int

    @classmethod
    def of(cls, text: str) -> Pattern:
        """The pattern that a recipe's text stands for."""
        if text.startswith("re:"):
            try:
                return cls(text, re.compile(text.removeprefix("re:")), 1)
            except re.error as error:
                raise RecipeError(f"'{text}' is not a regular expression: {error}.") from None
        if _WILDCARDS.search(text):
            return cls(text, re.compile(rf"(?:.*\.)?{translate(text)}"), 1)
        return cls(text, None, 2 if text.isidentifier() and text[:1].isupper() else 0)

    def means(self, name: str, module: nn.Module) -> bool:
        """Whether a module is meant."""
        if self.regex is not None:
            return self.regex.match(name) is not None
        return name == self.text or any(each.__name__ == self.text for each in type(module).__mro__[:-2])

    @property
    def for_loaders(self) -> str:
        """The same for compressed-tensors, which knows no wildcards."""
        return f"re:{self.regex.pattern}" if self.regex is not None else self.text


def _rank(group: Group, matching: set[str], patterns: dict[str, Pattern]) -> int:
    return min((patterns[each].specificity for each in group.targets if each in matching), default=9)


def _is_attention(module: nn.Module) -> bool:
    return bool(is_cached_attention_module(module))


def _has_matrix(module: nn.Module) -> bool:
    return any(each.ndim >= 2 for each in module.parameters(recurse=False))


def _is_like_linear(module: nn.Module) -> bool:
    """A matrix multiplication under another name, as GPT-2 has it."""
    return type(module).__name__ == "Conv1D"


def loader_targets(targets: Targets) -> dict[str, list[str]]:
    """For each group, targets by which compressed-tensors gives each layer the scheme that it has here.

    Those of the recipe, in its language; where it would choose otherwise, the names of the layers.
    """
    groups: dict[str, list[str]] = {}
    for layer in targets.layers:
        groups.setdefault(layer.group, [Pattern.of(each).for_loaders for each in layer.scheme.targets])
    every = {each: group for group, listed in reversed(groups.items()) for each in listed}
    for layer in targets.layers:
        chosen = match_targets(layer.name, layer.module, list(every))
        if not chosen or every[chosen[0]] != layer.group:
            return {group: [each.name for each in targets.layers if each.group == group] for group in groups}
    return groups


def largest_blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of the blocks that a model is made of: the members of its largest repeated lists of modules.

    Of lists within lists the outermost count, so experts of a layer are no blocks. A list counts if one of the layers
    that are meant is in it.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and _is_repeated(module)
    ]
    outermost = [
        (name, module)
        for name, module in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists if other != name)
    ]
    blocks: list[str] = []
    for name, module in outermost:
        prefix = f"{name}." if name else ""
        if any(each.startswith(prefix) for each in names):
            blocks += [f"{prefix}{key}" for key in module._modules]
    return blocks


def _is_repeated(modules: nn.Module) -> bool:
    """Whether its members are of one class, and are more than single operations."""
    members = list(modules.children())
    return len({type(each) for each in members}) == 1 and any(True for _ in members[0].children())
