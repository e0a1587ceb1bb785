"""Translate requests of the Responses API to chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid_client.protocol.custom_tools import with_custom_tools_as_functions
from nereid_client.protocol.responses_request import ResponsesRequest
from nereid_client.protocol.responses_tools import chat_name
from nereid_client.responses.input_items import CALL_OF_OUTPUT
from nereid_client.streaming.field_names import FieldNames

Json = dict[str, Any]

RESPONSES_FIELD_NAMES = FieldNames(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
)
"""Maps the name of a field in a chat completion to the field's name in the Responses API."""


def chat_request(request: ResponsesRequest, body: Mapping[str, Any], items: Sequence[Json]) -> Json:
    """Translate a Responses API request to the body of a chat completion request.

    The body contains functions instead of custom tools.

    Args:
        request: the request of the Responses API.
        body: the request body as the client sent it. Fields that both APIs have, such as
            `temperature`, and unknown fields are copied to the chat completion.
        items: all items of the conversation, as returned by `input_items.read_items`.
    """
    chat = request.fields_copied_to_chat(body)
    translated = {
        "tools": request.chat_tools or None,
        "tool_choice": request.chat_tool_choice,
        "response_format": request.response_format_of_text,
        "reasoning_effort": request.effort,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.wants_logprobs or None,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
    }
    chat |= {name: value for name, value in translated.items() if value is not None}
    chat["messages"] = messages_of(request.instructions, items)
    return with_custom_tools_as_functions(chat)


def messages_of(instructions: str | None, items: Sequence[Json]) -> list[Json]:
    """Convert a conversation to the messages of a chat completion.

    Consecutive items of the assistant (reasoning, text, tool calls) become one message. The
    system and developer messages at the start become one system message, which begins with
    `instructions`. Many chat templates accept only one system message.

    Example: a reasoning item, an assistant message and a function call return one message
    {"role": "assistant", "content": ..., "reasoning": ..., "tool_calls": [...]}.

    Args:
        instructions: the field `instructions`, or None if the request does not have it.
        items: all items of the conversation, as returned by `input_items.read_items`.
    """
    chat = _ChatBuilder()
    if instructions is not None:
        chat.append("system", instructions)
    for item in _without_cut_calls(items):
        _ADD_ITEM[item["type"]](chat, item)
    return _with_one_system_message([_with_joined_texts(message) for message in chat.messages])


def _without_cut_calls(items: Sequence[Json]) -> list[Json]:
    """Leave out each call that was cut off, unless the items contain the output of the call.

    A call was cut off if its status is not "completed". If the conversation contains the output of
    such a call, the model must see the call and the output. Otherwise, the model would repeat a
    call that has failed because its arguments were incomplete.
    """
    ids_of_outputs = {item["call_id"] for item in items if item["type"] in CALL_OF_OUTPUT}
    return [
        item
        for item in items
        if item["type"] not in CALL_OF_OUTPUT.values()
        or item["status"] == "completed"
        or item["call_id"] in ids_of_outputs
    ]


class _ChatBuilder:
    """Converts the items in a response's input to the messages of a chat.

    Attributes:
        messages: the messages so far. The content and the reasoning of an assistant message are
            lists of texts, because appending each text to a string would take quadratic time.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def append(self, role: str, content: str | list[Json], **more: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content, **more})

    def last_assistant_message(self) -> Json | None:
        """Return the last message if it is an assistant message. Otherwise, return None."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return None

    def append_assistant_message(self) -> Json:
        """Append an assistant message without content, and return the message."""
        message: Json = {"role": "assistant", "content": None}
        self.messages.append(message)
        return message


def _with_joined_texts(message: Json) -> Json:
    """Join the texts of an assistant message. Return any other message unchanged.

    Example: {"role": "assistant", "content": ["a", "b"]} returns {"role": "assistant", "content":
    "ab"}.
    """
    if message["role"] != "assistant":
        return message
    content = message["content"]
    joined = {**message, "content": None if content is None else "".join(content)}
    if "reasoning" in message:
        joined["reasoning"] = joined["reasoning_content"] = "".join(message["reasoning"])
    return joined


def _add_message(chat: _ChatBuilder, item: Json) -> None:
    """Append a message item to the chat.

    Example: an item of the user with two text parts "a" and "b" appends {"role": "user",
    "content": "ab"}. The parts of a message with images are not joined.
    """
    role, content = item["role"], _chat_content(item["content"])
    if role == "assistant" and isinstance(content, str):
        _add_assistant_text(chat, content)
    else:
        chat.append(role, content)


def _add_assistant_text(chat: _ChatBuilder, text: str) -> None:
    """Add a text to the last assistant message, or to a new assistant message.

    A new message is appended in two cases: the last message of the chat is not an assistant
    message, or it has a text and no tool calls.

    Example: after the message {"role": "assistant", "content": ["a"]}, the text "b" becomes a
    second message. If the first message also has tool calls, its content becomes ["a", "b"].
    """
    message = chat.last_assistant_message()
    # After tool calls, a new message would come between the calls and their outputs. Chat templates
    # do not accept this order.
    if message is None or (message["content"] and not message.get("tool_calls")):
        message = chat.append_assistant_message()
    if message["content"] is None:
        message["content"] = []
    # An empty text is not stored, so that the content stays empty. The next text is added to the
    # same message, because the message has no text yet.
    if text:
        message["content"].append(text)


def _chat_content(parts: Sequence[Json]) -> str | list[Json]:
    """Return the joined text of content parts. If there are images, return converted parts."""
    if any(part["type"] == "input_image" for part in parts):
        return [_chat_part(part) for part in parts]
    return "".join(part["text"] for part in parts)


def _chat_part(part: Json) -> Json:
    """Convert one content part with a text or an image to the format of chat completions."""
    if part["type"] == "input_image":
        return {
            "type": "image_url",
            "image_url": {"url": part["image_url"], "detail": part["detail"]},
        }
    return {"type": "text", "text": part["text"]}


def _add_reasoning(chat: _ChatBuilder, item: Json) -> None:
    """Add the text of a reasoning item to an assistant message.

    If the item has no text, its summary is added instead. The message is the one that contains the
    calls or the text after the reasoning. Example: for the items reasoning, call, reasoning, call,
    one message contains both calls. Therefore, both reasoning texts are added to this message. A
    second message would come between the first call and its output.
    """
    text = "".join(part["text"] for part in item["content"])
    text = text or "\n".join(part["text"] for part in item["summary"])
    if not text:
        return
    message = chat.last_assistant_message()
    # In a message, the reasoning precedes the content. If the last message already has content, but
    # no calls, the reasoning belongs to the next message.
    if message is None or (message["content"] and not message.get("tool_calls")):
        message = chat.append_assistant_message()
    message.setdefault("reasoning", []).append(text)


def _add_call(chat: _ChatBuilder, item: Json) -> None:
    """Add a call of a function or of a custom tool to the last assistant message.

    If the last message of the chat is not an assistant message, append an assistant message first.
    """
    name = chat_name(item.get("namespace"), item["name"])
    call = {"id": item["call_id"]}
    if item["type"] == "custom_tool_call":
        call |= {"type": "custom", "custom": {"name": name, "input": item["input"]}}
    else:
        call |= {"type": "function", "function": {"name": name, "arguments": item["arguments"]}}
    message = chat.last_assistant_message() or chat.append_assistant_message()
    message.setdefault("tool_calls", []).append(call)


def _add_call_output(chat: _ChatBuilder, item: Json) -> None:
    """Append a tool message with the output of a function or of a custom tool."""
    output = item["output"]
    content = output if isinstance(output, str) else _chat_content(output)
    name = {"name": item["name"]} if "name" in item else {}
    chat.append("tool", content, tool_call_id=item["call_id"], **name)


_ADD_ITEM = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_call_output,
    "custom_tool_call": _add_call,
    "custom_tool_call_output": _add_call_output,
}


def _with_one_system_message(messages: list[Json]) -> list[Json]:
    """Merge the system and developer messages at the start of a chat into one system message."""
    num_opening = count_opening_messages(messages)
    if num_opening < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num_opening])
    return [{"role": "system", "content": text}, *messages[num_opening:]]


def count_opening_messages(messages: Sequence[Json]) -> int:
    """Return the number of system and developer messages at the start of a chat."""
    roles = [message["role"] for message in messages]
    return next(
        (at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles)
    )
