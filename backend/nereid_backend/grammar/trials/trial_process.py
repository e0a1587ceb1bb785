# SPDX-License-Identifier: Apache-2.0
"""The process that tests whether grammars can be compiled. It is started by trial_compiler.py.

    python -m nereid_backend.grammar.trials.trial_process FD TIMEOUT_S

FD is the file descriptor of the connection to the engine, and TIMEOUT_S is the time limit of a
trial in seconds. The process loads the grammar libraries once, and then forks a child for each
grammar. A child has limits of time and memory, and can be killed. A crash or a hang of a grammar
library therefore does not affect the engine. The messages are pickled tuples:

    engine -> process   (vocabulary, eos_token_ids)     the first message
                        ("compile", id, kind, source)
                        ("cancel", id)                  kill the child, or do not start it
    process -> engine   (id, outcome, error text)       outcome is one of Outcome
"""

import gc
import os
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.process_limits import limit_child

# The number of grammars that are compiled at the same time, each in its own child process. The
# operating system divides the processors equally among the children, so a short compilation
# does not wait for the end of a long compilation.
_MAX_CHILDREN = 8
_MAX_CHILD_BYTES = 512 * 2**20
# The longest time limit of a trial, in seconds. If the timeout that is passed to `wait` is longer
# than 24 days, `wait` raises an OverflowError.
MAX_TIMEOUT_S = 86400.0


class Outcome(StrEnum):
    """The result of a trial."""

    DONE = "done"
    REFUSED = "refused"
    LATE = "late"
    CRASHED = "crashed"


Compile = Callable[[str, str], None]
"""The type of a function that compiles a grammar. The arguments are the kind and the source.

The function raises a RequestError if the grammar is refused.
"""


@dataclass
class _Job:
    """A grammar that a child process must compile.

    Attributes:
        job_id: the engine's number of the job.
        kind: one of core.grammar.KINDS.
        source: the text of the grammar.
        deadline: the time.monotonic() value at which the job is killed.
        pid: the process id of the child; 0 before the start.
        connection: the connection that receives the outcome of the child; None before the start.
    """

    job_id: int
    kind: str
    source: str
    deadline: float
    pid: int = 0
    connection: Connection | None = None


class TrialServer:
    """Starts a child process for each grammar, and kills a child that exceeds a limit."""

    def __init__(self, connection: Connection, compile_grammar: Compile, timeout_s: float) -> None:
        """Create a server that has no jobs yet. A job is a grammar that a child must compile.

        Args:
            connection: the connection to the engine, which sends jobs and receives their outcomes.
            compile_grammar: the function that each child process calls.
            timeout_s: the time limit of a job, including the time in the queue. A limit of more
                than a day counts as a day.
        """
        self._connection = connection
        self._compile = compile_grammar
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        # The jobs that have no child process yet, the oldest job first.
        self._waiting: deque[_Job] = deque()
        # The jobs that have a child process.
        self._running: list[_Job] = []

    def serve(self) -> None:
        """Handle messages until the engine closes the connection. Then kill all children."""
        while True:
            try:
                self._handle_next_events()
            except (EOFError, OSError):
                for job in self._running:
                    os.kill(job.pid, signal.SIGKILL)
                return

    def _handle_next_events(self) -> None:
        """Wait for the next event, and handle every event that has occurred.

        The events are a message from the engine, the result of a child process, and the deadline of
        a job. Afterwards, start waiting jobs until `_MAX_CHILDREN` child processes are running.
        """
        ready_connections = self._wait_for_event()  # those that can be read without waiting
        while self._connection.poll():
            self._handle_message(self._connection.recv())
        # If the connection of a child is readable, the child has sent its result or has ended.
        finished_jobs = [job for job in self._running if job.connection in ready_connections]
        for job in finished_jobs:
            self._send_outcome(job)
        self._remove_late_jobs()
        while self._waiting and len(self._running) < _MAX_CHILDREN:
            self._fork_child(self._waiting.popleft())

    def _wait_for_event(self) -> list[Any]:
        """Wait for a message, a result or the next deadline. Return the readable connections."""
        now = time.monotonic()
        deadlines = [job.deadline for job in [*self._running, *self._waiting]]
        timeout_s = min(deadlines) - now if deadlines else None
        children = [job.connection for job in self._running if job.connection is not None]
        return wait([self._connection, *children], timeout_s)

    def _remove_late_jobs(self) -> None:
        """Remove each job whose deadline has passed, and send the outcome LATE to the engine."""
        now = time.monotonic()
        for job in [*self._running, *self._waiting]:
            if job.deadline <= now:
                self._remove(job)
                self._connection.send((job.job_id, Outcome.LATE.value, ""))

    def _handle_message(self, message: tuple[Any, ...]) -> None:
        """Handle a message from the engine that adds or removes a job.

        Examples: ("compile", 7, "regex", "a+") adds the job 7, and ("cancel", 7) removes this job.
        """
        if message[0] == "compile":
            _command, job_id, kind, source = message
            deadline = time.monotonic() + self._timeout_s
            self._waiting.append(_Job(job_id, kind, source, deadline))
        else:
            _command, job_id = message
            self._cancel(job_id)

    def _cancel(self, job_id: int) -> None:
        """Remove the job with the number `job_id`, unless the job has already ended."""
        for job in [*self._running, *self._waiting]:
            if job.job_id == job_id:
                self._remove(job)

    def _fork_child(self, job: _Job) -> None:
        """Fork a child process that executes a job."""
        job.connection, child_end = Pipe(duplex=False)
        job.pid = os.fork()
        if job.pid == 0:
            # Close the child's copy of the connection to the engine. If the parent process is
            # killed, the connection then ends at once, and the engine notices the end.
            self._connection.close()
            _run_child(child_end, self._compile, job, self._timeout_s)
        child_end.close()
        self._running.append(job)

    def _send_outcome(self, job: _Job) -> None:
        """Send the result of a finished job to the engine, and remove the job."""
        assert job.connection is not None
        try:
            outcome, error_text = job.connection.recv()
        except EOFError:  # The child has ended without a message.
            outcome, error_text = Outcome.CRASHED.value, ""
        self._remove(job)
        self._connection.send((job.job_id, outcome, error_text))

    def _remove(self, job: _Job) -> None:
        """Remove a waiting or running job, and kill its child process if the job is running."""
        if job in self._waiting:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        # `waitpid` has not been called for this child yet. Therefore, the process id still belongs
        # to the child, even if the child has ended.
        os.kill(job.pid, signal.SIGKILL)
        os.waitpid(job.pid, 0)
        assert job.connection is not None
        job.connection.close()


def _run_child(result: Connection, compile_grammar: Compile, job: _Job, timeout_s: float) -> None:
    """Compile a grammar in a forked child process, send the outcome, and exit.

    The child limits its own memory and time. A grammar that exceeds a limit therefore ends only
    this child, not the engine.

    Args:
        result: the connection that receives the outcome and an error text.
        compile_grammar: raises a RequestError if the grammar is refused.
        job: the grammar.
        timeout_s: the limit of the processor time in seconds.
    """
    try:
        limit_child(_MAX_CHILD_BYTES, timeout_s)
        compile_grammar(job.kind, job.source)
        result.send((Outcome.DONE.value, ""))  # the outcome, and no error text
    except RequestError as error:
        result.send((Outcome.REFUSED.value, str(error)))
    except MemoryError:
        # There may be too little memory to send a message. If a child ends without a message, the
        # parent process uses the outcome CRASHED.
        pass
    except BaseException as error:  # noqa: BLE001 - the child ends here, and the engine must learn why
        result.send((Outcome.CRASHED.value, f"{type(error).__name__}: {error}"))
    finally:
        os._exit(0)  # The parent process ignores the exit status.


class _Unused:
    """A placeholder for the classes and functions that this process does not need."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept any arguments."""

    def __class_getitem__(cls, item: object) -> type:
        """Accept any type arguments in annotations."""
        return cls


class _UnusedModule(types.ModuleType):
    """A module in which every attribute is `_Unused`."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused


def _skip_unused_modules() -> None:
    """Replace torch and transformers by placeholders before xgrammar imports them.

    Compiling does not use these packages. Importing them takes some seconds and 200 MB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401 - a dependency of xgrammar, which works without torch

    for name in ("torch", "transformers"):
        sys.modules[name] = _UnusedModule(name)


def main() -> None:
    """Load the grammar libraries, and fork a child for each grammar that the engine sends.

    The child compiles the grammar. The command-line arguments are the file descriptor of the
    connection to the engine, and the time limit of one compilation in seconds.
    """
    # Ctrl+C stops the engine, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    timeout_s = float(sys.argv[2])
    # The imports below load xgrammar. `_skip_unused_modules` prevents xgrammar from loading torch
    # and transformers.
    _skip_unused_modules()
    from nereid_backend.core.grammar import GrammarSpec
    from nereid_backend.grammar.compile_grammar import compile_grammar, load_libraries
    from nereid_backend.grammar.trials.try_tokens import try_first_masks

    vocabulary, eos_token_ids = connection.recv()
    libraries = load_libraries(vocabulary, eos_token_ids, num_threads=1)
    # A forked child shares the memory pages of this process until one of the two processes writes
    # to a page. The garbage collector of the child would write to all existing objects, and thereby
    # copy their pages. `gc.freeze` excludes these objects from garbage collection.
    gc.freeze()

    def compile_spec(kind: str, source: str) -> None:
        """Compile a grammar in a child process, and compute the masks of the first tokens.

        Raises:
            RequestError: if the compilation fails.
        """
        compiled = compile_grammar(libraries, GrammarSpec(kind, source), timeout_s)
        try_first_masks(compiled, vocabulary.size, eos_token_ids)

    TrialServer(connection, compile_spec, timeout_s).serve()


if __name__ == "__main__":
    main()
