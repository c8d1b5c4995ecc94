"""Which modules a recipe means.

A target or an ignored name is one of:

- `Linear`: the name of a class, or of one of its bases;
- `model.layers.3.mlp.down_proj`: the exact name of a module;
- `layers.1.*`: a shell wildcard, for the whole name or for what follows one of its dots;
- `re:.*mlp.*`: a regular expression that matches from the beginning of the name;
- `model:output_head` (to ignore only): the layers that turn what flows through the model into its answer;
- `model:routers` (to ignore only): the layers that choose experts, or weigh them.

Where several groups mean one module, an exact name goes before a pattern and a pattern before a class; then the first
of them. What the recipe does not quantise stays as it is; entries that change nothing become notes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.utils import InternalModule, match_targets
from compressed_tensors.utils.match import is_narrow_match
from torch import Tensor, nn

from scalewright.calibration.experts import num_experts
from scalewright.errors import LayoutError, ModelError, RecipeError, did_you_mean
from scalewright.modifiers.base import LEFT_ALONE, OUTPUT_HEAD, ROUTERS, matches, regex_of
from scalewright.modifiers.quantization import Group, QuantizationModifier
from scalewright.numerics.layout import check_divides, check_groups, check_strategy, strategy_of

QUANTIZABLE = (nn.Linear, nn.Embedding)
_HEADS = (
    "lm_head",
    "embed_out",
    "output_layer",
    "output",
    "proj_out",
    "score",
    "classifier",
    "pre_classifier",
    "classification_head",
    "qa_outputs",
    "head",
)
_EXACT, _PATTERN, _CLASS = range(3)


@dataclass(frozen=True)
class Pattern:
    """One target or ignored name, ready to be compared."""

    text: str
    regex: re.Pattern[str] | None
    names: frozenset[str] = frozenset()
    """Of modules that are meant besides."""

    @classmethod
    def of(cls, text: str) -> Pattern:
        """The pattern that a recipe's text stands for."""
        return cls(text, regex_of(text))

    def means(self, name: str, module: nn.Module) -> bool:
        """Whether a module is meant."""
        return self.rank(name, module) is not None

    def rank(self, name: str, module: nn.Module) -> int | None:
        """How narrowly a module is meant, less being narrower; None if it is not."""
        if self.regex is not None:
            return _PATTERN if matches(self.regex, name) else None
        if name == self.text or name in self.names:
            return _EXACT
        return _CLASS if self.text in _class_names(module) else None

    @property
    def for_loaders(self) -> str:
        """The same for compressed-tensors, which knows no wildcards."""
        return self.text if self.regex is None else f"re:{self.regex.pattern}"


def _class_names(module: nn.Module) -> list[str]:
    bases = [each for each in type(module).__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    return [each.__name__ for each in bases]


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
    spared: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Layers that are targets, and yet stay as they are."""
    passed_over: list[str] = field(default_factory=list)
    """Layers that are ignored, and no target means them, either."""
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all that is quantised."""
        return [layer.name for layer in self.layers] + [name for name, *_ in self.attention]

    @property
    def ignored(self) -> list[str]:
        """The names of the layers that stay as they are because somebody has said so."""
        return [*(name for name, _ in self.spared), *self.passed_over]


def resolve_targets(model: nn.Module, modifier: QuantizationModifier) -> Targets:
    """The modules that `modifier` means."""
    return _Resolution(model, modifier).run()


class _Resolution:
    """One walk through a model, with what has been seen on the way."""

    def __init__(self, model: nn.Module, modifier: QuantizationModifier) -> None:
        self.model = model
        self.modifier = modifier
        self.patterns = {text: Pattern.of(text) for group in modifier.groups for text in group.targets}
        self.ignores = {text: Pattern.of(text) for text in modifier.ignore}
        for word, find in ((OUTPUT_HEAD, output_heads), (ROUTERS, routers)):
            if word in self.ignores:
                self.ignores[word] = Pattern(word, None, find(model))
        self.found = Targets()
        self.used: set[str] = set()  # targets and ignored names that mean something which could be quantised
        self.seen: set[str] = set()  # those that mean any module at all
        self.odd: dict[type[nn.Module], list[str]] = {}  # matrices that no loader could run quantised, by class
        self.ignored_attention: list[str] = []

    def run(self) -> Targets:
        for name, module in _modules(self.model):
            matching = {text for text, pattern in self.patterns.items() if pattern.means(name, module)}
            ignoring = {text for text, pattern in self.ignores.items() if pattern.means(name, module)}
            self.seen |= matching | ignoring
            if _is_attention(module):
                self.used |= ignoring
                self._take_attention(name, module, is_ignored=bool(ignoring))
            elif isinstance(module, QUANTIZABLE) and _takes_one_input(module):
                self.used |= matching | ignoring
                self._take_layer(name, module, is_ignored=bool(ignoring))
            elif _has_matrix(module) and (matching or ignoring or _is_like_linear(module)):
                self.used |= matching | ignoring
                if not ignoring:
                    self.odd.setdefault(type(module), []).append(name)
        self._check_attention()
        self.found.notes += self._notes()
        return self.found

    def _group(self, name: str, module: nn.Module, groups: Sequence[Group]) -> Group | None:
        """The one of some groups whose scheme the module gets."""
        ranked = [
            (rank, place, group)
            for place, group in enumerate(groups)
            for text in group.targets
            if (rank := self.patterns[text].rank(name, module)) is not None
        ]
        return min(ranked, key=lambda each: each[:2])[2] if ranked else None

    def _take_layer(self, name: str, module: nn.Module, *, is_ignored: bool) -> None:
        group = self._group(name, module, self.modifier.groups)
        if group is None:
            self.found.passed_over += [name] if is_ignored else []
        elif is_ignored or group.is_left_alone:
            self.found.spared.append((name, module))
        else:
            self.found.layers.append(Target(name, module, group.name, group.scheme))

    # ---- attention -------------------------------------------------------------------------------------------------

    def _take_attention(self, name: str, module: nn.Module, *, is_ignored: bool) -> None:
        group = self._group(name, module, [each for each in self.modifier.groups if self._is_narrow(each, name)])
        if group is not None and not group.is_left_alone:
            self.used |= {text for text in group.targets if self.patterns[text].means(name, module)}
            if not is_ignored:
                self.found.attention.append((name, module, _attention_args(name, group), True))
                return
        if self.modifier.kv_cache is not None:
            self.found.attention.append((name, module, self.modifier.kv_cache, False))
        if is_ignored:
            self.ignored_attention.append(name)

    def _is_narrow(self, group: Group, name: str) -> bool:
        """Whether the module itself is meant, and not the layers in it: loaders see it so."""
        listed = [self.patterns[text].for_loaders for text in group.targets]
        return bool(is_narrow_match(self.model, listed, name))

    def _check_attention(self) -> None:
        """A checkpoint has one format for the keys and values of all attention modules, or none."""
        taken = self.found.attention
        if not taken:
            return
        formats = [args for _, _, args, _ in taken]
        names = {name for name, *_ in taken}
        left = next((name for name, each in _modules(self.model) if _is_attention(each) and name not in names), None)
        if left is not None:
            raise ModelError(
                f"{left}: loaders expect scales of keys and values in all attention modules or in none, and this one "
                f"would have none. Widen the targets, or ignore less."
            )
        other = next((name for name, _, args, _ in taken if args != formats[0]), None)
        if other is not None:
            raise ModelError(
                f"{other}: its keys and values have another format than those of {taken[0][0]}, and a checkpoint has "
                "one for all. Use one format."
            )
        self._check_queries()

    def _check_queries(self) -> None:
        """Where one module's queries are quantised, all attention of the model runs through that code."""
        own = {name for name, _, _, queries in self.found.attention if queries}
        others = (name for name, module in _modules(self.model) if _runs_attention(module) and name not in own)
        left = next(others, None) if own else None
        if left is not None:
            raise ModelError(
                f"{left}: its queries would stay as they are and those of {min(own)} would not, and a model that "
                "quantises queries in one attention module must do so in all. Widen the targets, ignore less, or "
                "quantise keys and values alone with kv_cache_scheme."
            )

    # ---- notes -----------------------------------------------------------------------------------------------------

    def _notes(self) -> Iterator[str]:
        if self.modifier.kv_cache is not None:
            if not self.found.attention:
                yield "kv_cache_scheme: no attention module with a kv cache was found in this model."
            elif self.ignored_attention:
                yield (
                    f"{first_of(self.ignored_attention)}: ignored, but a checkpoint has one kv_cache_scheme for all, "
                    "so keys and values are quantised here, too."
                )
        for field_name, patterns in (("targets", self.patterns), ("ignore", self.ignores)):
            unused = [text for text in patterns if text not in self.used]
            if field_name == "ignore":  # a model without a head needs none to be ignored
                unused = [text for text in unused if text not in LEFT_ALONE]
            yield from (self._unused(field_name, text) for text in unused)
        served = {layer.group for layer in self.found.layers}
        for group in self.modifier.groups:
            is_meant = any(text in self.used for text in group.targets)
            if is_meant and not group.is_left_alone and group.scheme.weights is not None and group.name not in served:
                yield (
                    f"targets {', '.join(group.targets)}: all that they mean is ignored, or belongs to other groups."
                )
        for kind, names in self.odd.items():
            why = f"compressed-tensors has no format for {kind.__name__}"
            if issubclass(kind, QUANTIZABLE):
                why = f"compressed-tensors gives quantised layers one input, and {kind.__name__} takes more"
            yield f"{first_of(names)}: {why}, so it stays as it is."

    def _unused(self, field_name: str, text: str) -> str:
        """What to say of an entry that changes nothing."""
        says, names = f"{field_name}: '{text}' matches no module", [name for name, _ in _modules(self.model)]
        if text in self.seen:
            inside = f" For the layers inside of it write '{text}.*'." if text in names else ""
            return f"{says} that could be quantised, only such as hold others.{inside}"
        pattern, first = Pattern.of(text), {id(module): name for name, module in _modules(self.model)}
        for name, module in self.model.named_modules(remove_duplicate=False):
            if pattern.means(name, module) and id(module) in first:
                return f"{field_name}: '{text}' means {name}, which is {first[id(module)]} by another name. Name that."
        if pattern.regex is not None:
            return f"{says}."
        if any(name.endswith(f".{text}") for name in names):
            return f"{says}. Write '*.{text}' for names that end so."
        classes = {each for _, module in _modules(self.model) for each in _class_names(module)}
        return f"{says}.{did_you_mean(text, {*classes, *(name.rpartition('.')[2] for name in names)})}"


def output_heads(model: nn.Module) -> frozenset[str]:
    """The names of the layers that are the model's output head: what transformers calls its output embeddings, and what
    has the name of a head, `lm_head` at any depth and others at the top; with the layers inside of them.
    """
    get = getattr(model, "get_output_embeddings", None)
    told = None
    with suppress(NotImplementedError, AttributeError):
        told = get() if callable(get) else None
    found = set()
    for name, module in _modules(model):
        parts = name.split(".")
        is_named_so = parts[0] in _HEADS or "lm_head" in parts
        if isinstance(module, nn.Linear) and (module is told or is_named_so):
            found.add(name)
    return frozenset(found)


def routers(model: nn.Module) -> frozenset[str]:
    """The names of the linear layers that choose experts, or weigh them: they stand beside experts, and have an output
    for each of these, or one in all.
    """
    found = set()
    for name, module in model.named_modules():
        count = num_experts(module, name)
        if not count:
            continue
        home = name.rpartition(".")[0]
        for inner, layer in model.get_submodule(home).named_modules(prefix=home):
            is_within = inner == name or inner.startswith(f"{name}.")
            if isinstance(layer, nn.Linear) and layer.out_features in (1, count) and not is_within:
                found.add(inner)
    return frozenset(found)


def join_targets(several: Sequence[Targets]) -> Targets:
    """What several modifiers mean, as one; their groups get names that tell them apart."""
    joined = Targets()
    for i, each in enumerate(several):
        before = joined.names
        twice = next((name for name in each.names if name in before), None)
        if twice is not None:
            raise RecipeError(f"{twice}: two modifiers of one stage mean it. Use ignore, or narrower targets.")
        joined.layers += [replace(layer, group=f"{i}.{layer.group}") for layer in each.layers]
        joined.attention += each.attention
        joined.spared += each.spared
        joined.passed_over += each.passed_over
        joined.notes += each.notes
    names = {layer.name for layer in joined.layers}
    joined.spared = [(name, module) for name, module in joined.spared if name not in names]
    known = {*names, *(name for name, _ in joined.spared)}
    joined.passed_over = [name for name in dict.fromkeys(joined.passed_over) if name not in known]
    return joined


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name and not isinstance(module, InternalModule))


def _is_attention(module: nn.Module) -> bool:
    return bool(is_cached_attention_module(module))


def _runs_attention(module: nn.Module) -> bool:
    """Whether it is attention of any kind, with a kv cache or without, that its configuration can switch."""
    is_named_so = "attention" in type(module).__name__.lower()
    has_layers = any(isinstance(each, nn.Linear) for each in module.children())
    return _is_attention(module) or (is_named_so and has_layers and hasattr(module, "config"))


def _attention_args(name: str, group: Group) -> QuantizationArgs:
    """The format of queries, keys and values."""
    args = group.scheme.input_activations
    if args is None or group.scheme.weights is not None or group.scheme.output_activations is not None:
        raise RecipeError(
            f"{name}: an attention module has queries, keys and values, and no weights. Give it a group of "
            "input_activations alone."
        )
    if args.dynamic:
        raise RecipeError(f"{name}: the scales of attention states are static. Set dynamic to false.")
    if not args.symmetric:
        # Once k and v have zero points, compressed-tensors takes the dtype of those for the module's.
        raise RecipeError(
            f"{name}: transformers makes the scales of queries that have zero points float16, and then stops at "
            "others. Set symmetric to true."
        )
    try:
        check_strategy("q", args)
    except LayoutError as error:
        raise RecipeError(f"{name}: {error}") from None
    return args


def _has_matrix(module: nn.Module) -> bool:
    return any(each.ndim >= 2 for each in module.parameters(recurse=False))


def _takes_one_input(module: nn.Module) -> bool:
    """Whether its `forward` may be called as that of any linear layer or embedding; OPT's positions may not."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(type(module).forward).parameters.values()
    return sum(each.kind in named for each in taken) <= len(("self", "input"))


def _is_like_linear(module: nn.Module) -> bool:
    """A matrix multiplication under another name, as GPT-2 has it."""
    return type(module).__name__ == "Conv1D"


def first_of(names: Sequence[str]) -> str:
    """`model.layers.0.mlp and 3 more`."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def check_layers(layers: Iterable[Target]) -> None:
    """Say no to layers that their scheme does not fit."""
    for layer in layers:
        scheme = layer.scheme
        if isinstance(layer.module, nn.Embedding) and (scheme.input_activations or scheme.output_activations):
            raise ModelError(
                f"{layer.name}: what goes into an embedding are token ids, which have no scale. Give it a scheme of "
                "weights alone, such as W8A16, or ignore it."
            )
        weight = layer.module.weight
        assert isinstance(weight, Tensor)
        rows, columns = weight.shape[-2:]
        if weight.numel() == 0:
            raise ModelError(f"{layer.name}.weight: has no elements ({rows} x {columns}). Ignore this layer.")
        parts = (
            ("weight", scheme.weights, columns),
            ("input", scheme.input_activations, columns),
            ("output", scheme.output_activations, rows),
        )
        for base_name, args, width in parts:
            if args is not None:
                _check_fits(args, base_name, width, layer.name)


def _check_fits(args: QuantizationArgs, base_name: str, width: int, name: str) -> None:
    if base_name != "weight" and args.dynamic is False and strategy_of(args) in ("group", "tensor_group"):
        raise RecipeError(
            f"{name}.{base_name}: no loader applies static scales of groups to activations. Set dynamic to true, or to "
            "local under a global scale (strategy tensor_group), or use strategy tensor."
        )
    try:
        check_strategy(base_name, args)
        if strategy_of(args) == "block":
            check_divides(width, int(args.block_structure[1]), is_fixed=True, kind="blocks")
        check_groups(width, base_name, args)
    except LayoutError as error:
        raise error.at(f"{name}.{base_name}") from None


# ---- loaders ---------------------------------------------------------------------------------------------------------


def loader_targets(targets: Targets) -> dict[str, list[str]]:
    """For each group, targets by which compressed-tensors gives each layer the scheme that it has here.

    Those of the recipe, in its language; where it would choose otherwise, the names of the layers.
    """
    groups: dict[str, list[str]] = {}
    for layer in targets.layers:
        groups.setdefault(layer.group, [Pattern.of(each).for_loaders for each in layer.scheme.targets])
    if _choose_alike(targets, groups):
        return groups
    return {group: [each.name for each in targets.layers if each.group == group] for group in groups}


def _choose_alike(targets: Targets, groups: dict[str, list[str]]) -> bool:
    """Whether loaders that are given these targets find each layer's own group, and nothing else."""
    every: dict[str, str] = {each: group for group, listed in groups.items() for each in listed}
    every |= {type(module).__name__: "attention" for _, module, _, queries in targets.attention if queries}
    owned = [(layer.name, layer.module, layer.group) for layer in targets.layers]
    owned += [(name, module, "attention") for name, module, _, queries in targets.attention if queries]
    for name, module, group in owned:
        chosen = match_targets(name, module, list(every))
        if not chosen or every[chosen[0]] != group:
            return False
    # A checkpoint lists the layers that it ignores, but only those of classes that it quantises somewhere.
    listed = {type(module).__name__ for _, module, _ in owned}
    return not any(
        type(module).__name__ not in listed and match_targets(name, module, list(every))
        for name, module in targets.spared
    )


# ---- blocks ----------------------------------------------------------------------------------------------------------


def largest_blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of the blocks that a model is made of: the members of its largest repeated lists of modules.

    Of lists within lists the outermost count, so experts of a layer are no blocks. A list counts if one of the layers
    that are meant is in it; where none has two members, those of one do.
    """
    lists = [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and any(True for each in module for _ in each.children())
    ]
    repeated = [(prefix, module) for prefix, module in lists if _is_repeated(module)]
    return _members(repeated, names) or _members([each for each in lists if len(each[1]) == 1], names)


def _members(lists: Sequence[tuple[str, nn.ModuleList | nn.Sequential]], names: Sequence[str]) -> list[str]:
    blocks: dict[int, str] = {}  # a module that is used twice is one block
    for prefix, modules in lists:
        is_inside = any(prefix.startswith(other) for other, _ in lists if other != prefix)
        if not is_inside and any(each.startswith(prefix) for each in names):
            for key, member in modules.named_children():
                blocks.setdefault(id(member), f"{prefix}{key}")
    return list(blocks.values())


def _is_repeated(modules: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a class comes more than once among its members."""
    return len({type(each) for each in modules}) < len(modules)
