"""Server-sent events: how they are written, and a response that stops when its client goes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nereid_client.errors import Disconnected

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# ASCII only: some readers take U+2028 and U+0085 for line ends, which would cut an event in two.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: Mapping[str, Any]) -> bytes:
    """One event whose data is a JSON object."""
    return b"data: " + _encode(data).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come and closes their source as soon as the client has gone.

    Starlette's StreamingResponse leaves noticing a disconnect to the next write on newer servers;
    a request that is queued has no writes, and it is the one most worth giving up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        """Nothing is sent yet.

        Args:
            events: what to send; each piece costs a write to the socket. Nothing follows DONE.
            source: what `events` reads from; it is closed too, for `events` may never have begun.
        """
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would collect events otherwise
        self._events = events
        self._source = source

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - ASGI's signature
        receive: Receive,
        send: Send,
    ) -> None:
        """Send everything, or stop at the client's disconnect without an error."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except Disconnected:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            is_last = False
            async for data in self._events:
                is_last = data.endswith(DONE)
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if not is_last:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Only after the request's body was read: until then `receive` gives pieces of it.

    Raises: Disconnected.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(request: Request, source: AsyncGenerator[T]) -> T | None:
    """The first item, None when there is none; closes `source` when that can't be had.

    Waiting for it before the response starts lets an error still choose the HTTP status.
    """
    try:
        return await unless_disconnected(request.receive, _next(source))
    except BaseException:
        await source.aclose()
        raise


async def _next(source: AsyncGenerator[T]) -> T | None:
    return await anext(source, None)
