"""Functions that read Nereid's metrics from the metrics page of a server.

docs/reference/metrics.md describes the metrics.
"""

import http.client
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtest.server.periodic import Periodic

Gauges = dict[str, float]

_PREFIX = "nereid:"
_ZERO_IF_IDLE = (
    "num_requests",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_blocks_used",
)
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_page(url: str) -> str:
    """Return the text of a page. The settings of the environment for proxies are ignored.

    Raises:
        OSError: the page cannot be read.
    """
    try:
        with _WITHOUT_PROXY.open(url, timeout=10) as page:
            return str(page.read(), "utf-8")
    except http.client.HTTPException as error:
        raise OSError(f"the page {url} is incomplete: {error!r}") from error


def read(url: str) -> Gauges:
    """Fetch a metrics page, and return the values on the page by name (see `parse`).

    Args:
        url: the address of the page, such as http://127.0.0.1:8002/metrics.

    Raises:
        OSError: the page cannot be read.
    """
    return parse(read_page(url))


def parse(page: str) -> Gauges:
    """Return the values on a metrics page by name. Values with different labels are summed.

    For a histogram, only the sum and the count are returned. A value with the label
    `finished_reason` is also returned alone, under a name that contains the reason.

    Example: the line `nereid:success_total{finished_reason="stop"} 2` gives
    `{"success_total": 2.0, "success_total stop": 2.0}`.
    """
    values: Gauges = defaultdict(float)
    samples = (one for family in text_string_to_metric_families(page) for one in family.samples)
    for sample in samples:
        if not sample.name.startswith(_PREFIX) or sample.name.endswith("_bucket"):
            continue
        name = sample.name.removeprefix(_PREFIX)
        values[name] += sample.value
        if reason := sample.labels.get("finished_reason"):
            values[f"{name} {reason}"] = sample.value
    return dict(values)


def what_is_busy(gauges: Gauges) -> str | None:
    """Return the gauges that must be 0 on an idle server but are not; None for an idle server.

    Example: a server with one running request returns `"num_requests 1, num_requests_running 1"`.
    """
    if missing := [name for name in _ZERO_IF_IDLE if name not in gauges]:
        return f"the metrics page has no {missing[0]}"
    busy = [f"{name} {gauges[name]:g}" for name in _ZERO_IF_IDLE if gauges[name]]
    return ", ".join(busy) or None


def wait_for_rest(url: str, limit_s: float = 15.0) -> str | None:
    """Wait until the server is idle, and return None. After `limit_s`, return the busy gauges."""
    deadline = time.monotonic() + limit_s
    while True:
        time.sleep(0.3)  # the server publishes gauges every tenth of a second
        try:
            busy = what_is_busy(read(url))
        except OSError as error:
            busy = f"the metrics page cannot be read: {error}"
        if busy is None or time.monotonic() > deadline:
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


class Sampler(Periodic):
    """Reads a metrics page periodically in a thread while its `with` block runs.

    Args:
        url: the address of the page.
        every_s: the seconds between two samples.

    Attributes:
        samples: the samples in order. If the page could not be read, the sample is left out.
    """

    def __init__(self, url: str, every_s: float = 0.5) -> None:
        super().__init__(every_s)
        self._url = url
        self.samples: list[Sample] = []

    def look(self) -> None:
        """Read the page, and add a sample."""
        # A page that cannot be read is left out, because callers check the server later.
        with suppress(OSError):
            self.samples.append(Sample(gauges=read(self._url), at=time.time()))


def rates(
    samples: Sequence[Sample], name: str, window_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return the rates per second of a counter over consecutive windows.

    Returns:
        The time at the end of each window, and the rate in each window. A window ends at the first
        sample that is at least `window_s` later than the end of the previous window.
    """
    if not samples:
        return [], []
    ends, rates_per_s = [], []
    previous = samples[0]
    for sample in samples[1:]:
        seconds = sample.at - previous.at
        if seconds >= window_s:
            increase = sample.gauges.get(name, 0.0) - previous.gauges.get(name, 0.0)
            ends.append(sample.at)
            rates_per_s.append(increase / seconds)
            previous = sample
    return ends, rates_per_s
