"""One pass over the data in which the inputs of layers are looked at, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scalewright.calibration.distributed import Ranks
from scalewright.calibration.passes import Route, evaluating, without_cache
from scalewright.calibration.pipelines import (
    Batch,
    Calibration,
    MetAgainError,
    OnStep,
    Visit,
    silent,
)
from scalewright.calibration.steps import Unit, is_within
from scalewright.calibration.taps import Tap, tapped
from scalewright.modifiers.shown import See

Begin = Callable[[], Mapping[str, tuple[nn.Module, See]]]
"""Gives modules by name, and who looks at what they are given. It is asked when a pass begins, or begins anew."""


def watch_inputs(
    model: nn.Module,
    begin: Begin,
    batches: Sequence[Batch],
    *,
    phase: str,
    on_step: OnStep = silent,
    ranks: Ranks | None = None,
    blocks: Sequence[str] = (),
    **streaming: Any,
) -> None:
    """Run the batches, and show what each of the modules is given to the one who looks at it.

    Of several `ranks` each runs its own share of the batches. Passes end at the last input that is needed. No hook
    stays behind, whatever happens. `phase` is what `on_step` is told that is being done. `streaming` is what
    `Calibration` needs if the model is not in memory, and `blocks` are what it then goes by.
    """

    def watching(_: str, what: str, done: int, total: int) -> None:
        on_step(phase, what, done, total)

    _Watching(model, [], batches, list(blocks), watching, None, ranks or Ranks(), **streaming).watch(begin)


class _Watching(Calibration):
    def watch(self, begin: Begin) -> None:
        if self.weights is not None:
            try:
                self._watch(begin(), by_units=True)
                return
            except MetAgainError:
                self._num_shown = 0
            self.weights.fetch(self.model)
        self._watch(begin(), by_units=False)

    def _watch(self, layers: Mapping[str, tuple[nn.Module, See]], *, by_units: bool) -> None:
        """`by_units`: all batches go through a block before the next, so that each is read once, and given up."""
        taps = [Tap(module, "input", see) for module, see in layers.values()]
        units = [Unit(name, module, []) for name, (module, _) in layers.items()]
        with (
            torch.no_grad(),
            evaluating(self.model),
            without_cache(self.model),
            self._masks.following(),
            tapped(taps, self._masks),
            Route(self.model, units).known() as route,
        ):
            if by_units:
                homes = {next((block for block in self.blocks if is_within(name, block)), name) for name in layers}
                order = [name for name, _ in self.model.named_modules() if name in homes]
                passed = self._with_finished([Unit(name, self.model.get_submodule(name), []) for name in order])
                self._walk(passed, self._visit(len(passed)))
            for i in range(0 if by_units else len(self.batches)):
                with self._showing(i, f"batch {i + 1} of {len(self.batches)}"), route.travelled():
                    self._pass(i)

    def _visit(self, passes: int) -> Visit:
        def visit(unit: Unit, run: Callable[[int], None], batches: Sequence[int], settle: Callable[[], None]) -> None:
            for batch in batches:
                with self._showing(batch, unit.name, passes=passes):
                    run(batch)
            settle()

        return visit
