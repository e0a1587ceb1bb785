# SPDX-License-Identifier: Apache-2.0
"""Reads the reasoning of assistant messages, and moves the reasoning into the content."""

from typing import Any

from nereid_backend.serving.tokenizer.chat.chat_messages import as_parts

# The fields in which clients send the reasoning of a message. If a client sends several of these
# fields, the field that is listed first here is used.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def reasoning_of(message: dict[str, Any]) -> str:
    """Return the reasoning of a message, or "" if the message has none."""
    given = (message.get(name) for name in REASONING_FIELDS)
    return next((text for text in given if text and isinstance(text, str)), "")


def with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Move the reasoning of a message to the first part of the content.

    Example: `{"role": "assistant", "content": "Hi", "reasoning": "Hm"}` becomes `{"role":
    "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text":
    "Hi"}]}`.
    """
    reasoning = reasoning_of(message)
    if not reasoning or message["role"] != "assistant":
        return message
    parts = [{"type": "thinking", "thinking": reasoning}, *as_parts(message.get("content") or "")]
    others = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**others, "content": parts}
