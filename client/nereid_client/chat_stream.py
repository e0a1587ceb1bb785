"""Deltas of the postprocessor -> OpenAI chat completion: its chunks, or the whole answer."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from nereid_client import sse
from nereid_client.deltas import Delta, ToolCallPiece, Usage, unfinished
from nereid_client.errors import FrontendError, to_api_error

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What every chunk and every answer of one request repeats.

    Attributes:
        include_usage: whether a last chunk reports the usage.
        continuous_usage: whether every chunk does.
    """

    id: str
    model: str
    created: int
    include_usage: bool = False
    continuous_usage: bool = False


async def chat_events(
    reply: Reply, first: Delta | None, rest: AsyncGenerator[Delta]
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events.

    An error of the backend becomes an event of its own and ends the stream, without [DONE].
    """
    yield sse.event(_chunk(reply, {"role": "assistant", "content": ""}, None))
    delta = first
    usage: Usage | None = None
    finished = False
    try:
        while delta is not None:
            usage = delta.get("usage", usage)
            finished = finished or "finish_reason" in delta
            for chunk in _chunks(reply, delta, usage):
                yield sse.event(chunk)
            delta = await anext(rest, None)
        if not finished:
            raise unfinished()
    except FrontendError as error:
        yield sse.event(to_api_error(error).body())
        return
    if reply.include_usage:
        yield sse.event({**_frame(reply, "chat.completion.chunk", []), "usage": usage_of(usage)})
    yield sse.DONE


def chat_completion(reply: Reply, total: Delta) -> Json:
    """The whole answer.

    Both names of the reasoning text are filled: `reasoning` (vLLM's) and `reasoning_content`
    (SGLang's and llama.cpp's).
    """
    calls = total.get("tool_calls", [])
    content = total.get("content")
    reasoning = total.get("reasoning")
    message: Json = {
        "role": "assistant",
        "content": content if content or calls else (content or ""),
        "reasoning": reasoning,
        "reasoning_content": reasoning,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [_whole_call(call) for call in calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": total.get("finish_reason"),
        "stop_reason": total.get("stop_reason"),
    }
    return {**_frame(reply, "chat.completion", [choice]), "usage": usage_of(total.get("usage"))}


def usage_of(usage: Usage | None) -> Json:
    """OpenAI's usage object: the counts, their sum, and whatever details the backend gives."""
    counts: Json = dict(usage or {"prompt_tokens": 0, "completion_tokens": 0})
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    return counts


def _chunks(reply: Reply, delta: Delta, usage: Usage | None) -> Iterator[Json]:
    added: Json = {}
    if reasoning := delta.get("reasoning"):
        added["reasoning"] = added["reasoning_content"] = reasoning
    if content := delta.get("content"):
        added["content"] = content
    if calls := delta.get("tool_calls"):
        added["tool_calls"] = [_call_piece(call) for call in calls]
    if added:
        yield _chunk(reply, added, usage)
    if "finish_reason" in delta:
        last = _chunk(reply, {}, usage)
        last["choices"][0]["finish_reason"] = delta["finish_reason"]
        last["choices"][0]["stop_reason"] = delta.get("stop_reason")
        yield last


def _chunk(reply: Reply, delta: Json, usage: Usage | None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    chunk = _frame(reply, "chat.completion.chunk", [choice])
    if reply.include_usage:
        chunk["usage"] = usage_of(usage) if reply.continuous_usage and usage else None
    return chunk


def _frame(reply: Reply, kind: str, choices: list[Json]) -> Json:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _call_piece(piece: ToolCallPiece) -> Json:
    function: Json = {"arguments": piece.get("arguments", "")}
    if "name" in piece:
        function = {"name": piece["name"], **function}
    call: Json = {"index": piece["index"], "function": function}
    if "id" in piece:
        call |= {"id": piece["id"], "type": "function"}
    return call


def _whole_call(call: ToolCallPiece) -> Json:
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": call.get("name", ""), "arguments": call.get("arguments", "")},
    }
