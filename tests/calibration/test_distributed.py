"""Who runs which batches, and who works on which layers: laws that need no second process."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalewright.calibration.distributed import Ranks, Share
from scalewright.modifiers.layers import WatchedLayer

COUNTS = st.integers(1, 9)


@given(st.lists(st.integers(1, 5000), max_size=40), COUNTS)
def test_shares_are_all_batches_in_their_order_and_none_twice(costs, count):
    numbers = list(range(len(costs)))
    shares = [numbers[Ranks(rank, count).share_of(costs)] for rank in range(count)]
    assert [number for share in shares for number in share] == numbers


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), COUNTS)
def test_no_share_is_much_more_than_its_part(costs, count):
    loads = [sum(costs[Ranks(rank, count).share_of(costs)]) for rank in range(count)]
    assert max(loads) <= sum(costs) / count + max(costs)


def layers(sizes):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4))
    return [
        [WatchedLayer(f"{i}", nn.Linear(columns, 4, bias=False, device="meta"), scheme)]
        for i, columns in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 64), max_size=30), COUNTS)
def test_rounds_have_all_groups_once_and_each_rank_sees_the_same(sizes, count):
    groups = layers(sizes)
    rounds = [list(Ranks(rank, count).rounds(groups)) for rank in range(count)]
    assert all(each == rounds[0] for each in rounds)
    assert [share.layers for some in rounds[0] for share in some] == groups
    assert {share.owner for some in rounds[0] for share in some} <= set(range(count))


def test_much_work_is_shared_out_evenly_in_rounds_that_are_not_all_of_it():
    rounds = list(Ranks(0, 3).rounds(layers([64, 64, 16, 48, 32, 80] * 30)))
    assert len(rounds) > 5
    loads = [
        sum(share.layers[0].cost for share in some if share.owner == rank) for rank in range(3) for some in rounds[:-1]
    ]
    assert max(loads) < 1.2 * min(loads)


def test_who_is_alone_does_all_and_waits_for_nobody():
    ranks, groups = Ranks(), layers([8, 8])
    assert ranks.share_of([3, 4, 5]) == slice(0, 3)
    assert list(ranks.rounds(groups)) == [[Share(0, groups[0])], [Share(0, groups[1])]]
    ranks.meet()
    ranks.merge([Share(0, groups[0])])
    ranks.check_same({"data": "1"})
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.told_by(0, lambda: 3) == 3
    assert (ranks.earliest((2, 1)), ranks.earliest(None)) == ((2, 1), None)
    assert ranks.is_first and ranks.speaks and not ranks.is_ending
    assert not torch.distributed.is_initialized()
