import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "loadtest.gpu.bench_gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
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
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    plain = gpu_attention.decode

    def wrong(query, call, rows, out, tuning):
        plain(query, call, rows, out, tuning)
        out[0] += 0.1

    monkeypatch.setattr(gpu_attention, "decode", wrong)
    with pytest.raises(gpu_kernels.KernelError, match="attention differs from its reference"):
        gpu_kernels.check(
            "small", LayerSpec(2, 1, 16, 16), [(20, 1), (0, 3)], torch.float32, device
        )


@pytest.mark.parametrize(("kind", "factor"), [("GpuInt8KVCache", 1.01), ("GpuFloat8KVCache", 1.08)])
def test_numbers_of_8_bits_that_are_off_by_more_than_their_rounding_stop_it(
    device, monkeypatch, kind, factor
):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    plain = gpu_attention.store

    def wrong(key, value, call, slots):
        plain(key * factor, value, call, slots)

    monkeypatch.setattr(gpu_attention, "store", wrong)
    with pytest.raises(gpu_kernels.KernelError, match="more than the rounding"):
        gpu_kernels.check(
            "small",
            LayerSpec(2, 1, 16, 16),
            [(20, 1), (0, 3)],
            torch.float32,
            device,
            getattr(gpu_attention, kind),
        )


def test_a_cache_write_that_differs_from_its_twin_stops_it(device, monkeypatch):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    monkeypatch.setattr(gpu_attention, "store", lambda *args: None)
    with pytest.raises(gpu_kernels.KernelError, match="cache write"):
        gpu_kernels.check("small", LayerSpec(2, 1, 16, 16), [(20, 1)], torch.float32, device)


# The part about the engine, with stand-ins for the processes that take minutes.

FOUND = {
    "load_s": 9.0,
    "prefill": {"64": 6400.0},
    "decode": {"1": 100.0, "3": 240.0},
    "steps": {"1": {"step_ms": 9.5, "forward_ms": 1.0, "host_ms": 2.0}},
    "replays": 7,
}


@pytest.fixture
def report_of(monkeypatch):
    """The report of a run whose contestants are a function."""
    from loadtest.gpu import gpu_engine

    def report(run):
        made = {"weights_bytes": 8_000_000, "forward_ms": 8.0}
        monkeypatch.setattr(gpu_engine, "make_model", lambda *_: made)
        monkeypatch.setattr(gpu_engine, "run_contestant", run)
        args = SimpleNamespace(rehearse=True, folder=None, shape=None)
        left_out = []
        end = time.monotonic() + 100
        return around(gpu_engine.engine(torch.device("cpu"), 1e9, args, end, left_out), left_out)

    return report


def around(engine, left_out):
    case = {"name": "8 of 32768", "milliseconds": 1.0, "rate": 1e9, "limit": 1e9, "share": 0.9}
    machine = {"device": "d", "date": "d", "command": "c"}
    return {
        "machine": {**machine, "torch": "t", "triton": "t", "transformers": "t"},
        "checks": [{"difference": 0.0}],
        "copy_bytes_per_s": 1e9,
        "decode": [case],
        "prefill": [{**case, "share": 0.35}],
        "engine": engine,
        "left_out": left_out,
        "seconds": 1.0,
    }


def test_targets_say_by_how_much_they_are_met_or_missed(report_of):
    from loadtest.gpu.gpu_report import markdown

    asked = []

    def run(name, folder, workload, limit_s, settings):
        asked.append((name, settings))
        return FOUND if name == "nereid" else {"decode": {"3": 60.0}}

    text = markdown(report_of(run))
    assert "share of a copy's rate | at least 0.85 | 0.90 | met, 1.06 of it" in text
    assert "torch's fused | at least 0.7 | 0.35 | missed, 0.50 of it" in text
    # 8 MB at 1 GB/s are 8 ms, a step takes 10.
    assert "reading the weights | at least 0.8 | 0.80 | met, 1.00 of it" in text
    assert "3 sequences, times generate_batch | at least 3 | 4.00 | met, 1.33 of it" in text
    # 64 tokens take 10 ms, one pass 8.
    assert "first token, times one forward pass | at most 1.5 | 1.25 | met, 1.20 of it" in text
    assert "| as it is | 9 | 10.0 | 240 | 9.50 | 1.00 | 2.00 |  |  |  | 7 |" in text
    assert asked[1][0] == "generate_batch"
    settings = [given for name, given in asked if name == "nereid"]
    assert {} in settings
    assert {"cuda_graphs": False} in settings
    assert {"compile_forward": True} in settings
    assert {"async_scheduling": True} in settings
    assert "Left out" not in text


def test_what_there_was_no_time_for_is_listed(report_of):
    from loadtest.gpu.gpu_report import markdown

    def run(name, folder, workload, limit_s, settings):
        if name == "nereid" and settings == {}:
            return FOUND
        return {"error": "no time was left of 480 s"}

    text = markdown(report_of(run))
    assert "times generate_batch | at least 3 |  | not measured" in text
    assert "- generate_batch: no time was left of 480 s" in text
    assert "- the engine, compiled: no time was left of 480 s" in text


def test_a_contestant_is_not_begun_without_time_or_with_a_setting_that_is_not_there():
    from loadtest.gpu.gpu_engine import run

    late = run("nereid", "", {}, time.monotonic() + 5, {})
    assert late == {"error": "no time was left"}
    found = run("nereid", "", {}, time.monotonic() + 100, {"unheard_of": True})
    assert found == {"error": "this engine has no setting unheard_of"}


def test_checks_that_take_too_long_give_up_what_is_left_of_them():
    from loadtest.gpu import bench_gpu

    left_out = []
    late = time.monotonic() - bench_gpu._CHECKS_S
    found = bench_gpu.checks(torch.device("cpu"), SimpleNamespace(rehearse=True), late, left_out)
    assert found == []
    assert len(left_out) == 8
