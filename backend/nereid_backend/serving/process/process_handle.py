# SPDX-License-Identifier: Apache-2.0
"""Starts and stops a child process, exchanges messages with it, and detects its death.

Code that may crash runs in child processes: the engine, and the worker of each pooling model. This
is the side of the stub. process_entry.py is the side of the child process.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.hang_watch import HangWatch
from nereid_backend.serving.process.outbox import Outbox

_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0
_START_POLL_S = 0.2
_EXIT_TIMEOUT_S = 1.0


class EngineDiedError(EngineError):
    """An engine process or a worker process has ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the child process refused, and the reason."""

    request_id: str
    error: NereidError

    @classmethod
    def from_row(cls, row: Sequence[str]) -> "Refusal":
        """Return the refusal in a message "refused": [request id, error class, error text]."""
        request_id, kind, message = row
        return cls(request_id, _REFUSALS.get(kind, EngineError)(message))


_REFUSALS: dict[str, type[NereidError]] = {
    kind.__name__: kind for kind in (CapacityError, RequestError)
}


@dataclass(frozen=True, slots=True)
class Role:
    """The kind of a child process.

    Attributes:
        name: the name of the process in error messages.
        module: the Python module that the process runs.
        start_setting: the name of the setting that limits the time for loading.
        hang_setting: the name of the setting that limits the time without a message.
    """

    name: str
    module: str
    start_setting: str
    hang_setting: str


class ChildProcess:
    """A child process. `start` may be called again after the process has died.

    Several threads may call `send`. Only one thread may call the other methods. Messages are sent
    by another thread, because the receiving thread must not wait for a child process that itself
    waits until its messages are read.

    Attributes:
        info: the description of the loaded model, as the process reported it.
        load_s: the duration of the last start in seconds.
    """

    def __init__(
        self, role: Role, settings: dict[str, Any], progress: Callable[[str], None]
    ) -> None:
        """Store the arguments. No process is started.

        Args:
            role: the kind of the process.
            settings: the first message to the process.
            progress: called with one line for each slow operation of loading.
        """
        self._role = role
        self._settings = settings
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._outbox: Outbox | None = None
        self._hang_watch: HangWatch | None = None
        self._fatal_message = ""
        self.info: dict[str, Any] = {}
        self.load_s = 0.0

    def start(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until its model is loaded.

        Args:
            timeout_s: the time limit for loading.
            meanwhile: called a few times a second while the process loads.

        Raises:
            EngineError: loading failed or took too long. The message gives the reason.
        """
        self.stop()
        parent_end, child_end = socket.socketpair()
        # Use the interpreter of the stub's environment. An embedded Python may not know its path.
        python = sys.executable or shutil.which("python3") or "python3"
        self._process = subprocess.Popen(
            [python, "-m", self._role.module, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
        )
        child_end.close()
        self._channel = Channel(parent_end)
        self._outbox = Outbox(self._channel)
        self._hang_watch = HangWatch(self._process.pid)
        self._fatal_message = ""
        started = time.monotonic()
        try:
            self.send(self._settings)
            self._await_ready(timeout_s, meanwhile)
            self.load_s = time.monotonic() - started
        except NereidError:
            self.stop()
            raise

    def send(self, message: object) -> None:
        """Queue a message to the process.

        Raises:
            EngineDiedError: the process is not running.
        """
        outbox = self._outbox
        try:
            if outbox is None:
                raise ChannelClosedError("the process is not running")
            outbox.put(message)
        except ChannelClosedError as error:
            raise EngineDiedError(self._death_message()) from error

    def messages(self, timeout_s: float) -> list[list[Any]]:
        """Return the messages of the process. Wait at most `timeout_s` seconds for the first one.

        Each message is a list that begins with its kind, such as ["ready", info].

        Raises:
            EngineDiedError: the process has ended.
        """
        try:
            if self._channel is None:
                raise ChannelClosedError("the process is not running")
            messages = self._channel.receive(timeout_s)
        except ChannelClosedError as error:
            raise EngineDiedError(self._death_message()) from error
        if messages and self._hang_watch is not None:
            self._hang_watch.note_message()
        for kind, *rest in messages:
            if kind == "fatal":
                self._fatal_message = rest[0]
        return messages

    def kill_if_hanging(self, limit_s: float, *, is_working: bool) -> None:
        """Kill the process if it hangs. Call this after each `messages`.

        Args:
            limit_s: the longest time without a message for a process with work; 0 means no limit.
            is_working: whether the process has work.

        Raises:
            EngineDiedError: the process did not send a message for too long and was killed.
        """
        process = self._process
        hang_watch = self._hang_watch
        if process is None or hang_watch is None:
            return
        is_on_cpu = self.info.get("device") == "cpu"
        if not hang_watch.is_hanging(limit_s, is_working=is_working, is_on_cpu=is_on_cpu):
            return
        process.kill()
        process.wait(_KILL_TIMEOUT_S)
        raise EngineDiedError(
            f"the {self._role.name} process was killed, because it sent no message for "
            f"{hang_watch.silent_s:.0f} s during one step and the limit is {limit_s:g} s "
            f"({self._role.hang_setting})."
        )

    def stop(self) -> None:
        """End the process: send the message "stop", then SIGTERM, then SIGKILL."""
        process = self._process
        channel = self._channel
        outbox = self._outbox
        self._process = None
        self._channel = None
        self._outbox = None
        if outbox is not None:
            with contextlib.suppress(ChannelClosedError):
                outbox.put(["stop"])
            outbox.finish()
        if process is not None:
            _end(process)
        if channel is not None and outbox is not None:
            channel.close()
            outbox.join(_STOP_TIMEOUT_S)

    @property
    def pid(self) -> int | None:
        """The process id; None if no process is running."""
        return None if self._process is None else self._process.pid

    def _await_ready(self, timeout_s: float, meanwhile: Callable[[], None]) -> None:
        """Wait for the message "ready". Raise an EngineError if loading fails or takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            meanwhile()
            for kind, *rest in self.messages(_START_POLL_S):
                if kind == "progress":
                    self._progress(rest[0])
                elif kind == "ready":
                    self.info = rest[0]
                    return
                elif kind == "failed":
                    raise EngineError(rest[0])
        raise EngineError(
            f"the {self._role.name} was not ready after {timeout_s:g} s, which is the limit "
            f"({self._role.start_setting}). Raise the limit, or read in the log what the process "
            "was loading."
        )

    def _death_message(self) -> str:
        """Return how the process ended, such as "the engine process ended (signal 9). See ..."."""
        name = self._role.name
        process = self._process
        if process is None:
            return f"the {name} process is not running"
        ending = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_EXIT_TIMEOUT_S)
            ending = f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"
        if self._fatal_message:
            return f"the {name} process {ending}: {self._fatal_message}"
        return f"the {name} process {ending}. See the server's log for the reason."


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process ends. After a time limit send SIGTERM, then SIGKILL."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            return
