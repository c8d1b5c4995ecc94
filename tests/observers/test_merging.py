"""Merging two observers in one process: each statistic by its rule, and nothing lost, doubled or mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.errors import MergeError, NoStatisticsError, ScalewrightError
from scalewright.numerics.layout import STRATEGIES
from scalewright.observers import Observer, sync_statistics
from scalewright.observers.catalog import registered_observers
from scalewright.observers.merging import Rule

OBSERVERS = {name: cls for name, cls in registered_observers().items() if cls.__module__.startswith("scalewright.")}
ORDER_FREE = [name for name, cls in OBSERVERS.items() if not cls.ordered]
AVERAGED = [name for name, cls in OBSERVERS.items() if cls.ordered]
SEARCHED_WEIGHTS = [name for name, cls in OBSERVERS.items() if not cls.strategies or "tensor_group" in cls.strategies]

ARGS: dict[str, dict[str, Any]] = {
    "tensor": {"num_bits": 8, "symmetric": False},
    "channel": {"num_bits": 4, "symmetric": False},
    "group": {"num_bits": 4, "group_size": 16},
    "tensor_group": {"num_bits": 4, "type": "float", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
    "block": {"num_bits": 8, "type": "float", "block_structure": [8, 16]},
    "token": {"num_bits": 8, "dynamic": True},
    "attn_head": {"num_bits": 8, "type": "float"},
}
# What is tested is merging, so searches are short; the average forgets fast, so that its weights show.
KNOBS = {"grid": 10.0, "maxshrink": 0.5, "bins": 256, "averaging_constant": 0.3}
SHAPES = {"weight": (16, 32), "input": (4, 32), "q": (2, 4, 8)}


class EveryRule(Observer):
    """An observer with one statistic at least for each rule; it is not registered. Each value halves `level`."""

    merge_rules: ClassVar[Mapping[str, Rule]] = {
        "min_vals": "min",
        "max_vals": "max",
        "total": "sum",
        "count": "sum",
        "num_values": "sum",
        "begun": "first",
        "level": "decayed",
        "height": "derived",
    }

    def reset(self) -> None:
        super().reset()
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.num_values: Tensor | None = None
        self.begun: Tensor | None = None
        self.level: Tensor | None = None
        self.height: Tensor | None = None

    def decay_by(self, statistics: Mapping[str, Tensor]) -> float:
        return 0.5 ** int(statistics.get("num_values", 0))

    def derived(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"height": statistics["begun"] + statistics["level"]} if "begun" in statistics else {}

    def update_statistics_from_observed(self, observed: Tensor) -> None:
        raise AssertionError("statistics are set by hand here")


def every_rule(*, seen: int, **statistics: Tensor) -> EveryRule:
    observer = EveryRule("input", QuantizationArgs(strategy="tensor", **ARGS["tensor"]))
    observer.num_observed = seen
    for name, value in statistics.items():
        setattr(observer, name, value)
    return observer


def make(name: str, base_name: str = "input", strategy: str = "tensor", **knobs: Any) -> Observer:
    short = {knob.name: KNOBS[knob.name] for knob in OBSERVERS[name].knobs if knob.name in KNOBS}
    return OBSERVERS[name](base_name, QuantizationArgs(strategy=strategy, **ARGS[strategy]), **{**short, **knobs})


def layouts(name: str) -> Iterator[tuple[str, str]]:
    for base_name in SHAPES:
        for strategy in STRATEGIES[base_name]:
            if not OBSERVERS[name].strategies or strategy in OBSERVERS[name].strategies:
                yield base_name, strategy


def tensors(base_name: str, seed: int) -> list[Tensor]:
    """What one side sees: a weight, or two batches of different size that lean to one side."""
    generator = torch.Generator().manual_seed(seed)
    if base_name == "weight":
        return [torch.randn(SHAPES["weight"], generator=generator)]
    sizes, lean = ((1, 3), (2, 1), (1, 1))[seed % 3], (-1.5, 2.0, 0.0)[seed % 3]
    return [torch.randn(size, *SHAPES[base_name], generator=generator) + lean for size in sizes]


def seeing(name: str, base_name: str, strategy: str, *seeds: int) -> Observer:
    observer = make(name, base_name, strategy)
    for seed in seeds:
        for tensor in tensors(base_name, seed):
            observer(tensor)
    return observer


def state(observer: Observer) -> dict[str, Tensor]:
    """All statistics, how much was seen, and the qparams if there are any; copies."""
    found = {name: getattr(observer, name) for name in observer.merge_rules}
    found["num_observed"] = torch.tensor(observer.num_observed)
    if observer.has_statistics:
        found.update(observer.get_qparams())
    return {name: torch.as_tensor(value).clone() for name, value in found.items() if value is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], where: object = "", rtol: float = 0) -> None:
    assert actual.keys() == expected.keys(), where
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=0, msg=lambda m, name=name: f"{where} {name}: {m}"
        )


def assert_same_average(actual: Observer, expected: Observer, where: object = "") -> None:
    """Equal up to the rounding of float64, and of fp32 in the last bit; scales, too, of what is not searched again."""
    found, wanted = state(actual), state(expected)
    assert found.keys() == wanted.keys(), where
    is_searched_again = actual.base_name == "weight" and actual.args.strategy == "tensor_group"
    for name, value in wanted.items():
        if name in ("scale", "zero_point") and is_searched_again:
            continue  # a merge cannot know the weights, and does not search them under the global scale of both
        assert found[name].dtype == value.dtype, (where, name)
        rtol = {torch.float64: 1e-12, torch.float32: 1.2e-7}.get(value.dtype, 0)
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=0, msg=lambda m, n=name: f"{where} {n}: {m}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the rules -----------------------------------------------------------------------------------------------------


def test_each_statistic_merges_by_its_own_rule() -> None:
    here = every_rule(
        seen=3,
        min_vals=torch.tensor([-1.0, -5.0]),
        max_vals=torch.tensor([2.0, 7.0]),
        total=torch.tensor([0.5, 1.5]),
        count=torch.tensor([2**60, 1]),
        num_values=torch.tensor(3),
        begun=torch.tensor([1.0, 2.0]),
        level=torch.tensor([4.0, 8.0]),
    )
    there = every_rule(
        seen=1,
        min_vals=torch.tensor([-2.0, -4.0]),
        max_vals=torch.tensor([1.0, 9.0]),
        total=torch.tensor([0.25, 4.0]),
        count=torch.tensor([1, 2]),
        num_values=torch.tensor(2),
        begun=torch.tensor([100.0, 200.0]),
        level=torch.tensor([8.0, 0.0]),
    )
    assert here.merge(there) is here
    torch.testing.assert_close(here.min_vals, torch.tensor([-2.0, -5.0]), rtol=0, atol=0)
    torch.testing.assert_close(here.max_vals, torch.tensor([2.0, 9.0]), rtol=0, atol=0)
    torch.testing.assert_close(here.total, torch.tensor([0.75, 5.5]), rtol=0, atol=0)
    torch.testing.assert_close(here.count, torch.tensor([2**60 + 1, 3]), rtol=0, atol=0)  # a float would lose the 1
    torch.testing.assert_close(here.num_values, torch.tensor(5), rtol=0, atol=0)
    torch.testing.assert_close(here.begun, torch.tensor([1.0, 2.0]), rtol=0, atol=0)
    torch.testing.assert_close(here.level, torch.tensor([9.0, 2.0]), rtol=0, atol=0)  # two values leave a quarter
    torch.testing.assert_close(here.height, torch.tensor([10.0, 4.0]), rtol=0, atol=0)
    assert here.num_observed == 4


def test_a_statistic_that_only_one_side_has_is_taken_as_it_is() -> None:
    here = every_rule(seen=5, min_vals=torch.tensor([-1.0]), max_vals=torch.tensor([1.0]))
    there = every_rule(seen=2, total=torch.tensor([3.0]), level=torch.tensor([6.0]))
    here.merge(there)
    torch.testing.assert_close(here.min_vals, torch.tensor([-1.0]), rtol=0, atol=0)
    torch.testing.assert_close(here.total, torch.tensor([3.0]), rtol=0, atol=0)
    torch.testing.assert_close(here.level, torch.tensor([6.0]), rtol=0, atol=0)
    assert here.count is None
    assert here.num_observed == 7


@pytest.mark.parametrize("name", AVERAGED)
@pytest.mark.parametrize("constant", [1e-6, 0.01, 0.3, 1.0])
def test_an_average_of_huge_ranges_does_not_overflow(name: str, constant: float) -> None:
    big = torch.finfo(torch.float32).max
    here, there = (make(name, averaging_constant=constant) for _ in range(2))
    for each in (here, there):
        for _ in range(50):
            each.update_statistics_from_observed(torch.tensor([[[-big, big]]]))
    found = here.min_vals.clone(), here.max_vals.clone()
    here.merge(there)
    torch.testing.assert_close((here.min_vals, here.max_vals), found, rtol=0, atol=0)
    assert torch.isfinite(here.max_vals).all() and int(here.num_averaged) == 100


# ---- two halves, and both together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDER_FREE)
def test_merging_two_halves_equals_seeing_both(name: str) -> None:
    for base_name, strategy in layouts(name):
        if base_name == "weight" and not make(name, base_name, strategy).remembers:
            continue  # a weight takes the place of the one before, so there are no halves
        merged = seeing(name, base_name, strategy, 0).merge(seeing(name, base_name, strategy, 1))
        assert_same(state(merged), state(seeing(name, base_name, strategy, 0, 1)), (base_name, strategy))


@pytest.mark.parametrize("name", AVERAGED)
def test_merging_ordered_halves_equals_seeing_one_after_the_other(name: str) -> None:
    for base_name, strategy in layouts(name):
        one, two = (seeing(name, base_name, strategy, seed) for seed in (0, 1))
        assert base_name == "weight" or one.num_observed != two.num_observed
        alone = seeing(name, base_name, strategy, 0, 1)
        assert_same_average(one.merge(two), alone, (base_name, strategy))
        backwards = seeing(name, base_name, strategy, 1).merge(seeing(name, base_name, strategy, 0))
        assert not torch.equal(backwards.max_vals, alone.max_vals)


def averaged(values: list[float], constant: float) -> float:
    """The formula, in float64 and without any of our code."""
    found = values[0]
    for value in values[1:]:
        found = found * (1 - constant) + value * constant
    return found


@pytest.mark.parametrize("constant", [1e-9, 0.01, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("cuts", [(1,), (7, 8), (0, 1999), (600, 600, 1200, 2000)])
def test_an_average_that_is_cut_anywhere_is_that_of_the_whole(cuts: tuple[int, ...], constant: float) -> None:
    """Sides of one value, of many, of none; the fp32 range is the same, bit for bit."""
    values = (torch.randn(2000, generator=torch.Generator().manual_seed(5)) * 3 + 7).double().tolist()
    whole, merged = (make("minmax", averaging_constant=constant) for _ in range(2))
    for value in values:
        whole(torch.full((1, 1), value))
    for start, end in zip((0, *cuts), (*cuts, len(values)), strict=True):
        side = make("minmax", averaging_constant=constant)
        for value in values[start:end]:
            side(torch.full((1, 1), value))
        merged.merge(side)
    assert_same_average(merged, whole, cuts)
    torch.testing.assert_close(merged.max_vals, whole.max_vals, rtol=0, atol=0)
    torch.testing.assert_close(merged.max_vals, torch.tensor([averaged(values, constant)]), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ORDER_FREE)
def test_the_order_and_the_grouping_of_merges_do_not_matter(name: str) -> None:
    for base_name, strategy in layouts(name):

        def side(seed: int, base_name: str = base_name, strategy: str = strategy) -> Observer:
            return seeing(name, base_name, strategy, seed)

        left = state(side(0).merge(side(1)).merge(side(2)))
        right = state(side(0).merge(side(1).merge(side(2))))
        backwards = state(side(2).merge(side(1)).merge(side(0)))
        assert_same(left, right, (base_name, strategy))
        assert_same(left, backwards, (base_name, strategy))


@pytest.mark.parametrize("name", AVERAGED)
def test_the_grouping_of_merged_averages_does_not_matter(name: str) -> None:
    def side(seed: int) -> Observer:
        return seeing(name, "input", "group", seed)

    left = side(0).merge(side(1)).merge(side(2))
    right = side(0).merge(side(1).merge(side(2)))
    assert_same_average(left, right)
    assert_same_average(left, seeing(name, "input", "group", 0, 1, 2))


@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_that_goes_on_after_a_merge_equals_seeing_everything(name: str) -> None:
    for base_name, strategy in layouts(name):
        merged = seeing(name, base_name, strategy, 0).merge(seeing(name, base_name, strategy, 1))
        for tensor in tensors(base_name, 2):
            merged(tensor)
        assert_same_average(merged, seeing(name, base_name, strategy, 0, 1, 2), (base_name, strategy))


def test_an_average_of_weights_that_were_searched_again_merges_as_if_seen_in_turn() -> None:
    """A fused partner has changed the global scale: what `detach` leaves is what counts."""
    sides = [make("mse", "weight", "tensor_group") for _ in range(3)]
    partner = make("mse", "weight", "tensor_group")(torch.full((16, 32), 37.0))
    for side, seeds in zip(sides, ((0,), (1,), (0, 1)), strict=True):
        Observer.fuse([side, partner])
        side.foreseen_absmax = 37.0 if len(seeds) > 1 else None  # only the last weight is searched again
        for seed in seeds:
            side(tensors("weight", seed)[0])
        at_first = side.max_vals
        side.detach(torch.nn.Linear(1, 1))
        assert torch.equal(side.max_vals, at_first) == (len(seeds) > 1)
    one, two, both = sides
    assert_same_average(one.merge(two), both)


@pytest.mark.parametrize("name", ORDER_FREE)
def test_observing_on_after_a_merge_equals_seeing_everything(name: str) -> None:
    for base_name, strategy in layouts(name):
        if base_name == "weight":
            continue
        merged = seeing(name, base_name, strategy, 0).merge(seeing(name, base_name, strategy, 1))
        for tensor in tensors(base_name, 2):
            merged(tensor)
        assert_same(state(merged), state(seeing(name, base_name, strategy, 0, 1, 2)), (base_name, strategy))


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_observer_that_is_merged_from_stays_as_it_was(name: str) -> None:
    for base_name, strategy in layouts(name):
        here, there = make(name, base_name, strategy), seeing(name, base_name, strategy, 1)
        before = state(there)
        here.merge(there)
        for statistic in here.merge_rules:  # what was taken over is a copy
            value = getattr(here, statistic)
            if value is not None:
                value.add_(1)
        assert_same(state(there), before, (base_name, strategy))


def test_importance_merges_as_if_one_observer_had_seen_all_inputs() -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    inputs = [
        torch.randn(n, 32, generator=torch.Generator().manual_seed(n)) * torch.linspace(0.1, n, 32) for n in (3, 5)
    ]
    sides = [make("imatrix_mse", "weight", "group") for _ in range(2)]
    everything = make("imatrix_mse", "weight", "group")
    for side, x in zip(sides, inputs, strict=True):
        side.observe_input(x)
        everything.observe_input(x)
    merged = sides[0].merge(sides[1])
    assert int(merged._imatrix_count) == 8
    torch.testing.assert_close(merged.channel_importance, everything.channel_importance, rtol=1e-6, atol=0)
    assert_same(state(merged(weight)), state(everything(weight)), rtol=1e-6)


# ---- nothing seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVERS)
def test_merging_with_an_observer_that_saw_nothing_changes_nothing(name: str) -> None:
    for base_name, strategy in layouts(name):
        full = make(name, base_name, strategy)
        for tensor in tensors(base_name, 0):
            full(tensor.bfloat16())  # whose dtype the scale takes
        before = state(full)
        into_empty = make(name, base_name, strategy).merge(full)
        assert_same(state(into_empty), before, (base_name, strategy))
        assert into_empty.scale_dtype == full.scale_dtype
        assert_same(state(full.merge(make(name, base_name, strategy))), before, (base_name, strategy))


@pytest.mark.parametrize("name", OBSERVERS)
def test_merging_two_that_saw_nothing_gives_one_that_saw_nothing(name: str) -> None:
    merged = make(name).merge(make(name))
    assert not merged.has_statistics
    assert merged.num_observed == 0
    with pytest.raises(NoStatisticsError, match="No statistics available"):
        merged.get_qparams()


@pytest.mark.parametrize("name", SEARCHED_WEIGHTS)
def test_merging_nothing_into_a_fused_weight_changes_no_qparam(name: str) -> None:
    pair = [make(name, "weight", "tensor_group") for _ in range(2)]
    Observer.fuse(pair)
    for index, observer in enumerate(pair):
        observer(torch.randn(16, 64, generator=torch.Generator().manual_seed(40 + index)) * (1 + 0.37 * index))
    before = state(pair[0])
    assert_same(state(pair[0].merge(make(name, "weight", "tensor_group"))), before)


def test_the_qparams_of_merged_weights_come_from_the_merged_ranges() -> None:
    for name in SEARCHED_WEIGHTS:
        one, two = (seeing(name, "weight", "tensor_group", seed) for seed in (0, 1))
        alone = state(one)
        one.merge(two)
        by_hand = make(name, "weight", "tensor_group")
        by_hand.min_vals, by_hand.max_vals = one.min_vals, one.max_vals
        if "true_absmax" in one.merge_rules:
            by_hand.true_absmax = one.true_absmax
        torch.testing.assert_close(one.get_qparams()["scale"], by_hand.get_qparams()["scale"], rtol=0, atol=0)
        assert not torch.equal(one.get_qparams()["scale"], alone["scale"]), name


# ---- sides that do not belong together -----------------------------------------------------------------------------


def test_another_class_is_refused_by_name() -> None:
    here, there = seeing("static_minmax", "input", "tensor", 0), seeing("minmax", "input", "tensor", 0)
    with pytest.raises(MergeError, match=r"MinMaxObserver.*StaticMinMaxObserver"):
        here.merge(there)


def test_a_subclass_is_another_class() -> None:
    here, there = make("memoryless_mse", "weight", "group"), make("nvfp4_expanded_mse", "weight", "group")
    with pytest.raises(MergeError, match="cannot be merged"):
        here.merge(there)


def test_another_base_name_is_refused_with_both_names() -> None:
    with pytest.raises(MergeError, match=r"'output'.*'input'"):
        make("static_minmax", "input").merge(make("static_minmax", "output"))


def test_other_arguments_are_refused_and_named() -> None:
    here = make("static_minmax", "input", "tensor")
    there = type(here)("input", QuantizationArgs(strategy="tensor", num_bits=4, symmetric=False))
    with pytest.raises(MergeError, match="num_bits"):
        here.merge(there)


def test_other_knobs_are_refused_and_named() -> None:
    with pytest.raises(MergeError, match="percentile"):
        make("percentile", percentile=99.0).merge(make("percentile", percentile=90.0))


def test_what_is_no_observer_is_refused_in_words() -> None:
    with pytest.raises((ScalewrightError, TypeError), match="Tensor"):
        make("static_minmax").merge(torch.ones(2))  # type: ignore[arg-type]


def test_other_shapes_are_refused_with_both_shapes_and_the_place() -> None:
    here, there = make("static_minmax", "input", "group"), make("static_minmax", "input", "group")
    here.label = "model.layers.3.mlp.down_proj.input"
    here(torch.ones(1, 4, 32))
    there(torch.ones(1, 4, 48))
    with pytest.raises(MergeError, match=r"\(2,\).*\(3,\)") as caught:
        here.merge(there)
    assert str(caught.value).startswith("model.layers.3.mlp.down_proj.input: ")


def test_a_refused_merge_changes_nothing_on_either_side() -> None:
    here, there = make("imatrix_mse", "weight", "channel"), make("imatrix_mse", "weight", "channel")
    here.observe_input(torch.ones(3, 32))
    there.observe_input(torch.ones(3, 64))
    here(torch.ones(16, 32))
    there(2 * torch.ones(16, 64))  # the ranges fit together; the importance, which comes later, does not
    before = state(here), state(there)
    with pytest.raises(MergeError, match=r"_imatrix_sum.*\(32,\).*\(64,\)"):
        here.merge(there)
    assert_same(state(here), before[0])
    assert_same(state(there), before[1])


# ---- statistics set by hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_observed", [0, 30])
@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_set_by_hand_is_a_sequence_of_one_value(name: str, num_observed: int) -> None:
    by_hand = [make(name), seeing(name, "input", "tensor", 1)]  # what was seen before does not matter
    for each, ends in zip(by_hand, ((-1.0, 2.0), (-3.0, 8.0)), strict=True):
        each.min_vals, each.max_vals = (torch.tensor([end]) for end in ends)
        each.num_observed = num_observed
    here, there = by_hand
    here.merge(there)
    torch.testing.assert_close(here.min_vals, torch.tensor([-1.0 * 0.7 - 3.0 * 0.3]))
    torch.testing.assert_close(here.max_vals, torch.tensor([2.0 * 0.7 + 8.0 * 0.3]))
    assert int(here.num_averaged) == 2 and here.num_observed == 2 * num_observed
    torch.testing.assert_close((there.min_vals, there.max_vals), (torch.tensor([-3.0]), torch.tensor([8.0])))


def test_plain_numbers_set_by_hand_are_averaged() -> None:
    here, there = make("minmax"), make("minmax")
    here.min_vals, here.max_vals = -1, 2
    there.min_vals, there.max_vals = -1.0, 12
    torch.testing.assert_close(here.merge(there).max_vals, torch.tensor(5.0))


def test_what_was_averaged_and_then_taken_away_is_not_merged() -> None:
    here, there = seeing("minmax", "input", "tensor", 0), seeing("minmax", "input", "tensor", 1)
    here.min_vals = here.max_vals = None
    before = there.max_vals.clone()
    torch.testing.assert_close(here.merge(there).max_vals, before, rtol=0, atol=0)
    assert int(here.num_averaged) == int(there.num_averaged)


def test_whole_numbers_set_by_hand_do_not_cut_off_fractions() -> None:
    for name, least in (("static_minmax", -3.75), ("minmax", None)):
        for is_swapped in (False, True):
            whole, fraction = make(name), make(name)
            whole.min_vals, whole.max_vals = torch.tensor([-3]), torch.tensor([5])
            fraction.min_vals, fraction.max_vals = torch.tensor([-3.75]), torch.tensor([5.75])
            merged = fraction.merge(whole) if is_swapped else whole.merge(fraction)
            in_turn = -3.75 * 0.7 - 3 * 0.3 if is_swapped else -3 * 0.7 - 3.75 * 0.3
            torch.testing.assert_close(
                merged.min_vals.float(), torch.tensor([in_turn if least is None else least]), rtol=0, atol=0
            )


@pytest.mark.parametrize("name", ORDER_FREE)
def test_a_range_set_by_hand_widens_by_what_the_other_saw(name: str) -> None:
    here, there = make(name, "q", "attn_head"), seeing(name, "q", "attn_head", 1)
    here.min_vals, here.max_vals = torch.full((2, 1, 1), -50.0), torch.full((2, 1, 1), 0.5)
    here.merge(there)
    torch.testing.assert_close(here.min_vals, torch.full((2, 1, 1), -50.0), rtol=0, atol=0)
    torch.testing.assert_close(here.max_vals, there.max_vals.clamp(min=0.5), rtol=0, atol=0)


# ---- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_sync_without_a_process_group_changes_nothing(name: str) -> None:
    observer = seeing(name, "input", "tensor", 0)
    before = state(observer)
    assert observer.sync_activation_stats() == []
    sync_statistics([observer, make(name)])
    assert_same(state(observer), before)
