"""Assigns an id to every request, and adds the id to the response."""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.error_responses import uses_anthropic_api

# An id that matches this pattern is safe in logs and in headers.
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Middleware that stores the request's id in `request.state.request_id`.

    If the client sends a valid id in the header X-Request-Id, this id is used. Otherwise, the id is
    random. The response contains the id in the same header. A response of Anthropic's API also
    contains the id in the header request-id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with `request.state.request_id` set."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if uses_anthropic_api(scope):
                    headers["request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
