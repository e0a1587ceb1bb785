"""Build the grammar nodes for tool calls in Python syntax, such as `f(city="Paris", days=3)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid_parsers.constraints.constrain_members import separated_members
from nereid_parsers.constraints.constrain_names import (
    check_name_of_python_argument,
    check_name_of_python_call,
)
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
    """Return the node for one tool call in Python syntax, such as `f(city="Paris", days=3)`.

    Raises:
        ConstraintError: The parser cannot read the name of the function or of an argument.
    """

    def argument(key: str) -> Node:
        """Return the node for `key=value`."""
        check_name_of_python_argument(key)
        return sequence(const(f"{key}="), _python_value(tool.arguments.schema_of(key)))

    check_name_of_python_call(tool.name)
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
    because xgrammar describes them with a JSON schema. The only other text for a union with null is
    `None`.
    """
    types = json_types_of(schema, root=schema)
    json_text = json_schema(schema)
    if types == _BOOLEAN_ONLY:
        return one_of(const("True"), const("False"), json_text)
    if types is not None and "null" in types and _choices_allow_null(schema):
        return one_of(const("None"), json_text)
    # The regex of single-quoted strings cannot enforce a keyword such as `enum` or `maxLength`.
    is_restricted = any(keyword in schema for keyword in _STRING_RESTRICTIONS)
    if types == _STRING_ONLY and not is_restricted:
        return one_of(json_text, {"type": "regex", "pattern": _SINGLE_QUOTED})
    return json_text


def _choices_allow_null(schema: Mapping[str, Any]) -> bool:
    """Return whether the values that a schema lists, for example in `enum`, include null.

    Examples: the result is True for `{"enum": [1, None]}`. It is False for
    `{"type": ["integer", "null"], "enum": [1]}`, in which `type` allows null, but `enum` does not.
    If the schema lists no values, the result is True.
    """
    choices = choices_of(schema)
    return not choices or None in choices
