"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.model_choice import select_language_model
from nereid_client.language_model.backend import Generation
from nereid_client.protocol.generation_requests import ChatCompletionRequest
from nereid_client.request_context import (
    context_of,
    convert,
    frame_for,
    let_clients_abort_by_given_id,
    read_prompt_body,
    to_json,
    unique_request_id,
    validate,
)
from nereid_client.streaming import sse
from nereid_client.streaming.chat_stream import chat_completion, chat_events
from nereid_client.streaming.deltas import fold, merged
from nereid_client.streaming.openai_logprobs import json_bytes_of_logprobs
from nereid_client.streaming.reasoning_view import ReasoningView

router = APIRouter(tags=["Language model"])


@router.post("/v1/chat/completions", summary="Create a chat completion")
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation, as OpenAI's API does.

    With `stream`, the response is a stream of server-sent events.
    """
    body = await read_prompt_body(request)
    chat = await convert(request, lambda: validate(ChatCompletionRequest, body))
    await select_language_model(request, chat.model)
    generation = Generation(
        unique_request_id(request),
        chat_request=await convert(request, lambda: to_json(chat.fields_for_backend(body))),
        num_choices=chat.num_choices,
    )
    let_clients_abort_by_given_id(request, chat)
    frame = frame_for(request, chat, "chatcmpl")
    deltas = context_of(request).backend.generate(generation)
    if not chat.stream:
        totals = await sse.unless_disconnected(request.receive, fold(deltas, frame.num_choices))
        return await convert(
            request,
            lambda: JSONResponse(chat_completion(frame, totals, chat.custom_tools)),
            json_bytes_of_logprobs(totals),
        )
    merged_deltas = merged(deltas)
    # Wait for the first delta before the response starts. If the backend fails before this delta,
    # the response can still have the HTTP status of the error.
    first = await sse.first_of(request, merged_deltas)
    view = ReasoningView(streams_reasoning=chat.stream_reasoning is not False)
    events = chat_events(frame, view, first, merged_deltas, chat.custom_tools)
    return sse.EventStream(events, also_close=merged_deltas)
