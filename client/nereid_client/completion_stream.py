"""Deltas -> OpenAI text completion, several prompts at once: its chunks, or the whole answer."""

from collections.abc import AsyncGenerator, Sequence

from nereid_client import sse
from nereid_client.chat_stream import Json, Reply, usage_of
from nereid_client.deltas import Delta, Usage, unfinished
from nereid_client.errors import FrontendError, to_api_error

Indexed = tuple[int, Delta]


async def completion_events(
    reply: Reply, echoes: Sequence[str], first: Indexed | None, rest: AsyncGenerator[Indexed]
) -> AsyncGenerator[bytes]:
    """The answers as server-sent events, their choices interleaved.

    An error of the backend becomes an event of its own and ends the stream, without [DONE].

    Args:
        reply: what all chunks repeat.
        echoes: per prompt, the text that comes before its answer.
        first: the first delta and its choice's index, read already.
        rest: the others.
    """
    usages: list[Usage | None] = [None] * len(echoes)
    unfinished_choices = set(range(len(echoes)))
    for index, echo in enumerate(echoes):
        if echo:
            yield sse.event(_chunk(reply, index, {"text": echo}, usages))
    item = first
    try:
        while item is not None:
            index, delta = item
            usages[index] = delta.get("usage", usages[index])
            if "finish_reason" in delta:
                unfinished_choices.discard(index)
            if delta.get("text") or "finish_reason" in delta:
                yield sse.event(_chunk(reply, index, delta, usages))
            item = await anext(rest, None)
        if unfinished_choices:
            raise unfinished()
    except FrontendError as error:
        yield sse.event(to_api_error(error).body())
        return
    if reply.include_usage:
        yield sse.event({**_frame(reply, []), "usage": _sum(usages)})
    yield sse.DONE


def completion(reply: Reply, echoes: Sequence[str], totals: Sequence[Delta]) -> Json:
    """The whole answer: one choice per prompt, in the prompts' order."""
    choices = [
        _choice(index, echo + total.get("text", ""), total)
        for index, (echo, total) in enumerate(zip(echoes, totals, strict=True))
    ]
    return {**_frame(reply, choices), "usage": _sum([total.get("usage") for total in totals])}


def _chunk(reply: Reply, index: int, delta: Delta, usages: Sequence[Usage | None]) -> Json:
    chunk = _frame(reply, [_choice(index, delta.get("text", ""), delta)])
    if reply.include_usage:
        chunk["usage"] = _sum(usages) if reply.continuous_usage else None
    return chunk


def _choice(index: int, text: str, delta: Delta) -> Json:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": delta.get("finish_reason"),
        "stop_reason": delta.get("stop_reason"),
    }


def _frame(reply: Reply, choices: list[Json]) -> Json:
    return {
        "id": reply.id,
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _sum(usages: Sequence[Usage | None]) -> Json:
    given = [usage for usage in usages if usage]
    if len(given) == 1:
        return usage_of(given[0])  # with its details, which don't add up over prompts
    return usage_of(
        {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in given),
            "completion_tokens": sum(usage["completion_tokens"] for usage in given),
        }
    )
