"""Observers over the record of bf16 codes: ranges as by hand, exact merges, memory that does not grow."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright.errors import LayoutError
from scalewright.numerics.grids import grid_of
from scalewright.numerics.histogram import code_values, entropy_threshold
from scalewright.observers import Observer

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT8_AFFINE = QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor")
INT4_AFFINE = QuantizationArgs(num_bits=4, symmetric=False, strategy="tensor")
HEADS = QuantizationArgs(num_bits=8, strategy="attn_head")
NAMES = ["percentile", "entropy", "histogram_mse"]
FEW = {"percentile": {}, "entropy": {"bins": 256}, "histogram_mse": {"grid": 20}}


def make(name: str, args: QuantizationArgs = INT8, base_name: str = "input", **knobs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)


def outlying(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(shape)
    x.view(-1)[0] = 30.0
    return x


@pytest.mark.parametrize("name", NAMES)
def test_the_order_and_the_cut_of_the_batches_do_not_matter(name):
    x = outlying(12, 8, 16)
    observers = [make(name, **FEW[name]) for _ in range(3)]
    for part in x.split(3):
        observers[0](part)
    for part in reversed(x.split(5)):
        observers[1](part)
    observers[2](x)
    for other in observers[1:]:
        torch.testing.assert_close(other.counts, observers[0].counts, rtol=0, atol=0)
        torch.testing.assert_close(other.get_qparams(), observers[0].get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_merging_two_is_seeing_both(name):
    x = outlying(12, 8, 16)
    one, other, both = (make(name, **FEW[name]) for _ in range(3))
    one(x[:5])
    other(x[5:])
    both(x)
    one.merge(other)
    torch.testing.assert_close(one.counts, both.counts, rtol=0, atol=0)
    torch.testing.assert_close(one.get_qparams(), both.get_qparams(), rtol=0, atol=0)
    assert one.num_observed_tokens == 96


@pytest.mark.parametrize("name", NAMES)
def test_the_record_does_not_grow_with_tokens(name):
    observer = make(name)
    observer(torch.ones(1, 1, 16))
    size = observer.counts.shape
    for _ in range(5):
        observer(torch.ones(8, 64, 16))
    assert observer.counts.shape == size == (1, 65536)
    assert observer.counts.sum() == 16 * (1 + 5 * 8 * 64)
    assert observer.counts.dtype == torch.int64


@pytest.mark.parametrize("name", NAMES)
def test_statistics_hold_the_true_extremes(name):
    observer = make(name)
    observer(torch.tensor([[[-1.001, 2.0]]]))
    observer(torch.tensor([[[-0.5, 3.001]]]))
    torch.testing.assert_close(observer.min_vals, torch.tensor([-1.001]), rtol=0, atol=0)
    torch.testing.assert_close(observer.max_vals, torch.tensor([3.001]), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("base_name", "args"),
    [
        ("weight", QuantizationArgs(num_bits=4, strategy="group", group_size=16)),
        ("weight", QuantizationArgs(num_bits=8, strategy="channel")),
        ("input", QuantizationArgs(num_bits=8, strategy="token", dynamic=True)),
        ("input", QuantizationArgs(num_bits=8, strategy="group", group_size=16)),
    ],
)
def test_other_strategies_are_an_error_that_says_which_are_served(name, base_name, args):
    with pytest.raises(LayoutError, match=f"observer '{name}' does not serve strategy .*serves: tensor, attn_head"):
        make(name, args, base_name)(torch.ones(2, 16))


@pytest.mark.parametrize("name", NAMES)
def test_each_head_is_a_record_of_its_own(name):
    torch.manual_seed(0)
    states = torch.randn(2, 3, 40, 8) * torch.tensor([1.0, 5.0, 0.1]).reshape(1, 3, 1, 1)
    states[0, 1, 0, 0] = 100.0
    together = make(name, HEADS, "k", **FEW[name])(states).get_qparams()
    assert together["scale"].shape == (3, 1, 1)
    for head in range(3):
        alone = make(name, HEADS, "k", **FEW[name])(states[:, head : head + 1]).get_qparams()
        torch.testing.assert_close(together["scale"][head], alone["scale"][0], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_ranges_set_by_hand_are_obeyed(name):
    observer = make(name)
    observer.min_vals, observer.max_vals = torch.tensor([-1.0]), torch.tensor([2.0])
    torch.testing.assert_close(observer.get_qparams()["scale"], torch.tensor([2 / 127.5]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_a_value_beyond_the_largest_bf16_is_not_read_as_zero(name, value):
    knobs = {"percentile": 100.0} if name == "percentile" else FEW[name]
    scale = make(name, **knobs)(torch.full((4, 16), value)).get_qparams()["scale"]
    torch.testing.assert_close(scale, torch.tensor([3.4e38 / 127.5]), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("name", "knob", "value"),
    [("percentile", "percentile", 50.0), ("entropy", "bins", 256), ("histogram_mse", "norm", 8.0)],
)
def test_what_another_observer_was_asked_does_not_matter(name, knob, value):
    x = outlying(12, 8, 64)
    expected = make(name, **{knob: value})(x).get_qparams()
    other, observer = make(name)(x), make(name)(x)
    before = other.get_qparams()
    setattr(observer, knob, value)
    torch.testing.assert_close(observer.get_qparams(), expected, rtol=0, atol=0)
    assert before["scale"] != expected["scale"]


@pytest.mark.parametrize("name", NAMES)
def test_a_record_that_was_changed_by_hand_is_read_anew(name):
    observer, smaller = make(name, **FEW[name])(outlying(12, 8, 16)), make(name, **FEW[name])(outlying(12, 8, 16) / 8)
    observer.get_qparams()
    observer.counts.copy_(smaller.counts)
    torch.testing.assert_close(observer.get_qparams(), smaller.get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets_the_record(name):
    observer = make(name, **FEW[name])
    observer(outlying(2, 8, 16) * 100)
    observer.reset()
    assert observer.counts is None and not observer.has_statistics
    fresh = make(name, **FEW[name])
    for each in (observer, fresh):
        each(outlying(2, 8, 16))
    torch.testing.assert_close(observer.get_qparams(), fresh.get_qparams(), rtol=0, atol=0)


# ---- percentile --------------------------------------------------------------------------------------------------


def test_percentile_leaves_out_the_largest_magnitudes():
    x = torch.arange(1.0, 101.0).reshape(1, 10, 10)
    scale = make("percentile", percentile=90.0)(x).get_qparams()["scale"]
    torch.testing.assert_close(scale, torch.tensor([90 / 127.5]))


def test_percentile_100_is_min_max():
    x = outlying(4, 8, 16).bfloat16().float()
    torch.testing.assert_close(
        make("percentile", percentile=100.0)(x).get_qparams(), make("static_minmax")(x).get_qparams(), rtol=0, atol=0
    )
    torch.testing.assert_close(
        make("percentile", INT8_AFFINE, percentile=100.0)(x).get_qparams(),
        make("static_minmax", INT8_AFFINE)(x).get_qparams(),
        rtol=0,
        atol=0,
    )


def test_the_default_percentile_is_99_99():
    x = torch.zeros(1, 100, 1000)
    x[0, 0, :11] = torch.arange(1.0, 12.0)  # of 100,000 values ten are left out
    assert make("percentile").percentile == 99.99
    torch.testing.assert_close(make("percentile")(x).get_qparams()["scale"], torch.tensor([1 / 127.5]))


def test_an_affine_percentile_cuts_both_tails():
    x = torch.arange(-10.0, 90.0).reshape(1, 10, 10)
    qparams = make("percentile", INT8_AFFINE, percentile=90.0)(x).get_qparams()
    torch.testing.assert_close(qparams["scale"], torch.tensor([(84 + 5) / 255]))


# ---- entropy -----------------------------------------------------------------------------------------------------


def test_entropy_clips_an_outlier():
    observer = make("entropy", bins=1024)(outlying(50, 64, 32))
    clipped = observer.get_qparams()["scale"] * 127.5
    assert 2.5 < clipped < 10
    expected = entropy_threshold(observer.counts[0], code_values(), grid_of(INT8), num_bins=1024)
    torch.testing.assert_close(clipped, expected.reshape(1))


def test_an_affine_range_of_entropy_stays_inside_what_was_seen():
    observer = make("entropy", INT8_AFFINE, bins=256)(outlying(50, 64, 32).abs() + 1)
    lo, hi = observer.chosen_range(None)
    assert lo >= 1 and hi < 20


# ---- histogram_mse -----------------------------------------------------------------------------------------------


def squared_error(x: torch.Tensor, lo: float, hi: float, args: QuantizationArgs) -> float:
    """Written apart from the package: the error of one range, in float64."""
    low, high = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    if args.symmetric:
        scale, zero_point = max(-lo, hi) / ((high - low) / 2), 0.0
    else:
        scale = (hi - lo) / (high - low)
        zero_point = float(torch.tensor(low - lo / scale, dtype=torch.float64).round().clamp(low, high))
    codes = (x.double() / scale + zero_point).round().clamp(low, high)
    return float(((codes - zero_point) * scale - x.double()).square().sum())


def test_histogram_mse_finds_the_least_error_over_all_batches():
    x = outlying(20, 32, 16).bfloat16().float()
    observer = make("histogram_mse", grid=50)
    for part in x.split(4):
        observer(part)
    lo, hi = observer.chosen_range(None)
    factors = [1 - step / 50 for step in range(47)]
    errors = [squared_error(x, float(x.min()) * f, float(x.max()) * f, INT8) for f in factors]
    assert squared_error(x, float(lo), float(hi), INT8) == pytest.approx(min(errors), rel=1e-4)
    assert min(errors) < 0.95 * errors[0]


def test_the_two_ends_of_an_affine_range_move_apart():
    torch.manual_seed(0)
    x = torch.randn(400, 64)
    x[0, 0] = 15.0  # an outlier on one side only
    x = x.bfloat16().float()
    observer = make("histogram_mse", INT4_AFFINE, grid=50)(x)
    lo, hi = observer.chosen_range(None)
    together = min(
        squared_error(x, float(x.min()) * f, float(x.max()) * f, INT4_AFFINE)
        for f in (1 - step / 50 for step in range(47))
    )
    assert float(lo / x.min()) > float(hi / x.max()) * 1.5
    assert squared_error(x, float(lo), float(hi), INT4_AFFINE) < 0.95 * together


def test_histogram_mse_needs_no_more_than_its_counts():
    observer = make("histogram_mse", grid=20)(outlying(4, 8, 16))
    copy = make("histogram_mse", grid=20)
    copy.counts, copy.min_vals, copy.max_vals = observer.counts, observer.min_vals, observer.max_vals
    torch.testing.assert_close(copy.get_qparams(), observer.get_qparams(), rtol=0, atol=0)
