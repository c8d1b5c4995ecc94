"""Many forward passes, paused at every block boundary.

Each batch's forward pass runs in a greenlet of its own. A block that is called hands its arguments over and waits for
its outputs, so that all batches can be brought to the same block, and the block be quantised, before any of them goes
on. The model's own code runs as it is: nothing is traced, and values that pass by a block stay in the frames that made
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from scalewright.errors import CalibrationError


@dataclass(eq=False)
class Call:
    """A block's call that waits for its outputs, made by the pass of one batch."""

    batch: int
    block: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def copied(self) -> Call:
        """The same call on copies of its tensors, for a block that is run once more afterwards."""
        args, keywords = tree_map_only(Tensor, torch.clone, (self.args, self.keywords))
        return Call(self.batch, self.block, args, keywords)


class LockStep:
    """The forward passes of some batches through one model, side by side.

    `for block, calls in lockstep.steps(): ...` goes from block to block; every call must be answered before the next
    step. A block that the model calls again is met again.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        forward: Callable[[int], Any],
        count: int,
        *,
        entering: Callable[[int], None] = lambda batch: None,
    ) -> None:
        """`forward(i)` runs the model on batch i of `count`; `entering(i)` is called whenever its pass goes on."""
        self._blocks = blocks
        self._forwards = {name: block.forward for name, block in blocks.items()}
        self._forward = forward
        self._count = count
        self._entering = entering
        self._passes: dict[int, greenlet] = {}
        self._waiting: dict[int, Call] = {}
        self._grad_modes: dict[int, bool] = {}
        self.outputs: dict[int, Any] = {}
        """What the model gave back for each batch whose pass has ended."""

    @contextmanager
    def running(self) -> Iterator[LockStep]:
        """While inside, blocks wait; afterwards the model is as it was, and no pass is left half-way."""
        with ExitStack() as stack:
            for name, block in self._blocks.items():
                stack.enter_context(_replaced_forward(block, self._waiting_forward(name)))
            stack.callback(self._end_passes)
            yield self

    def steps(self) -> Iterator[tuple[str, list[Call]]]:
        """The next block, and the calls of all batches that wait at it, until every pass has ended."""
        for batch in range(self._count):
            self._passes[batch] = greenlet(self._run(batch))
            self._go_on(batch, None)
        order = {name: i for i, name in enumerate(self._blocks)}
        while self._waiting:
            block = min((call.block for call in self._waiting.values()), key=lambda name: order[name])
            calls = [call for call in self._waiting.values() if call.block == block]
            yield block, calls
            unanswered = [call.batch for call in calls if self._waiting.get(call.batch) is call]
            assert not unanswered, f"{block}: batches {unanswered} still wait"

    def run_block(self, call: Call) -> Any:
        """What the block gives for a call, run here and now."""
        return self._forwards[call.block](*call.args, **call.keywords)

    def answer(self, call: Call, output: Any) -> None:
        """Let a pass go on, to its next block or to its end."""
        del self._waiting[call.batch]
        self._go_on(call.batch, output)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _run(self, batch: int) -> Callable[[Any], Any]:
        def run(_: Any) -> Any:
            self.outputs[batch] = self._forward(batch)

        return run

    def _go_on(self, batch: int, value: Any) -> None:
        """Switch to a pass until it waits or ends. Grad mode belongs to the thread, so each pass keeps its own."""
        outside = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad_modes.get(batch, outside))
        self._entering(batch)
        try:
            call = self._passes[batch].switch(value)
        finally:
            self._grad_modes[batch] = torch.is_grad_enabled()
            torch.set_grad_enabled(outside)
        if isinstance(call, Call):
            self._waiting[batch] = call

    def _waiting_forward(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **keywords: Any) -> Any:
            here = getcurrent()
            batch = next((batch for batch, each in self._passes.items() if each is here), None)
            if batch is None or here.parent is None:
                raise CalibrationError(f"{name}: called outside of a calibration pass.")
            return here.parent.switch(Call(batch, name, args, keywords))

        return forward

    def _end_passes(self) -> None:
        for each in self._passes.values():
            if not each.dead and each.gr_frame is not None:
                each.throw(GreenletExit)
        self._passes.clear()
        self._waiting.clear()


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    had_own = "forward" in vars(module)
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = before
        else:
            del module.forward
