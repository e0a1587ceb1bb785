# SPDX-License-Identifier: Apache-2.0
"""The stub's side of the engine process: start it, talk to it, notice its death, stop it."""

import contextlib
import dataclasses
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.params import SamplingParams
from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving.channel import Channel, ChannelClosedError
from nereid_backend.serving.outbox import Outbox
from nereid_backend.serving.pulse import Pulse, kill_if_hung
from nereid_backend.serving.wire import unpack_update

_STOP_TIMEOUT_S = 5.0
_START_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine did not take a request."""

    request_id: str
    error: NereidError


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine computes a request that has waited until then, by time.monotonic()."""

    request_id: str
    at: float


class EngineDiedError(EngineError):
    """The engine process has ended without being asked to."""


class EngineClient:
    """One engine process at a time; `start` may be called again after its death.

    `submit` and `abort` may be called from several threads; `receive` belongs to one.

    Attributes:
        info: what was loaded, the fields of EngineInfo.
        stats: how busy the engine was when it last said so.
        load_s: how long the last start took.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None],
        module: str = "nereid_backend.serving.engine_process",
    ) -> None:
        self._config = config
        self._module = module
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._outbox: Outbox | None = None
        self._last_words = ""
        self._pulse: Pulse | None = None
        self.info: dict[str, Any] = {}
        self.stats: dict[str, int] = {}
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
        command = [python, "-m", self._module]
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._channel = Channel(ours)
        self._outbox = Outbox(self._channel)
        self._pulse = Pulse(self._process.pid)
        self._last_words, self.stats = "", {}
        started = time.monotonic()
        try:
            self._send(dataclasses.asdict(self._config))
            self._await_ready(timeout_s, meanwhile)
            self.load_s = time.monotonic() - started
        except NereidError:
            self.stop()
            raise

    def _await_ready(self, timeout_s: float, meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            meanwhile()
            for kind, *rest in self._receive(_START_POLL_S):
                if kind == "progress":
                    self._progress(rest[0])
                elif kind == "ready":
                    self.info = rest[0]
                    return
                elif kind == "failed":
                    raise EngineError(rest[1])
        raise EngineError(
            f"the engine was not ready after {timeout_s:g} s (engine_start_timeout_s); "
            "raise the limit or look at the log for what it was loading"
        )

    def submit(
        self, request_id: str, token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> None:
        """Hand a request to the engine.

        Raises:
            EngineDiedError: there is no engine process.
        """
        values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        self._send(["add", request_id, token_ids.tobytes(), values])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ask the engine to end a request, or one of its sequences; last updates follow."""
        self._send(["abort", request_id, index])

    def receive(self, timeout_s: float) -> list[RequestUpdate | Refusal | Begun]:
        """What the engine has said, waiting at most `timeout_s`.

        Raises:
            EngineDiedError: the process has gone.
        """
        answers: list[RequestUpdate | Refusal | Begun] = []
        for kind, *rest in self._receive(timeout_s):
            if kind == "updates":
                answers.extend(map(unpack_update, rest[0]))
            elif kind == "stats":
                self.stats = rest[0]
            elif kind == "begun":
                answers.extend(Begun(*row) for row in rest[0])
            elif kind == "refused":
                request_id, name, message = rest
                answers.append(Refusal(request_id, _REFUSALS.get(name, EngineError)(message)))
            elif kind == "fatal":
                self._last_words = rest[0]
        return answers

    def check_pulse(self, timeout_s: float, *, is_working: bool) -> None:
        """Kill an engine that hangs; call it after each `receive`.

        Args:
            timeout_s: an engine with work says something at least this often; 0 is no limit.
            is_working: whether it has work.

        Raises:
            EngineDiedError: it was silent for too long and was killed.
        """
        process, pulse = self._process, self._pulse
        if process is None or pulse is None:
            return
        killed = kill_if_hung(
            process,
            pulse,
            (timeout_s, "engine_hang_timeout_s"),
            name="engine",
            is_working=is_working,
            is_on_cpu=self.info.get("device") == "cpu",
        )
        if killed is not None:
            raise EngineDiedError(killed)

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
        """Process id of the engine, None when there is none."""
        return None if self._process is None else self._process.pid

    def _send(self, message: object) -> None:
        outbox = self._outbox
        try:
            if outbox is None:
                raise ChannelClosedError("it is not running")
            outbox.put(message)
        except ChannelClosedError as error:
            raise EngineDiedError(self._obituary()) from error

    def _receive(self, timeout_s: float) -> list[list[Any]]:
        try:
            if self._channel is None:
                raise ChannelClosedError("it is not running")
            messages = self._channel.receive(timeout_s)
        except ChannelClosedError as error:
            raise EngineDiedError(self._obituary()) from error
        if messages and self._pulse is not None:
            self._pulse.beat()
        return messages

    def _obituary(self) -> str:
        if self._process is None:
            return "the engine process is not running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            if self._last_words:
                return f"{self._last_words}; the engine process ended ({how})"
            return f"the engine process ended ({how}); the server's log says why"
        return "the engine process closed its connection"


_REFUSALS: dict[str, type[NereidError]] = {
    kind.__name__: kind for kind in (CapacityError, RequestError)
}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait until it ends, then terminate, then kill."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            return
