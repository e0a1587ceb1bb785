import json

import pytest
import torch
from nereid_backend.attention import choose_backend
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.gpu import decode_splits, gpu_attention, gpu_call
from nereid_backend.attention.gpu.gpu_batch import DecodeRows, GpuBatch
from nereid_backend.attention.gpu.gpu_call import Float8
from nereid_backend.attention.gpu.tuning import (
    KERNELS,
    Device,
    Entry,
    Tuning,
    default_tuning,
    shared_bytes,
    slug,
    table_of,
    write_table,
)
from nereid_backend.attention.int8_cache import CpuInt8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerWindow
from nereid_backend.errors import ConfigError

CPU = torch.device("cpu")


def rows_of(*bounds):
    """Return groups of sequences in the decode phase.

    Each of `bounds` is a pair for one group: the number of sequences, and the length of the longest
    sequence in tokens. The tensors are placeholders, because the division into splits does not read
    them.
    """
    unused = torch.zeros(1, dtype=torch.int64)
    num_sequences = sum(group_size for group_size, _ in bounds)
    return DecodeRows(
        num_sequences, list(bounds), table=unused, table_starts=unused, tokens=unused, lens=unused
    )


def split(rows, window, *, programs=8, tile=64):
    """Return the size of a split in tokens, and the number of splits of the longest sequence.

    `programs` programs compute each split of a sequence. A split consists of tiles of `tile`
    tokens.
    """
    return decode_splits.split_size_and_count(rows, window, programs, tile, CPU)


def test_the_cache_class_determines_the_name_of_the_attention_and_subclasses_inherit_it():
    class Variant(gpu_attention.GpuKVCache):
        pass

    names = [
        choose_backend.attention_name(kind)
        for kind in (KVCache, CpuKVCache, gpu_attention.GpuKVCache, Variant)
    ]
    assert names == ["reference", "native", "triton-language", "triton-language"]


@pytest.mark.parametrize(
    ("cache_class", "kv_cache_dtype", "expected_class"),
    [
        (gpu_attention.GpuKVCache, "int8", gpu_attention.GpuInt8KVCache),
        (gpu_attention.GpuKVCache, "fp8", gpu_attention.GpuFloat8KVCache),
        (gpu_attention.GpuKVCache, "auto", gpu_attention.GpuKVCache),
        (CpuKVCache, "int8", CpuInt8KVCache),
    ],
)
def test_8_bit_caches_have_a_class_for_each_device(cache_class, kv_cache_dtype, expected_class):
    assert choose_backend.rounded_cache_class(cache_class, kv_cache_dtype) is expected_class


def test_a_gpu_without_kernels_for_the_dtype_uses_the_reference_cache_and_logs_the_reason(caplog):
    kind = choose_backend.unrounded_cache_class(16, torch.float8_e4m3fn, torch.device("cuda:0"))
    assert kind is KVCache
    assert "float8_e4m3fn" in caplog.text


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_the_kernels_need_a_gpu_with_asynchronous_copies(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = choose_backend.gpu_refusal(torch.bfloat16, torch.device("cuda:0"))
    assert (reason is None) == (capability >= (8, 0))


def test_few_long_sequences_are_divided_into_parts_and_many_are_not(monkeypatch):
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 132)
    part_size, num_parts = split(rows_of((1, 32768)), LayerWindow())
    assert num_parts > 30
    assert part_size * num_parts >= 32768
    _, num_parts = split(rows_of((256, 1024)), LayerWindow())
    assert num_parts <= 2


def test_a_window_bounds_the_number_of_parts(monkeypatch):
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 132)
    part_size, num_parts = split(rows_of((1, 100_000)), LayerWindow(size=512))
    # The first token of the window can be anywhere in its tile of 64 tokens.
    assert 512 + 64 <= part_size * num_parts <= 1024


def test_a_sequence_never_has_more_parts_than_the_reduction_supports(monkeypatch):
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 10_000)
    _, num_parts = split(rows_of((1, 1_000_000)), LayerWindow(), programs=1, tile=16)
    assert num_parts <= 128


def test_a_step_without_tokens_of_a_kind_has_no_rows_for_it():
    batch = AttentionBatch(torch.zeros(0, dtype=torch.int64), 0, [], [], 16)
    assert GpuBatch.of(batch) == GpuBatch(None, None)


def test_a_table_that_was_written_is_read_again(tmp_path):
    decode = Tuning(rows=16, tile=128, num_warps=8, num_stages=5)
    small_prefill = Tuning(rows=128, tile=128, num_warps=8, num_stages=3)
    large_prefill = Tuning(rows=64, tile=32, num_warps=4, num_stages=2)
    # Example: Entry(128, 2, ...) is valid for heads of up to 128 numbers that have 2 bytes each.
    table = {
        "decode": [Entry(128, 2, decode)],
        "prefill": [Entry(256, 2, large_prefill), Entry(64, 2, small_prefill)],
    }

    path = write_table("NVIDIA H200", table, {"date": "today"}, tmp_path)
    device = Device(table_of("NVIDIA H200", tmp_path))

    assert path.name == "nvidia-h200.json"
    assert device.tuning("decode", 100, 2) == decode
    assert device.tuning("prefill", 64, 2) == small_prefill
    assert device.tuning("prefill", 80, 2) == large_prefill
    assert device.tuning("decode", 192, 2) == default_tuning("decode", 192, 2)
    assert device.tuning("decode", 128, 4) == default_tuning("decode", 128, 4)


def test_a_device_without_a_table_has_the_defaults(tmp_path):
    assert table_of("NVIDIA Unheard Of", tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"kernels": {"decode": [{"max_dim": 64}]}}'],
)
def test_a_broken_table_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        table_of("Broken", tmp_path)


@pytest.mark.parametrize("values", [(17, 64, 4, 3), (16, 60, 4, 3), (16, 64, 3, 3), (16, 64, 4, 9)])
def test_an_impossible_tuning_is_refused(values):
    with pytest.raises(ConfigError):
        Tuning(*values)


def test_tables_in_the_repository_can_be_read():
    from nereid_backend.attention.gpu.tuning import FOLDER

    for path in FOLDER.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert slug(device) == path.stem
        assert set(table_of(device)) <= set(KERNELS)


@pytest.mark.parametrize(
    ("capability", "conversion"),
    [
        ((8, 0), Float8.BITS),
        # Triton 3.6 cannot compile the conversion instructions of GPUs with capability 8.9.
        ((8, 9), Float8.BITS),
        ((9, 0), Float8.DEVICE),
        ((12, 0), Float8.DEVICE),
    ],
)
def test_8_bit_floats_are_converted_with_the_instructions_of_the_gpu(
    monkeypatch, capability, conversion
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    convert = gpu_call.float8_of.__wrapped__
    assert convert(torch.device("cuda:0")) is conversion
    assert convert(CPU) is Float8.BITS


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
def test_consumer_gpus_have_equal_tile_sizes_that_differ_from_those_of_hopper(dim, itemsize):
    tunings = {default_tuning("prefill", dim, itemsize, (8, 6))}
    tunings |= {default_tuning("prefill", dim, itemsize, other) for other in ((8, 9), (12, 0))}
    assert len(tunings) == 1
    if itemsize == 2:
        assert default_tuning("prefill", dim, itemsize, (9, 0)) not in tunings


@pytest.mark.parametrize(
    ("capability", "kib"),
    [((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)],
)
def test_kernels_on_consumer_gpus_have_less_shared_memory(capability, kib):
    assert shared_bytes(capability) == kib * 1024
