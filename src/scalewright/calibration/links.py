"""What gives layers their input channels: seen in one rehearsal of a block, and believed if a trial bears it out.

In a trial the channels are scaled by powers of two drawn at random, there and back, and the block must leave what it
left before. Nothing is known of architectures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalewright.calibration.lockstep import tensors_in, with_tensors
from scalewright.calibration.taps import first_tensor
from scalewright.numerics.smoothing import Rows, by_rows, times_two_to

_HEAD_SIZES = ("v_head_dim", "head_dim", "head_size")  # attributes by which modules say how large heads are
_TRIAL = 4  # powers of two that trials go up and down

Kind = tuple[str, ...]
"""What layers with one input are called, whichever block they are in."""
Spec = tuple[str, Rows | None]


@dataclass(frozen=True)
class Link:
    """Layers that are given the same input, and the module that gives it."""

    giver: str
    layers: tuple[str, ...]
    rows: Rows | None = None
    """Which rows of the giver's weight; None for a norm, which has a number for each channel."""


def called(name: str) -> str:
    """A name in which the numbers of blocks and experts do not count; those of layers, as in fc1, do."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def spec_of(link: Link) -> Spec:
    """What links of one kind have in common."""
    return called(link.giver), link.rows


def chosen(offers: Sequence[Sequence[Link]], spec: Spec | None) -> list[Link]:
    """The links of one kind, of those that are nearest where there are several."""
    found = (next((link for link in links if spec_of(link) == spec), None) for links in offers)
    return [link for link in found if link is not None]


@dataclass(frozen=True)
class Change:
    """What is done to one parameter: its rows (`dim` 0) or columns (1) are multiplied with powers of two."""

    module: nn.Module
    key: str
    powers: Tensor
    dim: int

    @property
    def now(self) -> nn.Parameter:
        """The parameter as it is."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    def done(self) -> Tensor:
        """What becomes of it."""
        return times_two_to(self.now.detach(), self.powers, dim=self.dim)

    def undone(self) -> Tensor:
        """What it was before, but for what was lost."""
        return times_two_to(self.now.detach(), -self.powers, dim=self.dim)


@dataclass(frozen=True)
class Lost:
    """Numbers that became too small to keep their digits: where they are in a tensor, and what they were."""

    places: Tensor
    values: Tensor

    @classmethod
    def by(cls, change: Change, before: Tensor) -> Lost:
        """What a change that has been made has cost."""
        places = (change.undone() != before).flatten().nonzero().flatten()
        return cls(places.to(torch.int32) if before.numel() < 2**31 else places, before.flatten()[places])

    def found_in(self, tensor: Tensor) -> Tensor:
        """The tensor with these numbers in their places."""
        return tensor.flatten().index_copy(0, self.places.long(), self.values).reshape(tensor.shape)


def changes_of(model: nn.Module, link: Link, powers_C: Tensor) -> list[Change]:
    """What is done to the parameters of a link's modules."""
    giver = model.get_submodule(link.giver)
    powers_R = powers_of_giver(model, link, powers_C)
    found = [Change(giver, key, -powers_R, 0) for key in ("weight", "bias") if giver._parameters.get(key) is not None]
    return found + [Change(model.get_submodule(name), "weight", powers_C, 1) for name in link.layers]


def powers_of_giver(model: nn.Module, link: Link, powers_C: Tensor) -> Tensor:
    """The powers of the rows that give the channels; zero for rows that give none."""
    weight = model.get_submodule(link.giver).weight
    assert isinstance(weight, Tensor)
    return by_rows(powers_C, None if link.rows is None else link.rows.of(len(powers_C)), len(weight))


# ---- one rehearsal ---------------------------------------------------------------------------------------------------


@dataclass
class Noted:
    """What was seen of a block while it was rehearsed: who was given what, and made what, in the order of calls."""

    modules: dict[str, Any] = field(default_factory=dict)
    """Those with parameters of their own, by name."""
    calls: Counter[str] = field(default_factory=Counter)
    given: list[tuple[str, Tensor, int]] = field(default_factory=list)
    made: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    heads: tuple[int, ...] = ()
    """Sizes that modules say their heads have."""
    left: list[Tensor] = field(default_factory=list)
    """What the block gave back, and what it was given, as it is then."""

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
def noting(block_name: str, block: nn.Module) -> Iterator[Noted]:
    """While inside, the block may be run, once."""
    noted = Noted()

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
    heads = (getattr(module, attribute, None) for _, module in named for attribute in _HEAD_SIZES)
    noted.heads = tuple(dict.fromkeys(each for each in heads if isinstance(each, int) and each > 0))
    with ExitStack() as stack, _keeping(block, noted.left):
        for name, module in noted.modules.items():
            hook = module.register_forward_pre_hook(partial(note_input, name), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(partial(note_output, name)).remove)
        yield noted


@contextmanager
def _keeping(block: nn.Module, into: list[Tensor]) -> Iterator[None]:
    """While inside, the tensors that the block gave last are in the list, and those that it was given: what it has
    written into them, or put into a list or a dictionary, is for the next ones, too.
    """

    def keep(_: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        into[:] = tensors_in((output, args, keywords))

    hook = block.register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class Trial:
    """Whether a block leaves what is `expected` when channels are scaled there and back."""

    model: nn.Module
    block: nn.Module
    rehearse: Callable[[], object]
    expected: Sequence[Tensor]

    def those_that_hold(self, links: Sequence[Link]) -> Sequence[Link]:
        """Those of some links for which it does, tried together, and in halves if they do not all hold."""
        if self.holds(links):
            return links
        half = len(links) // 2
        return [*self.those_that_hold(links[:half]), *self.those_that_hold(links[half:])] if half else []

    def holds(self, links: Sequence[Link]) -> bool:
        """Whether it does for some links at once."""
        return not links or self._is_same(links)

    def matters(self, links: Sequence[Link]) -> bool:
        """Whether it says something else if only those are changed that give channels. Else a trial means nothing: a
        layer of zeros takes anything.
        """
        return not self._is_same(links, is_half=True)

    def _is_same(self, links: Sequence[Link], *, is_half: bool = False) -> bool:
        random = torch.Generator().manual_seed(0)
        before: list[tuple[Change, nn.Parameter]] = []
        left: list[Tensor] = []
        try:
            for link in links:
                powers_C = self._powers(link, random)
                for change in changes_of(self.model, link, powers_C):
                    if is_half and change.dim == 1:
                        continue
                    before.append((change, change.now))
                    change.module._parameters[change.key] = nn.Parameter(change.done(), requires_grad=False)
            with _keeping(self.block, left):
                self.rehearse()
        finally:
            for change, parameter in reversed(before):
                change.module._parameters[change.key] = parameter
        return bool(left) and are_alike(left, self.expected)

    def _powers(self, link: Link, random: torch.Generator) -> Tensor:
        columns = int(getattr(self.model.get_submodule(link.layers[0]), "in_features"))  # noqa: B009
        row_C = torch.arange(columns) if link.rows is None else link.rows.of(columns)
        rows, place_C = torch.unique(row_C, return_inverse=True)
        powers = torch.randint(1, _TRIAL + 1, (len(rows),), generator=random)
        powers *= 1 - 2 * torch.randint(2, (len(rows),), generator=random)
        powers[:2] = powers[:2].abs() * torch.tensor([1, -1])[: len(rows)]  # few channels, too, must differ
        return powers[place_C]


@contextmanager
def in_single(block: nn.Module) -> Iterator[None]:
    """While inside, what a block has and is given in float16 is float32, which has exponents enough."""
    stores: list[dict[str, Any]] = [
        store for module in block.modules() for store in (module._parameters, module._buffers)
    ]
    kept = [
        (store, key, each) for store in stores for key, each in store.items() if each is not None if is_float16(each)
    ]

    def widen(_: nn.Module, args: Any, keywords: Any) -> Any:
        return with_tensors((args, keywords), lambda each: each.float() if is_float16(each) else each)

    hook = block.register_forward_pre_hook(widen, with_kwargs=True)
    try:
        for store, key, each in kept:
            wide = each.detach().float()
            store[key] = nn.Parameter(wide, requires_grad=False) if isinstance(each, nn.Parameter) else wide
        yield
    finally:
        hook.remove()
        for store, key, each in kept:
            store[key] = each


def is_float16(value: Tensor) -> bool:
    """Whether numbers have so few exponents that halving them may cost digits."""
    return value.dtype == torch.float16


def are_alike(some: Any, others: Any, *, slack: float = 0.0) -> bool:
    """Whether all tensors of two values are the same, bit for bit, or but for some part of their norm."""
    tensors, theirs = tensors_in(some), tensors_in(others)
    return len(tensors) == len(theirs) and all(
        _are_same(one, other, slack) for one, other in zip(tensors, theirs, strict=True)
    )


def _are_same(one: Tensor, other: Tensor, slack: float) -> bool:
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    both = one.isnan()
    if not torch.equal(both, other.isnan()):
        return False
    one, other = (each.masked_fill(both, 0) for each in (one, other))
    if not slack:
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= slack * one.norm())


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
