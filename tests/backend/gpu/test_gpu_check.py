"""Tests of the check that compares the GPU kernels with the reference when a model is loaded."""

import pytest
import torch
from nereid_backend.attention import choose_backend
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import decode_splits, gpu_attention, gpu_check
from nereid_backend.attention.gpu.gpu_attention import GpuFloat8KVCache, GpuInt8KVCache, GpuKVCache
from nereid_backend.attention.gpu.gpu_check import TrialLayer
from nereid_backend.attention.gpu.tuning import KERNELS, Device, Entry, Tuning
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow

KINDS = [GpuKVCache, GpuInt8KVCache, GpuFloat8KVCache]
PLAIN = LayerSpec(2, 1, 16, 16)
ODD = LayerSpec(4, 2, 24, 10, LayerWindow(size=60), softcap=5.0, has_sinks=True)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """Use large tiles, because the interpreter then needs fewer iterations and less time."""
    tuning = Tuning(rows=64, tile=128, num_warps=4, num_stages=2)
    table = {name: [Entry(256, itemsize, tuning) for itemsize in (1, 2, 4)] for name in KERNELS}
    monkeypatch.setattr(gpu_attention, "device_of", lambda device: Device(table))


@pytest.mark.parametrize("kind", KINDS)
def test_correct_kernels_pass(kind, device):
    assert gpu_check.check_kernels(TrialLayer(kind, ODD, 16, torch.float32, device)) < 1e-4


def test_correct_kernels_pass_in_half_precision(device):
    layer = TrialLayer(GpuKVCache, PLAIN, block_size=5, dtype=torch.bfloat16, device=device)
    assert 1e-4 < gpu_check.check_kernels(layer) < 0.015


def test_the_check_uses_sequences_that_are_long_enough_for_all_branches_of_the_kernels(
    device, monkeypatch
):
    numbers_of_splits = []
    split_size_and_count = decode_splits.split_size_and_count

    def record_splits(*arguments):
        split_size, num_splits = split_size_and_count(*arguments)
        numbers_of_splits.append(num_splits)
        return split_size, num_splits

    monkeypatch.setattr(decode_splits, "split_size_and_count", record_splits)
    # A large GPU, such as an H100, has 132 multiprocessors.
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 132)
    gpu_check.check_kernels(TrialLayer(GpuKVCache, PLAIN, 16, torch.float32, device))

    assert numbers_of_splits[0] > 1
    # With at least 128 cached tokens, the kernel also computes a tile of keys without a mask.
    assert max(num_cached for num_cached, _ in gpu_check._STEP.prefills) >= 128


def break_kernel(name, monkeypatch):
    """Make the kernel `name` compute wrong results for one sequence or for the last token."""
    correct_kernel = getattr(gpu_attention, name)

    def store(key, value, call, slots):
        correct_kernel(key * 1.1, value, call, slots)

    def decode(query, call, rows, out, tuning):
        # The kernel ignores the last 100 tokens of a sequence, as if the reduction ignored a part.
        rows.lens[0] -= 100
        correct_kernel(query, call, rows, out, tuning)
        rows.lens[0] += 100

    def prefill(query, call, rows, out, tuning):
        correct_kernel(query, call, rows, out, tuning)
        out[-1] *= 1.5

    wrong_kernels = {"store": store, "decode": decode, "prefill": prefill}
    monkeypatch.setattr(gpu_attention, name, wrong_kernels[name])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("store", kind) for kind in KINDS[1:]] + [("decode", GpuKVCache), ("prefill", GpuKVCache)],
)
def test_wrong_kernels_are_detected(name, kind, device, monkeypatch):
    break_kernel(name, monkeypatch)
    with pytest.raises(gpu_check.KernelError, match=r"differ|stored other keys"):
        gpu_check.check_kernels(TrialLayer(kind, PLAIN, 16, torch.float32, device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns about NaN
def test_nan_in_the_output_is_detected(device, monkeypatch):
    correct_decode = gpu_attention.decode

    def decode_with_nan(query, call, rows, out, tuning):
        correct_decode(query, call, rows, out, tuning)
        out[1] = float("nan")

    monkeypatch.setattr(gpu_attention, "decode", decode_with_nan)
    with pytest.raises(gpu_check.KernelError, match="nan"):
        gpu_check.check_kernels(TrialLayer(GpuKVCache, PLAIN, 16, torch.float32, device))


@pytest.mark.parametrize(
    ("kernel_cache", "reference_cache"),
    [(GpuKVCache, KVCache), (GpuInt8KVCache, Int8KVCache), (GpuFloat8KVCache, Float8KVCache)],
)
def test_if_the_kernels_fail_the_reference_is_used_and_the_log_gives_the_reason(
    kernel_cache, reference_cache, monkeypatch, caplog
):
    checked_specs = []

    def why_unusable(layer):
        checked_specs.append(layer.spec)
        return "out of resources: shared memory" if layer.spec == ODD else None

    def checked_class(cache_class, layers, device):
        return choose_backend.checked_cache_class(
            cache_class, layers, block_size=16, dtype=torch.bfloat16, device=device
        )

    monkeypatch.setattr(gpu_check, "why_unusable", why_unusable)
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")

    assert checked_class(kernel_cache, [PLAIN, PLAIN, ODD, PLAIN], cuda) is reference_cache
    assert checked_specs == [PLAIN, ODD]
    assert "shared memory" in caplog.text
    assert checked_class(kernel_cache, [PLAIN], cuda) is kernel_cache
    # `KVCache` uses no kernels, and on a CPU no kernels are checked.
    assert checked_class(KVCache, [ODD], cuda) is KVCache
    assert checked_class(kernel_cache, [ODD], cpu) is kernel_cache


def test_a_failure_of_the_compiler_is_a_reason_not_an_error(device, monkeypatch):
    def fails(*args):
        raise RuntimeError("ptxas: no such target\nand more")

    monkeypatch.setattr(gpu_attention, "store", fails)
    reason = gpu_check.why_unusable(TrialLayer(GpuKVCache, PLAIN, 16, torch.float32, device))
    gpu_check.why_unusable.cache_clear()
    assert reason == "RuntimeError: ptxas: no such target"
