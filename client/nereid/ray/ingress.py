"""The Ray Serve deployment that forwards HTTP requests to the servers."""

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from nereid_client.error_responses import error_event, error_response
from nereid_client.errors import ApiError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from nereid.ray.routing import prefix_hashes
from nereid.ray.server import ForwardedRequest, ServerUnavailableError

_RESPONSES_PATH = "/v1/responses"
_STORED_FIELDS = ("background", "previous_response_id")
_FAILURES = (RayError, RayServeException, ServerUnavailableError)


class Ingress:
    """Forwards HTTP requests to the servers.

    Args:
        servers: the handle of the deployment `Server`.
    """

    def __init__(self, servers: DeploymentHandle) -> None:
        self._servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Forward a request to a server, and return the response of the server."""
        body = await request.body()
        problem = _unsupported(request.url.path, body)
        if problem is not None:
            return error_response(ApiError(501, problem), request.scope)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = tuple(request.headers.items())
        parts = self._servers.forward.remote(
            ForwardedRequest(request.method, target, headers, body, prefix_hashes(body))
        )
        try:
            start = await anext(parts)
        except _FAILURES:
            return error_response(_lost(), request.scope)
        return StreamingResponse(
            _body(parts, request.scope, start.headers),
            status_code=start.status,
            headers=start.headers,
        )


async def _body(
    parts: DeploymentResponseGenerator, scope: Scope, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a response body. If the client disconnects, cancel the request."""
    try:
        async for part in parts:
            yield part
    except _FAILURES:
        lower_case = {name.lower(): value for name, value in headers.items()}
        is_stream = lower_case.get("content-type", "").startswith("text/event-stream")
        if not is_stream:
            raise  # the connection then ends early, so the client notices the failure
        yield error_event(_lost(), scope)
    finally:
        parts.cancel()


def _lost() -> ApiError:
    """Return the error for a request whose server or node has failed."""
    return ApiError(
        503,
        "The server that processed this request has failed. Send the request again.",
        code="server_lost",
        headers={"Retry-After": "1"},
    )


def _unsupported(path: str, body: bytes) -> str | None:
    """Return the reason why a request cannot be forwarded, or None if there is no such reason."""
    if path == "/metrics":
        return (
            "GET /metrics is not available here, because each server has its own metrics. Ray's "
            "metrics contain the number of requests."
        )
    if not path.startswith(_RESPONSES_PATH):
        return None
    fields: Any = None
    with contextlib.suppress(ValueError):
        fields = json.loads(body)
    if not isinstance(fields, dict):
        fields = {}
    # The fields of the body that require a stored response.
    names = [name for name in _STORED_FIELDS if fields.get(name)]
    is_new_response = path.rstrip("/") == _RESPONSES_PATH
    if is_new_response and not names:
        return None
    field = f"{names[0]}: " if names else ""
    return (
        f"{field}Stored responses are not available with Ray Serve, because each server stores its "
        "own. Send the whole conversation in each request."
    )
