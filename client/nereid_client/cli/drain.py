"""Letting a server finish what it has begun."""

import json
import re
import urllib.request

from nereid_client.cli.warmup import Frontend

_GAUGE = re.compile(r"^nereid:num_requests\{[^}]*\} (\S+)$", re.MULTILINE)
_TIMEOUT_S = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def num_unfinished(frontend: Frontend, metrics_url: str) -> int:
    """How many requests are in work, as far as anybody knows.

    The frontend counts its own of every kind. The executor counts those on the language model, the
    ones that came in by the Triton server's doors among them.
    """
    return max(_of_frontend(frontend), _of_executor(metrics_url))


def _of_frontend(frontend: Frontend) -> int:
    status, text = frontend.get("/health/ready", _TIMEOUT_S)
    if status is None:
        return 0
    try:
        return int(json.loads(text)["num_requests"])
    except (ValueError, KeyError, TypeError):
        return 0


def _of_executor(url: str) -> int:
    try:
        with _DIRECT.open(url, timeout=_TIMEOUT_S) as page:
            gauge = _GAUGE.search(page.read().decode(errors="replace"))
    except OSError:  # there are no metrics, or no server any more
        return 0
    return int(float(gauge[1])) if gauge else 0
