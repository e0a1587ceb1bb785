"""Tests that several clients share the rows, the blocks and the token budget of an engine."""

import pytest
from backend.core.test_scheduler import commit, make_scheduler, make_sequence
from nereid_backend import RequestError, SamplingParams
from nereid_backend.core.queues.fair_queue import fair_shares


def steps_until_first_token(scheduler, name, limit=50):
    """Run steps until the request `name` samples a token, and return the number of steps."""
    for step in range(1, limit):
        plan = scheduler.plan()
        commit(scheduler, plan)
        scheduler.check()
        if any(c.sequence.request_id == name and c.samples for c in plan.chunks):
            return step
    raise AssertionError(f"{name} got no token in {limit} steps")


def crowded(num_steps=3, num_requests=200, prompt_len=40, **settings):
    """Return a scheduler after `num_steps` steps with long requests of the client "greedy"."""
    scheduler = make_scheduler(**settings)
    for index in range(num_requests):
        name = f"long {index}"
        tokens = [index % 7 + 2] * prompt_len
        scheduler.add(make_sequence(name, tokens, max_tokens=60, client_id="greedy"))
    for _ in range(num_steps):
        commit(scheduler, scheduler.plan())
    return scheduler


@pytest.mark.parametrize("num_steps", [0, 3, 20])
@pytest.mark.parametrize("num_blocks", [120, 2000])
@pytest.mark.parametrize("max_num_seqs", [4, 256])
def test_a_short_request_does_not_wait_for_200_long_ones(num_steps, num_blocks, max_num_seqs):
    scheduler = crowded(num_steps, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=300)
    scheduler.add(make_sequence("short", [5] * 12, client_id="patient"))
    # One of the three steps computes the prompt of the short request.
    assert steps_until_first_token(scheduler, "short") <= 3


def test_without_names_of_clients_the_order_of_arrival_decides():
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=2, budget=64)
    for name in "abc":
        scheduler.add(make_sequence(name, [2] * 8, max_tokens=20))
    assert steps_until_first_token(scheduler, "c") > 15
    assert scheduler.num_preemptions == 0


def test_clients_get_rows_in_proportion_to_their_weights():
    scheduler = crowded(num_requests=40, prompt_len=4, num_blocks=2000, max_num_seqs=8, budget=64)
    for index in range(40):
        sequence = make_sequence(f"b{index}", [4] * 4, max_tokens=60, client_id="b")
        scheduler.add(sequence)
    for _ in range(12):
        plan = scheduler.plan()
        commit(scheduler, plan)
    clients = [chunk.sequence.params.client_id for chunk in plan.chunks]
    assert (clients.count("greedy"), clients.count("b")) == (4, 4)


def test_a_preempted_request_of_a_greedy_client_still_finishes():
    scheduler = crowded(num_requests=12, prompt_len=10, num_blocks=60, max_num_seqs=4, budget=64)
    ended = set()
    for step in range(2000):
        if step < 400 and step % 5 == 0:
            scheduler.add(make_sequence(f"s{step}", [3] * 6, max_tokens=3, client_id="b"))
        for update in commit(scheduler, scheduler.plan()):
            if update.finish_reason:
                ended.add(update.request_id)
        scheduler.check()
        if step >= 400 and not scheduler.has_work():
            break
    assert len(ended) == 12 + 400 // 5


def test_the_unused_share_of_a_client_goes_to_the_others():
    equal = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert fair_shares({"a": 4000, "b": 100}, equal, 512) == {"a": 412, "b": 100}
    assert fair_shares({"a": 900, "b": 900, "c": 50}, equal, 250) == {"a": 100, "b": 100, "c": 50}
    assert fair_shares({"a": 900, "b": 900}, {"a": 3.0, "b": 1.0}, 400) == {"a": 300, "b": 100}
    assert fair_shares({"a": 9, "b": 9}, equal, 0) == {"a": 1, "b": 1}


def test_a_client_with_a_tiny_weight_gets_one_token():
    weights = {"a": 1e-14, "b": 1000.0}
    assert fair_shares({"a": 9, "b": 9}, weights, 12) == {"a": 3, "b": 9}
    assert fair_shares({"a": 9, "b": 9}, weights, 8) == {"a": 1, "b": 8}


def test_a_weight_that_the_cpu_may_round_to_zero_is_refused():
    with pytest.raises(RequestError, match="client_weight: the value must be at least 2"):
        SamplingParams(client_weight=1e-320)
