"""Waits until the language model has been loaded and has answered its first request."""

import threading
import time
from typing import Any

from nereid_client.supervise.frontend_client import Answer, FrontendClient

_POLL_EVERY_S = 0.1
_UNAVAILABLE = (None, 429, 503)  # None means that the frontend did not answer
# The path and the body of each request. The field `model` is added to the body.
_CHAT_REQUEST: tuple[str, dict[str, Any]] = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello! Who are you?"}]},
)
_TEXT_REQUEST: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "Once upon a time"})


class WarmUp(threading.Thread):
    """A thread that sends requests until the language model answers.

    Attributes:
        stage: a description of the current stage of the start.
        curl: a shell command with a request that works. None until the model has answered.
        failure: the reason why the model cannot answer, or None if the model has not failed.
        is_ready: an event that is set when the frontend reports that the server is ready.
    """

    def __init__(self, frontend: FrontendClient) -> None:
        super().__init__(daemon=True)
        self.is_ready = threading.Event()
        self.stage = "loading the model"
        self.curl: str | None = None
        self.failure: str | None = None
        self._frontend = frontend

    def run(self) -> None:
        """Wait until the server is ready, and then request one token from the language model.

        Mutates: `stage`, which names the current step, and `is_ready`. If the model answers, or if
            a client has unloaded the model, `curl` becomes a shell command for the request. If the
            model answers with an error, `failure` becomes the reason.
        """
        # There is no time limit, because loading a large model can take minutes. This thread is a
        # daemon, so the thread ends when `nereid serve` ends, for example after a failure.
        while self._frontend.get_status("/health/ready") != 200:
            time.sleep(_POLL_EVERY_S)
        self.is_ready.set()
        self.stage = "waiting for the first response"
        path, fields = _CHAT_REQUEST
        answer = self._request_token(path, fields)
        if answer.status == 400:  # the model has no chat template, but it can complete a text
            path, fields = _TEXT_REQUEST
            answer = self._request_token(path, fields)
        if answer.is_success:
            self.curl = self._frontend.curl(path, {"model": self._frontend.model, **fields})
        else:
            self.failure = f"the model cannot answer its first request: {answer.text}"

    def _request_token(self, path: str, fields: dict[str, Any]) -> Answer:
        """Request one token, and repeat the request while the server is unavailable."""
        one_token = {"model": self._frontend.model, **fields, "max_tokens": 1}
        answer = self._frontend.post(path, one_token)
        while answer.status in _UNAVAILABLE:
            time.sleep(_POLL_EVERY_S)
            answer = self._frontend.post(path, one_token)
        return answer
