"""Builds the grammar nodes for objects with unquoted keys, such as `{city:<q>Paris<q>,days:3}`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nereid_parsers.constrain_arguments import comma_separated
from nereid_parsers.constrain_nodes import (
    NOTHING,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    sequence,
)
from nereid_parsers.constrain_request import ToolSchema
from nereid_parsers.constrain_values import (
    ENFORCED_IN_TEXT,
    MAX_INNER_VALUES,
    Argument,
    choices_of,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.tool_declarations import BareKeyArguments

# The keywords that the grammar nodes for arrays and objects enforce. Other keywords are reported.
_ENFORCED_IN_ANY_LIST = frozenset({"type", "items"})
_ENFORCED_IN_LISTS = frozenset({*_ENFORCED_IN_ANY_LIST, "minItems", "maxItems"})
_ENFORCED_IN_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
# A larger value of `minItems` or `maxItems` is reported, because the grammar would be too large.
_MAX_ITEM_LIMIT = 256


def unquoted_key_arguments(declaration: BareKeyArguments, tool: ToolSchema) -> Node:
    """Return the node for an object with unquoted keys, for example `{city:<q>Paris<q>,days:3}`."""

    def member(key: str) -> Node:
        """Return the node for `key:value`."""
        value = _unquoted_key_value(declaration, Argument(tool, key), tool.argument(key))
        return sequence(const(f"{key}:"), value)

    return _unquoted_key_object(tool, member)


def _unquoted_key_object(tool: ToolSchema, member_node: Callable[[str], Node]) -> Node:
    """Return the node for an object whose members match the nodes that `member_node` returns."""
    return sequence(const("{"), comma_separated(tool, member_node, ","), const("}"))


def _inner_unquoted_key_value(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the node for a value inside an object or array of `argument`.

    Example: the argument `{city:<q>Paris<q>}` contains the value `<q>Paris<q>`. `schema` is the
    JSON schema of the value. The values are counted, because a recursive schema declares an
    unlimited number of them, and each value needs a node.

    Raises:
        ConstraintError: The argument contains more than `MAX_INNER_VALUES` values.
    """
    argument.num_inner_values += 1
    if argument.num_inner_values > MAX_INNER_VALUES:
        raise ConstraintError(
            "The format writes arguments as objects with unquoted keys. Constrained output "
            "supports only arguments whose objects and arrays declare at most "
            f"{MAX_INNER_VALUES} values in total, but the schema of an argument is recursive or "
            "declares more values. Use a smaller schema, or set tool_choice to auto."
        )
    return _unquoted_key_value(declaration, argument, schema)


def _unquoted_key_value(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for a value in an object with unquoted keys, as in `{days:3}`.

    `declaration.quote` is the text before and after each string. Examples of matching texts with
    the quote `<q>`: `<q>a<q>` for a string, `[<q>a<q>,<q>b<q>]` for an array, and
    `{city:<q>Paris<q>}` for an object. Every other value is JSON text.

    The value with the JSON schema `schema` is `argument`, or is inside `argument`.
    """
    quote = declaration.quote
    types = json_types_of(schema, root=schema)
    if quote == '"' and types is not None and types.isdisjoint({"array", "object"}):
        return json_schema(schema)  # Strings are written as in JSON, so the whole value is JSON.
    choices = choices_of(schema)  # The allowed values, or None.
    if choices is not None and not any(isinstance(choice, list | dict) for choice in choices):
        return one_of(*(const(_unquoted_key_text(choice, quote)) for choice in choices))
    if types is None or "string" in types:
        # For a union such as "string or integer", the node matches only strings. The output is
        # valid, because the union accepts every string.
        argument.report(schema, ENFORCED_IN_TEXT)
        return {"type": "tag", "begin": quote, "content": any_text(), "end": quote}
    if types == frozenset({"array"}):
        return _array_of_unquoted_key_values(declaration, argument, schema)
    if types == frozenset({"object"}):
        return _inner_unquoted_key_object(declaration, argument, schema)
    return json_schema(schema)


def _unquoted_key_text(value: str | float | bool | None, quote: str) -> str:
    """Write a value that is no array or object: `"a"` gives `<q>a<q>`, and `True` gives `true`."""
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _array_of_unquoted_key_values(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for an array in an object with unquoted keys, as in `{days:[1,2]}`.

    `schema` is the JSON schema of the array, which is `argument` or is inside `argument`.
    """
    has_valid_limits = _has_valid_item_limits(schema)
    argument.report(schema, _ENFORCED_IN_LISTS if has_valid_limits else _ENFORCED_IN_ANY_LIST)
    # `ToolSchema` replaces the references in the schema of a property, so the schema of the items
    # is passed as the schema of a property named "items".
    array_as_tool = ToolSchema(
        name="", parameters={**schema, "properties": {"items": schema.get("items")}}
    )
    item = _inner_unquoted_key_value(declaration, argument, array_as_tool.argument("items"))
    items = _items_node(item, schema if has_valid_limits else {})
    return sequence(const("["), items, const("]"))


def _inner_unquoted_key_object(
    declaration: BareKeyArguments, argument: Argument, schema: Mapping[str, Any]
) -> Node:
    """Return the grammar node for an object with unquoted keys, such as `{city:<q>Paris<q>}`.

    `schema` is the JSON schema of the object, which is `argument` or is inside `argument`.
    """
    argument.report(schema, _ENFORCED_IN_OBJECTS)
    # The members of an object are written in the same way as the arguments of a tool. The name of
    # the tool is not part of the node.
    object_as_tool = ToolSchema(name="", parameters=schema)

    def member(key: str) -> Node:
        """Return the node for `key:value`."""
        value = _inner_unquoted_key_value(declaration, argument, object_as_tool.argument(key))
        return sequence(const(f"{key}:"), value)

    return _unquoted_key_object(object_as_tool, member)


def _has_valid_item_limits(schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar node can enforce `minItems` and `maxItems` of a schema.

    Examples: the result is True for `{"minItems": 1}` and `{}`. The result is False for
    `{"minItems": -1}`, `{"minItems": 2, "maxItems": 1}` and `{"maxItems": "3"}`.
    """
    limits = [schema[keyword] for keyword in ("minItems", "maxItems") if keyword in schema]
    are_small_integers = all(type(n) is int and 0 <= n <= _MAX_ITEM_LIMIT for n in limits)
    return are_small_integers and limits == sorted(limits)


def _items_node(item: Node, schema: Mapping[str, Any]) -> Node:
    """Return the grammar node for the items of an array, separated by commas, as in `1,2`.

    `schema` is the schema of the array, which may contain `minItems` and `maxItems`.
    """
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
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
