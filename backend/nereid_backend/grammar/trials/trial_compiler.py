# SPDX-License-Identifier: Apache-2.0
"""Sends grammars to a child process that tests whether they can be compiled (trial_process.py).

Such a test is called a trial. A trial finds out whether the grammar libraries can compile a grammar
within the limits of time and memory. A trial that takes too long is killed.

After a successful trial, the engine compiles the grammar again. The child process does not send the
compiled grammar to the engine, because llguidance cannot serialise compiled grammars, and xgrammar
needs 60 times as long to serialise a grammar as to compile it.
"""

import contextlib
import itertools
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.grammar.trials.trial_process import MAX_TIMEOUT_S, Outcome
from nereid_backend.grammar.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_MODULE = "nereid_backend.grammar.trials.trial_process"
# The largest number of grammars that may wait for their test in a child process.
_MAX_JOBS = 256
_STOP_TIMEOUT_S = 5.0
# If the process has an unfinished job, it must send a message within the time limit of a trial plus
# `_EXTRA_S` seconds. Otherwise, the process is considered to be hanging and is killed. The
# additional seconds also allow the process to load its libraries.
_EXTRA_S = 60.0


class _ClosedError(OSError):
    """The compiler is closed. Callers handle this error as if the process could not be reached."""


class TrialCompiler:
    """Sends grammars to a process that tests them, and receives the results. Thread-safe."""

    def __init__(
        self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], timeout_s: float
    ) -> None:
        """Create an object that tests grammars in a child process. The process is not started yet.

        The first call of `submit` starts the process.

        Args:
            vocabulary: the tokens of the model.
            eos_token_ids: the checkpoint's stop tokens.
            timeout_s: the time limit of a trial, including the time in the queue.
        """
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._timeout_s = timeout_s
        # A job is the test of one grammar. `_ids` yields the ids of new jobs. `_futures` maps the
        # id of each unfinished job to the future of the job.
        self._ids = itertools.count()
        self._futures: dict[int, Future[None]] = {}
        # The process and the connection to it; None before the first job.
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        # Protects the attributes above, which several threads use.
        self._lock = threading.Lock()
        # The first messages can block until the process has loaded the grammar libraries. A
        # separate thread starts the process and sends all messages, so that callers do not block.
        self._sender = ThreadPoolExecutor(1, "grammar-trials")

    def submit(self, spec: GrammarSpec) -> "Future[None]":
        """Start a job that tests in a child process whether a grammar can be compiled.

        Returns:
            A future. Its result is None if the grammar was compiled. Its exception is a
            RequestError if the grammar failed, and an EngineError if the child process has ended.
            Cancelling the future stops the test.

        Raises:
            CapacityError: if too many grammars are waiting.
        """
        future: Future[None] = Future()
        with self._lock:
            if len(self._futures) >= _MAX_JOBS:
                raise CapacityError(
                    f"grammar: {_MAX_JOBS} grammars of other requests are being compiled, which is "
                    "the limit. Try again later."
                )
            job_id = next(self._ids)
            self._futures[job_id] = future
        future.add_done_callback(partial(self._on_done, job_id))
        self._send(job_id, ("compile", job_id, spec.kind, spec.source))
        return future

    def close(self) -> None:
        """End the process and all its children. Requests that still wait get an error."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)
        self._fail_all(
            "grammar: the grammar was not compiled, because the engine is shutting down."
        )

    def _send(self, job_id: int, message: tuple[object, ...]) -> None:
        """Send a message about a job to the process, without blocking.

        trial_process.py describes the messages.
        """
        with contextlib.suppress(RuntimeError):  # the sender is shut down
            self._sender.submit(self._send_message, job_id, message)

    def _send_message(self, job_id: int, message: tuple[object, ...]) -> None:
        """Send a message about a job to the process, and start the process if necessary.

        This method can block, so it runs in the thread of `_sender`. If the process cannot be
        reached, store an error in the future of the job. Example of a message: ("cancel", 7) stops
        the job 7.
        """
        try:
            connection = self._connection or self._start_and_connect()
            connection.send(message)
        except OSError as error:
            future = self._pop_future(job_id)
            if future is not None:
                _resolve(future, EngineError(f"grammar: the compiler cannot be reached: {error}"))

    def _pop_future(self, job_id: int) -> "Future[None] | None":
        """Remove the future of a job, and return it. Return None if the job has already ended."""
        with self._lock:
            return self._futures.pop(job_id, None)

    def _start_and_connect(self) -> Connection:
        """Start the process that compiles grammars, and a thread that reads its messages.

        Returns:
            The connection to the process, which is also stored in `_connection`.

        Raises:
            OSError: if `_start_process` cannot start the process, or if the connection is broken.
        """
        connection, child_end = Pipe()
        process = self._start_process(child_end.fileno())
        child_end.close()  # The process has its own copy of this end.
        self._connection = connection
        threading.Thread(
            target=self._read_all,
            args=(connection, process),
            name="grammar-outcomes",
            daemon=True,
        ).start()
        # The process needs the vocabulary and the ids of the end-of-sequence tokens to load the
        # grammar libraries.
        connection.send((self._vocabulary, self._eos_token_ids))
        return connection

    def _start_process(self, child_fd: int) -> "subprocess.Popen[bytes]":
        """Start the process that compiles grammars, and store the process in `_process`.

        Args:
            child_fd: the file descriptor through which the process exchanges messages.

        Raises:
            OSError: if the process cannot be started.
            _ClosedError: if the compiler is closed.
        """
        command = [sys.executable, "-m", _MODULE, str(child_fd), str(self._timeout_s)]
        with self._lock:
            if self._is_closed:
                raise _ClosedError("the engine is shutting down")
            process = subprocess.Popen(command, pass_fds=[child_fd], stdin=subprocess.DEVNULL)
            self._process = process
        return process

    def _on_done(self, job_id: int, future: "Future[None]") -> None:
        """Stop a job of the child process if the future of the job was cancelled."""
        if future.cancelled() and self._pop_future(job_id) is not None:
            self._send(job_id, ("cancel", job_id))

    def _read_all(self, connection: Connection, process: "subprocess.Popen[bytes]") -> None:
        """Read the results of jobs until the process ends. Store each result in the job's future.

        A separate thread runs this method. After the end of the process, the remaining jobs fail.
        """
        while (message := self._receive(connection)) is not None:
            job_id, outcome, error_text = message
            future = self._pop_future(job_id)
            if future is not None:
                if outcome == Outcome.CRASHED:
                    log.warning("A grammar library failed to compile a grammar. %s", error_text)
                _resolve(future, self._error_for_client(outcome, error_text))
        process.kill()
        process.wait()
        self._connection = None
        connection.close()
        self._fail_all("grammar: the process that compiles grammars has ended. Try again.")

    def _receive(self, connection: Connection) -> tuple[int, str, str] | None:
        """Wait for a message from the process. Return None if the process has ended or hangs.

        The process is considered to be hanging if it has sent nothing for too long, although the
        same job was unfinished for the whole time. A message contains the id of a job, its outcome
        and an error text.
        """
        limit_s = min(self._timeout_s, MAX_TIMEOUT_S) + _EXTRA_S
        while True:
            unfinished_before = self._unfinished_jobs()
            try:
                if connection.poll(limit_s):
                    message: tuple[int, str, str] = connection.recv()
                    return message
            except (EOFError, OSError):  # The process has ended.
                return None
            is_hanging = bool(unfinished_before & self._unfinished_jobs())
            if is_hanging:
                return None

    def _unfinished_jobs(self) -> set[int]:
        """Return the ids of the jobs that have not ended."""
        with self._lock:
            return set(self._futures)

    def _fail_all(self, message: str) -> None:
        """Store an error in the future of every job that has not ended."""
        with self._lock:
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            _resolve(future, EngineError(message))

    def _error_for_client(self, outcome: str, error_text: str) -> RequestError | None:
        """Return the error for a grammar, or None if the grammar could be compiled.

        Args:
            outcome: one of the values of `Outcome`.
            error_text: the message of the child process; "" if the child sent no message.
        """
        if outcome == Outcome.DONE:
            return None
        if outcome == Outcome.REFUSED:
            return RequestError(error_text)
        if outcome == Outcome.LATE:
            return RequestError(
                f"grammar: compiling takes longer than {self._timeout_s:g} s, which is the limit "
                "(grammar_timeout). Lower the bounds and repetitions of the grammar, or raise the "
                "limit."
            )
        detail = f" The library's message is: {error_text}" if error_text else ""
        return RequestError(
            "grammar: the grammar library failed or needed too much memory. Use a smaller grammar."
            + detail
        )


def _resolve(future: "Future[None]", error: NereidError | None) -> None:
    """Set the result or the exception of a future, unless the future is cancelled."""
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
