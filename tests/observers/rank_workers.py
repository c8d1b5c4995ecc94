"""One rank of a process group on the CPU: it plays every scenario in turn and writes down what it saw.

Run as a script by the tests of ranks, with RANK and WORLD_SIZE in the environment and a folder as its argument. Each
scenario has a process group and files of its own, so one that fails does not spoil the next. Tensors go to
`{number}.rank{r}.safetensors` under keys `case|stage|statistic`, all else to `{number}.rank{r}.json`. This file asserts
nothing: it records, and the tests judge.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import save_file
from torch import Tensor

from scalewright.errors import ScalewrightError
from scalewright.numerics.layout import STRATEGIES
from scalewright.observers import Observer, sync_statistics
from scalewright.observers.catalog import registered_observers

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
HIDDEN, HEADS, HEAD_DIM, SEQUENCE = 32, 2, 8, 4

ARGS = {
    "tensor": {"num_bits": 8, "symmetric": False},
    "channel": {"num_bits": 4, "symmetric": False},
    "group": {"num_bits": 4, "group_size": 16},
    "tensor_group": {"num_bits": 4, "type": "float", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
    "block": {"num_bits": 8, "type": "float", "block_structure": [8, 16]},
    "token": {"num_bits": 8, "dynamic": True},
    "attn_head": {"num_bits": 8, "type": "float"},
}
# The search itself is not what is tested here, so it is short; the average forgets fast, so that order shows.
KNOBS = {"grid": 10.0, "maxshrink": 0.5, "bins": 256, "averaging_constant": 0.3}
DTYPES = {"weight": torch.float32, "input": torch.bfloat16, "output": torch.float32, "q": torch.float16}

WATCHED = ("weight", "input", "q")  # "output" is laid out as "input" is, "k" and "v" as "q" is

# Batch sizes that each rank sees at first, and those it sees after the first sync.
FIRST_SIZES = ([1], [2, 1, 3], [1, 2])
LATER_SIZES = ([2], [1, 1], [])

PICKLING = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


@dataclass
class Rank:
    """Who this process is, and what it has written down."""

    rank: int
    world: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def keep(self, case: str, stage: str, observer: Observer) -> None:
        """Write down all statistics of `observer`, how much it saw and, where it can be asked, its qparams.

        At stages called `before_...` only statistics are of interest, and qparams take time.
        """
        found = {name: getattr(observer, name) for name in observer.merge_rules}
        found["num_observed"] = torch.tensor(observer.num_observed)
        if observer.has_statistics and not stage.startswith("before_"):
            found.update(observer.get_qparams())
        for name, value in found.items():
            if value is not None:
                self.tensors[f"{case}|{stage}|{name}"] = _compact(torch.as_tensor(value))

    def keep_error(self, case: str, action: Callable[[], object]) -> None:
        """Write down the error that `action` ends in; None if it ends well."""
        try:
            action()
        except ScalewrightError as error:
            self.facts[case] = {"type": type(error).__name__, "text": str(error)}
        else:
            self.facts[case] = None


def _compact(value: Tensor) -> Tensor:
    """`value` in memory of its own; a histogram as pairs of code and count, since nearly all counts are zero."""
    if value.numel() < 4096:
        return value.detach().clone().contiguous()
    flat = value.flatten()
    where = flat.nonzero().squeeze(1)
    return torch.stack([where, flat[where].long()])


# ---- what is observed ----------------------------------------------------------------------------------------------


def make(name: str, base_name: str, strategy: str) -> Observer:
    """A new observer with a short search."""
    cls = registered_observers()[name]
    knobs = {knob.name: KNOBS[knob.name] for knob in cls.knobs if knob.name in KNOBS}
    return cls(base_name, QuantizationArgs(strategy=strategy, **ARGS[strategy]), **knobs)


def layouts(cls: type[Observer]) -> Iterator[tuple[str, str]]:
    """Every pair of base name and strategy that the class serves."""
    for base_name in WATCHED:
        for strategy in STRATEGIES[base_name]:
            if not cls.strategies or strategy in cls.strategies:
                yield base_name, strategy


def batches(base_name: str, rank: int, *, later: bool = False) -> list[Tensor]:
    """What a rank observes. Ranks lean to different sides, so the least and the largest value are not of one rank.

    A weight is the same on every rank, as it is where a model is copied to each; it is seen once.
    """
    if base_name == "weight":
        return [] if later else [_random(7, 16, HIDDEN)]
    sizes = (LATER_SIZES if later else FIRST_SIZES)[rank]
    lean = (-2.0, 3.0, 0.0)[rank] * (1.5 if later else 1.0)
    shape = (HEADS, SEQUENCE, HEAD_DIM) if base_name == "q" else (SEQUENCE, HIDDEN)
    return [
        (_random(1000 * rank + 100 * later + index, size, *shape) * (1 + 0.2 * index) + lean).to(DTYPES[base_name])
        for index, size in enumerate(sizes)
    ]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def see(observer: Observer, rank: int, *, later: bool = False) -> None:
    """Show `observer` what `rank` sees."""
    for batch in batches(observer.base_name, rank, later=later):
        observer(batch)


# ---- every observer ------------------------------------------------------------------------------------------------


def play_observer(me: Rank, name: str) -> None:
    """Uneven data, a second sync, more data and a third; then each rank in turn sees nothing; then none sees any."""
    for base_name, strategy in layouts(registered_observers()[name]):
        case = f"{name}/{base_name}/{strategy}"
        observer = make(name, base_name, strategy)
        see(observer, me.rank)
        me.keep(case, "before_sync", observer)
        me.facts[f"{case}|handles"] = len(observer.sync_activation_stats())
        me.keep(case, "synced", observer)
        observer.sync_activation_stats()
        me.keep(case, "twice", observer)
        see(observer, me.rank, later=True)
        me.keep(case, "before_again", observer)
        observer.sync_activation_stats()
        me.keep(case, "again", observer)
    served = list(layouts(registered_observers()[name]))
    for absent in (*range(me.world), None):
        observers = [make(name, *layout) for layout in served]
        stage = "unseen" if absent is None else f"unseen{absent}"
        for layout, observer in zip(served, observers, strict=True):
            if absent not in (None, me.rank):
                see(observer, me.rank)
            me.keep("/".join((name, *layout)), f"before_{stage}", observer)
        sync_statistics(observers)
        for layout, observer in zip(served, observers, strict=True):
            me.keep("/".join((name, *layout)), stage, observer)


def play_observer_alone(me: Rank, name: str) -> None:
    """The same, seen by one observer that is never synced."""
    for base_name, strategy in layouts(registered_observers()[name]):
        case = f"{name}/{base_name}/{strategy}"
        everything = make(name, base_name, strategy)
        for rank in range(me.world):
            see(everything, rank)
        me.keep(case, "alone_synced", everything)
        for rank in range(me.world):
            see(everything, rank, later=True)
        me.keep(case, "alone_again", everything)
        for absent in range(me.world):
            most = make(name, base_name, strategy)
            for rank in range(me.world):
                if rank != absent:
                    see(most, rank)
            me.keep(case, f"alone_unseen{absent}", most)


def play_together(me: Rank) -> None:
    """All observers of one kind of tensor, synced one by one and then once more in a single call."""
    names = [name for name, cls in registered_observers().items() if ("input", "tensor") in layouts(cls)]
    for stage in ("one_by_one", "at_once"):
        observers = [make(name, "input", "tensor") for name in names] + [make(name, "q", "tensor") for name in names]
        for index, observer in enumerate(observers):
            if index % me.world != me.rank:  # each is unknown to one rank
                see(observer, me.rank)
        if stage == "at_once":
            sync_statistics(observers)
        else:
            for observer in observers:
                observer.sync_activation_stats()
        for observer in observers:
            me.keep(f"together/{observer.registry_name}/{observer.base_name}", stage, observer)
    sync_statistics([])


def play_neighbours(me: Rank) -> None:
    """Observer `a` is unknown to rank 1; `b`, of the same kind, is synced right after it."""
    a, b = make("static_minmax", "input", "tensor"), make("static_minmax", "input", "tensor")
    if me.rank != 1:
        a(torch.full((1, 1, HIDDEN), 500.0 + me.rank))
    b(torch.full((1, 1, HIDDEN), 2.0 + me.rank))
    for observer in (a, b):
        observer.sync_activation_stats()
    me.keep("neighbours/a", "synced", a)
    me.keep("neighbours/b", "synced", b)


def play_fused(me: Rank) -> None:
    """Two fused weights, the same on every rank, before and after a sync."""
    for name, cls in registered_observers().items():
        if ("weight", "tensor_group") not in layouts(cls):
            continue
        pair = [make(name, "weight", "tensor_group") for _ in range(2)]
        Observer.fuse(pair)
        for index, observer in enumerate(pair):
            observer(_random(40 + index, 16, 64) * (1 + 0.37 * index))
        me.keep(f"fused/{name}", "before", pair[0])
        sync_statistics(pair)
        me.keep(f"fused/{name}", "synced", pair[0])


def play_merge_of_synced(me: Rank) -> None:
    """Two observers that were synced are merged, and the result is synced again."""
    for name, cls in registered_observers().items():
        if ("input", "tensor") not in layouts(cls):
            continue
        first, second = make(name, "input", "tensor"), make(name, "input", "tensor")
        see(first, me.rank)
        see(second, me.rank, later=True)
        sync_statistics([first, second])
        first.merge(second)
        me.keep(f"merge_of_synced/{name}", "merged", first)
        first.sync_activation_stats()
        me.keep(f"merge_of_synced/{name}", "synced", first)


# ---- importance ----------------------------------------------------------------------------------------------------


def _linear_inputs(rank: int) -> list[Tensor]:
    channels = torch.linspace(0.1, 4.0, HIDDEN).roll(11 * rank)
    return [_random(50 + 10 * rank + index, size, 5, HIDDEN) * channels for index, size in enumerate(FIRST_SIZES[rank])]


def _linear() -> torch.nn.Linear:
    linear = torch.nn.Linear(HIDDEN, 16, bias=False)
    linear.weight.data = _random(8, 16, HIDDEN)
    return linear


def play_importance(me: Rank) -> None:
    """A layer's inputs are collected, synced and used; also where the layer of one rank got none, or had no hook."""
    for strategy in ("channel", "group", "tensor_group"):
        for absent in (None, *range(me.world)):
            case = f"importance/{strategy}/{'all' if absent is None else absent}"
            linear, observer = _linear(), make("imatrix_mse", "weight", strategy)
            if strategy != "group" or me.rank != absent:  # under "group" the absent rank never attaches
                observer.attach(linear)
            for x in [] if me.rank == absent else _linear_inputs(me.rank):
                linear(x)
            observer.sync_activation_stats()
            observer(linear.weight)
            me.keep(case, "synced", observer)
            observer.detach(linear)


def play_importance_alone(me: Rank) -> None:
    """The same in one process, where one layer gets all inputs."""
    for strategy in ("channel", "group", "tensor_group"):
        for absent in (None, *range(me.world)):
            linear, observer = _linear(), make("imatrix_mse", "weight", strategy)
            observer.attach(linear)
            for rank in range(me.world):
                for x in [] if rank == absent else _linear_inputs(rank):
                    linear(x)
            observer(linear.weight)
            me.keep(f"importance/{strategy}/{'all' if absent is None else absent}", "alone", observer)
            observer.detach(linear)


# ---- statistics set by hand ----------------------------------------------------------------------------------------


def play_whole_numbers(me: Rank) -> None:
    """Whole numbers, set by hand on the last rank; the others have seen nothing."""
    for name in ("static_minmax", "minmax"):
        observer = make(name, "input", "tensor")
        if me.rank == me.world - 1:
            observer.min_vals, observer.max_vals = torch.tensor([-3]), torch.tensor([5])
        observer.sync_activation_stats()
        me.keep(f"whole_numbers/{name}", "synced", observer)


def play_mixed_numbers(me: Rank) -> None:
    """Whole numbers, set by hand on the last rank; the others have fractions."""
    for name in ("static_minmax", "minmax"):
        observer = make(name, "input", "tensor")
        is_last = me.rank == me.world - 1
        observer.min_vals = torch.tensor([-3]) if is_last else torch.tensor([-3.75])
        observer.max_vals = torch.tensor([5]) if is_last else torch.tensor([5.75])
        observer.sync_activation_stats()
        me.keep(f"mixed_numbers/{name}", "synced", observer)


def play_uncounted(me: Rank) -> None:
    """Ranges set by hand on all ranks but the first, where no rank has counted tokens."""
    observer = make("minmax", "input", "tensor")
    if me.rank:
        observer.min_vals, observer.max_vals = torch.tensor([-1.0 * me.rank]), torch.tensor([4.0 * me.rank])
    observer.sync_activation_stats()
    me.keep("uncounted", "synced", observer)


def play_set_after_sync(me: Rank) -> None:
    """The first rank alone sees one value, or three; after a sync the last rank sets a range by hand."""
    for num_seen in (1, 3):
        case, observer = f"set_after_sync/{num_seen}", make("minmax", "input", "tensor")
        for index in range(num_seen if me.rank == 0 else 0):
            observer(torch.full((1, 1, HIDDEN), 2.0 + index))
        observer.sync_activation_stats()
        me.keep(case, "synced", observer)
        if me.rank == me.world - 1:
            observer.min_vals, observer.max_vals = torch.tensor([-50.0]), torch.tensor([50.0])
        for stage in ("again", "twice"):
            observer.sync_activation_stats()
            me.keep(case, stage, observer)


def play_subgroup(me: Rank) -> None:
    """The last two ranks sync among themselves, in a group of their own."""
    members = [me.world - 2, me.world - 1]
    group = dist.new_group(members)
    observer = make("percentile", "input", "tensor")
    see(observer, me.rank)
    me.keep("subgroup", "before", observer)
    if me.rank in members:
        sync_statistics([observer], group)
    me.keep("subgroup", "synced", observer)


def play_subgroup_then_all(me: Rank) -> None:
    """The last two ranks sync among themselves, and all of them afterwards."""
    members = [me.world - 2, me.world - 1]
    group = dist.new_group(members)
    for name in ("percentile", "minmax", "mse"):
        observer = make(name, "input", "tensor")
        see(observer, me.rank)
        if me.rank in members:
            sync_statistics([observer], group)
        observer.sync_activation_stats()
        me.keep(f"subgroup_then_all/{name}", "synced", observer)


# ---- ranks that do not agree ---------------------------------------------------------------------------------------


def _static(strategy: str = "tensor", *, base_name: str = "input", label: str | None = None) -> Observer:
    observer = make("static_minmax", base_name, strategy)
    observer.label = label
    return observer


def disagreements(rank: int) -> dict[str, list[Observer]]:
    """What each rank syncs, for every way in which the last rank may differ from the others."""
    is_odd = rank == int(os.environ["WORLD_SIZE"]) - 1
    knobs = make("percentile", "input", "tensor")
    if is_odd:
        knobs = type(knobs)("input", knobs.args, percentile=90.0)
    named = [_static(label="layers.0.input"), _static(label="layers.1.input")]
    return {
        "fewer": [_static()] if is_odd else [_static(), _static()],
        "none": [] if is_odd else [_static()],
        "class": [make("minmax", "input", "tensor") if is_odd else _static()],
        "base_name": [_static(base_name="output" if is_odd else "input")],
        "args": [_static("group" if is_odd else "tensor")],
        "knobs": [knobs],
        "order_of_classes": [*([_static(), make("minmax", "input", "tensor")])][:: -1 if is_odd else 1],
        "order_of_labels": named[:: -1 if is_odd else 1],
    }


def play_disagreement(me: Rank, kind: str) -> None:
    """One rank syncs other observers than the rest; then all sync the same one."""
    observers = disagreements(me.rank)[kind]
    for observer in observers:
        see(observer, me.rank)
    for index, observer in enumerate(observers):
        me.keep(f"disagree/{kind}/{index}", "before", observer)
    me.keep_error(f"disagree/{kind}", functools.partial(sync_statistics, observers))
    for index, observer in enumerate(observers):
        me.keep(f"disagree/{kind}/{index}", "refused", observer)
    after = _static()
    see(after, me.rank)
    after.sync_activation_stats()
    me.keep(f"disagree/{kind}", "afterwards", after)


def play_shapes(me: Rank) -> None:
    """One rank saw a tensor of another shape than the rest."""
    is_odd = me.rank == me.world - 1
    shapes = {
        ("input", "group"): (1, SEQUENCE, 2 * HIDDEN if is_odd else HIDDEN),
        ("q", "attn_head"): (1, 3 if is_odd else 2, SEQUENCE, HEAD_DIM),
    }
    for (base_name, strategy), shape in shapes.items():
        for name, cls in registered_observers().items():
            if (base_name, strategy) in layouts(cls):
                observer = make(name, base_name, strategy)
                observer(_random(90 + me.rank, *shape))
                _keep_refused_sync(me, f"shapes/{name}/{base_name}", observer)
    observer = make("imatrix_mse", "weight", "channel")
    observer.observe_input(_random(97, 3, 2 * HIDDEN if is_odd else HIDDEN))
    _keep_refused_sync(me, "shapes/imatrix_mse/importance", observer)


def _keep_refused_sync(me: Rank, case: str, observer: Observer) -> None:
    observer.label = "layers.3.self_attn"
    me.keep(case, "before", observer)
    me.keep_error(case, observer.sync_activation_stats)
    me.keep(case, "refused", observer)


def play_many_dimensions(me: Rank) -> None:
    """A statistic with more dimensions than most, on the first rank only."""
    observer = _static()
    if me.rank == 0:
        observer.min_vals, observer.max_vals = -torch.ones(1, 1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1, 1, 2)
    me.keep_error("many_dimensions", observer.sync_activation_stats)
    me.keep("many_dimensions", "synced", observer)


# ---- the play ------------------------------------------------------------------------------------------------------


def scenarios() -> dict[str, Callable[[Rank], None]]:
    """Every scenario by name, the same on each rank."""
    played: dict[str, Callable[[Rank], None]] = {
        f"observer/{name}": functools.partial(play_observer, name=name) for name in registered_observers()
    }
    played |= {
        "together": play_together,
        "neighbours": play_neighbours,
        "fused": play_fused,
        "merge_of_synced": play_merge_of_synced,
        "importance": play_importance,
        "shapes": play_shapes,
        "uncounted": play_uncounted,
        "set_after_sync": play_set_after_sync,
        "whole_numbers": play_whole_numbers,
        "mixed_numbers": play_mixed_numbers,
        "subgroup": play_subgroup,
        "subgroup_then_all": play_subgroup_then_all,
    }
    played |= {f"disagree/{kind}": functools.partial(play_disagreement, kind=kind) for kind in disagreements(0)}
    # Ranks that exchange messages of different size are ended by gloo itself, so what risks that comes last.
    played["many_dimensions"] = play_many_dimensions
    return played


def play_alone(me: Rank, scenario: str) -> None:
    """What one process that sees everything finds, where a scenario is to be compared with that."""
    if scenario == "importance":
        play_importance_alone(me)
    elif scenario.startswith("observer/"):
        play_observer_alone(me, scenario.removeprefix("observer/"))


def forbid_pickle(called: list[str]) -> None:
    """Make every collective that pickles raise, and note that it was called."""

    def forbid(name: str) -> Callable[..., None]:
        def refuse(*_: object, **__: object) -> None:
            called.append(name)
            raise RuntimeError(f"{name} pickles, and was called.")

        return refuse

    for name in PICKLING:
        setattr(dist, name, forbid(name))
        setattr(dist.distributed_c10d, name, forbid(name))


def main(folder: Path) -> None:
    """Play all scenarios as the rank that the environment says."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pickled: list[str] = []
    forbid_pickle(pickled)
    for number, (name, play) in enumerate(scenarios().items()):
        me, crash = Rank(rank, world), None
        dist.init_process_group(
            "gloo",
            init_method=f"file://{(folder / f'{number}.store').resolve()}",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        try:
            play(me)
        except Exception:
            crash = traceback.format_exc()
        finally:
            dist.destroy_process_group()
        if rank == 0:
            play_alone(me, name)
        save_file(me.tensors, folder / f"{number}.rank{rank}.safetensors")
        written = {"scenario": name, "facts": me.facts, "crash": crash, "pickled": pickled}
        (folder / f"{number}.rank{rank}.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
