"""Detect a Triton server that hangs: its processes run, but no request makes progress.

A hang is suspected if requests run, but none of Nereid's metrics has changed for a while or the
metrics cannot be read. A client that reads slowly can cause this too. Therefore a small request is
sent to the server. If the server answers it in time, even with an error, it does not hang.
"""

import threading
import time

from nereid_client.supervise.frontend_client import FrontendClient, fetch
from nereid_client.supervise.unfinished_requests import count_running, read_metrics

_CHECKS_PER_LIMIT = 20
_MIN_CHECK_INTERVAL_S = 0.2
_MAX_CHECK_INTERVAL_S = 5.0
_PROBE = {"text_input": "a", "max_tokens": 1}


class HangWatch(threading.Thread):
    """A thread that observes one server until `stop` is called.

    Args:
        frontend: the frontend, which counts its running requests.
        metrics_url: the URL of the server's metrics. A server without metrics never seems to hang.
        generate_url: the URL to which the small request is sent.
        limit_s: the setting hang_timeout. One half is the time without a change of the metrics
            after which a hang is suspected, the other half is the timeout of the small request.

    Attributes:
        finding: a description of the hang, or None if the server does not hang.
    """

    def __init__(
        self, frontend: FrontendClient, metrics_url: str, generate_url: str, limit_s: float
    ) -> None:
        super().__init__(daemon=True)
        self.finding: str | None = None
        self._frontend = frontend
        self._metrics_url = metrics_url
        self._generate_url = generate_url
        self._limit_s = limit_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def run(self) -> None:
        """Check the server regularly until it hangs or `stop` is called."""
        interval_s = self._limit_s / _CHECKS_PER_LIMIT
        interval_s = min(max(interval_s, _MIN_CHECK_INTERVAL_S), _MAX_CHECK_INTERVAL_S)
        last: str | None = None
        unchanged_since = time.monotonic()
        while not self._stopped.wait(interval_s):
            page = read_metrics(self._metrics_url)
            numbers = _nereid_metrics(page)
            has_changed = numbers is None or numbers != last
            last = numbers
            if has_changed or not count_running(self._frontend, page):
                unchanged_since = time.monotonic()
            elif time.monotonic() - unchanged_since >= self._limit_s / 2:
                # Any answer proves that the server works, even an error. If the server has ended,
                # the supervisor notices.
                if fetch(self._generate_url, self._limit_s / 2, _PROBE).is_late:
                    self.finding = (
                        "tritonserver hangs: requests are running, but its metrics have not "
                        f"changed for {self._limit_s / 2:g} s, and it did not answer a small "
                        "request in the same time"
                    )
                    return
                unchanged_since = time.monotonic()


def _nereid_metrics(page: str | None) -> str | None:
    """Return the lines with Nereid's own metrics, or None if the metrics could not be read."""
    if page is None:
        return None
    return "\n".join(line for line in page.splitlines() if line.startswith("nereid:"))
