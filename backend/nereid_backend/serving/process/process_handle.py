# SPDX-License-Identifier: Apache-2.0
"""Starts and stops a child process, exchanges messages with the process, and detects its death.

Code that may crash runs in child processes: the engine, and the worker of each pooling model. This
module runs in the parent process, a stub of Triton server. process_entry.py runs in the child
process.
"""

import contextlib
import functools
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving.process.channel import Channel, ChannelClosedError, pack
from nereid_backend.serving.process.forking.forked_process import ForkedProcess, start_process
from nereid_backend.serving.process.hang_watch import HangWatch, cpu_seconds
from nereid_backend.serving.process.outbox import Outbox

_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0
_START_POLL_S = 0.2
_EXIT_TIMEOUT_S = 1.0


class EngineDiedError(EngineError):
    """An engine process or a worker process has ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The value of a limit, and the name of its setting. Error messages contain the name."""

    setting: str
    value: int


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """The module, the settings and the limits of a child process.

    Attributes:
        name: the name of the process in messages: "engine" or "worker".
        title: the name of the process in the server's log. If `name` is not unique in the log, the
            title also names the Triton model, such as "worker of the model embedding".
        module: the Python module that the process runs.
        settings: the first message to the process.
        start_timeout: the limit on the time for loading, in seconds.
        hang_timeout: the limit on the time without a message during work, in seconds; 0 means no
            limit.
        max_restarts: the number of unsuccessful restarts after which the process is not started
            again.
    """

    name: str
    title: str
    module: str
    settings: dict[str, Any]
    start_timeout: Limit
    hang_timeout: Limit
    max_restarts: Limit


class ChildProcess:
    """A child process that has been started.

    Several threads may call `send`. Only one thread may call the other methods. A separate thread
    sends the messages (outbox.py). Otherwise there could be a deadlock: the receiving thread waits
    until the child process reads a message, and the child process waits until the receiving thread
    reads a message.

    Attributes:
        pid: the process id.
        info: the description of the loaded model. The process has sent the description.
        load_s: the time that loading took, in seconds.
    """

    def __init__(
        self,
        program: ChildProgram,
        process: ForkedProcess | subprocess.Popen[bytes],
        connection: socket.socket,
    ) -> None:
        """Start the thread that sends messages. Only the class method `start` calls `__init__`.

        Args:
            program: the program and its limits.
            process: the running process.
            connection: the parent's end of the connection to the process.
        """
        self._program = program
        self._process = process
        self.pid = process.pid
        # These values are replaced when the model is loaded; see `_await_ready`.
        self.info: dict[str, Any] = {}
        self.load_s = 0.0
        self._channel = Channel(connection)
        self._outbox = Outbox(self._channel)
        # Detects a hang: the process has work, but the process sends no message.
        self._hang_watch = HangWatch(
            program.hang_timeout.value, functools.partial(cpu_seconds, process.pid)
        )
        # If the process ends because of an error, it first sends the message "fatal". This
        # attribute is the text of the message: the reason for the end.
        self._fatal_message = ""

    @classmethod
    def start(
        cls,
        program: ChildProgram,
        progress: Callable[[str], None],
        while_loading: Callable[[], None] = lambda: None,
    ) -> Self:
        """Start a process, wait until its model is loaded, and return the process.

        Args:
            program: the program and its limits.
            progress: called with one line for each slow operation of loading.
            while_loading: called a few times a second while the process loads. The function can
                raise a NereidError to end the start.

        Raises:
            EngineError: loading failed or took too long. The message gives the reason.
            OSError: the operating system refused to create the process.
        """
        parent_end, child_end = socket.socketpair()
        with child_end:
            try:
                os_process = start_process(program.module, child_end, program.title)
            except OSError:
                parent_end.close()
                raise
        child = cls(program, os_process, parent_end)
        try:
            # The settings are the first message to the process. The process then loads its model.
            child.send(program.settings)
            child._await_ready(progress, while_loading)
        except BaseException:  # Loading has failed, or a callback has ended the start.
            child.stop()
            raise
        return child

    def send(self, message: object) -> None:
        """Queue a message to the process. If the process has ended, drop the message.

        Raises:
            RequestError: the message cannot be packed; see channel.pack.
        """
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """Queue a message that channel.pack has packed.

        If the process has ended, drop the message.
        """
        self._outbox.put(data)

    def fileno(self) -> int:
        """Return the channel's file descriptor. `select.poll` needs it to wait for messages."""
        return self._channel.fileno()

    def receive(self, timeout_s: float, *, is_working: bool) -> list[list[Any]]:
        """Return the new messages of the process. If there are none, wait for the first message.

        Each call also checks whether the process hangs. Therefore call this method several times a
        second, with a short timeout.

        Args:
            timeout_s: the longest time to wait for the first message, in seconds.
            is_working: whether the process has work. A process without work does not hang.

        Returns:
            The messages. Each message is a list, and its first element is the kind of the message.
            Example: ["ready", info].

        Raises:
            EngineDiedError: the process has ended, or it hung and was killed.
        """
        try:
            messages = self._channel.receive(timeout_s)
        except ChannelClosedError as error:
            raise EngineDiedError(self._death_message()) from error
        if messages:
            self._hang_watch.note_message()
        for kind, *values in messages:
            if kind == "fatal":
                self._fatal_message = values[0]
        self._kill_if_hanging(is_working=is_working)
        return messages

    def _kill_if_hanging(self, *, is_working: bool) -> None:
        """Kill the process if it hangs: it has work, but has sent no message for too long.

        Raises:
            EngineDiedError: the process hung and was killed.
        """
        # On a CPU, a step of a large model can take minutes, so the time limit is longer. `info`
        # describes the loaded model. Before the model is loaded, `info` is empty.
        is_on_cpu = self.info.get("device") == "cpu"
        self._hang_watch.measure(is_working=is_working)
        if not self._hang_watch.is_hanging(is_on_cpu=is_on_cpu):
            return
        self._process.kill()
        self._process.wait(_KILL_TIMEOUT_S)
        limit = self._program.hang_timeout
        raise EngineDiedError(
            f"the {self._program.name} process was killed, because it sent no message for "
            f"{self._hang_watch.silent_s:.0f} s during one step. The limit is {limit.value} s "
            f"({limit.setting})."
        )

    def stop(self) -> None:
        """End the process: send the message "stop", then SIGTERM, then SIGKILL.

        SIGTERM and SIGKILL are sent only to a process that does not end within a time limit.
        """
        self.send(["stop"])
        self._outbox.finish()  # Its thread sends the queued messages, and closes the channel.
        has_ended = self._wait_for_end()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not has_ended:
                self._process.send_signal(number)
                has_ended = self._wait_for_end()
        # If sending has failed, the outbox has not closed the channel. Closing it twice has no
        # effect.
        self._channel.close()
        self._outbox.join(_STOP_TIMEOUT_S)

    def _wait_for_end(self) -> bool:
        """Wait until the process ends, for a limited time. Return whether the process has ended."""
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _await_ready(
        self, progress: Callable[[str], None], while_loading: Callable[[], None]
    ) -> None:
        """Wait until the process has loaded its model and sends the message "ready".

        Args:
            progress: called with each line that the process reports while it loads the model.
            while_loading: called every `_START_POLL_S` seconds. The function can raise a
                NereidError to end the wait.

        Raises:
            EngineError: loading failed or took longer than `start_timeout`.

        Mutates: `info`, the description of the model in the message "ready", and `load_s`, the
            seconds that loading took.
        """
        started_at = time.monotonic()
        limit = self._program.start_timeout  # the value and the name of a setting
        while time.monotonic() < started_at + limit.value:
            while_loading()
            for message in self.receive(_START_POLL_S, is_working=False):
                match message:
                    case ["progress", line]:
                        progress(line)
                    case ["ready", info]:
                        self.info = info
                        self.load_s = time.monotonic() - started_at
                        return
                    case ["failed", reason]:
                        raise EngineError(reason)
        raise EngineError(
            f"the {self._program.name} was not ready after {limit.value} s, which is the limit "
            f"({limit.setting}). Raise the limit, or read in the log what the process was loading."
        )

    def _death_message(self) -> str:
        """Return an error message that describes how the process ended.

        Example: "the engine process ended (signal 9). See the server's log for the reason."
        """
        ending = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_TIMEOUT_S)
            ending = f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"
        if self._fatal_message:
            return f"the {self._program.name} process {ending}: {self._fatal_message}"
        return f"the {self._program.name} process {ending}. See the server's log for the reason."


def refusal_error(kind: str, message: str) -> NereidError:
    """Build the exception for a request that a child process has refused.

    The message is ["refused", request id, kind, message].

    Args:
        kind: the name of the error's class. If the name is unknown, the exception is an
            EngineError.
        message: the error's text.
    """
    error_classes = {"CapacityError": CapacityError, "RequestError": RequestError}
    error_class = error_classes.get(kind, EngineError)
    return error_class(message)
