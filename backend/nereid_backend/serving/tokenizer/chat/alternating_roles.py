# SPDX-License-Identifier: Apache-2.0
"""Merges messages for chat templates in which the user and the assistant must alternate."""

from collections.abc import Iterator, Sequence
from typing import Any

from nereid_backend.serving.tokenizer.chat.system_messages import (
    SYSTEM_ROLES,
    join_contents,
    with_later_system_messages_as_user,
)

_MERGED_ROLES = ("user", "assistant")


def alternating_messages(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Change a chat that a template has refused. Yield changed chats that contain the same texts.

    In all of these chats, consecutive messages of the user are merged, because some templates
    refuse two messages of the user in a row. Agents send such messages, for example, after the user
    has interrupted an answer. Two more changes are tried, first alone and then together:
    - A first message of the system becomes a message of the user, for templates without the role
      system, such as that of Gemma 2.
    - A message of the user after the result of a tool is appended to the result, for templates such
      as those of Mistral. Claude Code sends such messages.

    A chat that is equal to `messages` is left out.
    """
    first_unchanged = with_later_system_messages_as_user(messages)
    chats = [first_unchanged]
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first_as_user = {**messages[0], "role": "user"}
        chats.append([first_as_user, *first_unchanged[1:]])
    for appends_to_results in (False, True):
        for chat in chats:
            merged = merge_consecutive_messages(chat, appends_to_results=appends_to_results)
            if merged != messages:
                yield merged


def merge_consecutive_messages(
    messages: Sequence[dict[str, Any]], *, appends_to_results: bool = False
) -> list[dict[str, Any]]:
    r"""Merge consecutive messages of the user, and consecutive messages of the assistant.

    Messages of the assistant with neither content nor tool calls are left out, except the last
    message. If `appends_to_results` is true, and a message of the user directly follows the result
    of a tool, the text of the message is appended to the result.

    Example: two messages of the user with the contents "Hi" and "Stop" become one message with the
    content "Hi\n\nStop".
    """
    groups: list[list[dict[str, Any]]] = []
    for message in messages:
        has_output = bool(message.get("content") or message.get("tool_calls"))
        is_last = message is messages[-1]  # The answer may continue this message.
        if message["role"] == "assistant" and not has_output and not is_last:
            continue
        if groups and _can_merge(groups[-1][-1], message, appends_to_results=appends_to_results):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_merge(group) for group in groups]


def _can_merge(last: dict[str, Any], message: dict[str, Any], *, appends_to_results: bool) -> bool:
    """Return whether `message` is merged with the message before it, `last`.

    A message with tool calls is not merged with the next message, because the result of a call
    must follow the call. `appends_to_results` is explained in `merge_consecutive_messages`.
    """
    if last["role"] == message["role"]:
        return message["role"] in _MERGED_ROLES and not last.get("tool_calls")
    is_user_after_tool = last["role"] == "tool" and message["role"] == "user"
    texts = (last.get("content"), message.get("content"))
    return (
        appends_to_results and is_user_after_tool and all(isinstance(text, str) for text in texts)
    )


def _merge(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one message with the contents of all messages, and the role of the first message."""
    if len(messages) == 1:
        return messages[0]
    contents = [message["content"] for message in messages if message.get("content")]
    merged: dict[str, Any] = {}
    for message in reversed(messages):  # The fields of the first message replace all others.
        merged |= message
    return {**merged, "content": join_contents(contents)}
