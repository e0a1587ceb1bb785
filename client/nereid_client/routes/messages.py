"""POST /v1/messages and /v1/messages/count_tokens, in the format of Anthropic's API."""

import secrets
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.anthropic.chat_translation import ANTHROPIC_FIELD_NAMES, chat_request
from nereid_client.anthropic.message_builder import MessageBuilder
from nereid_client.anthropic.messages_request import CountTokensRequest, MessagesRequest
from nereid_client.embeddings.model_choice import select_language_model
from nereid_client.error_responses import error_event
from nereid_client.errors import BackendError, FrontendError, to_api_error
from nereid_client.language_model.backend import Generation
from nereid_client.request_context import (
    context_of,
    convert,
    name_of_model,
    read_prompt_body,
    to_json,
    unique_request_id,
    validate,
)
from nereid_client.streaming import sse
from nereid_client.streaming.deltas import Delta, merge_by_kind, merged, unfinished_error

router = APIRouter(tags=["Language model"])


@router.post("/v1/messages", summary="Create a message (Anthropic's API)")
async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation, as Anthropic's Messages API does.

    With `stream`, the response is a stream of server-sent events.
    """
    body = await read_prompt_body(request)
    messages_request = await convert(request, lambda: validate(MessagesRequest, body))
    await select_language_model(request, messages_request.model)
    chat = await convert(request, lambda: to_json(chat_request(messages_request, body)))
    deltas = _generate(request, chat)
    builder = MessageBuilder(
        f"msg_{secrets.token_hex(12)}",
        name_of_model(request),
        shows_thinking=messages_request.shows_thinking,
    )
    if not messages_request.stream:
        await sse.unless_disconnected(request.receive, builder.add_all(deltas))
        return JSONResponse(builder.message())
    # Wait for the first delta before the response starts. If the backend fails before this delta,
    # the response can still have the HTTP status of the error.
    first = await sse.first_of(request, deltas)
    return sse.EventStream(_events(request, builder, first, deltas), also_close=deltas)


def _generate(request: Request, chat: str) -> AsyncGenerator[Delta]:
    """Generate a message with the chat completion request `chat`, and return the deltas.

    An error names a field of Anthropic's API, not a field of the chat completion.
    """
    generation = Generation(unique_request_id(request), chat_request=chat)
    generated = context_of(request).backend.generate(generation)
    # A message is a list of blocks. Each block contains one kind of output: thinking, text or a
    # tool call. Only consecutive deltas of the same kind are merged, so that the blocks stay in
    # order.
    return merged(ANTHROPIC_FIELD_NAMES.rename_fields_in_errors(generated), merge_by_kind)


@router.post("/v1/messages/count_tokens", summary="Count the input tokens of a message")
async def count_tokens(request: Request) -> dict[str, int]:
    """Count the tokens of the prompt, without generating a message."""
    body = await read_prompt_body(request)
    count_request = await convert(request, lambda: validate(CountTokensRequest, body))
    await select_language_model(request, count_request.model)
    chat = await convert(request, lambda: to_json(chat_request(count_request, body)))
    generation = Generation(unique_request_id(request), chat_request=chat)
    try:
        tokens = await context_of(request).backend.tokenize(generation)
    except BackendError as error:
        # The error contains the field name of a chat completion request. Replace this name with the
        # field name in Anthropic's API.
        raise ANTHROPIC_FIELD_NAMES.rename_fields(error) from None
    return {"input_tokens": len(tokens)}


async def _events(
    request: Request, builder: MessageBuilder, first: Delta | None, rest: AsyncGenerator[Delta]
) -> AsyncGenerator[bytes]:
    """Yield a message as server-sent events. If the backend fails, the last event is an error.

    The first delta is used twice: the opening events contain its token counts, because Anthropic's
    API sends them before the content, and `add` returns the events for its content.
    """
    yield b"".join(map(sse.named_event, builder.opening(first)))
    delta = first
    try:
        while delta is not None:
            yield b"".join(map(sse.named_event, builder.add(delta)))
            delta = await anext(rest, None)
        if not builder.is_over:
            raise unfinished_error()
    except FrontendError as error:
        yield error_event(to_api_error(error), request.scope)
