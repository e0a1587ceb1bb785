"""The deployment `Server`. Each replica starts one `nereid serve` and sends requests to it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

REPLICA_HEADER = "x-nereid-replica"
"""The response header that contains the id of the replica that sent the response."""

_PORT_FLAGS = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
# Python code that runs the command `nereid`. `python -m nereid_client` would start only the
# frontend.
_CODE_OF_NEREID_COMMAND = "import sys; from nereid_client.cli.main import main; sys.exit(main())"
_READY_EVERY_S = 0.5
_READY_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# These headers describe one connection, so a proxy must not copy them.
_CONNECTION_HEADERS = frozenset(
    ("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding")
)


class ServerUnavailableError(Exception):
    """The frontend of this replica does not answer, for example because the frontend restarts."""


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that the ingress forwards to a server.

    Attributes:
        method: the HTTP method.
        target: the URL path, and the query if there is one.
        headers: the names and values of the headers.
        body: the complete body.
        prefix_hashes: the hashes of the prompt's prefixes (see nereid.ray.routing.prefix_hashes).
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    prefix_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class ResponseStart:
    """The status and the headers of a response. `forward` yields them before the body."""

    status: int
    headers: dict[str, str]


class Server:
    """Starts `nereid serve` on free ports of its node, and forwards requests to this server."""

    def __init__(self, model: str, settings: Mapping[str, str], arguments: Sequence[str]) -> None:
        """Start `nereid serve`, and wait until its models are ready.

        Ray sends no requests to a replica before its constructor has returned. `nereid serve` runs
        a Triton server and the OpenAI frontend, each as a child process.

        Args:
            model: the path of the checkpoint.
            settings: environment variables of the server.
            arguments: further flags of `nereid serve`.

        Raises: RuntimeError if the server ended before it was ready.
        """
        ports = dict(zip(_PORT_FLAGS, _free_ports(len(_PORT_FLAGS)), strict=True))
        self._url = f"http://127.0.0.1:{ports['--openai-port']}"
        self._metrics_url = f"http://127.0.0.1:{ports['--metrics-port']}/metrics"
        # Each response contains the id of the replica in the header REPLICA_HEADER.
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._session: aiohttp.ClientSession | None = None
        port_flags = [f"{flag}={port}" for flag, port in ports.items()]
        flags = [f"--model={model}", "--log-file=-", *port_flags, *arguments]
        # `python -c CODE serve ...` does the same as `nereid serve ...`, but also works if the
        # command `nereid` is not in PATH.
        command = [sys.executable, "-c", _CODE_OF_NEREID_COMMAND, "serve", *flags]
        # The frontend listens on 127.0.0.1, because only this replica connects to the frontend.
        environment = {**os.environ, "NEREID_OPENAI_HOST": "127.0.0.1", **settings}
        self._process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_replica)
        self._wait_until_ready(ports["--openai-port"])

    def _wait_until_ready(self, port: int) -> None:
        """Wait until the models answer. Ray sends no requests to this replica before that.

        Raises: RuntimeError if the server has ended.
        """
        while not _is_ready(port):
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"nereid serve ended with exit code {self._process.returncode}. Its output is "
                    "in the log of this replica."
                )
            time.sleep(_READY_EVERY_S)

    async def forward(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Send a request to the server, and yield the response as it arrives.

        If this generator is closed, the request is aborted.

        Raises:
            ServerUnavailableError: the server accepted no connection, or the connection was lost.
        """
        url = f"{self._url}{request.target}"
        headers = _without_connection_headers(request.headers)
        try:
            async with self._http.request(
                request.method, url, data=request.body, headers=headers
            ) as response:
                response_headers = dict(_without_connection_headers(response.headers.items()))
                response_headers[REPLICA_HEADER] = self._replica_id
                yield ResponseStart(response.status, response_headers)
                async for chunk in response.content.iter_any():
                    yield chunk
        except aiohttp.ClientError as error:
            raise ServerUnavailableError(
                f"The server of this replica is not available: {error}"
            ) from None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """The HTTP client. The first request creates it in the event loop of the requests."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def check_health(self) -> None:
        """Raise a RuntimeError if the server has ended. Ray then replaces this replica.

        `nereid serve` restarts the processes that it supervises. It ends itself only if restarts do
        not help.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"nereid serve ended with exit code {self._process.returncode}.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of the language model, from which Ray computes the number of servers."""
        try:
            async with self._http.get(self._metrics_url) as response:
                return _load(await response.text())
        except aiohttp.ClientError:
            return {}  # the Triton server restarts

    async def __del__(self) -> None:
        """Stop the server. Ray calls this method after the last request of this replica."""
        if self._session is not None:
            await self._session.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)


def _is_ready(port: int) -> bool:
    """Return whether the frontend on this port reports that the models answer."""
    request = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), _READY_TIMEOUT_S) as connection:
            connection.sendall(request)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _without_connection_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Remove the headers that describe a single connection. Return all other headers."""
    return [(name, value) for name, value in headers if name.lower() not in _CONNECTION_HEADERS]


def _load(page: str) -> dict[str, float]:
    """Read the number of waiting sequences and the use of the KV cache from a metrics page.

    The page of a server with several engine processes has one line for each process. The numbers of
    waiting sequences are added. The use of the KV cache is the average over all processes.

    Example: "nereid:num_requests_waiting 3" returns {"num_requests_waiting": 3.0}.
    """
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values.setdefault(sample.name.removeprefix("nereid:"), []).append(sample.value)
    load = {}
    if waiting := values.get("num_requests_waiting"):
        load["num_requests_waiting"] = sum(waiting)
    if usage := values.get("kv_cache_usage_perc"):
        load["kv_cache_usage_perc"] = statistics.fmean(usage)
    return load


def _free_ports(count: int) -> list[int]:
    """Return `count` TCP ports of 127.0.0.1 on which no process listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in sockets]


def _end_with_replica() -> None:
    """Make the kernel send SIGTERM to the server when Ray kills the process of this replica."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
