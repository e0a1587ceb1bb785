"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client import sse
from nereid_client.backends import Generation
from nereid_client.chat_stream import Reply, chat_completion, chat_events
from nereid_client.context import (
    context_of,
    dump,
    engine_request_id,
    read_body,
    request_id_of,
    validate,
)
from nereid_client.deltas import fold, merged
from nereid_client.protocol.requests import ChatCompletionRequest

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request) -> Response:
    """Decode, call, encode. The body goes on as it is: the tokenizer step reads it."""
    context = context_of(request)
    body = await read_body(request)
    chat = validate(ChatCompletionRequest, body)
    context.check_model(chat.model)
    generation = Generation(engine_request_id(request), chat_request=dump(_passed_on(chat, body)))
    reply = Reply(
        id=f"chatcmpl-{request_id_of(request)}",
        model=context.settings.model_name,
        created=int(time.time()),
        include_usage=chat.include_usage,
        continuous_usage=chat.continuous_usage,
    )
    answer = context.backend.generate(generation)
    if not chat.stream:
        total = await sse.unless_disconnected(request.receive, fold(answer))
        return JSONResponse(chat_completion(reply, total))
    deltas = merged(answer)
    first = await sse.first_of(request, deltas)
    return sse.EventStream(chat_events(reply, first, deltas), source=deltas)


def _passed_on(chat: ChatCompletionRequest, body: dict[str, Any]) -> dict[str, Any]:
    """The body without nulls, which mean "not given", and with `max_tokens` under that name."""
    passed = {name: value for name, value in body.items() if value is not None}
    if chat.max_completion_tokens is not None:
        passed["max_tokens"] = chat.max_completion_tokens
    return passed
