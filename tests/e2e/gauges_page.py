"""The server's page of metrics, and waiting for what it is to say.

It is written every tenth of a second: what it says may be of a moment ago.
"""

import re
import urllib.request

from fakes.live_frontend import wait_for


def gauge_of(port):
    """A function from a gauge's name to its value on this page."""

    def read(name):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        return float(re.search(rf"^nereid:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])

    return read


def is_busy(gauge):
    """Only a busy page proves the idle one behind it."""
    return gauge("num_requests") > 0 and gauge("kv_cache_blocks_used") > 0


def is_idle(gauge):
    return gauge("num_requests") == 0 and gauge("kv_cache_blocks_used") == 0


def wait_until_given_up(gauge, num_before, number=1):
    """Wait until nothing is in use, and so many more requests have ended because nobody waited.

    However long that takes on a busy machine, what ran to its own end is not counted there.

    Args:
        gauge: reads one.
        num_before: `num_given_up` before the first of them was sent.
        number: of requests.
    """
    wait_for(lambda: is_idle(gauge))
    wait_for(lambda: num_given_up(gauge) >= num_before + number)


def num_given_up(gauge):
    """Requests whose client had gone before their end."""
    return gauge("requests_disconnected_total")
