"""POST /v1/responses, and the routes for a stored response."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from nereid_client.embeddings.model_choice import select_language_model
from nereid_client.errors import ApiError, BackendError, FrontendError, shown, to_api_error
from nereid_client.language_model.backend import Generation
from nereid_client.protocol.responses_request import ResponsesRequest
from nereid_client.request_context import (
    context_of,
    convert,
    name_of_model,
    read_prompt_body,
    to_json,
    unique_request_id,
    validate,
)
from nereid_client.responses.background_responses import (
    BackgroundResponse,
    Responses,
    encode,
    stored_events,
)
from nereid_client.responses.chat_translation import RESPONSES_FIELD_NAMES, chat_request
from nereid_client.responses.input_items import (
    check_calls,
    ids_of_references,
    read_items,
    with_unique_ids,
)
from nereid_client.responses.response_builder import ResponseBuilder
from nereid_client.responses.response_object import request_fields
from nereid_client.responses.response_store import Store
from nereid_client.responses.stored_response import RunningElsewhere, StoredResponse
from nereid_client.responses.truncation import generate_truncated
from nereid_client.routes.files import page
from nereid_client.streaming import sse
from nereid_client.streaming.deltas import Delta, merge_by_kind, merged, unfinished_error
from nereid_client.workers.forwarding import RunsElsewhereError

router = APIRouter(tags=["Responses"])

Json = dict[str, Any]

# Events are numbered from 0, and a stream contains only the events after a given number. The number
# -1 therefore selects all events.
_ALL_EVENTS = -1


class _EventsQuery(BaseModel):
    """The query parameters of a request for a stored response or its events."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None


class _ItemsQuery(BaseModel):
    """The query parameters that select a page of input items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@router.post("/v1/responses", summary="Create a response")
async def create_response(request: Request) -> Response:
    """Generate a response to a conversation, as OpenAI's Responses API does.

    With `stream`, the response is a stream of server-sent events. With `background`, the server
    returns the unfinished response at once, and generates the response without an open connection.
    """
    responses = _responses(request)
    body = await read_prompt_body(request)
    responses_request = await convert(request, lambda: validate(ResponsesRequest, body))
    await select_language_model(request, responses_request.model)
    is_stored = _will_be_stored(responses_request, responses.store)
    chat, items = await _convert(request, responses_request, body)
    deltas = _generate(request, responses_request, chat)
    builder = _new_builder(request, responses_request, is_stored=is_stored)
    is_stream = bool(responses_request.stream)
    if responses_request.background:
        run = BackgroundResponse(builder, items, streams=is_stream)
        return _start_in_background(responses, run, deltas)

    def store_if_requested() -> bool:
        """If `is_stored` is true, store the finished response. Return whether it was stored."""
        return is_stored and responses.add(builder, items)

    if is_stream:
        return await _streamed_response(request, builder, deltas, store_if_requested)
    await sse.unless_disconnected(request.receive, builder.add_all(deltas))
    return JSONResponse(builder.as_json() | {"store": store_if_requested()})


def _start_in_background(
    responses: Responses, run: BackgroundResponse, deltas: AsyncGenerator[Delta]
) -> Response:
    """Start a background response. Return its events if they are stored, else its current state.

    A background response is always stored: a request with `store=false` has been refused. The store
    contains the response from the start, so that the client can retrieve it while it is generated.
    """
    responses.start(run, deltas)
    if run.events is None:
        return _response_object(run)
    return sse.EventStream(run.follow(_ALL_EVENTS))


@router.post("/v1/responses/input_tokens", summary="Count the input tokens of a response")
async def count_input_tokens(request: Request) -> Json:
    """Count the tokens of the prompt, without generating a response."""
    body = await read_prompt_body(request)
    responses_request = await convert(request, lambda: validate(ResponsesRequest, body))
    await select_language_model(request, responses_request.model)
    chat, _ = await _convert(request, responses_request, body)
    try:
        tokens = await context_of(request).backend.tokenize(
            Generation(unique_request_id(request), chat_request=to_json(chat))
        )
    except BackendError as error:
        # The error contains the field name of a chat completion request. Replace this name with the
        # field name in the Responses API.
        raise RESPONSES_FIELD_NAMES.rename_fields(error) from None
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


@router.get("/v1/responses/{response_id}", summary="Get a stored response")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response, or the current state of a response that runs in the background.

    With the query parameter `stream=true`, return the events of a background response. If the
    query parameter `starting_after` is given, return only events with a larger sequence number.
    """
    found = _find(request, response_id)
    query = validate(_EventsQuery, dict(request.query_params))
    if not query.stream:
        return _response_object(found)
    after = _ALL_EVENTS if query.starting_after is None else query.starting_after
    if found.events is None:
        raise ApiError(
            400,
            f"stream must not be true, because the events of {response_id} were not stored. Only "
            "responses created with background=true and stream=true have stored events.",
            param="stream",
        )
    if isinstance(found, BackgroundResponse):
        return sse.EventStream(found.follow(after))
    return sse.EventStream(stored_events(found, after))


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response")
async def delete_response(request: Request, response_id: str) -> Json:
    """Delete a stored response. A response that runs in the background is cancelled first."""
    responses = _responses(request)
    found = _find(request, response_id)
    if isinstance(found, BackgroundResponse):
        await responses.cancel(found)
    # A cancelled response may be too large for the store. In this case, there is nothing to delete.
    if isinstance(responses.store.find(response_id), StoredResponse):
        responses.store.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response in the background")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a response that runs in the background, and return the response.

    A response that has ended is returned unchanged.
    """
    found = _find(request, response_id)
    if isinstance(found, BackgroundResponse):
        await _responses(request).cancel(found)
    elif not found.is_background:
        raise ApiError(
            400,
            f"The response {response_id} cannot be cancelled, because it was not created with "
            "background=true. Close the connection to end such a response.",
        )
    return _response_object(found)


@router.get("/v1/responses/{response_id}/input_items", summary="List the input items of a response")
async def list_input_items(request: Request, response_id: str) -> Json:
    """Return one page of the conversation from which a response was generated.

    Query parameters: `limit` (1 to 100, default 20), `order` ("desc" or "asc") and `after`, the id
    of the last item on the previous page.
    """
    found = _find(request, response_id)
    query = validate(_ItemsQuery, dict(request.query_params))
    input_items = found.input_items
    items: list[Json] = await convert(request, lambda: json.loads(input_items), len(input_items))
    if query.order == "desc":
        items.reverse()
    return page(items, query.limit, query.after)


def _responses(request: Request) -> Responses:
    """Return the object that manages the application's stored and background responses."""
    responses: Responses = request.app.state.responses
    return responses


def _find(request: Request, response_id: str) -> BackgroundResponse | StoredResponse:
    """Return the response with this id.

    Raises:
        ApiError: 404 if there is no such response.
        RunsElsewhereError: another frontend process generates the response.
    """
    found = _responses(request).store.find(response_id)
    if found is None:
        raise _not_found(response_id, "response_id")
    if isinstance(found, RunningElsewhere):
        raise RunsElsewhereError(found.worker)
    # This assertion helps the type checker. All running responses of this process are
    # BackgroundResponses, because other responses are stored only after they have ended.
    assert isinstance(found, BackgroundResponse | StoredResponse)
    return found


def _not_found(response_id: str, param: str) -> ApiError:
    """Return an error with the status 404 for a response that is not in the store."""
    return ApiError(
        404,
        f"The response {shown(response_id)} does not exist. It was never stored, or it was deleted "
        "because of a limit of the response store (max_stored_responses, "
        "max_stored_response_bytes, stored_response_age_s).",
        param=param,
        code="response_not_found",
    )


def _response_object(found: BackgroundResponse | StoredResponse) -> Response:
    """Return the response object as JSON, even if the response is not complete."""
    if isinstance(found, BackgroundResponse):
        return JSONResponse(found.builder.as_json())
    return Response(found.response, media_type="application/json")


def _will_be_stored(responses_request: ResponsesRequest, store: Store) -> bool:
    """Return whether the response to this request will be stored."""
    for name in ("store", "background"):
        if getattr(responses_request, name) and not store.is_on:
            raise ApiError(
                400,
                f"{name} must not be true, because this server stores no responses "
                "(max_stored_responses is 0). Leave the field out.",
                param=name,
                limit="max_stored_responses",
            )
    return responses_request.store is not False and store.is_on


async def _convert(
    request: Request, responses_request: ResponsesRequest, body: Json
) -> tuple[Json, bytes]:
    """Convert a request of the Responses API to a chat completion request.

    Returns: the body of the chat completion request, and a JSON list of the items in the
        conversation: the items of the earlier responses, and the items in the field `input`.
    """
    store = _responses(request).store
    previous = _find_previous(responses_request.previous_response_id, store)
    # The stored items are read here, because `convert_items` may run in another thread, in which
    # the database of the store must not be used.
    stored_items = await _find_referenced_items(request, responses_request.input)

    def convert_items() -> tuple[Json, bytes]:
        to_json(body)  # only a check: raises an ApiError if the body cannot be returned as JSON
        earlier_items = [] if previous is None else previous.conversation
        items = read_items(responses_request.input, stored_items.get)
        check_calls(earlier_items, items)
        items = with_unique_ids(earlier_items + items)
        return chat_request(responses_request, body, items), encode(items)

    earlier_bytes = 0 if previous is None else previous.num_bytes
    return await convert(request, convert_items, earlier_bytes)


async def _find_referenced_items(request: Request, given: str | list[Json]) -> dict[str, Json]:
    """Return the stored items to which the field `input` refers, as a mapping from ids to items.

    Raises: ApiError 400 if these items have too many bytes. Without this check, a short request
        could refer to a long item a million times, and fill the memory.
    """
    limits = await context_of(request).limits.get()
    store = _responses(request).store
    found: dict[str, Json] = {}
    num_bytes: dict[str, int] = {}
    total_bytes = 0
    for item_id in ids_of_references(given):
        if item_id not in found:
            items = store.find_items(item_id)
            if not items:
                break  # `read_items` will raise an error for this reference
            found |= items
            num_bytes |= {name: len(encode(item)) for name, item in items.items()}
        total_bytes += num_bytes[item_id]
        if limits is not None:
            limits.check_size_with_references(total_bytes)
    return found


def _find_previous(previous_id: str | None, store: Store) -> StoredResponse | None:
    """Return the stored response that a request continues.

    Return None if the request does not continue a response, so that `previous_id` is None.

    Raises: ApiError 404 if there is no such response, and ApiError 400 if it has not ended.
    """
    if previous_id is None:
        return None
    previous = store.find(previous_id)
    if previous is None:
        raise _not_found(previous_id, "previous_response_id")
    if not isinstance(previous, StoredResponse):
        raise ApiError(
            400,
            f"previous_response_id must name a response that has ended, but {shown(previous_id)} "
            f"has the status {previous.status}. Wait until it ends, or cancel it.",
            param="previous_response_id",
        )
    return previous


def _generate(
    request: Request, responses_request: ResponsesRequest, chat: Json
) -> AsyncGenerator[Delta]:
    """Generate a response with a chat completion, and return the completion's deltas.

    An error names a field of the Responses API, not a field of the chat completion.
    """
    backend = context_of(request).backend
    request_id = unique_request_id(request)
    if responses_request.truncation == "auto":
        # If the prompt is too long, `generate_truncated` removes the oldest messages, and sends the
        # chat again.
        deltas = generate_truncated(backend, request_id, chat)
    else:
        deltas = backend.generate(Generation(request_id, chat_request=to_json(chat)))
    return RESPONSES_FIELD_NAMES.rename_fields_in_errors(deltas)


def _new_builder(
    request: Request, responses_request: ResponsesRequest, *, is_stored: bool
) -> ResponseBuilder:
    """Return a builder for the response to a request. The builder has no output yet."""
    fields = request_fields(
        responses_request,
        f"resp_{secrets.token_hex(16)}",
        name_of_model(request),
        int(time.time()),
        is_stored=is_stored,
    )
    return ResponseBuilder(fields, is_queued=bool(responses_request.background))


async def _streamed_response(
    request: Request,
    builder: ResponseBuilder,
    deltas: AsyncGenerator[Delta],
    store_if_requested: Callable[[], bool],
) -> Response:
    """Return a response as a stream of server-sent events.

    The HTTP response starts after the first delta. If the backend fails before this delta, the HTTP
    response can still have the status of the error.
    """
    merged_deltas = merged(deltas, merge_by_kind)
    first = await sse.first_of(request, merged_deltas)
    events = _events(builder, first, merged_deltas, store_if_requested)
    return sse.EventStream(events, also_close=merged_deltas)


async def _events(
    builder: ResponseBuilder,
    first: Delta | None,
    rest: AsyncGenerator[Delta],
    store_if_requested: Callable[[], bool],
) -> AsyncGenerator[bytes]:
    """Yield a response as server-sent events. If the backend fails, the last event is an error.

    The field `store` of the last event tells whether the response was stored. The response is
    therefore stored before this event is sent.

    Args:
        builder: builds the events from the deltas.
        first: the first delta, or None if there is none.
        rest: the deltas after the first one.
        store_if_requested: stores the finished response if the client has requested this. Returns
            whether the response was stored.
    """

    def store_and_encode(events: list[Json]) -> bytes:
        """Encode `events`. If they end the response, store the response."""
        if builder.is_over:
            events[-1]["response"]["store"] = store_if_requested()
        return b"".join(map(sse.named_event, events))

    for event in builder.opening():
        yield sse.named_event(event)
    delta = first
    try:
        while delta is not None:
            yield store_and_encode(builder.add(delta))
            delta = await anext(rest, None)
        if not builder.is_over:
            raise unfinished_error()
    except FrontendError as error:
        # If the response is already complete, the client has received all of it, so the error is
        # ignored.
        if not builder.is_over:
            yield store_and_encode(builder.fail(to_api_error(error)))
