"""Counts the running requests, so that a server can finish the requests before it stops."""

import json
import re

from nereid_client.supervise.frontend_client import FrontendClient, fetch

_GAUGE = re.compile(r"^nereid:num_requests(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
# This timeout must be longer than the timeout of the route /health/ready, which waits for the
# Triton server.
_TIMEOUT_S = 5.0


def count_unfinished(frontend: FrontendClient, metrics_url: str) -> int:
    """Return the number of running requests."""
    return count_running(frontend, read_metrics(metrics_url))


def count_running(frontend: FrontendClient, page: str | None) -> int:
    """Return the number of running requests.

    The frontend counts all requests that it receives. The executors of the language models count
    their own requests, including requests that clients send directly to the Triton server. Many
    requests are in both counts, so the larger count is returned.

    Args:
        frontend: the frontend.
        page: the text of the Triton server's metrics. None if the metrics could not be read.
    """
    in_executors = sum(int(float(count)) for count in _GAUGE.findall(page or ""))
    return max(_count_in_frontend(frontend), in_executors)


def read_metrics(url: str) -> str | None:
    """Return the text of the Triton server's metrics.

    Return "" if the server takes too long to answer, and None if it does not accept connections.
    """
    answer = fetch(url, _TIMEOUT_S)
    if answer.is_late:
        return ""
    return answer.text if answer.status == 200 else None


def _count_in_frontend(frontend: FrontendClient) -> int:
    try:
        return int(
            json.loads(fetch(f"{frontend.url}/health/ready", _TIMEOUT_S).text)["num_requests"]
        )
    except (ValueError, KeyError, TypeError):  # the frontend did not answer, or it is stopping
        return 0
