"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.errors import ApiError
from nereid_client.protocol.generation_requests import CompletionRequest, Prompt
from nereid_client.request_context import (
    check_unicode,
    context_of,
    dump,
    engine_request_id,
    read_body,
    reply_of,
    validate,
)
from nereid_client.streaming import sse
from nereid_client.streaming.completion_stream import Wishes, completion, completion_events
from nereid_client.streaming.deltas import Delta, fold, interleaved, merged
from nereid_client.triton_backend import Backend, Generation

router = APIRouter()


@router.post("/v1/completions", summary="Continue one text or several")
async def completions(request: Request) -> Response:
    """Decode, call once per prompt, all at the same time, and encode."""
    context = context_of(request)
    body = validate(CompletionRequest, await read_body(request))
    context.check_model(body.model)
    _check_number(body.prompt, context.settings.max_prompts)
    generations = _generations(body, engine_request_id(request))
    reply = reply_of(request, body, "cmpl")
    wishes = _wishes(body)
    if not body.stream:
        work = _all(context.backend, generations)
        answers = await sse.unless_disconnected(request.receive, work)
        return JSONResponse(completion(reply, wishes, answers))
    deltas = _stream(context.backend, generations)
    first = await sse.first_of(request, deltas)
    return sse.EventStream(completion_events(reply, wishes, first, deltas), source=deltas)


def _wishes(body: CompletionRequest) -> Wishes:
    return Wishes(
        echoes=[prompt if body.echo else "" for prompt in body.prompt],
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids or body.return_prompt_token_ids),
        only_prompt=body.only_prompt,
    )


def _check_number(prompts: Sequence[Prompt], limit: int) -> None:
    if len(prompts) > limit:
        raise ApiError(
            400,
            f"prompt: {len(prompts)} prompts in one request; the limit is {limit} (max_prompts)",
            param="prompt",
        )


def _generations(body: CompletionRequest, request_id: str) -> list[Generation]:
    sampling_parameters = dump(body.sampling_parameters())
    generations = []
    for index, prompt in enumerate(body.prompt):
        is_text = isinstance(prompt, str)
        if is_text:
            check_unicode(prompt)
        generations.append(
            Generation(
                f"{request_id}-{index}",
                text_input=prompt if is_text else None,
                input_ids=None if is_text else prompt,
                sampling_parameters=sampling_parameters,
                with_text=True,
                num_choices=body.num_answers,
            )
        )
    return generations


def _stream(
    backend: Backend, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Delta]]:
    return interleaved([merged(backend.generate(generation)) for generation in generations])


async def _all(backend: Backend, generations: Sequence[Generation]) -> list[list[Delta]]:
    """Every prompt's answers, or the first error, which ends the other calls."""
    calls = [
        asyncio.ensure_future(fold(backend.generate(call), call.num_choices))
        for call in generations
    ]
    try:
        return await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
