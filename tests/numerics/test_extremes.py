"""Least and largest values: what float64 says, for every dtype, size and sign, however the tensor lies in memory."""

import math

import pytest
import torch

from scalewright.numerics import extremes
from scalewright.numerics.extremes import is_finite, min_max

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Either side of every length at which another way is taken, and lengths that vectors do not divide.
GROUP_SIZES = [1, 2, 16, 31, 32, 63, 64, 65, 128, 200, 1023, 1024, 1025]
QPARAM_SHAPES = [(1,), (5,), (3, 1), (3, 2), (2, 1, 1)]

SIGNS = {
    "mixed": lambda x: x,
    "none negative": lambda x: x.abs(),
    "all positive": lambda x: x.abs() + 1,
    "none positive": lambda x: -x.abs(),
    "all negative": lambda x: -x.abs() - 1,
    "positive zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "mostly zeros": lambda x: x * (x > 1.5),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def nan_of_either_sign(dtype: torch.dtype, *, is_negative: bool) -> torch.Tensor:
    """NaN with its sign bit as asked for; arithmetic gives now one, now the other."""
    bits = torch.tensor(math.nan, dtype=dtype).view(BITS[dtype])
    largest = torch.iinfo(BITS[dtype]).max
    return ((bits & largest) | (~largest if is_negative else 0)).view(dtype)


def assert_is_min_max_of(x: torch.Tensor) -> None:
    lo, hi = min_max(x)
    assert lo.dtype == hi.dtype == torch.float32
    assert lo.shape == hi.shape == x.shape[1:-1]
    exact = x.double()
    torch.testing.assert_close(lo.double(), exact.amin(dim=(0, -1)), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(hi.double(), exact.amax(dim=(0, -1)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("qparam_shape", QPARAM_SHAPES)
@pytest.mark.parametrize("num_observations", [1, 3, 16])
def test_ranges_are_what_float64_says(num_observations, qparam_shape, group_size, dtype):
    assert_is_min_max_of(random(num_observations, *qparam_shape, group_size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 16, 64, 128, 1024])
@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("qparam_shape", [(1,), (4, 2)])
def test_ranges_are_right_whatever_the_signs_are(qparam_shape, sign, group_size, dtype):
    assert_is_min_max_of(SIGNS[sign](random(2, *qparam_shape, group_size, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [16, 128, 1024])
@pytest.mark.parametrize("num_odd", [1, 3, 40])
def test_positions_of_one_sign_are_found_among_many_others(num_odd, group_size, dtype):
    x = random(1, 256, 1, group_size, dtype=dtype)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    for number, position in enumerate(order[:num_odd].tolist()):
        x[0, position] = x[0, position].abs() * (-1) ** number
    assert_is_min_max_of(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [4, 64, 1024])
def test_the_ends_of_a_dtype_are_found(group_size, dtype):
    x = random(1, 3, group_size, dtype=dtype)
    x[0, 0, 0], x[0, 0, -1] = torch.finfo(dtype).min, torch.finfo(dtype).max
    x[0, 1] = torch.finfo(dtype).smallest_normal / 4
    x[0, 1, -1] *= -1
    assert_is_min_max_of(x)


# ---- NaN and Inf -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", ["mixed", "all positive", "all negative"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 6), (2, 3, 2), (1, 3, 64), (1, 3, 1024), (1, 200, 2), (2, 1, 600), (16, 3, 4)]
)
@pytest.mark.parametrize("bad", ["NaN", "-NaN", "inf", "-inf"])
def test_a_range_is_finite_just_when_all_its_values_are(bad, shape, sign, dtype):
    clean = SIGNS[sign](random(*shape, dtype=dtype))
    assert_is_min_max_of(clean)
    nan = nan_of_either_sign(dtype, is_negative=bad.startswith("-"))
    places = torch.randperm(clean.numel(), generator=torch.Generator().manual_seed(0))[:20].tolist()
    for place in {0, clean.numel() - 1, *places}:
        x = clean.clone()
        x.view(-1)[place] = nan if "NaN" in bad else float(bad)
        lo, hi = min_max(x)
        is_bad = (~x.isfinite()).any(dim=-1).any(dim=0)
        torch.testing.assert_close(lo.isfinite() & hi.isfinite(), ~is_bad)
        assert_is_min_max_of(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 5), (1, 3, 64), (1, 3, 1024), (3, 1, 600), (16, 3, 16)])
def test_nan_wins_over_inf(shape, dtype):
    x = random(*shape, dtype=dtype)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = math.inf, math.nan, -math.inf
    assert_is_min_max_of(x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_one_bad_value_makes_a_tensor_not_finite(place, bad):
    x = random(5, 2)
    assert is_finite(x)
    x.view(-1)[place] = bad
    assert not is_finite(x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_tensor_of_nothing_but_bad_values_is_not_finite(bad):
    assert not is_finite(torch.full((3,), bad))


def test_huge_values_are_finite():
    assert is_finite(torch.tensor([torch.finfo(torch.float32).min, torch.finfo(torch.float32).max]))


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [8, 64, 1024])
def test_how_a_tensor_lies_in_memory_changes_nothing(group_size, dtype):
    x = random(3, 4, 2, group_size, dtype=dtype)
    for view in (
        x.transpose(0, 1),
        x.permute(3, 2, 1, 0),
        x[:, ::2],
        x[1:, :, 1:, 1:],
        x[..., ::3],
        x[:, :, :1].expand(3, 4, 5, group_size),
        x[:1, :1, :1].expand(2, 3, 1, group_size),
        x[..., :1].expand(3, 4, 2, group_size),
        x.transpose(0, 3)[:, :1, :1],
        x.flatten()[1:].unsqueeze(0).unsqueeze(0),
    ):
        assert_is_min_max_of(view)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [6, 64, 96])
@pytest.mark.parametrize("piece_rows", [0, 1, 2, 3, 21, 22])
def test_how_the_work_is_cut_changes_nothing(monkeypatch, piece_rows, group_size, dtype):
    x = random(3, 7, group_size, dtype=dtype)
    x[0, 2], x[:, 5] = x[0, 2].abs(), -x[:, 5].abs()
    expected = min_max(x)
    monkeypatch.setattr(extremes, "_PIECE", group_size * piece_rows)
    torch.testing.assert_close(min_max(x), expected, rtol=0, atol=0)
    for row in range(21):
        bad = x.clone()
        bad.view(21, -1)[row, row % group_size] = math.nan
        assert_is_min_max_of(bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_several_pieces_is_seen_to_its_last_value(dtype):
    group_size = 16
    rows = extremes._PIECE // group_size
    x = random(1, 2 * rows + 1, group_size, dtype=dtype)
    for row in (0, rows - 1, rows, 2 * rows - 1, 2 * rows):
        x[0, row, 0], x[0, row, -1] = -50 - row % 7, 50 + row % 5
    assert_is_min_max_of(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 6, 2, 1), (2, 1, 1), (1, 6, 128), (1, 2, 1024), (1, 1, 1)])
def test_ranges_do_not_change_when_the_tensor_does(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    lo, hi = min_max(x)
    x.fill_(5)
    torch.testing.assert_close(lo, torch.ones_like(lo))
    torch.testing.assert_close(hi, torch.ones_like(hi))
    lo.fill_(3)
    torch.testing.assert_close(hi, torch.ones_like(hi))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", ["mixed", "none negative"])
@pytest.mark.parametrize("shape", [(2, 4, 16), (1, 4, 128), (1, 4, 1024), (1, 1, 2048)])
def test_the_tensor_itself_stays_as_it_is(shape, sign, dtype):
    x = SIGNS[sign](random(*shape, dtype=dtype))
    before = x.clone()
    min_max(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 48), (3, 6, 2, 16), (1, 6, 2, 128), (1, 6, 1024)])
def test_other_devices_are_asked_for_no_value(shape, dtype):
    lo, hi = min_max(torch.empty(shape, dtype=dtype, device="meta"))
    assert lo.shape == hi.shape == torch.Size(shape[1:-1])
    assert lo.dtype == hi.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 1, 48), (3, 6, 2, 16)])
def test_float64_becomes_fp32(shape):
    x = random(*shape, dtype=torch.float64)
    lo, hi = min_max(x)
    torch.testing.assert_close(lo, x.amin(dim=(0, -1)).float(), rtol=0, atol=0)
    torch.testing.assert_close(hi, x.amax(dim=(0, -1)).float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 6144), (3, 1, 2048), (1, 3, 1, 2048)])
def test_large_tensors_are_cut_into_rows_and_seen_to_their_last_value(monkeypatch, shape, dtype):
    x = random(*shape, dtype=dtype)
    flat = x.view(-1)
    flat[:1024], flat[-1024:] = flat[:1024].abs(), -flat[-1024:].abs()
    expected = min_max(x)
    monkeypatch.setattr(extremes, "_CACHED", 0)
    monkeypatch.setattr(extremes, "_ROW", 1024)
    monkeypatch.setattr(extremes, "_PIECE", 2048)
    torch.testing.assert_close(min_max(x), expected, rtol=0, atol=0)
    assert_is_min_max_of(x)
    for place in (0, 1023, 1024, -1):
        bad = x.clone()
        bad.view(-1)[place] = math.nan
        assert_is_min_max_of(bad)
