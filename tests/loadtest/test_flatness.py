"""Tests of the rule that decides whether memory grows."""

import random

import pytest

from loadtest.faults.memory_slope import MAX_SLOPE_MIB_PER_MINUTE, Sample, trend


def samples(seed, mib, minutes=10.0, every_s=3.0):
    """Return samples of `mib(minute)` MiB of memory with random noise."""
    rng = random.Random(seed)
    times = [at * every_s for at in range(int(60 * minutes / every_s))]
    return [Sample(at, mib(at / 60) + rng.gauss(0, 0.5)) for at in times]


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_measured(seed):
    found = trend(samples(seed, lambda minute: 100 + 0.8 * minute))
    assert not found.is_flat
    assert found.slope == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_jitter_around_a_level_is_flat(seed):
    found = trend(samples(seed, lambda minute: 100))
    assert found.is_flat
    assert abs(found.slope) < MAX_SLOPE_MIB_PER_MINUTE / 5


def test_memory_that_grows_only_in_the_first_minutes_is_no_leak():
    assert trend(samples(0, lambda minute: 100 + 20 * min(minute, 2.0))).is_flat


def test_a_leak_after_a_warm_up_is_found():
    assert not trend(samples(0, lambda minute: 100 + 20 * min(minute, 2.0) + minute)).is_flat


def test_a_few_high_samples_do_not_make_a_leak():
    spikes = [
        Sample(one.at, one.mib + (200 if at % 40 == 39 else 0))
        for at, one in enumerate(samples(0, lambda minute: 100))
    ]
    assert trend(spikes).is_flat


def test_a_short_measurement_has_no_slope():
    assert trend(samples(0, lambda minute: 100 + 50 * minute, minutes=1.0)).slope is None
