# SPDX-License-Identifier: Apache-2.0
"""The running compilations of grammars. Requests with equal grammars share one compilation."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from nereid_backend.core.grammar import GrammarSpec

T = TypeVar("T")


@dataclass
class _Compilation(Generic[T]):
    """A running compilation, and the number of requests that wait for the compilation's result."""

    future: Future[T]
    num_waiting: int = 0


class SharedCompilations(Generic[T]):
    """Finds the running compilation of a grammar, and stops it if no request waits for it.

    Several threads may call the methods.
    """

    def __init__(self) -> None:
        self._running: dict[GrammarSpec, _Compilation[T]] = {}
        self._lock = threading.Lock()

    def join(
        self, spec: GrammarSpec, request_future: "Future[Any]", start: Callable[[], "Future[T]"]
    ) -> "Future[T]":
        """Let a request wait for the compilation of a grammar, and return the compilation's future.

        If no compilation of this grammar is running, start one. If all requests that wait for a
        compilation are cancelled, the compilation is stopped.

        Args:
            spec: the grammar.
            request_future: the future of the request.
            start: starts a compilation, and returns its future.
        """
        with self._lock:
            compilation = self._running.get(spec)
            is_new = compilation is None
            if compilation is None:
                compilation = self._running[spec] = _Compilation(start())
            compilation.num_waiting += 1
        # If a future is already done, its callback is called immediately. The callbacks below need
        # the lock, so they are added after the lock is released.
        if is_new:
            compilation.future.add_done_callback(partial(self._forget, spec, compilation))
        request_future.add_done_callback(partial(self._stop_waiting, spec, compilation))
        return compilation.future

    def _stop_waiting(
        self, spec: GrammarSpec, compilation: _Compilation[T], request_future: "Future[Any]"
    ) -> None:
        """Reduce the number of requests that wait for a compilation by one.

        If the request was cancelled and no other request waits, stop the compilation.

        Args:
            spec: the grammar.
            compilation: the compilation of the grammar. Its number of waiting requests is reduced.
            request_future: the future of the request, which is done.
        """
        with self._lock:
            compilation.num_waiting -= 1
            is_unwanted = request_future.cancelled() and compilation.num_waiting == 0
            if is_unwanted:
                # The compilation is about to be cancelled, so remove it before the lock is
                # released. Otherwise, a new request could still join the compilation.
                self._remove(spec, compilation)
        if is_unwanted:
            compilation.future.cancel()

    def _forget(
        self, spec: GrammarSpec, compilation: _Compilation[T], _future: "Future[T]"
    ) -> None:
        """Remove a compilation that has ended. `_future` is the future of the compilation.

        A later request with this grammar uses the cached grammar, or starts a new compilation.
        """
        with self._lock:
            self._remove(spec, compilation)

    def _remove(self, spec: GrammarSpec, compilation: _Compilation[T]) -> None:
        """Remove a compilation from the running compilations. The caller must hold the lock."""
        if self._running.get(spec) is compilation:
            del self._running[spec]
