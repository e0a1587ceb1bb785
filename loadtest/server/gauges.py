"""Nereid's values from a server's metrics page, read once or periodically.

docs/reference/metrics.md describes the metrics.
"""

import http.client
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

Gauges = dict[str, float]

_PREFIX = "nereid:"
_BUSY = ("num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> Gauges:
    """Fetch a metrics page, and return its values by name (see `parse`).

    Args:
        url: the address of the page, such as http://127.0.0.1:8002/metrics.

    Raises:
        OSError: the page cannot be read.
    """
    try:
        with _DIRECT.open(url, timeout=10) as page:
            return parse(page.read().decode())
    except http.client.HTTPException as error:
        raise OSError(f"the page {url} is incomplete: {error!r}") from error


def parse(page: str) -> Gauges:
    """Return the values on a metrics page by name. Values with different labels are summed.

    For a histogram, only its sum and count are returned. A value with the label `finished_reason`
    is also returned alone, under a name that contains the reason.

    Example: the line `nereid:success_total{finished_reason="stop"} 2` gives
    `{"success_total": 2.0, "success_total stop": 2.0}`.
    """
    found: Gauges = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            if name == sample.name or name.endswith("_bucket"):
                continue
            found[name] = found.get(name, 0.0) + sample.value
            if reason := sample.labels.get("finished_reason"):
                found[f"{name} {reason}"] = sample.value
    return found


def what_is_busy(gauges: Gauges) -> str | None:
    """Return the gauges that must be 0 on an idle server but are not; None for an idle server."""
    if missing := [name for name in _BUSY if name not in gauges]:
        return f"the metrics page has no {missing[0]}"
    busy = [f"{name} {gauges[name]:g}" for name in _BUSY if gauges[name]]
    return ", ".join(busy) or None


def wait_for_rest(url: str, limit_s: float = 15.0) -> str | None:
    """Wait until the server is idle, and return None. After `limit_s`, return the busy gauges."""
    ends = time.monotonic() + limit_s
    while True:
        time.sleep(0.3)  # the server publishes gauges every tenth of a second
        try:
            busy = what_is_busy(read(url))
        except OSError as error:
            busy = f"the metrics page cannot be read: {error}"
        if busy is None or time.monotonic() > ends:
            return busy


@dataclass(frozen=True)
class Sample:
    """The values on a metrics page at one time.

    Attributes:
        at: the time, from time.time.
        gauges: the values by name.
    """

    at: float
    gauges: Gauges


class Sampler:
    """Reads a metrics page periodically in a thread while its `with` block runs.

    Args:
        url: the address of the page.
        every_s: the seconds between two samples.

    Attributes:
        samples: the samples in order. If the page could not be read, the sample is left out.
    """

    def __init__(self, url: str, every_s: float = 0.5) -> None:
        self._url = url
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                found = read(self._url)
            except OSError:
                continue  # leave out this sample, because callers check the server later
            self.samples.append(Sample(time.time(), found))


def rates(
    samples: Sequence[Sample], name: str, window_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return the times and rates per second of a counter, over windows of at least `window_s`."""
    times, values = [], []
    last = samples[0] if samples else None
    for sample in samples[1:]:
        assert last is not None
        spent = sample.at - last.at
        if spent >= window_s:
            times.append(sample.at)
            values.append((sample.gauges.get(name, 0.0) - last.gauges.get(name, 0.0)) / spent)
            last = sample
    return times, values
