# SPDX-License-Identifier: Apache-2.0
"""Converts chats with several system messages for chat templates that render only the first."""

import itertools
from collections.abc import Sequence
from typing import Any

from nereid_backend.serving.tokenizer.chat.chat_messages import as_parts

SYSTEM_ROLES = frozenset({"system", "developer"})
"""The roles whose messages contain instructions for the model."""
_SEPARATOR = "\n\n"


def merge_first_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Merge the system and developer messages at the start of a chat into one message.

    The merged message has the role of the first message.

    Example: two messages with the contents "Be brief." and "Be kind." become one message with the
    content "Be brief.\n\nBe kind."
    """
    num_first = count_first_system_messages(messages)
    if num_first < 2:
        return list(messages)
    contents = [message.get("content") or "" for message in messages[:num_first]]
    merged = join_contents(contents)
    return [{**messages[0], "content": merged}, *messages[num_first:]]


def join_contents(contents: Sequence[str | list[Any]]) -> str | list[Any]:
    r"""Join the contents of messages with blank lines. Contents with images become lists of parts.

    Example: "Be brief." and "Be kind." return "Be brief.\n\nBe kind."
    """
    if all(isinstance(content, str) for content in contents):
        return _SEPARATOR.join(map(str, contents))
    separator = as_parts(_SEPARATOR)
    lists = [[*as_parts(content), *separator] for content in contents]
    return list(itertools.chain.from_iterable(lists))[: -len(separator)]


def with_later_system_messages_as_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the roles "system" and "developer" with "user", except at the start of the chat.

    Example: in a chat with the roles "system", "user" and "system", only the last role is replaced.
    """
    num_first = count_first_system_messages(messages)
    later = [
        {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message
        for message in messages[num_first:]
    ]
    return [*messages[:num_first], *later]


def count_first_system_messages(messages: Sequence[dict[str, Any]]) -> int:
    """Count the messages at the start of a chat that have the role "system" or "developer".

    Example: the roles "system", "developer", "user" and "system" return 2.
    """
    first = itertools.takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)
    return len(list(first))
