import itertools
import random

import numpy as np
import pytest
import torch
from nereid_backend.attention.kv_cache import KVCache, store_rows
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
    out = []
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        scores, seen = [], []
        for other in range(len(keys)):
            if spec.window.size is not None and position - other >= spec.window.size:
                continue
            if spec.window.chunk is not None and other // spec.window.chunk != (
                position // spec.window.chunk
            ):
                continue
            score = float(query[head].double() @ keys[other, kv_head].double()) * scale
            if spec.softcap is not None:
                score = spec.softcap * torch.tanh(torch.tensor(score / spec.softcap)).item()
            scores.append(score)
            seen.append(values[other, kv_head].double())
        if sinks is not None:
            scores.append(float(sinks[head]))
            seen.append(torch.zeros_like(seen[0]))
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
        out.append((weights[:, None] * torch.stack(seen)).sum(0))
    return torch.stack(out)


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
    pool = list(range(60))
    random.Random(0).shuffle(pool)
    free = iter(pool)
    cache = KVCache([spec], num_blocks=len(pool), block_size=BLOCK, dtype=torch.float32, device=CPU)
    builder = BatchBuilder(
        max_num_seqs=len(SHAPES), max_model_len=40, block_size=BLOCK, null_block=cache.null_block
    )
    chunks, sequences = [], []
    for row, (num_cached, num_new) in enumerate(SHAPES):
        total = num_cached + num_new
        sequence = Sequence(str(row), [1] * total, SamplingParams(), max_total_tokens=99)
        sequence.row = row
        sequence.block_table = list(itertools.islice(free, -(-total // BLOCK)))
        chunks.append(Chunk(sequence, num_cached, num_new, True, True, 1))
        keys = torch.randn(total, spec.num_kv_heads, spec.key_dim)
        values = torch.randn(total, spec.num_kv_heads, spec.value_dim)
        sequences.append((keys, values))
        slots = [sequence.block_table[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_cached)]
        rows = store_rows(torch.tensor(slots).long(), spec.num_kv_heads, BLOCK)
        cache.store(0, keys[:num_cached], values[:num_cached], rows)
    plan = StepPlan(chunks, sum(new for _, new in SHAPES))
    batch = builder.build(plan, CPU)
    assert len(batch.attention.decodes) == (2 if short_blocks == 1 else 1)
    query = torch.randn(1, spec.num_heads, plan.num_tokens, spec.key_dim)
    new_keys = torch.cat([k[c:] for (k, _), (c, _) in zip(sequences, SHAPES, strict=True)])
    new_values = torch.cat([v[c:] for (_, v), (c, _) in zip(sequences, SHAPES, strict=True)])
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    out = PagedForward(cache, batch.attention)(
        torch.nn.Module(),
        query,
        new_keys.transpose(0, 1)[None],
        new_values.transpose(0, 1)[None],
        scaling=0.3,
        s_aux=sinks,
    )
    assert out.shape == (1, plan.num_tokens, spec.num_heads, spec.value_dim)
    token = 0
    for (keys, values), (num_cached, num_new) in zip(sequences, SHAPES, strict=True):
        for position in range(num_cached, num_cached + num_new):
            expected = slow_attention(
                query[0, :, token], keys[: position + 1], values[: position + 1], spec, 0.3, sinks
            )
            torch.testing.assert_close(out[0, token].double(), expected, atol=2e-6, rtol=2e-5)
            token += 1


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
