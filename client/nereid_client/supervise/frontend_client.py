"""HTTP requests that `nereid serve` sends to the frontend and the Triton server on this machine."""

import http.client
import json
import shlex
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from nereid_client.middleware.request_metrics import SUPERVISOR_USER_AGENT

_ANSWER_TIMEOUT_S = 600.0
_OPENER_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Connects without a proxy, because the servers run on this machine."""


@dataclass(frozen=True)
class Answer:
    """The response to an HTTP request.

    Attributes:
        status: the HTTP status, or None if there was no answer.
        text: the body, or the reason why there was no answer.
        is_late: whether there was no answer because the server took too long.
    """

    status: int | None
    text: str
    is_late: bool = False

    @property
    def is_success(self) -> bool:
        """Whether the model has answered, or will not answer because a client has unloaded it.

        A server that restarts has loaded the model again, but the frontend still refuses requests.
        """
        return self.status == 200 or (self.status == 404 and '"model_unloaded"' in self.text)


def fetch(
    url: str, timeout_s: float, body: dict[str, Any] | None = None, api_key: str = ""
) -> Answer:
    """Send an HTTP request, and return the answer.

    If `body` is given, send a POST request with a JSON body, else a GET request.

    Args:
        url: the URL.
        timeout_s: the time in seconds that the server may take.
        body: the body of a POST request. None sends a GET request.
        api_key: the API key, or "" to send none.
    """
    # The metrics of the frontend do not count requests with this user agent.
    headers: dict[str, str | bytes] = {
        "User-Agent": SUPERVISOR_USER_AGENT,
        "Content-Type": "application/json",
    }
    if api_key:
        # `http.client` can encode only Latin-1. The frontend compares keys as UTF-8.
        headers["Authorization"] = f"Bearer {api_key}".encode()
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # type: ignore[arg-type]
    try:
        with _OPENER_WITHOUT_PROXY.open(request, timeout=timeout_s) as answer:
            return Answer(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        # If the timeout expires while urllib connects, urllib wraps the TimeoutError in a URLError.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        return Answer(None, str(error), is_late=isinstance(cause, TimeoutError))


@dataclass(frozen=True)
class FrontendClient:
    """A client of the frontend.

    Attributes:
        url: the base URL, such as `http://127.0.0.1:9000`.
        model: the name of the served language model.
        api_key: the API key, "" if the frontend requires none.
    """

    url: str
    model: str
    api_key: str

    def get_status(self, path: str, timeout_s: float = 3.0) -> int | None:
        """Return the HTTP status of a GET request, or None if there was no answer."""
        return fetch(self.url + path, timeout_s).status

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a POST request with a JSON body, and return the answer."""
        return fetch(self.url + path, _ANSWER_TIMEOUT_S, body, self.api_key)

    def curl(self, path: str, body: dict[str, Any]) -> str:
        """Return a curl command that sends the same request as `post`."""
        key = ' -H "Authorization: Bearer $NEREID_API_KEY"' if self.api_key else ""
        data = shlex.quote(json.dumps(body))
        return f"curl {self.url}{path} -H 'Content-Type: application/json'{key} -d {data}"
