# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars in threads. A grammar that may be slow is tested in a child process first.

A compilation in a thread cannot be stopped. For this reason, a thread compiles only two types of
grammars:

- quick grammars, which are known to compile within a fraction of a second;
- grammars that have passed a trial. In a trial, a child process with limits of time and memory
  compiles the grammar (trial_compiler.py). A separate thread then compiles these grammars, so that
  quick grammars do not wait for them.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import EngineError, NereidError, RequestError
from nereid_backend.grammar.compile_cost import is_quick
from nereid_backend.grammar.trials.trial_compiler import TrialCompiler

log = logging.getLogger(__name__)

T = TypeVar("T")


class CompilePool(Generic[T]):
    """Compiles the grammars that requests contain, in threads and child processes."""

    def __init__(self, num_threads: int, trials: TrialCompiler) -> None:
        """Create a pool. Its threads start when they are needed.

        Args:
            num_threads: the largest number of quick grammars that are compiled at the same time.
            trials: compiles a grammar in a child process first (a trial).
        """
        self._trials = trials
        # The threads that compile quick grammars.
        self._quick_executor = ThreadPoolExecutor(num_threads, "grammar-quick")
        # This thread compiles the grammars whose trials were successful.
        self._tested_executor = ThreadPoolExecutor(1, "grammar-tried")

    def submit(self, spec: GrammarSpec, work: Callable[[], T]) -> "Future[T]":
        """Start to compile a grammar, without blocking.

        A quick grammar is compiled immediately. Any other grammar first needs a successful trial: a
        child process compiles the grammar within limits of time and memory.

        Args:
            spec: the grammar.
            work: the function that compiles the grammar. A thread calls this function.

        Returns:
            A future with the result of `work`, or with a NereidError. Cancelling the future stops
            the compilation, unless a thread is already running `work`.

        Raises:
            CapacityError: if too many grammars are waiting for their trials.
        """
        result: Future[T] = Future()
        if is_quick(spec):
            self._run_in_thread(self._quick_executor, work, result)
            return result
        trial = self._trials.submit(spec)
        # If `result` is cancelled, stop the trial, because no request needs the grammar any more.
        _forward_cancellation(source=result, target=trial)
        trial.add_done_callback(partial(self._compile_after_trial, work, result))
        return result

    def close(self) -> None:
        """Kill the child processes that run trials, and cancel the waiting compilations.

        A compilation that is running in a thread cannot be stopped, so the thread completes it.
        """
        self._trials.close()
        for executor in (self._quick_executor, self._tested_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    def _compile_after_trial(
        self, work: Callable[[], T], result: "Future[T]", trial: "Future[None]"
    ) -> None:
        """Compile a grammar in a thread if its trial was successful.

        Args:
            work: the function that compiles the grammar.
            result: receives the compiled grammar. If the trial failed, `result` receives the error
                of the trial. If the trial was cancelled, `result` is cancelled.
            trial: the trial, which has ended.
        """
        if trial.cancelled():
            result.cancel()
            return
        error = trial.exception()
        if error is None:
            self._run_in_thread(self._tested_executor, work, result)
        else:
            _set_error(result, error)

    def _run_in_thread(
        self, executor: ThreadPoolExecutor, work: Callable[[], T], result: "Future[T]"
    ) -> None:
        """Call `work` in a thread of the executor, and store the return value or error in `result`.

        Do not call `work` if `result` is cancelled first. If the pool is closed before the thread
        calls `work`, store an error in `result`.
        """
        try:
            job = executor.submit(_store_outcome, work, result)
        except RuntimeError:  # the executor is shut down
            _set_error(result, _closing_error())
            return
        # `close` cancels the jobs that wait for a thread. Requests may still wait for the result.
        job.add_done_callback(partial(_fail_if_cancelled, result))


def _fail_if_cancelled(result: "Future[T]", job: "Future[None]") -> None:
    """Store an error in `result` if `job` was cancelled because the pool was closed."""
    if job.cancelled():
        _set_error(result, _closing_error())


def _store_outcome(work: Callable[[], T], result: "Future[T]") -> None:
    """Call `work`, and store its return value or its exception in the future `result`.

    `work` compiles a grammar. If `result` has been cancelled, do nothing.
    """
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except NereidError as error:
        result.set_exception(error)
    except BaseException as error:
        # A request waits for `result`, so every error must be stored there. A panic in the Rust
        # library raises a BaseException, which `except Exception` would not catch.
        log.exception("The compiler of grammars failed.")
        result.set_exception(RequestError(f"grammar: the grammar library failed: {error}"))


def _forward_cancellation(source: "Future[T]", target: "Future[None]") -> None:
    """Cancel the future `target` as soon as the future `source` is cancelled."""

    def cancel_target(done_source: "Future[T]") -> None:
        if done_source.cancelled():
            target.cancel()

    source.add_done_callback(cancel_target)


def _set_error(result: "Future[T]", error: BaseException) -> None:
    """Store an error in a future, unless the future has been cancelled."""
    if not result.cancelled() and result.set_running_or_notify_cancel():
        result.set_exception(error)


def _closing_error() -> EngineError:
    return EngineError(
        "grammar: the grammar was not compiled, because the engine is shutting down."
    )
