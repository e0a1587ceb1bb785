"""Validates messages of Anthropic's API, and converts them to messages of a chat completion.

A message of Anthropic's API has a list of blocks. The blocks of one message can become several chat
messages. Example: a user's message with a `tool_result` block and a `text` block becomes a message
of the role "tool" and a message of the role "user".
"""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.request_body import RequestBody, validated

Json = dict[str, Any]

_TEXT_ONLY = "the served model reads text only"
_REFUSED_BLOCKS = {
    "image": "only messages of the user and results of tools may contain images",
    "document": f"{_TEXT_ONLY}; send the document's text in a text block",
    "video": "only /v1/chat/completions reads videos; send frames as image blocks",
    "audio": "only /v1/chat/completions reads audio; send a transcript in a text block",
    "search_result": f"{_TEXT_ONLY}; send the result's text in a text block",
    "tool_reference": "Nereid has no tool search; send only tools to offer now",
}
"""Maps each refused type of block to the reason for the refusal. Unknown types are refused, too."""
_BILLING_LINE = "x-anthropic-billing-header:"
"""The beginning of the line that `_without_billing_line` removes from a system prompt."""


class _Block(RequestBody):
    """A content block."""

    type: str


class _TextFields(_Block):
    """The pydantic class of a text block. Its only purpose is the error for an invalid text block.

    A valid text block becomes a `_TextBlock` instead.
    """

    text: str


@dataclass(frozen=True, slots=True)
class _TextBlock:
    """A valid content block that contains text.

    The class is not a pydantic class, because a request may have hundreds of thousands of text
    blocks. Creating a pydantic object for each of them would delay the requests of other clients
    for seconds.
    """

    text: str


class _ImageBlock(_Block):
    """A content block that contains an image. The backend checks if the model accepts images."""

    source: dict[str, Any]


class _ThinkingBlock(_Block):
    """The reasoning of an earlier answer. Nereid ignores the field `signature` of this block."""

    thinking: str


class _RedactedThinkingBlock(_Block):
    """Encrypted reasoning from another server. Nereid does not pass it to the chat template."""


class _ToolUseBlock(_Block):
    """A tool call from an earlier answer."""

    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class _ToolResultBlock(_Block):
    """The result of a tool call. The function `_read_block` converts `content` to blocks."""

    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Any = None
    is_error: bool | None = None


class _Message(RequestBody):
    """One message of the conversation, as the client sent it."""

    role: Literal["user", "assistant", "system"]
    content: Any


_AnyBlock = _Block | _TextBlock


@dataclass(frozen=True)
class _Turn:
    """One message of the conversation, with validated blocks."""

    role: str
    blocks: list[_AnyBlock]


_TEXT_ONLY_BLOCKS: dict[str, type[_Block]] = {"text": _TextFields}
_RESULT_BLOCKS: dict[str, type[_Block]] = {"text": _TextFields, "image": _ImageBlock}
_BLOCKS: dict[str, dict[str, type[_Block]]] = {
    "user": {"text": _TextFields, "image": _ImageBlock, "tool_result": _ToolResultBlock},
    "assistant": {
        "text": _TextFields,
        "thinking": _ThinkingBlock,
        "redacted_thinking": _RedactedThinkingBlock,
        "tool_use": _ToolUseBlock,
    },
    "system": _TEXT_ONLY_BLOCKS,
}
"""Maps the role of a message to the types of blocks that the message may contain."""


def chat_messages(system: str | Sequence[Json] | None, messages: Sequence[Json]) -> list[Json]:
    """Convert a conversation to the messages of a chat completion.

    Example: the message {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"},
    {"type": "text", "text": "Yes"}]} becomes {"role": "assistant", "content": "Yes", "reasoning":
    "Hm", "reasoning_content": "Hm"}.

    Args:
        system: the field `system` of the request.
        messages: the field `messages` of the request.

    Raises: FieldError that names the wrong block, its value and the remedy.
    """
    turns = [_read_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    # System messages at the start of the conversation are added to the system prompt.
    first_turns = list(itertools.takewhile(lambda turn: turn.role == "system", turns))
    system_blocks = [] if system is None else _read_blocks(system, "system", _TEXT_ONLY_BLOCKS)
    for turn in first_turns:
        system_blocks += turn.blocks
    conversation = turns[len(first_turns) :]
    if not conversation:
        raise FieldError("messages", "messages must contain at least one message of the user")
    # Many chat templates accept only one system message. Later system messages therefore become
    # user messages.
    chat = _merge_turns_to_chat([_without_system_role(turn) for turn in conversation])
    # The coding agent Claude Code starts the system prompt with a billing line, which differs in
    # each conversation. This line is removed, because prompts with different first lines cannot
    # share a cached prefix.
    system_text = _without_billing_line(_join_text_blocks(system_blocks))
    if not system_text:
        return chat
    return [{"role": "system", "content": system_text}, *chat]


def _merge_turns_to_chat(turns: Sequence[_Turn]) -> list[Json]:
    """Convert the messages of the user and the assistant to chat messages.

    Consecutive messages with the same role become one message, as in Anthropic's API. The chat
    message with the result of a tool call also contains the name of the called function. Only the
    block of the tool call has this name.
    """
    chat: list[Json] = []
    function_names: dict[str, str] = {}  # maps the id of a tool call to the name of the function
    for role, group in itertools.groupby(turns, key=operator.attrgetter("role")):
        blocks = [block for turn in group for block in turn.blocks]
        if role == "assistant":
            calls = [block for block in blocks if isinstance(block, _ToolUseBlock)]
            function_names |= {call.id: call.name for call in calls}
            chat.append(_assistant_message(blocks))
        else:
            chat += _user_messages(blocks, function_names)
    return chat


def _read_message(given: Json, place: str) -> _Turn:
    """Validate a message and its blocks."""
    message = validated(_Message, given, place)
    blocks = _read_blocks(message.content, f"{place}.content", _BLOCKS[message.role])
    if not blocks and message.role == "user":
        raise FieldError(f"{place}.content", f"{place}.content must have at least one block")
    return _Turn(message.role, blocks)


def _read_blocks(content: object, place: str, kinds: Mapping[str, type[_Block]]) -> list[_AnyBlock]:
    """Return the content of a message as a list of blocks.

    If the content is a text, return one text block.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise FieldError(
            place,
            f"{place} must be a string or a list of blocks, but the request has {shown(content)}",
        )
    return [_read_block(block, f"{place}[{at}]", kinds) for at, block in enumerate(content)]


def _read_block(given: object, place: str, kinds: Mapping[str, type[_Block]]) -> _AnyBlock:
    """Validate and return a block of a message. Convert the content of a tool result to blocks."""
    type_name = given.get("type") if isinstance(given, dict) else None
    if not isinstance(type_name, str) or type_name not in kinds:
        raise _wrong_type_error(given, type_name, place, kinds)
    # pydantic would be too slow for a request with many text blocks; see `_TextBlock`.
    text = given.get("text") if type_name == "text" and isinstance(given, dict) else None
    if isinstance(text, str):
        return _TextBlock(text)
    block = validated(kinds[type_name], given, place)
    if isinstance(block, _ImageBlock):
        _check_image_source(block, place)
    if isinstance(block, _ToolResultBlock):
        content = _read_blocks(block.content or "", f"{place}.content", _RESULT_BLOCKS)
        return block.model_copy(update={"content": content})
    return block


def _wrong_type_error(
    given: object, type_name: object, place: str, kinds: Mapping[str, type[_Block]]
) -> FieldError:
    """Return the error for a block whose type is unknown or not allowed in this message."""
    reason = _REFUSED_BLOCKS.get(str(type_name))
    if reason is not None:
        return FieldError(
            place,
            f"{place} has the type {type_name}, which is not supported: {reason}. Remove this "
            "block.",
        )
    return FieldError(
        place,
        f"{place} must be a block of the type {' or '.join(kinds)}, but the request has "
        f"{shown(given if type_name is None else type_name)}",
    )


def _join_text_blocks(blocks: Sequence[_AnyBlock]) -> str:
    """Join the texts of all text blocks. Each text starts on a new line. Skip other blocks."""
    return "\n".join(block.text for block in blocks if isinstance(block, _TextBlock))


def _without_billing_line(system: str) -> str:
    r"""Remove the billing line that Claude Code writes at the beginning of a system prompt.

    This coding agent sends the line for the statistics of Anthropic's servers. The line contains
    hashes that change with each conversation, and in some versions with each request. If the line
    stayed in the prompt, no text after it could be read from the prefix cache.

    Example: "x-anthropic-billing-header: cc_version=2.1; cch=0a1;\nBe brief." returns "Be brief."
    """
    if not system.startswith(_BILLING_LINE):
        return system
    return system.partition("\n")[2]


def _without_system_role(turn: _Turn) -> _Turn:
    """Convert a system message to a user message. Return other messages unchanged.

    The user message contains the tag <system-reminder>, which agents use in user messages around
    text that the user did not write.
    """
    if turn.role != "system":
        return turn
    text = f"<system-reminder>\n{_join_text_blocks(turn.blocks)}\n</system-reminder>"
    return _Turn("user", [_TextBlock(text)])


def _assistant_message(blocks: Sequence[_AnyBlock]) -> Json:
    """Convert the blocks of an assistant's message to one chat message.

    The arguments of a tool call stay an object, as in Anthropic's API. OpenAI's API has JSON text
    instead, which the backend would parse, because chat templates expect an object.
    """
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, _ToolUseBlock)
    ]
    message: Json = {
        "role": "assistant",
        # A chat message contains only one text. The text before a tool call is therefore joined
        # with the text after the call.
        "content": "".join(block.text for block in blocks if isinstance(block, _TextBlock)),
    }
    if reasoning:
        # Some chat templates read the field `reasoning`, others read `reasoning_content`.
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(
    blocks: Sequence[_AnyBlock], function_names: Mapping[str, str]
) -> Iterator[Json]:
    """Yield the chat messages for the blocks of a user's message.

    The results of tools come first, because chat templates expect the results directly after the
    tool calls.
    """
    for block in blocks:
        if isinstance(block, _ToolResultBlock):
            yield _tool_message(block, function_names)
    has_images = any(isinstance(block, _ImageBlock) for block in blocks)
    has_texts = any(isinstance(block, _TextBlock) for block in blocks)
    if has_images:
        yield {"role": "user", "content": _text_and_image_parts(blocks)}
    elif has_texts:
        yield {"role": "user", "content": _join_text_blocks(blocks)}


def _tool_message(result: _ToolResultBlock, function_names: Mapping[str, str]) -> Json:
    """Return the chat message that contains the result of a tool call."""
    if result.tool_use_id not in function_names:
        raise FieldError(
            "messages",
            "The tool_use_id of each tool_result block must be the id of an earlier tool_use "
            f"block, but the request has {shown(result.tool_use_id)}. The request must also "
            "contain the message with the tool_use block.",
        )
    return {
        "role": "tool",
        "content": _result_content(result),
        "tool_call_id": result.tool_use_id,
        "name": function_names[result.tool_use_id],
    }


def _text_and_image_parts(blocks: Sequence[_AnyBlock]) -> list[Json]:
    """Convert the text and image blocks of a message or a tool result to chat content parts."""
    parts: list[Json] = []
    for block in blocks:
        if isinstance(block, _ImageBlock):
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block)}})
        elif isinstance(block, _TextBlock):
            parts.append({"type": "text", "text": block.text})
    return parts


def _check_image_source(block: _ImageBlock, place: str) -> None:
    if _image_url(block) is None:
        raise FieldError(
            f"{place}.source",
            f"{place}.source must have the type 'base64' and the fields 'media_type' and 'data', "
            f"or the type 'url' and the field 'url', but its type is "
            f"{shown(block.source.get('type'))}",
        )


def _image_url(block: _ImageBlock) -> str | None:
    """Return the URL of an image block, or None if the source of the image is wrong.

    Example: the source {"type": "base64", "media_type": "image/png", "data": "iVBO"} returns
    "data:image/png;base64,iVBO".
    """
    source = block.source
    kind = source.get("type")
    if kind == "base64":
        data, media_type = source.get("data"), source.get("media_type")
        if isinstance(data, str) and isinstance(media_type, str):
            return f"data:{media_type};base64,{data}"
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    return None


def _result_content(block: _ToolResultBlock) -> str | list[Json]:
    """Return the text of a tool's result, or its content parts if the result contains images.

    If the tool failed, the content starts with "Error: ", because chat templates have no field for
    the failure of a tool.
    """
    if any(isinstance(each, _ImageBlock) for each in block.content):
        parts = _text_and_image_parts(block.content)
        return [{"type": "text", "text": "Error: "}, *parts] if block.is_error else parts
    text = _join_text_blocks(block.content)
    return f"Error: {text}" if block.is_error else text
