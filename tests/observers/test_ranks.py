"""Real process groups on the CPU: after a sync all ranks hold what one process would hold that saw everything.

Two and three processes are started once each; they play every scenario of `rank_workers.py` and write down what they
saw. The tests here only read and judge. A rank that dies or hangs fails the tests of the scenarios it did not reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scalewright.observers.catalog import registered_observers

pytestmark = pytest.mark.ranks

WORKER = Path(__file__).with_name("rank_workers.py")
SECONDS_AT_MOST = 240.0  # a backstop: gloo's own limit comes first, and a busy machine is slow to start
GRACE_SECONDS = 30.0  # for the rest, once one rank has died: gloo gives up by itself before that

# Other tests may register observers of their own, which the started processes know nothing of.
OBSERVERS = {name: cls for name, cls in registered_observers().items() if cls.__module__.startswith("scalewright.")}
ORDER_FREE = [name for name, cls in OBSERVERS.items() if not cls.ordered]
AVERAGED = [name for name, cls in OBSERVERS.items() if cls.ordered]
SCALE_DTYPES = {"weight": torch.float32, "input": torch.bfloat16, "q": torch.float16}
DISAGREEMENTS = ("fewer", "none", "class", "base_name", "args", "knobs", "order_of_classes", "order_of_labels")


@dataclass(frozen=True)
class Record:
    """What one rank wrote down in one scenario; `tensors` by case, stage and statistic."""

    tensors: dict[tuple[str, str, str], Tensor] = field(repr=False)  # pytest shows arguments, and this is much
    facts: dict[str, dict[str, str] | int | None]
    crash: str | None
    pickled: list[str]

    def cases(self, prefix: str, stage: str) -> Iterator[str]:
        found = dict.fromkeys(c for c, s, _ in self.tensors if s == stage and (c + "/").startswith(prefix + "/"))
        assert found, f"nothing was written down for '{prefix}' at stage '{stage}'"
        yield from found

    def at(self, case: str, stage: str) -> dict[str, Tensor]:
        """All statistics and qparams of one case at one stage."""
        found = {name: value for (c, s, name), value in self.tensors.items() if (c, s) == (case, stage)}
        assert found, f"nothing was written down for '{case}' at stage '{stage}'"
        return found


@dataclass(frozen=True)
class Group:
    """What all ranks of one group wrote down, by scenario and rank, and how their processes ended."""

    world: int
    records: dict[tuple[str, int], Record] = field(repr=False)
    endings: list[str]

    def of(self, scenario: str) -> list[Record]:
        """The records of all ranks, rank 0 first; a rank that failed or did not get so far fails the test."""
        found = [self.records.get((scenario, rank)) for rank in range(self.world)]
        for rank, record in enumerate(found):
            if record is None:
                pytest.fail(f"rank {rank} wrote nothing of '{scenario}'. Ends: {'; '.join(self.endings)}")
            if record.crash:
                pytest.fail(f"rank {rank} failed in '{scenario}':\n{record.crash}")
        return [record for record in found if record is not None]


def run_group(folder: Path, world: int, *, script: Path = WORKER, seconds: float = SECONDS_AT_MOST) -> Group:
    """Start `world` processes, wait for all of them, and read what they wrote; whoever is late is killed."""
    setting = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        setting["GLOO_SOCKET_IFNAME"] = "lo"  # works where the machine's own name does not resolve
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"rank{rank}.log").open("wb") as log:
                command = [sys.executable, str(script), str(folder)]
                processes.append(
                    subprocess.Popen(command, env={**setting, "RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT)
                )
        is_late = _wait(processes, seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    endings = []
    for rank, process in enumerate(processes):
        how = f"was killed after {seconds:g} s" if rank in is_late else f"ended with {process.returncode}"
        log_text = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        endings.append(f"rank {rank} {how} {log_text[-600:]}".strip())
    return Group(world, _read_records(folder), endings)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """The ranks that are still running when time is up; it is up soon after one of them has failed."""
    deadline, has_failed = time.monotonic() + seconds, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not has_failed and any(process.poll() for process in processes):
            has_failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _read_records(folder: Path) -> dict[tuple[str, int], Record]:
    records = {}
    for path in folder.glob("*.json"):
        number, rank, _ = path.name.split(".")
        written = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(folder / f"{number}.{rank}.safetensors")
        by_place = {tuple(key.split("|")): value for key, value in tensors.items()}
        key = (written["scenario"], int(rank.removeprefix("rank")))
        records[key] = Record(by_place, written["facts"], written["crash"], written["pickled"])
    return records


@pytest.fixture(scope="module", params=[2, 3], ids=["two_ranks", "three_ranks"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    return run_group(tmp_path_factory.mktemp("ranks"), request.param)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str, *, rtol: float = 0) -> None:
    """The same statistics and qparams, of the same dtypes; bit for bit, unless `rtol` allows more."""
    assert actual.keys() == expected.keys(), where
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=0, msg=lambda m, n=name: f"{where} {n}: {m}")


def assert_ranks_agree(records: list[Record], case: str, stage: str) -> None:
    for rank, record in enumerate(records[1:], start=1):
        assert_same(record.at(case, stage), records[0].at(case, stage), f"{case} {stage}, rank {rank} and rank 0:")


def assert_equals_one_process(name: str, actual: dict[str, Tensor], alone: dict[str, Tensor], where: str) -> None:
    """Extremes, counts, averages and qparams to the bit; sums of fractions as closely as fp32 and float64 add up."""
    cls = OBSERVERS[name]
    assert actual.keys() == alone.keys(), where
    for statistic, expected in alone.items():
        rule = cls.merge_rules.get(statistic)
        is_sum_of_fractions = rule == "sum" and expected.is_floating_point()
        torch.testing.assert_close(
            actual[statistic],
            expected,
            rtol=1e-6 if is_sum_of_fractions else 1e-12 if rule == "decayed" else 0,
            atol=0,
            msg=lambda m, s=statistic: f"{where} {s}: {m}",
        )


def synced_stages(world: int) -> list[str]:
    return ["synced", "twice", "again", "unseen", *(f"unseen{rank}" for rank in range(world))]


# ---- every observer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVERS)
def test_all_ranks_hold_the_same_statistics_and_qparams_after_a_sync(group: Group, name: str) -> None:
    records = group.of(f"observer/{name}")
    for stage in synced_stages(group.world):
        for case in records[0].cases(name, stage):
            assert_ranks_agree(records, case, stage)


@pytest.mark.parametrize("name", OBSERVERS)
def test_uneven_ranks_hold_what_one_process_holds_that_saw_everything(group: Group, name: str) -> None:
    record = group.of(f"observer/{name}")[0]
    for case in record.cases(name, "synced"):
        counts = [int(each.at(case, "before_sync")["num_observed"]) for each in group.of(f"observer/{name}")]
        assert "/weight/" in case or len(set(counts)) == group.world, f"{case}: the ranks were to see uneven amounts"
        assert_equals_one_process(name, record.at(case, "synced"), record.at(case, "alone_synced"), case)


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_rank_that_saw_nothing_adds_nothing_and_gets_everything(group: Group, name: str) -> None:
    records = group.of(f"observer/{name}")
    for absent in range(group.world):
        for case in records[0].cases(name, f"unseen{absent}"):
            before = records[absent].at(case, f"before_unseen{absent}")
            assert int(before["num_observed"]) == 0 and "min_vals" not in before
            alone = records[0].at(case, f"alone_unseen{absent}")
            synced = records[absent].at(case, f"unseen{absent}")
            assert_equals_one_process(name, synced, alone, f"{case} without rank {absent}:")


@pytest.mark.parametrize("name", AVERAGED)
def test_the_average_of_ranks_follows_from_their_values_in_rank_order(group: Group, name: str) -> None:
    """The formula of two sides, from what each rank had by itself; the order of the ranks shows."""
    records = group.of(f"observer/{name}")
    for case in records[0].cases(name, "synced"):
        sides = [record.at(case, "before_sync") for record in records]
        for end in ("min", "max"):
            both, backwards = (_in_turn(some, end) for some in (sides, sides[::-1]))
            actual = records[-1].at(case, "synced")[f"{end}_vals"]
            torch.testing.assert_close(actual.double(), both, rtol=2e-7, atol=0)
            assert "/weight/" in case or not torch.allclose(actual.double(), backwards, rtol=1e-3)
        assert int(records[0].at(case, "synced")["num_averaged"]) == sum(int(each["num_averaged"]) for each in sides)


def _in_turn(sides: list[dict[str, Tensor]], end: str) -> Tensor:
    average = sides[0][f"{end}_vals"].double()
    for side in sides[1:]:
        left = 0.7 ** int(side["num_averaged"])
        average = side[f"{end}_vals"].double() + left * (average - side[f"first_{end}"])
    return average


@pytest.mark.parametrize("name", OBSERVERS)
def test_nothing_seen_on_any_rank_stays_nothing(group: Group, name: str) -> None:
    records = group.of(f"observer/{name}")
    for record in records:
        for case in record.cases(name, "unseen"):
            found = record.at(case, "unseen")
            assert int(found["num_observed"]) == 0
            assert not {"min_vals", "max_vals", "scale"} & found.keys(), case


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_second_sync_changes_nothing(group: Group, name: str) -> None:
    for rank, record in enumerate(group.of(f"observer/{name}")):
        for case in record.cases(name, "twice"):
            assert_same(record.at(case, "twice"), record.at(case, "synced"), f"{case}, rank {rank}:")


@pytest.mark.parametrize("name", OBSERVERS)
def test_observing_on_after_a_sync_and_syncing_again_equals_one_process(group: Group, name: str) -> None:
    record = group.of(f"observer/{name}")[0]
    for case in record.cases(name, "again"):
        assert_equals_one_process(name, record.at(case, "again"), record.at(case, "alone_again"), case)


@pytest.mark.parametrize("name", OBSERVERS)
def test_ranks_that_saw_nothing_store_scales_in_the_dtype_that_the_others_saw(group: Group, name: str) -> None:
    records = group.of(f"observer/{name}")
    for absent in range(group.world):
        for case in records[absent].cases(name, f"unseen{absent}"):
            _, base_name, strategy = case.split("/")
            expected = torch.float32 if strategy == "tensor_group" else SCALE_DTYPES[base_name]
            assert records[absent].at(case, f"unseen{absent}")["scale"].dtype == expected, case


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_sync_is_done_when_it_returns(group: Group, name: str) -> None:
    for record in group.of(f"observer/{name}"):
        pending = {fact: value for fact, value in record.facts.items() if fact.endswith("|handles")}
        assert pending and not any(pending.values())


# ---- several observers ---------------------------------------------------------------------------------------------


def test_many_observers_in_one_sync_equal_one_by_one(group: Group) -> None:
    for rank, record in enumerate(group.of("together")):
        for case in record.cases("together", "at_once"):
            assert_same(record.at(case, "at_once"), record.at(case, "one_by_one"), f"{case}, rank {rank}:")


def test_an_observer_unseen_on_one_rank_does_not_get_its_neighbours_numbers(group: Group) -> None:
    last = group.world - 1
    for record in group.of("neighbours"):
        a, b = record.at("neighbours/a", "synced"), record.at("neighbours/b", "synced")
        torch.testing.assert_close(a["min_vals"], torch.tensor([500.0]), rtol=0, atol=0)
        torch.testing.assert_close(a["max_vals"], torch.tensor([500.0 + (last if last != 1 else 0)]), rtol=0, atol=0)
        torch.testing.assert_close(b["min_vals"], torch.tensor([2.0]), rtol=0, atol=0)
        torch.testing.assert_close(b["max_vals"], torch.tensor([2.0 + last]), rtol=0, atol=0)
        assert int(a["num_observed"]) == group.world - 1
        assert int(b["num_observed"]) == group.world


def test_syncing_fused_weights_that_every_rank_holds_alike_changes_no_qparam(group: Group) -> None:
    for rank, record in enumerate(group.of("fused")):
        for case in record.cases("fused", "synced"):
            before, synced = record.at(case, "before"), record.at(case, "synced")
            for name in ("min_vals", "max_vals", "scale", "zero_point", "global_scale"):
                assert torch.equal(synced[name], before[name]), f"{case}, rank {rank}: {name} changed"


def test_merging_synced_observers_and_syncing_again_counts_nothing_twice(group: Group) -> None:
    records = group.of("merge_of_synced")
    for case in records[0].cases("merge_of_synced", "synced"):
        name = case.split("/")[1]
        alone = group.of(f"observer/{name}")[0].at(f"{name}/input/tensor", "alone_again")
        for record in records:
            assert_equals_one_process(name, record.at(case, "merged"), alone, f"{case} merged:")
            assert_equals_one_process(name, record.at(case, "synced"), alone, f"{case} synced:")


def test_importance_of_input_channels_equals_that_of_one_process(group: Group) -> None:
    records = group.of("importance")
    for case in records[0].cases("importance", "synced"):
        assert_ranks_agree(records, case, "synced")
        alone = records[0].at(case, "alone")
        assert int(alone["_imatrix_count"]) > 0
        assert_equals_one_process("imatrix_mse", records[-1].at(case, "synced"), alone, case)
    # The ranks' inputs differ, so leaving one out must show; else all of this would prove little.
    everyone, but_the_first = (records[0].at(f"importance/channel/{who}", "synced") for who in ("all", "0"))
    assert not torch.equal(everyone["scale"], but_the_first["scale"])


# ---- some of the ranks ---------------------------------------------------------------------------------------------


def test_a_sync_in_a_group_of_some_ranks_leaves_the_others_alone(group: Group) -> None:
    records = group.of("subgroup")
    members = records[-2:]
    total = sum(int(record.at("subgroup", "before")["num_observed"]) for record in members)
    assert_ranks_agree(members, "subgroup", "synced")
    assert int(members[0].at("subgroup", "synced")["num_observed"]) == total
    for record in records[:-2]:
        assert_same(record.at("subgroup", "synced"), record.at("subgroup", "before"), "a rank outside the group:")


@pytest.mark.parametrize("name", ["percentile", *AVERAGED])
def test_a_sync_of_some_ranks_and_then_of_all_loses_nothing(group: Group, name: str) -> None:
    records, case = group.of("subgroup_then_all"), f"subgroup_then_all/{name}"
    assert_ranks_agree(records, case, "synced")
    alone = group.of(f"observer/{name}")[0].at(f"{name}/input/tensor", "alone_synced")
    assert_equals_one_process(name, records[0].at(case, "synced"), alone, "subgroup, then all:")


# ---- statistics set by hand ----------------------------------------------------------------------------------------


def test_ranges_set_by_hand_where_nobody_counted_are_a_value_each(group: Group) -> None:
    for record in group.of("uncounted"):
        average = 1.0 if group.world == 2 else 1.0 * 0.7 + 2.0 * 0.3
        found = record.at("uncounted", "synced")
        torch.testing.assert_close(found["min_vals"], torch.tensor([-average]))
        torch.testing.assert_close(found["max_vals"], torch.tensor([4 * average]))
        assert int(found["num_averaged"]) == group.world - 1


def test_a_range_set_by_hand_after_a_sync_is_a_new_value(group: Group) -> None:
    for record in group.of("set_after_sync"):
        for num_seen in (1, 3):
            case = f"set_after_sync/{num_seen}"
            before, found = record.at(case, "synced"), record.at(case, "again")
            torch.testing.assert_close(found["max_vals"], before["max_vals"] * 0.7 + 50 * 0.3)
            assert (int(before["num_averaged"]), int(found["num_averaged"])) == (num_seen, num_seen + 1)
            assert_same(record.at(case, "twice"), found, case)


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_whole_numbers_set_by_hand_on_one_rank_reach_the_others(group: Group, name: str) -> None:
    for record in group.of("whole_numbers"):
        found = record.at(f"whole_numbers/{name}", "synced")
        torch.testing.assert_close(found["min_vals"].float(), torch.tensor([-3.0]))
        torch.testing.assert_close(found["max_vals"].float(), torch.tensor([5.0]))


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_whole_numbers_on_one_rank_do_not_cut_off_the_fractions_of_others(group: Group, name: str) -> None:
    others = 0.7 if name == "minmax" else 1  # the last rank is that of the whole numbers
    for record in group.of("mixed_numbers"):
        found = record.at(f"mixed_numbers/{name}", "synced")
        torch.testing.assert_close(found["min_vals"].float(), torch.tensor([-3 - 0.75 * others]))
        torch.testing.assert_close(found["max_vals"].float(), torch.tensor([5 + 0.75 * others]))


# ---- ranks that do not agree ---------------------------------------------------------------------------------------


def assert_merge_error(fact: object, *words: str) -> None:
    assert isinstance(fact, dict) and fact["type"] == "MergeError", f"expected a MergeError, got {fact}"
    for word in words:
        assert word in fact["text"]


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_sync_different_observers_are_all_told_so(group: Group, kind: str) -> None:
    records = group.of(f"disagree/{kind}")
    for record in records:
        assert_merge_error(record.facts[f"disagree/{kind}"], "the ranks sync different observers", "same order")
    assert len({str(record.facts) for record in records}) == 1


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_a_refused_sync_changes_nothing_and_the_next_one_works(group: Group, kind: str) -> None:
    records = group.of(f"disagree/{kind}")
    assert_ranks_agree(records, f"disagree/{kind}", "afterwards")
    assert_same(
        records[0].at(f"disagree/{kind}", "afterwards"),
        group.of("observer/static_minmax")[0].at("static_minmax/input/tensor", "alone_synced"),
        f"after the refusal '{kind}':",
    )
    for rank, record in enumerate(records):
        cases = {case for case, stage, _ in record.tensors if stage == "before"}
        assert cases or kind == "none"
        for case in cases:
            assert_same(record.at(case, "refused"), record.at(case, "before"), f"{case}, rank {rank}:")


def test_different_shapes_are_an_error_on_every_rank_and_change_nothing(group: Group) -> None:
    records = group.of("shapes")
    assert records[0].facts
    for record in records:
        assert record.facts == records[0].facts
        for case, fact in record.facts.items():
            shapes = {"input": ("(2,)", "(4,)"), "q": ("(2, 1, 1)", "(3, 1, 1)"), "importance": ("(32,)", "(64,)")}
            assert_merge_error(fact, *shapes[case.split("/")[-1]])
            assert_same(record.at(case, "refused"), record.at(case, "before"), case)


def test_the_error_about_shapes_says_which_observer_it_is(group: Group) -> None:
    for record in group.of("shapes"):
        for fact in record.facts.values():
            assert_merge_error(fact, "layers.3.self_attn: ")


def test_a_statistic_of_seven_dimensions_is_synced_or_refused_on_every_rank(group: Group) -> None:
    records = group.of("many_dimensions")
    facts = [record.facts["many_dimensions"] for record in records]
    assert all(fact == facts[0] for fact in facts)
    if facts[0] is None:
        assert_ranks_agree(records, "many_dimensions", "synced")
    else:
        assert_merge_error(facts[0])


# ---- the processes themselves --------------------------------------------------------------------------------------


def test_every_rank_plays_to_the_end(group: Group) -> None:
    assert group.endings == [f"rank {rank} ended with 0" for rank in range(group.world)]


def test_no_collective_pickles(group: Group) -> None:
    assert len(group.records) > group.world * len(OBSERVERS)
    assert [record.pickled for record in group.records.values() if record.pickled] == []


def test_a_hung_group_is_killed_and_its_tests_fail(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    hung = run_group(tmp_path, 2, script=script, seconds=0.5)
    assert all("was killed after 0.5 s" in ending for ending in hung.endings)
    with pytest.raises(pytest.fail.Exception, match="rank 0 wrote nothing of 'neighbours'"):
        hung.of("neighbours")
