"""Tests that all kernels compile for several GPUs.

The interpreter accepts code that the compiler rejects. The compiler needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nereid_backend.attention.gpu.tuning import shared_bytes

ROOT = Path(__file__).parents[3]
KERNELS = {"store_kernel", "decode_kernel", "reduce_kernel", "prefill_kernel", "sample_kernel"}
ATTENTION = ("decode_kernel", "prefill_kernel")
# For each compute capability, the PTX instruction that multiplies large matrices.
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compiled(folder, *options):
    """Compile kernels in a new process, and return one dict of measurements for each kernel."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu.compile_kernels", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def check_resources(line):
    """Check the shared memory, the spilled registers and the matrix instructions of a kernel."""
    capability = divmod(line["capability"], 10)
    assert line["shared_bytes"] <= shared_bytes(capability), line
    assert line["stack_bytes"] == 0, line
    if line["dtype"] == "float32":
        # Tensor cores would round float32 numbers.
        assert line["products"] == [], line
        return
    # With heads of 512, the tiles are too small for the instructions for large products.
    if line["kernel"] == "prefill_kernel" and line["spec"] != "512":
        assert PRODUCTS[line["capability"]] in line["products"], line
    if line["kernel"] == "decode_kernel":
        assert "mma.sync" in line["products"], line


def check_prefetch(line):
    """Check that a kernel copies the next tile while it computes the current tile."""
    if line["kernel"] in ATTENTION and line["dtype"] != "float32":
        assert line["copies_in_flight"] > 0, line


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    options = ("--capabilities", "89", "90", "--specs", "128", "sampling")
    return compiled(tmp_path_factory.mktemp("cache"), *options)


def test_every_kernel_compiles_for_gpus_of_two_generations(lines):
    assert {(line["kernel"], line["capability"]) for line in lines} == {
        (kernel, capability) for kernel in KERNELS for capability in (89, 90)
    }


def test_no_kernel_needs_too_much_shared_memory_or_too_many_registers(lines):
    for line in lines:
        check_resources(line)


def test_the_copies_of_the_next_tile_start_before_the_products_of_this_one(lines):
    for line in lines:
        check_prefetch(line)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8", "float32"])
@pytest.mark.parametrize(
    "spec", ["64-window-sinks", "80", "96", "128", "192-128", "256-softcap-window", "512"]
)
def test_every_entry_of_the_tables_compiles_without_spills(spec, dtype, tmp_path):
    options = ("--capabilities", "80", "89", "90", "100", "--specs", spec, "--dtypes", dtype)
    for line in compiled(tmp_path, *options):
        if line["kernel"] in ATTENTION:
            check_resources(line)
            check_prefetch(line)
