"""Deltas of the postprocessor -> OpenAI chat completion: its chunks, or the whole answer."""

from collections.abc import AsyncGenerator, Iterator, Sequence

from nereid_client.errors import FrontendError, to_api_error
from nereid_client.streaming import sse
from nereid_client.streaming.completion_frame import Json, Reply, usage_of
from nereid_client.streaming.deltas import Delta, ToolCallPiece, Usage, unfinished
from nereid_client.streaming.openai_logprobs import chat_logprobs, prompt_logprobs
from nereid_client.streaming.reasoning_view import ReasoningView


async def chat_events(
    reply: Reply, view: ReasoningView, first: Delta | None, rest: AsyncGenerator[Delta]
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events, its choices interleaved; what is due at once together.

    An error of the backend becomes an event of its own and ends the stream, without [DONE].
    """
    roles = [_choice(at, {"role": "assistant", "content": ""}) for at in range(reply.num_choices)]
    told = [sse.event(_chunk(reply, role)) for role in roles]
    delta = first
    usages: list[Usage | None] = [None] * reply.num_choices
    unfinished_choices = set(range(reply.num_choices))
    try:
        while delta is not None:
            index = delta.get("index", 0)
            usages[index] = delta.get("usage", usages[index])
            if "finish_reason" in delta:
                unfinished_choices.discard(index)
            told += [sse.event(chunk) for chunk in _chunks(reply, view.show(delta), usages)]
            if told and unfinished_choices:  # the end is sent with what follows it at once
                yield b"".join(told)
                told = []
            delta = await anext(rest, None)
        if unfinished_choices:
            raise unfinished()
    except FrontendError as error:
        yield b"".join([*told, sse.event(to_api_error(error).body())])
        return
    if reply.include_usage:
        last = reply.frame("chat.completion.chunk", [])
        told.append(sse.event({**last, "usage": usage_of([usages])}))
    yield b"".join([*told, sse.DONE])


def chat_completion(reply: Reply, totals: Sequence[Delta]) -> Json:
    """The whole answer: what each choice adds up to, in the order of their index."""
    choices = [_whole_choice(reply, index, total) for index, total in enumerate(totals)]
    answer = reply.frame("chat.completion", choices)
    answer["usage"] = usage_of([[total.get("usage") for total in totals]])
    return answer | _of_prompt(totals[0])


def _whole_choice(reply: Reply, index: int, total: Delta) -> Json:
    """One choice.

    Both names of the reasoning text are filled, `reasoning` (vLLM's) and `reasoning_content`
    (SGLang's and llama.cpp's), and both of what stopped it: `stop_reason` and `matched_stop`.
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
        "logprobs": _logprobs(reply, total),
        "finish_reason": total.get("finish_reason"),
        "stop_reason": total.get("stop_reason"),
        "matched_stop": total.get("stop_reason"),
    }
    if "token_ids" in total:
        choice["token_ids"] = total["token_ids"]
    return choice


def _chunks(reply: Reply, delta: Delta, usages: Sequence[Usage | None]) -> Iterator[Json]:
    """The chunks of one delta: what it adds, then its end.

    Tokens whose text is held back have their log-probabilities in a chunk that adds nothing else.
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
        choice["logprobs"] = _logprobs(reply, delta)
    if delta.get("token_ids"):
        choice["token_ids"] = delta["token_ids"]
    if added or _of_tokens(delta):
        yield _chunk(reply, choice, usages) | _of_prompt(delta)
    if "finish_reason" in delta:
        last = _choice(delta.get("index", 0), {})
        last["finish_reason"] = delta["finish_reason"]
        last["stop_reason"] = last["matched_stop"] = delta.get("stop_reason")
        yield _chunk(reply, last, usages)


def _of_tokens(delta: Delta) -> bool:
    names = ("logprobs", "token_ids", "prompt_token_ids")
    return any(delta.get(name) for name in names)


def _of_prompt(delta: Delta) -> Json:
    """What stands beside the choices, as in vLLM's answers."""
    given: Json = {}
    if "prompt_token_ids" in delta:
        given["prompt_token_ids"] = delta["prompt_token_ids"]
    if "prompt_logprobs" in delta:
        given["prompt_logprobs"] = prompt_logprobs(delta["prompt_logprobs"])
    return given


def _logprobs(reply: Reply, delta: Delta) -> Json | None:
    if "logprobs" not in delta:
        return None
    return chat_logprobs(delta["logprobs"], reply.tokens_as_ids)


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chunk(reply: Reply, choice: Json, usages: Sequence[Usage | None] = ()) -> Json:
    chunk = reply.frame("chat.completion.chunk", [choice])
    if reply.include_usage:
        is_told = reply.continuous_usage and any(usages)
        chunk["usage"] = usage_of([usages]) if is_told else None
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
