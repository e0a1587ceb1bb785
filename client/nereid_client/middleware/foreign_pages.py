"""Refuses requests that a web page of another origin sends without permission.

A browser asks the server before a web page sends JSON to another origin. It does not ask if the
page declares the body as plain text, or submits a form. The page then cannot read the response, but
the server would execute the request.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError, shown

_OTHER_ORIGINS = ("cross-site", "same-site")
"""The values of the header Sec-Fetch-Site in a request of a page with another origin.

Browsers send this header to servers with TLS and to servers on the same machine. Other programs
send no such header.
"""


class ForeignPages:
    """Middleware that sends the status 403 to a web page whose origin may not call the API.

    GET, HEAD and OPTIONS requests are answered, because they change nothing.

    Args:
        app: the application that this middleware calls.
        origins: the origins that may call the API. "*" allows all origins.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or refuse the request."""
        if scope["type"] != "http" or self._is_allowed(scope["method"], Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        origin = Headers(scope=scope).get("origin", "")
        error = ApiError(
            403,
            f"Web pages of the origin {shown(origin)} may not call this server. Add the origin to "
            "the setting cors_origins.",
        )
        await error_response(error, scope)(scope, receive, send)

    def _is_allowed(self, method: str, headers: Headers) -> bool:
        """Return whether a request may be answered."""
        if method in ("GET", "HEAD", "OPTIONS") or "*" in self._origins:
            return True
        is_foreign = headers.get("sec-fetch-site") in _OTHER_ORIGINS
        return not is_foreign or headers.get("origin") in self._origins
