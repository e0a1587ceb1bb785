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

    correct_decode = gpu_attention.decode

    def wrong_decode(query, call, rows, out, tuning):
        correct_decode(query, call, rows, out, tuning)
        out[0] += 0.1

    monkeypatch.setattr(gpu_attention, "decode", wrong_decode)
    case = gpu_kernels.Case("small", LayerSpec(2, 1, 16, 16), [(20, 1), (0, 3)])
    with pytest.raises(gpu_kernels.KernelError, match="attention differs from its reference"):
        gpu_kernels.check(case, torch.float32, device)


@pytest.mark.parametrize(
    ("cache_class", "factor"), [("GpuInt8KVCache", 1.01), ("GpuFloat8KVCache", 1.08)]
)
def test_8_bit_numbers_with_more_than_the_rounding_error_stop_the_benchmark(
    device, monkeypatch, cache_class, factor
):
    from nereid_backend.attention.gpu import gpu_attention
    from nereid_backend.attention.layers import LayerSpec

    from loadtest.gpu import gpu_kernels

    correct_store = gpu_attention.store

    def wrong_store(key, value, call, slots):
        correct_store(key * factor, value, call, slots)

    monkeypatch.setattr(gpu_attention, "store", wrong_store)
    cache = getattr(gpu_attention, cache_class)
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
    """Return the lines of JSON that the benchmark printed."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]


def test_a_failed_comparison_is_reported_and_the_other_comparisons_continue(
    device, monkeypatch, capsys
):
    from loadtest.gpu import kernel_parts

    def check_that_fails_for_float32(case, dtype, device):
        if dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB.")
        return 0.001

    monkeypatch.setattr(kernel_parts, "check", check_that_fails_for_float32)
    kernel_parts.compare(device, SimpleNamespace(tiny=True, share=[0, 1]))

    *comparisons, verdict = lines_of(capsys)
    assert len(comparisons) == 10
    assert verdict["text"] == "8 of 10 comparisons equal their references"
    failures = [line["text"] for line in comparisons if line["rank"] == Rank.WRONG]
    assert len(failures) == 2
    assert failures[0].endswith("float32: OutOfMemoryError: CUDA out of memory.")


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

    log = []  # pairs of "event" or "replay" and a time in seconds

    class Event:
        """A fake CUDA event. The elapsed time is the number of log entries between two events."""

        def __init__(self, enable_timing):
            self.index = None

        def record(self):
            self.index = len(log)
            log.append(("event", time.perf_counter()))

        def elapsed_time(self, end):
            return float(end.index - self.index)

    def capture(work):
        work()
        return lambda: log.append(("replay", time.perf_counter()))

    monkeypatch.setattr(gpu_kernels, "captured", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launches = []
    launch = functools.partial(launches.append, "kernel")

    # The fake time between two successive events is 2, because the log has one replay between them.
    assert gpu_kernels.milliseconds(launch, torch.device("cuda:0"), repeat=3) == 2.0

    # The kernel is launched only for the capture.
    assert len(launches) == 1
    kinds, times = zip(*log, strict=True)
    first_event = kinds.index("event")
    assert times[first_event] - times[0] >= 0.09
    assert kinds[first_event:] == ("event", *("replay", "event") * 3)
