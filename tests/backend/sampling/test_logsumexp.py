"""Tests of the function that finds the likeliest token and the log-sum-exp of each row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.sampling import native_logits
from nereid_backend.sampling.native_logits import argmax_logsumexp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 5),
    size=st.one_of(st.integers(1, 70), st.integers(4000, 13000)),
    height=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
    share_out=st.sampled_from([0.0, 0.5, 1.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_rows_of_any_size_give_the_first_likeliest_token_and_the_logarithm_of_the_sum(
    dtype, rows, size, height, share_out, threads, seed
):
    torch.manual_seed(seed)
    logits = (torch.randn(rows, size) * height).to(dtype)
    # Many tokens are forbidden, as by a guide. At least one token of each row is allowed.
    is_forbidden = torch.rand(rows, size) < share_out
    is_forbidden[:, seed % size] = False
    logits[is_forbidden] = float("-inf")

    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        result = argmax_logsumexp(logits)
    finally:
        torch.set_num_threads(threads_before)

    assert result.likeliest.tolist() == logits.float().argmax(-1).tolist()
    expected = logits.double().logsumexp(-1)
    assert (result.logsumexp.double() - expected).abs().max() < 4e-6 * max(1.0, height)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 15, 17, 4095, 4096, 8200])
def test_of_equal_logits_the_first_is_the_likeliest(dtype, place):
    logits = torch.zeros(2, 9000, dtype=dtype)
    logits[0, place] = logits[0, 8500] = 5.0
    assert argmax_logsumexp(logits).likeliest.tolist() == [place, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3, 4100, 8999])
@pytest.mark.parametrize("others", [0.0, float("-inf")])
def test_a_row_with_nan_or_infinity_has_no_finite_sum_and_other_rows_have(
    dtype, wrong, place, others
):
    logits = torch.zeros(3, 9000, dtype=dtype)
    logits[1] = others
    logits[1, place] = wrong
    found = argmax_logsumexp(logits)
    assert found.logsumexp.isfinite().tolist() == [True, False, True]
    assert 0 <= found.likeliest.min() <= found.likeliest.max() < 9000


def test_a_row_without_allowed_tokens_has_no_finite_sum():
    assert not argmax_logsumexp(torch.full((1, 40), float("-inf"))).logsumexp.isfinite()


def test_rows_that_are_not_adjacent_in_memory_are_read_correctly():
    wide = torch.randn(4, 60)
    for logits in (wide[:, 3:50], wide[::2, :47], wide.T):
        found, expected = argmax_logsumexp(logits), argmax_logsumexp(logits.contiguous())
        assert torch.equal(found.likeliest, expected.likeliest)
        assert torch.equal(found.logsumexp, expected.logsumexp)


def test_without_a_compiler_torch_gives_the_same(monkeypatch):
    logits = torch.randn(3, 5000)
    native = argmax_logsumexp(logits)
    monkeypatch.setattr(native_logits, "has_kernels", lambda: False)
    plain = argmax_logsumexp(logits)
    assert torch.equal(native.likeliest, plain.likeliest)
    torch.testing.assert_close(native.logsumexp, plain.logsumexp)


def test_a_row_gives_the_same_bits_alone_and_among_others():
    logits = torch.randn(7, 9001)
    among = argmax_logsumexp(logits).logsumexp
    for row in range(7):
        assert torch.equal(argmax_logsumexp(logits[row : row + 1]).logsumexp, among[row : row + 1])
