"""Tests that the native kernels sample the same tokens as torch with whole rows of logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.sampling import native_logits
from nereid_backend.sampling.random_sampling import SamplingBatch, sample_rows

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    not native_logits.has_kernels_for(torch.ones(1, 1)), reason="there is no C++ compiler"
)

rows_of_logits = {
    "dtype": st.sampled_from(DTYPES),
    "size": st.one_of(st.integers(1, 70), st.integers(4000, 13000)),
    "height": st.sampled_from([0.0, 0.1, 3.0, 20.0]),
    "share_out": st.sampled_from([0.0, 0.5, 1.0]),
    "temperature": st.sampled_from([1e-6, 0.3, 1.0, 1.7]),
    "seed": st.integers(0, 2**16),
}


def some_logits(dtype, size, height, share_out, seed):
    """Return three rows of logits in which random tokens are forbidden.

    `share_out` is the share of the forbidden tokens. At least one token of a row is allowed.
    """
    torch.manual_seed(seed)
    logits = (torch.randn(3, size) * height).to(dtype)
    is_forbidden = torch.rand(3, size) < share_out
    is_forbidden[:, seed % size] = False
    logits[is_forbidden] = float("-inf")
    return logits


def probs_of(logits, temperature):
    # The largest logit is subtracted first. Otherwise, the quotients by a tiny temperature would be
    # huge.
    logits = logits.double()
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


@given(**rows_of_logits, uniform=st.sampled_from([0.0, 0.2, 0.5, 0.97, 1 - 2**-53]))
def test_a_sampled_token_is_the_first_at_which_the_sum_of_probabilities_exceeds_the_random_number(
    dtype, size, height, share_out, temperature, seed, uniform
):
    logits = some_logits(dtype, size, height, share_out, seed)
    tokens = native_logits.sample(logits, np.float32([temperature] * 3), np.array([uniform] * 3))
    probs = probs_of(logits, np.float32(temperature).item())
    sums = probs.cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        assert probs[row, token] > 0
        assert sums[row, token] >= uniform - 1e-5
        assert sums[row, token] - probs[row, token] <= uniform + 1e-5


@given(**rows_of_logits, width=st.integers(1, 64))
def test_the_likeliest_tokens_come_with_their_probabilities(
    dtype, size, height, share_out, temperature, seed, width
):
    logits = some_logits(dtype, size, height, share_out, seed)
    width = min(width, size)
    values, token_ids = native_logits.likeliest(logits, np.float32([temperature] * 3), width)
    probs = probs_of(logits, np.float32(temperature).item())
    torch.testing.assert_close(values.double(), probs.topk(width).values, rtol=1e-5, atol=1e-7)
    # If fewer than `width` tokens are allowed, the rest of the row is filled with the id -1 and the
    # probability 0.
    is_there = values > 0
    torch.testing.assert_close(
        probs.gather(1, token_ids.clamp(min=0))[is_there],
        values.double()[is_there],
        rtol=1e-5,
        atol=1e-7,
    )
    for row in range(3):
        ids = token_ids[row][token_ids[row] >= 0].tolist()
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_rows_with_nan_or_infinity_give_a_token_and_do_not_change_other_rows(dtype, wrong):
    logits = torch.zeros(3, 9000, dtype=dtype)
    logits[1, 4100] = wrong
    logits[:, 7] = 30.0
    temperature, uniform = np.ones(3, dtype=np.float32), np.full(3, 0.5)
    tokens = native_logits.sample(logits, temperature, uniform).tolist()
    assert tokens[0] == tokens[2] == 7
    assert 0 <= tokens[1] < 9000
    _, ids = native_logits.likeliest(logits, temperature, 8)
    assert ids[0, 0] == ids[2, 0] == 7
    assert -1 <= ids.min() <= ids.max() < 9000


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.99, "min_p": 0.01}]
)
@pytest.mark.parametrize("height", [1, 2, 4])
def test_the_kernels_sample_the_same_tokens_as_torch(filters, height, monkeypatch):
    torch.manual_seed(0)
    # A smaller `height` makes the distribution flatter, so that the filters keep more tokens.
    logits = torch.randn(200, 5000) * height
    batch = SamplingBatch(
        temperature=np.full(200, 0.8, np.float32),
        top_p=np.full(200, filters.get("top_p", 1.0), np.float32),
        top_k=np.full(200, filters.get("top_k", 0), np.int64),
        min_p=np.full(200, filters.get("min_p", 0.0), np.float32),
        uniform=np.random.default_rng(0).random(200),
    )
    native = sample_rows(logits, batch)
    monkeypatch.setattr(native_logits, "has_kernels", lambda: False)
    plain = sample_rows(logits, batch)
    # A random number may be so close to the limit between two tokens that rounding decides.
    assert (native != plain).sum() <= 1
