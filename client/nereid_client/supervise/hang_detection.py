"""Detects a model that hangs: its processes are alive, but they do not answer requests.

Test requests are sent only while requests of clients are running, because a hang without requests
harms nobody. The server's metrics do not prove that the server works. The server can continue to
generate tokens for old requests while its tokenizer hangs and accepts no new requests.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_client.supervise.frontend_client import FrontendClient, fetch
from nereid_client.supervise.unfinished_requests import count_running, read_metrics

_CHECKS_PER_LIMIT = 4
_MIN_CHECK_INTERVAL_S = 0.2
_MAX_CHECK_INTERVAL_S = 30.0


@dataclass(frozen=True)
class Probe:
    """A small test request to one model.

    Attributes:
        model: the name of the model in the model repository.
        path: the path of the request at the Triton server's HTTP endpoint.
        body: the JSON body.
    """

    model: str
    path: str
    body: Mapping[str, Any]


def _tensor(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}


# The scheduler serves clients with different client_ids in turn. The test request has its own
# client_id, so it does not wait behind all requests of another client.
TEST_SAMPLING_PARAMETERS = json.dumps({"max_tokens": 1, "client_id": "nereid-serve"})
PROBES = {
    "llm": Probe(
        "llm",
        "/v2/models/llm/generate",
        {"text_input": "a", "sampling_parameters": TEST_SAMPLING_PARAMETERS},
    ),
    "embedding": Probe(
        "embedding", "/v2/models/embedding/infer", {"inputs": [_tensor("texts", "a")]}
    ),
    "rerank": Probe(
        "rerank",
        "/v2/models/rerank/infer",
        {"inputs": [_tensor("query", "a"), _tensor("documents", "a")]},
    ),
}
"""Maps the name of each model to its test request."""


class HangWatch(threading.Thread):
    """A thread that observes one model until `stop` is called.

    Attributes:
        finding: a description of the hang, or None if the model does not hang.
    """

    def __init__(
        self,
        frontend: FrontendClient,
        metrics_url: str,
        http_url: str,
        probe: Probe,
        limit_s: float,
    ) -> None:
        """Create the thread. The method `start` starts it.

        Args:
            frontend: the frontend, which counts its running requests.
            metrics_url: the URL of the server's metrics, which count the language model's requests.
            http_url: the base URL of the Triton server's HTTP endpoint.
            probe: the test request. Any response proves that the model works, even an error.
            limit_s: the setting hang_timeout, in seconds. The thread sends a test request after
                each quarter of this time, but at least every 30 s. A test request may take three
                quarters of this time.
        """
        super().__init__(daemon=True)
        self.finding: str | None = None
        self._frontend = frontend
        self._metrics_url = metrics_url
        self._probe = probe
        self._url = http_url + probe.path
        self._limit_s = limit_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def run(self) -> None:
        """Check the model regularly until it hangs or `stop` is called."""
        interval_s = self._limit_s / _CHECKS_PER_LIMIT
        interval_s = min(max(interval_s, _MIN_CHECK_INTERVAL_S), _MAX_CHECK_INTERVAL_S)
        while self.finding is None and not self._stopped.wait(interval_s):
            try:
                self.finding = self._check()
            except MemoryError:  # the next check may succeed, so the error is ignored
                continue

    def _check(self) -> str | None:
        """Return a description of the hang, or None if the model answers or has no requests."""
        if not self._may_hang():
            return None
        # A hang must be detected within `_limit_s` seconds. A hang can begin just after a check,
        # and the next check starts up to `longest_delay_s` seconds later. The remaining time is the
        # timeout of the request.
        longest_delay_s = self._limit_s / _CHECKS_PER_LIMIT
        timeout_s = self._limit_s - longest_delay_s
        answer = fetch(self._url, timeout_s, dict(self._probe.body))
        if not answer.is_late:
            return None
        return (
            f"tritonserver hangs: the model {self._probe.model} did not answer a small request "
            f"within {timeout_s:g} s while requests were running (--hang-timeout)"
        )

    def _may_hang(self) -> bool:
        """Return whether a check is needed: the server has requests, or it sends no metrics.

        If the server has ended, return False.
        """
        page = read_metrics(self._metrics_url)
        if page is None:  # the server has ended, and the supervisor detects this itself
            return False
        is_late = page == ""
        return is_late or count_running(self._frontend, page) > 0
