"""What all tests share: one torch thread in each test process, and examples of hypothesis that are the same each time.

`make test` must not fail by chance; `make explore` draws new ones, ten times.
"""

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def num_threads():
    """Sets the number of torch's threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
