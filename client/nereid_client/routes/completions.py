"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.model_choice import select_language_model
from nereid_client.errors import ApiError
from nereid_client.language_model.backend import Backend, Generation
from nereid_client.protocol.completion_prompts import Prompt
from nereid_client.protocol.generation_requests import CompletionRequest
from nereid_client.request_context import (
    check_unicode,
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
from nereid_client.streaming.completion_frame import CompletionFrame
from nereid_client.streaming.completion_stream import (
    CompletionOptions,
    completion,
    completion_events,
)
from nereid_client.streaming.deltas import Delta, fold, interleaved, merged
from nereid_client.streaming.openai_logprobs import json_bytes_of_logprobs

router = APIRouter(tags=["Language model"])


@router.post("/v1/completions", summary="Create a text completion")
async def completions(request: Request) -> Response:
    """Continue one text or several texts, as OpenAI's API does. The chat template is not used.

    The backend generates the completion of each text separately. With `stream`, the response is a
    stream of server-sent events.
    """
    max_prompts = context_of(request).settings.max_prompts
    # The limit on the size of the body is max_prompts times the limit on the size of one prompt.
    given = await read_prompt_body(request, max_prompts)
    body = await convert(request, lambda: validate(CompletionRequest, given))
    # `select_language_model` sets the context that `context_of` returns from now on.
    await select_language_model(request, body.model)
    _check_num_prompts(body.prompt, max_prompts)
    generations = await _generations(request, body)
    let_clients_abort_by_given_id(request, body)
    frame = frame_for(request, body, "cmpl")
    options = _options(body, await _echoed_prompts(request, body))
    if body.stream:
        return await _streamed_response(request, frame, options, generations)
    work = _generate_all(context_of(request).backend, generations)
    totals = await sse.unless_disconnected(request.receive, work)
    num_bytes = sum(map(json_bytes_of_logprobs, totals))
    return await convert(
        request, lambda: JSONResponse(completion(frame, options, totals)), num_bytes
    )


def _check_num_prompts(prompts: Sequence[Prompt], limit: int) -> None:
    """Raise an ApiError 400 if a request has more prompts than the server's limit."""
    if len(prompts) > limit:
        raise ApiError(
            400,
            f"prompt must have at most {limit} prompts (the server's setting max_prompts), but the "
            f"request has {len(prompts)}. Send the prompts in several requests.",
            param="prompt",
            limit="max_prompts",
        )


def _options(body: CompletionRequest, echoed_prompts: Sequence[str]) -> CompletionOptions:
    """Return the options that determine the content of the response's choices."""
    return CompletionOptions(
        echoed_prompts=echoed_prompts,
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids or body.return_prompt_token_ids),
        only_prompt=body.only_prompt,
    )


async def _streamed_response(
    request: Request,
    frame: CompletionFrame,
    options: CompletionOptions,
    generations: Sequence[Generation],
) -> Response:
    """Return a stream of server-sent events that contain the deltas of all choices.

    The response starts after the first delta. If the backend fails before this delta, the response
    can still have the HTTP status of the error.
    """
    backend = context_of(request).backend
    deltas = interleaved([merged(backend.generate(generation)) for generation in generations])
    first = await sse.first_of(request, deltas)
    events = completion_events(frame, options, first, deltas)
    return sse.EventStream(events, also_close=deltas)


async def _echoed_prompts(request: Request, body: CompletionRequest) -> list[str]:
    """Return the text that each prompt's choices start with: the prompt, or "" without echo."""
    if not body.echo:
        return [""] * len(body.prompt)
    return [await _text_of(request, prompt) for prompt in body.prompt]


async def _text_of(request: Request, prompt: Prompt) -> str:
    """Return the text of a prompt. Token ids are converted to text with their special tokens."""
    if isinstance(prompt, str):
        return prompt
    backend = context_of(request).backend
    request_id = unique_request_id(request)
    return await backend.detokenize(request_id, prompt, skip_special_tokens=False)


async def _fill_in_middle_prompt(request: Request, prompt: Prompt, suffix: str | None) -> Prompt:
    """Return a prompt that asks the model for the text between `prompt` and `suffix`.

    The special tokens in this prompt depend on the tokenizer, which is queried once. Without a
    suffix, or if the prompt consists of token ids, return the prompt unchanged.

    Example: "a = " and the suffix " + 1" return "<fim_prefix>a = <fim_suffix> + 1<fim_middle>".
    """
    if not suffix or not isinstance(prompt, str):
        return prompt
    check_unicode(suffix)
    fill_in_middle = context_of(request).fill_in_middle
    return await fill_in_middle.prompt(prompt, suffix, unique_request_id(request))


async def _generations(request: Request, body: CompletionRequest) -> list[Generation]:
    """For each prompt, return one request. The request's id ends with the index of the prompt.

    If the body has a suffix, each prompt asks the model to fill the gap before the suffix. For such
    a prompt, the tokenizer must first report its special tokens.
    """
    request_id = unique_request_id(request)
    prompts = [await _fill_in_middle_prompt(request, prompt, body.suffix) for prompt in body.prompt]
    without_prompt = Generation(
        request_id,
        sampling_parameters=to_json(body.sampling_parameters()),
        with_text=True,  # the response contains the text without parsing reasoning or tool calls
        num_choices=body.num_generated_choices,
    )
    generations = []
    for index, prompt in enumerate(prompts):
        generation = replace(without_prompt, request_id=f"{request_id}-{index}")
        if isinstance(prompt, str):
            check_unicode(prompt)
            generations.append(replace(generation, text_input=prompt))
        else:
            generations.append(replace(generation, input_ids=prompt))
    return generations


async def _generate_all(backend: Backend, generations: Sequence[Generation]) -> list[list[Delta]]:
    """Generate all choices. For each prompt, return a list with one merged delta for each choice.

    Raises: BackendError if a call fails. The other calls are then cancelled.
    """
    calls = [
        asyncio.ensure_future(fold(backend.generate(generation), generation.num_choices))
        for generation in generations
    ]
    try:
        return await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
