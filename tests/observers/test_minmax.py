"""Min-max observers: what is kept from one value to the next, for weights and for activations."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright.errors import LayoutError
from scalewright.observers import MemorylessMinMaxObserver, MinMaxObserver, Observer, StaticMinMaxObserver

TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
CHANNEL = QuantizationArgs(num_bits=8, symmetric=False, strategy="channel")


def make(name: str, base_name: str = "input", args: QuantizationArgs = TENSOR, **knobs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)


def test_a_weight_takes_the_place_of_the_weight_before():
    observer = MemorylessMinMaxObserver("weight", TENSOR)
    observer(torch.tensor([[-9.0, 9.0]]))
    observer(torch.tensor([[-1.0, 2.0]]))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-1.0], [2.0])


def test_a_weight_may_be_followed_by_one_of_another_shape():
    observer = MemorylessMinMaxObserver("weight", CHANNEL)
    observer(torch.ones(4, 8))
    assert observer(torch.ones(6, 8)).get_qparams()["scale"].shape == (6, 1)


@pytest.mark.parametrize("base_name", ["input", "output"])
def test_memoryless_on_activations_holds_all_batches(base_name):
    observer = MemorylessMinMaxObserver(base_name, TENSOR)
    for batch in ([[-1.0, 9.0]], [[-3.0, 2.0]], [[0.5, 0.25]]):
        observer(torch.tensor([batch]))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-3.0], [9.0])


@pytest.mark.parametrize("base_name", ["weight", "input"])
def test_static_widens_over_everything(base_name):
    observer = StaticMinMaxObserver(base_name, TENSOR)
    for batch in ([[-1.0, 9.0]], [[-3.0, 2.0]]):
        observer(torch.tensor(batch))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-3.0], [9.0])


def test_each_position_has_a_range_of_its_own():
    observer = StaticMinMaxObserver("weight", CHANNEL)
    observer(torch.tensor([[-1.0, 2.0], [-4.0, 3.0]]))
    observer(torch.tensor([[-2.0, 1.0], [-3.0, 5.0]]))
    assert observer.min_vals.tolist() == [[-2.0], [-4.0]]
    assert observer.max_vals.tolist() == [[2.0], [5.0]]


def test_the_first_batch_is_taken_as_it_is_and_later_ones_by_their_share():
    observer = MinMaxObserver("input", TENSOR, averaging_constant=0.25)
    observer(torch.tensor([[-1.0, 4.0]]))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-1.0], [4.0])
    observer(torch.tensor([[-3.0, 8.0]]))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-1.5], [5.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_a_moving_average_follows_the_formula_in_fp32(name, dtype):
    torch.manual_seed(0)
    batches = [torch.randn(2, 4, 16).to(dtype) for _ in range(30)]
    observer = make(name, averaging_constant=0.1)
    single = make("memoryless_minmax" if name == "minmax" else "memoryless_mse")
    lo = hi = None
    for batch in batches:
        observer(batch)
        single.reset()
        single(batch)
        new_lo, new_hi = single.min_vals.double(), single.max_vals.double()
        lo = new_lo if lo is None else lo * 0.9 + new_lo * 0.1
        hi = new_hi if hi is None else hi * 0.9 + new_hi * 0.1
    assert observer.min_vals.dtype == torch.float32
    torch.testing.assert_close(observer.min_vals, lo.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(observer.max_vals, hi.float(), rtol=1e-6, atol=0)


def test_a_constant_stays_exactly_what_it_is():
    observer = make("minmax")
    for _ in range(500):
        observer(torch.full((1, 4), 0.1))
    torch.testing.assert_close(observer.max_vals, torch.tensor([0.1]), rtol=0, atol=0)


def test_the_average_of_huge_values_does_not_overflow():
    observer = make("minmax", averaging_constant=0.5)
    observer(torch.tensor([[3e38, -3e38]]))
    observer(torch.tensor([[-3e38, -3e38]]))
    assert torch.isfinite(observer.max_vals).all()
    torch.testing.assert_close(observer.max_vals, torch.zeros(1))


def test_an_averaging_constant_of_one_keeps_the_newest_batch_alone():
    observer = make("minmax", averaging_constant=1.0)
    observer(torch.tensor([[5.0, -5.0]]))
    observer(torch.tensor([[1.0, -2.0]]))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([-2.0], [1.0])


@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_moving_averages_say_that_they_are_ordered(name):
    assert make(name).ordered


def test_two_moving_averages_merge_as_if_one_had_gone_on():
    one, other = make("minmax", averaging_constant=0.5), make("minmax", averaging_constant=0.5)
    one(torch.full((3, 4), 1.0))
    other(torch.full((1, 4), 5.0))
    other(torch.full((1, 4), 9.0))
    one.merge(other)
    torch.testing.assert_close(one.max_vals, torch.tensor([6.0]), rtol=0, atol=0)  # 1 -> 3 -> 6
    assert one.num_observed_tokens == 5 and int(one.num_averaged) == 3


def test_a_reset_average_begins_anew():
    observer = make("minmax", averaging_constant=0.5)
    observer(torch.full((1, 4), 100.0))
    observer.reset()
    assert all(getattr(observer, name) is None for name in observer.merge_rules)
    observer(torch.full((1, 4), 2.0))
    observer(torch.full((1, 4), 4.0))
    assert (observer.max_vals.tolist(), int(observer.num_averaged)) == ([3.0], 2)


def test_a_range_set_by_hand_is_what_the_next_value_joins():
    observer = make("minmax", averaging_constant=0.5)
    observer(torch.full((1, 4), 100.0))
    observer.min_vals, observer.max_vals = torch.tensor([-2.0]), torch.tensor([2.0])
    observer(torch.full((1, 4), 4.0))
    assert (observer.min_vals.tolist(), observer.max_vals.tolist()) == ([1.0], [3.0])
    assert int(observer.num_averaged) == 2


@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax"])
def test_two_ranges_merge_into_the_one_that_holds_both(name):
    one, other = make(name), make(name)
    one(torch.tensor([[-1.0, 9.0]]))
    other(torch.tensor([[-3.0, 2.0]]))
    one.merge(other)
    assert (one.min_vals.tolist(), one.max_vals.tolist()) == ([-3.0], [9.0])
    assert (other.min_vals.tolist(), other.max_vals.tolist()) == ([-3.0], [2.0])


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_values_whose_qparams_differ_in_shape_cannot_join(name):
    observer = make(name, "weight", CHANNEL)
    observer(torch.ones(4, 8))
    with pytest.raises(LayoutError, match=r"shape \(6, 1\).*seen before have \(4, 1\)"):
        observer(torch.ones(6, 8))
    observer.reset()
    assert observer(torch.ones(6, 8)).get_qparams()["scale"].shape == (6, 1)


def test_statistics_may_be_set_by_hand():
    observer = make("static_minmax")
    observer.min_vals, observer.max_vals = torch.tensor([-1.0]), torch.tensor([2.0])
    assert observer.has_statistics
    torch.testing.assert_close(observer.get_qparams()["scale"], torch.tensor([2 / 127.5]))
