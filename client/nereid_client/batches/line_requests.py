"""Sends the request of a batch line to the application itself, and repeats it after an overload.

The request passes through the same middleware and routes as a request from the network. The request
has no API key. Instead, it belongs to the client that created the batch, with the lowest priority.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.api_key import CLIENT_OF_SCOPE
from nereid_client.middleware.client_keys import Client, KeyEntry

_LOWEST_PRIORITY = 2**31 - 1
# A running line is preempted for a request of a client with the weight 1.
_WEIGHT = 0.001
# While other requests run, the limit for the lines that run is divided by this number.
_FRACTION_BESIDE_OTHERS = 4
_SLOT_CHECK_EVERY_S = 0.05
_MAX_OUTAGES = 5
_LONGEST_WAIT_S = 30.0
_READY_CHECK_EVERY_S = 1.0
_OVERLOADED = 429
_UNAVAILABLE = 503
_ABORTED = 499


@dataclass(frozen=True)
class LineResponse:
    """The response to the request in one line.

    Attributes:
        status: the HTTP status.
        request_id: the id of the request in logs.
        body: the JSON body.
    """

    status: int
    request_id: str
    body: Any

    def as_json(self) -> dict[str, Any]:
        """Return the member `response` of a result line."""
        return {"status_code": self.status, "request_id": self.request_id, "body": self.body}


def batch_client(owner: str) -> Client:
    """Return the Client object for the requests in the batches of one client.

    In the waiting queue of the language model, these requests come after the requests of all other
    clients. They do not count towards the limits of the client's API key.

    Args:
        owner: the name of the client that created the batches.
    """
    entry = KeyEntry(key="unused", weight=_WEIGHT)
    return Client(owner, entry, share=f"batches of {owner}", priority=_LOWEST_PRIORITY)


class LineSlots:
    """Limits the number of lines that run at the same time.

    Args:
        limit: the setting max_batch_requests.
        gate: counts all running requests.

    Attributes:
        is_paused: whether `acquire` lets all lines wait.
    """

    def __init__(self, limit: int, gate: Gate) -> None:
        self.is_paused = False
        self._limit = limit
        self._gate = gate
        self._slots = asyncio.Semaphore(limit)
        self._num_running = 0

    async def acquire(self) -> None:
        """Wait until a line may run."""
        await self._slots.acquire()
        try:
            while self.is_paused or not self._has_room():
                await asyncio.sleep(_SLOT_CHECK_EVERY_S)
        except asyncio.CancelledError:
            self._slots.release()
            raise
        self._num_running += 1

    def release(self) -> None:
        """Allow another line to run. Call this when a line has ended."""
        self._num_running -= 1
        self._slots.release()

    def _has_room(self) -> bool:
        has_others = self._gate.num_requests > self._num_running
        most_beside_others = max(1, self._limit // _FRACTION_BESIDE_OTHERS)
        return not has_others or self._num_running < most_beside_others


class LineSender:
    """Sends the requests in the lines of input files to an application.

    Args:
        app: the application.
        is_ready: returns whether the language model accepts requests.
    """

    def __init__(self, app: ASGIApp, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._app = app
        self._is_ready = is_ready

    async def send(self, path: str, body: bytes, client: Client) -> LineResponse:
        """Send a request and return the response. If the server is overloaded, repeat the request.

        If the server fails during the request, the request is repeated only a few times. The
        request itself may be the cause of the failure.

        Args:
            path: the path of the route.
            body: the JSON body of the request.
            client: the client that the request belongs to.
        """
        num_outages = 0
        wait_s = 1.0
        while True:
            status, headers, raw = await self._call(path, body, client)
            if status not in (_OVERLOADED, _UNAVAILABLE):
                return _line_response(status, headers, raw)
            if status == _UNAVAILABLE and not await self._is_ready():
                num_outages += 1
                if num_outages == _MAX_OUTAGES:
                    return _line_response(status, headers, raw)
                while not await self._is_ready():
                    await asyncio.sleep(_READY_CHECK_EVERY_S)
            else:
                await asyncio.sleep(max(wait_s, float(headers.get("retry-after", "0"))))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _call(self, path: str, body: bytes, client: Client) -> tuple[int, Headers, bytes]:
        """Call the application once, and return the status, the headers and the body."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        status, headers, parts = 500, Headers(), []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # a batch never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            else:
                parts.append(message.get("body", b""))

        # The request of a line ends here. The application has sent a 500 and logged the traceback.
        with contextlib.suppress(Exception):
            await self._app(_scope(path, len(body), client), receive, send)
        return status, headers, b"".join(parts)


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


def _line_response(status: int, headers: Headers, raw: bytes) -> LineResponse:
    return LineResponse(status, headers.get("x-request-id", ""), json.loads(raw or b"null"))
