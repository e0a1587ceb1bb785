"""HTTP responses and server-sent events for errors, in the format of OpenAI or Anthropic.

A request uses Anthropic's API if its path is `/v1/messages` or a path below it, or if it has the
header `anthropic-version`. All other requests use OpenAI's API.
"""

import re
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from nereid_client.errors import ApiError, tokens_and_limit
from nereid_client.streaming import sse

_MESSAGES_PATH = "/v1/messages"
_VERSION_HEADER = "anthropic-version"
_RESPONSES_PATH = "/v1/responses"
_SEQUENCE_NUMBER = re.compile(rb'^data: \{"type":"[a-z_.]+","sequence_number":(\d+)', re.MULTILINE)
"""Matches the start of an event of the Responses API."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Maps an HTTP status to the `type` that an error has in Anthropic's API."""
_OVERLOADED = 529
"""The HTTP status for an overloaded server in Anthropic's API. OpenAI's API has 503 instead."""


def uses_anthropic_api(scope: Scope) -> bool:
    """Return whether the client that sent a request uses Anthropic's API."""
    path: str = scope["path"]
    if path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/"):
        return True
    return _VERSION_HEADER in Headers(scope=scope)


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """Return the HTTP response for an error.

    Args:
        error: the error.
        scope: the ASGI scope of the request. The scope determines the format of the response.
    """
    if not uses_anthropic_api(scope):
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
    status = _anthropic_status(error)
    return JSONResponse(_anthropic_body(error, scope), status_code=status, headers=error.headers)


def _anthropic_status(error: ApiError) -> int:
    """Return the HTTP status of an error in Anthropic's API. The status 503 becomes 529."""
    return _OVERLOADED if error.status == 503 else error.status


def error_event(error: ApiError, scope: Scope, sent: bytes = b"") -> bytes:
    """Return the last server-sent event of a stream that ends with an error.

    Args:
        error: the error.
        scope: the ASGI scope of the request. The scope determines the format of the event.
        sent: the last bytes that the stream has sent. They contain whole events.
    """
    if uses_anthropic_api(scope):
        return sse.named_event(_anthropic_body(error, scope))
    if scope["path"].startswith(_RESPONSES_PATH):
        return sse.named_event(_responses_event(error, sent))
    return sse.event(error.body())


def _responses_event(error: ApiError, sent: bytes) -> dict[str, Any]:
    """Return an event with an error in the format of the Responses API.

    Some clients read the members `code`, `message` and `param`, others read the object `error`.

    Example: after an event with the sequence number 7, the event is {"type": "error",
    "sequence_number": 8, "code": "timeout", "message": "...", "param": null, "error": {...}}.
    """
    numbers = _SEQUENCE_NUMBER.findall(sent)
    return {
        "type": "error",
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        **error.body(),
    }


def _anthropic_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's API.

    Example: {"type": "error", "error": {"type": "not_found_error", "message": "The model does not
    exist.", "details": {"error_code": "model_not_found"}}, "request_id": "a1"}.
    """
    status = _anthropic_status(error)  # 529 in place of 503
    default_type = "api_error" if status >= 500 else "invalid_request_error"
    fields: dict[str, Any] = {
        "type": _ANTHROPIC_TYPES.get(status, default_type),
        "message": _anthropic_message(error),
    }
    if error.code is not None:
        fields["details"] = {"error_code": error.code}
    request_id = scope.get("state", {}).get("request_id")
    return {"type": "error", "error": fields, "request_id": request_id}


def _anthropic_message(error: ApiError) -> str:
    """Return the message of an error in Anthropic's API.

    If the prompt is too long, the message begins with the words of Anthropic's own message, because
    clients recognize the error by these words. The model reports both numbers only in its message.

    The words do not contain numbers if the frontend has refused the request before the prompt was
    tokenised.

    Example: "prompt is too long: 9000 tokens > 4096 maximum. Input tokens exceed ...".
    """
    if error.code != "context_length_exceeded":
        return error.message
    lengths = tokens_and_limit(error.message)
    if lengths is None:
        return f"prompt is too long. {error.message}"
    num_tokens, limit = lengths
    return f"prompt is too long: {num_tokens} tokens > {limit} maximum. {error.message}"
