"""Whoever runs the benchmark gets a report, whatever fails on their device."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from nereid_backend.attention.gpu.gpu_attention import GpuFloat8KVCache

from loadtest.bench import json_programs
from loadtest.gpu import bench_gpu, gpu_engine, gpu_report
from loadtest.gpu.gpu_kernels import KernelError

CPU = torch.device("cpu")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Run all of a rehearsal but the engine; what it wrote."""

    def run(**stand_ins):
        for name, value in stand_ins.items():
            monkeypatch.setattr(bench_gpu, name, value)
        monkeypatch.setattr(
            sys, "argv", ["bench_gpu.py", "--rehearse", "--no-engine", "--out", str(tmp_path)]
        )
        code = bench_gpu.main()
        report = json.loads((tmp_path / "gpu.json").read_text())
        return code, report, (tmp_path / "gpu.md").read_text()

    return run


def fails(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB.")


def test_a_kernel_that_differs_is_named_first_and_the_rest_is_measured(kept):
    def check(name, spec, shapes, dtype, device, kind):
        if kind is GpuFloat8KVCache:
            raise KernelError(f"{name}: attention differs from its reference by 0.2")
        return 0.001

    code, report, text = kept(check=check)
    assert code == 1
    assert len(report["checks"]) == 8
    assert "8 comparisons of the kernels with their references: **2 WRONG" in text
    assert "- WRONG: 2/1 heads of 24 and 10, float8: 2/1 heads of 24" in text
    assert report["decode"]
    assert report["prefill"]


def test_a_kernel_that_does_not_compile_is_named_like_one_that_differs(kept):
    code, report, text = kept(check=fails)
    assert code == 1
    assert "8 WRONG" in text
    assert "float16: OutOfMemoryError: CUDA out of memory." in text
    assert report["decode"]


def test_figures_that_cannot_be_taken_are_left_out_and_the_others_are_there(kept):
    code, report, text = kept(check=lambda *_: 0.0, prefill_rate=fails)
    assert code == 0
    assert report["decode"]
    assert report["prefill"] == []
    assert "- prefill attention, tiny: OutOfMemoryError: CUDA out of memory." in text
    assert "share of torch's fused | at least 0.7 |  | not measured" in text


def test_without_the_rate_of_a_copy_what_is_compared_with_it_is_not_judged(kept):
    code, report, text = kept(check=lambda *_: 0.0, copy_rate=fails)
    assert code == 0
    assert report["decode"][0]["milliseconds"] > 0
    assert "the rate of a copy: OutOfMemoryError" in text
    assert gpu_report.Target("share of it", report["decode"][0]["share"], 0.85).ratio is None


def engine(monkeypatch, make_model, shapes):
    monkeypatch.setattr(gpu_engine, "make_model", make_model)
    monkeypatch.setattr(gpu_engine, "shapes_for", lambda *_: shapes)
    monkeypatch.setattr(gpu_engine, "run_contestant", lambda *_: {"error": "nothing is run here"})
    left_out = []
    args = SimpleNamespace(rehearse=True, folder=None, shape=None)
    return gpu_engine.engine(CPU, 1e9, args, time.monotonic() + 100, left_out), left_out


def test_where_the_large_model_cannot_be_made_a_smaller_one_is(monkeypatch):
    def make_model(folder, shape, *_):
        if shape == "8b":
            raise gpu_report.BenchError("not done after 90 s")
        return {"weights_bytes": 1_200_000_000, "forward_ms": 3.0}

    found, left_out = engine(monkeypatch, make_model, ["8b", "0.6b"])
    assert found["shape"] == "0.6b"
    assert left_out[0] == "a model of the 8b shape: not done after 90 s"


def test_without_any_model_there_is_a_report_without_an_engine(monkeypatch):
    found, left_out = engine(monkeypatch, fails, ["0.6b"])
    assert found is None
    assert len(left_out) == 1
    report = {"decode": [], "prefill": [], "engine": found}
    assert [target.verdict for target in gpu_report.targets(report)] == ["not measured"] * 5
    assert gpu_report.engine_lines(found) == []


# Programs, by what they do.


def program(code, limit_s=20.0):
    started = time.monotonic()
    found = json_programs.outcome([sys.executable, "-c", code], limit_s, dict(os.environ))
    return found, time.monotonic() - started


def test_a_result_counts_though_a_thread_does_not_let_its_program_end(monkeypatch):
    monkeypatch.setattr(json_programs, "_ENDING_S", 0.2)
    found, spent = program(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "print('loading')\n"
        "print('{\"load_s\": 3}')\n",
        limit_s=120.0,
    )
    assert found == {"load_s": 3}
    assert spent < 60


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    file = tmp_path / "pid"
    found, spent = program(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "print('capturing', file=sys.stderr, flush=True)\n"
        "time.sleep(300)\n",
        limit_s=5.0,
    )
    assert found == {"error": "no result after 5 s; the last line of its log is: capturing"}
    assert spent < 60
    for _ in range(100):
        if not is_running(int(file.read_text())):
            break
        time.sleep(0.1)
    assert not is_running(int(file.read_text()))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit('no room')", "exit code 1; the last line of its log is: no room"),
        ("print('done')", "exit code 0; the last line of its log is: -"),
        ("import os; os.abort()", "exit code -6; the last line of its log is: -"),
    ],
)
def test_a_program_without_a_result_says_how_it_ended(code, error):
    assert program(code)[0] == {"error": error}


def test_no_contestant_gets_all_the_time_that_is_left(monkeypatch):
    limits = []
    monkeypatch.setattr(
        gpu_engine,
        "run_contestant",
        lambda name, path, workload, limit_s, settings: limits.append(limit_s) or {},
    )
    gpu_engine.run("nereid", "", {}, time.monotonic() + 100, {})
    gpu_engine.run("nereid", "", {}, time.monotonic() + 12, {})
    assert limits == [pytest.approx(60, abs=5), pytest.approx(10)]


@pytest.mark.timeout(600)
def test_a_model_is_made_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_engine, "_MODEL_S", 250)
    args = SimpleNamespace(rehearse=True)
    made = gpu_engine.make_model(str(tmp_path), "demo", 16, args)
    assert (tmp_path / "model.safetensors").stat().st_size > made["weights_bytes"] * 0.9
    assert made["forward_ms"] > 0


def test_a_model_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(gpu_engine, "outcome", lambda *_: {"error": "not done after 90 s"})
    with pytest.raises(gpu_report.BenchError, match="not done after 90 s"):
        gpu_engine.make_model("", "demo", 16, SimpleNamespace(rehearse=True))
