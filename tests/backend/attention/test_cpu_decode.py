"""Tests that the native decode kernels equal the definition of attention, for many shapes."""

import shutil

import pytest
import torch
from backend.torch_threads import use_threads
from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup
from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.int8_cache import CpuInt8KVCache
from nereid_backend.attention.kv_cache import gather_rows, row_indices
from nereid_backend.attention.layers import LayerSpec, LayerWindow

CPU = torch.device("cpu")
LENGTHS = [1, 2, 15, 16, 17, 31, 127, 128, 129, 700]

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"
)


def decode(
    spec,
    *,
    dtype,
    block_size=16,
    lengths=LENGTHS,
    threads=1,
    kind=CpuKVCache,
    stale=0.0,
    scale=0.3,
):
    """Return the result of one decode step and the expected result.

    The expected result is computed in float64 from the keys and values in the cache. `stale` is the
    number in the slots of the last block that follow the end of each sequence.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_sequences, num_columns = len(lengths), -(-max(lengths) // block_size)
    num_blocks = num_sequences * num_columns
    cache = kind([spec], num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU)
    blocks = torch.randperm(num_blocks, generator=generator).view(num_sequences, num_columns)

    def slots_of(row, positions):
        return blocks[row, positions // block_size] * block_size + positions % block_size

    for row, length in enumerate(lengths):
        slots = slots_of(row, torch.arange(num_columns * block_size))
        key = random(len(slots), spec.num_kv_heads, spec.key_dim)
        value = random(len(slots), spec.num_kv_heads, spec.value_dim)
        key[length - 1 :], value[length - 1 :] = stale, stale
        cache.store(0, key, value, row_indices(slots, spec.num_kv_heads, block_size))
    lens = torch.tensor(lengths)
    batch = AttentionBatch(
        slots=slots_of(torch.arange(num_sequences), lens - 1),
        num_decodes=num_sequences,
        decodes=[DecodeGroup(None, blocks, lens, block_size)],
        prefills=[],
        block_size=block_size,
    )
    query = random(spec.num_heads, num_sequences, spec.key_dim)
    key = random(spec.num_kv_heads, num_sequences, spec.key_dim)
    value = random(spec.num_kv_heads, num_sequences, spec.value_dim)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None
    inputs = (query, key, value)
    with use_threads(threads):
        result = cpu_attention.attend(inputs, 0, cache, batch, scale=scale, sinks=sinks)
    return result, _expected_result(spec, query, cache, blocks, lengths, sinks, scale)


def _expected_result(spec, query, cache, blocks, lengths, sinks, scale):
    """Return the attention of each sequence's last token, computed in float64 from the cache."""
    if isinstance(cache, CpuInt8KVCache):
        # `gather` must return the numbers that the kernel reads, without rounding them to bfloat16.
        cache.dtype = torch.float32
    keys, values = cache.gather(0, gather_rows(blocks, spec.num_kv_heads))
    results = []
    for row, length in enumerate(lengths):
        cached = keys[row, :, :length], values[row, :, :length]
        results.append(by_definition(spec, query[:, row], *cached, sinks, scale))
    return torch.stack(results)


def by_definition(spec, query, keys, values, sinks, scale):
    """Return the attention of one token, computed in float64 by the definition.

    `query` has the shape [num_heads, key_dim]. `keys` and `values` have the shape [num_kv_heads,
    length, dim].
    """
    length = keys.shape[1]
    group_size = spec.num_heads // spec.num_kv_heads
    keys, values = (t.double().repeat_interleave(group_size, 0) for t in (keys, values))
    scores = (keys @ query.double().unsqueeze(-1)).squeeze(-1) * scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    first_visible = 0
    if spec.window.size:
        first_visible = max(first_visible, length - spec.window.size)
    if spec.window.chunk:
        start_of_chunk = (length - 1) // spec.window.chunk * spec.window.chunk
        first_visible = max(first_visible, start_of_chunk)
    scores[:, :first_visible] = -torch.inf
    if sinks is not None:
        # A sink is an additional score of a head. No token belongs to this score.
        scores = torch.cat([scores, sinks.double().unsqueeze(1)], 1)
    weights = scores.softmax(1)[:, :length]
    return (weights.unsqueeze(1) @ values).squeeze(1)


def assert_close(result, expected):
    """Check that the result of a kernel equals the float64 result within the rounding errors."""
    if result.dtype == torch.float32:
        torch.testing.assert_close(result.double(), expected, atol=4e-6, rtol=1e-5)
    else:
        # bfloat16 rounds the result by at most 2 ** -9 of its value. The rounding of the attention
        # weights may add the same error.
        torch.testing.assert_close(result.double(), expected, atol=4e-3, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", range(1, 18))
def test_any_number_of_query_heads_may_share_a_key_head(group, dtype):
    assert_close(*decode(LayerSpec(2 * group, 2, 32, 48), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("window", [LayerWindow(), LayerWindow(size=20)])
def test_the_scale_of_the_scores_may_be_zero_or_negative(scale, window, dtype):
    assert_close(*decode(LayerSpec(4, 2, 32, 48, window=window), dtype=dtype, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(1, 1), (2, 3), (15, 31), (17, 33), (31, 65), (64, 63), (80, 80), (96, 112), (192, 128)],
)
def test_heads_may_have_any_size(key_dim, value_dim, group, dtype):
    assert_close(*decode(LayerSpec(3 * group, 3, key_dim, value_dim), dtype=dtype))


@pytest.mark.parametrize("kind", [CpuKVCache, CpuInt8KVCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
@pytest.mark.parametrize(
    "window", [LayerWindow(), LayerWindow(size=21), LayerWindow(chunk=48), LayerWindow(size=300)]
)
def test_blocks_may_have_any_multiple_of_16_tokens(block_size, window, dtype, kind):
    spec = LayerSpec(6, 2, 33, 24, window)
    assert_close(*decode(spec, dtype=dtype, block_size=block_size, kind=kind))


@pytest.mark.parametrize("kind", [CpuKVCache, CpuInt8KVCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("lengths", [[4000], [3000, 1, 5, 1700], [600] * 5])
def test_threads_divide_sequences_and_segments_of_long_sequences(lengths, threads, dtype, kind):
    spec = LayerSpec(6, 3, 40, 24, has_sinks=True)
    assert_close(*decode(spec, dtype=dtype, lengths=lengths, threads=threads, kind=kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.05, 1.0, 50.0])
def test_scores_are_capped_near_zero_and_far_from_it(softcap, dtype):
    assert_close(*decode(LayerSpec(6, 2, 64, 32, softcap=softcap), dtype=dtype))


@pytest.mark.parametrize("kind", [CpuKVCache, CpuInt8KVCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_memory_after_the_end_of_a_sequence_is_not_read(softcap, dtype, kind):
    spec = LayerSpec(6, 2, 20, 20, softcap=softcap)
    assert_close(*decode(spec, dtype=dtype, kind=kind, stale=float("nan")))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_result_alone_and_with_other_sequences(dtype, threads):
    spec = LayerSpec(6, 2, 64, 64)
    lengths = [500, *[30] * 20]
    together, _ = decode(spec, dtype=dtype, lengths=lengths, threads=threads)
    alone, _ = decode(spec, dtype=dtype, lengths=lengths, threads=1)
    torch.testing.assert_close(together, alone, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [CpuKVCache, CpuInt8KVCache])
@pytest.mark.parametrize("num_blocks", [2, 3000])
def test_blocks_are_aligned_to_cache_lines(num_blocks, kind):
    spec = LayerSpec(4, 2, 64, 64)
    cache = kind([spec], num_blocks=num_blocks, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in [*cache.keys, *cache.values])
    assert not any(tensor.any() for tensor in cache.tensors())
