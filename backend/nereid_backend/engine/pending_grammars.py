# SPDX-License-Identifier: Apache-2.0
"""The requests whose grammars are still being compiled by other threads."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple


class CompiledGrammar(NamedTuple):
    """The finished compilation of a request's grammar.

    Attributes:
        request_id: the id of the request.
        future: a finished future. Its result is the guide of the request, and its exception is the
            reason why the grammar could not be compiled.
        time_added: the value of time.monotonic() when the compilation was started.
    """

    request_id: str
    future: Future[Any]
    time_added: float


class PendingGrammars:
    """Stores one future for each request whose grammar is being compiled."""

    def __init__(self) -> None:
        # `_futures` and `_added` have the same request ids as keys.
        self._futures: dict[str, Future[Any]] = {}
        self._added: dict[str, float] = {}  # the times of the calls of `add`

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, request_id: str) -> bool:
        """Return whether the grammar of a request is still being compiled."""
        return request_id in self._futures

    def add(self, request_id: str, future: Future[Any]) -> None:
        """Store a future, whose result will determine which tokens the request may generate."""
        self._futures[request_id] = future
        self._added[request_id] = time.monotonic()

    def drop(self, request_id: str) -> None:
        """Cancel and remove the future of a request. Do nothing if the request has no future."""
        future = self._futures.pop(request_id, None)
        if future is not None:
            del self._added[request_id]
            future.cancel()

    def take_done(self) -> list[CompiledGrammar]:
        """Remove and return the compilations that are finished, without waiting."""
        done_ids = [request_id for request_id, future in self._futures.items() if future.done()]
        return [
            CompiledGrammar(request_id, self._futures.pop(request_id), self._added.pop(request_id))
            for request_id in done_ids
        ]

    def wait(self, timeout_s: float) -> None:
        """Block until a future is finished or `timeout_s` seconds have passed.

        Return at once if there are no futures.
        """
        if self._futures:
            wait(self._futures.values(), timeout=timeout_s, return_when=FIRST_COMPLETED)
