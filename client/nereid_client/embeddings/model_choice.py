"""What the routes of the pooling models share: which model answers, and one call of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError

from nereid_client.embeddings.pooling_backend import (
    EMBEDDING,
    RERANK,
    Directory,
    PoolingBackend,
    PoolingCall,
    PoolingReply,
    Served,
    TritonPooling,
)
from nereid_client.errors import ApiError, BackendError, from_validation
from nereid_client.request_context import check_unicode, context_of, engine_request_id, read_body
from nereid_client.streaming import sse

R = TypeVar("R", bound=BaseModel)

_DOES = {EMBEDDING: "embeds", RERANK: "reranks"}


@dataclass(frozen=True)
class Pooling:
    """What lives as long as the application."""

    backend: PoolingBackend
    directory: Directory


@asynccontextmanager
async def pooling_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Makes `app.state.pooling`, over `app.state.make_pooling()` where a test has set that."""
    make: Callable[[], PoolingBackend] | None = getattr(app.state, "make_pooling", None)
    url = app.state.context.settings.grpc_url
    backend = make() if make else TritonPooling(url)
    app.state.pooling = Pooling(backend, Directory(backend))
    yield
    await backend.close()


def pooling_of(request: Request) -> Pooling:
    """The application's pooling models."""
    pooling: Pooling = request.app.state.pooling
    return pooling


async def read(request: Request, kind: type[R]) -> R:
    """The body as a checked request.

    Raises: ApiError 400 naming the field, its value and the limit.
    """
    try:
        return kind.model_validate(await read_body(request))
    except ValidationError as error:
        raise from_validation(error) from None


async def choose(request: Request, name: str | None, kinds: Sequence[str]) -> Served:
    """The model for a request: the first of `kinds` that is served and has that name.

    Raises: ApiError: 404 where there is none, 400 where the name is that of another kind of model,
        503 where it does not answer.
    """
    found, missing = [], []
    for kind in kinds:
        try:
            served = await pooling_of(request).directory.find(kind)
        except (BackendError, TimeoutError) as error:
            missing.append(_absence(error))
            continue
        if name in (None, served.name):
            return served
        found.append(served)
    if not found:
        raise next((error for error in missing if error.status != 404), missing[0])
    here = " and ".join(f"{model.name!r} {_DOES[model.kind]}" for model in found)
    others = {served.name: served for served in await pooling_of(request).directory.all()}
    if name == context_of(request).settings.model_name:
        raise ApiError(400, f"model: {name!r} is the language model; {here}", param="model")
    if name in others:
        what = _DOES[others[name].kind]
        raise ApiError(400, f"model: {name!r} {what}; {here}", param="model")
    raise ApiError(
        404,
        f"model: {name!r} does not exist; {here} here",
        param="model",
        code="model_not_found",
    )


def need_kind(served: Served, kind: str, what: str) -> None:
    """Refuse what the model cannot give.

    Raises: ApiError 400 that says what it gives.
    """
    kinds = served.info.get("kinds", ())
    if kind not in kinds:
        raise ApiError(
            400,
            f"model: {served.name!r} gives {' and '.join(kinds)}, not {what}",
            param="model",
        )


def need_room(served: Served, name: str, asked: int | None) -> None:
    """Refuse to cut texts before the model's limit.

    Args:
        served: the model.
        name: the field that says where to cut.
        asked: what it says, in tokens.

    Raises: ApiError 400 with the limit.
    """
    limit = served.info.get("max_model_len")
    if asked is not None and limit is not None and asked < limit:
        raise ApiError(
            400,
            f"{name}: must be at least the model's limit, {limit}, got {asked}: texts are cut "
            "there and not before; shorten them or leave it out",
            param=name,
        )


async def infer(
    request: Request,
    served: Served,
    tensors: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
    fields: Mapping[str, str],
) -> PoolingReply:
    """One call, given up when the client goes.

    Args:
        request: the HTTP request, whose body was read.
        served: the model.
        tensors: its inputs.
        options: its options.
        fields: tensor -> field of the body, for errors that blame one.

    Raises: ApiError, BackendError.
    """
    for values in (*tensors.values(), options.values()):
        for value in values:
            if isinstance(value, str):
                check_unicode(value)
    call = PoolingCall(served.kind, engine_request_id(request), tensors, options)
    try:
        return await sse.unless_disconnected(
            request.receive, pooling_of(request).backend.infer(call)
        )
    except BackendError as error:
        blamed, colon, rest = error.message.partition(": ")
        if colon and blamed in fields:
            raise BackendError(error.code, f"{fields[blamed]}: {rest}") from None
        raise


async def rest(seconds: float = 0.0) -> None:
    """Let other requests have their turn in the middle of a long answer."""
    await asyncio.sleep(seconds)


def _absence(error: BackendError | TimeoutError) -> ApiError:
    if isinstance(error, BackendError) and error.code == "NOT_FOUND":
        return ApiError(404, error.message, param="model", code="model_not_found")
    message = error.message if isinstance(error, BackendError) else "the model does not answer"
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "1"})
