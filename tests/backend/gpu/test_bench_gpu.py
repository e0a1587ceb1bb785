"""Tests of the GPU benchmarks: the comparisons of kernels, and the search for tile sizes."""

import functools
import json
import time
from types import SimpleNamespace

import pytest
import torch

from loadtest.gpu.lines import Rank


def test_a_kernel_that_differs_from_its_reference_stops_the_benchmark(device, monkeypatch):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    plain = gpu_attention.decode

    def wrong(query, call, rows, out, tuning):
        plain(query, call, rows, out, tuning)
        out[0] += 0.1

    monkeypatch.setattr(gpu_attention, "decode", wrong)
    case = gpu_kernels.Case("small", LayerSpec(2, 1, 16, 16), [(20, 1), (0, 3)])
    with pytest.raises(gpu_kernels.KernelError, match="attention differs from its reference"):
        gpu_kernels.check(case, torch.float32, device)


@pytest.mark.parametrize(("kind", "factor"), [("GpuInt8KVCache", 1.01), ("GpuFloat8KVCache", 1.08)])
def test_8_bit_numbers_with_more_than_the_rounding_error_stop_the_benchmark(
    device, monkeypatch, kind, factor
):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    plain = gpu_attention.store

    def wrong(key, value, call, slots):
        plain(key * factor, value, call, slots)

    monkeypatch.setattr(gpu_attention, "store", wrong)
    cache = getattr(gpu_attention, kind)
    case = gpu_kernels.Case("small", LayerSpec(2, 1, 16, 16), [(20, 1), (0, 3)], cache)
    with pytest.raises(gpu_kernels.KernelError, match="more than the rounding"):
        gpu_kernels.check(case, torch.float32, device)


def test_a_cache_write_that_differs_from_its_reference_stops_the_benchmark(device, monkeypatch):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    monkeypatch.setattr(gpu_attention, "store", lambda *args: None)
    case = gpu_kernels.Case("small", LayerSpec(2, 1, 16, 16), [(20, 1)])
    with pytest.raises(gpu_kernels.KernelError, match="cache write"):
        gpu_kernels.check(case, torch.float32, device)


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]


def test_a_failed_comparison_is_reported_and_the_other_comparisons_continue(
    device, monkeypatch, capsys
):
    from loadtest.gpu import kernel_parts

    def check(case, dtype, device):
        if dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB.")
        return 0.001

    monkeypatch.setattr(kernel_parts, "check", check)
    kernel_parts.compare(device, SimpleNamespace(tiny=True, share=[0, 1]))
    *found, verdict = lines_of(capsys)
    assert len(found) == 10
    assert verdict["text"] == "8 of 10 comparisons equal their references"
    wrong = [line["text"] for line in found if line["rank"] == 0]
    assert len(wrong) == 2
    assert wrong[0].endswith("float32: OutOfMemoryError: CUDA out of memory.")


def test_several_processes_together_run_each_comparison_once(device, monkeypatch, capsys):
    from loadtest.gpu import kernel_parts

    monkeypatch.setattr(kernel_parts, "check", lambda *_: 0.0)
    for number in range(3):
        kernel_parts.compare(device, SimpleNamespace(tiny=True, share=[number, 3]))
    texts = [line["text"] for line in lines_of(capsys) if line["rank"] == Rank.DETAIL]
    assert len(texts) == len(set(texts)) == 10


def test_a_search_writes_its_table_into_the_folder_of_results(
    device, monkeypatch, capsys, tmp_path
):
    from loadtest.gpu import kernel_parts

    monkeypatch.setattr(kernel_parts, "IS_REHEARSAL", True)
    monkeypatch.setenv("NEREID_RESULTS", str(tmp_path))
    kernel_parts.tune(torch.device("cpu"), [16])
    tables = list(tmp_path.glob("tuning-16/*.json"))
    assert len(tables) == 1
    kernels = json.loads(tables[0].read_text())["kernels"]
    assert kernels["decode"][0]["max_dim"] == kernels["prefill"][0]["max_dim"] == 16


def test_a_measurement_starts_after_100_ms_of_replays_and_only_replays(monkeypatch):
    from loadtest.gpu import gpu_kernels

    log = []

    class Event:
        def __init__(self, enable_timing):
            self.place = None

        def record(self):
            self.place = len(log)
            log.append(("mark", time.perf_counter()))

        def elapsed_time(self, end):
            return float(end.place - self.place)

    def captured(work):
        work()
        return lambda: log.append(("replay", time.perf_counter()))

    monkeypatch.setattr(gpu_kernels, "captured", captured)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launched = []
    work = functools.partial(launched.append, "kernel")
    assert gpu_kernels.milliseconds(work, torch.device("cuda:0"), repeat=3) == 2.0
    # The kernel is launched only for the capture.
    assert len(launched) == 1
    first_mark = [kind for kind, _ in log].index("mark")
    assert log[first_mark][1] - log[0][1] >= 0.09
    assert [kind for kind, _ in log[first_mark:]] == ["mark", *["replay", "mark"] * 3]
