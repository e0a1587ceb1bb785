# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for something made by other threads."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any


class Preparation:
    """The futures of guides, by the names of the requests that wait for them."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, request_id: str, future: Future[Any]) -> None:
        """Watch a request's future."""
        self._futures[request_id] = future

    def drop(self, request_id: str) -> None:
        """Do not wait for a request any more. Unknown ones are ignored."""
        future = self._futures.pop(request_id, None)
        if future is not None:
            future.cancel()

    def take_done(self) -> list[tuple[str, Future[Any]]]:
        """The requests whose futures are done, each once; never blocks."""
        done = [(name, future) for name, future in self._futures.items() if future.done()]
        for name, _ in done:
            del self._futures[name]
        return done

    def wait(self, timeout_s: float) -> None:
        """Block until one is done, or the time is over; at once if there is none."""
        if self._futures:
            wait(self._futures.values(), timeout=timeout_s, return_when=FIRST_COMPLETED)
