"""What can go wrong, and how it looks to an OpenAI client.

FrontendError
|- ApiError          an answer other than 200, ready to be sent
|  '- Disconnected   the client has gone; nobody reads the answer
'- BackendError      the Triton server's: a gRPC status code and a message
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class FrontendError(Exception):
    """The root: everything the frontend raises on purpose."""


class ApiError(FrontendError):
    """An answer other than 200 in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _CALLER)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class Disconnected(ApiError):
    """The client closed its connection before the answer was complete."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="cancelled")


class BackendError(FrontendError):
    """The backend refused or failed a request.

    Args:
        code: name of a gRPC status code, such as `INVALID_ARGUMENT`.
        message: what the server said; `"temperature: must be ..."` blames one field.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


_CALLER = "invalid_request_error"
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}

_STATUS = {
    "INVALID_ARGUMENT": (400, None),
    "UNAVAILABLE": (503, "unavailable"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_exceeded"),
    "CANCELLED": (499, "cancelled"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}
"""gRPC status -> HTTP status and OpenAI error code; every other status is a 500."""

_RETRY_AFTER = re.compile(r"try again in (\d+) s\b")  # the executor's guess, docs/overload.md
_UNION_MEMBERS = {"str", "list[str]", "list[dict[str,any]]", "dict[str,any]"}  # pydantic's words
_OPENING = re.compile(r"^(Input|String) should ")  # of pydantic's messages
_TENSOR_NAME = re.compile(r"^(text_input|input_ids): ")  # the ensemble's names of `prompt`
_TOO_LONG = re.compile(r"the limit is \d+ \(max_model_len\)")
_BLAMED_FIELD = re.compile(r"^([a-z_][A-Za-z0-9_.\[\]]*): ")


def to_api_error(error: FrontendError) -> ApiError:
    """The answer for any of our errors: the table above, applied."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, BackendError):
        return ApiError(500, str(error), code="internal_error")
    status, code = _STATUS.get(error.code, (500, "internal_error"))
    message = _TENSOR_NAME.sub("prompt: ", error.message)
    blamed = _BLAMED_FIELD.match(message) if status == 400 else None
    if status == 400 and _TOO_LONG.search(message):
        # OpenAI's words besides its code: many clients know the case by either alone.
        code = "context_length_exceeded"
        message = f"{message}. Input tokens exceed the configured limit."
    return ApiError(
        status,
        message,
        param=blamed[1] if blamed else None,
        code=code,
        headers=_retry_after(message) if status in (429, 503) else None,
    )


def _retry_after(message: str) -> dict[str, str]:
    """When to come back: as the message says, else soon."""
    told = _RETRY_AFTER.search(message)
    return {"Retry-After": told[1] if told else "1"}


def from_validation(error: ValidationError) -> ApiError:
    """A 400 that names the first wrong field, its value and the limit."""
    details = error.errors(include_url=False)
    first = details[0]
    path = _path(first)
    if first["type"] == "missing":
        message = "is required"
    elif first["type"] == "too_short":
        message = f"must have at least {first['ctx']['min_length']} item, got 0"
    elif first["type"] == "value_error":  # our own validators name the value themselves
        message = first["msg"].removeprefix("Value error, ")
    else:  # a field of several types has an error for each of them
        reasons = [detail["msg"] for detail in details if _path(detail) == path]
        message = " or ".join(_OPENING.sub("", reason) for reason in reasons)
        message = f"must {message[:1].lower()}{message[1:]}, got {shown(first['input'])}"
    text = f"{path}: {message}" if path else message
    blamed = _BLAMED_FIELD.match(text)
    return ApiError(400, text, param=blamed[1] if blamed else None)


def _path(detail: ErrorDetails) -> str:
    """Where in the body: `messages[0].role`."""
    parts = [part for part in detail["loc"] if part not in _UNION_MEMBERS]
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")


def shown(value: object, limit: int = 80) -> str:
    """A value as JSON for an error message, cut when it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."
