"""Tests that attention over packed texts equals the attention of each text by the definition."""

import itertools

import pytest
import torch
from backend.torch_threads import use_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.attention.cpu import cpu_texts
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set, has_kernels
from nereid_backend.attention.cpu.cpu_texts import TextAttention, attend_texts, native_texts
from nereid_backend.attention.cpu.instruction_sets import supported_instruction_sets
from nereid_backend.pooling.forward.packed_texts import PackedAttention, TokenBatch

# The best instruction set, and two instruction sets that multiply in other ways: avx512_bf16
# multiplies pairs of bfloat16 numbers, and avx2 multiplies only float32 numbers.
INSTRUCTION_SETS = [
    instruction_set.name
    for index, instruction_set in enumerate(supported_instruction_sets())
    if index == 0 or instruction_set.name in ("avx512_bf16", "avx2")
]
needs_kernels = pytest.mark.skipif(not has_kernels(), reason="the CPU kernels cannot be built")


def by_definition(query, key, value, options):
    """Return the attention of one text by the definition, computed in float64.

    `query` has the shape [heads, length, dim]. `key` and `value` have the shape [kv_heads, length,
    dim].
    """
    group_size = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group_size, 0), value.repeat_interleave(group_size, 0)
    scores = query.double() @ key.double().transpose(1, 2) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    positions = torch.arange(query.shape[1])
    distances = positions[:, None] - positions
    is_hidden = torch.zeros_like(distances, dtype=torch.bool)
    if options.is_causal:
        is_hidden |= distances < 0
    if options.window is not None:
        is_hidden |= distances.abs() >= options.window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if options.sinks is not None:
        # A sink is an additional score of a head. No token belongs to this score.
        sinks = options.sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : len(positions)]
    return (weights @ value.double()).float()


@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("uses_kernels", [False, True], ids=["torch", "kernels"])
def test_packed_attention_equals_the_attention_of_each_text_alone(
    is_causal, window, extra, kv_heads, uses_kernels, monkeypatch
):
    if not uses_kernels:
        monkeypatch.setattr(cpu_texts, "can_attend", lambda query: False)
    torch.manual_seed(0)
    lengths = (1, 3, 3, 40, 300, 300, 517)
    total = sum(lengths)
    # Without kernels, bfloat16 runs through the same code as float32, but its errors are larger.
    dtype = torch.bfloat16 if uses_kernels and not extra else torch.float32
    query = torch.randn(1, 4, total, 8).to(dtype)
    key, value = torch.randn(2, 1, kv_heads, total, 8).to(dtype)
    softcap = 3.0 if extra == "softcap" else None
    sinks = torch.randn(4) if extra == "sinks" else None
    batch = TokenBatch(torch.zeros(total, dtype=torch.int64), None, lengths)

    attended = PackedAttention(batch.groups(), is_causal)(
        torch.nn.Identity(),
        query,
        key,
        value,
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )

    options = TextAttention(0.4, is_causal, window, softcap, sinks)
    assert_equals_definition(attended[0], (query[0], key[0], value[0]), lengths, options)


def assert_equals_definition(attended, inputs, lengths, options):
    """Check that the attention of packed texts equals the attention of each text by definition.

    `inputs` contains the queries, keys and values of all texts.
    """
    is_rounded = attended.dtype is torch.bfloat16
    atol, rtol = (2e-2, 2e-2) if is_rounded else (1e-5, 1e-4)
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        inputs_of_text = (tensor[:, start:end] for tensor in inputs)
        expected = by_definition(*inputs_of_text, options).transpose(0, 1)
        torch.testing.assert_close(attended[start:end].float(), expected, rtol=rtol, atol=atol)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_any_attention_of_any_texts_equals_its_definition(name, dtype):
    @settings(max_examples=20, deadline=None)
    @given(
        lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 33, 200, 530]), min_size=1, max_size=4),
        num_key_heads=st.integers(1, 2),
        queries_per_key_head=st.sampled_from([1, 3, 7]),
        key_dim=st.sampled_from([1, 7, 32, 33, 64, 80]),
        value_dim=st.sampled_from([1, 16, 33, 64]),
        options=st.builds(
            TextAttention,
            scale=st.sampled_from([0.2, -0.1, 0.0]),
            is_causal=st.booleans(),
            window=st.sampled_from([None, 1, 20, 300]),
            softcap=st.sampled_from([None, 3.0]),
        ),
        num_threads=st.integers(1, 2),
    )
    def check(
        lengths, num_key_heads, queries_per_key_head, key_dim, value_dim, options, num_threads
    ):
        torch.manual_seed(0)

        def random_heads(num_heads, dim):
            # The output of a linear layer has all heads of a token next to each other in memory.
            # The random numbers have the same layout.
            return torch.randn(sum(lengths), num_heads, dim).to(dtype).transpose(0, 1)

        query = random_heads(num_key_heads * queries_per_key_head, key_dim)
        key = random_heads(num_key_heads, key_dim)
        value = random_heads(num_key_heads, value_dim)
        with use_threads(num_threads):
            attended = attend_texts((query, key, value), native_texts(lengths), options)
        assert_equals_definition(attended, (query, key, value), lengths, options)

    with forced_instruction_set(name):
        check()


def test_position_ids_start_again_at_each_text():
    batch = TokenBatch.of([[5, 6], [7], [8, 9, 5]], [None] * 3, torch.device("cpu"))
    assert batch.positions(2).tolist() == [2, 3, 2, 2, 3, 4]
    assert batch.groups() == [(0, 1, 2), (2, 1, 1), (3, 1, 3)]
    assert batch.pad(batch.token_ids).tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 5]]
