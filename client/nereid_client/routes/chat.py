"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.protocol.generation_requests import ChatCompletionRequest
from nereid_client.request_context import (
    context_of,
    dump,
    engine_request_id,
    read_body,
    reply_of,
    validate,
)
from nereid_client.streaming import sse
from nereid_client.streaming.chat_stream import chat_completion, chat_events
from nereid_client.streaming.deltas import fold, merged
from nereid_client.streaming.reasoning_view import ReasoningView
from nereid_client.triton_backend import Generation

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request) -> Response:
    """Decode, call, encode. The body goes on as it is: the tokenizer step reads it."""
    context = context_of(request)
    body = await read_body(request)
    chat = validate(ChatCompletionRequest, body)
    context.check_model(chat.model)
    generation = Generation(
        engine_request_id(request),
        chat_request=dump(chat.passed_on(body)),
        num_choices=chat.num_choices,
    )
    reply = reply_of(request, chat, "chatcmpl")
    answer = context.backend.generate(generation)
    if not chat.stream:
        totals = await sse.unless_disconnected(request.receive, fold(answer, reply.num_choices))
        return JSONResponse(chat_completion(reply, totals))
    deltas = merged(answer)
    first = await sse.first_of(request, deltas)
    view = ReasoningView(as_it_comes=chat.stream_reasoning is not False)
    return sse.EventStream(chat_events(reply, view, first, deltas), source=deltas)
