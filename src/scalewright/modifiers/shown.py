"""A tensor on show: what layers look at while data flows.

Several layers are often shown one and the same tensor: queries, keys and values are made from one input, and all
experts may see the same tokens. What one of them has computed from it is kept for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from scalewright.observers import Observer

_T = TypeVar("_T")


@dataclass(frozen=True)
class Shown:
    """A tensor, and the mask of its tokens: zero for those that do not count; None if all do."""

    value: Tensor
    mask: Tensor | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    beside: Tensor | None = None
    """What the output of the layer that it is shown to will be added to, if that is known."""

    def once(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """What `compute` makes of the tensor, computed for the first who asks. It must not keep the tensor itself."""
        if key not in self._known:
            self._known[key] = compute()
        found: _T = self._known[key]
        return found

    def samples(self) -> Iterator[Shown]:
        """The samples of a batch one by one; a tensor that does not tell them apart ([tokens, features]) as a whole."""
        if self.value.ndim < 3 or len(self.value) == 1:
            yield self
            return
        for each in range(len(self.value)):
            one = slice(each, each + 1)
            yield Shown(self.value[one], None if self.mask is None else self.mask[one])


See = Callable[[Shown], object]
"""Somebody who looks at it."""


def shown_to(observer: Observer) -> See:
    """Shows values to an observer. Where several with equal arguments are shown one tensor, it is looked at once.

    One to whom it matters what came before is shown sample by sample: how many make up a batch is our affair.
    """
    if observer.ordered:

        def show_in_turn(shown: Shown) -> None:
            for each in shown.samples():
                observer(each.value, mask=each.mask)

        return show_in_turn
    key = (type(observer), observer.base_name, observer.args.model_dump_json())

    def look(shown: Shown) -> Observer:
        alone = type(observer)(observer.base_name, observer.args)
        alone.label = observer.label
        alone(shown.value, mask=shown.mask)
        return alone

    return lambda shown: observer.merge(shown.once(key, lambda: look(shown)))


@dataclass
class _Known:
    version: int
    mask: Tensor | None
    known: dict[Hashable, Any] = field(default_factory=dict)


class Gallery:
    """Remembers what is known of each tensor on show, as long as the tensor lives and is not changed."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def forget(self) -> None:
        """Whoever was to know has been told: what a pass still holds on to needs its Hessian no longer."""
        self._known.clear()

    def show(self, value: Tensor, mask: Callable[[], Tensor | None], *, beside: Tensor | None = None) -> Shown:
        """The tensor with what is known of it; `mask` is asked when it is new."""
        if value.is_inference():  # nobody counts their changes
            return Shown(value, mask(), beside=beside)
        found = self._known.get(value)
        if found is None or found.version != value._version:
            found = self._known[value] = _Known(value._version, mask())
        return Shown(value, found.mask, found.known, beside)
