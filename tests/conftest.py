"""What all tests share: one torch thread in each test process, so that they do not fight for the cores."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def num_threads():
    """Sets the number of torch's threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
