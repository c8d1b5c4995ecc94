"""Loud input channels of layers are made quieter, and nothing that the model says changes by it.

What gives a layer its input, channel by channel, is found by trying: the norm whose output it is, or a layer before it
between whose output and this input all is linear (values and what attends to them, the factor of a gated MLP). In one
rehearsal of a block the channels are scaled by powers of two drawn at random, there and back; only what leaves the
block's output bit for bit as it was is believed. And one batch is brought through the model twice, as it was and
smoothed, to see that they meet each block with the same numbers.

A module whose weight is shared, that is called more than once, or is quantised already is left alone. So is a norm
whose output goes anywhere but into linear layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scalewright.calibration.distributed import Ranks
from scalewright.calibration.lockstep import LockStep
from scalewright.calibration.passes import evaluating, without_cache
from scalewright.calibration.pipelines import Batch, Calibration, OnStep, silent
from scalewright.calibration.plan import Plan
from scalewright.calibration.steps import Unit, units_of
from scalewright.calibration.taps import Tap, first_tensor, tapped
from scalewright.calibration.targets import Pattern
from scalewright.errors import DataError, RecipeError
from scalewright.modifiers import Modifier, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.shown import See, Shown
from scalewright.numerics.smoothing import Rows, by_rows, exponents, rows_that_fit, times_two_to

_TRIED = 4  # layers in front of another that are tried, the nearest first
_TRIAL = 4  # powers of two that trials go up and down

Words = list[list[Any]]
"""Links as plain data, for other ranks."""


@dataclass
class Smoothing:
    """By which powers of two the weights of modules were multiplied, and what is to be said of it. [int8]"""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Of the columns of a layer's weight, by its name: its input was divided by them."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Of the rows of a module's weight and its bias."""
    notes: list[str] = field(default_factory=list)

    def add(self, other: Smoothing) -> None:
        """Take over what was done after it."""
        for mine, theirs in ((self.inputs, other.inputs), (self.outputs, other.outputs)):
            for name, powers in theirs.items():
                mine[name] = mine[name] + powers if name in mine else powers
        self.notes += other.notes


@dataclass(frozen=True)
class Link:
    """Layers that are given the same input, and the module that gives it."""

    giver: str
    layers: tuple[str, ...]
    rows: Rows | None = None
    """Which rows of the giver's weight; None for a norm, which has a number for each channel."""


def smoothed_layers(plan: Plan, modifier: SmoothQuantModifier) -> list[WatchedLayer]:
    """The layers of a plan that a modifier means and that gain by it: what they are given is rounded to integers."""
    meant, ignored = ([Pattern.of(each) for each in some] for some in (modifier.targets, modifier.ignore))
    return [
        layer
        for layer in plan.layers
        if _is_rounded_to_integers(layer)
        and any(each.means(layer.name, layer.module) for each in meant)
        and not any(each.means(layer.name, layer.module) for each in ignored)
    ]


def _is_rounded_to_integers(layer: WatchedLayer) -> bool:
    inputs = layer.scheme.input_activations
    is_meant = inputs is not None and inputs.type == "int" and layer.scheme.weights is not None
    return is_meant and isinstance(layer.module, nn.Linear)


def plan_smoothings(
    stages: Sequence[Sequence[Modifier]], plans: Sequence[Plan], *, pipeline: str = "auto", has_data: bool = False
) -> list[list[SmoothQuantModifier]]:
    """Who smooths before each of the plans, which were made of the stages that quantise. Plans get notes on it."""
    found: list[list[SmoothQuantModifier]] = []
    waiting: list[SmoothQuantModifier] = []
    for stage in stages:
        waiting += [each for each in stage if isinstance(each, SmoothQuantModifier)]
        if not any(isinstance(each, QuantizationModifier) for each in stage):
            continue
        plan = plans[len(found)]
        plan.notes += [note for each in waiting for note in _unmatched(plan.model, each)]
        useful = [each for each in waiting if smoothed_layers(plan, each)]
        if len(useful) < len(waiting):
            plan.notes.append(
                "SmoothQuantModifier: means no layer whose inputs the recipe rounds to integers, so nothing is "
                "smoothed. Leave it out, or use a scheme such as W8A8."
            )
        meant = Counter(layer.name for each in useful for layer in smoothed_layers(plan, each))
        twice = next((name for name, count in meant.items() if count > 1), None)
        if twice is not None:
            raise RecipeError(f"{twice}: two SmoothQuantModifiers mean it. Use ignore, or narrower targets.")
        found.append(useful)
        waiting = []
    if waiting:
        plans[-1].notes.append(
            "SmoothQuantModifier: nothing that comes after it quantises, so it is not run. Put it before the modifier "
            "that does."
        )
    if any(found) and not has_data:
        raise DataError("SmoothQuantModifier runs data through the model. Give a dataset, or leave it out.")
    if any(found) and pipeline == "data_free":
        raise DataError(
            "SmoothQuantModifier runs data through the model, so the recipe cannot be run data_free. Leave the "
            "pipeline out."
        )
    return found


def _unmatched(model: nn.Module, modifier: SmoothQuantModifier) -> list[str]:
    """What of a recipe names nothing in the model."""
    named = list(model.named_modules())
    said = {
        "targets": modifier.targets,
        "ignore": modifier.ignore,
        "mappings": [each for pair in modifier.mappings for some in pair for each in some],
    }
    return [
        f"SmoothQuantModifier.{field_}: '{text}' matches no module of this model."
        for field_, texts in said.items()
        for text in texts
        if text not in LEFT_ALONE and not any(Pattern.of(text).means(name, module) for name, module in named)
    ]


def smooth(
    model: nn.Module,
    plan: Plan,
    modifier: SmoothQuantModifier,
    batches: Sequence[Batch],
    *,
    on_step: OnStep = silent,
    ranks: Ranks | None = None,
    **streaming: Any,
) -> Smoothing:
    """Even out the input channels of a plan's layers, block by block. `streaming` is that of `Calibration`."""

    def showing(_: str, what: str, done: int, total: int) -> None:
        on_step("smoothing", what, done, total)

    layers = smoothed_layers(plan, modifier)
    blocks = plan.blocks
    work = _Smoother(model, layers, batches, list(blocks), showing, None, ranks or Ranks(), **streaming)
    work.modifier = modifier
    return work.smooth()


class _Smoother(Calibration):
    modifier: SmoothQuantModifier

    def smooth(self) -> Smoothing:
        """Even out the channels of all blocks."""
        self._found = Smoothing()
        self._known: dict[_Kind, _Spec | None] = {}
        self._owners = Counter(id(each) for module in self.model.modules() for each in module._parameters.values())
        units = [unit for unit in units_of(self.model, self.layers, self.blocks) if unit.name in self.blocks]
        with torch.no_grad(), evaluating(self.model), without_cache(self.model), self._masks.following():
            if units:
                self._through(units)
        if not self._found.inputs and not self._found.notes:
            self._found.notes.append(
                "SmoothQuantModifier: nothing could be smoothed. No norm or layer was found whose channels go into "
                "layers with integer inputs and nowhere else."
            )
        return self._found

    def _through(self, units: Sequence[Unit]) -> None:
        left = {unit.name: unit for unit in self._with_finished(units)}
        count = len(self.batches)
        twin = count  # the first batch once more, through what has been smoothed
        modules = {unit.name: unit.module for unit in left.values()}
        forward = partial(self._twice, count)
        passes = self._lockstep(modules, forward, count + 1 if count else 0)
        with passes.running():
            for name, batches in passes.steps():
                unit = left.pop(name, None)
                self._give_up()
                if self.weights is not None:
                    self.weights.fetch(modules[name])
                own = [each for each in batches if each != twin]
                is_same = twin not in batches or _are_alike(passes.arguments(0), passes.arguments(twin))
                if not all(self.ranks.gather(is_same and (twin in batches) == (0 in batches))):
                    self._undo(name)
                    break
                if unit is None or not unit.layers:
                    if not left:
                        break
                    for batch in batches:
                        passes.go_on(batch)
                    continue
                links = self._links_of(unit, passes, own)
                sees = self._show(unit, links, passes, own, passes_in_all=len(modules), is_last=not left)
                self._apply(links, sees)
                if not left:
                    break
                if twin in batches:
                    passes.go_on(twin)
        self._give_up()

    def _twice(self, count: int, number: int) -> None:
        """The first batch is run again, last."""
        self._forward(number % count, is_copied=True)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def _show(
        self,
        unit: Unit,
        links: Sequence[Link],
        passes: LockStep,
        batches: Sequence[int],
        *,
        passes_in_all: int,
        is_last: bool,
    ) -> dict[str, Tensor]:
        """The largest magnitude of each input channel of the layers that are first of their links, on all ranks."""
        loudest: dict[str, Tensor] = {}

        def looking(name: str) -> See:
            def look(shown: Shown) -> None:
                now_C = shown.once("loudest channels", lambda: _loudest(shown))
                if now_C is not None:
                    loudest[name] = torch.maximum(loudest[name], now_C) if name in loudest else now_C

            return look

        taps = [Tap(self.model.get_submodule(link.layers[0]), "input", looking(link.layers[0])) for link in links]
        with tapped(taps, self._masks):
            for batch in batches:
                with self._showing(batch, unit.name, passes=passes_in_all):
                    (passes.rehearse if is_last else passes.go_on)(batch)
        if self.ranks.count > 1:
            everyone = self.ranks.gather({name: each.tolist() for name, each in loudest.items()})
            names = {name for each in everyone for name in each}
            loudest = {
                name: torch.tensor([each[name] for each in everyone if name in each]).amax(dim=0) for name in names
            }
        return loudest

    # ---- what gives layers their channels ----------------------------------------------------------------------------

    def _links_of(self, unit: Unit, passes: LockStep, batches: Sequence[int]) -> list[Link]:
        """The links of a block, which the first batch that waits for it shows to all ranks."""
        found: list[Link] = []

        def find() -> Words:
            found.extend(self._tried(unit, partial(passes.rehearse, batches[0])))
            return [[each.giver, list(each.layers), each.rows and asdict(each.rows)] for each in found]

        who = self.ranks.first_with(bool(batches))
        words: Words = self.ranks.told_by(who, find)
        if who != self.ranks.rank:
            found = [Link(giver, tuple(layers), rows and Rows(**rows)) for giver, layers, rows in words]
        return [each for each in found if self._is_meant(each)]

    def _is_meant(self, link: Link) -> bool:
        """Whether the recipe's mappings, if it has any, name a link."""
        modules = {name: self.model.get_submodule(name) for name in (link.giver, *link.layers)}

        def are_named(names: Iterable[str], by: Sequence[str]) -> bool:
            patterns = [Pattern.of(each) for each in by]
            return all(any(each.means(name, modules[name]) for each in patterns) for name in names)

        pairs = self.modifier.mappings
        return not pairs or any(are_named(link.layers, few) and are_named([link.giver], one) for few, one in pairs)

    def _tried(self, unit: Unit, rehearse: Callable[[], object]) -> list[Link]:
        """The links of a block that hold. What was found in one block is tried first in the next ones, all at once."""
        with _noting(unit.name, unit.module) as noted:
            rehearse()
        trial = _Trial(self.model, unit.module, rehearse, noted.output)
        kinds = self._offered(unit, noted)
        for kind, offers in kinds.items():
            if kind not in self._known:
                specs = dict.fromkeys(_spec(link) for links in offers for link in links)
                held = (spec for spec in specs if trial.holds(_chosen(offers, spec)))
                self._known[kind] = next(held, None)
        found = [link for kind, offers in kinds.items() for link in _chosen(offers, self._known[kind])]
        return found if trial.holds(found) else [link for link in found if trial.holds([link])]

    def _offered(self, unit: Unit, noted: _Noted) -> dict[_Kind, list[list[Link]]]:
        """What may give the layers of a block their inputs, likely ones first: for each set of layers with one input,
        by what they are called.
        """
        wanted = {layer.name for layer in unit.layers}
        offered: dict[_Kind, list[list[Link]]] = {}
        for names in noted.sharing_an_input():
            is_theirs = any(name in wanted for name in names) and all(self._may_change(name, noted) for name in names)
            if is_theirs:
                offered.setdefault(tuple(map(_called, names)), []).append(self._links(names, wanted, noted))
        return offered

    def _links(self, names: Sequence[str], wanted: set[str], noted: _Noted) -> list[Link]:
        columns = noted.modules[names[0]].in_features
        norm = noted.norm_before(names[0])
        if norm is not None:
            weight = noted.modules[norm]._parameters.get("weight")
            is_plain = weight is not None and tuple(weight.shape) == (columns,) and self._may_change(norm, noted)
            return [Link(norm, tuple(names))] if is_plain else []
        if not wanted.issuperset(names):
            return []
        return [
            Link(giver, tuple(names), rows)
            for giver in noted.linear_before(names[0])[:_TRIED]
            if giver not in names and self._may_change(giver, noted)
            for rows in rows_that_fit(noted.modules[giver].out_features, columns, noted.heads)
        ]

    def _may_change(self, name: str, noted: _Noted) -> bool:
        """Whether a module's weight is its own, and met once."""
        module = noted.modules[name]
        own = [each for each in module._parameters.values() if each is not None]
        return (
            noted.calls[name] == 1
            and not is_module_quantized(module)
            and not any(True for _ in module.children())
            and set(module._parameters) <= {"weight", "bias"}
            and all(self._owners[id(each)] == 1 and each.is_floating_point() for each in own)
        )

    # ---- what is done ------------------------------------------------------------------------------------------------

    def _apply(self, links: Sequence[Link], loudest: Mapping[str, Tensor]) -> None:
        for link in links:
            if link.layers[0] not in loudest:  # no token came by
                continue
            loudest_C = loudest[link.layers[0]].cpu()
            heaviest_C = torch.stack([_heaviest(self.model, name) for name in link.layers]).amax(dim=0)
            row_C = None if link.rows is None else link.rows.of(len(loudest_C))
            powers_C = exponents(loudest_C, heaviest_C, strength=self.modifier.strength, row_C=row_C)
            changed = changed_by(self.model, link, powers_C)
            if not all(bool(torch.isfinite(each).all()) for _, _, each in changed):  # of few numbers, as fp16 has
                continue
            for module, key, value in changed:
                before = getattr(module, key)
                setattr(module, key, nn.Parameter(value, requires_grad=before.requires_grad))
                if self.weights is not None:
                    self.weights.moved(module)
            done = Smoothing(
                dict.fromkeys(link.layers, powers_C), {link.giver: -_of_giver(self.model, link, powers_C)}
            )
            self._found.add(done)

    def _undo(self, name: str) -> None:
        """Give all weights their numbers again."""
        for dim, powers in ((1, self._found.inputs), (0, self._found.outputs)):
            for each, powers_of_two in powers.items():
                module = self.model.get_submodule(each)
                for key, value in list(_parameters(module))[: None if dim == 0 else 1]:
                    restored = times_two_to(value.detach(), -powers_of_two, dim=dim)
                    setattr(module, key, nn.Parameter(restored, requires_grad=value.requires_grad))
                if self.weights is not None:
                    self.weights.moved(module)
        self._found = Smoothing(
            notes=[f"{name}: is given other numbers when what comes before it is smoothed, so nothing is smoothed."]
        )


# ---- links -----------------------------------------------------------------------------------------------------------

_Kind = tuple[str, ...]
"""What layers with one input are called, whichever block they are in."""
_Spec = tuple[str, Rows | None]


def _called(name: str) -> str:
    """A name in which the numbers of blocks and experts do not count; those of layers, as in fc1, do."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def _spec(link: Link) -> _Spec:
    return _called(link.giver), link.rows


def _chosen(offers: Sequence[Sequence[Link]], spec: _Spec | None) -> list[Link]:
    """The links of one kind, of those that are nearest where there are several."""
    found = (next((link for link in links if _spec(link) == spec), None) for links in offers)
    return [link for link in found if link is not None]


def changed_by(model: nn.Module, link: Link, powers_C: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
    """What the parameters of a link's modules become: module, name of the parameter, its new value."""
    giver = model.get_submodule(link.giver)
    powers_R = _of_giver(model, link, powers_C)
    found = [(giver, key, times_two_to(value.detach(), -powers_R, dim=0)) for key, value in _parameters(giver)]
    for name in link.layers:
        module = model.get_submodule(name)
        assert isinstance(module.weight, Tensor)
        found.append((module, "weight", times_two_to(module.weight.detach(), powers_C, dim=1)))
    return found


def _of_giver(model: nn.Module, link: Link, powers_C: Tensor) -> Tensor:
    """The powers of the rows that give the channels; zero for rows that give none."""
    weight = model.get_submodule(link.giver).weight
    assert isinstance(weight, Tensor)
    return by_rows(powers_C, None if link.rows is None else link.rows.of(len(powers_C)), len(weight))


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weight, and the bias if there is one."""
    yield from ((key, each) for key in ("weight", "bias") if (each := module._parameters.get(key)) is not None)


# ---- one rehearsal ---------------------------------------------------------------------------------------------------


@dataclass
class _Noted:
    """What was seen of a block while it was rehearsed: who was given what, and made what, in the order of calls."""

    modules: dict[str, Any] = field(default_factory=dict)
    """Those with parameters of their own, by name."""
    calls: Counter[str] = field(default_factory=Counter)
    given: list[tuple[str, Tensor, int]] = field(default_factory=list)
    made: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    heads: tuple[int, ...] = ()
    """Sizes that modules say their heads have."""
    output: list[Tensor] = field(default_factory=list)
    """Of the block."""

    def sharing_an_input(self) -> list[list[str]]:
        """Linear layers that are given one tensor, where everybody with parameters who is given it is one."""
        groups: dict[tuple[int, int], list[str]] = {}
        for name, value, version in self.given:
            names = groups.setdefault((id(value), version), [])
            if name not in names:
                names.append(name)
        return [names for names in groups.values() if all(isinstance(self.modules[name], nn.Linear) for name in names)]

    def norm_before(self, layer: str) -> str | None:
        """The module, no linear layer, whose output is what a layer is given."""
        value, version = next((value, version) for name, value, version in self.given if name == layer)
        makers = [name for name, (made, then) in self.made.items() if made is value and then == version]
        return next((name for name in makers if not isinstance(self.modules[name], nn.Linear)), None)

    def linear_before(self, layer: str) -> list[str]:
        """Linear layers that were called before a layer, the last ones first."""
        order = [name for name, *_ in self.given]
        before = [name for name in order[: order.index(layer)] if isinstance(self.modules[name], nn.Linear)]
        return list(dict.fromkeys(reversed(before)))


@contextmanager
def _noting(block_name: str, block: nn.Module) -> Iterator[_Noted]:
    """While inside, the block may be run, once."""
    noted = _Noted()

    def note_input(name: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = first_tensor((*args, *keywords.values()))
        noted.calls[name] += 1
        if value is not None:
            noted.given.append((name, value, _version(value)))

    def note_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            noted.made[name] = (output, _version(output))

    named = [(f"{block_name}.{local}" if local else block_name, module) for local, module in block.named_modules()]
    noted.modules = {name: each for name, each in named if any(one is not None for one in each._parameters.values())}
    heads = (getattr(module, "head_dim", None) for _, module in named)
    noted.heads = tuple(dict.fromkeys(each for each in heads if isinstance(each, int) and each > 0))
    with ExitStack() as stack, _keeping_output(block, noted.output):
        for name, module in noted.modules.items():
            hook = module.register_forward_pre_hook(partial(note_input, name), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(partial(note_output, name)).remove)
        yield noted


@contextmanager
def _keeping_output(block: nn.Module, into: list[Tensor]) -> Iterator[None]:
    """While inside, the tensors that the block gave last are in the list."""

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        into[:] = [each for each in tree_leaves(output) if isinstance(each, Tensor)]

    hook = block.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class _Trial:
    """Whether a block says what it is `expected` to when channels are scaled there and back."""

    model: nn.Module
    block: nn.Module
    rehearse: Callable[[], object]
    expected: Sequence[Tensor]

    def holds(self, links: Sequence[Link]) -> bool:
        """Whether it does for some links at once."""
        if not links:
            return True
        random = torch.Generator().manual_seed(0)
        changed: list[tuple[nn.Module, str, nn.Parameter]] = []
        output: list[Tensor] = []
        try:
            for link in links:
                powers_C = self._powers(link, random)
                for module, key, value in changed_by(self.model, link, powers_C):
                    changed.append((module, key, getattr(module, key)))
                    module._parameters[key] = nn.Parameter(value, requires_grad=False)
            with _keeping_output(self.block, output):
                self.rehearse()
        finally:
            for module, key, before in reversed(changed):
                module._parameters[key] = before
        return _are_alike(output, self.expected)

    def _powers(self, link: Link, random: torch.Generator) -> Tensor:
        columns = int(getattr(self.model.get_submodule(link.layers[0]), "in_features"))  # noqa: B009
        row_C = torch.arange(columns) if link.rows is None else link.rows.of(columns)
        return torch.randint(-_TRIAL, _TRIAL + 1, (int(row_C.max()) + 1,), generator=random)[row_C]


def _are_alike(some: Any, others: Any) -> bool:
    """Whether all tensors of two values are the same, bit for bit."""
    tensors, theirs = ([each for each in tree_leaves(value) if isinstance(each, Tensor)] for value in (some, others))
    return len(tensors) == len(theirs) and all(map(torch.equal, tensors, theirs))


def _heaviest(model: nn.Module, name: str) -> Tensor:
    """The largest magnitude of each column of a layer's weight."""
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight.detach().abs().amax(dim=0).float().cpu()


def _loudest(shown: Shown) -> Tensor | None:
    """The largest magnitude of each channel; None if no token counts."""
    value_TC = shown.value.reshape(-1, shown.value.shape[-1])
    if shown.mask is not None:
        value_TC = value_TC[shown.mask.reshape(-1).bool()]
    return value_TC.abs().amax(dim=0).float() if len(value_TC) else None


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
