"""Limits on request bodies: their size, their total size, and the time in which they arrive."""

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.middleware.shared_budget import SharedBudget

UPLOAD_PATH = "/v1/files"
# After an error, the connection is closed, because the rest of the body is not read.
_ERROR_HEADERS = {"Connection": "close"}
_MAX_DIGITS = 20  # A Content-Length with more digits is not converted to an integer.


class BodyLimit:
    """Middleware that rejects request bodies that are too large or arrive too slowly.

    Without these limits, request bodies could fill the memory. A body whose Content-Length is too
    large is rejected before it is read. Any other body is rejected as soon as the received bytes
    exceed a limit. The bytes of a body count until its request has ended, because the body stays in
    memory until then.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_total_bytes: int,
        timeout_s: float,
        metrics: RequestMetrics,
    ) -> None:
        """Create the middleware.

        Args:
            app: the application that this middleware calls.
            max_bytes: the setting max_body_bytes.
            max_total_bytes: the setting max_total_body_bytes.
            timeout_s: the setting receive_timeout_s, in seconds. 0 means no limit.
            metrics: counts the rejected requests.
        """
        self._app = app
        self._max_bytes = max_bytes
        self._total = SharedBudget(max_total_bytes)
        self._timeout_s = timeout_s or None  # None means no limit
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, unless a limit rejects the body with the status 408, 413 or 429."""
        # The upload route writes a file to the disk while the file arrives, and has its own limits.
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        error = self._length_error(Headers(scope=scope).get("content-length", "0"))
        if error is not None:
            self._metrics.count_refusal(error)
            await error_response(error, scope)(scope, receive, send)
            return
        body = _ReceivedBody(current_client.get().share, self._deadline())

        async def receive_counted() -> Message:
            """Return the next message, or raise an error if the body exceeds a limit.

            The application's exception handler then sends an error response.
            """
            message = await self._receive_in_time(receive, body)
            self._count_bytes(message, body)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._total.remove(body.client, body.num_bytes)

    def _deadline(self) -> float | None:
        """Return the deadline for a body that starts now. Without a time limit, return None."""
        if self._timeout_s is None:
            return None
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _receive_in_time(self, receive: Receive, body: "_ReceivedBody") -> Message:
        """Return the next message of the client.

        Raises: ApiError 408 if the body is not complete at its deadline.
        """
        # After the whole body has arrived, no time limit applies. The next message then only
        # reports that the client has disconnected.
        deadline = None if body.is_complete else body.deadline
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                message = await receive()
        except TimeoutError:
            if not timeout.expired():
                raise  # `receive` itself has raised this error
            raise self._too_slow_error(body.num_bytes) from None
        return message

    def _count_bytes(self, message: Message, body: "_ReceivedBody") -> None:
        """Count the bytes of a message, and check that the body does not exceed the limits.

        Raises: ApiError 413 if the body is too large, 429 if all bodies together are too large.
        """
        num_bytes = len(message.get("body", b""))
        if not message.get("more_body"):  # also true if the client has disconnected
            body.is_complete = True
        if body.num_bytes + num_bytes > self._max_bytes:
            raise self._too_large_error(size=f"more than {self._max_bytes}")
        if not self._total.fits(body.client, num_bytes):
            raise self._total_too_large_error()
        self._total.add(body.client, num_bytes)
        body.num_bytes += num_bytes

    def _length_error(self, content_length: str) -> ApiError | None:
        """Return an error if the header Content-Length exceeds the limit. Otherwise, return None.

        A very long number is not converted to an integer, because this conversion would take long.
        """
        if not (content_length.isdecimal() and content_length.isascii()):
            return None
        digits = content_length.lstrip("0") or "0"
        if len(digits) <= _MAX_DIGITS and int(digits) <= self._max_bytes:
            return None
        return self._too_large_error(size=digits[:_MAX_DIGITS])

    def _too_large_error(self, size: str) -> ApiError:
        """Return the error for a body that is too large."""
        return ApiError(
            413,
            f"The request body has {size} bytes, but the limit is {self._max_bytes} "
            "(max_body_bytes)",
            code="request_too_large",
            limit="max_body_bytes",
        )

    def _too_slow_error(self, num_received: int) -> ApiError:
        return ApiError(
            408,
            f"The frontend received only {num_received} bytes of the request body within "
            f"{self._timeout_s:g} s (receive_timeout_s), and the body was not complete",
            code="timeout",
            headers=_ERROR_HEADERS,
            limit="receive_timeout_s",
        )

    def _total_too_large_error(self) -> ApiError:
        return ApiError(
            429,
            f"The bodies of the requests that run have {self._total.used} bytes, but the limit is "
            f"{self._total.limit} (max_total_body_bytes). Try again in a moment.",
            code="rate_limit_exceeded",
            headers={"Retry-After": "1", **_ERROR_HEADERS},
            limit="max_total_body_bytes",
        )


@dataclass
class _ReceivedBody:
    """The body of one request, while the body arrives.

    Attributes:
        client: the client that sends the body, as named by the attribute `share` of the client.
        deadline: the time of the event loop at which the body must be complete. None means no
            limit.
        num_bytes: the number of bytes that have arrived.
        is_complete: whether all bytes have arrived.
    """

    client: str
    deadline: float | None
    num_bytes: int = 0
    is_complete: bool = False


def _is_upload(scope: Scope) -> bool:
    """Return whether the request uploads a file."""
    return (scope["method"], scope["path"]) == ("POST", UPLOAD_PATH)
