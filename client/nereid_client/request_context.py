"""What every route needs: settings, the backend, and the request at hand."""

import json
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from nereid_client.errors import ApiError, Disconnected, from_validation
from nereid_client.protocol.generation_requests import GenerationRequest
from nereid_client.settings import Settings
from nereid_client.streaming.completion_frame import Reply
from nereid_client.triton_backend import Backend

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Context:
    """What lives as long as the application."""

    settings: Settings
    backend: Backend
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Accept the served model's name, or none at all.

        Raises: ApiError 404 that names what is served.
        """
        served = self.settings.model_name
        if name not in (None, served):
            raise ApiError(
                404,
                f"model: {name!r} does not exist; the model served here is {served!r}",
                param="model",
                code="model_not_found",
            )


def context_of(request: Request) -> Context:
    """The application's context."""
    context: Context = request.app.state.context
    return context


def request_id_of(request: Request) -> str:
    """The caller's X-Request-Id, or the one made for this request."""
    request_id: str = request.state.request_id
    return request_id


def engine_request_id(request: Request) -> str:
    """A name for the backend's logs: callers may repeat theirs, so it ends in something unique."""
    return f"{request_id_of(request)}-{secrets.token_hex(4)}"


def reply_of(request: Request, body: GenerationRequest, kind: str) -> Reply:
    """What the answer to a request repeats.

    Args:
        request: the request, which has an id.
        body: what it says.
        kind: what the answer's id begins with.
    """
    return Reply(
        id=f"{kind}-{body.given_id or request_id_of(request)}",
        model=context_of(request).settings.model_name,
        created=int(time.time()),
        num_choices=body.num_choices,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        service_tier=body.tier,
    )


async def read_body(request: Request) -> dict[str, Any]:
    """The request's JSON object, as sent.

    Raises: ApiError 400 that says where the JSON is broken; 413 when it is too large; Disconnected.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise Disconnected from None
    try:
        body = json.loads(raw, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"the body is not valid JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is not usable JSON: it is nested too deeply") from None
    except ValueError as error:  # NaN, 1e999, integers of thousands of digits
        raise ApiError(400, f"the body is not usable JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def validate(kind: type[R], body: dict[str, Any]) -> R:
    """The body as a checked request.

    Raises: ApiError 400 naming the field, its value and the limit.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def dump(value: object) -> str:
    """JSON for the backend, readable in its logs.

    Raises: ApiError 400 for half a surrogate pair, which no tokenizer takes, and for deep nesting.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ApiError(400, "the body is not usable JSON: it is nested too deeply") from None
    check_unicode(text)
    return text


def check_unicode(text: str) -> None:
    r"""Refuse text that is no Unicode, such as JSON's "\ud800".

    Raises: ApiError 400.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ascii(text[error.start])
        raise ApiError(
            400, f"the body holds half a surrogate pair, {character}, which is no character"
        ) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number")
    return number
