# SPDX-License-Identifier: Apache-2.0
"""Whether memory stays flat: the slope of many samples, not the difference of two.

A process's memory goes up at first (caches fill, allocators take their arenas) and jitters ever
after, so the first quarter of the samples is left out and the slope of the rest is the median of
the slopes of all pairs (Theil and Sen), which a few outliers do not move.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SLOPE_MIB_PER_MINUTE = 0.5
_MAX_POINTS = 300
_MIN_SECONDS = 150.0  # in less, a cache that fills looks like a leak


@dataclass(frozen=True)
class Sample:
    """What a process held at a time: seconds of time.monotonic, MiB."""

    at: float
    mib: float


@dataclass(frozen=True)
class Trend:
    """How a process's memory went.

    Attributes:
        quarters_mib: medians of the four quarters of the time in which it was looked at.
        slope: MiB a minute behind the first of them; None where it was too short to say.
    """

    quarters_mib: tuple[float, ...]
    slope: float | None

    @property
    def is_flat(self) -> bool:
        """Whether it did not grow, as far as can be said."""
        return self.slope is None or self.slope <= MAX_SLOPE_MIB_PER_MINUTE


def trend(samples: Sequence[Sample]) -> Trend:
    """The trend of one process's samples, in the order of their times."""
    quarter_s = (samples[-1].at - samples[0].at) / 4
    quarters: list[list[float]] = [[], [], [], []]
    for sample in samples:
        passed = (sample.at - samples[0].at) / quarter_s if quarter_s else 0.0
        quarters[min(int(passed), 3)].append(sample.mib)
    medians = tuple(statistics.median(values) for values in quarters if values)
    warm = [sample for sample in samples if sample.at >= samples[0].at + quarter_s]
    return Trend(medians, _slope(warm) if 3 * quarter_s >= _MIN_SECONDS else None)


def _slope(samples: Sequence[Sample]) -> float:
    thinned = samples[:: len(samples) // _MAX_POINTS + 1]
    pairs = itertools.combinations(thinned, 2)
    return 60 * statistics.median((b.mib - a.mib) / (b.at - a.at) for a, b in pairs)
