"""Decide whether the memory of a process keeps growing, from the slope of many samples.

The memory of a process grows at first, while caches fill and allocators reserve memory, and varies
afterwards. The first quarter of the samples is therefore left out. The slope of the rest is the
median of the slopes of all pairs of samples (the Theil-Sen estimator), because a few outliers do
not change the median.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SLOPE_MIB_PER_MINUTE = 0.5
_MAX_POINTS = 300
# In a shorter time, a cache that fills cannot be distinguished from a leak.
_MIN_SECONDS = 150.0


@dataclass(frozen=True)
class Sample:
    """The memory of a process at one time.

    Attributes:
        at: the time in seconds, from time.monotonic.
        mib: the resident memory in MiB.
    """

    at: float
    mib: float


@dataclass(frozen=True)
class Trend:
    """The trend of a process's memory.

    Attributes:
        quarters_mib: the median memory in each quarter of the observed time, in MiB.
        slope: the growth in MiB/minute after the first quarter; None if the time was too short.
    """

    quarters_mib: tuple[float, ...]
    slope: float | None

    @property
    def is_flat(self) -> bool:
        """Whether the growth is within the limit. True if the time was too short to decide."""
        return self.slope is None or self.slope <= MAX_SLOPE_MIB_PER_MINUTE


def trend(samples: Sequence[Sample]) -> Trend:
    """Return the trend of the memory of one process. `samples` must be in order of time."""
    start = samples[0].at
    duration_s = samples[-1].at - start
    quarters: list[list[float]] = [[], [], [], []]
    for sample in samples:
        share = (sample.at - start) / duration_s if duration_s else 0.0
        quarters[min(int(4 * share), 3)].append(sample.mib)  # the share of the last sample is 1
    medians = tuple(statistics.median(values) for values in quarters if values)
    warm_up_s = duration_s / 4
    if duration_s - warm_up_s < _MIN_SECONDS:
        return Trend(medians, slope=None)
    warm = [sample for sample in samples if sample.at >= start + warm_up_s]
    return Trend(medians, _slope_per_minute(warm))


def _slope_per_minute(samples: Sequence[Sample]) -> float:
    """Return the median slope of all pairs of samples, in MiB per minute."""
    thinned = samples[:: len(samples) // _MAX_POINTS + 1]
    pairs = itertools.combinations(thinned, 2)
    slopes_per_s = [(later.mib - sooner.mib) / (later.at - sooner.at) for sooner, later in pairs]
    return 60 * statistics.median(slopes_per_s)
