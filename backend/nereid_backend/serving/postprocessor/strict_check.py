# SPDX-License-Identifier: Apache-2.0
"""Validates the complete output of a request against its strict schemas."""

import json
from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import EngineError
from nereid_backend.serving.postprocessor.choice import Check
from nereid_backend.serving.wire import StreamContext


def strict_check(context: StreamContext) -> Check | None:
    """Return a function that validates a complete message; None without a strict schema.

    The content is validated against a strict response_format, and the arguments of a call against
    the parameters of its tool, if that is strict.
    """
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {}
        for tool in context.tools
        if (tool["function"].get("strict") or tool.get("strict")) and context.reads_calls
    }
    if not context.strict_schema and not schemas:
        return None
    content = json.loads(context.strict_schema) if context.strict_schema else None

    def check(message: Mapping[str, Any]) -> None:
        """Raise an EngineError if the content or a call of `message` does not match its schema."""
        if context.strict_schema and not message["calls"]:
            _validate("response_format", message["content"], content)
        for call in message["calls"]:
            if call["name"] in schemas:
                _validate(f"tools: {call['name']}", call["arguments"], schemas[call["name"]])

    return check


def _validate(field: str, text: str, schema: Any) -> None:  # noqa: ANN401 - any JSON schema
    """Raise an EngineError that names `field` if `text` is not JSON that matches `schema`."""
    # Imported here, because most requests have no schema and need not load jsonschema.
    from nereid_backend.grammar.validate_answer import validate_strict

    problem = validate_strict(text, schema)
    if problem:
        raise EngineError(
            f"{field}: the generated text does not match the strict schema: {problem}"
        )
