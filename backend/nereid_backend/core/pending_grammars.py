# SPDX-License-Identifier: Apache-2.0
"""The requests whose grammars are still being compiled by other threads."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any


class PendingGrammars:
    """The futures of the guides of requests, by request id."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, request_id: str, future: Future[Any]) -> None:
        """Store the future of the guide of a request."""
        self._futures[request_id] = future

    def drop(self, request_id: str) -> None:
        """Cancel and remove the future of a request. Do nothing if the request has no future."""
        future = self._futures.pop(request_id, None)
        if future is not None:
            future.cancel()

    def take_done(self) -> list[tuple[str, Future[Any]]]:
        """Remove the finished futures and return them with their request ids. Do not wait."""
        done = [(name, future) for name, future in self._futures.items() if future.done()]
        for name, _ in done:
            del self._futures[name]
        return done

    def wait(self, timeout_s: float) -> None:
        """Block until a future is finished or `timeout_s` seconds have passed.

        Return at once if there are no futures.
        """
        if self._futures:
            wait(self._futures.values(), timeout=timeout_s, return_when=FIRST_COMPLETED)
