"""How many requests a server has in work, so that it can finish what it has begun."""

import http.client
import json
import re
import urllib.error
import urllib.request

from nereid_client.supervise.warmup import Frontend

_GAUGE = re.compile(r"^nereid:num_requests(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_TIMEOUT_S = 5.0  # longer than the frontend waits for the server before it answers
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def num_unfinished(frontend: Frontend, metrics_url: str) -> int:
    """How many requests are in work, as far as anybody knows."""
    return count_in_work(frontend, metrics_page(metrics_url))


def count_in_work(frontend: Frontend, page: str | None) -> int:
    """The same, with the server's page of metrics at hand.

    The frontend counts its own of every kind. The executor counts those on the language model, the
    ones that came in by the Triton server's doors among them.
    """
    gauge = _GAUGE.search(page or "")
    return max(_of_frontend(frontend), int(float(gauge[1])) if gauge else 0)


def metrics_page(url: str) -> str | None:
    """The server's page of metrics, empty when it takes too long; None when nobody answers."""
    try:
        with _DIRECT.open(url, timeout=_TIMEOUT_S) as page:
            return str(page.read().decode(errors="replace"))
    except TimeoutError:
        return ""
    except urllib.error.URLError as error:
        return "" if isinstance(error.reason, TimeoutError) else None
    except (OSError, http.client.HTTPException):
        return None


def _of_frontend(frontend: Frontend) -> int:
    status, text = frontend.get("/health/ready", _TIMEOUT_S)
    if status is None:
        return 0
    try:
        return int(json.loads(text)["num_requests"])
    except (ValueError, KeyError, TypeError):
        return 0
