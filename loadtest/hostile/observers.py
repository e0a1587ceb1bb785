"""Observers that run beside the attacks: a client, a memory watch, and a canary address."""

import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import NamedTuple, Self

import psutil

from loadtest.hostile.requests import CHATS, chat, connect
from loadtest.server import processes
from loadtest.server.periodic import Periodic
from loadtest.server.served import Served

_SAMPLE_S = 0.3
_PAUSE_S = 0.2
_STOP_LIMIT_S = 90.0


class Wait(NamedTuple):
    """The time at which a request started, and the seconds until its first token."""

    started: float
    seconds: float


class Error(NamedTuple):
    """The time at which a request started, and a description of its error."""

    started: float
    text: str


class Neighbour:
    """A well-behaved client that requests a short stream again and again in its `with` block.

    The client is a process of its own. As a thread beside several hundred attacking threads, it
    would also measure how long it waits for the lock of the Python interpreter.

    Attributes:
        waits: the time to the first token of each request that succeeded.
        errors: the errors of the other requests.
    """

    def __init__(self, port: int, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._stopped = context.Event()
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_request_repeatedly, args=(port, key, self._stopped, sender), daemon=True
        )
        self.waits: list[Wait] = []
        self.errors: list[Error] = []

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the current request, and read the results.

        Raises:
            RuntimeError: the process does not answer within 90 seconds.
        """
        self._stopped.set()
        if not self._receiver.poll(_STOP_LIMIT_S):
            raise RuntimeError("the process of the well-behaved client does not answer")
        self.waits, self.errors = self._receiver.recv()
        self._process.join(10)


def _request_repeatedly(port: int, key: str, stopped: Event, sender: Connection) -> None:
    """Send requests until `stopped` is set. Then send the waiting times and the errors back."""
    waits, errors = [], []
    while not stopped.wait(_PAUSE_S):
        started = time.monotonic()
        try:
            waits.append(Wait(started, first_token_s(port, key)))
        except OSError as error:
            errors.append(Error(started, str(error)))
    sender.send((waits, errors))


def first_token_s(port: int, key: str) -> float:
    """Request a short stream, and return the seconds until its first token.

    Raises:
        OSError: there is no token.
    """
    body = json.dumps(chat(stream=True, max_tokens=3, temperature=0)).encode()
    head = (
        f"POST {CHATS} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.monotonic()
    with connect(port, limit_s=60) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while block := connection.recv(65536):
            received += block
            if b'"content"' in received:
                return time.monotonic() - started
    raise OSError(f"no token: {received[-300:]!r}")


class Memory(NamedTuple):
    """The first and the largest measured memory of one or more processes, in MiB."""

    first_mib: float
    peak_mib: float

    @property
    def growth_mib(self) -> float:
        """The difference of the two values."""
        return self.peak_mib - self.first_mib

    def measured(self, mib: float) -> "Memory":
        """Return the memory after a further measurement."""
        return Memory(self.first_mib, max(self.peak_mib, mib))


class MemoryWatch(Periodic):
    """Samples the memory of the server's processes while its `with` block runs.

    The memory of a process is its proportional set size (PSS): a page that several processes share
    is divided among these processes. The Triton server shares large tensors with its stubs, so the
    sum of the resident set sizes would count such a tensor several times.

    Attributes:
        by_role: the memory of each process.
        total: the memory of all processes together.
        peak_at: the time of the largest memory.
    """

    def __init__(self, served: Served) -> None:
        super().__init__(_SAMPLE_S)
        self._served = served
        self.by_role = {role: Memory(mib, mib) for role, mib in self._measure().items()}
        total_mib = sum(memory.first_mib for memory in self.by_role.values())
        self.total = Memory(total_mib, total_mib)
        self.peak_at = time.monotonic()

    def look(self) -> None:
        """Measure the memory of all processes."""
        current = self._measure()
        for role, mib in current.items():
            self.by_role[role] = self.by_role.get(role, Memory(mib, mib)).measured(mib)
        total_mib = sum(current.values())
        if total_mib > self.total.peak_mib:
            self.peak_at = time.monotonic()
        self.total = self.total.measured(total_mib)

    def _measure(self) -> dict[str, float]:
        """Return the current memory of each process in MiB."""
        by_role = {}
        for role, process in processes.roles(self._served).items():
            with suppress(psutil.NoSuchProcess):  # the process has just ended
                by_role[role] = process.memory_full_info().pss / 2**20
        return by_role


@contextmanager
def canary() -> Iterator[tuple[int, list[str]]]:
    """Listen on a port to which nobody should connect. Yield the port and the connections."""
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:  # the listener was closed
                    return
                visits.append(str(address))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1], visits
