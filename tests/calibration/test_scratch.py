"""What the allocator keeps: in a process of its own, because it remembers all that was ever freed."""

import platform
import subprocess
import sys

import pytest

from scalewright.calibration import scratch

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


WAITS_BETWEEN = """
import torch
from scalewright.calibration.scratch import keep_freed, with_pages_of_their_own

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed()
with with_pages_of_their_own():
    before, waiting = resident(), []
    for _ in range(40):
        comes, goes = torch.ones(3 << 19), torch.ones(3 << 19)
        waiting.append(torch.ones(16))
        del comes, goes
    print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_what_waits_breaks_up_no_room_between_large_tensors_with_pages_of_their_own():
    ran = subprocess.run([sys.executable, "-c", WAITS_BETWEEN], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 8 << 20


def test_memory_is_given_back_when_the_process_has_grown_and_not_before(monkeypatch):
    given_back = []
    monkeypatch.setattr(scratch, "give_back_freed", lambda: given_back.append(1))
    thrift, seen = scratch.Thrift(step=10), []
    for resident in (100, 108, 111, 109, 118, 120, 90, 99, 101):
        monkeypatch.setattr(scratch, "_resident", lambda now=resident: now)
        thrift.look()
        seen.append(len(given_back))
    assert seen == [0, 0, 1, 1, 1, 2, 2, 2, 3]
