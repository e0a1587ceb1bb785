"""Middleware that sends the status 401 if a request has no valid API key.

If several clients use the same key or no key, each client can send the header X-Client-Id. The
requests of these clients then take turns in the waiting queue of the language model.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nereid_client import playground
from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import ANONYMOUS, Client, KeyFile, current_client
from nereid_client.middleware.request_metrics import RequestMetrics

CLIENT_HEADER = "x-client-id"
CLIENT_OF_SCOPE = "nereid_client"
"""A key in the ASGI scope of a request that the frontend sends to itself.

The value is the `Client` of the request. A request from the network cannot set this key.
"""


class ApiKey:
    """Middleware that identifies the client of each request, and sets `current_client`.

    If the server has API keys, the middleware requires a key for the playground, for every path
    under /v1 and for every POST and DELETE request.

    Other GET requests, such as health checks and /metrics, need no key.

    Args:
        app: the application that this middleware calls.
        key: the setting api_key, a key without limits. "" means that this setting is not used.
        key_file: the clients with keys and limits of their own, or None if there is no key file.
        metrics: counts the rejected requests.
    """

    def __init__(
        self, app: ASGIApp, key: str, key_file: KeyFile | None, metrics: RequestMetrics
    ) -> None:
        self._app = app
        self._key = key.encode()
        self._key_file = key_file
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. If a required API key is missing or wrong, send the status 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A batch request has no HTTP headers, so the batch runner stores the client in the scope.
        client_of_batch: Client | None = scope.get(CLIENT_OF_SCOPE)
        client = client_of_batch or self._find_client(Headers(scope=scope))
        # The playground and all paths below /v1/ require a key. Other paths require a key only for
        # methods that can change data, such as POST.
        is_guarded = scope["path"] == playground.PATH or scope["path"].startswith("/v1/")
        requires_key = is_guarded or scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if client is None and requires_key:
            await self._refuse(scope, receive, send)
            return
        if client is None:
            client = ANONYMOUS
        # The middleware CountRequests reads the client's name from the scope. It cannot read the
        # context variable `current_client`, because this variable is set in a function that
        # CountRequests calls.
        scope.setdefault("state", {})["client"] = client.name
        token = current_client.set(client)
        try:
            await self._app(scope, receive, send)
        finally:
            current_client.reset(token)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the status 401. The response for the playground is a page with a sign-in form."""
        error = ApiError(
            401,
            "The API key is missing or wrong. Send the header 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
            limit="api_key",  # the label of this rejection in the metrics
        )
        self._metrics.count_refusal(error)
        is_page = scope["path"] == playground.PATH and scope["method"] in ("GET", "HEAD")
        response = playground.sign_in_page() if is_page else error_response(error, scope)
        await response(scope, receive, send)

    def _find_client(self, headers: Headers) -> Client | None:
        """Return the client that sent a request, or None if the API key is missing or wrong.

        A key in the key file belongs to a client with a name. The client has no name if it sent the
        main key, which is the setting api_key, or if the server requires no key. If the client has
        no name, the header X-Client-Id can set the client's share, which is the client's name in
        the fair scheduling of requests.
        """
        key = _key_in(headers)
        client = self._key_file.find(key) if self._key_file is not None else None
        if client is not None:
            return client
        requires_key = bool(self._key) or self._key_file is not None
        if requires_key and not self._is_main_key(key):
            return None
        share = headers.get(CLIENT_HEADER, "")
        return Client(share=share) if share else ANONYMOUS

    def _is_main_key(self, key: str) -> bool:
        """Return whether `key` equals the setting api_key. The comparison takes constant time."""
        return bool(self._key) and hmac.compare_digest(key.encode("latin-1"), self._key)


def _key_in(headers: Headers) -> str:
    """Return the API key in the headers of a request, or "" if there is none.

    The key is the bearer token of the header Authorization. Anthropic's clients send the key in the
    header x-api-key instead. Azure's clients send the key in the header api-key.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token
    return headers.get("x-api-key") or headers.get("api-key", "")
