"""Build the grammar nodes for tool calls in Python syntax, such as `f(city="Paris", days=3)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid_parsers.constraints.constrain_members import separated_members
from nereid_parsers.constraints.constrain_nodes import Node, const, json_schema, one_of, sequence
from nereid_parsers.constraints.constrain_request import ToolSchema
from nereid_parsers.constraints.constrain_values import choices_of
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.tool_declarations import PythonCalls

_STRING_ONLY = frozenset({"string"})
_BOOLEAN_ONLY = frozenset({"boolean"})
# Schema keywords that restrict the text of a string.
_STRING_RESTRICTIONS = ("enum", "const", "pattern", "format", "minLength", "maxLength")
# Matches a Python string in single quotes that contains no line break, such as 'Paris'.
_SINGLE_QUOTED = r"""'([^'\\\n]|\\['"\\nrt])*'"""


def python_call(declaration: PythonCalls, tool: ToolSchema) -> Node:
    """Return the node for one tool call in Python syntax, such as `f(city="Paris", days=3)`."""

    def argument(key: str) -> Node:
        """Return the node for `key=value`."""
        return sequence(const(f"{key}="), _python_value(tool.arguments.schema_of(key)))

    arguments = separated_members(tool.arguments, argument, ", ")
    return sequence(const(f"{tool.name}{declaration.suffix}("), arguments, const(")"))


def _python_value(schema: Mapping[str, Any]) -> Node:
    """Return the grammar node for a Python literal, such as `True` in the call `f(a=True)`.

    Examples of matching texts:

        boolean           `True`, `False`, `true`, `false`
        null              `None`, `null`
        string            `"Paris"`, `'Paris'`
        any other value   JSON text such as `[1, 2]`

    The grammar accepts JSON words such as `true`, because some models are trained to write them,
    and because the parser accepts them. Lists, objects and unions of types must be JSON text,
    because xgrammar describes them with a JSON schema.
    """
    types = json_types_of(schema, root=schema)
    if types == _BOOLEAN_ONLY:
        return one_of(const("True"), const("False"), json_schema(schema))
    # If `type` allows null, but `enum` does not list null, null is not a valid value.
    if types is not None and "null" in types and _allows_null(schema):
        return one_of(const("None"), json_schema(schema))
    # The regex of single-quoted strings cannot enforce a keyword such as `enum` or `maxLength`.
    is_restricted = any(keyword in schema for keyword in _STRING_RESTRICTIONS)
    if types == _STRING_ONLY and not is_restricted:
        return one_of(json_schema(schema), {"type": "regex", "pattern": _SINGLE_QUOTED})
    return json_schema(schema)


def _allows_null(schema: Mapping[str, Any]) -> bool:
    """Return whether null is one of the values that a schema lists, or the schema lists no values.

    Examples: the result is True for `{"enum": [1, None]}`, and False for `{"enum": [1]}`.
    """
    choices = choices_of(schema)
    return not choices or None in choices
