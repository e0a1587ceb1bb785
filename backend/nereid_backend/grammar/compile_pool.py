# SPDX-License-Identifier: Apache-2.0
"""Compiling off the engine's thread: workers, a time limit, and a cache.

A compilation cannot be broken off. One that exceeds its limit is abandoned: who waits for it gets
an error, its worker goes on alone, and another takes that worker's place. Too many abandoned ones,
and new work is refused until some have come to their end.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nereid_backend.errors import NereidError, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Job(Generic[T]):
    work: Callable[[], T]
    deadline: float
    future: "Future[T]" = field(default_factory=Future)
    is_running: bool = False
    is_abandoned: bool = False


class CompilePool(Generic[T]):
    """Runs work in daemon threads, each piece of it within a time limit.

    Args:
        num_threads: pieces of work at once, abandoned ones not counted.
        timeout_s: from `submit` to the end, waiting included.
        max_abandoned: abandoned pieces that may still run; beyond, `submit` refuses.
    """

    def __init__(self, num_threads: int, timeout_s: float, max_abandoned: int = 4) -> None:
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._max_abandoned = max_abandoned
        self._changed = threading.Condition()
        self._waiting: deque[_Job[T]] = deque()
        self._running: list[_Job[T]] = []
        self._num_abandoned = 0
        self._num_workers = 0
        self._has_watcher = False
        self._is_closed = False

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Have it done; an error of its own, or the limit's, comes in the future.

        Raises:
            RequestError: too many abandoned pieces of work are still running.
        """
        job = _Job(work, time.monotonic() + self._timeout_s)
        with self._changed:
            if self._num_abandoned >= self._max_abandoned:
                raise RequestError(
                    f"grammar: {self._num_abandoned} others have exceeded the limit of "
                    f"{self._timeout_s:g} s (grammar_timeout) and still occupy a thread each; "
                    "try again later"
                )
            self._waiting.append(job)
            self._start_threads()
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """Take no more work; what waits gets an error."""
        with self._changed:
            self._is_closed = True
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            for job in self._running:
                job.is_abandoned = True
            self._running.clear()
            self._changed.notify_all()
        for job in left:
            job.future.set_exception(RequestError("grammar: the engine is shutting down"))

    def _start_threads(self) -> None:
        if not self._has_watcher:
            self._has_watcher = True
            threading.Thread(target=self._watch, name="grammar-watch", daemon=True).start()
        if self._num_workers < min(self._num_threads, len(self._waiting) + len(self._running)):
            self._num_workers += 1
            threading.Thread(target=self._work, name="grammar-compile", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._waiting.popleft()
                job.is_running = True
                self._running.append(job)
            result, problem = _attempt(job.work)
            with self._changed:
                if job.is_abandoned:
                    self._num_abandoned -= 1
                    return
                self._running.remove(job)
            if problem is not None:
                job.future.set_exception(problem)
            else:
                job.future.set_result(result)  # type: ignore[arg-type]

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                jobs = [*self._waiting, *self._running]
                now = time.monotonic()
                late = [job for job in jobs if job.deadline <= now]
                for job in late:
                    self._abandon(job)
                if not late:
                    self._changed.wait(min((job.deadline for job in jobs), default=now + 60) - now)
            for job in late:
                job.future.set_exception(
                    RequestError(
                        f"grammar: takes longer than {self._timeout_s:g} s to compile, which is "
                        "the limit (grammar_timeout); make its repetitions and bounds smaller"
                    )
                )

    def _abandon(self, job: _Job[T]) -> None:
        job.is_abandoned = True
        if not job.is_running:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        self._num_abandoned += 1
        self._num_workers -= 1
        log.warning("a grammar exceeds its %g s and keeps its thread", self._timeout_s)
        if self._waiting:
            self._start_threads()


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except NereidError as error:
        return None, error
    except BaseException as error:
        log.exception("a grammar made its compiler fail")
        return None, RequestError(f"grammar: its compiler failed: {error}")


class ByteCache(Generic[T]):
    """What was used last, up to a number of bytes. Safe for several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What the held things take together."""
        return self._num_bytes

    def get(self, key: Hashable) -> T | None:
        """The thing of this key, if it is held."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Hold a thing, and let go of those that were used longest ago; not one above the limit."""
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            if key in self._held:
                self._num_bytes -= self._held.pop(key)[1]
            self._held[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._held.popitem(last=False)[1][1]
