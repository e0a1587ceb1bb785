"""What happens to every HTTP request before its route: an id, the API key, the size limit.

Plain ASGI, because Starlette's BaseHTTPMiddleware hides a client's disconnect from the routes.
"""

import hmac
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.errors import ApiError

_USABLE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Gives each request an id, the caller's X-Request-Id if it is usable, and echoes it.

    Usable: at most 128 characters that are safe in logs and headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with `request.state.request_id` set."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Lets only callers with the key reach the API: /v1, and every path that takes a body.

    What is only looked at, health checks among it, needs none.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer 401."""
        if scope["type"] == "http" and _needs_key(scope):
            given = _key_of(Headers(scope=scope))
            if not hmac.compare_digest(given.encode("latin-1"), self._expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_of(headers: Headers) -> str:
    """What a caller shows: a bearer token, or else the header `api-key`, as Azure's clients do."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("api-key", "")


def _needs_key(scope: Scope) -> bool:
    return scope["path"].startswith("/v1/") or scope["method"] not in ("GET", "HEAD", "OPTIONS")


class BodyLimit:
    """Refuses a body over the limit, announced or not, before it fills the memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await error_response(self._error(announced))(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error(f"more than {self._max_bytes}")
            return message

        await self._app(scope, receive_counted, send)

    def _error(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; the limit is {self._max_bytes} (max_body_bytes)",
            code="request_too_large",
        )


def error_response(error: ApiError) -> JSONResponse:
    """The HTTP response for an error."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
