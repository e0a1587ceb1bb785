"""Wait until a model that is being loaded gives its first answer."""

import http.client
import json
import shlex
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

_POLL_EVERY_S = 0.1
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Frontend:
    """Where the OpenAI API is, and how to ask it.

    Attributes:
        url: such as `http://127.0.0.1:9000`.
        model: the served model's name.
        api_key: empty when none is wanted.
    """

    url: str
    model: str
    api_key: str

    def get_status(self, path: str, timeout_s: float = 3.0) -> int | None:
        """The HTTP status of a GET; None when nobody answers."""
        return self.get(path, timeout_s)[0]

    def get(self, path: str, timeout_s: float = 3.0) -> tuple[int | None, str]:
        """Status and text of a GET's answer; status None when nobody answers."""
        return self._ask(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int | None, str]:
        """Status and text of a POST's answer; status None when nobody answers."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return self._ask(request, _ANSWER_TIMEOUT_S)

    def curl(self, path: str, body: dict[str, Any]) -> str:
        """The same POST as one shell command to copy."""
        key = ' -H "Authorization: Bearer $NEREID_API_KEY"' if self.api_key else ""
        data = shlex.quote(json.dumps(body))
        return f"curl {self.url}{path} -H 'Content-Type: application/json'{key} -d {data}"

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> tuple[int | None, str]:
        try:
            with _DIRECT.open(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return None, str(error)


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies are for elsewhere


class WarmUp(threading.Thread):
    """Asks until there is an answer.

    Attributes:
        stage: what is being waited for.
        curl: a command that works, once the model has answered.
        failure: why it never will.
    """

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(daemon=True)
        self.stage = "loading the model"
        self.curl: str | None = None
        self.failure: str | None = None
        self._frontend = frontend

    def run(self) -> None:
        """Poll until the model is ready, then let it say one token."""
        while self._frontend.get_status("/health/ready") != 200:
            time.sleep(_POLL_EVERY_S)
        self.stage = "waiting for the first answer"
        chat = {
            "model": self._frontend.model,
            "messages": [{"role": "user", "content": "Hello! Who are you?"}],
        }
        status, text = self._first_answer("/v1/chat/completions", chat)
        if status == 400:  # a model without a chat template can still continue a text
            plain = {"model": self._frontend.model, "prompt": "Once upon a time"}
            status, text = self._first_answer("/v1/completions", plain)
        if status != 200:
            self.failure = f"the model can't answer: {text}"

    def _first_answer(self, path: str, body: dict[str, Any]) -> tuple[int | None, str]:
        status, text = self._frontend.post(path, {**body, "max_tokens": 1})
        while status in (None, 429, 503):
            time.sleep(_POLL_EVERY_S)
            status, text = self._frontend.post(path, {**body, "max_tokens": 1})
        if status == 200:
            self.curl = self._frontend.curl(path, body)
        return status, text
