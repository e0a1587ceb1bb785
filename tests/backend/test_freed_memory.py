import re
import subprocess
import sys

import pytest

# Creates tensors of different sizes, and frees every second one. Prints the memory that the process
# uses in addition, in MiB.
_PROGRAM = """
import re, sys, torch
from nereid_backend.freed_memory import FreedMemory
def used():
    text = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) // 1024
torch.ones(1)
before = used()
tensors = [torch.ones(2**18 + 2**12 * i) for i in range(100)]
del tensors[::2]
freed = FreedMemory()
freed.add(2**20)
assert used() - before > 100
freed.add(2**25)
print("used", used() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned():
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"MALLOC_MMAP_THRESHOLD_": str(2**26), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"used (\d+)", result.stdout)
    assert found is not None
    assert int(found[1]) < 110
