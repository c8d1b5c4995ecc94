"""What is calibrated and quantised at one time: blocks of a model, or the steps that a block goes in.

A step is the layers of a block that are called one after the other with the same input: queries, keys and values, then
the projection of what they attend to, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from scalewright.calibration.experts import UnfusedExperts
from scalewright.calibration.streams import NotedStreams
from scalewright.calibration.taps import first_tensor
from scalewright.modifiers.layers import WatchedLayer
from scalewright.numerics.layout import strategy_of
from scalewright.observers.fusion import FUSED_LAYER_NAMES

Call = tuple[WatchedLayer, Tensor | None, int]
"""A layer, what it was given, and how often that had been changed in place by then; None if it was not called."""


@dataclass(frozen=True)
class Unit:
    """What is calibrated and quantised at one time: a block with its layers, or a layer that is in none."""

    name: str
    module: nn.Module
    layers: list[WatchedLayer]
    step_of: nn.Module | None = None
    """The block of which it is a step: layers that are given the same input, of which `module` is the first."""
    share: float = 1.0
    """How much of a pass over a block it is."""

    @property
    def is_seen_by_its_input(self) -> bool:
        """Whether what its module is given is all there is to see, so that it need not be run."""
        is_step = self.step_of is not None or all(layer.module is self.module for layer in self.layers)
        return is_step and all(layer.is_seen_by_its_input for layer in self.layers)


def units_of(model: nn.Module, layers: Sequence[WatchedLayer], blocks: Sequence[str]) -> list[Unit]:
    """The units that have layers to quantise, in the order of the model.

    Layers that share a scale, and the experts of a layer, are never torn apart.
    """
    bonds = _bonds(model, {layer.name for layer in layers})
    found: dict[str, list[WatchedLayer]] = {}
    for layer in layers:
        home = next((block for block in blocks if is_within(layer.name, block)), layer.name)
        home = next((bond for bond in bonds if bond != home and is_within(home, bond)), home)
        found.setdefault(home, []).append(layer)
    return [Unit(name, model.get_submodule(name), own) for name, own in found.items()]


def steps_of(model: nn.Module, unit: Unit, rehearse: Callable[[], object]) -> list[Unit]:
    """The steps that a unit goes in, in the order that a batch meets them; none if it goes as a whole.

    `rehearse` runs the unit once. A unit with a layer that is called again goes as a whole: what it is given then comes
    from itself, and would not be seen before it is quantised.
    """
    goes_in_steps = any(layer.goes_in_steps for layer in unit.layers)
    if not goes_in_steps or unit.step_of is not None or unit.is_seen_by_its_input:
        return []
    if not all(layer.is_seen_by_its_input for layer in unit.layers):
        return []
    noted = NotedStreams()
    with _noting_inputs(unit.layers) as calls, noted.noting(unit.module, unit.layers):
        rehearse()
    names = {layer.name for layer in unit.layers}
    bonds = [bond for bond in _bonds(model, names) if is_within(bond, unit.name)]
    torn = [bond for bond in bonds if isinstance(model.get_submodule(bond), UnfusedExperts)]
    counts = Counter(layer.name for layer, *_ in calls if not any(is_within(layer.name, bond) for bond in torn))
    for layer in unit.layers:
        layer.is_called_again = counts[layer.name] > 1
    if any(layer.is_called_again for layer in unit.layers):
        return []
    for layer in unit.layers:
        within = noted.module_of(layer)
        layer.stream = None if within is None else f"{unit.name}.{within}".rstrip(".")
    steps = _by_input(model, unit, calls, torn)
    # Layers that share a scale and not their input cannot be taken one after the other.
    torn += [bond for bond in bonds if bond not in torn and _is_torn(bond, steps)]
    steps = _by_input(model, unit, calls, torn)
    return [] if len(steps) < 2 else [replace(step, share=1 / len(steps)) for step in steps]


StepsInWords = dict[str, Any]
"""The steps of a unit as plain data, for other ranks, which need not rehearse it."""


def steps_in_words(unit: Unit, steps: Sequence[Unit]) -> StepsInWords:
    """What `steps_of` has found out of a unit."""
    return {
        "again": [layer.name for layer in unit.layers if layer.is_called_again],
        "streams": {layer.name: layer.stream for layer in unit.layers if layer.stream is not None},
        "steps": [[step.name, [layer.name for layer in step.layers], step.step_of is not None] for step in steps],
    }


def steps_from_words(model: nn.Module, unit: Unit, words: StepsInWords) -> list[Unit]:
    """The same on another rank."""
    layers = {layer.name: layer for layer in unit.layers}
    for layer in unit.layers:
        layer.is_called_again = layer.name in words["again"]
        layer.stream = words["streams"].get(layer.name)
    return [
        Unit(
            name,
            model.get_submodule(name),
            [layers[each] for each in names],
            step_of=unit.module if is_step else None,
            share=1 / len(words["steps"]),
        )
        for name, names, is_step in words["steps"]
    ]


def _by_input(model: nn.Module, unit: Unit, calls: Sequence[Call], whole: Sequence[str]) -> list[Unit]:
    """Layers that are called one after the other with the same input make a step; those `whole` modules do, too."""
    steps: list[Unit] = []
    left = {layer.name: layer for layer in unit.layers}
    last: tuple[Tensor, int] | None = None
    for layer, value, version in _with_uncalled(calls, unit.layers):
        if layer.name not in left:
            continue
        bond = next((each for each in whole if is_within(layer.name, each)), None)
        members = [name for name in left if bond is not None and is_within(name, bond)] or [layer.name]
        layers = [left.pop(name) for name in members]
        if bond is not None:
            steps.append(Unit(bond, model.get_submodule(bond), layers))
        elif value is not None and last is not None and value is last[0] and version == last[1]:
            steps[-1].layers.extend(layers)
        else:
            steps.append(Unit(layer.name, layer.module, layers, step_of=unit.module))
        last = (value, version) if bond is None and value is not None else None
    return steps


def _with_uncalled(calls: Sequence[Call], layers: Sequence[WatchedLayer]) -> list[Call]:
    """The calls, and layers that were not called in front of the next ones: other batches may come to them there."""
    every = list(calls)
    called = {layer.name for layer, *_ in calls}
    following: str | None = None
    for layer in reversed(layers):
        if layer.name not in called:
            place = next((i for i, (each, *_) in enumerate(every) if each.name == following), len(every))
            every.insert(place, (layer, None, 0))
        following = layer.name
    return every


def _is_torn(bond: str, steps: Sequence[Unit]) -> bool:
    """Whether layers of a module that share a global scale are in several steps."""
    homes = {layer.name: step.name for step in steps for layer in step.layers}
    shares = {
        layer.name
        for step in steps
        for layer in step.layers
        if layer.scheme.weights is not None and strategy_of(layer.scheme.weights) == "tensor_group"
    }
    return any(
        len({homes[name] for each in fused if (name := f"{bond}.{each}".lstrip(".")) in shares}) > 1
        for fused in FUSED_LAYER_NAMES
    )


@contextmanager
def _noting_inputs(layers: Iterable[WatchedLayer]) -> Iterator[list[Call]]:
    """A list of the layers that are called while inside, in their order, with what they are given."""
    calls: list[Call] = []

    def note(layer: WatchedLayer, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = first_tensor((*args, *keywords.values()))
        if value is not None:
            calls.append((layer, value, 0 if value.is_inference() else value._version))

    with ExitStack() as stack:
        for layer in layers:
            hook = layer.module.register_forward_pre_hook(partial(note, layer), with_kwargs=True)
            stack.callback(hook.remove)
        yield calls


def _bonds(model: nn.Module, names: set[str]) -> list[str]:
    """The modules with layers that are quantised together or not at all, outermost first."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        or any(sum(f"{name}.{each}".lstrip(".") in names for each in fused) > 1 for fused in FUSED_LAYER_NAMES)
    ]


def is_within(name: str, outer: str) -> bool:
    """Whether a module is another or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")
