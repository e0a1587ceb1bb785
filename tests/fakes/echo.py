"""A language model that repeats the end of its prompt, word by word.

It keeps the ensemble's rules: deltas with cumulative usage, one finish reason in the last delta,
`max_tokens`, stop strings, reasoning and tool calls, errors with a code. Markup in the prompt asks
for what a plain echo can't show:

    <think>why</think>                             reasoning
    <tool_call>{"name": "f", "arguments": {}}</tool_call>
    <pause 0.05>                                   seconds to wait, here
    <fail UNAVAILABLE the queue is full>           an error, here
    <vanish>                                       the stream ends without a finish reason
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MARKUP = re.compile(
    r"<think>(?P<think>.*?)</think>|<tool_call>(?P<call>.*?)</tool_call>"
    r"|<pause (?P<pause>[\d.]+)>|<fail (?P<code>[A-Z_]+) (?P<message>[^>]*)>|(?P<vanish><vanish>)"
    r"|(?P<word>\s*[^\s<]+\s?|\s+|<)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Failure:
    """An error of the caller or the server: `code` is a gRPC status code's name."""

    code: str
    message: str


Step = dict[str, Any] | Pause | Failure


def echo(
    *,
    text_input: str | None = None,
    input_ids: list[int] | None = None,
    chat_request: str | None = None,
    sampling_parameters: str | None = None,
) -> Iterator[Step]:
    """Deltas (with the raw text as `text`), pauses, and at most one failure, at the end."""
    if chat_request is not None:
        body = json.loads(chat_request)
        prompt = _text(body["messages"][-1].get("content") or "")
        parameters = body
    else:
        prompt = text_input if text_input is not None else " ".join(map(str, input_ids or ()))
        parameters = json.loads(sampling_parameters or "{}")
    limit = int(parameters.get("max_tokens") or 1_000_000)
    if limit > 1_000_000:
        yield Failure("INVALID_ARGUMENT", f"max_tokens: must be at most 1000000, got {limit}")
        return
    stops = parameters.get("stop") or []
    yield from _answer(prompt, limit, [stops] if isinstance(stops, str) else stops)


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _answer(prompt: str, limit: int, stops: list[str]) -> Iterator[Step]:  # noqa: C901
    usage = {"prompt_tokens": max(1, len(prompt.split())), "completion_tokens": 0}
    said = ""
    calls = 0
    reason = "stop"
    stop_reason = None
    for match in _MARKUP.finditer(prompt):
        if match["pause"]:
            yield Pause(float(match["pause"]))
        elif match["code"]:
            yield Failure(match["code"], match["message"])
            return
        elif match["vanish"]:
            return
        elif match["call"]:
            yield from _call(match["call"], calls, usage)
            calls += 1
            reason = "tool_calls"
        else:
            kind = "reasoning" if match["think"] else "content"
            for word in re.findall(r"\s*\S+\s?|\s+", match["think"] or match["word"]):
                usage = {**usage, "completion_tokens": usage["completion_tokens"] + 1}
                said += word
                stop_reason = next((stop for stop in stops if stop in said), None)
                if stop_reason is not None:
                    break
                yield {kind: word, "text": word, "usage": usage}
                if usage["completion_tokens"] >= limit:
                    yield {"finish_reason": "length", "usage": usage}
                    return
            if stop_reason is not None:
                break
    last: dict[str, Any] = {"finish_reason": reason, "usage": usage}
    if stop_reason is not None:
        last["stop_reason"] = stop_reason
    yield last


def _call(text: str, index: int, usage: dict[str, int]) -> Iterator[Step]:
    call = json.loads(text)
    arguments = json.dumps(call["arguments"])
    middle = len(arguments) // 2
    opened = {"index": index, "id": f"call_{index}", "name": call["name"], "arguments": ""}
    yield {"tool_calls": [opened], "text": text, "usage": usage}
    for piece in (arguments[:middle], arguments[middle:]):
        yield {"tool_calls": [{"index": index, "arguments": piece}], "usage": usage}
