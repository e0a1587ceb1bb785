"""The limit on the size of a request body."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.errors import ApiError, error_response
from nereid_client.middleware.request_metrics import RequestMetrics


class BodyLimit:
    """Middleware that rejects a body of more than `max_bytes` before it fills the memory.

    A body whose Content-Length is too large is rejected unread. A body without a Content-Length is
    rejected as soon as the bytes received exceed the limit.

    Args:
        app: the application that this middleware calls.
        max_bytes: the setting max_body_bytes.
        metrics: counts the rejected requests.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, metrics: RequestMetrics) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or send a 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "0")
        if content_length.isdecimal() and int(content_length) > self._max_bytes:
            error = self._error(content_length)
            self._metrics.count_refusal(error)
            await error_response(error)(scope, receive, send)
            return
        num_received = 0

        async def receive_counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                # The exception handler of the application sends it, and counts it in the metric.
                raise self._error(f"more than {self._max_bytes}")
            return message

        await self._app(scope, receive_counted, send)

    def _error(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"The request body has {size} bytes, but the limit is {self._max_bytes} "
            "(max_body_bytes)",
            code="request_too_large",
            limit="max_body_bytes",
        )
