import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "loadtest" / "bench_gpu.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = run()
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout


def test_a_rehearsal_goes_through_checks_tuning_and_kernels_and_writes_both_reports(tmp_path):
    pytest.importorskip("triton")
    done = run("--rehearse", "--tune", "--tables", tmp_path, "--out", tmp_path, "--no-engine")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["checks"]
    assert report["decode"][0]["milliseconds"] > 0
    assert report["prefill"][0]["milliseconds"] > 0
    assert "comparisons of the kernels" in (tmp_path / "gpu.md").read_text()
    table = json.loads((tmp_path / "rehearsal.json").read_text())["kernels"]
    assert table["decode"][0]["max_dim"] == 16


def test_a_kernel_that_differs_from_its_twin_stops_it(device, monkeypatch):
    import gpu_kernels
    from nereid_backend.attention import gpu
    from nereid_backend.attention.layers import LayerSpec

    plain = gpu.decode

    def wrong(query, step, rows, out, tuning):
        plain(query, step, rows, out, tuning)
        out[0] += 0.1

    monkeypatch.setattr(gpu, "decode", wrong)
    with pytest.raises(gpu_kernels.KernelError, match="attention differs from its twin"):
        gpu_kernels.check(
            "small", LayerSpec(2, 1, 16, 16), [(20, 1), (0, 3)], torch.float32, device
        )


def test_integers_that_are_off_by_more_than_their_rounding_stop_it(device, monkeypatch):
    import gpu_kernels
    from nereid_backend.attention import gpu
    from nereid_backend.attention.layers import LayerSpec

    plain = gpu.store

    def wrong(key, value, step, slots):
        plain(key * 1.01, value, step, slots)

    monkeypatch.setattr(gpu, "store", wrong)
    with pytest.raises(gpu_kernels.KernelError, match="more than their rounding"):
        gpu_kernels.check(
            "small",
            LayerSpec(2, 1, 16, 16),
            [(20, 1), (0, 3)],
            torch.float32,
            device,
            gpu.GpuInt8KVCache,
        )


def test_a_cache_write_that_differs_from_its_twin_stops_it(device, monkeypatch):
    import gpu_kernels
    from nereid_backend.attention import gpu
    from nereid_backend.attention.layers import LayerSpec

    monkeypatch.setattr(gpu, "store", lambda *args: None)
    with pytest.raises(gpu_kernels.KernelError, match="cache write"):
        gpu_kernels.check("small", LayerSpec(2, 1, 16, 16), [(20, 1)], torch.float32, device)
