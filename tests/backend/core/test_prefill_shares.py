"""Tests of the shares of the clients in the token budget of one step."""

from backend.core.test_scheduler import make_sequence
from nereid_backend.core.prefill_shares import PrefillShares


def make_prompt(client_id: str, num_tokens: int):
    return make_sequence(f"request of {client_id}", [3] * num_tokens, client_id=client_id)


def test_a_share_is_used_up_but_one_token_is_always_allowed():
    shares = PrefillShares()
    ours = make_prompt("ours", 400)
    shares.divide(200, [ours, make_prompt("theirs", 400)])
    assert [shares.take(ours, 80) for _ in range(3)] == [80, 20, 1]
    assert shares.take(ours, 1) == 1


def test_a_single_client_is_not_limited():
    shares = PrefillShares()
    first, second = make_prompt("ours", 400), make_prompt("ours", 300)
    shares.divide(200, [first, second])
    assert shares.take(first, 400) == 400


def test_a_client_with_one_uncomputed_token_needs_no_share():
    shares = PrefillShares()
    ours = make_prompt("ours", 400)
    shares.divide(200, [ours, make_prompt("theirs", 1)])
    assert shares.take(ours, 400) == 400
