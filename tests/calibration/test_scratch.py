"""What the allocator keeps: in a process of its own, because it remembers all that was ever freed."""

import platform
import subprocess
import sys

import pytest

COMES_AND_GOES = """
import resource
import torch
from scalewright.calibration.scratch import give_back_freed, keep_freed

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.zeros(3 << 19) for _ in range(4)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = new_pages()
keep_freed()
kept = new_pages()
give_back_freed()
print(first, kept, new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_memory_that_comes_and_goes_is_used_again_and_can_be_given_back():
    ran = subprocess.run([sys.executable, "-c", COMES_AND_GOES], capture_output=True, text=True, check=True)
    first, kept, given_back = (int(each) for each in ran.stdout.split())
    assert kept < first / 5
    assert given_back > kept / 4  # they have to be got again, once
