# SPDX-License-Identifier: Apache-2.0
"""Looks at a server every few seconds while it works: memory, gauges, and whether it broke."""

import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

from loadtest.faults.memory_slope import Sample, Trend, trend
from loadtest.server import processes
from loadtest.server.served import Served

_BROKE = re.compile(r"^nereid: (.*); it is started again", re.MULTILINE)
_HEALED = re.compile(r"^nereid: everything answers again", re.MULTILINE)
# A server that hangs in its own crash is noticed a moment later; a client may hear of an end late.
_BEFORE_S = 10.0
_AFTER_S = 2.0
_LEVELS = ("num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Outage:
    """A part of the server was started again.

    Attributes:
        reason: what `nereid serve` said of it.
        began, ended: times of time.monotonic, the last before it and the first after it at which
            all was well, as far as was looked.
    """

    reason: str
    began: float
    ended: float = float("inf")

    @property
    def seconds(self) -> float:
        """How long it took at most."""
        return self.ended - self.began

    def explains(self, began: float, ended: float) -> bool:
        """Whether a request from `began` to `ended` may have failed because of it."""
        return ended >= self.began - _BEFORE_S and began <= self.ended + _AFTER_S


class Watch:
    """Samples one server in a thread, from `with` to its end.

    Args:
        served: the server.
        every_s: between two looks.

    Attributes:
        outages: parts that were started again, in their order.
        totals: counter -> how much was added to it meanwhile, over all servers.
        peaks: gauge -> the highest value seen.
    """

    def __init__(self, served: Served, every_s: float = 3.0) -> None:
        self._served = served
        self._every_s = every_s
        self._samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        self._counters: dict[str, float] = {}
        self._levels: dict[str, list[float]] = defaultdict(list)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._looked = time.monotonic()
        self.outages: list[Outage] = []
        self.totals: Counter[str] = Counter()
        self.peaks: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._counters = processes.gauges(self._served)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Look now; any thread may."""
        with self._lock:
            self._look_for_outages()
            self._take_gauges()
            now = time.monotonic()
            for role, process in processes.roles(self._served).items():
                try:
                    mib = process.memory_info().rss / 2**20
                except psutil.NoSuchProcess:
                    continue
                self._samples[role, process.pid].append(Sample(now, mib))

    def trends(self) -> dict[str, Trend]:
        """Role -> how the memory of the process that has it now went."""
        with self._lock:
            newest = {role: samples for (role, _), samples in self._samples.items()}
            return {role: trend(samples) for role, samples in newest.items()}

    def mean(self, gauge: str) -> float:
        """The mean of a gauge over all looks; 0 where there was none."""
        values = self._levels[gauge]
        return sum(values) / len(values) if values else 0.0

    def _look_for_outages(self) -> None:
        output = self._served.output
        now = time.monotonic()
        reasons = _BROKE.findall(output)
        self.outages += [Outage(reason, self._looked) for reason in reasons[len(self.outages) :]]
        # Several that follow each other closely are healed together.
        broke = [match.start() for match in _BROKE.finditer(output)]
        healed = [match.start() for match in _HEALED.finditer(output)]
        for position, outage in zip(broke, self.outages, strict=True):
            if outage.ended == float("inf") and any(at > position for at in healed):
                outage.ended = now
        self._looked = now

    def _take_gauges(self) -> None:
        found = processes.gauges(self._served)
        for name, value in found.items():
            if name in _LEVELS:
                self._levels[name].append(value)
                self.peaks[name] = max(self.peaks.get(name, 0.0), value)
            elif name.endswith(("_total", "_count")) or "_total " in name:
                before = self._counters.get(name, 0.0)
                # A server that was started again counts from 0.
                self.totals[name] += value - before if value >= before else value  # type: ignore[assignment]
        self._counters = found or self._counters
