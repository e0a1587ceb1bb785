# SPDX-License-Identifier: Apache-2.0
"""After generation: an answer that was promised to match a schema is checked against it."""

import json
from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import EngineError
from nereid_backend.serving.postprocessor.choice import Check
from nereid_backend.serving.wire import StreamContext


def strict_check(context: StreamContext) -> Check | None:
    """What checks a whole message of this request; None where nothing strict was asked for."""
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {}
        for tool in context.tools
        if (tool["function"].get("strict") or tool.get("strict")) and context.reads_calls
    }
    if not context.strict_schema and not schemas:
        return None
    content = json.loads(context.strict_schema) if context.strict_schema else None

    def check(message: Mapping[str, Any]) -> None:
        if context.strict_schema and not message["calls"]:
            _validate("response_format", message["content"], content)
        for call in message["calls"]:
            if call["name"] in schemas:
                _validate(f"tools: {call['name']}", call["arguments"], schemas[call["name"]])

    return check


def _validate(where: str, text: str, schema: Any) -> None:  # noqa: ANN401 - any JSON schema
    # Imported where it is needed: most requests bring no schema.
    from nereid_backend.grammar.validate_answer import validate_strict

    problem = validate_strict(text, schema)
    if problem:
        raise EngineError(f"{where}: the answer breaks its strict schema: {problem}")
