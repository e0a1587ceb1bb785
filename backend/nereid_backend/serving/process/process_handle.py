# SPDX-License-Identifier: Apache-2.0
"""A child process that is spoken to: start it, talk to it, notice its death, stop it.

What may crash runs in such a process: the engine, and the worker of each pooling model. This is the
side of the stub that supervises it; child_process.py is the other side.
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
from nereid_backend.serving.process.hang_watch import Pulse
from nereid_backend.serving.process.outbox import Outbox

_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0
_START_POLL_S = 0.2


class EngineDiedError(EngineError):
    """The process of an engine or a worker has ended without being asked to."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was not taken."""

    request_id: str
    error: NereidError

    @classmethod
    def from_row(cls, row: Sequence[str]) -> "Refusal":
        """From what follows "refused": the request, the kind of error, its message."""
        request_id, kind, message = row
        return cls(request_id, _REFUSALS.get(kind, EngineError)(message))


_REFUSALS: dict[str, type[NereidError]] = {
    kind.__name__: kind for kind in (CapacityError, RequestError)
}


@dataclass(frozen=True, slots=True)
class Role:
    """What a child process is.

    Attributes:
        name: what errors call it.
        module: what it runs.
        start_setting: the setting that says how long it may take to load.
        hang_setting: the setting that says how long it may be silent.
    """

    name: str
    module: str
    start_setting: str
    hang_setting: str


class Child:
    """One process at a time; `start` may be called again after its death.

    `send` may be called from several threads; the rest belongs to one. Messages are sent by a
    thread of their own: the one that receives must never wait for a process that itself waits to be
    read.

    Attributes:
        info: what was loaded, as the process says.
        load_s: how long the last start took.
    """

    def __init__(
        self, role: Role, settings: dict[str, Any], progress: Callable[[str], None]
    ) -> None:
        """Begin with no process.

        Args:
            role: what it is.
            settings: its first message.
            progress: called with one line for each slow step of loading.
        """
        self._role = role
        self._settings = settings
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._outbox: Outbox | None = None
        self._pulse: Pulse | None = None
        self._last_words = ""
        self.info: dict[str, Any] = {}
        self.load_s = 0.0

    def start(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until its model is loaded.

        Args:
            timeout_s: at most so long.
            meanwhile: called a few times a second while it loads.

        Raises:
            EngineError: it could not be loaded, or not in time; the message says why.
        """
        self.stop()
        ours, theirs = socket.socketpair()
        # The interpreter of the stub's environment; an embedded Python need not know it.
        python = sys.executable or shutil.which("python3") or "python3"
        self._process = subprocess.Popen(
            [python, "-m", self._role.module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = Channel(ours)
        self._outbox = Outbox(self._channel)
        self._pulse, self._last_words = Pulse(self._process.pid), ""
        started = time.monotonic()
        try:
            self.send(self._settings)
            self._await_ready(timeout_s, meanwhile)
            self.load_s = time.monotonic() - started
        except NereidError:
            self.stop()
            raise

    def send(self, message: object) -> None:
        """Send a message soon.

        Raises:
            EngineDiedError: there is no process.
        """
        outbox = self._outbox
        try:
            if outbox is None:
                raise ChannelClosedError("it is not running")
            outbox.put(message)
        except ChannelClosedError as error:
            raise EngineDiedError(self._obituary()) from error

    def messages(self, timeout_s: float) -> list[list[Any]]:
        """What the process has said, waiting at most `timeout_s`; each is a kind and more.

        Raises:
            EngineDiedError: the process has gone.
        """
        try:
            if self._channel is None:
                raise ChannelClosedError("it is not running")
            messages = self._channel.receive(timeout_s)
        except ChannelClosedError as error:
            raise EngineDiedError(self._obituary()) from error
        if messages and self._pulse is not None:
            self._pulse.beat()
        for kind, *rest in messages:
            if kind == "fatal":
                self._last_words = rest[0]
        return messages

    def check_pulse(self, limit_s: float, *, is_working: bool) -> None:
        """Kill a process that hangs; call it after each `messages`.

        Args:
            limit_s: with work, it says something at least this often; 0 is no limit.
            is_working: whether it has work.

        Raises:
            EngineDiedError: it was silent for too long and was killed.
        """
        process, pulse = self._process, self._pulse
        if process is None or pulse is None:
            return
        is_on_cpu = self.info.get("device") == "cpu"
        if not pulse.hangs(limit_s, is_working=is_working, is_on_cpu=is_on_cpu):
            return
        process.kill()
        process.wait(_KILL_TIMEOUT_S)
        raise EngineDiedError(
            f"the {self._role.name} was at one step for {pulse.silent_s:.0f} s without a sign of "
            f"life; the limit is {limit_s:g} s ({self._role.hang_setting}); it was killed"
        )

    def stop(self) -> None:
        """End the process: ask, then terminate, then kill."""
        process, channel, outbox = self._process, self._channel, self._outbox
        self._process = self._channel = self._outbox = None
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
        """Process id, None when there is no process."""
        return None if self._process is None else self._process.pid

    def _await_ready(self, timeout_s: float, meanwhile: Callable[[], None]) -> None:
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
            f"the {self._role.name} was not ready after {timeout_s:g} s "
            f"({self._role.start_setting}); raise the limit or look at the log for what it was "
            "loading"
        )

    def _obituary(self) -> str:
        name, process = self._role.name, self._process
        if process is None:
            return f"the {name} process is not running"
        how = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(1.0)
            how = f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"
        if self._last_words:
            return f"{self._last_words}; the {name} process {how}"
        return f"the {name} process {how}; the server's log says why"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait until it ends, then terminate, then kill."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            return
