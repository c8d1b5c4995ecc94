"""How data reaches observers, and when layers are rounded: data-free, basic, sequential.

- `data_free`: weights are all there is to see. No forward pass is run.
- `basic`: one forward pass for each batch through the whole model as it is; then every layer is quantised.
- `sequential`: block by block in lock step. A block is calibrated and quantised, and the next one sees what it will
  really get.

Passes end after the last layer that is to be quantised: what comes behind is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scalewright.calibration.lockstep import Call, LockStep
from scalewright.calibration.taps import Masks, Tap, tapped
from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer
from scalewright.observers.fusion import fuse_weight_observers

PIPELINES = ("auto", "data_free", "basic", "sequential")

Batch = Mapping[str, Any]
OnStep = Callable[[str, str, int, int], None]
"""What is being done, to what, how many of how many are done."""


def silent(phase: str, what: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass
class Calibration:
    """A model, the layers of it that are to be quantised, and the data to see them at work."""

    model: nn.Module
    layers: list[WatchedLayer]
    batches: Sequence[Batch] = ()
    blocks: list[str] = field(default_factory=list)
    on_step: OnStep = silent
    masks: Masks = field(default_factory=Masks)

    def run(self, pipeline: str) -> list[QuantizedLayer]:
        """Quantise all layers. No hook and no observer stays behind, whatever happens."""
        with torch.no_grad(), _evaluating(self.model), _without_cache(self.model):
            return {"data_free": self._data_free, "basic": self._basic, "sequential": self._sequential}[pipeline]()

    # ---- the three of them -------------------------------------------------------------------------------------------

    def _data_free(self) -> list[QuantizedLayer]:
        with self._watched(self.layers):
            return self._finish(self.layers)

    def _basic(self) -> list[QuantizedLayer]:
        with self._watched(self.layers):
            with self._tapped(self.layers), self._stopping_early():
                for i, batch in enumerate(self.batches):
                    self.on_step("calibrating", f"batch {i + 1}", i, len(self.batches))
                    self._show_masks(i)
                    self._forward(batch)
            return self._finish(self.layers)

    def _sequential(self) -> list[QuantizedLayer]:
        blocks = {name: self.model.get_submodule(name) for name in self.blocks}
        inside = {name: [each for each in self.layers if each.name.startswith(f"{name}.")] for name in blocks}
        within = {id(each) for layers in inside.values() for each in layers}
        outside = [each for each in self.layers if id(each) not in within]
        early = [each for each in outside if isinstance(each.module, nn.Embedding)]
        late = [each for each in outside if not isinstance(each.module, nn.Embedding)]
        done: list[QuantizedLayer] = []
        if early:
            with self._watched(early):
                done += self._finish(early)
        last = max((i for i, name in enumerate(blocks) if inside[name]), default=-1)
        lockstep = LockStep(
            blocks, lambda i: self._forward(self.batches[i]), len(self.batches), entering=self._show_masks
        )
        finished: set[str] = set()
        with self._watched(late), self._tapped(late), lockstep.running():
            for number, (block, calls) in enumerate(lockstep.steps()):
                self.on_step("calibrating", block, min(number, len(blocks)), len(blocks))
                layers = [] if block in finished else inside[block]
                done += self._through_block(lockstep, calls, layers)
                finished.add(block)
                if not late and len(finished) > last and all(name in finished for name in blocks if inside[name]):
                    break
            done += self._finish(late)
        return done

    def _through_block(self, lockstep: LockStep, calls: list[Call], layers: list[WatchedLayer]) -> list[QuantizedLayer]:
        """Calibrate and quantise a block on all batches, and send them on through what it has become."""
        done: list[QuantizedLayer] = []
        if layers:
            with self._watched(layers):
                if any(each.wants_data for each in layers):
                    with self._tapped(layers):
                        for call in calls:
                            self._show_masks(call.batch)
                            lockstep.run_block(call.copied())
                done = self._finish(layers)
        for call in calls:
            lockstep.answer(call, lockstep.run_block(call))
        return done

    # ---- parts -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, layers: Sequence[WatchedLayer]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.stop)
                layer.start()
            fuse_weight_observers(self.model)
            yield

    def _tapped(self, layers: Iterable[WatchedLayer]) -> Any:
        taps = [Tap(layer.module, where, see) for layer in layers for where, see in layer.sees()]
        return tapped(taps, self.masks)

    def _show_masks(self, batch: int) -> None:
        self.masks.set_from(self.batches[batch])

    def _forward(self, batch: Batch) -> None:
        try:
            self.model(**batch)
        except _Done:
            pass

    @contextmanager
    def _stopping_early(self) -> Iterator[None]:
        """End each pass after the last block that has layers to quantise, if all of them are in blocks."""
        names = [layer.name for layer in self.layers]
        with_layers = [block for block in self.blocks if any(name.startswith(f"{block}.") for name in names)]
        are_all_inside = all(any(name.startswith(f"{block}.") for block in with_layers) for name in names)
        if not with_layers or not are_all_inside:
            yield
            return

        def stop(*_: Any) -> None:
            raise _Done

        hook = self.model.get_submodule(with_layers[-1]).register_forward_hook(stop)
        try:
            yield
        finally:
            hook.remove()

    def _finish(self, layers: Sequence[WatchedLayer]) -> list[QuantizedLayer]:
        for layer in layers:
            layer.observe_weight()
        done = []
        for i, layer in enumerate(layers):
            self.on_step("quantising", layer.name, i, len(layers))
            done.append(layer.finish())
        return done


class _Done(Exception):
    """Nothing behind this point is needed."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off while inside."""
    training = {module for module in model.modules() if module.training}
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A kv cache would only cost memory, and a block that is run twice would fill it twice."""
    configs = [model.config] if hasattr(model, "config") else []
    configs += [
        getattr(each, name) for each in configs for name in ("text_config", "decoder", "encoder") if hasattr(each, name)
    ]
    before = [(each, each.use_cache) for each in configs if hasattr(each, "use_cache")]
    for each, _ in before:
        each.use_cache = False
    try:
        yield
    finally:
        for each, use_cache in before:
            each.use_cache = use_cache
