"""Sends the requests of a batch to the frontend's application, without a network connection.

Each line of the input file contains one request. If the server is overloaded, the request is sent
again later.

A request of a batch passes through the same middleware and routes as a request from the network.
The request has no API key. Its client is the client that created the batch, and its priority is the
lowest one.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.api_key import CLIENT_OF_SCOPE
from nereid_client.middleware.client_keys import Client, KeyEntry

_LOWEST_PRIORITY = 2**31 - 1
# The scheduling weight of batch requests. Other requests have the weight 1 by default. If memory is
# scarce, the engine preempts the requests with the lowest weight first.
_WEIGHT = 0.001
# While other requests are running, the limit on concurrent batch requests is divided by this
# number.
_FRACTION_BESIDE_OTHERS = 4
_SLOT_CHECK_EVERY_S = 0.05
_MAX_OUTAGES = 5
_SHORTEST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_READY_CHECK_EVERY_S = 1.0
# The process of a model can die while it handles a request. Such a request is sent at most this
# number of times.
_MAX_CRASHES = 2
# Matches the error message for such a request.
_PROCESS_DIED = re.compile(r"the (engine|worker) process (ended|closed its connection|was killed)")
_OVERLOADED = 429
_FAILED = 500
_UNAVAILABLE = 503
_ABORTED = 499


@dataclass(frozen=True)
class LineResponse:
    """The response to one request of a batch.

    Attributes:
        status: the HTTP status.
        request_id: the id of the request in logs.
        body: the JSON body.
        retry_after_s: the seconds in the header Retry-After. 0 if there is no such header.
    """

    status: int
    request_id: str
    body: Any
    retry_after_s: float = 0.0

    @property
    def has_process_died(self) -> bool:
        """Whether the process of the model has died during the request."""
        is_error = self.status == _FAILED and isinstance(self.body, dict)
        message = self.body.get("error", {}).get("message", "") if is_error else ""
        return _PROCESS_DIED.match(message) is not None

    def as_json(self) -> dict[str, Any]:
        """Return the response as a JSON object for a line of the result file."""
        return {"status_code": self.status, "request_id": self.request_id, "body": self.body}


def batch_client(owner: str) -> Client:
    """Return a `Client` object that gives a client's batch requests the lowest priority.

    In the waiting queue of the language model, the requests of batches come after all other
    requests. The requests of batches do not count towards the limits of the client's API key.

    Args:
        owner: the name of the client that created the batches.
    """
    entry = KeyEntry(key="unused", weight=_WEIGHT)
    return Client(owner, entry, share=f"batches of {owner}", priority=_LOWEST_PRIORITY)


class LineSlots:
    """Limits the number of batch requests that run at the same time.

    Args:
        limit: the setting max_batch_requests.
        gate: counts all running requests.

    Attributes:
        is_paused: whether new batch requests must wait. While it is True, `acquire` waits.
    """

    def __init__(self, limit: int, gate: Gate) -> None:
        self.is_paused = False
        self._limit = limit
        self._gate = gate
        self._slots = asyncio.Semaphore(limit)
        self._num_running = 0

    async def acquire(self) -> None:
        """Wait until one more batch request may run."""
        await self._slots.acquire()
        try:
            while self.is_paused or not self._has_room():
                await asyncio.sleep(_SLOT_CHECK_EVERY_S)
        except asyncio.CancelledError:
            self._slots.release()
            raise
        self._num_running += 1

    def release(self) -> None:
        """Record that a batch request has ended. Another batch request may then run."""
        self._num_running -= 1
        self._slots.release()

    def _has_room(self) -> bool:
        has_others = self._gate.num_requests > self._num_running
        most_beside_others = max(1, self._limit // _FRACTION_BESIDE_OTHERS)
        return not has_others or self._num_running < most_beside_others


class LineSender:
    """Sends the requests of batches to an ASGI application.

    Args:
        app: the application.
        is_ready: a function that returns whether the language model accepts requests.
    """

    def __init__(self, app: ASGIApp, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._app = app
        self._is_ready = is_ready

    async def send(self, path: str, body: bytes, client: Client) -> LineResponse:
        """Send a request and return the response. If the server is overloaded, try again later.

        The waiting time becomes longer with each attempt. If the server fails during the request,
        the request is repeated only a few times, because the request itself may be the cause.

        Args:
            path: the path of the route.
            body: the JSON body of the request.
            client: the client that created the batch, as returned by `batch_client`.
        """
        num_outages = 0
        num_crashes = 0
        wait_s = _SHORTEST_WAIT_S
        while True:
            response = await self._call(path, body, client)
            if response.has_process_died:
                num_crashes += 1
                if num_crashes == _MAX_CRASHES:
                    return response
                await asyncio.sleep(_SHORTEST_WAIT_S)
                continue
            if response.status not in (_OVERLOADED, _UNAVAILABLE):
                return response
            has_server_failed = response.status == _UNAVAILABLE and not await self._is_ready()
            if has_server_failed:
                num_outages += 1
                if num_outages == _MAX_OUTAGES:
                    return response
                await self._wait_until_ready()
            else:  # the server is overloaded
                await asyncio.sleep(max(wait_s, response.retry_after_s))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _wait_until_ready(self) -> None:
        while not await self._is_ready():
            await asyncio.sleep(_READY_CHECK_EVERY_S)

    async def _call(self, path: str, body: bytes, client: Client) -> LineResponse:
        """Send one request to the application, and return the response."""
        exchange = _Exchange(body)
        # If the application fails with an exception, it sends a response with the status 500, logs
        # the traceback, and raises the exception again. The exception must not end the batch.
        with contextlib.suppress(Exception):
            await self._app(_scope(path, len(body), client), exchange.receive, exchange.send)
        return exchange.response()


class _Exchange:
    """One request and its response, as the messages that the application receives and sends."""

    def __init__(self, body: bytes) -> None:
        self._request = [{"type": "http.request", "body": body, "more_body": False}]
        self._status = 500
        self._headers = Headers()
        self._parts: list[bytes] = []  # the parts of the response's body

    async def receive(self) -> Message:
        """At the first call, return the request body. At the second call, wait forever."""
        if self._request:
            return self._request.pop()
        # If the second call returned a message, the application would assume that the client has
        # disconnected.
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        """Store a message of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = Headers(raw=message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def response(self) -> LineResponse:
        """Return the complete response. If it has an empty body, the field `body` is None."""
        return LineResponse(
            self._status,
            request_id=self._headers.get("x-request-id", ""),
            body=json.loads(b"".join(self._parts) or b"null"),
            retry_after_s=float(self._headers.get("retry-after", "0")),
        )


def _scope(path: str, num_bytes: int, client: Client) -> Scope:
    """Return the ASGI scope of a POST request with a JSON body of `num_bytes` bytes."""
    headers = {"content-type": "application/json", "content-length": str(num_bytes)}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {},
        CLIENT_OF_SCOPE: client,
    }
