"""Observe a server during a test: the memory of its processes, its metrics, and its outages."""

import re
import statistics
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil

from loadtest.faults.memory_slope import Sample, Trend, trend
from loadtest.server import processes
from loadtest.server.periodic import Periodic
from loadtest.server.served import Served

_BROKE = re.compile(r"^nereid: (.*); it is started again", re.MULTILINE)
_HEALED = re.compile(r"^nereid: everything answers again", re.MULTILINE)
# `nereid serve` notices some crashes only after several seconds, and a client may notice the end of
# its request late.
_BEFORE_S = 10.0
_AFTER_S = 2.0
_LEVELS = ("num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Outage:
    """An interval in which a part of the server was restarted.

    Attributes:
        reason: the reason that `nereid serve` printed.
        began: the time of the last observation before the outage, from time.monotonic.
        ended: the time of the first observation after the outage.
    """

    reason: str
    began: float
    ended: float = float("inf")

    @property
    def is_over(self) -> bool:
        """Whether the end of the outage has been observed."""
        return self.ended < float("inf")

    @property
    def seconds(self) -> float:
        """The longest possible duration of the outage."""
        return self.ended - self.began

    def explains(self, began: float, ended: float) -> bool:
        """Return whether the outage may explain the failure of a request in this interval."""
        return ended >= self.began - _BEFORE_S and began <= self.ended + _AFTER_S


class Watch(Periodic):
    """Observes one server in a thread while its `with` block runs.

    Args:
        served: the server.
        every_s: the seconds between two observations.

    Attributes:
        outages: the outages in order.
        totals: the increase of each counter during the observation, across restarts of the server.
        peaks: the highest observed value of each gauge.
    """

    def __init__(self, served: Served, every_s: float = 3.0) -> None:
        super().__init__(every_s)
        self._served = served
        self._samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        self._counters: dict[str, float] = {}
        self._levels: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._last_look = time.monotonic()
        self.outages: list[Outage] = []
        self.totals: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._counters = processes.gauges(self._served)
        return super().__enter__()

    def look(self) -> None:
        """Observe the server now. Any thread may call this method."""
        with self._lock:
            self._look_for_outages()
            self._look_at_metrics()
            now = time.monotonic()
            for role, process in processes.roles(self._served).items():
                with suppress(psutil.NoSuchProcess):  # the process has just ended
                    mib = process.memory_info().rss / 2**20
                    self._samples[role, process.pid].append(Sample(now, mib))

    def trends(self) -> dict[str, Trend]:
        """Return the memory trend of the current process of each role."""
        with self._lock:
            newest = {role: samples for (role, _), samples in self._samples.items()}
            return {role: trend(samples) for role, samples in newest.items()}

    def mean(self, gauge: str) -> float:
        """Return the mean of a gauge over all observations, or 0 if there were none."""
        values = self._levels[gauge]
        return statistics.fmean(values) if values else 0.0

    def _look_for_outages(self) -> None:
        """Read the messages of `nereid serve` about failures and recoveries."""
        output = self._served.output  # everything since the start of the server
        now = time.monotonic()
        failures = list(_BROKE.finditer(output))
        # `outages` already contains an outage for each failure that an earlier call found, in the
        # order of the output. Only the failures after them are new.
        new_failures = failures[len(self.outages) :]
        for failure in new_failures:
            self.outages.append(Outage(reason=failure[1], began=self._last_look))
        # Outages that follow each other closely share one recovery message.
        last_recovery = max((match.start() for match in _HEALED.finditer(output)), default=-1)
        for failure, outage in zip(failures, self.outages, strict=True):
            if not outage.is_over and failure.start() < last_recovery:
                outage.ended = now
        self._last_look = now

    def _look_at_metrics(self) -> None:
        """Update the levels and the totals from the metrics page of the server."""
        metrics = processes.gauges(self._served)
        for name, value in metrics.items():
            if name in _LEVELS:
                self._levels[name].append(value)
                self.peaks[name] = max(self.peaks.get(name, 0.0), value)
            elif name.endswith(("_total", "_count")) or "_total " in name:
                before = self._counters.get(name, 0.0)
                has_restarted = value < before  # the counters of a new process begin at 0
                self.totals[name] += value if has_restarted else value - before
        self._counters = metrics or self._counters
