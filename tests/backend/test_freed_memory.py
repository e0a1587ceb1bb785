import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

# Creates tensors of different sizes and frees every second tensor. Prints how much more memory the
# process uses than before, in MiB.
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
    used_mib = re.fullmatch(r"used (\d+)\n", result.stdout)
    assert used_mib is not None, result.stdout
    # The 50 remaining tensors use 60 MiB. If freed memory were kept, 120 MiB would be in use.
    assert int(used_mib[1]) < 110


# Reads a memory-mapped tensor of 64 MiB and discards its pages. Prints the size of the mapped pages
# in memory, in MiB, after it read the tensor and after it discarded the pages. Then prints whether
# the values are correct.
_MAPPED_PROGRAM = """
import re, sys, torch
from safetensors import safe_open
from nereid_backend.freed_memory import discard_weights_after_use
def mapped():
    text = open("/proc/self/status").read()
    return int(re.search(r"RssFile:\\s+(\\d+)", text)[1]) // 1024
layer = torch.nn.Linear(2**12, 2**12, bias=False)
before = mapped()
with safe_open(sys.argv[1], framework="pt") as file:
    layer.weight = torch.nn.Parameter(file.get_tensor("weight"), requires_grad=False)
def change(layer, inputs):
    layer.weight[2**11, 0] = 7
if sys.argv[2] == "changed":
    layer.register_forward_pre_hook(change)
total = layer.weight.sum()
print("read", mapped() - before)
with discard_weights_after_use(layer):
    layer(torch.ones(2**12))
print("discarded", mapped() - before)
print("kept", bool(layer.weight.sum() == total + (6 if sys.argv[2] == "changed" else 0)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", ["unchanged", "changed"])
def test_pages_of_a_mapped_weight_are_returned_after_use_unless_they_were_changed(tmp_path, state):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2**12, 2**12)}, path)
    result = subprocess.run(
        [sys.executable, "-c", _MAPPED_PROGRAM, str(path), state],
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(line.split() for line in result.stdout.splitlines())
    assert int(lines["read"]) >= 63
    assert (int(lines["discarded"]) < 16) == (state == "unchanged")
    assert lines["kept"] == "True"
