"""Encode server-sent events, and send them until the client disconnects."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nereid_client.errors import Disconnected

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# This encoder is slow. It is used for texts that pydantic's encoder rejects (see `_encode`).
_encode_any_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: Mapping[str, Any]) -> bytes:
    r"""Return a server-sent event with a JSON object as its data.

    Example: {"a": 1} returns b'data: {"a":1}\n\n'.
    """
    return b"data: " + _encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    r"""Return a server-sent event with an event name, which is the value of `data["type"]`.

    Example: {"type": "error"} returns b'event: error\ndata: {"type":"error"}\n\n'.
    """
    return f"event: {data['type']}\n".encode() + event(data)


def _encode(data: Mapping[str, Any]) -> bytes:
    r"""Return JSON in ASCII, because some clients mistake U+2028 and U+0085 for the end of a line.

    pydantic's encoder is several times faster than Python's, but rejects half of a surrogate pair,
    such as "\ud800".
    """
    try:
        return to_json(data, ensure_ascii=True, inf_nan_mode="null")
    except PydanticSerializationError:
        return _encode_any_text(data).encode()


class EventStream(Response):
    """A response that sends events as they arrive. It stops as soon as the client disconnects.

    Starlette's StreamingResponse notices a disconnect only at its next write. But a request in the
    queue has nothing to write yet, and cancelling such a request saves the most work.

    Args:
        events: the bytes to send. Each item costs a write to the socket. The response ends after
            an item that ends with DONE, or else after the last item.
        also_close: the generator that `events` reads from, or None if there is no such generator.
            It is closed separately, because `events` closes it only if `events` has started.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], also_close: AsyncGenerator[Any] | None = None
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx buffers the events without this header
        self._events = events
        self._also_close = events if also_close is None else also_close

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - ASGI's signature
        receive: Receive,
        send: Send,
    ) -> None:
        """Send all events, or stop without an error when the client disconnects."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except Disconnected:
            return

    async def _send_all(self, send: Send) -> None:
        """Send the headers and all events. Then close `_events` and `_also_close`."""
        async with aclosing(self._also_close), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            is_last = False
            async for data in self._events:
                is_last = data.endswith(DONE)
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if not is_last:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and return the result. Cancel the coroutine if the client disconnects.

    Call this function only after the body of the request has been read. Otherwise, `receive` would
    return parts of the body.

    Raises: Disconnected.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(request: Request, source: AsyncGenerator[T]) -> T | None:
    """Return the first item of a generator, or None if the generator has no items.

    A route calls this function before it starts a response, so that an error before the first item
    can still determine the HTTP status. If the generator raises an error or the client disconnects,
    the generator is closed.

    Raises: Disconnected, or the error of the generator.
    """
    try:
        return await unless_disconnected(request.receive, _next(source))
    except BaseException:
        await source.aclose()
        raise


async def _next(source: AsyncGenerator[T]) -> T | None:
    return await anext(source, None)
