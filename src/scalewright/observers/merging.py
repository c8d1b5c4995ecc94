"""How the statistics of two observers, or of many ranks, become one.

Each statistic has a rule. "min" and "max" are exact; "sum" adds counts and sums, exactly for integers. Three more are
for sides that follow each other, the left one first, and ranks in their order: "first" keeps what the left side began
with; "decayed" adds what the right side saw to what is left by then of the left one; "derived" is computed from the
others. So a moving average of two sides is that of one side that saw all of it in turn.

Ranks may hold different amounts, and some may have seen nothing at all. So shapes are exchanged before values, in
messages of a fixed size for all observers at once, and a rank that lacks a statistic contributes the rule's neutral
element: no collective can pair one observer's numbers with another's, and what one rank refuses all refuse. Sums are
made in float64, so that the number of ranks does not show. Nothing here uses pickle.

What was synced once is not counted again: the group's first rank stands for it from then on, and the others remember
what to leave out (`_synced`). So syncs may be repeated, and groups may grow from one to the next, but not shrink.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from scalewright.errors import MergeError

if TYPE_CHECKING:
    from scalewright.observers.base import Observer

Rule = Literal["min", "max", "sum", "first", "decayed", "derived"]

# R ranks, S statistics of all observers in a row.

_MAX_DIMS = 8
_NEUTRAL = {"min": torch.inf, "max": -torch.inf, "sum": 0, "first": 0, "decayed": 0}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_statistics(into: Observer, other: Observer) -> None:
    """Fold the statistics of `other` into `into`, by the rules of their class; what `other` saw came later."""
    into.settle()
    other.settle()
    decay = other.decay_by(_statistics(other))
    merged: dict[str, Tensor] = {}
    for name, rule in into.merge_rules.items():
        mine, theirs = _statistic(into, name), _statistic(other, name)
        if theirs is None:
            continue
        if mine is not None and mine.shape != theirs.shape:
            raise MergeError(
                f"{name} has shape {tuple(mine.shape)} here and {tuple(theirs.shape)} there. "
                "Merge observers of one and the same tensor."
            )
        if rule == "derived":
            continue
        merged[name] = theirs.clone() if mine is None else _combine(rule, mine, theirs.to(mine.device), decay)
    if merged:
        merged |= into.derived({**_statistics(into), **merged})
    unchanged = _is_unchanged(into, merged)
    for name, value in merged.items():
        setattr(into, name, value)
    into.num_observed += other.num_observed
    into._observed_dtype = join_dtypes(into._observed_dtype, other._observed_dtype)
    decay = other.decay_by(other._synced)
    for name, amount in other._synced.items():
        before, rule = into._synced.get(name), into.merge_rules.get(name, "sum")
        into._synced[name] = amount if before is None else _combine(rule, before, amount.to(before.device), decay)
    into.statistics_replaced(unchanged=unchanged)


def join_dtypes(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
    """The dtype that stands for values of both, whatever their order: their own if they agree, else fp32."""
    if one is None or other is None:
        return one or other
    return one if one == other else torch.float32


def _combine(rule: Rule, mine: Tensor, theirs: Tensor, decay: float) -> Tensor:
    if rule == "first":
        return mine
    if rule in ("sum", "decayed"):
        return (mine * decay if rule == "decayed" else mine) + theirs
    mine, theirs = mine.float(), theirs.float()
    return torch.minimum(mine, theirs) if rule == "min" else torch.maximum(mine, theirs)


def sync_statistics(
    observers: Sequence[Observer],
    group: dist.ProcessGroup | None = None,
    *,
    wait: Callable[[dist.Work], object] = lambda work: work.wait(),
) -> None:
    """Leave all ranks with equal statistics: those of one observer that saw what all of them saw, rank after rank.

    Every rank of `group` calls this with the same observers in the same order, whether it has seen anything or not.
    Does nothing without a process group, or alone in one. `wait` waits for a collective; it may give up by an error.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for each in observers:
        each.settle()
    rank, exchange = dist.get_rank(group), _Exchange(group, collective_device(group), wait)
    exchange.check_same_observers(observers)
    if not observers:
        return
    slots = [_Slot(each, name, rule) for each in observers for name, rule in each.merge_rules.items()]
    headers_RSH = exchange.gather([slot.header() for slot in slots])
    for slot, header_RH in zip(slots, headers_RSH.unbind(dim=1), strict=True):
        slot.agree(header_RH, rank)
    if any(slot.rule == "decayed" for slot in slots):
        decays_RS = exchange.gather([_decay_by_new(slot.observer) for slot in slots], torch.float64)
        for slot, decay in zip(slots, decays_RS[rank + 1 :].prod(dim=0).tolist(), strict=True):
            slot.decay = decay
    totals = _totals(observers, exchange.gather([[each.num_observed, _new_amount(each)] for each in observers]))
    exchange.reduce(slots)
    for slot in slots:
        if slot.rule == "derived":
            slot.merged = slot.observer.derived(_values_of(slot.observer, slots)).get(slot.name)

    unchanged = exchange.all_true([_is_unchanged(each, _values_of(each, slots)) for each in observers])
    for slot in slots:
        slot.put(is_first_rank=rank == 0)
    for each, total, is_unchanged in zip(observers, totals, unchanged, strict=True):
        each.num_observed = total
        if rank == 0:
            each._synced = {}
        else:
            each._synced["num_observed"] = torch.tensor(each.num_observed)
        each.statistics_replaced(unchanged=is_unchanged)


@dataclass
class _Slot:
    """One statistic of one observer, on its way to being that of all ranks."""

    observer: Observer
    name: str
    rule: Rule
    shape: tuple[int, ...] | None = None  # None: no rank has it
    is_whole: bool = False  # an exact sum of integers
    is_double: bool = False  # kept in float64
    is_first: bool = False  # this rank is the first that has it
    decay: float = 1.0  # what the values that later ranks saw leave of it
    dtype: torch.dtype | None = None  # of the values that were observed
    merged: Tensor | None = None

    def header(self) -> list[int]:
        """What the other ranks must know of it: is it there, its kind of numbers, dtype seen, shape."""
        value, seen = _statistic(self.observer, self.name), self.observer._observed_dtype
        dtype = 0 if seen is None else 1 + _DTYPES.index(seen if seen in _DTYPES else torch.float32)
        if value is None:
            return [0, 0, dtype, 0] + [0] * _MAX_DIMS
        padding = [0] * (_MAX_DIMS - value.ndim)
        kind = 2 if value.dtype == torch.float64 else int(not value.is_floating_point())
        return [1, kind, dtype, value.ndim, *value.shape, *padding]

    def agree(self, header_RH: Tensor, rank: int) -> None:
        """Settle shape and kind from all ranks' headers, or raise MergeError on all of them."""
        there = header_RH[header_RH[:, 0] == 1]
        for seen in header_RH[:, 2].tolist():
            self.dtype = join_dtypes(self.dtype, _DTYPES[seen - 1] if seen else None)
        if len(there) == 0:
            return
        shapes = sorted({tuple(row[4 : 4 + row[3]]) for row in there.tolist()})
        if len(shapes) > 1:
            raise MergeError(
                f"{self.observer.label or self.observer.base_name}: {self.name} has different shapes on the ranks: "
                f"{shapes}. Observe the same tensor on each."
            )
        self.shape = shapes[0]
        self.is_whole = self.rule == "sum" and bool((there[:, 1] == 1).all())
        self.is_double = self.rule in ("sum", "first", "decayed") and bool((there[:, 1] == 2).all())
        self.is_first = int(header_RH[:, 0].argmax()) == rank

    def bucket(self) -> str:
        """Which of the collectives carries it; none does what is derived."""
        if self.rule in ("min", "max", "derived"):
            return self.rule
        return "whole" if self.is_whole else "sum"

    def contribution(self) -> Tensor:
        """What this rank adds, flat."""
        assert self.shape is not None
        dtype = {"min": torch.float32, "max": torch.float32, "whole": torch.int64, "sum": torch.float64}[self.bucket()]
        value = _statistic(self.observer, self.name)
        if value is None or (self.rule == "first" and not self.is_first):
            return torch.full((torch.Size(self.shape).numel(),), _NEUTRAL[self.rule], dtype=dtype)
        value = value.detach().cpu().to(dtype).flatten()
        synced = self.observer._synced.get(self.name)
        if self.rule == "sum":
            return _new_sum(value, synced)
        if self.rule == "decayed":
            if synced is not None:
                value = value - synced.cpu().to(dtype).flatten() * _decay_by_new(self.observer)
            return value * self.decay
        return value

    def receive(self, reduced: Tensor) -> None:
        """Take what all ranks' contributions became."""
        assert self.shape is not None
        reduced = reduced.clone() if self.is_whole or self.is_double else reduced.float()
        before = _statistic(self.observer, self.name)
        self.merged = reduced.reshape(self.shape).to("cpu" if before is None else before.device)

    def put(self, *, is_first_rank: bool) -> None:
        """Put the merged statistic on the observer."""
        if self.merged is None:
            return
        setattr(self.observer, self.name, self.merged)
        self.observer._observed_dtype = self.dtype
        if self.rule in ("sum", "decayed") and not is_first_rank:
            self.observer._synced[self.name] = self.merged.clone()


@dataclass(frozen=True)
class _Exchange:
    """The collectives of one sync."""

    group: dist.ProcessGroup | None
    device: torch.device
    wait: Callable[[dist.Work], object]

    def gather(self, mine: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        """The same list of numbers, whole ones as a rule, from every rank, stacked in rank order, on the CPU."""
        sent = torch.tensor(mine, dtype=dtype, device=self.device)
        everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.group))]
        self.wait(dist.all_gather(everyone, sent, group=self.group, async_op=True))
        return torch.stack(everyone).cpu()

    def all_true(self, mine: Sequence[bool]) -> list[bool]:
        """For each place, whether it is true on every rank."""
        return [bool(each) for each in self.gather([int(each) for each in mine]).min(dim=0).values]

    def check_same_observers(self, observers: Sequence[Observer]) -> None:
        """Raise MergeError on every rank unless all sync the same list; nothing else may be exchanged before."""
        described = ";".join(
            f"{o.label} {type(o).__name__} {o.base_name} {o.args.model_dump_json()}" for o in observers
        )
        values = [_statistic(each, name) for each in observers for name in each.merge_rules]
        most_dims = max((value.ndim for value in values if value is not None), default=0)
        everyone = self.gather([len(observers), zlib.crc32(described.encode()), most_dims])
        if int(everyone[:, 2].max()) > _MAX_DIMS:
            raise MergeError(
                f"a statistic has {int(everyone[:, 2].max())} dimensions, and at most {_MAX_DIMS} can be synced. "
                "Flatten it."
            )
        if bool((everyone[:, :2] != everyone[0, :2]).any()):
            raise MergeError(
                f"the ranks sync different observers ({everyone[:, 0].tolist()} of them, rank by rank). "
                "Sync observers of the same labels, classes and arguments, in the same order, on every rank."
            )

    def reduce(self, slots: Sequence[_Slot]) -> None:
        """Make all ranks' contributions one: a single collective for each kind of operation."""
        operations = {
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
            "whole": dist.ReduceOp.SUM,
            "sum": dist.ReduceOp.SUM,
        }
        for bucket, operation in operations.items():
            members = [slot for slot in slots if slot.shape is not None and slot.bucket() == bucket]
            if not members:
                continue
            pieces = [slot.contribution() for slot in members]
            whole = torch.cat(pieces).to(self.device)
            self.wait(dist.all_reduce(whole, op=operation, group=self.group, async_op=True))
            for slot, piece in zip(members, torch.split(whole.cpu(), [len(piece) for piece in pieces]), strict=True):
                slot.receive(piece)


def _statistic(observer: Observer, name: str) -> Tensor | None:
    """A statistic as a tensor, also where a user has set a plain number."""
    value = getattr(observer, name)
    return None if value is None else as_tensor(value)


def _statistics(observer: Observer) -> dict[str, Tensor]:
    """All statistics that are there, by name."""
    found = {name: _statistic(observer, name) for name in observer.merge_rules}
    return {name: value for name, value in found.items() if value is not None}


def _new_sum(value: Tensor, synced: Tensor | None) -> Tensor:
    """What was added to a sum, flat, since it was synced."""
    if synced is None:
        return value
    new = value - synced.to(value).flatten()
    # Sums never shrink by observing: what is less than before was set by hand, and is all new.
    return value if bool((new < 0).any()) else new


def _decay_by_new(observer: Observer) -> float:
    """What the values that were seen here since the last sync leave of "decayed" statistics."""
    if "decayed" not in observer.merge_rules.values():
        return 1.0
    new = {
        name: _new_sum(value.flatten(), observer._synced.get(name))
        for name, value in _statistics(observer).items()
        if observer.merge_rules[name] == "sum"
    }
    return observer.decay_by(new)


def _new_amount(observer: Observer) -> int:
    """How much was seen here that no earlier sync has counted."""
    return observer.num_observed - int(observer._synced.get("num_observed", 0))


def _totals(observers: Sequence[Observer], amounts_RO2: Tensor) -> list[int]:
    """How much all ranks together have seen, for each observer, from what each has and what of it is new."""
    totals = amounts_RO2[:, :, 1].sum(dim=0).tolist()
    for each, total, held in zip(observers, totals, amounts_RO2[:, :, 0].amax(dim=0).tolist(), strict=True):
        if held and not total:
            raise MergeError(
                f"{each.label or each.base_name}: these ranks were synced in a larger group, whose first rank stands "
                "for what all of them saw and is not among them. Sync groups that contain it."
            )
    return totals


def _values_of(observer: Observer, slots: Sequence[_Slot]) -> dict[str, Tensor]:
    return {slot.name: slot.merged for slot in slots if slot.observer is observer and slot.merged is not None}


def _is_unchanged(observer: Observer, merged: dict[str, Tensor]) -> bool:
    """Whether the observer has a range, and will have the same with the `merged` statistics."""
    before = observer.current_range()
    if before is None:
        return False
    after = (merged.get("min_vals", before[0]), merged.get("max_vals", before[1]))
    return all(torch.equal(old.float(), new.float()) for old, new in zip(before, after, strict=True))


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for the group's backend: the CPU for gloo and mpi, this rank's accelerator for others."""
    backend = str(dist.get_backend(group))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is, or a number as a tensor; `torch.as_tensor` moves both to torch's default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
