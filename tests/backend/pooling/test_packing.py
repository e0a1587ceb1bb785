"""Packed attention beside its definition, text by text."""

import itertools

import pytest
import torch
from nereid_backend.pooling.forward.packed_texts import PackedAttention, TokenBatch


def by_definition(query, key, value, *, is_causal, window, softcap, sinks, scale):
    """One text: query [heads, length, dim], key and value [kv_heads, length, dim], in float64."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query.double() @ key.double().transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(query.shape[1])
    distance = positions[:, None] - positions
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if is_causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value.double()).float()


@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_packed_attention_equals_the_attention_of_each_text_alone(
    is_causal, window, extra, kv_heads
):
    torch.manual_seed(0)
    lens = (1, 3, 3, 40, 300, 300, 517)
    total = sum(lens)
    query = torch.randn(1, 4, total, 8)
    key, value = torch.randn(2, 1, kv_heads, total, 8)
    softcap = 3.0 if extra == "softcap" else None
    sinks = torch.randn(4) if extra == "sinks" else None
    batch = TokenBatch(torch.zeros(total, dtype=torch.int64), None, lens)
    attention = PackedAttention(batch.groups(), is_causal)
    found = attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    for start, end in itertools.pairwise(batch.starts):
        wanted = by_definition(
            query[0, :, start:end],
            key[0, :, start:end],
            value[0, :, start:end],
            is_causal=is_causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=0.4,
        )
        torch.testing.assert_close(
            found[0, start:end], wanted.transpose(0, 1), rtol=1e-4, atol=1e-5
        )


def test_position_ids_start_again_at_each_text():
    batch = TokenBatch.of([[5, 6], [7], [8, 9, 5]], [None] * 3, torch.device("cpu"))
    assert batch.positions(2).tolist() == [2, 3, 2, 2, 3, 4]
    assert batch.groups() == [(0, 1, 2), (2, 1, 1), (3, 1, 3)]
    assert batch.pad(batch.token_ids).tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 5]]
