"""What a process of a run sets once."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: how many huge pages are to be had changes
from agentrl.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def faults():
    block = b"x" * (100 << 20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = faults()
for _ in range(4):
    last = faults()
print(last - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_taken_again() -> None:
    """Counted in pages that the system had to hand out again."""
    found = [
        int(subprocess.run([sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, check=True).stdout)
        for keep in (False, True)
    ]
    assert found[1] < 1000 < found[0]
