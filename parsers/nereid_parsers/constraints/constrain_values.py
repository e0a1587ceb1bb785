"""Reads the schema of an argument whose value is not written as JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constraints.constrain_nodes import count_chars
from nereid_parsers.constraints.constrain_request import ToolSchema
from nereid_parsers.constraints.report_unenforced import report_keywords
from nereid_parsers.constraints.unenforced_keywords import RESTRICTIONS
from nereid_parsers.errors import ConstraintError
from nereid_parsers.stream.values.argument_types import follow_references

# The keywords that the grammar node for free text enforces. Other keywords are reported.
ENFORCED_IN_TEXT = frozenset({"type", "anyOf", "oneOf", "$ref"})
# The maximum number of values inside the objects and arrays of one argument, in a format with
# unquoted keys.
_MAX_INNER_VALUES = 100


@dataclass(slots=True)
class Argument:
    """An argument of a tool, whose grammar node is being built.

    Attributes:
        tool: The tool.
        key: The name of the argument.
        num_inner_values: The number of values inside the objects and arrays of the argument for
            which a grammar node has been requested; see `count_inner_value`.
    """

    tool: ToolSchema
    key: str
    num_inner_values: int = 0

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the argument."""
        return self.tool.arguments.schema_of(self.key)

    def report_unenforced(self, schema: Mapping[str, Any], enforced: frozenset[str]) -> None:
        """Log a warning if `schema` has restrictions that a grammar node does not enforce.

        If the tool is strict, raise an error instead. Example: the node for a string enforces only
        the keywords in `ENFORCED_IN_TEXT`, so `maxLength` is reported.

        Args:
            schema: The JSON schema of the argument, or of a value inside the argument. The members
                of its keywords `anyOf` and `oneOf` are examined, too.
            enforced: The keywords that the node enforces.

        Raises:
            ConstraintError: The tool is strict, and `schema` has such a restriction.
        """
        keywords = {keyword for each in (schema, *_alternatives(schema)) for keyword in each}
        unenforced = (keywords & RESTRICTIONS) - enforced
        descriptions = [
            f"{keyword} inside $.properties.{self.key}, because the format does not write this "
            "value as JSON"
            for keyword in sorted(unenforced)
        ]
        report_keywords(
            descriptions, is_strict=self.tool.is_strict, field=f"tools: {self.tool.name}"
        )

    def count_inner_value(self) -> None:
        """Increase the number of values inside the argument by one, and check the number.

        The number is limited, because each value needs a grammar node. A recursive schema declares
        an unlimited number of values.

        Raises:
            ConstraintError: The argument contains more than `_MAX_INNER_VALUES` values.
        """
        self.num_inner_values += 1
        if self.num_inner_values > _MAX_INNER_VALUES:
            raise ConstraintError(
                "The format writes arguments as objects with unquoted keys. Constrained output "
                "supports only arguments whose objects and arrays declare at most "
                f"{_MAX_INNER_VALUES} values in total, but the schema of an argument is recursive "
                "or declares more values. Use a smaller schema, or set tool_choice to auto."
            )


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the members of `anyOf` and `oneOf`, with their references replaced.

    Example: `{"anyOf": [{"type": "string"}, {"type": "null"}]}` gives the two inner schemas.
    """
    members: list[Any] = []
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            members += schema[keyword]
    count_chars(len(members))  # Many arguments may refer to one long list.
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
