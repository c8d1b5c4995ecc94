"""Ranks: who sees which batches, how what they have seen becomes one, and who works on which layers.

All ranks have the whole model and know all the data. Each runs its own share of the batches. Before a layer is
quantised, what the ranks have seen of it is merged as if one had seen it all: statistics of observers by their rules,
Hessians by adding them up, samples of inputs in the order of the batches. Then each layer is quantised by one rank,
which sends the others what a loader would read; they take it as a run that goes on takes it from its journal. So all
ranks have the same model at all times. The first rank alone writes files.

Nothing is pickled. How ranks find out that one of them is gone is the business of heartbeats.py.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from scalewright.calibration.heartbeats import TIMEOUT_SECONDS, Watch, new_watch
from scalewright.calibration.lockstep import Place
from scalewright.errors import CalibrationError, RankError, ScalewrightError
from scalewright.modifiers.gptq_layer import GPTQLayer, Hessian
from scalewright.modifiers.layers import SAMPLE_TOKENS, QuantizedLayer, WatchedLayer
from scalewright.observers import Observer, QParamsDict, sync_statistics
from scalewright.observers.merging import collective_device

if TYPE_CHECKING:
    from scalewright.calibration.pipelines import Keeper

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ROUND = 4  # times what the largest group of layers costs: so much work each rank has between two exchanges
_OBSERVERS = 128  # whose statistics are merged at a time: histograms are half a megabyte each
_ROWS = 512  # of a Hessian that travel at a time
_PLACE = 4  # numbers that say where a forward pass waits, at most


class Share(NamedTuple):
    """Layers, and the rank that quantises them; `by_rows` if the others help it to round them."""

    owner: int
    layers: list[WatchedLayer]
    by_rows: bool = False


@dataclass(frozen=True)
class Ranks:
    """The processes that share the work of a run, as one of them sees it. By default it is alone.

    What is done together is called by all ranks in the same order; whoever is alone does nothing by it.
    """

    rank: int = 0
    count: int = 1
    watch: Watch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether it is this one that says why a run ends: the first that is not lost."""
        lost = set() if self.watch is None else self.watch.lost
        return all(rank in lost for rank in range(self.rank))

    @property
    def is_ending(self) -> bool:
        """Whether the run is about to end by an error already."""
        return self.watch is not None and self.watch.is_ending

    # ---- who does what -----------------------------------------------------------------------------------------------

    def share_of(self, costs: Sequence[int]) -> slice:
        """Which of the batches, with these numbers of tokens, are run by this rank: some that follow each other.

        Together the shares of all ranks are all batches, in their order, and none is in two of them.
        """
        total, before, owners = sum(costs), 0, []
        for cost in costs:
            owners.append(min(self.count - 1, (2 * before + cost) * self.count // (2 * total)))
            before += cost
        start = sum(owner < self.rank for owner in owners)
        return slice(start, start + owners.count(self.rank))

    def rounds(self, groups: Sequence[list[WatchedLayer]]) -> Iterator[list[Share]]:
        """Groups of layers in rounds, each with the rank that quantises it.

        A round is so much work that all ranks are done at about the same time. Between rounds they exchange what they
        have, so nobody keeps much, and little is lost when a run is stopped. Where there are fewer groups than ranks,
        those who have nothing to do help to round rows.
        """
        if self.count == 1:
            yield from ([Share(0, group)] for group in groups)
            return
        costs = [sum(layer.cost for layer in group) for group in groups]
        enough = _ROUND * self.count * max(costs, default=0.0)
        some: list[int] = []
        for number in range(len(groups)):
            some.append(number)
            if sum(costs[each] for each in some) >= enough or number == len(groups) - 1:
                owners = _shared_out([costs[each] for each in some], self.count)
                by_rows = len(some) < self.count
                yield [Share(owner, groups[each], by_rows) for owner, each in zip(owners, some, strict=True)]
                some = []

    # ---- saying and hearing ------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        self._gather_numbers([0])

    def on_first(self, action: Callable[[], object]) -> None:
        """Let the first rank do something; if it fails, all do."""
        if self.is_first:
            action()
        self.meet()

    def gather(self, mine: Any) -> list[Any]:
        """Plain data of every rank, in their order."""
        if self.count == 1:
            return [mine]
        text = json.dumps(mine).encode()
        lengths = [each[0] for each in self._gather_numbers([len(text)])]
        sent = torch.frombuffer(bytearray(text.ljust(max(lengths), b" ")), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(sent) for _ in lengths]
        self._wait(dist.all_gather(everyone, sent, async_op=True))
        return [json.loads(bytes(each.cpu().numpy())) for each in everyone]

    def told_by(self, rank: int, mine: Callable[[], Any]) -> Any:
        """Plain data that one rank finds out, and tells the others."""
        if self.count == 1:
            return mine()
        text = json.dumps(mine()).encode() if rank == self.rank else b""
        return json.loads(self._broadcast(rank, text))

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse ranks that were given different things."""
        for rank, theirs in enumerate(everyone := self.gather(dict(facts))):
            other = next((name for name in facts if theirs.get(name) != everyone[0].get(name)), None)
            if other is not None:
                raise RankError(f"rank {rank}: has another {other} than rank 0. Give all ranks the same.")

    def earliest(self, place: Place | None) -> Place | None:
        """The first of the places that the ranks' passes have come to; None if none of them has any left."""
        if self.count == 1:
            return place
        mine = [0] * (1 + _PLACE) if place is None else [1, *place, *[-1] * (_PLACE - len(place))]
        there = [tuple(each[1:]) for each in self._gather_numbers(mine) if each[0]]
        return tuple(each for each in min(there) if each >= 0) if there else None

    def first_with(self, is_it: bool) -> int:
        """The first rank of which something is true. There is one."""
        return next(rank for rank, (is_true,) in enumerate(self._gather_numbers([int(is_it)])) if is_true)

    # ---- layers ------------------------------------------------------------------------------------------------------

    def sync(self, observers: Sequence[Observer]) -> None:
        """Leave all ranks with the statistics of one observer that saw what all of them saw."""
        if self.count == 1:
            return
        for start in range(0, len(observers), _OBSERVERS):
            sync_statistics(observers[start : start + _OBSERVERS], wait=self._wait)

    def merge(self, shares: Sequence[Share]) -> None:
        """Make what ranks have seen of layers one, for those that quantise them."""
        if self.count == 1:
            return
        layers = [layer for share in shares for layer in share.layers]
        owners = [share.owner for share in shares for _ in share.layers]
        self.sync([each for layer in layers for each in layer.observers_to_merge()])
        everyone = self.gather([layer.told() for layer in layers])
        for number, layer in enumerate(layers):
            layer.heard([told[number] for told in everyone])
        self._merge_samples(layers, owners, everyone)
        self._merge_hessians(
            [
                (layer, [*range(self.count)] if share.by_rows else [share.owner])
                for share in shares
                for layer in share.layers
                if isinstance(layer, GPTQLayer)
            ]
        )

    @contextmanager
    def helped(self, share: Share, layer: WatchedLayer) -> Iterator[None]:
        """While its owner finishes a layer inside, the other ranks, which call `help`, round rows of it."""
        if not (share.by_rows and isinstance(layer, GPTQLayer)):
            yield
            return
        is_asked = []

        def rounded(qparams: QParamsDict) -> tuple[Tensor, Tensor]:
            is_asked.append(True)
            given = {name: each for name, each in qparams.items() if isinstance(each, Tensor)}
            self.sent(self.rank, lambda: (given, {"is_asked": True}))
            return self._rounded_by_all(layer, qparams)

        layer.shared_rounding = rounded
        yield
        layer.shared_rounding = None
        if not is_asked:
            self.sent(self.rank, lambda: ({}, {"is_asked": False}))

    def help(self, share: Share) -> None:
        """Round rows of layers that another rank owns, if it wants help."""
        for layer in share.layers:
            if not (share.by_rows and isinstance(layer, GPTQLayer)):
                continue
            layer.target  # noqa: B018  (so that it, and the Hessian's factor, is there when the owner asks)
            given, asked = self.sent(share.owner, lambda: ({}, {}))
            if asked["is_asked"]:
                point, over_all = given["zero_point"], given.get("global_scale")
                self._rounded_by_all(layer, {"scale": given["scale"], "zero_point": point, "global_scale": over_all})

    def pass_on(self, layer: WatchedLayer, owner: int, finished: QuantizedLayer | None) -> QuantizedLayer:
        """What became of a layer, on all ranks: its owner has finished it, and the others restore it."""
        if self.count == 1:
            assert finished is not None
            return finished
        tensors, record = self.sent(
            owner, lambda: (finished.compressed, finished.record()) if finished is not None else ({}, {})
        )
        return finished if finished is not None else layer.restore(tensors, record)

    def sent(
        self, owner: int, mine: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """Tensors of a finished layer and what was noted of them, from the rank that has them."""
        if owner != self.rank:
            record = json.loads(self._broadcast(owner, b""))
            return load(self._broadcast(owner, b"")), record
        tensors, kept = mine()
        self._broadcast(owner, json.dumps(dict(kept)).encode())
        self._broadcast(owner, save({name: each.detach().cpu().contiguous() for name, each in tensors.items()}))
        return tensors, kept

    def keeper(self, journal: Keeper | None) -> Keeper | None:
        """Who keeps finished layers: the journal, which the first rank has alone."""
        return journal if self.count == 1 else _SharedJournal(self, journal)

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return collective_device(None)

    def _wait(self, work: dist.Work | None) -> None:
        assert self.watch is not None and work is not None
        self.watch.wait(work)

    def _gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        if self.count == 1:
            return [list(mine)]
        sent = torch.tensor(mine, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(sent) for _ in range(self.count)]
        self._wait(dist.all_gather(everyone, sent, async_op=True))
        return [each.tolist() for each in everyone]

    def _broadcast(self, owner: int, mine: bytes) -> bytes:
        length = torch.tensor([len(mine)], device=self._device)
        self._wait(dist.broadcast(length, src=owner, async_op=True))
        if not int(length):
            return b""
        if owner == self.rank:
            whole = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        else:
            whole = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._wait(dist.broadcast(whole, src=owner, async_op=True))
        return mine if owner == self.rank else whole.cpu().numpy().tobytes()

    def _merge_samples(
        self, layers: Sequence[WatchedLayer], owners: Sequence[int], everyone: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """Give each owner the tokens that one rank would have kept: the first ones, in the order of the batches."""
        taken = [_first_tokens([told[number]["sample"] for told in everyone]) for number in range(len(layers))]
        pieces: list[list[Tensor]] = [[] for _ in layers]
        for source in range(self.count):
            some = [i for i, owner in enumerate(owners) if taken[i][source] and owner != source]
            for i, each in enumerate([layer.sample for layer in layers] if source == self.rank else []):
                if each is not None and taken[i][source]:
                    pieces[i].append(each[: taken[i][source]])
            # Sent to all, and not to the owner alone: gloo tells nobody how far it is with messages between two.
            kinds = [(taken[i][source], *everyone[source][i]["sample"][1:]) for i in some]
            sent = self._broadcast_tensors(source, [pieces[i][-1] for i in some] if source == self.rank else [], kinds)
            for i, each in zip(some, sent, strict=True):
                if owners[i] == self.rank:
                    pieces[i].append(each.to(_device_of(layers[i])))
        for i, layer in enumerate(layers):
            if owners[i] == self.rank:
                layer.sample = torch.cat(pieces[i]) if pieces[i] else None

    def _broadcast_tensors(
        self, source: int, mine: Sequence[Tensor], kinds: Sequence[tuple[int, int, str]]
    ) -> list[Tensor]:
        """Tensors of one rank, of which all know the numbers of rows and columns, and the dtypes."""
        if not kinds:
            return []
        sizes = [rows * columns * _dtype(dtype).itemsize for rows, columns, dtype in kinds]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        if source == self.rank:
            whole.copy_(torch.cat([each.contiguous().flatten().view(torch.uint8) for each in mine]))
        self._wait(dist.broadcast(whole, src=source, async_op=True))
        return [
            # A copy, whose memory begins where a number may.
            each.clone().view(_dtype(dtype)).reshape(rows, columns)
            for each, (rows, columns, dtype) in zip(torch.split(whole.cpu(), sizes), kinds, strict=True)
        ]

    def _rounded_by_all(self, layer: GPTQLayer, qparams: QParamsDict) -> tuple[Tensor, Tensor]:
        """What `round_rows` gives for all rows, of which each rank rounds some."""
        num_rows, num_columns = layer.weight.shape
        cuts = [num_rows * rank // self.count for rank in range(self.count + 1)]
        device = layer.weight.device
        moved: Any = {name: None if each is None else each.to(device) for name, each in qparams.items()}  # type: ignore[attr-defined]
        mine = layer.round_rows(moved, slice(cuts[self.rank], cuts[self.rank + 1]))
        pieces = []
        for source in range(self.count):
            rows = cuts[source + 1] - cuts[source]
            kinds = [(num_columns, rows, "float32"), (len(mine[1]), rows, "float32")]
            sent = self._broadcast_tensors(source, mine if source == self.rank else [], kinds if rows else [])
            pieces += [sent] if sent else []
        rounded_CR, scale_GR = (torch.cat(each, dim=1).to(device) for each in zip(*pieces, strict=True))
        return rounded_CR, scale_GR

    def _merge_hessians(self, layers: Sequence[tuple[GPTQLayer, list[int]]]) -> None:
        """Add up the Hessians of layers for their owners. Layers that share one on every rank share the sum.

        A Hessian becomes the sum on all ranks, once: layers that are quantised later may have the same one.
        """
        if not layers:
            return
        mine = [layer.inputs for layer, _ in layers]
        firsts = [-1 if each is None else next(i for i, other in enumerate(mine) if other is each) for each in mine]
        told = [[first, *([0] * 6 if each is None else each.told())] for first, each in zip(firsts, mine, strict=True)]
        everyone = self.gather(told)
        kinds: dict[tuple[int, ...], list[int]] = {}
        for number in range(len(layers)):
            kinds.setdefault(tuple(told[number][0] for told in everyone), []).append(number)
        for firsts_R, numbers in kinds.items():
            seen = {rank: told[numbers[0]][1:] for rank, told in enumerate(everyone) if firsts_R[rank] >= 0}
            if not seen:
                continue
            layer, local = layers[numbers[0]][0], mine[numbers[0]]
            counted = _counted(layer, seen)
            is_shared = local is not None and sum(other is local for other in mine) > len(numbers)
            summed = local
            if summed is None or not (len(seen) == self.count and summed.is_of_all_ranks):
                own = None if is_shared else local
                summed = Hessian.merged(own, [seen[rank] for rank in counted], _device_of(layer))
                if is_shared and local is not None:
                    summed.copy_matrices(local)
                for strip in summed.strips(_ROWS):
                    self._add_up(strip, is_counted=self.rank in counted)
            for number in numbers:
                layers[number][0].inputs = summed if self.rank in layers[number][1] else None

    def _add_up(self, strip: Tensor, *, is_counted: bool) -> None:
        """Add up a piece of a matrix over the ranks that are counted, in place, for all."""
        whole = strip.to(self._device, copy=True).contiguous()
        if not is_counted:
            whole.zero_()
        self._wait(dist.all_reduce(whole, async_op=True))
        strip.copy_(whole)


class _SharedJournal:
    """The journal of the first rank, as all ranks see it: what is read there is sent to all, who ask together."""

    def __init__(self, ranks: Ranks, journal: Keeper | None) -> None:
        self._ranks = ranks
        self._journal = journal
        names: Any = getattr(journal, "entries", {})
        self._names = set(ranks.told_by(0, lambda: sorted(names)))
        self._records: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        """Whether a layer was finished in an earlier run."""
        return name in self._names

    def record(self, name: str) -> dict[str, Any]:
        """What was kept with the tensors of a layer whose `part` was read."""
        return self._records.pop(name)

    def part(self, name: str) -> Mapping[str, Tensor]:
        """The tensors of a layer that was finished before."""
        journal = self._journal
        tensors, record = self._ranks.sent(
            0, lambda: ({}, {}) if journal is None else (journal.part(name), journal.record(name))
        )
        self._records[name] = dict(record)
        return tensors

    def keep(self, name: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Write a finished layer, if this is the first rank. The others need its tensors no more."""
        return {} if self._journal is None else self._journal.keep(name, tensors, record)

    def forget(self, names: Iterable[str]) -> None:
        """Layers that were finished are not finished after all."""
        names = list(names)
        self._names.difference_update(names)
        if self._journal is not None:
            self._journal.forget(names)


# ---- joining ---------------------------------------------------------------------------------------------------------


@contextmanager
def joined_ranks(*, timeout: float = TIMEOUT_SECONDS, device: str | torch.device | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun has started, of which this is one; it is alone if it was not started so.

    They talk by gloo on CPUs, and on accelerators by what torch has for them. The group is left when all went well.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    kind = torch.device(device or "cpu").type
    if kind != "cpu" and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    # Longer than we wait ourselves, who can say for whom.
    limit = datetime.timedelta(seconds=timeout + 60)
    try:
        dist.init_process_group(dist.get_default_backend_for_device(kind), timeout=limit)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankError(f"the ranks cannot find each other ({first}). Start them with torchrun.") from None
    with watched_ranks(timeout=timeout) as ranks:
        yield ranks
    dist.destroy_process_group()  # not after a failure: it would wait for what is still under way


@contextmanager
def watched_ranks(*, timeout: float = TIMEOUT_SECONDS) -> Iterator[Ranks]:
    """The ranks of the default process group, watching each other; this one alone if there is no group.

    All ranks enter and leave together. Who leaves by an error tells the others, who stop with a RankError.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield Ranks()
        return
    rank, count = dist.get_rank(), dist.get_world_size()
    watch = new_watch(dist.distributed_c10d._get_default_store(), _token(count, timeout), rank, count, timeout=timeout)
    ranks = Ranks(rank, count, watch)
    watch.start()
    try:
        yield ranks
        ranks.meet()
    except RankError as error:
        watch.tell(str(error))
        raise
    except BaseException as error:
        if not isinstance(error, Exception | KeyboardInterrupt) and (why := watch.reason()) is not None:
            raise RankError(why) from None
        watch.tell(f"rank {rank}: {_in_words(error)}")
        raise
    finally:
        watch.stop()


def with_ranks(run: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, shared by the ranks of the process group, if there is one and no `ranks` were given."""

    @wraps(run)
    def joined(*args: _P.args, **keywords: _P.kwargs) -> _T:
        if keywords.get("ranks") is not None:
            return run(*args, **keywords)
        with watched_ranks() as ranks:
            keywords["ranks"] = ranks
            return run(*args, **keywords)

    return joined


def _token(count: int, timeout: float) -> int:
    """A number that the first rank has drawn, when all have come."""
    sent = torch.tensor([secrets.randbits(62)], device=collective_device(None))
    everyone = [torch.empty_like(sent) for _ in range(count)]
    work = dist.all_gather(everyone, sent, async_op=True)
    assert work is not None
    deadline = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RankError(f"not all of the {count} ranks have come within {timeout:g} s. Start all of them.")
        time.sleep(0.001)
    work.wait()
    return int(everyone[0])


def _in_words(error: BaseException) -> str:
    if isinstance(error, ScalewrightError):
        return str(error)
    if not isinstance(error, Exception):
        return "was stopped."
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"


def _shared_out(costs: Sequence[float], count: int) -> list[int]:
    """Who does which of some pieces of work: the largest first, each to whoever has the least to do."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = min(range(count), key=lambda rank: loads[rank])
        loads[owners[number]] += costs[number]
    return owners


def _counted(layer: GPTQLayer, told: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks, of those that have a Hessian, whose ones add up to that of all: one if it has that already."""
    whole = [rank for rank, each in told.items() if each[-1]]
    if whole and any(each != told[whole[0]] for each in told.values()):
        raise CalibrationError(
            f"{layer.name}: has the inputs of other layers on some ranks, and on others not. Their Hessian cannot be "
            "shared. Use QuantizationModifier for one of them, or ignore it."
        )
    return whole[:1] or list(told)


def _first_tokens(samples_R: Iterable[Sequence[Any]]) -> list[int]:
    """How many tokens to take from each rank's sample, so that together they are what one rank would have kept."""
    taken: list[int] = []
    for count, *_ in samples_R:
        taken.append(min(count, SAMPLE_TOKENS - sum(taken)))
    return taken


def _device_of(layer: WatchedLayer) -> torch.device:
    return next((each.device for each in layer.module.parameters()), torch.device("cpu"))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
