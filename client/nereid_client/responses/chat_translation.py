"""A response's request in the words of a chat completion, and the backend's errors in ours."""

import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, BackendError, to_api_error
from nereid_client.protocol.responses_request import ResponsesRequest, chat_name
from nereid_client.streaming.deltas import Delta

Json = dict[str, Any]

_OUR_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_BLAMED = re.compile(rf"^({'|'.join(_OUR_NAMES)})(?=[:.\[])")


def chat_request(request: ResponsesRequest, body: Mapping[str, Any], items: Sequence[Json]) -> Json:
    """The chat completion that gives this response.

    Args:
        request: what was asked for.
        body: the same as it was sent; fields that are nobody's go on as they are.
        items: the whole conversation, in the form of `items.read_items`.
    """
    chat = request.passed_on(body)
    given = {
        "tools": request.chat_tools or None,
        "tool_choice": request.chat_tool_choice,
        "response_format": request.response_format_of_text,
        "reasoning_effort": request.effort,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.wants_logprobs or None,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
    }
    chat |= {name: value for name, value in given.items() if value is not None}
    chat["messages"] = messages_of(request.instructions, items)
    return chat


def messages_of(instructions: str | None, items: Iterable[Json]) -> list[Json]:
    """Chat messages of a conversation.

    What the assistant did in one go (reasoning, text, calls) is one message of it. System and
    developer messages that open the conversation, `instructions` the first of them, become one of
    the system: many chat templates take no second.
    """
    script = _Script()
    if instructions is not None:
        script.say("system", instructions)
    for item in items:
        _WRITERS[item["type"]](script, item)
    return _with_one_opening(script.messages)


class _Script:
    """Messages as they are written down.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def say(self, role: str, content: str, **more: str) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def assistant(self, is_next_to: Iterable[str] = ()) -> Json:
        """The assistant's message to go on with: the last one, if that has none of these yet."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(k) for k in is_next_to):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _write_message(script: _Script, item: Json) -> None:
    text = "".join(part["text"] for part in item["content"])
    if item["role"] != "assistant":
        script.say(item["role"], text)
        return
    # Text behind calls belongs to their message: between calls and outputs nothing may stand.
    last = script.messages[-1] if script.messages else {}
    message = script.assistant(() if last.get("tool_calls") else ("content",))
    message["content"] = (message["content"] or "") + text


def _write_reasoning(script: _Script, item: Json) -> None:
    text = "".join(part["text"] for part in item["content"])
    text = text or "\n".join(part["text"] for part in item["summary"])
    if text:
        message = script.assistant(("content", "tool_calls"))
        message["reasoning"] = message.get("reasoning", "") + text
        message["reasoning_content"] = message["reasoning"]


def _write_call(script: _Script, item: Json) -> None:
    if item["status"] != "completed":  # cut off in its arguments: nobody has run it
        return
    name = chat_name(item.get("namespace"), item["name"])
    function = {"name": name, "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    script.assistant().setdefault("tool_calls", []).append(call)


def _write_call_output(script: _Script, item: Json) -> None:
    output = item["output"]
    text = output if isinstance(output, str) else "".join(part["text"] for part in output)
    named = {"name": item["name"]} if "name" in item else {}
    script.say("tool", text, tool_call_id=item["call_id"], **named)


_WRITERS = {
    "message": _write_message,
    "reasoning": _write_reasoning,
    "function_call": _write_call,
    "function_call_output": _write_call_output,
}


def _with_one_opening(messages: list[Json]) -> list[Json]:
    opening = 0
    while opening < len(messages) and messages[opening]["role"] in ("system", "developer"):
        opening += 1
    if opening < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:opening])
    return [{"role": "system", "content": text}, *messages[opening:]]


async def in_our_words(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """The same deltas; an error that blames a chat completion's field blames ours.

    Raises: ApiError for every BackendError.
    """
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except BackendError as error:
            raise reworded(error) from None


def reworded(error: BackendError) -> ApiError:
    """The answer for a backend's error, with this API's names of the fields."""
    answer = to_api_error(error)
    if answer.status != 400:
        return answer
    message = _BLAMED.sub(lambda found: _OUR_NAMES[found[1]], answer.message)
    param = answer.param and _BLAMED.sub(lambda found: _OUR_NAMES[found[1]], answer.param + ":")
    return ApiError(400, message, param=param and param.removesuffix(":"), code=answer.code)
