"""A client of the frontend, for the checks of `nereid serve`."""

import http.client
import json
import shlex
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from nereid_client.middleware.request_metrics import SUPERVISOR_USER_AGENT

_ANSWER_TIMEOUT_S = 600.0
# The frontend does not count requests with this user agent in its metrics.
_HEADERS = {"User-Agent": SUPERVISOR_USER_AGENT}


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
        """Return the HTTP status of a GET, or None if there was no answer."""
        return self.get(path, timeout_s)[0]

    def get(self, path: str, timeout_s: float = 3.0) -> tuple[int | None, str]:
        """Return the HTTP status and the text of a GET, or (None, reason) if it failed."""
        return self._send(urllib.request.Request(self.url + path, headers=_HEADERS), timeout_s)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int | None, str]:
        """Return the HTTP status and the text of a POST, or (None, reason) if it failed."""
        headers = {**_HEADERS, "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return self._send(request, _ANSWER_TIMEOUT_S)

    def curl(self, path: str, body: dict[str, Any]) -> str:
        """Return a shell command that sends the same POST."""
        key = ' -H "Authorization: Bearer $NEREID_API_KEY"' if self.api_key else ""
        data = shlex.quote(json.dumps(body))
        return f"curl {self.url}{path} -H 'Content-Type: application/json'{key} -d {data}"

    def _send(self, request: urllib.request.Request, timeout_s: float) -> tuple[int | None, str]:
        """Send a request. Return the status and the text of the response."""
        try:
            with _DIRECT.open(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return None, str(error)


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Connects without a proxy, because the frontend runs on this machine."""
