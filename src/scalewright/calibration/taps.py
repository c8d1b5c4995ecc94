"""Hooks in, hooks out: tensors of a running model are handed to whoever asked for them.

`tapped` is a context manager; no hook survives it, whatever happens inside. It changes nothing that flows through the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from compressed_tensors.modeling import register_key_hook, register_query_hook, register_value_hook
from torch import Tensor, nn

See = Callable[[Tensor, "Tensor | None"], None]
"""Takes a tensor, and the mask of its tokens: zero for those that do not count; None if all do."""


@dataclass(frozen=True)
class Tap:
    """Who wants to see what of a module: its input, its output, or an attention module's query, key or value."""

    module: nn.Module
    where: Literal["input", "output", "q", "k", "v"]
    see: See


@dataclass
class Masks:
    """The masks [batch, sequence] of the batch that is running just now."""

    current: list[Tensor] = field(default_factory=list)

    def set_from(self, batch: Mapping[str, Any]) -> None:
        """Take the masks of a batch; one that masks nothing is left out."""
        masks = [batch.get(name) for name in ("decoder_attention_mask", "attention_mask")]
        self.current = [each for each in masks if isinstance(each, Tensor) and each.ndim == 2 and not bool(each.all())]

    def of(self, value: Tensor, where: str) -> Tensor | None:
        """The mask that belongs to a tensor; experts see tokens without their batch."""
        tokens = (value.shape[0], value.shape[2]) if where in "qkv" and value.ndim == 4 else tuple(value.shape[:-1])
        for mask in self.current:
            if tuple(mask.shape) == tokens:
                return mask.to(value.device)
            if len(tokens) == 1 and mask.numel() == tokens[0]:
                return mask.reshape(-1).to(value.device)
        return None


@contextmanager
def tapped(taps: Iterable[Tap], masks: Masks) -> Iterator[None]:
    """While inside, tensors of the tapped modules are shown."""
    with ExitStack() as stack:
        for tap in taps:
            stack.callback(_register(tap, masks).remove)
        yield


def _register(tap: Tap, masks: Masks) -> Any:
    def show(value: Any) -> None:
        value = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(value, Tensor):
            tap.see(value, masks.of(value, tap.where))

    if tap.where == "input":

        def before(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            show(next(iter((*args, *keywords.values())), None))

        return tap.module.register_forward_pre_hook(before, with_kwargs=True)
    if tap.where == "output":
        return tap.module.register_forward_hook(lambda module, args, output: show(output))
    register = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}[tap.where]
    return register(tap.module, lambda module, value: show(value))
