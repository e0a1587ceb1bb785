"""Forwards requests from one worker to another worker over Unix sockets."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httptools
from fastapi import Request, Response
from starlette.types import Scope

from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError
from nereid_client.streaming.sse import EventStream
from nereid_client.workers.worker_place import WorkerPlace, is_from_worker

_READ_BYTES = 64 * 1024
# These headers describe the connection to the client, so they are not sent to the other worker.
_CONNECTION_HEADERS = {b"connection", b"content-length", b"transfer-encoding", b"keep-alive"}


class RunsElsewhereError(Exception):
    """Raised if a request refers to a response that another worker generates.

    The request must be forwarded to that worker.

    Attributes:
        worker: the number of the worker.
    """

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.worker = worker


async def forward_to_worker(request: Request, error: Exception) -> Response:
    """Forward a request to another worker, and return the response of that worker.

    The application calls this function if a route raises a RunsElsewhereError. The body of the
    request is not forwarded, because the routes that raise this error have no body. If the other
    worker has ended, the response has the status 503.
    """
    assert isinstance(error, RunsElsewhereError)  # the signature is that of Starlette's handlers
    try:
        response = await _send(request.app.state.worker, error.worker, request, b"")
    except ApiError as unavailable:
        return error_response(unavailable, request.scope)  # the scope decides the error's format
    if response.media_type.startswith(EventStream.media_type):
        return EventStream(response.body())
    content = await response.read_all()
    return Response(content, response.status, media_type=response.media_type or None)


async def ask_other_workers(request: Request, body: dict[str, Any]) -> list[Any]:
    """Send a request to all other workers, and return the JSON bodies of the responses.

    A worker that has ended or is still starting does not answer. The result contains no body of
    such a worker.

    Args:
        request: the request that this worker has received. Its method, path and headers are sent.
        body: the JSON body to send.
    """
    place: WorkerPlace | None = request.app.state.worker
    if place is None:  # there are no other workers
        return []
    if is_from_worker(request.scope):  # two workers must not ask each other forever
        return []
    encoded_body = json.dumps(body).encode()
    answers = []
    for worker in place.others:
        try:
            response = await _send(place, worker, request, encoded_body)
        except ApiError:
            continue
        content = await response.read_all()
        if response.status == 200:
            answers.append(json.loads(content))
    return answers


class _WorkerResponse:
    """Reads the response of another worker from a connection.

    Attributes:
        status: the HTTP status of the response. It is 0 until `read_headers` has returned.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self._headers: dict[str, str] = {}  # the names are in lower case
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._has_headers = False  # whether all headers have arrived
        self._is_complete = False  # whether the whole response has arrived
        self._parts: list[bytes] = []  # the parts of the body that have arrived, but are not read

    @property
    def media_type(self) -> str:
        """The value of the header Content-Type, or "" if the response has no such header."""
        return self._headers.get("content-type", "")

    async def read_headers(self) -> None:
        """Read the status and the headers of the response.

        Raises: EOFError if the connection ends before the headers are complete.
        """
        while not self._has_headers:
            await self._read()
        self.status = int(self._parser.get_status_code())

    async def read_all(self) -> bytes:
        """Read the whole body, and then close the connection."""
        return b"".join([part async for part in self.body()])

    async def body(self) -> AsyncGenerator[bytes]:
        """Yield the body of the response as it arrives, and then close the connection."""
        try:
            # One call of `_read` can add several parts or none. Parts can also arrive with the
            # headers, before this loop starts.
            while self._parts or not self._is_complete:
                if self._parts:
                    received = b"".join(self._parts)
                    self._parts.clear()
                    yield received
                else:
                    await self._read()
        except EOFError:
            return  # the other worker ended, and the client receives an incomplete body
        finally:
            self._writer.close()

    async def _read(self) -> None:
        """Read bytes from the connection. Pass them to the parser, which calls `on_...` methods.

        Raises: EOFError if the connection has ended.
        """
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise EOFError
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. The parser calls this method."""
        self._headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        """Record that all headers have arrived. The parser calls this method."""
        self._has_headers = True

    def on_body(self, part: bytes) -> None:
        """Store a part of the body. The parser calls this method."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Record the end of the response. The parser calls this method."""
        self._is_complete = True


async def _send(place: WorkerPlace, worker: int, request: Request, body: bytes) -> _WorkerResponse:
    """Send the method, path and headers of `request`, with the given body, to another worker.

    Returns: the response, whose status and headers have arrived.

    Raises: ApiError 503 if the other worker has ended.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(place.socket_path(worker))
        response = _WorkerResponse(reader, writer)
        try:
            writer.write(_http_request(request.scope, body))
            await response.read_headers()
        except BaseException:
            writer.close()
            raise
        return response
    except (OSError, EOFError):
        raise ApiError(
            503,
            f"The frontend process {worker}, which handles this request, has ended and is being "
            "restarted. Try again in 1 s.",
            code="unavailable",
            headers={"Retry-After": "1"},
        ) from None


def _http_request(scope: Scope, body: bytes) -> bytes:
    r"""Return the bytes of an HTTP request with the method, path and headers in `scope`.

    Example: b"GET /v1/responses/a HTTP/1.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".
    """
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), target)]
    headers = (header for header in scope["headers"] if header[0] not in _CONNECTION_HEADERS)
    lines += [b"%s: %s" % header for header in headers]
    lines += [b"connection: close", b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)
