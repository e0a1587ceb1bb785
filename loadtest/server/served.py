"""A complete `nereid serve` on free ports, for a test or a benchmark."""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_REPOSITORY = Path(__file__).resolve().parents[2]
# The limit is shorter than the time limit of a test, so that a failure shows the server's output.
_START_TIMEOUT_S = 480.0
_STOP_TIMEOUT_S = 120.0
_SECOND_SIGNAL_AFTER_S = 0.2
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_ERROR_PREFIX = "nereid serve: "
# Flags of a server without embedding model and reranker, which starts in half the time.
ALONE = ("--embedding-model=none", "--rerank-model=none")
_LIBC = ctypes.CDLL(None)
_LOWEST_PORT = 10_000
_NUMBER_OF_PORTS = 22_768
_FIRST_PORT = random.randrange(_NUMBER_OF_PORTS)
# The ports that `free_ports` tries next. The iterator begins again after the last port.
_PORTS = (_LOWEST_PORT + (_FIRST_PORT + index) % _NUMBER_OF_PORTS for index in itertools.count())


def free_ports(count: int) -> list[int]:
    """Return `count` TCP ports of 127.0.0.1 on which no process listened a moment ago.

    No port is returned twice soon: each process tries the ports from 10000 to 32767 in turn, and
    begins at a random port. Linux by default gives outgoing connections only higher ports, so such
    a connection cannot take a port before its server listens.
    """
    free = (port for port in _PORTS if _is_free(port))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def error_message(output: str) -> str | None:
    """Return the message with which `nereid serve` refused to start, or None if there is none.

    Example: the line `nereid serve: the port is in use` gives `"the port is in use"`.
    """
    lines = (
        line.removeprefix(_ERROR_PREFIX)
        for line in output.splitlines()
        if line.startswith(_ERROR_PREFIX)
    )
    return next(lines, None)


class Served:
    """A running `nereid serve`, as a context manager.

    Args:
        model: the folder of the checkpoint, or None for the demo.
        environment: NEREID_* settings.
        arguments: further flags of `nereid serve`.

    Attributes:
        http_port, grpc_port, metrics_port, openai_port: the ports of the server on 127.0.0.1.
        environment: all environment variables of the server.
        output: the text that the server has printed so far.
        process: the process of the supervisor.
    """

    def __init__(
        self,
        model: Path | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port, self.openai_port = free_ports(4)
        descriptor, log = tempfile.mkstemp(prefix="nereid-served-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._server_log = self._log.with_suffix(".server")
        self._command = [
            str(Path(sys.executable).parent / "nereid"),
            "serve",
            *([f"--model={model}"] if model else []),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--openai-port={self.openai_port}",
            f"--log-file={self._server_log}",
            *arguments,
        ]
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        """The text that the server has printed so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def server_log(self) -> str:
        """The text that the Triton server and the frontend have written to the log file so far."""
        return self._server_log.read_text(encoding="utf-8", errors="replace")

    @property
    def frontend_url(self) -> str:
        """The URL of the frontend, without the path of an API."""
        return f"http://127.0.0.1:{self.openai_port}"

    @property
    def openai_url(self) -> str:
        """The base URL of the OpenAI API."""
        return f"{self.frontend_url}/v1"

    @property
    def http_url(self) -> str:
        """The base URL of the Triton server's HTTP endpoint."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """The address of the Triton server's gRPC endpoint."""
        return f"127.0.0.1:{self.grpc_port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # also if a test is interrupted by its time limit
            self.stop()
            self._remove_logs()
            raise
        return self

    def _start(self) -> None:
        """Start the server, and wait until it prints that it is ready."""
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=_REPOSITORY,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "nereid: ready" not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"nereid serve did not become ready:\n{self.output}")
            time.sleep(0.1)

    def stop(self) -> int:
        """Stop the server with SIGTERM, as a service manager does, and return its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        """End the server at once. With `stop`, the end of the Triton server takes three seconds."""
        while self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # the second signal kills all processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_SECOND_SIGNAL_AFTER_S)
        self._remove_logs()

    def _remove_logs(self) -> None:
        for log in (self._log, self._server_log):
            log.unlink(missing_ok=True)


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends or is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
