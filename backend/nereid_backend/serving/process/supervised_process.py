# SPDX-License-Identifier: Apache-2.0
"""A child process that is restarted after its death. A separate thread restarts the process."""

import threading
from typing import Self

from nereid_backend.errors import EngineError, NereidError
from nereid_backend.serving.process.process_handle import ChildProcess, ChildProgram
from nereid_backend.serving.triton_api import log, progress

# If the operating system refuses to create a process, the next attempt follows after this number of
# seconds.
_RETRY_AFTER_S = 5.0


class _StoppedError(NereidError):
    """The server is shutting down, so a starting process is no longer needed."""


class SupervisedProcess:
    """Runs a child process of a Triton model, and restarts the process when it has died.

    A restart takes as long as loading the model. A separate thread therefore restarts the process,
    while the loop of the model (supervised_model.py) serves the requests of the other processes.
    Only the loop's thread may call the methods and write the attributes.

    Attributes:
        index: the number of the process. The processes of a model are numbered from 0.
        title: the name of the process in the log, such as "engine" or "engine 1".
        child: the current child process.
        is_running: whether the process accepts requests. Any thread may read this attribute.
        has_given_up: whether the process is no longer restarted, because the allowed number of
            restarts has failed.
        error: the reason why the process last died; None before the first death. If the process is
            no longer restarted, the message also contains the reason why the last attempt failed.
        num_attempts: the number of attempts to restart the process since it last worked. The Triton
            model sets this number to 0 when the process works again.
        num_restarts: the number of successful restarts.
        num_requests: the number of this process's requests that have no final response yet.
    """

    def __init__(
        self, program: ChildProgram, child: ChildProcess, index: int, log_prefix: str
    ) -> None:
        """Supervise a running child process. Only the class method `start` calls `__init__`."""
        self._program = program
        self._log_prefix = log_prefix
        self.index = index
        self.title = program.title
        self.child = child
        self.is_running = True
        self.num_requests = 0
        self.error: EngineError | None = None  # the reason of the last death
        self.num_attempts = 0  # The Triton model sets this to 0 when the process works again.
        self.num_restarts = 0  # the number of successful restarts
        self.has_given_up = False  # whether too many attempts to restart have failed
        # During a restart, the thread that starts a new process; otherwise None.
        self._restart_thread: threading.Thread | None = None
        # The error of the last failed attempt to restart the process. None if no attempt failed.
        self._start_error: EngineError | None = None
        # The new process from its start until the call of `finish_restart`; otherwise None.
        self._replacement: ChildProcess | None = None
        # This event is set when the server shuts down, so that the thread ends early.
        self._stopping = threading.Event()

    @classmethod
    def start(cls, program: ChildProgram, index: int = 0, log_prefix: str = "") -> Self:
        """Start a child process, and wait until its model is loaded.

        Args:
            program: the program and its limits.
            index: the number of the process.
            log_prefix: the beginning of log lines about the process, such as "embedding: ".

        Raises:
            EngineError: loading failed or took too long. The message gives the reason.
        """
        # `progress` writes the progress of loading to the server's log.
        child = ChildProcess.start(program, progress)
        return cls(program, child, index, log_prefix)

    def restart(self, error: EngineError) -> None:
        """Start a thread that replaces the process.

        Args:
            error: the reason of the death.
        """
        self.is_running = False
        self.error = error
        self._start_error = None
        log.error("%s%s", self._log_prefix, error)
        self._restart_thread = threading.Thread(target=self._replace, name="restart")
        self._restart_thread.start()

    @property
    def has_restart_ended(self) -> bool:
        """Whether a restart has ended, successfully or not. If true, call `finish_restart`."""
        return self._restart_thread is not None and not self._restart_thread.is_alive()

    def finish_restart(self) -> None:
        """Use the new process, or give up if no new process could be started.

        Call this method only if `has_restart_ended` is true. After a successful restart, `child` is
        the new process, and the caller must set `is_running`. Otherwise, `has_given_up` is true.
        """
        self._restart_thread = None
        if self._replacement is None:
            self.has_given_up = True
            if self._start_error is not None:
                self.error = EngineError(
                    f"{self.error} (The last restart failed: {self._start_error})"
                )
            return
        self.child = self._replacement
        self._replacement = None
        self.num_restarts += 1

    def stop(self) -> None:
        """End the process. If a thread is restarting the process, end this thread first."""
        self._stopping.set()
        if self._restart_thread is not None:
            self._restart_thread.join()
        (self._replacement or self.child).stop()

    def _replace(self) -> None:
        """Start a new process. If this fails, try again, up to `max_restarts` attempts in total.

        The limit applies to all attempts since the process last worked, even if they belong to
        several deaths. This method runs in the restart thread.

        Mutates: `_replacement` is the new process. Each attempt increases `num_attempts`. A failed
            attempt sets `_start_error`.
        """
        limit = self._program.max_restarts.value
        while self.num_attempts < limit and not self._stopping.is_set():
            self.num_attempts += 1
            progress(
                f"restarting the {self._program.title} (attempt {self.num_attempts} of {limit}), "
                f"because {self._start_error or self.error}"
            )
            self._replacement = self._start_replacement()  # None if the attempt has failed.
            if self._replacement is not None:
                return

    def _start_replacement(self) -> ChildProcess | None:
        """Stop the old process, start a new process, and return the new process.

        If the start fails, log and store the reason, and return None. If the operating system
        cannot start a process, wait before returning, so that the caller does not try again at
        once.
        """
        try:
            self.child.stop()
            return ChildProcess.start(self._program, progress, self._check_stopping)
        except _StoppedError:
            pass  # The server is shutting down, so this failure needs no message.
        except NereidError as failure:  # The new process has failed, for example while loading.
            self._record_failed_attempt(failure)
        except OSError as failure:  # too little memory, or too many processes
            self._record_failed_attempt(failure)
            self._stopping.wait(_RETRY_AFTER_S)
        return None

    def _record_failed_attempt(self, failure: Exception) -> None:
        """Log that an attempt to restart the process has failed, and store the reason."""
        self._start_error = EngineError(str(failure))
        log.error(
            "%sthe %s could not be restarted: %s", self._log_prefix, self._program.title, failure
        )

    def _check_stopping(self) -> None:
        """Raise a _StoppedError if the server is shutting down."""
        if self._stopping.is_set():
            raise _StoppedError
