import random

import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.draft_tokens.draft_lengths import DraftLengths, StepCosts
from nereid_backend.core.sequence import Sequence


def make_sequence() -> Sequence:
    return Sequence("r", [1, 2, 3], SamplingParams(), max_total_tokens=1000)


def run(lengths: DraftLengths, rate: float, num_steps: int, seed: int = 0) -> list[int]:
    """Run steps of one sequence whose draft tokens are accepted with the probability `rate`.

    Returns:
        The length of the draft in each step.
    """
    rng = random.Random(seed)
    sequence = make_sequence()
    draft_lengths = []
    for _ in range(num_steps):
        lengths.begin_step(num_sequences=1)
        length = lengths.take_length(sequence)
        draft_lengths.append(length)
        if length:
            num_accepted = 0
            while num_accepted < length and rng.random() < rate:
                num_accepted += 1
            lengths.record_draft(sequence, length, num_accepted)
    lengths.forget(sequence)
    return draft_lengths


def test_drafts_are_long_if_all_tokens_are_accepted():
    assert set(run(DraftLengths(8), 1.0, 100)[20:]) == {8}


def test_drafts_are_turned_off_if_no_token_is_accepted_and_tried_less_and_less_often():
    lengths = DraftLengths(4)
    chosen = run(lengths, 0.0, 2000)
    assert sum(chosen[:500]) < 25
    assert sum(chosen[1000:]) <= 2
    # A new sequence starts with the acceptance rate of the earlier sequences.
    assert sum(run(lengths, 0.0, 500)) <= 5


def test_drafts_become_longer_again_when_tokens_are_accepted():
    lengths = DraftLengths(4)
    run(lengths, 0.0, 100)
    assert set(run(lengths, 1.0, 300)[-50:]) == {4}


def test_the_length_follows_the_rate_of_acceptance():
    means = [sum(run(DraftLengths(8), rate, 4000)[500:]) for rate in (0.2, 0.5, 0.8, 0.95)]
    assert means == sorted(means)
    assert means[0] < means[-1] / 20


def test_expensive_draft_tokens_are_proposed_only_if_nearly_all_are_accepted():
    cheap, expensive = DraftLengths(4), DraftLengths(4)
    for lengths, ratio in ((cheap, 0.1), (expensive, 0.9)):
        for _ in range(9):
            lengths.costs.add_step(1, 0, 1.0)
            lengths.costs.add_step(1, 4, 1.0 + 4 * ratio)
    assert sum(run(cheap, 0.6, 500)) > 5 * sum(run(expensive, 0.6, 500))


def test_the_cost_ratio_is_measured_by_the_number_of_sequences():
    costs = StepCosts()
    for num_sequences, seconds in ((1, 1.0), (64, 8.0)):
        for _ in range(5):
            costs.add_step(num_sequences, 0, seconds)
    # With one sequence, each draft token adds a tenth of the step's time. With 64 sequences, each
    # draft token adds 1/64 of the step's time, which is as much as one sequence adds.
    for _ in range(5):
        costs.add_step(1, 4, 1.4)
        costs.add_step(64, 16, 10.0)
    assert costs.ratio(1) == pytest.approx(0.1)
    assert costs.ratio(64) == pytest.approx(1.0)
    assert costs.ratio(67) == costs.ratio(64)


def test_the_time_of_the_draft_model_is_a_part_of_the_cost():
    costs = StepCosts()
    for _ in range(3):
        costs.add_step(2, 0, 2.0)
        costs.add_step(2, 2, 2.2)
        costs.add_drafting(2, 2, 0.6)
    assert costs.ratio(2) == pytest.approx(0.1 + 0.3)


def test_one_slow_step_does_not_change_the_measured_cost():
    costs = StepCosts()
    for seconds in (1.0, 1.0, 30.0, 1.0, 1.0):
        costs.add_step(1, 0, seconds)
        costs.add_step(1, 1, 1.25 * seconds)
    costs.add_step(1, 1, 50.0)
    assert costs.ratio(1) == pytest.approx(0.25)


def test_a_slow_first_step_with_drafts_does_not_turn_drafts_off():
    costs = StepCosts()
    costs.add_step(1, 0, 1.0)
    costs.add_step(1, 2, 40.0)
    assert costs.ratio(1) < 0.5


def test_steps_without_drafts_are_measured_again_and_again():
    lengths = DraftLengths(2)
    sequence = make_sequence()
    num_plain = 0
    for _ in range(300):
        lengths.begin_step(1)
        length = lengths.take_length(sequence)
        num_plain += length == 0
        lengths.costs.add_step(1, length, 1.0 + 0.1 * length)
        if length:
            lengths.record_draft(sequence, length, length)
    assert 4 <= num_plain <= 8
