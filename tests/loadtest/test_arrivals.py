"""Tests of the times at which requests arrive."""

import random
import statistics

import pytest

from loadtest.load.arrivals import Closed, Constant, Poisson, arrival_process


def gaps(arrivals, count=4000):
    rng = random.Random(0)
    return [arrivals.gap_s(rng) for _ in range(count)]


def test_constant_arrivals_keep_their_distance():
    assert set(gaps(Constant(4.0))) == {0.25}


def test_poisson_arrivals_keep_their_rate_and_nothing_else():
    found = gaps(Poisson(4.0))
    assert statistics.fmean(found) == pytest.approx(0.25, rel=0.05)
    # The standard deviation of the gaps of a Poisson process equals the mean of the gaps.
    assert statistics.stdev(found) == pytest.approx(0.25, rel=0.1)
    shares = [sum(gap > limit for gap in found) / len(found) for limit in (0.25, 0.5)]
    assert shares == pytest.approx([0.368, 0.135], abs=0.03)


def test_pauses_of_a_closed_loop_lie_in_their_range():
    found = gaps(Closed(0.2, 0.6))
    assert 0.2 <= min(found) < 0.25
    assert 0.55 < max(found) <= 0.6


def test_only_closed_loops_wait_for_answers():
    assert [one.is_open for one in (Closed(), Poisson(1.0), Constant(1.0))] == [False, True, True]


def test_an_arrival_process_is_chosen_by_its_name():
    assert arrival_process("poisson", 3.0) == Poisson(3.0)
    assert arrival_process("constant", 3.0) == Constant(3.0)
    assert arrival_process("closed", 0.0) == Closed()
    with pytest.raises(ValueError, match="--rate"):
        arrival_process("poisson", 0.0)
