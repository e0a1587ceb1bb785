"""Observers that run beside the attacks: a client, a memory watch, and a canary address."""

import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import psutil

from loadtest.hostile.attack import chat
from loadtest.server import processes
from loadtest.server.served import Served

_SAMPLE_S = 0.3
_PAUSE_S = 0.2


class Neighbour:
    """A well-behaved client that requests a short stream again and again.

    The client is a process of its own. As a thread beside several hundred attacking threads, it
    would also measure how long it waits for the lock of the Python interpreter.

    Attributes:
        waits: for each request the time at which it started, and the seconds until the first token.
        errors: the time and the description of each request that failed.
    """

    def __init__(self, port: int, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._stopped = context.Event()
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_request_repeatedly, args=(port, key, self._stopped, results), daemon=True
        )
        self.waits: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []

    def start(self) -> None:
        """Start the process that sends the requests."""
        self._process.start()

    def stop(self) -> None:
        """Stop after the current request, and read the results.

        Raises: RuntimeError if the process does not answer within 90 seconds.
        """
        self._stopped.set()
        if not self._results.poll(90):
            raise RuntimeError("the process of the well-behaved client does not answer")
        self.waits, self.errors = self._results.recv()
        self._process.join(10)


def _request_repeatedly(port: int, key: str, stopped: Event, results: Connection) -> None:
    """Send requests until `stopped` is set. Then send the waiting times and the errors back."""
    waits: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    while not stopped.wait(_PAUSE_S):
        started = time.monotonic()
        try:
            wait_s = first_token_s(port, key)
        except OSError as error:
            errors.append((started, str(error)))
        else:
            waits.append((started, wait_s))
    results.send((waits, errors))


def first_token_s(port: int, key: str) -> float:
    """Request a short stream, and return the seconds until its first token.

    Raises: OSError if there is no token.
    """
    body = json.dumps(chat(stream=True, max_tokens=3, temperature=0)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while block := connection.recv(65536):
            received += block
            if b'"content"' in received:
                return time.monotonic() - started
    raise OSError(f"no token: {received[-300:]!r}")


class MemoryWatch(threading.Thread):
    """Samples the memory of the server's processes.

    The memory of a process is its proportional set size (PSS): a page that several processes share
    is divided among these processes. The Triton server shares large tensors with its stubs, so the
    sum of the resident set sizes would count such a tensor several times.

    Attributes:
        peaks: for each process the first and the largest memory in MiB.
        total: the first and the largest memory of all processes together, in MiB.
        peak_at: the time of the largest memory.
    """

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._stopped = threading.Event()
        self.peaks: dict[str, tuple[float, float]] = {}
        self.total = (0.0, 0.0)
        self.peak_at = 0.0

    def run(self) -> None:
        """Sample the memory until `stop` is called."""
        while not self._stopped.wait(_SAMPLE_S):
            found = {}
            for role, process in processes.roles(self._served).items():
                try:
                    found[role] = process.memory_full_info().pss / 2**20
                except psutil.NoSuchProcess:
                    continue
            for role, mib in found.items():
                first, most = self.peaks.get(role, (mib, mib))
                self.peaks[role] = (first, max(most, mib))
            total = sum(found.values())
            first, most = self.total
            if total > most:
                self.peak_at = time.monotonic()
            self.total = (first or total, max(most, total))

    def stop(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self.join(10)


@contextmanager
def canary() -> Iterator[tuple[int, list[str]]]:
    """Listen on a port to which nobody should connect. Yield the port and the connections."""
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                visits.append(str(address))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1], visits
