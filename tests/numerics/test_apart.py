"""Tensors in memory of their own are tensors like others."""

import pytest
import torch

from scalewright.numerics.apart import copied_apart, zeros_apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (300, 1000)])
def test_copies_and_zeros_are_those_of_torch(dtype, shape):
    values = torch.randint(-9, 9, shape).to(dtype)
    torch.testing.assert_close(copied_apart(values), values, rtol=0, atol=0)
    zeros = zeros_apart(shape, dtype=dtype)
    torch.testing.assert_close(zeros, torch.zeros(shape, dtype=dtype), rtol=0, atol=0)
    assert zeros.is_contiguous()


def test_a_copy_can_be_written_to_and_outlives_what_it_was_made_of():
    values = torch.ones(300, 1000)
    copy = copied_apart(values[:, ::2])
    values.zero_()
    del values
    copy += 1
    torch.testing.assert_close(copy, torch.full((300, 500), 2.0))
