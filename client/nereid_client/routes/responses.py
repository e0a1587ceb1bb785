"""POST /v1/responses, and what can be done with a response that is kept."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.errors import ApiError, BackendError, FrontendError, shown, to_api_error
from nereid_client.protocol.responses_request import ResponsesRequest
from nereid_client.request_context import (
    context_of,
    dump,
    engine_request_id,
    read_body,
    validate,
)
from nereid_client.responses.background_responses import (
    Background,
    Responses,
    encode,
    named_event,
    told_again,
)
from nereid_client.responses.chat_translation import chat_request, in_our_words, reworded
from nereid_client.responses.input_items import check_calls, read_items
from nereid_client.responses.response_builder import Answer, by_kind
from nereid_client.responses.response_object import frame_of
from nereid_client.responses.response_store import Record, Store
from nereid_client.responses.truncation import generate_fitting
from nereid_client.streaming import sse
from nereid_client.streaming.deltas import Delta, merged, unfinished
from nereid_client.triton_backend import Generation

router = APIRouter()

Json = dict[str, Any]

_MAX_LISTED = 100


@router.post("/v1/responses", summary="Answer a conversation, as items")
async def create_response(request: Request) -> Response:
    """Decode, call, encode; in the background, come back at once."""
    responses = _responses(request)
    body = await read_body(request)
    wanted = validate(ResponsesRequest, body)
    context_of(request).check_model(wanted.model)
    dump(body)  # what can't be written again can neither be kept nor repeated
    is_kept = _is_kept(wanted, responses.store)
    items = _conversation(wanted, responses.store)
    chat = chat_request(wanted, body, items)
    deltas = in_our_words(_generate(request, wanted, chat))
    answer = Answer(
        frame_of(
            wanted,
            f"resp_{secrets.token_hex(16)}",
            context_of(request).settings.model_name,
            int(time.time()),
            is_kept=is_kept,
        ),
        is_queued=bool(wanted.background),
    )
    if wanted.background:
        run = Background(answer, encode(items), streams=bool(wanted.stream))
        responses.start(run, deltas)
        return _followed(run, after=-1) if wanted.stream else JSONResponse(answer.as_json())

    def keep() -> bool:
        return is_kept and responses.keep(answer, encode(items))

    if not wanted.stream:
        await sse.unless_disconnected(request.receive, answer.take_all(deltas))
        return JSONResponse(answer.as_json() | {"store": keep()})
    source = merged(deltas, by_kind)
    first = await sse.first_of(request, source)
    return sse.EventStream(_events(answer, first, source, keep), source=source)


@router.post("/v1/responses/input_tokens", summary="How many tokens a response would read")
async def count_input_tokens(request: Request) -> Json:
    """The same body as for a response; nothing is generated."""
    body = await read_body(request)
    wanted = validate(ResponsesRequest, body)
    context = context_of(request)
    context.check_model(wanted.model)
    items = _conversation(wanted, _responses(request).store)
    chat = dump(chat_request(wanted, body, items))
    try:
        tokens = await context.backend.tokenize(
            Generation(engine_request_id(request), chat_request=chat)
        )
    except BackendError as error:
        raise reworded(error) from None
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


@router.get("/v1/responses/{response_id}", summary="A response that is kept")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """As far as it has come; with `stream=true` its events behind `starting_after`."""
    found = _find(request, response_id)
    query = request.query_params
    if query.get("stream", "false") not in ("true", "1"):
        return _object(found)
    after = _number(request, "starting_after", default=-1, least=-1)
    if found.events is None:
        raise ApiError(
            400,
            f"stream: the events of {response_id} are not kept; read it without stream, or create "
            "it with background true and stream true",
            param="stream",
        )
    if isinstance(found, Background):
        return _followed(found, after)
    events = told_again(found, after)
    return sse.EventStream(events, source=events)


@router.delete("/v1/responses/{response_id}", summary="Forget a response")
async def delete_response(request: Request, response_id: str) -> Json:
    """One that runs is cancelled first."""
    responses = _responses(request)
    found = _find(request, response_id)
    if isinstance(found, Background):
        await responses.cancel(found)
    if isinstance(responses.store.find(response_id), Record):
        responses.store.drop(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", summary="End a response in the background")
async def cancel_response(request: Request, response_id: str) -> Response:
    """The response as it ended; cancelling what is over changes nothing."""
    found = _find(request, response_id)
    if isinstance(found, Background):
        await _responses(request).cancel(found)
    elif not found.is_background:
        raise ApiError(
            400,
            f"{response_id} did not run in the background, and only such responses can be "
            "cancelled; others end when their client closes the connection",
        )
    return _object(found)


@router.get("/v1/responses/{response_id}/input_items", summary="What a response has read")
async def list_input_items(request: Request, response_id: str) -> Json:
    """Items of the request and of the responses before it, a page at a time."""
    found = _find(request, response_id)
    query = request.query_params
    limit = _number(request, "limit", default=20, least=1)
    if limit > _MAX_LISTED:
        raise ApiError(400, f"limit: must be at most {_MAX_LISTED}, got {limit}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: must be asc or desc, got {shown(order)}", param="order")
    items: list[Json] = json.loads(found.context)
    if order == "desc":
        items.reverse()
    begin = 0
    if "after" in query:
        names = [item["id"] for item in items]
        if query["after"] not in names:
            raise ApiError(
                404, f"after: there is no item {shown(query['after'])} among them", param="after"
            )
        begin = names.index(query["after"]) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }


def _responses(request: Request) -> Responses:
    responses: Responses = request.app.state.responses
    return responses


def _find(request: Request, response_id: str) -> Background | Record:
    found = _responses(request).store.find(response_id)
    if not isinstance(found, Background | Record):
        raise _unknown(response_id, "response_id")
    return found


def _unknown(response_id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"{param}: there is no response {shown(response_id)}; it was never stored, or it is "
        "forgotten (max_stored_responses, max_stored_response_bytes, stored_response_age_s)",
        param=param,
        code="response_not_found",
    )


def _object(found: Background | Record) -> Response:
    if isinstance(found, Background):
        return JSONResponse(found.answer.as_json())
    return Response(found.response, media_type="application/json")


def _is_kept(wanted: ResponsesRequest, store: Store) -> bool:
    """Whether the response is to be kept: yes, unless told otherwise.

    Raises: ApiError 400 where it must be and can't.
    """
    for name in ("store", "background"):
        if getattr(wanted, name) and not store.is_on:
            raise ApiError(
                400,
                f"{name}: no responses are kept here (max_stored_responses is 0), got true; leave "
                "it out",
                param=name,
            )
    return wanted.store is not False and store.is_on


def _conversation(wanted: ResponsesRequest, store: Store) -> list[Json]:
    """All items that the response reads.

    Raises: ApiError 400 and 404.
    """
    before: list[Json] = []
    name = wanted.previous_response_id
    if name is not None:
        previous = store.find(name)
        if isinstance(previous, Background):
            raise ApiError(
                400,
                f"previous_response_id: {shown(name)} is {previous.answer.status}; wait for its "
                "end, or cancel it",
                param="previous_response_id",
            )
        if not isinstance(previous, Record):
            raise _unknown(name, "previous_response_id")
        before = json.loads(previous.context) + previous.output
    items = read_items(wanted.input, store.find_item)
    check_calls(before, items)
    return before + items


def _generate(request: Request, wanted: ResponsesRequest, chat: Json) -> AsyncGenerator[Delta]:
    backend = context_of(request).backend
    request_id = engine_request_id(request)
    if wanted.truncation == "auto":
        return generate_fitting(backend, request_id, chat)
    return backend.generate(Generation(request_id, chat_request=dump(chat)))


def _followed(run: Background, after: int) -> sse.EventStream:
    events = run.follow(after)
    return sse.EventStream(events, source=events)


async def _events(
    answer: Answer, first: Delta | None, rest: AsyncGenerator[Delta], keep: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events; an error of the backend is one of them, and the last."""
    for event in answer.opening():
        yield named_event(event)
    delta = first
    try:
        while delta is not None:
            events = answer.take(delta)
            if answer.is_over:
                events[-1]["response"]["store"] = keep()
            yield b"".join(map(named_event, events))
            delta = await anext(rest, None)
        if not answer.is_over:
            raise unfinished()
    except FrontendError as error:
        if not answer.is_over:
            events = answer.fail(to_api_error(error))
            events[-1]["response"]["store"] = keep()
            yield b"".join(map(named_event, events))


def _number(request: Request, name: str, *, default: int, least: int) -> int:
    """A whole number of the query.

    Raises: ApiError 400.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ApiError(
            400,
            f"{name}: must be a whole number from {max(least, 0)}, got {shown(text)}",
            param=name,
        )
    return int(text)
