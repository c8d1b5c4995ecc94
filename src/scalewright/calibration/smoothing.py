"""Loud input channels of layers are made quieter, and nothing that the model says changes by it.

What gives a layer its input, channel by channel, is found by trying: the norm whose output it is, or a layer before it
between whose output and this input all is linear (values and what attends to them, the factor of a gated MLP). In one
rehearsal of a block the channels are scaled by powers of two drawn at random, there and back; only what leaves the
block's output bit for bit as it was is believed. And one batch is brought through the model twice, as it was and
smoothed, to see that they meet each block, and the output head, with the same numbers.

float16 has so few exponents that small numbers lose digits when they are halved. Blocks of it are rehearsed in float32,
and the two passes need not agree in all digits.

A module whose weight is shared, that is called more than once, or is quantised already is left alone. So is a norm
whose output goes anywhere but into linear layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor, nn

from scalewright.calibration.distributed import Ranks
from scalewright.calibration.links import (
    Change,
    Kind,
    Link,
    Lost,
    Noted,
    Spec,
    Trial,
    are_alike,
    called,
    changes_of,
    chosen,
    in_single,
    is_float16,
    noting,
    powers_of_giver,
    spec_of,
)
from scalewright.calibration.lockstep import Enough, LockStep
from scalewright.calibration.passes import ending_at, evaluating, last_head, without_cache
from scalewright.calibration.pipelines import Batch, Calibration, OnStep, silent
from scalewright.calibration.plan import Plan
from scalewright.calibration.steps import Unit, units_of
from scalewright.calibration.taps import Tap, tapped
from scalewright.calibration.targets import Pattern
from scalewright.errors import DataError, RecipeError
from scalewright.modifiers import Modifier, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.shown import See, Shown
from scalewright.numerics.smoothing import Rows, exponents, rows_that_fit

_MANY_BITS = 8  # of weights whose columns may become uneven
_TRIED = 4  # layers in front of another that are tried, the nearest first
_SLACK = 2.0**-5  # by which float16 may differ when a batch goes by twice, of its norm: others do not at all

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
    work.delicate = {
        layer.name
        for layer in plan.layers
        if layer not in layers and layer.scheme.weights is not None and layer.scheme.weights.num_bits < _MANY_BITS
    }
    return work.smooth()


class _Smoother(Calibration):
    modifier: SmoothQuantModifier
    delicate: set[str]
    """Layers of few bits that gain nothing: beside them nothing is smoothed, because they would pay for it."""

    def smooth(self) -> Smoothing:
        """Even out the channels of all blocks."""
        self._found = Smoothing()
        self._known: dict[Kind, Spec | None] = {}
        self._slack = _SLACK if any(map(is_float16, self.model.parameters())) else 0.0
        self._log: list[tuple[Change, Lost]] = []
        owners = Counter(id(each) for module in self.model.modules() for each in module._parameters.values())
        self._unshared = {
            module
            for module in self.model.modules()
            if all(owners[id(each)] == 1 for each in module._parameters.values() if each is not None)
        }
        units = [unit for unit in units_of(self.model, self.layers, self.blocks) if unit.name in self.blocks]
        with torch.no_grad(), evaluating(self.model), without_cache(self.model), self._masks.following():
            if units:
                self._through(units)
        if not self._found.inputs and not self._found.notes:
            self._found.notes.append(
                "SmoothQuantModifier: nothing could be smoothed. No norm or layer was found whose channels go into "
                "layers with integer inputs and nowhere else. Leave it out (quality fast does), or use scales for each "
                "token (W8A8_DYNAMIC)."
            )
        return self._found

    def _through(self, units: Sequence[Unit]) -> None:
        left = {unit.name: unit for unit in self._with_finished(units)}
        count = len(self.batches)
        twin = count  # the first batch once more, through what has been smoothed
        modules = {unit.name: unit.module for unit in left.values()}
        forward = partial(self._twice, count)
        passes = self._lockstep(modules, forward, count + 1 if count else 0)
        with passes.running(), self._ending(list(modules.values()), (0, twin)) as ends:
            for name, batches in passes.steps():
                unit = left.pop(name, None)
                self._give_up()
                if self.weights is not None:
                    self.weights.fetch(modules[name])
                own = [each for each in batches if each != twin]
                is_same = (twin in batches) == (0 in batches)
                if is_same and twin in batches:
                    is_same = are_alike(passes.arguments(0), passes.arguments(twin), slack=self._slack)
                if not all(self.ranks.gather(is_same)):
                    self._undo(f"{name}: is given other numbers when what comes before it is smoothed")
                    break
                if unit is not None and unit.layers:
                    links = self._links_of(unit, passes, own)
                    sees = self._show(unit, links, passes, own, passes_in_all=len(modules), is_last=not left)
                    self._apply(links, sees)
                else:
                    self._go_on(passes, own if left else own[:1])
                self._go_on(passes, [each for each in batches if each == twin])
                if not left:
                    if not all(self.ranks.gather(are_alike(ends.get(0), ends.get(twin), slack=self._slack))):
                        self._undo(f"{type(self.model).__name__}: says something else when it is smoothed")
                    break
        self._give_up()

    def _go_on(self, passes: LockStep, batches: Iterable[int]) -> None:
        """Let some passes run what they wait for, and then on to the next block, or the output head."""
        for batch in batches:
            with suppress(Enough):
                passes.go_on(batch)

    @contextmanager
    def _ending(self, modules: Sequence[nn.Module], batches: Sequence[int]) -> Iterator[dict[int, Any]]:
        """While inside, passes end at the output head, which is behind the modules. By their numbers, what some of them
        give it, or whoever called the model if there is none.
        """
        ends: dict[int, Any] = {}

        def keep(_: nn.Module, *values: Any) -> None:
            if self._running in batches:
                ends[self._running] = values[-1]

        head = last_head(self.model, modules)
        find = self.model.register_forward_hook if head is None else head.register_forward_pre_hook
        hook = find(keep)
        try:
            with ending_at(head):
                yield ends
        finally:
            hook.remove()

    def _enter(self, number: int) -> None:
        super()._enter(number)
        self._running = number

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
                    if is_last and batch:
                        passes.rehearse(batch)
                    else:  # the first one is run as it is, to its end
                        self._go_on(passes, [batch])
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
        with in_single(unit.module):
            return self._tried_in_single(unit, rehearse)

    def _tried_in_single(self, unit: Unit, rehearse: Callable[[], object]) -> list[Link]:
        with noting(unit.name, unit.module) as noted:
            rehearse()
        trial = Trial(self.model, unit.module, rehearse, noted.left)
        kinds = self._offered(unit, noted)
        for kind, offers in kinds.items():
            if kind not in self._known:
                specs = dict.fromkeys(spec_of(link) for links in offers for link in links)
                held = next((spec for spec in specs if trial.holds(chosen(offers, spec))), None)
                if held is None or trial.matters(chosen(offers, held)):
                    self._known[kind] = held
        found = [link for kind, offers in kinds.items() for link in chosen(offers, self._known.get(kind))]
        return list(trial.those_that_hold(found))

    def _offered(self, unit: Unit, noted: Noted) -> dict[Kind, list[list[Link]]]:
        """What may give the layers of a block their inputs, likely ones first: for each set of layers with one input,
        by what they are called.
        """
        wanted = {layer.name for layer in unit.layers}
        offered: dict[Kind, list[list[Link]]] = {}
        for names in noted.sharing_an_input():
            is_theirs = any(name in wanted for name in names) and self.delicate.isdisjoint(names)
            is_theirs = is_theirs and all(self._may_change(name, noted) for name in names)
            if is_theirs:
                offered.setdefault(tuple(map(called, names)), []).append(self._links(names, wanted, noted))
        return offered

    def _links(self, names: Sequence[str], wanted: set[str], noted: Noted) -> list[Link]:
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

    def _may_change(self, name: str, noted: Noted) -> bool:
        """Whether a module's weight is its own, and met once."""
        module = noted.modules[name]
        return (
            noted.calls[name] == 1
            and not is_module_quantized(module)
            and not any(True for _ in module.children())
            and set(module._parameters) <= {"weight", "bias"}
            and module in self._unshared
            and all(each is None or each.is_floating_point() for each in module._parameters.values())
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
            changes = [(change, change.done()) for change in changes_of(self.model, link, powers_C)]
            if not all(bool(value.abs().amax().isfinite()) for _, value in changes):  # of few exponents, as fp16 has
                continue
            for change, value in changes:
                before = change.now.detach()
                self._put(change, value)
                self._log.append((change, Lost.by(change, before)))
            done = Smoothing(
                dict.fromkeys(link.layers, powers_C), {link.giver: -powers_of_giver(self.model, link, powers_C)}
            )
            self._found.add(done)

    def _undo(self, why: str) -> None:
        """Give all weights their numbers again."""
        for change, lost in reversed(self._log):
            self._put(change, lost.found_in(change.undone()))
        self._found = Smoothing(notes=[f"{why}, so nothing is smoothed."])

    def _put(self, change: Change, value: Tensor) -> None:
        setattr(change.module, change.key, nn.Parameter(value, requires_grad=change.now.requires_grad))
        if self.weights is not None:
            self.weights.moved(change.module)


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
