"""The Ray Serve deployment that forwards HTTP requests to the servers."""

import json
from collections.abc import AsyncGenerator

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
# If a server or its node has failed, forwarding a request to the server raises one of these
# exceptions.
_LOST_SERVER_ERRORS = (RayError, RayServeException, ServerUnavailableError)


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
        # Each server has metrics and stored responses of its own. A request that needs the data of
        # all servers cannot be forwarded to one server.
        problem = _need_for_data_of_all_servers(request.url.path, body)
        if problem is not None:
            return error_response(ApiError(501, problem), request.scope)  # 501: Not Implemented
        target = request.url.path
        if request.url.query:
            target += f"?{request.url.query}"
        headers = tuple(request.headers.items())
        # The hashes let the router choose a server that has cached the beginning of the prompt.
        forwarded = ForwardedRequest(request.method, target, headers, body, prefix_hashes(body))
        # `forward` first yields the status and the headers, and then the chunks of the body.
        response = self._servers.forward.remote(forwarded)
        try:
            start = await anext(response)
        except _LOST_SERVER_ERRORS:
            return error_response(_lost_server_error(), request.scope)
        return StreamingResponse(
            _body(response, request.scope, start.headers),
            status_code=start.status,
            headers=start.headers,
        )


async def _body(
    chunks: DeploymentResponseGenerator, scope: Scope, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield the body of a response. If the client disconnects, cancel the request.

    If the server fails in the middle of a stream of server-sent events, yield an error event.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except _LOST_SERVER_ERRORS:
        lower_case = {name.lower(): value for name, value in headers.items()}
        is_stream = lower_case.get("content-type", "").startswith("text/event-stream")
        if not is_stream:
            raise  # the connection then ends early, so the client notices the failure
        yield error_event(_lost_server_error(), scope)
    finally:
        # If the client disconnects, Starlette closes this generator.
        chunks.cancel()


def _lost_server_error() -> ApiError:
    """Return the error for a request whose server or node has failed."""
    return ApiError(
        503,
        "The server that processed this request has failed. Send the request again.",
        code="server_lost",
        headers={"Retry-After": "1"},
    )


def _need_for_data_of_all_servers(path: str, body: bytes) -> str | None:
    """If a request needs the data of all servers, return an error message. Otherwise, return None.

    The servers do not share their metrics and their stored responses. Of the Responses API, only a
    new response that needs no stored response can be forwarded to a single server.
    """
    if path == "/metrics":
        return (
            "GET /metrics is not available here, because each server has its own metrics. Ray's "
            "metrics contain the number of requests."
        )
    if not path.startswith(_RESPONSES_PATH):
        return None
    field = _field_of_stored_response(body)
    # A path below /v1/responses, such as /v1/responses/resp_1, belongs to a stored response.
    is_path_of_stored_response = path.rstrip("/") != _RESPONSES_PATH
    if field is None and not is_path_of_stored_response:
        return None
    message_prefix = "" if field is None else f"{field}: "
    return (
        f"{message_prefix}Stored responses are not available with Ray Serve, because each server "
        "stores its own. Send the whole conversation in each request."
    )


def _field_of_stored_response(body: bytes) -> str | None:
    """Return the first field in the body that requires a stored response, or None.

    Example: b'{"input": "a", "previous_response_id": "resp_1"}' returns "previous_response_id".
    """
    try:
        fields = json.loads(body)
    except ValueError:  # the server that receives the request rejects the body
        return None
    if not isinstance(fields, dict):
        return None
    names = [name for name in _STORED_FIELDS if fields.get(name)]
    return names[0] if names else None
