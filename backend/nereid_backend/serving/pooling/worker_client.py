# SPDX-License-Identifier: Apache-2.0
"""The stub's side of a worker process: start it, hand it jobs, notice its death, stop it."""

import contextlib
import dataclasses
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.pooling.config import PoolingConfig
from nereid_backend.serving.channel import Channel, ChannelClosedError
from nereid_backend.serving.engine_client import EngineDiedError, Refusal
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pulse import Pulse, kill_if_hung

_STOP_TIMEOUT_S = 5.0
_START_POLL_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A job has come to its end."""

    request_id: str
    outcome: Outcome


class WorkerClient:
    """One worker process at a time; `start` may be called again after its death.

    `submit` and `abort` may be called from any thread; `start`, `receive` and `stop` belong to one.
    Messages to the worker are sent by a thread of their own: the one that receives must never wait
    for a worker that itself waits to be read.

    Attributes:
        info: what was loaded, the fields of PoolingInfo.
    """

    def __init__(self, config: PoolingConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._outbox: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._pulse: Pulse | None = None
        self._last_words = ""
        self.info: dict[str, Any] = {}

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
        command = [python, "-m", "nereid_backend.serving.pooling.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._pulse, self._last_words = Pulse(self._process.pid), ""
        self._channel = Channel(ours)
        self._outbox = queue.SimpleQueue()
        self._sender = threading.Thread(
            target=_send_all, args=(self._channel, self._outbox), name="worker-sender", daemon=True
        )
        self._sender.start()
        self._outbox.put([dataclasses.asdict(self._config)])
        try:
            self._await_ready(timeout_s, meanwhile)
        except NereidError:
            self.stop()
            raise

    def submit(self, request_id: str, job: Job) -> None:
        """Hand a job to the worker; a death in between shows in `receive`."""
        self._outbox.put(["add", request_id, *job.row()])

    def abort(self, request_id: str) -> None:
        """Tell the worker that nobody wants a job any more; it says nothing more about it."""
        self._outbox.put(["abort", request_id])

    def receive(self, timeout_s: float) -> list[Done | Refusal]:
        """What the worker has said, waiting at most `timeout_s`.

        Raises:
            EngineDiedError: the process has gone.
        """
        answers: list[Done | Refusal] = []
        for kind, *rest in self._receive(timeout_s):
            if kind == "done":
                request_id, *row = rest
                answers.append(Done(request_id, Outcome.from_row(row)))
            elif kind == "refused":
                request_id, name, message = rest
                answers.append(Refusal(request_id, _ERRORS.get(name, EngineError)(message)))
            elif kind == "fatal":
                self._last_words = rest[0]
        return answers

    def check_pulse(self, timeout_s: float, *, is_working: bool) -> None:
        """Kill a worker that hangs; call it after each `receive`.

        Args:
            timeout_s: a worker with jobs says something at least this often; 0 is no limit.
            is_working: whether it has jobs.

        Raises:
            EngineDiedError: it was silent for too long and was killed.
        """
        process, pulse = self._process, self._pulse
        if process is None or pulse is None:
            return
        killed = kill_if_hung(
            process,
            pulse,
            (timeout_s, "hang_timeout_s"),
            name="worker",
            is_working=is_working,
            is_on_cpu=self.info.get("device") == "cpu",
        )
        if killed is not None:
            raise EngineDiedError(killed)

    def stop(self) -> None:
        """End the process: ask, then terminate, then kill."""
        process, channel, sender = self._process, self._channel, self._sender
        self._process = self._channel = self._sender = None
        self._outbox.put(["stop"])
        self._outbox.put(None)
        if process is not None:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
                    break
        if sender is not None:
            sender.join()  # ends with the process, at the latest
        if channel is not None:
            channel.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None when there is none."""
        return None if self._process is None else self._process.pid

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
                    raise EngineError(rest[0])
        raise EngineError(
            f"{self._config.model} was not loaded after {timeout_s:g} s (start_timeout_s); raise "
            "the limit or look at the log for what it was loading"
        )

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
            return "the worker process is not running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            if self._last_words:
                return f"{self._last_words}; the worker process ended ({how})"
            return f"the worker process ended ({how}); the server's log says why"
        return "the worker process closed its connection"


_ERRORS: dict[str, type[NereidError]] = {
    RequestError.__name__: RequestError,
    CapacityError.__name__: CapacityError,
}


def _send_all(channel: Channel, outbox: "queue.SimpleQueue[list[Any] | None]") -> None:
    with contextlib.suppress(ChannelClosedError):  # the receiving side finds out by itself
        while (message := outbox.get()) is not None:
            channel.send(message)
