"""What the outputs of layers are added to: the stream that flows past attention and MLP.

A layer whose output is added to a stream can make up for what the stream has lost, if it is known which tensor that is
before the layer is called. Such a tensor is what some module before it is given, mostly a norm. Which one shows in one
rehearsal of the block; in all passes it is kept from that call on, as the model itself has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scalewright.calibration.taps import first_tensor
from scalewright.modifiers.layers import WatchedLayer

_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class _Additions(TorchFunctionMode):
    """Notes which tensors are added to each other while it is on, and how often they had been changed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor, int, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_plain = getattr(func, "__name__", "") in _ADDITIONS and len(args) == 2 and not kwargs
        if is_plain and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            self.pairs.append((*args, _changes(args[0]), _changes(args[1])))
        return func(*args, **(kwargs or {}))


class NotedStreams:
    """What was seen of a block while it was rehearsed."""

    def __init__(self) -> None:
        self._additions = _Additions()
        self._given: list[tuple[str, Tensor, int]] = []  # modules in the order of their calls, and their inputs
        self._outputs: dict[str, tuple[Tensor, int]] = {}  # of layers, and how many calls came before theirs
        self._calls_before: dict[str, int] = {}

    @contextmanager
    def noting(self, block: nn.Module, layers: Iterable[WatchedLayer]) -> Iterator[None]:
        """While inside, the block may be run, once."""
        with ExitStack() as stack:
            for layer in layers:
                module = layer.module
                stack.callback(module.register_forward_pre_hook(partial(self._note_call, layer.name)).remove)
                stack.callback(module.register_forward_hook(partial(self._note_output, layer.name)).remove)
            for name, module in block.named_modules():
                hook = module.register_forward_pre_hook(partial(self._note_input, name), with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(self._additions)
            yield

    def module_of(self, layer: WatchedLayer) -> str | None:
        """The module, by its name within the block, that is given what the layer's output is added to.

        None if the output is not added to anything, or to something that no module before the layer was given.
        """
        if layer.name not in self._outputs:
            return None
        output, calls_before = self._outputs[layer.name]
        for first, second, changes_of_first, changes_of_second in self._additions.pairs:
            if output is not first and output is not second:
                continue
            stream, changes = (second, changes_of_second) if output is first else (first, changes_of_first)
            if stream.shape != output.shape:
                continue
            for name, value, changes_before in self._given[:calls_before]:
                if value is stream and changes_before == changes:
                    return name
        return None

    def _note_call(self, name: str, *_: Any) -> None:
        self._calls_before[name] = len(self._given)

    def _note_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._outputs[name] = (output, self._calls_before[name])

    def _note_input(self, name: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = first_tensor((*args, *keywords.values()))
        if value is not None:
            self._given.append((name, value, _changes(value)))


class Streams:
    """What flows past layers, of each pass, until they have seen it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._number = 0
        self._wanted: dict[str, set[str]] = {}  # modules that are watched, and the layers for which they are
        self._hooks: dict[str, Any] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Afterwards nothing is kept, and no hook is left."""
        try:
            yield
        finally:
            for name in list(self._hooks):
                self._give_up(name)

    def enter(self, number: int) -> None:
        """From now on modules are called by this pass."""
        self._number = number

    def watch(self, layers: Iterable[WatchedLayer]) -> None:
        """From now on what flows past these layers is kept, for those that ask for it."""
        for layer in layers:
            name = layer.stream
            if name is None or not layer.wants_stream:
                continue
            self._wanted.setdefault(name, set()).add(layer.name)
            if name not in self._hooks:
                module = self._model.get_submodule(name)
                self._hooks[name] = module.register_forward_pre_hook(partial(self._keep, name), with_kwargs=True)

    def of(self, layer: WatchedLayer, number: int) -> Tensor | None:
        """What flows past a layer in a pass, if that is known."""
        return None if layer.stream is None else self._kept.get((layer.stream, number))

    def forget(self, layers: Iterable[WatchedLayer]) -> None:
        """These layers have seen it."""
        for layer in layers:
            name = layer.stream
            if name is not None and name in self._wanted:
                self._wanted[name].discard(layer.name)
                if not self._wanted[name]:
                    self._give_up(name)

    def _keep(self, name: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = first_tensor((*args, *keywords.values()))
        if value is not None:
            self._kept[name, self._number] = value

    def _give_up(self, name: str) -> None:
        self._hooks.pop(name).remove()
        del self._wanted[name]
        self._kept = {key: value for key, value in self._kept.items() if key[0] != name}


def _changes(value: Tensor) -> int:
    """How often a tensor has been changed in place; nobody counts that of inference tensors."""
    return 0 if value.is_inference() else value._version
