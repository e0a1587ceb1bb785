"""Builds the structural-tag nodes for arguments that are not written as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constrain_nodes import (
    BLANKS,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    repeated,
    sequence,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import pattern
from nereid_parsers.stream.argument_types import json_types_of
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    NestedTags,
    PythonCalls,
    TaggedArguments,
)

# The only value of NestedTags.mark for which xgrammar can constrain nested elements.
_NESTED_MARK = "]<]minimax[>["
_NESTED_STYLE = "minimax_m3_xml"
_STRING_ONLY = frozenset({"string"})
# The regex for Python strings in single quotes cannot enforce these keywords of a schema.
_STRING_KEYWORDS = ("enum", "const", "pattern", "format", "minLength", "maxLength")
_SINGLE_QUOTED = r"""'([^'\\\n]|\\['"\\nrt])*'"""
# Without required arguments, only this number of optional arguments can be the first argument.
_MAX_FREE_STARTS = 12


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One tool of the request: its name and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> ToolSchema:
        """Convert one member of the OpenAI tools list. Raise ConstraintError if it has no name."""
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConstraintError(f"tools: the tool {dict(tool)!r} has no name. Set function.name.")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(name, parameters, bool(function.get("strict") or tool.get("strict")))

    def argument(self, key: str) -> Mapping[str, Any]:
        """Return the JSON schema of the argument `key`, with the definitions that it refers to."""
        schema = self.parameters["properties"][key]
        definitions = {
            keyword: self.parameters[keyword]
            for keyword in ("$defs", "definitions")
            if keyword in self.parameters
        }
        return {**definitions, **schema} if isinstance(schema, Mapping) else {}

    @property
    def keys(self) -> tuple[list[str], list[str]]:
        """The names of the required and the optional arguments, in the schema's order."""
        properties = self.parameters.get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        listed = self.parameters.get("required")
        required = set(listed) if isinstance(listed, list) else set()
        return (
            [name for name in names if name in required],
            [name for name in names if name not in required],
        )


def pattern_node(text: str, values: Mapping[str, list[str]]) -> Node:
    """Return the structural-tag node for a pattern whose fields have one or more possible values.

    Example: `pattern_node("<parameter={key}>", {"key": ["city"]})` gives
    `const("<parameter=city>")`.

    Raises:
        ConstraintError: `values` contains no values for a field of the pattern.
    """
    nodes: list[Node] = []
    for part in pattern(text):
        if isinstance(part, str):
            nodes.append(const(part))
        elif part.field in values:
            nodes.append(one_of(*map(const, values[part.field])))
        else:
            raise ConstraintError(
                f"The format does not define the text of the field {part.field}, so output cannot "
                f"be constrained to the pattern {text!r}"
            )
    return sequence(*nodes)


# ---- tagged values -------------------------------------------------------------------------------


def tagged_arguments(part: TaggedArguments, tool: ToolSchema) -> Node:
    """Return the node for all tagged arguments of a tool call, in the schema's order.

    Example of matching text: `<parameter=city>Paris</parameter><parameter=days>3</parameter>`.
    """
    required, optional_keys = tool.keys
    nodes = [_tagged_value(part, key, tool.argument(key)) for key in required]
    nodes += [optional(_tagged_value(part, key, tool.argument(key))) for key in optional_keys]
    return sequence(*nodes) if nodes else BLANKS


def _tagged_value(part: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Node:
    """Return the node for one tagged value, for example `<parameter=city>Paris</parameter>`."""
    types = json_types_of(schema, schema)
    if types is None or "string" in types:
        return _tagged_text(part, key, schema)
    return _tagged_json(part, key, schema, types)


def _tagged_text(part: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Node:
    """Return the node for a tagged value that may be a string, and therefore any text.

    Example of matching text: `<parameter=city>Paris</parameter>`.
    """
    values = {"key": [key], "string": ["true"], "type": ["string"]}
    opening = pattern_node(part.open, values)
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return sequence(opening, one_of(*map(const, choices)), const(part.close))
    # The spelling of a string may have no quotes, such as `<p>` next to
    # `<p><![CDATA[`. Such an opening is a prefix of the opening in the first spelling.
    is_constant = opening["type"] == "const_string" and bool(opening["value"])
    shorter = [other for other in part.also if is_constant and part.open.startswith(other.open)]
    options = [
        _text_until(pattern_node(spelling.open, values), spelling.close)
        for spelling in (part, *shorter)
    ]
    return one_of(*options)


def _tagged_json(
    part: TaggedArguments, key: str, schema: Mapping[str, Any], types: frozenset[str]
) -> Node:
    """Return the node for a tagged value that cannot be a string.

    A boolean or null may also be written as in Python (True, False, None). Example of matching
    text: `<parameter=days>3</parameter>`.
    """
    type_names = sorted(types or {"object"})
    if "number" not in type_names:
        # Some templates declare the type "number" for every value that is not a string.
        type_names.append("number")
    values = {"key": [key], "string": ["false"], "type": type_names}
    python_words: list[str] = []
    if "enum" not in schema and "const" not in schema:
        python_words += ["True", "False"] if "boolean" in types else []
        python_words += ["None"] if "null" in types else []
    options: list[Node] = []
    for spelling in (part, *part.also):
        json_value = json_schema(schema, excludes=spelling.close.strip())
        value = one_of(json_value, *map(const, python_words))
        options.append(sequence(pattern_node(spelling.open, values), value, const(spelling.close)))
    return one_of(*options)


def _text_until(opening: Node, close: str) -> Node:
    r"""Return the node for `opening`, followed by free text and `close`.

    The free text ends before the visible part of `close`, because the parser ends the value there.
    Example: with the closing text `"\n</p>\n"`, the free text ends at `</p>`, and `"\n"` follows
    the marker.
    """
    marker = close.strip()
    begin = opening["value"] if opening["type"] == "const_string" else ""
    text = {"type": "tag", "begin": begin, "content": any_text(), "end": marker}
    blanks_after = const(close.lstrip()[len(marker) :])
    return sequence(text, blanks_after) if begin else sequence(opening, text, blanks_after)


# ---- nested elements, Python calls, objects with bare keys ---------------------------------------


def nested_arguments(part: NestedTags, tool: ToolSchema) -> Node:
    """Return the node for arguments that are written as nested elements.

    Raises:
        ConstraintError: xgrammar does not support the mark before the tags.
    """
    if part.mark != _NESTED_MARK:
        raise ConstraintError(
            f"Nested elements with the mark {part.mark!r} cannot be constrained, because xgrammar "
            f"supports only the mark {_NESTED_MARK!r}"
        )
    return {**json_schema(tool.parameters), "style": _NESTED_STYLE}


def python_call(part: PythonCalls, tool: ToolSchema) -> Node:
    """Return the node for one tool call in Python syntax, for example `f(city="Paris", days=3)`."""
    required, optional_keys = tool.keys
    arguments = _comma_separated(
        [_python_argument(key, tool) for key in required],
        [_python_argument(key, tool) for key in optional_keys],
        const(", "),
    )
    return sequence(const(f"{tool.name}{part.suffix}("), arguments, const(")"))


def _python_argument(key: str, tool: ToolSchema) -> Node:
    """Return the node for one keyword argument, for example `days=3`."""
    return sequence(const(f"{key}="), _python_value(tool.argument(key)))


def _python_value(schema: Mapping[str, Any]) -> Node:
    """Return the node for a Python literal.

    Inside a list or a dict, constrained output contains the JSON words true, false and null. The
    parser accepts these words too.
    """
    types = json_types_of(schema, schema)
    if types == frozenset({"boolean"}):
        return one_of(const("True"), const("False"))
    if types is not None and "null" in types:
        not_null = {**schema, "type": sorted(types - {"null"})}
        return one_of(const("None"), json_schema(not_null))
    if types == _STRING_ONLY and not any(keyword in schema for keyword in _STRING_KEYWORDS):
        return one_of(json_schema(schema), {"type": "regex", "pattern": _SINGLE_QUOTED})
    return json_schema(schema)


def bare_key_arguments(part: BareKeyArguments, tool: ToolSchema) -> Node:
    """Return the node for an object with unquoted keys, for example `{city:<q>Paris<q>,days:3}`."""
    required, optional_keys = tool.keys
    members = _comma_separated(
        [_bare_key_member(part, key, tool) for key in required],
        [_bare_key_member(part, key, tool) for key in optional_keys],
        const(","),
    )
    return sequence(const("{"), members, const("}"))


def _bare_key_member(part: BareKeyArguments, key: str, tool: ToolSchema) -> Node:
    """Return the node for one member of an object with unquoted keys, for example `days:3`."""
    return sequence(const(f"{key}:"), _bare_key_value(part, tool.argument(key)))


def _bare_key_value(part: BareKeyArguments, schema: Mapping[str, Any]) -> Node:
    """Return the node for a value in an object with unquoted keys.

    Example of matching text: `[<q>a<q>,<q>b<q>]`.
    """
    types = json_types_of(schema, schema)
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return one_of(*(const(f"{part.quote}{choice}{part.quote}") for choice in choices))
    if types is None or "string" in types:
        return {"type": "tag", "begin": part.quote, "content": any_text(), "end": part.quote}
    if types == frozenset({"array"}):
        item_schema = schema.get("items")
        item = _bare_key_value(part, item_schema if isinstance(item_schema, Mapping) else {})
        return sequence(const("["), optional(repeated([item], const(","), False)), const("]"))
    if types == frozenset({"object"}):
        return bare_key_arguments(part, ToolSchema("", schema))
    return json_schema(schema)


def _comma_separated(required: list[Node], others: list[Node], separator: Node) -> Node:
    """Return the node for a list of members. Optional members may be omitted.

    Example: for the required member a and the optional members b and c, the matching texts are `a`,
    `a,b`, `a,c` and `a,b,c`. Without a required member, `b,c`, `b`, `c` and the empty text match.
    """
    if required:
        nodes = [required[0]]
        nodes += [sequence(separator, node) for node in required[1:]]
        nodes += [optional(sequence(separator, node)) for node in others]
        return sequence(*nodes)
    if not others:
        return const("")
    options = [
        sequence(first, *(optional(sequence(separator, node)) for node in others[number + 1 :]))
        for number, first in enumerate(others[:_MAX_FREE_STARTS])
    ]
    return optional(one_of(*options))
