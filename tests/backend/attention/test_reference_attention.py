import itertools
import random

import numpy as np
import pytest
import torch
from nereid_backend.attention.kv_cache import KVCache, row_indices
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths import length_groups
from nereid_backend.paths.step_batch import BatchBuilder

BLOCK = 4
CPU = torch.device("cpu")
# (number of cached tokens, number of new tokens) of each sequence. Sequences with one new token
# come first, as in the plans of the scheduler.
SHAPES = [(0, 1), (1, 1), (17, 1), (30, 1), (0, 9), (5, 7), (16, 14)]


def slow_attention(query, keys, values, spec, scale, sinks):
    """Return the attention of the last token by the definition, computed in float64."""
    position = len(keys) - 1
    is_visible = torch.ones(len(keys), dtype=torch.bool)
    for other in range(len(keys)):
        if spec.window.size is not None and position - other >= spec.window.size:
            is_visible[other] = False
        if spec.window.chunk is not None:
            is_visible[other] &= other // spec.window.chunk == position // spec.window.chunk
    outputs = []
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        visible_values = values[is_visible, kv_head].double()
        scores = keys[is_visible, kv_head].double() @ query[head].double() * scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if sinks is not None:
            # A sink is an additional score of a head. No token belongs to this score.
            scores = torch.cat([scores, sinks[head].double()[None]])
        weights = scores.softmax(0)[: len(visible_values)]
        outputs.append(weights @ visible_values)
    return torch.stack(outputs)


SPECS = [
    LayerSpec(4, 4, 16, 16),
    LayerSpec(4, 2, 16, 16),
    LayerSpec(6, 1, 8, 24),
    LayerSpec(4, 2, 16, 16, LayerWindow(size=6)),
    LayerSpec(4, 2, 16, 16, LayerWindow(size=1)),
    LayerSpec(4, 2, 16, 16, LayerWindow(chunk=8)),
    LayerSpec(4, 2, 16, 16, softcap=3.0),
    LayerSpec(4, 2, 16, 16, has_sinks=True),
    LayerSpec(4, 2, 24, 16, LayerWindow(size=6), softcap=3.0, has_sinks=True),
]


@pytest.mark.parametrize("short_blocks", [1, 16])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_packed_attention_equals_its_definition(spec, short_blocks, monkeypatch):
    # If `_SHORT_BLOCKS` is 1, sequences of different lengths with one new token form several
    # groups.
    monkeypatch.setattr(length_groups, "_SHORT_BLOCKS", short_blocks)
    torch.manual_seed(0)
    cache = KVCache([spec], num_blocks=60, block_size=BLOCK, dtype=torch.float32, device=CPU)
    builder = BatchBuilder(
        max_num_seqs=len(SHAPES), max_model_len=40, block_size=BLOCK, null_block=cache.null_block
    )
    chunks, keys_and_values = fill_cache(cache, spec, num_blocks=60)
    plan = StepPlan(chunks, sum(num_new for _, num_new in SHAPES))
    batch = builder.build(plan, CPU)
    assert len(batch.attention.decodes) == (2 if short_blocks == 1 else 1)
    query = torch.randn(1, spec.num_heads, plan.num_tokens, spec.key_dim)
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    starts = [num_cached for num_cached, _ in SHAPES]
    new_keys, new_values = (
        torch.cat([tensor[start:] for tensor, start in zip(tensors, starts, strict=True)])
        for tensors in zip(*keys_and_values, strict=True)
    )

    outputs = PagedForward(cache, batch.attention)(
        torch.nn.Module(),
        query,
        new_keys.transpose(0, 1)[None],
        new_values.transpose(0, 1)[None],
        scaling=0.3,
        s_aux=sinks,
    )

    assert outputs.shape == (1, plan.num_tokens, spec.num_heads, spec.value_dim)
    token = 0
    for (keys, values), start in zip(keys_and_values, starts, strict=True):
        for length in range(start + 1, len(keys) + 1):
            visible = keys[:length], values[:length]
            expected = slow_attention(query[0, :, token], *visible, spec, 0.3, sinks)
            torch.testing.assert_close(outputs[0, token].double(), expected, atol=2e-6, rtol=2e-5)
            token += 1


def fill_cache(cache, spec, num_blocks):
    """Store random keys and values for the cached tokens of the sequences in `SHAPES`.

    Returns:
        The chunks with the new tokens, and the keys and values of all tokens of each sequence.
    """
    blocks = list(range(num_blocks))
    random.Random(0).shuffle(blocks)
    free_blocks = iter(blocks)
    chunks, keys_and_values = [], []
    for row, (num_cached, num_new) in enumerate(SHAPES):
        length = num_cached + num_new
        sequence = Sequence(str(row), [1] * length, SamplingParams(), max_total_tokens=99)
        sequence.row = row
        sequence.block_table = list(itertools.islice(free_blocks, -(-length // BLOCK)))
        chunks.append(
            Chunk(sequence, num_cached, num_new, samples=True, is_first=True, num_logits=1)
        )
        keys = torch.randn(length, spec.num_kv_heads, spec.key_dim)
        values = torch.randn(length, spec.num_kv_heads, spec.value_dim)
        keys_and_values.append((keys, values))
        slots = [sequence.block_table[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_cached)]
        rows = row_indices(torch.tensor(slots).long(), spec.num_kv_heads, BLOCK)
        cache.store(0, keys[:num_cached], values[:num_cached], rows)
    return chunks, keys_and_values


def test_slices_of_queries_equal_all_queries_at_once(monkeypatch):
    from nereid_backend.attention import reference

    spec = LayerSpec(4, 2, 8, 8, softcap=2.0)
    torch.manual_seed(0)
    inputs = (torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8))
    whole = reference._attend_prefill(inputs, None, spec, 0.5, None)
    monkeypatch.setattr(reference, "_MAX_SCORES", 4 * 11 * 3)
    torch.testing.assert_close(reference._attend_prefill(inputs, None, spec, 0.5, None), whole)


def test_a_reused_row_ignores_the_longer_block_table_of_the_previous_request():
    builder = BatchBuilder(max_num_seqs=1, max_model_len=40, block_size=BLOCK, null_block=50)
    first = Sequence("a", [1] * 20, SamplingParams(), max_total_tokens=99)
    first.row, first.block_table = 0, [7, 8, 9, 10, 11]
    builder.build(StepPlan([Chunk(first, 0, 20, True, True, 1)], 20), CPU)
    second = Sequence("b", [1] * 3, SamplingParams(), max_total_tokens=99)
    second.row, second.block_table = 0, [3]
    builder.build(StepPlan([Chunk(second, 0, 3, True, True, 1)], 3), CPU)
    [table] = builder._tables.blocks(np.array([0]), 40)
    assert table.tolist() == [3] + [50] * 9
