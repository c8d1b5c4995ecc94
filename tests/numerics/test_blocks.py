"""Blocks hold every element once, in units, with its weight, and are no larger than asked for."""

import pytest
import torch

from scalewright.numerics.blocks import SEGMENT, blocks_of, power_of_two_below

SHAPES = [(1, 64, 4, 16), (1, 3, 5, 2, 16), (40, 2, 32), (7, 4, 1, 1, 8), (1, 1, 5000), (3, 1, 9001), (1, 2, 3, 16384)]


def made(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x, power_of_two_below(x.abs().amax(dim=(0, -1)))


@pytest.mark.parametrize("elements", [64, 1000, 1 << 18])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_in_one_block(shape, elements):
    x, unit = made(shape)
    sums = torch.zeros(unit.numel(), dtype=torch.float64)
    for block in blocks_of(x, unit, block_elements=elements):
        sums[block.start : block.end] += block.sum(block.x_PE)
    expected = (x.double() / unit.unsqueeze(-1)).sum(dim=(0, -1)).flatten()
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_do_not_depend_on_the_size_of_blocks(shape):
    x, unit = made(shape)
    answers = []
    for elements in (64, 1000, 1 << 14, 1 << 20):
        sums = torch.zeros(unit.numel(), dtype=torch.float64)
        for block in blocks_of(x, unit, block_elements=elements):
            sums[block.start : block.end] += block.sum(block.x_PE * block.x_PE)
        answers.append(sums.float())
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_no_larger_than_asked_for_or_than_one_segment_of_a_row(shape):
    x, unit = made(shape)
    row = shape[-2] if len(shape) > 3 else 1
    sizes = [block.x_PE.numel() for block in blocks_of(x, unit, block_elements=256)]
    assert max(sizes) <= max(256, row * min(shape[-1], SEGMENT))


@pytest.mark.parametrize("shape", [(1, 64, 4, 16), (1, 3, 5, 2, 16)])
def test_broadcast_weights_stand_beside_their_elements(shape):
    x, unit = made(shape)
    weights = torch.rand(1, *[1] * (len(shape) - 3), *shape[-2:])
    whole = (x / unit.unsqueeze(-1) * weights).double().sum(dim=(0, -1)).flatten()
    for block in blocks_of(x, unit, weights_NQG=weights, block_elements=200):
        torch.testing.assert_close(
            block.sum(block.x_PE * block.weights_PE), whole[block.start : block.end], rtol=1e-5, atol=1e-5
        )


def test_units_are_powers_of_two_that_are_no_larger():
    absmax = torch.tensor([1.0, 1.5, 2.0, 3e38, 1e-30])
    torch.testing.assert_close(power_of_two_below(absmax), 2.0 ** absmax.double().log2().floor(), check_dtype=False)
    assert (power_of_two_below(torch.tensor([0.0, 1e-45])) == torch.finfo(torch.float32).tiny).all()
