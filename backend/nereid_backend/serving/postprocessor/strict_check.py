# SPDX-License-Identifier: Apache-2.0
"""Validates the complete output of a choice against the strict schemas of its request."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from nereid_backend.errors import EngineError, RequestError
from nereid_backend.serving.wire import StreamContext

# A function that validates a complete message of the form
# {"content": text, "calls": [{"name": text, "arguments": text}, ...]}. The function raises an
# EngineError if the message does not match a strict schema of the request.
Check = Callable[[dict[str, Any]], None]


def strict_check(context: StreamContext) -> Check | None:
    """Return a function that validates a complete message; None if no schema is strict.

    If the message has no tool calls, the function validates the content against the schema of a
    strict response_format. If the message has tool calls, the function validates the arguments of
    each call of a strict tool.

    Raises:
        RequestError: the field `strict_schema` of `context` is not JSON.
    """
    tool_schemas = _strict_tool_schemas(context)
    if not context.strict_schema and not tool_schemas:
        return None
    content_schema = _parse_schema(context.strict_schema) if context.strict_schema else None

    def check(message: Mapping[str, Any]) -> None:
        """Raise an EngineError if the content or a tool call does not match its schema."""
        if context.strict_schema and not message["calls"]:
            _validate("response_format", message["content"], content_schema)
        for call in message["calls"]:
            name = call["name"]
            if name in tool_schemas:
                _validate(f"tools: {name}", call["arguments"], tool_schemas[name])

    return check


def _parse_schema(text: str) -> Any:  # noqa: ANN401 - any JSON schema
    """Parse the JSON text of a schema. The text comes from the message of the tokenizer."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"envelope: the JSON schema of the answer, in the message from the tokenizer, is not "
            f"valid JSON: {error}."
        ) from None


def _strict_tool_schemas(context: StreamContext) -> dict[str, Any]:
    """Return the JSON schema of the arguments of each strict tool, by the name of the tool."""
    if not context.reads_calls:
        return {}
    # Clients set `strict` in the tool or in its function.
    functions = [
        tool["function"]
        for tool in context.tools
        if tool["function"].get("strict") or tool.get("strict")
    ]
    return {function["name"]: function.get("parameters") or {} for function in functions}


class CheckedMessage:
    """Collects the deltas of a message, and validates the complete message.

    Args:
        check: a function that validates a complete message.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> None:
        """Add a delta, which contains new parts of the message.

        A delta of a tool call contains a part of the arguments. Only the first delta of a call
        contains the name. Example: {"content": "Hi", "tool_calls": [{"index": 0, "name": "add",
        "arguments": '{"x"'}]}.
        """
        self._content.append(delta.get("content", ""))
        for call_delta in delta.get("tool_calls", ()):
            call = self._calls.setdefault(call_delta["index"], {"name": "", "arguments": ""})
            call["name"] = call_delta.get("name", call["name"])
            call["arguments"] += call_delta["arguments"]

    def validate(self) -> None:
        """Validate the message. Call this method after the last delta of the message was added.

        Raises:
            EngineError: the message does not match a strict schema of the request.
        """
        self._check({"content": "".join(self._content), "calls": list(self._calls.values())})


def _validate(field: str, text: str, schema: Any) -> None:  # noqa: ANN401 - any JSON schema
    """Raise an EngineError if `text` is not JSON, or does not match `schema`.

    The message of the error contains `field`.
    """
    # The module is imported here, because it imports jsonschema, and most requests have no schema.
    from nereid_backend.grammar.validate_answer import describe_violation

    problem = describe_violation(text, schema)
    if problem:
        raise EngineError(
            f"{field}: the generated text does not match the strict schema: {problem}"
        )
