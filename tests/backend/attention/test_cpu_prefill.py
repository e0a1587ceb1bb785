"""Tests that the native kernel for several new tokens in each sequence equals the reference."""

import shutil

import pytest
import torch
from backend.torch_threads import use_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch, Prefill
from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.int8_cache import CpuInt8KVCache, Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"
)

CPU = torch.device("cpu")
# The cache class of the reference, and the cache class of the CPU kernels.
PLAIN = (KVCache, CpuKVCache)
INTEGERS = (Int8KVCache, CpuInt8KVCache)

windows = st.one_of(
    st.just(LayerWindow()),
    st.builds(LayerWindow, size=st.integers(1, 700)),
    st.builds(LayerWindow, chunk=st.integers(1, 700)),
)
specs = st.builds(
    lambda heads, group, key_dim, value_dim, window, softcap, has_sinks: LayerSpec(
        heads * group, heads, key_dim, value_dim, window, softcap=softcap, has_sinks=has_sinks
    ),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 12, 17]),
    key_dim=st.sampled_from([1, 7, 16, 24, 64, 80]),
    value_dim=st.sampled_from([1, 7, 16, 33, 64]),
    window=windows,
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
)
# (number of cached tokens, number of new tokens) of each sequence. Some sequences are longer than a
# tile of keys, and some have more rows than one task of the kernel.
sequences = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 15, 16, 500, 1023]), st.integers(2, 90)),
    min_size=1,
    max_size=3,
)


def attend(
    cache_class, spec, lengths, *, block_size=16, dtype=torch.float32, threads=1, seed=0, around=0.0
):
    """Return the attention outputs of one prefill step.

    Args:
        cache_class: the class of the cache.
        spec: the only layer of the model.
        lengths: a pair for each sequence: the number of cached tokens and of new tokens.
        block_size: the number of tokens in a block.
        dtype: the data type of the queries, keys and values.
        threads: the number of threads.
        seed: the seed of the random numbers.
        around: the number with which the cache is filled before tokens are stored.
    """
    torch.manual_seed(seed)
    numbers_of_blocks = [-(-(cached + new) // block_size) for cached, new in lengths]
    num_blocks = sum(numbers_of_blocks)
    blocks = torch.randperm(num_blocks)
    tables = [table[None] for table in blocks.split(numbers_of_blocks)]
    cache = cache_class(
        [spec], num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU
    )
    for tensor in [*cache.keys, *cache.values]:
        if tensor.is_floating_point():
            tensor.fill_(around)
    with use_threads(threads):
        if any(cached for cached, _ in lengths):
            cached_parts = [(0, cached) for cached, _ in lengths]
            _step(spec, cache, make_batch(cached_parts, tables, block_size), dtype)
        new_parts = [(cached, cached + new) for cached, new in lengths]
        return _step(spec, cache, make_batch(new_parts, tables, block_size), dtype).float()


def make_batch(parts, tables, block_size):
    """Return the attention metadata of a step.

    Args:
        parts: for each sequence, a pair: the first position that the step computes, and the
            position after the last one.
        tables: the blocks of each sequence.
        block_size: the number of tokens in a block.
    """
    prefills, slots, num_tokens = [], [], 0
    for (first, last), table in zip(parts, tables, strict=True):
        if first == last:
            continue
        prefills.append(Prefill(num_tokens, num_tokens + last - first, first, table))
        positions = torch.arange(first, last)
        slots.append(table[0][positions // block_size] * block_size + positions % block_size)
        num_tokens += last - first
    return AttentionBatch(torch.cat(slots), 0, [], prefills, block_size)


def _step(spec, cache, batch, dtype):
    """Store random keys and values, and return the attention of random queries."""
    num_tokens = len(batch.slots)
    query = torch.randn(num_tokens, spec.num_heads, spec.key_dim).transpose(0, 1).to(dtype)
    key = torch.randn(num_tokens, spec.num_kv_heads, spec.key_dim).transpose(0, 1).to(dtype)
    value = torch.randn(num_tokens, spec.num_kv_heads, spec.value_dim).transpose(0, 1).to(dtype)
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    inputs = (query, key, value)
    if isinstance(cache, CpuKVCache):
        return cpu_attention.attend(inputs, 0, cache, batch, scale=0.3, sinks=sinks)
    rows = batch.row_indices(spec.num_kv_heads)
    cache.store(0, key.transpose(0, 1), value.transpose(0, 1), rows)
    return reference.attend(inputs, 0, cache, batch, scale=0.3, sinks=sinks)


@settings(max_examples=40, deadline=None)
@given(
    specs,
    sequences,
    st.sampled_from([16, 48]),
    st.integers(1, 3),
    st.sampled_from([PLAIN, INTEGERS]),
    st.integers(0, 99),
)
def test_any_layer_over_any_sequences_equals_the_reference(
    spec, lengths, block_size, threads, cache_classes, seed
):
    reference_cache, kernel_cache = cache_classes
    options = {"block_size": block_size, "seed": seed}
    expected = attend(reference_cache, spec, lengths, **options)
    result = attend(kernel_cache, spec, lengths, **options, threads=threads)
    if cache_classes is PLAIN:
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    else:
        # A number halfway between two 8-bit integers may be rounded up in one cache and down in the
        # other. The two results then differ by 1/127 of the largest number of the vector.
        torch.testing.assert_close(result, expected, atol=6e-2, rtol=1e-4)
        assert (result - expected).abs().mean() < 3e-3


@settings(max_examples=30, deadline=None)
@given(specs, sequences, st.sampled_from([PLAIN, INTEGERS]))
def test_bfloat16_equals_the_reference_within_its_rounding(spec, lengths, cache_classes):
    reference_cache, kernel_cache = cache_classes
    expected = attend(reference_cache, spec, lengths, dtype=torch.bfloat16)
    result = attend(kernel_cache, spec, lengths, dtype=torch.bfloat16)
    torch.testing.assert_close(result, expected, atol=5e-2, rtol=3e-2)
    # Some numbers are rounded differently, but the mean difference must be small.
    assert (result - expected).abs().mean() < 1e-2 * expected.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_memory_in_the_blocks_of_a_sequence_has_no_effect(dtype):
    spec = LayerSpec(6, 2, 24, 10)
    lengths = [(21, 40), (0, 7)]
    expected = attend(CpuKVCache, spec, lengths, dtype=dtype)
    result = attend(CpuKVCache, spec, lengths, dtype=dtype, around=float("nan"))
    torch.testing.assert_close(result, expected, atol=0, rtol=0)


def test_the_bits_of_a_token_do_not_depend_on_the_other_tokens_of_the_step():
    spec = LayerSpec(6, 2, 32, 32)
    expected = attend(CpuKVCache, spec, [(600, 40)], dtype=torch.bfloat16)
    for threads in (2, 5):
        result = attend(CpuKVCache, spec, [(600, 40)], dtype=torch.bfloat16, threads=threads)
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
