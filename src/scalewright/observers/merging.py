"""How the statistics of two observers, or of many ranks, become one.

Each statistic has a rule: "min" and "max" are exact; "sum" adds counts and sums, exactly for integers; "mean" weighs
each side by how much it saw, for moving averages, whose order-dependent value has no exact merge.

Ranks may hold different amounts, and some may have seen nothing at all. So shapes are exchanged before values, with
one fixed-size message for all observers, and a rank that lacks a statistic contributes the rule's neutral element:
no collective can pair one observer's numbers with another's. Sums are made in float64, so that the number of ranks
does not show. Nothing here uses pickle.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from scalewright.errors import MergeError

if TYPE_CHECKING:
    from scalewright.observers.base import Observer

Rule = Literal["min", "max", "sum", "mean"]

_MAX_DIMS = 6
_HEADER_LENGTH = 4 + _MAX_DIMS  # is there, is whole-number, dtype seen, number of dimensions, dimensions
_NEUTRAL = {"min": torch.inf, "max": -torch.inf, "sum": 0, "mean": 0}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_statistics(into: Observer, other: Observer) -> None:
    """Fold the statistics of `other` into `into`, by the rules of their class."""
    seen = (into.num_observed, other.num_observed)
    merged: dict[str, Tensor] = {}
    for name, rule in into.merge_rules.items():
        mine, theirs = getattr(into, name), getattr(other, name)
        if theirs is None:
            continue
        if mine is None:
            merged[name] = theirs.clone()
            continue
        if mine.shape != theirs.shape:
            raise MergeError(
                f"{name} has shape {tuple(mine.shape)} here and {tuple(theirs.shape)} there. "
                "Merge observers of one and the same tensor."
            )
        merged[name] = _combine(rule, mine, theirs.to(mine.device), *seen)
    for name, value in merged.items():
        setattr(into, name, value)
    into.num_observed = sum(seen)
    into._observed_dtype = into._observed_dtype or other._observed_dtype
    into.statistics_replaced()


def _combine(rule: Rule, mine: Tensor, theirs: Tensor, my_weight: int, their_weight: int) -> Tensor:
    if rule == "min":
        return torch.minimum(mine, theirs)
    if rule == "max":
        return torch.maximum(mine, theirs)
    if rule == "sum":
        return mine + theirs
    # Statistics that a user has set by hand come with no count; such sides weigh the same.
    share = my_weight / (my_weight + their_weight) if my_weight + their_weight else 0.5
    return (mine.double() * share + theirs.double() * (1 - share)).to(mine.dtype)


def sync_statistics(observers: Sequence[Observer], group: dist.ProcessGroup | None = None) -> None:
    """Leave all ranks with equal statistics: those of one observer that saw what all of them saw.

    Every rank of `group` calls this with the same observers in the same order. Does nothing without a process group.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    slots = [(each, name, rule) for each in observers for name, rule in each.merge_rules.items()]
    device = _collective_device(observers, group)
    _check_same_observers(observers, device, group)
    headers = _gather(torch.tensor([_header(*slot) for slot in slots], dtype=torch.int64), device, group)
    weights = [_new_amount(each, group) for each in observers]
    gathered_weights = _gather(torch.tensor(weights, dtype=torch.int64), device, group)  # [ranks, observers]
    total_weights = gathered_weights.sum(dim=0).tolist()
    weight_of = {id(each): (mine, total) for each, mine, total in zip(observers, weights, total_weights, strict=True)}

    shapes = [_agreed_shape(name, headers[:, index]) for index, (_, name, _) in enumerate(slots)]
    pieces: dict[str, list[Tensor]] = {"min": [], "max": [], "float_sum": [], "int_sum": []}
    places: list[tuple[str, int, int] | None] = []
    for (each, name, rule), header, shape in zip(slots, headers.unbind(dim=1), shapes, strict=True):
        if shape is None:
            places.append(None)
            continue
        is_whole = bool(header[:, 1].max())
        bucket = str(rule) if rule in ("min", "max") else "int_sum" if is_whole else "float_sum"
        # Where nobody has counted (statistics set by hand), all who have the statistic weigh the same.
        weight = weight_of[id(each)][0] if weight_of[id(each)][1] else 1
        piece = _contribution(each, name, rule, shape, is_whole, weight, group).to(device)
        start = sum(len(p) for p in pieces[bucket])
        pieces[bucket].append(piece)
        places.append((bucket, start, start + len(piece)))
    reduced = _reduce(pieces, group)

    for (each, name, rule), place, shape, header in zip(slots, places, shapes, headers.unbind(dim=1), strict=True):
        if place is None or shape is None:
            continue
        value = reduced[place[0]][place[1] : place[2]].reshape(shape)
        if rule == "mean":
            value = value / (weight_of[id(each)][1] or int(header[:, 0].sum()))
        if place[0] != "int_sum":
            value = value.float()
        setattr(each, name, value.to(_home(each, name, device)))
        if rule == "sum":
            each._synced[name] = getattr(each, name).clone()
        seen = int(header[:, 2].max())
        each._observed_dtype = _DTYPES[seen - 1] if seen else None
    for each in observers:
        each.num_observed = weight_of[id(each)][1]
        each._synced["num_observed"] = each.num_observed
        each.statistics_replaced()


def _check_same_observers(observers: Sequence[Observer], device: torch.device, group: dist.ProcessGroup | None) -> None:
    """MergeError on every rank unless all of them sync the same list; nothing else may be exchanged before."""
    described = ";".join(f"{type(o).__name__} {o.base_name} {o.args.model_dump_json()}" for o in observers)
    mine = torch.tensor([len(observers), zlib.crc32(described.encode())], dtype=torch.int64)
    everyone = _gather(mine, device, group)
    if bool((everyone != everyone[0]).any()):
        raise MergeError(
            f"the ranks sync different observers: their numbers are {everyone[:, 0].tolist()}. "
            "Call sync for the same observers, in the same order, on every rank."
        )


def _header(observer: Observer, name: str, rule: Rule) -> list[int]:
    value = getattr(observer, name)
    dtype_seen = _DTYPES.index(observer._observed_dtype) + 1 if observer._observed_dtype in _DTYPES else 0
    if value is None:
        return [0, 0, dtype_seen, 0] + [0] * _MAX_DIMS
    padding = [0] * (_MAX_DIMS - value.ndim)
    return [1, int(not value.is_floating_point()), dtype_seen, value.ndim, *value.shape, *padding]


def _agreed_shape(name: str, header_R: Tensor) -> tuple[int, ...] | None:
    """The shape of a statistic on the ranks that have it; None where none has."""
    there = header_R[header_R[:, 0] == 1]
    if len(there) == 0:
        return None
    shapes = {tuple(row[4 : 4 + int(row[3])]) for row in there.tolist()}
    if len(shapes) > 1:
        raise MergeError(
            f"{name} has different shapes on the ranks: {sorted(shapes)}. Observe the same tensor on each."
        )
    return next(iter(shapes))


def _new_amount(observer: Observer, group: dist.ProcessGroup | None) -> int:
    """How much this rank has seen that no earlier sync has counted; rank 0 stands for what was synced before."""
    synced = observer._synced.get("num_observed", 0)
    return observer.num_observed - (int(synced) if dist.get_rank(group) else 0)


def _contribution(
    observer: Observer,
    name: str,
    rule: Rule,
    shape: tuple[int, ...],
    is_whole: bool,
    weight: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    dtype = torch.int64 if is_whole else torch.float32 if rule in ("min", "max") else torch.float64
    value: Tensor | None = getattr(observer, name)
    if value is None:
        return torch.full(shape, _NEUTRAL[rule], dtype=dtype).flatten()
    value = value.detach().to(dtype)
    if rule == "sum" and dist.get_rank(group) and name in observer._synced:
        value = value - torch.as_tensor(observer._synced[name]).to(value)
    return (value * weight if rule == "mean" else value).flatten()


def _reduce(pieces: dict[str, list[Tensor]], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    operations = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    reduced = {}
    for bucket, parts in pieces.items():
        if parts:
            reduced[bucket] = torch.cat(parts)
            dist.all_reduce(reduced[bucket], op=operations.get(bucket, dist.ReduceOp.SUM), group=group)
    return reduced


def _gather(mine: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """The same tensor from every rank, stacked in rank order, on the CPU."""
    everyone = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine.to(device), group=group)
    return torch.stack(everyone).cpu()


def _home(observer: Observer, name: str, default: torch.device) -> torch.device:
    value = getattr(observer, name)
    return default if value is None else value.device


def _collective_device(observers: Sequence[Observer], group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for the group's backend: nccl wants this rank's GPU, gloo the CPU."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
