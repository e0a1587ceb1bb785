"""The API key: requests without it are rejected with a 401."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nereid_client.errors import ApiError, error_response
from nereid_client.middleware.request_metrics import RequestMetrics


class ApiKey:
    """Middleware that requires the API key for every path under /v1 and for every POST and DELETE.

    Other GET requests, such as health checks and /metrics, need no key.

    Args:
        app: the application that this middleware calls.
        key: the key that clients must send.
        metrics: counts the rejected requests.
    """

    def __init__(self, app: ASGIApp, key: str, metrics: RequestMetrics) -> None:
        self._app = app
        self._expected = key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or send a 401."""
        if scope["type"] == "http" and _requires_key(scope):
            given = _key_in(Headers(scope=scope))
            if not hmac.compare_digest(given.encode("latin-1"), self._expected):
                error = ApiError(
                    401,
                    "The API key is missing or wrong. Send the header 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                    limit="api_key",
                )
                self._metrics.count_refusal(error)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_in(headers: Headers) -> str:
    """Return the key that the client sent, or "" if it sent none.

    The key is the bearer token of the header Authorization, else the value of the header api-key,
    which Azure's clients send.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("api-key", "")


def _requires_key(scope: Scope) -> bool:
    return scope["path"].startswith("/v1/") or scope["method"] not in ("GET", "HEAD", "OPTIONS")
