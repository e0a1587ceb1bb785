"""Runs `nereid serve` with a real Triton server that serves the echo model."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from fakes.live_frontend import wait_for
from loadtest.server.served import free_ports

ECHO_REPOSITORY = Path(__file__).parent / "echo_repository"
NEREID = Path(sys.prefix) / "bin" / "nereid"


class Serve:
    """A running process of `nereid serve`, by default with the echo model.

    Attributes:
        lines: the lines that the process has printed so far.
        ports: name of an endpoint -> port.
        log: the log file of the servers.
        descendants: all descendant processes when the server became ready.
    """

    def __init__(
        self, folder: Path, *arguments: str, model: Path | None = None, **variables: str
    ) -> None:
        self.log = folder / "serve.log"
        endpoints = ("http", "grpc", "metrics", "openai")
        self.ports = dict(zip(endpoints, free_ports(len(endpoints)), strict=True))
        command = [str(NEREID), "serve", f"--log-file={self.log}"]
        command += [f"--{endpoint}-port={port}" for endpoint, port in self.ports.items()]
        if not any(argument.startswith("--config") for argument in arguments):
            command.append(f"--model={model or make_checkpoint(folder)}")
        if not any(argument.startswith("--model-repository") for argument in arguments):
            command.append(f"--model-repository={ECHO_REPOSITORY}")
        # Settings in the environment of the tests must not change the server.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NEREID_")}
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | variables,
        )
        self.lines: list[str] = []
        self.descendants: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(line.rstrip("\n"))

    @property
    def curl(self) -> str | None:
        """Return the first curl command that the process printed, or None if there is none yet."""
        return next((line for line in self.lines if line.startswith("curl ")), None)

    def wait_until_ready(self, timeout_s: float = 300) -> None:
        """Wait until the server is ready.

        Raises: AssertionError with the output if the server ends before it is ready."""
        wait_for(lambda: self.curl or self._process.poll() is not None, timeout_s=timeout_s)
        assert self.curl, "\n".join(self.lines)
        self.descendants = psutil.Process(self._process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """Return the first descendant process whose command line contains `word`."""
        return next(p for p in self.descendants if word in _command_line(p))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to `nereid serve`."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until `nereid serve` ends, and return the exit code.

        Raises: AssertionError with the output if the server does not end."""
        try:
            code = self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(["The server did not end.", *self.lines])) from None
        self._reader.join(timeout=30)
        if self._process.stdout:
            self._process.stdout.close()
        return code

    def left(self) -> list[psutil.Process]:
        """Return the descendant processes that are still running."""
        return [p for p in self.descendants if _runs(p)]

    def shared_memory(self) -> list[Path]:
        """Return the shared-memory files of the server."""
        return list(Path("/dev/shm").glob(f"nereid_{self._process.pid}_*"))

    def end(self) -> None:
        """End `nereid serve` with repeated SIGTERM signals."""
        while self._process.poll() is None:
            self._process.terminate()  # the second signal makes `nereid serve` end at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.2)
        self.wait()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # the process has ended or is a zombie
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # the process ended between the two calls
        return False


@contextmanager
def serve(
    folder: Path, *arguments: str, model: Path | None = None, **variables: str
) -> Iterator[Serve]:
    """Run `nereid serve` with arguments and environment variables, and end it afterwards."""
    running = Serve(folder, *arguments, model=model, **variables)
    try:
        yield running
    finally:
        running.end()


def make_checkpoint(folder: Path) -> Path:
    """Create and return a folder that `nereid serve` accepts as a checkpoint.

    The echo model does not read the folder.
    """
    checkpoint = folder / "echo-model"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return checkpoint
