"""Tests of the rule that decides whether memory grows."""

import random

import pytest

from loadtest.faults.memory_slope import MAX_SLOPE_MIB_PER_MINUTE, Sample, trend


def samples(seed, mib, minutes=10.0, every_s=3.0):
    """Return samples of `mib(minute)` MiB of memory with random noise."""
    rng = random.Random(seed)
    times_s = [number * every_s for number in range(int(60 * minutes / every_s))]
    return [Sample(time_s, mib(time_s / 60) + rng.gauss(0, 0.5)) for time_s in times_s]


def warm_up(minute):
    """Return the memory of a process that grows by 20 MiB a minute in the first two minutes."""
    return 100 + 20 * min(minute, 2.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_measured(seed):
    leak = trend(samples(seed, lambda minute: 100 + 0.8 * minute))
    assert not leak.is_flat
    assert leak.slope == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_jitter_around_a_level_is_flat(seed):
    level = trend(samples(seed, lambda minute: 100))
    assert level.is_flat
    assert abs(level.slope) < MAX_SLOPE_MIB_PER_MINUTE / 5


def test_memory_that_grows_only_in_the_first_minutes_is_no_leak():
    assert trend(samples(0, warm_up)).is_flat


def test_a_leak_after_a_warm_up_is_found():
    assert not trend(samples(0, lambda minute: warm_up(minute) + minute)).is_flat


def test_a_few_high_samples_do_not_make_a_leak():
    measured = samples(0, lambda minute: 100)
    measured[39::40] = [Sample(one.at, one.mib + 200) for one in measured[39::40]]
    assert trend(measured).is_flat


def test_a_short_measurement_has_no_slope():
    assert trend(samples(0, lambda minute: 100 + 50 * minute, minutes=1.0)).slope is None
