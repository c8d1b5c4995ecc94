"""Many forward passes, paused where they are about to enter one of some modules.

Each batch's forward pass runs in a greenlet of its own. A hook before each of the modules lets the pass wait, so that
all batches can be brought to the same module, and the module be quantised, before any of them goes on. The model's own
code runs as it is: nothing is traced or replaced, and values that pass a module by stay in the frames that made them.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from copy import copy as shallow_copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

Place = tuple[int, ...]
"""Where a module comes among those that passes wait for: its number, and that of a module within it."""
_Order = Literal["go on", "rehearse"]
_overrides: Any = torch.overrides  # which has no types


class Enough(BaseException):
    """Raised by whoever watches a pass, or a rehearsal, to end it: nothing behind this point is needed.

    No `Exception`, because a model may catch those.
    """


class LockStep:
    """The forward passes of some batches through one model, side by side.

    `for name, batches in lockstep.steps(): ...` goes from module to module; every batch must `go_on` before the next
    step. A module that the model calls again is met again. Batches wait in front of a module: its hooks have not run.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        forward: Callable[[int], Any],
        count: int,
        *,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        entering: Callable[[int], object] = lambda batch: None,
        leaving: Callable[[Any], object] = lambda arguments: None,
        agree: Callable[[Place | None], Place | None] = lambda place: place,
    ) -> None:
        """`forward(i)` runs the model on batch i of `count`; `entering(i)` is called whenever its pass goes on.

        Passes, and nothing else, are run in the modes of torch that are entered by `within`.
        When a pass begins to wait, `leaving` is given what the module that it waits for will be called with. `agree` is
        given the place of the first module that a batch waits for, None if none does, and says which comes next: others
        may have batches of their own. Then no batch of ours may wait there.
        """
        self._modules = modules
        self._places: dict[str, Place] = {name: (place,) for place, name in enumerate(modules)}
        self._hooks = ExitStack()
        self._forward = forward
        self._outside = copy_context()
        self._count = count
        self._within = within
        self._entering = entering
        self._leaving = leaving
        self._agree = agree
        self._passes: dict[int, greenlet] = {}
        self._batches: dict[greenlet, int] = {}
        self._waiting: dict[int, str] = {}
        self._arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._stayed: set[int] = set()
        self._rehearsing: set[int] = set()
        self._states: dict[int, _ThreadState] = {}
        self._modes: dict[int, list[TorchFunctionMode]] = {}
        self.outputs: dict[int, Any] = {}
        """What `forward` gave back for each batch whose pass has ended."""

    @contextmanager
    def running(self) -> Iterator[LockStep]:
        """While inside, passes wait; afterwards the model is as it was, and no pass is left half-way."""
        with ExitStack() as stack, self._hooks:
            stack.callback(self._end_passes)
            for name, module in self._modules.items():
                self._pause_before(name, module)
            yield self

    def pause_within(self, name: str, modules: Mapping[str, nn.Module]) -> None:
        """From now on passes wait in front of these modules, too, which are met after `name` and before the next."""
        for number, (inner, module) in enumerate(modules.items()):
            self._places[inner] = (*self._places[name], number)
            self._pause_before(inner, module)

    def steps(self) -> Iterator[tuple[str, list[int]]]:
        """The next module, and the batches that wait in front of it, until every pass has ended.

        Where batches wait in front of different modules, the first of them comes first.
        """
        num_outside = len(_modes_entered())
        with self._within():
            modes = _modes_entered()[num_outside:]
        for batch in range(self._count):
            self._modes[batch] = modes
            self._start(batch)
        while True:
            place = self._agree(min((self._places[each] for each in self._waiting.values()), default=None))
            if place is None:
                return
            name = next(each for each, its_place in self._places.items() if its_place == place)
            batches = sorted(batch for batch, waits_for in self._waiting.items() if waits_for == name)
            self._stayed = set(batches)
            yield name, batches
            assert not self._stayed, f"{name}: batches {sorted(self._stayed)} still wait"

    def rehearse(self, batch: int) -> None:
        """Run the module that a batch waits for on copies of its arguments, hooks included; the batch waits on."""
        self._switch(batch, "rehearse")

    def is_waiting(self, batch: int) -> bool:
        """Whether a pass has begun and not ended."""
        return batch in self._waiting

    def arguments(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module that a batch waits for is about to be given."""
        return self._arguments[batch]

    def go_on(self, batch: int) -> None:
        """Let a pass run the module that it waits for, and all else up to the next one, or to its end."""
        self._stayed.discard(batch)
        del self._waiting[batch], self._arguments[batch]
        self._switch(batch, "go on")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _pause_before(self, name: str, module: nn.Module) -> None:
        """Let passes wait before anything of a call is done.

        A hook would be too late: torch looks up `forward` before it runs hooks, and quantising a layer replaces it.
        """
        pause = self._pausing(name)
        call: Any = module._call_impl

        def wait_and_call(*args: Any, **keywords: Any) -> Any:
            pause(module, args, keywords)
            return call(*args, **keywords)

        attributes = vars(module)
        before = attributes.get("_call_impl")
        self._hooks.callback(attributes.pop if before is None else attributes.__setitem__, "_call_impl", before)
        attributes["_call_impl"] = wait_and_call

    def _start(self, batch: int) -> None:
        def run(_: _Order) -> None:
            self.outputs[batch] = self._forward(batch)

        self._passes[batch] = each = greenlet(run)
        each.gr_context = self._outside.copy()
        self._batches[each] = batch
        self._switch(batch, "go on")

    def _switch(self, batch: int, order: _Order) -> None:
        """Switch to a pass until it waits or ends. What torch keeps by thread, each pass keeps for itself."""
        with self._states.get(batch, _ThreadState.now()).in_force(), self._in_its_modes(batch):
            self._entering(batch)
            try:
                self._passes[batch].switch(order)
            finally:
                self._states[batch] = _ThreadState.now()

    @contextmanager
    def _in_its_modes(self, batch: int) -> Iterator[None]:
        """While inside, the modes that a pass is in are entered, too. Who leaves one takes off the last, his or not."""
        num_outside = len(_modes_entered())
        for mode in self._modes[batch]:
            _overrides._push_mode(mode)
        try:
            yield
        finally:
            self._modes[batch] = _modes_entered()[num_outside:]
            for _ in self._modes[batch]:
                _overrides._pop_mode()

    def _pausing(self, name: str) -> Callable[..., None]:
        def pause(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            here = getcurrent()
            batch = self._batches.get(here)
            if batch is None or batch in self._rehearsing or here.parent is None:
                return
            self._waiting[batch], self._arguments[batch] = name, (args, keywords)
            self._leaving((args, keywords))
            while here.parent.switch() == "rehearse":
                self._rehearsing.add(batch)
                try:
                    # In a context of its own: hooks by which a model collects hidden states know nothing of rehearsals.
                    self._outside.copy().run(_rehearse, module, args, keywords)
                finally:
                    self._rehearsing.discard(batch)

        return pause

    def _end_passes(self) -> None:
        with ExitStack() as stack:
            for batch in self._passes:
                stack.callback(self._end, batch)
        self._passes.clear()
        self._batches.clear()
        self._waiting.clear()
        self._arguments.clear()
        self._states.clear()
        self._modes.clear()

    def _end(self, batch: int) -> None:
        each = self._passes[batch]
        if each and not each.dead:
            with self._states.get(batch, _ThreadState.now()).in_force(), self._in_its_modes(batch):
                each.throw(GreenletExit)


def _modes_entered() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _overrides._get_current_function_mode_stack()
    return modes


def _rehearse(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    args, keywords = copied((args, keywords))
    with suppress(Enough):
        module(*args, **keywords)


def copied(arguments: Any) -> Any:
    """The same arguments with copies of their tensors; one tensor that is there twice has one copy."""
    copies: dict[int, Tensor] = {}

    def copy(value: Tensor) -> Tensor:
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]

    return with_tensors(arguments, copy)


def with_tensors(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same values with other tensors, in whatever torch looks into, and in the `UserDict`s of models that share
    keys and values between blocks.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            leaf = shallow_copy(leaf)
            leaf.data = with_tensors(leaf.data, change)
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(changed, values)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors that `with_tensors` would change."""
    found: list[Tensor] = []

    def note(each: Tensor) -> Tensor:
        found.append(each)
        return each

    with_tensors(values, note)
    return found


@dataclass(frozen=True)
class _ThreadState:
    """What torch keeps by thread, and passes may change between two blocks: grad mode, inference mode, autocast."""

    is_inference: bool
    is_grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> _ThreadState:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        devices = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        autocast = tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices)
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While inside, the thread is in this state; afterwards in the one before."""
        before = _ThreadState.now()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.callback(torch.set_grad_enabled, before.is_grad)
            stack.callback(_set_autocast, before.autocast)
            torch.set_grad_enabled(self.is_grad)
            _set_autocast(self.autocast)
            yield


def _set_autocast(states: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    torch.clear_autocast_cache()  # of weights, in the dtype of another pass
    for device, is_on, dtype in states:
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)
