# SPDX-License-Identifier: Apache-2.0
"""Threads that compile grammars, with a time limit, and a cache of compiled grammars.

A running compilation cannot be stopped. If one exceeds the time limit, the pool abandons it: the
requests that wait for it get an error, its thread continues, and a new thread takes the next job.
If too many abandoned jobs are still running, the pool rejects new jobs until some of them end.
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

# The watcher waits at most this long for the next change if there are no jobs.
_IDLE_WAIT_S = 60.0

T = TypeVar("T")


@dataclass
class _Job(Generic[T]):
    """A job of the pool.

    Attributes:
        work: the function to call.
        deadline: the time.monotonic() value at which the pool abandons the job.
        future: receives the result or the error.
        is_running: whether a thread has started the job.
        is_abandoned: whether the future already has an error, so that the result is ignored.
    """

    work: Callable[[], T]
    deadline: float
    future: "Future[T]" = field(default_factory=Future)
    is_running: bool = False
    is_abandoned: bool = False


class CompilePool(Generic[T]):
    """Runs jobs in daemon threads, each job within a time limit."""

    def __init__(self, num_threads: int, timeout_s: float, max_abandoned: int = 4) -> None:
        """Create a pool. Its threads start when they are needed.

        Args:
            num_threads: the largest number of jobs that run at the same time, without abandoned
                ones.
            timeout_s: the time limit of a job, from `submit` to its end.
            max_abandoned: `submit` rejects jobs while this many abandoned jobs are still running.
        """
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
        """Run a job in a thread of the pool.

        Args:
            work: the function to call.

        Returns:
            A future with the function's result or error, or with the error of the time limit.

        Raises:
            RequestError: if too many abandoned jobs are still running.
        """
        job = _Job(work, time.monotonic() + self._timeout_s)
        with self._changed:
            if self._num_abandoned >= self._max_abandoned:
                raise RequestError(
                    f"grammar: the server cannot compile a grammar now, because "
                    f"{self._num_abandoned} grammars of other requests exceeded the limit of "
                    f"{self._timeout_s:g} s (grammar_timeout) and still occupy their threads. "
                    "Please try again later."
                )
            self._waiting.append(job)
            self._start_threads()
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """End the threads. Jobs that wait or run get an error."""
        with self._changed:
            self._is_closed = True
            open_jobs = [*self._waiting, *self._running]
            self._waiting.clear()
            for job in self._running:
                job.is_abandoned = True
            self._running.clear()
            self._changed.notify_all()
        for job in open_jobs:
            job.future.set_exception(
                RequestError(
                    "grammar: the grammar was not compiled, because the engine is shutting down."
                )
            )

    def _start_threads(self) -> None:
        """Start the watcher and a further worker, if they are needed. The caller has the lock."""
        if not self._has_watcher:
            self._has_watcher = True
            threading.Thread(target=self._watch, name="grammar-watch", daemon=True).start()
        if self._num_workers < min(self._num_threads, len(self._waiting) + len(self._running)):
            self._num_workers += 1
            threading.Thread(target=self._work, name="grammar-compile", daemon=True).start()

    def _work(self) -> None:
        """Run jobs until the pool is closed, or until the job of this thread is abandoned."""
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._waiting.popleft()
                job.is_running = True
                self._running.append(job)
            result, error = _attempt(job.work)
            with self._changed:
                if job.is_abandoned:
                    self._num_abandoned -= 1
                    return
                self._running.remove(job)
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)  # type: ignore[arg-type]

    def _watch(self) -> None:
        """Abandon jobs that reach their deadlines, until the pool is closed."""
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
                    next_deadline = min((job.deadline for job in jobs), default=now + _IDLE_WAIT_S)
                    self._changed.wait(next_deadline - now)
            for job in late:
                job.future.set_exception(
                    RequestError(
                        f"grammar: compiling takes longer than {self._timeout_s:g} s, which is "
                        "the limit (grammar_timeout). Lower the bounds and repetitions of the "
                        "grammar, or raise the limit."
                    )
                )

    def _abandon(self, job: _Job[T]) -> None:
        """Remove a late job from the pool. The caller has the lock."""
        job.is_abandoned = True
        if not job.is_running:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        self._num_abandoned += 1
        self._num_workers -= 1
        log.warning(
            "Compiling a grammar takes longer than %g s (grammar_timeout). Its request fails, and "
            "its thread continues until the compilation ends.",
            self._timeout_s,
        )
        if self._waiting:
            self._start_threads()


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a job's function and return its result, or None and the error for the requests."""
    try:
        return work(), None
    except NereidError as error:
        return None, error
    except BaseException as error:
        # Boundary: a job ends here. The grammar libraries are written in C++ and Rust, and their
        # panics are not subclasses of Exception.
        log.exception("The compiler of grammars failed.")
        return None, RequestError(f"grammar: the grammar library failed: {error}")


class ByteCache(Generic[T]):
    """A cache that drops the least recently used values. Several threads may use it."""

    def __init__(self, max_bytes: int) -> None:
        """Create a cache whose values take at most `max_bytes` together."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The size of all cached values in bytes."""
        return self._num_bytes

    def get(self, key: Hashable) -> T | None:
        """Return the cached value of a key, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Store a value of `num_bytes`, and drop the least recently used values above the limit.

        A value that is larger than the whole cache is not stored.
        """
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            if key in self._entries:
                self._num_bytes -= self._entries.pop(key)[1]
            self._entries[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, dropped_bytes) = self._entries.popitem(last=False)
                self._num_bytes -= dropped_bytes
