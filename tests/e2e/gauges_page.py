"""Functions that read the server's metrics page, and functions that wait for a value on it.

The server updates the metrics every tenth of a second, so a value can be slightly out of date.
"""

import re
import urllib.request

from fakes.live_frontend import wait_for


def gauge_of(port):
    """Return a function that reads a metric, given its name, from the metrics page at this port."""

    def read(name):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        return float(re.search(rf"^nereid:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])

    return read


def is_busy(gauge):
    """Return whether the metrics show a running request.

    A test waits for a busy engine first, because an idle engine proves that a request has ended
    only if the request was seen running before.
    """
    return gauge("num_requests") > 0 and gauge("kv_cache_blocks_used") > 0


def is_idle(gauge):
    """Return whether the metrics show no running request and no used block of the KV cache."""
    return gauge("num_requests") == 0 and gauge("kv_cache_blocks_used") == 0


def wait_until_given_up(gauge, num_before, number=1):
    """Wait until the engine is idle and has ended `number` requests because their clients left.

    Requests that ran to their normal end do not count, so the result does not depend on the speed
    of the machine.

    Args:
        gauge: the function that reads a metric.
        num_before: the value of `num_given_up` before the first of the requests was sent.
        number: the number of requests whose clients left.
    """
    wait_for(lambda: is_idle(gauge))
    wait_for(lambda: num_given_up(gauge) >= num_before + number)


def num_given_up(gauge):
    """Return the number of requests whose client disconnected before the request ended."""
    return gauge("requests_disconnected_total")
