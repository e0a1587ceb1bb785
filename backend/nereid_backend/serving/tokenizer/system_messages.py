# SPDX-License-Identifier: Apache-2.0
"""Converts chats with several system messages for chat templates that render only the first."""

import itertools
from collections.abc import Sequence
from typing import Any

from nereid_backend.serving.tokenizer.chat_messages import as_parts

_SEPARATOR = "\n\n"


def merge_first_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Merge the system messages at the start of a chat into one system message.

    Example: two messages with the contents "Be brief." and "Be kind." become one message with the
    content "Be brief.\n\nBe kind."
    """
    num_first = _count_first_system_messages(messages)
    if num_first < 2:
        return list(messages)
    contents = [message.get("content") or "" for message in messages[:num_first]]
    merged: str | list[Any]
    if all(isinstance(content, str) for content in contents):
        merged = _SEPARATOR.join(contents)
    else:  # At least one of the messages contains an image.
        separator = as_parts(_SEPARATOR)
        lists = [[*as_parts(content), *separator] for content in contents]
        merged = list(itertools.chain.from_iterable(lists))[: -len(separator)]
    return [{**messages[0], "content": merged}, *messages[num_first:]]


def with_later_system_messages_as_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Change the role of system messages that follow another message to "user"."""
    num_first = _count_first_system_messages(messages)
    later = [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages[num_first:]
    ]
    return [*messages[:num_first], *later]


def _count_first_system_messages(messages: Sequence[dict[str, Any]]) -> int:
    """Return the number of system messages at the start of a chat."""
    return len(list(itertools.takewhile(lambda message: message["role"] == "system", messages)))
