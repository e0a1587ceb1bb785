"""Convert the deltas of the postprocessor to chat completion chunks, or to a whole completion."""

from collections.abc import AsyncGenerator, Iterator, Sequence

from nereid_client.errors import FrontendError, to_api_error
from nereid_client.streaming import sse
from nereid_client.streaming.completion_frame import CompletionFrame, Json, total_usage
from nereid_client.streaming.deltas import Delta, ToolCallPiece, Usage, unfinished_error
from nereid_client.streaming.openai_logprobs import chat_logprobs, prompt_logprobs
from nereid_client.streaming.reasoning_view import ReasoningView


async def chat_events(
    frame: CompletionFrame, view: ReasoningView, first: Delta | None, rest: AsyncGenerator[Delta]
) -> AsyncGenerator[bytes]:
    """Yield a chat completion as server-sent events.

    The chunks of several choices are interleaved. Events that are ready at the same time are
    yielded together, because each yield costs a write to the socket. An error of the backend
    becomes the last event; [DONE] does not follow it.

    Args:
        frame: the fields that all chunks have in common.
        view: decides when reasoning is sent.
        first: the first delta, or None if there is none.
        rest: the deltas after the first one.
    """
    roles = [_choice(at, {"role": "assistant", "content": ""}) for at in range(frame.num_choices)]
    unsent = [sse.event(_chunk(frame, role)) for role in roles]
    delta = first
    usages: list[Usage | None] = [None] * frame.num_choices
    unfinished_choices = set(range(frame.num_choices))
    try:
        while delta is not None:
            index = delta.get("index", 0)
            usages[index] = delta.get("usage", usages[index])
            if "finish_reason" in delta:
                unfinished_choices.discard(index)
            unsent += [sse.event(chunk) for chunk in _chunks(frame, view.apply(delta), usages)]
            if unsent and unfinished_choices:  # the last chunks are sent together with [DONE]
                yield b"".join(unsent)
                unsent = []
            delta = await anext(rest, None)
        if unfinished_choices:
            raise unfinished_error()
    except FrontendError as error:
        yield b"".join([*unsent, sse.event(to_api_error(error).body())])
        return
    if frame.include_usage:
        last = frame.with_choices("chat.completion.chunk", [])
        unsent.append(sse.event({**last, "usage": total_usage([usages])}))
    yield b"".join([*unsent, sse.DONE])


def chat_completion(frame: CompletionFrame, totals: Sequence[Delta]) -> Json:
    """Return a whole chat completion.

    Args:
        frame: the fields that do not depend on the choices.
        totals: the sum of the deltas of each choice, in the order of the choices.
    """
    choices = [_whole_choice(frame, index, total) for index, total in enumerate(totals)]
    completion = frame.with_choices("chat.completion", choices)
    completion["usage"] = total_usage([[total.get("usage") for total in totals]])
    return completion | _prompt_fields(totals[0])


def _whole_choice(frame: CompletionFrame, index: int, total: Delta) -> Json:
    """Return one choice of a whole completion.

    Other servers have different names for two fields, so both names are filled: `reasoning` (vLLM)
    and `reasoning_content` (SGLang, llama.cpp); `stop_reason` (vLLM) and `matched_stop` (SGLang).
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
        "index": index,
        "message": message,
        "logprobs": _logprobs(frame, total),
        "finish_reason": total.get("finish_reason"),
        "stop_reason": total.get("stop_reason"),
        "matched_stop": total.get("stop_reason"),
    }
    if "token_ids" in total:
        choice["token_ids"] = total["token_ids"]
    return choice


def _chunks(frame: CompletionFrame, delta: Delta, usages: Sequence[Usage | None]) -> Iterator[Json]:
    """Yield the chunks for one delta: one for its text, and one for its finish reason.

    Tokens whose text is held back, because it may be part of a marker, are reported in a chunk
    with log-probabilities and an empty delta.
    """
    added: Json = {}
    if reasoning := delta.get("reasoning"):
        added["reasoning"] = added["reasoning_content"] = reasoning
    if content := delta.get("content"):
        added["content"] = content
    if calls := delta.get("tool_calls"):
        added["tool_calls"] = [_call_piece(call) for call in calls]
    choice = _choice(delta.get("index", 0), added)
    if delta.get("logprobs"):
        choice["logprobs"] = _logprobs(frame, delta)
    if delta.get("token_ids"):
        choice["token_ids"] = delta["token_ids"]
    if added or _has_token_data(delta):
        yield _chunk(frame, choice, usages) | _prompt_fields(delta)
    if "finish_reason" in delta:
        last = _choice(delta.get("index", 0), {})
        last["finish_reason"] = delta["finish_reason"]
        last["stop_reason"] = last["matched_stop"] = delta.get("stop_reason")
        yield _chunk(frame, last, usages)


def _has_token_data(delta: Delta) -> bool:
    names = ("logprobs", "token_ids", "prompt_token_ids")
    return any(delta.get(name) for name in names)


def _prompt_fields(delta: Delta) -> Json:
    """Return the fields about the prompt, which vLLM puts beside the choices."""
    fields: Json = {}
    if "prompt_token_ids" in delta:
        fields["prompt_token_ids"] = delta["prompt_token_ids"]
    if "prompt_logprobs" in delta:
        fields["prompt_logprobs"] = prompt_logprobs(delta["prompt_logprobs"])
    return fields


def _logprobs(frame: CompletionFrame, delta: Delta) -> Json | None:
    if "logprobs" not in delta:
        return None
    return chat_logprobs(delta["logprobs"], frame.tokens_as_ids)


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chunk(frame: CompletionFrame, choice: Json, usages: Sequence[Usage | None] = ()) -> Json:
    chunk = frame.with_choices("chat.completion.chunk", [choice])
    if frame.include_usage:
        has_usage = frame.continuous_usage and any(usages)
        chunk["usage"] = total_usage([usages]) if has_usage else None
    return chunk


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
