# SPDX-License-Identifier: Apache-2.0
"""The requests whose grammars are still being compiled by other threads."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple


class GrammarCompilation(NamedTuple):
    """The compilation of a request's grammar.

    Attributes:
        request_id: the id of the request.
        future: its result is the guide of the request, and its exception is the reason why the
            grammar could not be compiled.
        time_added: the value of time.monotonic() when the compilation was started.
    """

    request_id: str
    future: Future[Any]
    time_added: float


class PendingGrammars:
    """Stores the compilation of each request whose grammar is being compiled."""

    def __init__(self) -> None:
        self._compilations: dict[str, GrammarCompilation] = {}

    def __contains__(self, request_id: str) -> bool:
        """Return whether the grammar of a request is still being compiled."""
        return request_id in self._compilations

    def add(self, request_id: str, future: Future[Any]) -> None:
        """Store a future, whose result will determine which tokens the request may generate."""
        compilation = GrammarCompilation(request_id, future, time.monotonic())
        self._compilations[request_id] = compilation

    def drop(self, request_id: str) -> None:
        """Cancel and remove the future of a request. Do nothing if the request has no future."""
        compilation = self._compilations.pop(request_id, None)
        if compilation is not None:
            compilation.future.cancel()

    def take_done(self) -> list[GrammarCompilation]:
        """Remove and return the compilations that are finished, without waiting."""
        done = [each for each in self._compilations.values() if each.future.done()]
        for compilation in done:
            del self._compilations[compilation.request_id]
        return done

    def wait(self, timeout_s: float) -> None:
        """Block until a future is finished or `timeout_s` seconds have passed.

        Return at once if there are no futures.
        """
        futures = [compilation.future for compilation in self._compilations.values()]
        if futures:
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
