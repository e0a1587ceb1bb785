# SPDX-License-Identifier: Apache-2.0
"""Converts messages with tool calls to the form that a chat template expects."""

import itertools
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """A form of the assistant messages that contain tool calls.

    Attributes:
        is_flat: whether a call is `{"name": .., "arguments": ..}`. Otherwise, the name and the
            arguments are in the field `function` of the call.
        has_text_arguments: whether the arguments are JSON text instead of an object.
        empty_content: the content of a message without text: "" or None.
    """

    is_flat: bool
    has_text_arguments: bool
    empty_content: str | None

    def convert(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in this form. A message without tool calls is not changed.

        Args:
            message: a message as `read_messages` returns it. The arguments are objects.
        """
        if not message.get("tool_calls"):
            return message
        return {
            **message,
            "content": message.get("content") or self.empty_content,
            "tool_calls": [self._convert_call(call) for call in message["tool_calls"]],
        }

    def _convert_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a tool call in this form."""
        function = call["function"]
        if self.has_text_arguments:
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": arguments}
        return function if self.is_flat else {**call, "function": function}


CALL_FORMS = tuple(
    CallForm(is_flat, has_text_arguments, empty_content)
    for is_flat, has_text_arguments, empty_content in itertools.product(
        (False, True), (False, True), ("", None)
    )
)
"""All forms. The first form is the form of `read_messages`, which most templates expect.

The templates of DeepSeek expect arguments that are text, and some of these templates render tool
calls only if the content is None.
"""
