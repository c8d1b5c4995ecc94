"""Powers of two for channels: what they even out, which channels share them, and that they lose nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalewright.numerics.smoothing import LIMIT, Rows, by_rows, exponents, rows_that_fit, times_two_to


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_with_all_its_strength_all_channels_become_equally_loud():
    loudest_C = torch.exp2(2 * random(64))
    powers_C = exponents(loudest_C, torch.ones(64), strength=1.0)
    after_C = loudest_C / torch.exp2(powers_C.float())
    assert after_C.max() / after_C.min() <= 2.0001 < loudest_C.max() / loudest_C.min()


def test_with_none_all_columns_become_equally_heavy():
    heaviest_C = torch.exp2(2 * random(64))
    powers_C = exponents(torch.exp2(random(64, seed=1)), heaviest_C, strength=0.0)
    after_C = heaviest_C * torch.exp2(powers_C.float())
    assert after_C.max() / after_C.min() <= 2.0001 < heaviest_C.max() / heaviest_C.min()


@given(st.integers(-8, 8), st.integers(0, 15), st.floats(0.0, 1.0))
def test_a_channel_that_is_louder_by_a_power_of_two_is_made_quieter_by_its_share_of_it(power, channel, strength):
    loudest_C, heaviest_C = torch.ones(16), torch.ones(16)
    loudest_C[channel] = 2.0**power
    powers_C = exponents(loudest_C, heaviest_C, strength=strength).float()
    others = [each for each in range(16) if each != channel]
    assert abs(float(powers_C[channel] - powers_C[others[0]]) - strength * power) <= 1.0
    assert len({float(powers_C[each]) for each in others}) == 1


def test_what_is_multiplied_there_and_back_is_what_it_was():
    weight_RC, powers_C, powers_R = random(6, 8), torch.arange(-4, 4), torch.arange(-3, 3)
    assert torch.equal(times_two_to(weight_RC, powers_C, dim=1), weight_RC * torch.exp2(powers_C.float()))
    assert torch.equal(times_two_to(weight_RC, powers_R, dim=0), weight_RC * torch.exp2(powers_R.float())[:, None])
    for dtype in (torch.float32, torch.bfloat16):
        x_TC, w_RC = random(5, 8, seed=1).to(dtype), weight_RC.to(dtype)
        smoothed_TC, smoothed_RC = times_two_to(x_TC, -powers_C, dim=1), times_two_to(w_RC, powers_C, dim=1)
        assert smoothed_TC.dtype == smoothed_RC.dtype == dtype
        assert torch.equal(smoothed_TC.float() @ smoothed_RC.float().T, x_TC.float() @ w_RC.float().T)
        assert torch.equal(times_two_to(smoothed_RC, -powers_C, dim=1), w_RC)
    assert torch.equal(times_two_to(random(8), powers_C, dim=0), random(8) * torch.exp2(powers_C.float()))


def test_dead_channels_stay_and_nothing_is_out_of_bounds():
    loudest_C = torch.tensor([0.0, 1e-30, 1.0, 1e30])
    powers_C = exponents(loudest_C, torch.tensor([1.0, 0.0, 1.0, 1.0]), strength=1.0)
    assert powers_C.dtype == torch.int8 and powers_C[0] == 0
    assert int(powers_C.abs().max()) <= LIMIT and powers_C[3] > powers_C[2]
    assert not exponents(torch.zeros(4), torch.ones(4), strength=0.5).any()
    assert exponents(torch.ones(4), torch.zeros(4), strength=0.5).abs().max() == 0


def test_channels_that_come_from_one_row_have_one_factor_that_of_the_loudest():
    rows = Rows(0, 2, 2, 2)  # two heads of values of size 2, each for two heads of queries
    loudest_C = torch.tensor([1.0, 4.0, 16.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    row_C = rows.of(8)
    assert row_C.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    powers_C = exponents(loudest_C, torch.ones(8), strength=1.0, row_C=row_C)
    assert powers_C[0] == powers_C[2] > powers_C[1] == powers_C[3] > powers_C[4]
    powers_R = by_rows(powers_C, row_C, 6)
    assert torch.equal(powers_R[row_C], powers_C) and powers_R[4:].tolist() == [0, 0]
    assert by_rows(powers_C, None, 8) is powers_C


def fused(kind: str, heads: int, values: int, head: int) -> tuple[int, torch.Tensor]:
    """How many rows a weight of queries, keys and values has, and the row of each channel that attention gives."""
    queries, one = heads * head, values * head
    rows = torch.arange({"values": one, "in a row": queries + 2 * one, "by group": queries + 2 * one}[kind])
    if kind == "in a row":
        rows = rows[queries + one :]
    elif kind == "by group":
        rows = rows.view(values, heads // values + 2, head)[:, -1].reshape(-1)
    return queries, rows.view(values, 1, head).expand(-1, heads // values, -1).reshape(-1)


@pytest.mark.parametrize(("heads", "values"), [(4, 4), (4, 2), (6, 1), (8, 2)])
@pytest.mark.parametrize("kind", ["values", "in a row", "by group"])
def test_values_are_found_wherever_they_lie(kind, heads, values):
    columns, expected_C = fused(kind, heads, values, head=8)
    num_rows = {"values": values * 8}.get(kind, (heads + 2 * values) * 8)
    offered = [each.of(columns).tolist() for each in rows_that_fit(num_rows, columns, (8,))]
    assert expected_C.tolist() in offered
    assert all(min(each) >= 0 and max(each) < num_rows and len(each) == columns for each in offered)
    assert len(offered) == len({tuple(each) for each in offered}) or kind != "values"


def test_values_behind_keys_that_are_longer_are_found():
    expected_C = torch.arange(4 * 20).view(4, 20)[:, 12:].reshape(-1)  # of each head, keys of 12 and values of 8
    assert expected_C.tolist() in [each.of(32).tolist() for each in rows_that_fit(4 * 20, 32, (8,))]


def test_few_channels_have_few_places_in_a_large_weight():
    assert len(rows_that_fit(8 * 4, 4)) == 8
    assert rows_that_fit(1024, 4) == []


def test_weights_of_other_shapes_give_no_channels():
    assert rows_that_fit(32, 32) == [Rows.same(32)]
    assert rows_that_fit(96, 48, (8,))[:2] == [Rows.same(48, 48), Rows.same(48, 0)]  # two in one, the second first
    assert rows_that_fit(40, 32) == [] == rows_that_fit(16, 32) == rows_that_fit(16, 32, (7, 5))
