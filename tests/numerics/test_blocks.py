"""Blocks hold every element once, in units, with its weight, and are no larger than asked for."""

import pytest
import torch

from scalewright.numerics.blocks import SEGMENT, positions_of, power_of_two_below
from scalewright.numerics.extremes import min_max

SHAPES = [(1, 64, 4, 16), (1, 3, 5, 2, 16), (40, 2, 32), (7, 4, 1, 1, 8), (1, 1, 5000), (3, 1, 9001), (1, 2, 3, 16384)]


def made(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x, power_of_two_below(x.abs().amax(dim=(0, -1)))


def cut(x, **options):
    return positions_of(x, *min_max(x), **options)


def sums(x, of=lambda block: block.x_PE, **options):
    """The sum of each position's elements, or of what `of` makes of them: float64, flat."""
    every = []
    for positions in cut(x, **options):
        total_P = torch.zeros(len(positions.unit_P), dtype=torch.float64)
        for block in positions:
            total_P += block.sum(of(block))
        every.append(total_P)
    return torch.cat(every)


@pytest.mark.parametrize("elements", [64, 1000, 1 << 18])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_in_one_block(shape, elements):
    x, unit = made(shape)
    expected = (x.double() / unit.unsqueeze(-1)).sum(dim=(0, -1)).flatten()
    torch.testing.assert_close(sums(x, block_elements=elements), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("elements", [64, 1000, 1 << 18])
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_come_in_order_with_their_ranges_in_units(shape, elements):
    x, unit = made(shape)
    pieces = list(cut(x, block_elements=elements))
    for name, expected in zip(("lo_P", "hi_P", "unit_P"), (*(end / unit for end in min_max(x)), unit), strict=True):
        found = torch.cat([getattr(positions, name) for positions in pieces])
        torch.testing.assert_close(found, expected.flatten(), rtol=0, atol=0)
    assert all(positions.group_size == shape[-1] and not positions.is_weighted for positions in pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_can_be_gone_over_as_often_as_need_be(shape):
    x, _ = made(shape)
    for elements in (64, 1 << 18):
        for positions in cut(x, block_elements=elements):
            one, other = ([block.x_PE.clone() for block in positions] for _ in range(2))
            assert len(one) == len(other)
            for mine, theirs in zip(one, other, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_do_not_depend_on_the_size_of_blocks(shape):
    x, _ = made(shape)
    answers = [
        sums(x, lambda block: block.x_PE * block.x_PE, block_elements=elements)
        for elements in (64, 1000, 1 << 14, 1 << 20)
    ]
    for other in answers[1:]:
        torch.testing.assert_close(other.float(), answers[0].float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_no_larger_than_asked_for_or_than_one_segment_of_a_row(shape):
    x, _ = made(shape)
    row = shape[-2] if len(shape) > 3 else 1
    sizes = [block.x_PE.numel() for positions in cut(x, block_elements=256) for block in positions]
    assert max(sizes) <= max(256, row * min(shape[-1], SEGMENT))


@pytest.mark.parametrize(
    ("shape", "elements", "is_whole"),
    [
        ((1, 64, 4, 16), 64, True),
        ((40, 2, 32), 64, False),
        ((40, 2, 32), 40 * 32, True),
        ((1, 1, 5000), 4096, False),
        ((1, 1, 5000), 8192, True),
    ],
)
def test_positions_are_whole_when_one_block_holds_all_of_their_elements(shape, elements, is_whole):
    x, _ = made(shape)
    for positions in cut(x, block_elements=elements):
        assert positions.is_whole == is_whole
        assert (len(list(positions)) == 1) == is_whole
        if is_whole:
            num_positions, padded = len(positions.unit_P), -(-shape[-1] // SEGMENT) * SEGMENT
            width = shape[0] * (shape[-1] if shape[-1] <= SEGMENT else padded)
            assert next(iter(positions)).x_PE.shape == (num_positions, width)


@pytest.mark.parametrize("elements", [256, 1 << 18])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 4, 16), (40, 8, 32), (3, 2, 2, 5000)])
def test_some_positions_have_the_elements_and_the_weights_that_they_had_among_all(shape, weighted, elements):
    x, _ = made(shape)
    weights = torch.rand(shape) if weighted else None
    for positions in cut(x, weights_NQG=weights, block_elements=elements):
        index = torch.arange(len(positions.unit_P)).flip(0)[::2]
        some = positions.at(index)
        torch.testing.assert_close(some.unit_P, positions.unit_P[index], rtol=0, atol=0)
        torch.testing.assert_close(some.lo_P, positions.lo_P[index], rtol=0, atol=0)
        torch.testing.assert_close(some.hi_P, positions.hi_P[index], rtol=0, atol=0)
        assert some.is_whole == positions.is_whole and some.is_weighted == weighted
        for block, of_all in zip(some, positions, strict=True):
            torch.testing.assert_close(block.x_PE, of_all.x_PE[index], rtol=0, atol=0)
            assert len(block.scratch) == 3 and all(each.shape == block.x_PE.shape for each in block.scratch)
            if weighted:
                torch.testing.assert_close(block.weights_PE, of_all.weights_PE[index], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 64, 4, 16), (1, 3, 5, 2, 16)])
def test_broadcast_weights_stand_beside_their_elements(shape):
    x, unit = made(shape)
    weights = torch.rand(1, *[1] * (len(shape) - 3), *shape[-2:])
    weight_unit = 2.0 ** weights.amax(dim=(0, -1)).log2().floor()
    whole = (x / unit.unsqueeze(-1) * weights / weight_unit.unsqueeze(-1)).double().sum(dim=(0, -1)).flatten()
    found = sums(x, lambda block: block.x_PE * block.weights_PE, weights_NQG=weights, block_elements=200)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [64, 1 << 18])
@pytest.mark.parametrize("shape", [(1, 64, 4, 16), (40, 8, 32), (3, 2, 2, 5000)])
def test_weights_are_in_units_of_a_power_of_two_that_is_no_larger_than_the_largest_of_their_position(shape, elements):
    x, _ = made(shape)
    weights = torch.rand(shape) * 10.0 ** torch.linspace(-37, 37, torch.Size(shape[1:-1]).numel()).reshape(
        *shape[1:-1], 1
    )
    start, largest = 0, weights.amax(dim=(0, -1)).flatten()
    for positions in cut(x, weights_NQG=weights, block_elements=elements):
        mine = largest[start : start + len(positions.unit_P)]
        start += len(mine)
        found = torch.stack([block.weights_PE.amax(dim=1) for block in positions]).amax(dim=0)
        assert ((found >= 1) & (found < 2)).all()
        torch.testing.assert_close(found * positions.weight_unit_P, mine, rtol=0, atol=0)
    assert start == len(largest)


def test_positions_that_weigh_nothing_have_weights_of_zero():
    x, _ = made((1, 4, 2, 16))
    (positions,) = cut(x, weights_NQG=torch.zeros(2, 16))
    assert positions.is_weighted and not positions.total_weight().any()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_blocks_are_fp32_whatever_the_tensor_and_the_default_are(default):
    x, _ = made((1, 4, 2, 16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        (positions,) = cut(x.half(), weights_NQG=torch.ones(16, dtype=torch.float64))
        block = next(iter(positions))
    finally:
        torch.set_default_dtype(before)
    assert {each.dtype for each in (block.x_PE, block.weights_PE, *block.scratch)} == {torch.float32}


def test_the_tensor_and_its_weights_are_left_as_they_are():
    x, weights = made((1, 4, 2, 16))[0], torch.rand(16)
    copies = x.clone(), weights.clone()
    for positions in cut(x, weights_NQG=weights):
        for block in positions:
            for each in (block.x_PE, block.weights_PE, *block.scratch):
                each.zero_()
    torch.testing.assert_close((x, weights), copies, rtol=0, atol=0)


def test_units_are_powers_of_two_that_are_no_larger():
    absmax = torch.tensor([1.0, 1.5, 2.0, 3e38, 1e-30])
    torch.testing.assert_close(power_of_two_below(absmax), 2.0 ** absmax.double().log2().floor(), check_dtype=False)
    assert (power_of_two_below(torch.tensor([0.0, 1e-45])) == torch.finfo(torch.float32).tiny).all()
