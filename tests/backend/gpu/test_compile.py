"""The interpreter takes more than the compiler does; compiling for a GPU needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What a program may have: 163 KiB on an A100 (compute capability 8.0), of which 8.6 and 8.9, cut in
# the same way, have 99; 227 on an H100 (9.0).
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
KERNELS = {"store_kernel", "decode_kernel", "reduce_kernel", "prefill_kernel", "sample_kernel"}


def compiled(folder, *options):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu.compile_kernels", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    options = ("--specs", "128", "sampling", "--dtypes", "bfloat16", "int8", "fp8")
    return compiled(tmp_path_factory.mktemp("cache"), *options)


def test_every_kernel_compiles_for_ampere_and_hopper(lines):
    assert {(line["kernel"], line["capability"]) for line in lines} == {
        (kernel, capability) for kernel in KERNELS for capability in SHARED_BYTES
    }


def test_no_kernel_takes_more_than_the_device_has_or_runs_out_of_registers(lines):
    for line in lines:
        assert line["shared_bytes"] <= SHARED_BYTES[line["capability"]], line
        assert line["stack_bytes"] == 0, line


def test_attention_multiplies_on_tensor_cores_and_copies_ahead(lines):
    for line in lines:
        if line["kernel"] in ("decode_kernel", "prefill_kernel"):
            is_hopper_prefill = line["capability"] == 90 and line["kernel"] == "prefill_kernel"
            expected = "wgmma.mma_async" if is_hopper_prefill else "mma.sync"
            assert expected in line["products"], line
            assert line["num_async_copies"] > 0, line


def test_the_copies_of_the_next_tile_start_before_the_products_of_this_one(lines):
    """With 0 copies in flight, each iteration would wait for all copies before it computes."""
    for line in lines:
        if line["kernel"] in ("decode_kernel", "prefill_kernel") and line["dtype"] == "bfloat16":
            assert line["copies_in_flight"] > 0, line


@pytest.mark.long
@pytest.mark.timeout(600)
def test_heads_of_512_fit_a_device_of_their_generation_too(tmp_path):
    for line in compiled(tmp_path, "--specs", "512", "--dtypes", "bfloat16"):
        assert line["shared_bytes"] <= SHARED_BYTES[line["capability"]], line
        assert line["stack_bytes"] == 0, line
