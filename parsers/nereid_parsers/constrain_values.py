"""Reads the schema of an argument whose value is not written as JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constrain_answer import report_keywords
from nereid_parsers.constrain_request import ToolSchema
from nereid_parsers.stream.values.argument_types import follow_references
from nereid_parsers.unenforced_keywords import RESTRICTIONS

# The keywords that the grammar node for free text enforces. Other keywords are reported.
ENFORCED_IN_TEXT = frozenset({"type", "anyOf", "oneOf", "$ref"})
# The maximum number of values inside the objects and arrays of one argument, in a format with
# unquoted keys. The grammar contains a node for each of these values. A recursive schema would have
# an unlimited number of them.
MAX_INNER_VALUES = 100


@dataclass(slots=True)
class Argument:
    """An argument of a tool, whose grammar node is being built.

    Attributes:
        tool: The tool.
        key: The name of the argument.
        num_inner_values: The number of values inside the objects and arrays of the argument for
            which a grammar node has been requested. `MAX_INNER_VALUES` limits this number.
    """

    tool: ToolSchema
    key: str
    num_inner_values: int = 0

    def report(self, schema: Mapping[str, Any], enforced: frozenset[str]) -> None:
        """Report each restriction in `schema`, or in its alternatives, that is not in `enforced`.

        Example: the node for the free text of a string does not enforce `maxLength`. An alternative
        is a member of `anyOf` or `oneOf`.

        Raises:
            ConstraintError: The tool is strict, and there is such a restriction.
        """
        schemas = [schema, *_alternatives(schema)]
        keywords = sorted({keyword for part in schemas for keyword in RESTRICTIONS & part.keys()})
        descriptions = [
            f"{keyword} inside $.properties.{self.key}, because the format does not write this "
            "value as JSON"
            for keyword in keywords
            if keyword not in enforced
        ]
        report_keywords(descriptions, self.tool.is_strict, f"tools: {self.tool.name}")


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the members of `anyOf` and `oneOf`, with their references replaced.

    Example: `{"anyOf": [{"type": "string"}, {"type": "null"}]}` gives the two inner schemas.
    """
    members: list[Any] = []
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            members += schema[keyword]
    followed = [follow_references(member, root=schema) for member in members]
    return [member for member in followed if isinstance(member, Mapping)]


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, or None if the schema does not list its values.

    Examples: `{"enum": ["a", "b"]}` gives `["a", "b"]`, and `{"anyOf": [{"const": "a"}, {"type":
    "null"}]}` gives `["a", None]`.
    """
    choices = _listed_values(schema)
    alternatives = _alternatives(schema)
    if choices is not None or not alternatives:
        return choices
    choices = []
    for alternative in alternatives:
        values = _listed_values(alternative)
        if values is None:
            return None
        choices += values
    return choices


def _listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values in the keyword `const` or `enum`, or None if there are no such values."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return list(schema["enum"])
    return [None] if schema.get("type") == "null" else None
