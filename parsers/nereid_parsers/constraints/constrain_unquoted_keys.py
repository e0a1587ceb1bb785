"""Builds the grammar nodes for objects with unquoted keys, such as `{city:<q>Paris<q>,days:3}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nereid_parsers.constraints.constrain_members import separated_members
from nereid_parsers.constraints.constrain_nodes import (
    NOTHING,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    sequence,
)
from nereid_parsers.constraints.constrain_request import ObjectSchema, ToolSchema, inner_schema
from nereid_parsers.constraints.constrain_values import (
    ENFORCED_IN_TEXT,
    Argument,
    choices_of,
)
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.tool_declarations import BareKeyArguments

# The keywords that the grammar nodes for arrays and objects enforce. Other keywords are reported.
_ENFORCED_WITHOUT_LIMITS = frozenset({"type", "items"})
_ENFORCED_WITH_LIMITS = frozenset({*_ENFORCED_WITHOUT_LIMITS, "minItems", "maxItems"})
_ENFORCED_IN_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
# A larger value of `minItems` or `maxItems` is reported, because the grammar would be too large.
_MAX_ITEM_LIMIT = 256


def unquoted_key_arguments(declaration: BareKeyArguments, tool: ToolSchema) -> Node:
    """Return the node for an object with unquoted keys, for example `{city:<q>Paris<q>,days:3}`.

    The members of the object are the arguments of `tool`. `declaration` declares the text before
    and after each string, here `<q>`.
    """

    def member(key: str) -> Node:
        """Return the node for `key:value`."""
        argument = Argument(tool, key)
        return sequence(const(f"{key}:"), _value_node(declaration, argument, argument.schema))

    return _in_braces(separated_members(tool.arguments, member, ","))


def _in_braces(members: Node) -> Node:
    """Return the node for an object in braces: the node for `a:1` gives the node for `{a:1}`."""
    return sequence(const("{"), members, const("}"))


def _inner_value_node(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for a value inside an object or an array, and count the value.

    Example: the argument `{city:<q>Paris<q>}` contains the value `<q>Paris<q>`. `schema` is the
    JSON schema of the value. `argument` is the argument that contains the value.

    Raises:
        ConstraintError: The argument contains too many values.
    """
    argument.count_inner_value()
    return _value_node(declaration, argument, schema)


def _value_node(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for a value in an object with unquoted keys, as in `{days:3}`.

    Examples of matching texts, if the text `<q>` encloses each string:

        string            `<q>Paris<q>`
        array             `[<q>Paris<q>,<q>Rome<q>]`
        object            `{city:<q>Paris<q>}`
        any other value   `3`, which is JSON text

    If the grammar for a string, an array or an object cannot enforce a restriction in `schema`, the
    restriction is reported for `argument`.

    Args:
        declaration: Declares the text around each string.
        argument: The argument of the tool for which unenforced restrictions are reported. The value
            may be the whole argument, or may be inside an array or object.
        schema: The JSON schema of the value.
    """
    types = json_types_of(schema, root=schema)
    if _is_written_as_json(types, declaration.quote):
        return json_schema(schema)
    choices = choices_of(schema)  # The values that the schema lists, or None.
    if choices is not None and _are_scalars(choices):
        return one_of(*(const(_text_of_scalar(choice, declaration.quote)) for choice in choices))
    may_be_string = types is None or "string" in types  # None if the types are not known.
    if may_be_string:
        return _string_node(declaration, argument, schema)
    if types == frozenset({"array"}):
        return _array_node(declaration, argument, schema)
    if types == frozenset({"object"}):
        return _object_node(declaration, argument, schema)
    return json_schema(schema)  # For example a number or a boolean.


def _is_written_as_json(types: frozenset[str] | None, quote: str) -> bool:
    """Return whether the model writes values of the JSON `types` as JSON, such as `"Paris"` or `3`.

    Objects are not JSON, because they have unquoted keys. Strings are JSON only if `quote`, the
    text around each string, is `"`. If the types are not known (None), the result is False.
    """
    are_scalars = types is not None and types.isdisjoint({"array", "object"})
    return are_scalars and quote == '"'


def _are_scalars(values: list[Any]) -> bool:
    """Return whether none of the JSON values is an array or an object."""
    return not any(isinstance(value, list | dict) for value in values)


def _text_of_scalar(value: str | float | bool | None, quote: str) -> str:
    """Write a string, a number, a boolean or null. Example: `"a"` gives `<q>a<q>`."""
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _string_node(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for a string with any text, such as `<q>Paris<q>`.

    The node does not enforce restrictions such as `pattern`, so they are reported. For a union such
    as "string or integer", the node matches only strings, and the union accepts every string.
    """
    argument.report_unenforced(schema, ENFORCED_IN_TEXT)
    quote = declaration.quote
    return {"type": "tag", "begin": quote, "content": any_text(), "end": quote}


def _array_node(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for an array in an object with unquoted keys, as in `{days:[1,2]}`.

    `declaration` declares the text around each string. `schema` is the JSON schema of the array.
    `argument` is, or contains, the array. A restriction in `schema` that the node does not enforce
    is reported for this argument.
    """
    are_limits_enforced = _has_valid_item_limits(schema)
    argument.report_unenforced(
        schema, _ENFORCED_WITH_LIMITS if are_limits_enforced else _ENFORCED_WITHOUT_LIMITS
    )
    schema_of_item = inner_schema(schema.get("items"), root=schema)
    item = _inner_value_node(declaration, argument, schema_of_item)
    if are_limits_enforced:
        items = _items_node(item, schema.get("minItems", 0), schema.get("maxItems"))
    else:
        items = _items_node(item, minimum=0, maximum=None)
    return sequence(const("["), items, const("]"))


def _object_node(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for an inner object with unquoted keys, as in `{stay:{days:3}}`.

    `declaration` declares the text around each string. `schema` is the JSON schema of the object.
    `argument` is, or contains, the object. A restriction in `schema` that the node does not enforce
    is reported for this argument.
    """
    argument.report_unenforced(schema, _ENFORCED_IN_OBJECTS)
    object_schema = ObjectSchema(schema)

    def member(key: str) -> Node:
        """Return the node for `key:value`."""
        value = _inner_value_node(declaration, argument, object_schema.schema_of(key))
        return sequence(const(f"{key}:"), value)

    return _in_braces(separated_members(object_schema, member, ","))


def _has_valid_item_limits(schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar node can enforce `minItems` and `maxItems` of a schema.

    Examples: the result is True for `{"minItems": 1}` and `{}`. The result is False for
    `{"minItems": -1}`, `{"minItems": 2, "maxItems": 1}` and `{"maxItems": "3"}`.
    """
    limits = [schema[keyword] for keyword in ("minItems", "maxItems") if keyword in schema]
    are_small_integers = all(type(n) is int and 0 <= n <= _MAX_ITEM_LIMIT for n in limits)
    return are_small_integers and limits == sorted(limits)


def _items_node(item: Node, minimum: int, maximum: int | None) -> Node:
    """Return the grammar node for the items of an array, separated by commas, as in `1,2`.

    `minimum` and `maximum` limit the number of items. If `maximum` is None, there is no upper
    limit.
    """
    if maximum == 0:
        return NOTHING
    further_items = {
        "type": "repeat",
        "min": max(minimum - 1, 0),
        "max": -1 if maximum is None else maximum - 1,
        "content": sequence(const(","), item),
    }
    items = sequence(item, further_items)
    return items if minimum > 0 else optional(items)
