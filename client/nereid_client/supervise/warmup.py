"""Wait until the language model has loaded and answered its first request."""

import threading
import time
from typing import Any

from nereid_client.supervise.frontend_client import FrontendClient

_POLL_EVERY_S = 0.1


class WarmUp(threading.Thread):
    """A thread that sends requests until the language model answers one.

    Attributes:
        stage: a description of the current stage of the start.
        curl: a shell command with a request that works. None until the model has answered.
        failure: the reason why the model cannot answer, or None if there is none.
        is_ready: set as soon as the frontend reports that the server is ready.
    """

    def __init__(self, frontend: FrontendClient) -> None:
        super().__init__(daemon=True)
        self.is_ready = threading.Event()
        self.stage = "loading the model"
        self.curl: str | None = None
        self.failure: str | None = None
        self._frontend = frontend

    def run(self) -> None:
        """Wait until the model is ready, then request one token."""
        while self._frontend.get_status("/health/ready") != 200:
            time.sleep(_POLL_EVERY_S)
        self.is_ready.set()
        self.stage = "waiting for the first response"
        chat = {
            "model": self._frontend.model,
            "messages": [{"role": "user", "content": "Hello! Who are you?"}],
        }
        status, text = self._first_response("/v1/chat/completions", chat)
        if status == 400:  # the model has no chat template, but it can complete a text
            plain = {"model": self._frontend.model, "prompt": "Once upon a time"}
            status, text = self._first_response("/v1/completions", plain)
        if status != 200:
            self.failure = f"the model cannot answer its first request: {text}"

    def _first_response(self, path: str, body: dict[str, Any]) -> tuple[int | None, str]:
        status, text = self._frontend.post(path, {**body, "max_tokens": 1})
        while status in (None, 429, 503):
            time.sleep(_POLL_EVERY_S)
            status, text = self._frontend.post(path, {**body, "max_tokens": 1})
        if status == 200:
            self.curl = self._frontend.curl(path, body)
        return status, text
