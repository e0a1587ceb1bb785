"""Converts an object or array that is written as nested tags: `<x>1</x>` becomes `{"x": 1}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from json.encoder import encode_basestring as quote_json
from typing import Any, NamedTuple

from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.stream.values.json_text import to_json

_CONTAINERS = frozenset({"object", "array"})
_CONTAINERS_AND_NULL = _CONTAINERS | {"null"}
# If the schema declares no type, elements with this name are the items of an array.
_ARRAY_ITEM = "item"
_MAX_DEPTH = 32  # Deeper tags are plain text. Each level searches the text once.
_find_tags = re.compile(r"<(?P<slash>/?)(?P<name>[^<>/\s]+)>").finditer
_match_opening_tag = re.compile(r"\s*<(?P<name>[^<>/\s]+)>").match


class _Element(NamedTuple):
    """The name of an element such as `<x>1</x>`, and the text between its tags."""

    name: str
    text: str


def nested_tags_to_json(text: str, schema: object, root: Mapping[str, Any]) -> str | None:
    """Convert the text of an argument to JSON if it consists of elements such as `<x>1</x>`.

    Examples, if `schema` allows only an object:

        text                   result
        `<x>1</x><y>2</y>`     `{"x": 1, "y": 2}`
        (empty)                `{}`
        `{"x": 1}`, `<x>1 2`   None, because the text does not consist of elements

    The result is also None if `schema` declares no type, or allows a type other than object, array
    and null. `root` contains the definitions to which the references of `schema` point.
    """
    types = json_types_of(schema, root)
    if not types or not types <= _CONTAINERS_AND_NULL:
        return None
    return _elements_to_json(text, types, schema, root, depth=0)


def _elements_to_json(
    text: str,
    types: frozenset[str] | None,
    schema: object,
    root: Mapping[str, Any],
    depth: int,
) -> str | None:
    """Convert a text that consists of elements, or is empty, to a JSON array or object.

    Return None if the text is something else, or if the types do not allow an array or object.

        text               types        result
        (empty)            array        `[]`
        (empty)            not known    None, because the empty text may be a string
        `<x>1</x>`         string       None
        `12`               object       None, because the text contains no elements
        `<x>1</x>`         array        `[1]`
        `<item>1</item>`   not known    `[1]`
        `<x>1</x>`         object       `{"x": 1}`

    `types` are the JSON types that `schema` allows. `root` contains the definitions to which the
    references of `schema` point. `depth` is the number of enclosing elements.
    """
    if not text.strip():
        return _empty_container(types)
    may_be_container = types is None or bool(types & _CONTAINERS)
    if not may_be_container or depth >= _MAX_DEPTH:
        return None
    elements = _split_elements(text)
    if elements is None:
        return None
    declared = schema if isinstance(schema, Mapping) else {}
    if _is_array(elements, types):
        return _array_to_json(elements, declared, root, depth)
    return _object_to_json(elements, declared, root, depth)


def _empty_container(types: frozenset[str] | None) -> str | None:
    """Return an empty JSON array or object if `types` allow nothing else. Otherwise return None.

    Example: `{"array"}` gives `[]`. `types` are JSON types, or None if they are not known.
    """
    if not types or not types <= _CONTAINERS:
        return None
    return "[]" if "array" in types else "{}"


def _is_array(elements: list[_Element], types: frozenset[str] | None) -> bool:
    """Return whether `elements` are the items of an array, and not the members of an object.

    `types` are the JSON types that the schema allows. If the schema declares no type, the elements
    are items if the first one has the name `item`, as in `<item>1</item>`.
    """
    if types is not None:
        return "object" not in types
    return elements[0].name == _ARRAY_ITEM


def _value_to_json(text: str, schema: object, root: Mapping[str, Any], depth: int) -> str:
    """Convert the text of an element to JSON. The text may consist of other elements.

    Examples: `<x>1</x>` gives `{"x": 1}`, and `1` gives `1`, or `"1"` if only a string is allowed.

    `schema` is the JSON schema of the element. `root` contains the definitions to which the
    references of `schema` point. `depth` is the number of enclosing elements.
    """
    types = json_types_of(schema, root)
    container = _elements_to_json(text, types, schema, root, depth)
    return to_json(text, types) if container is None else container


def _array_to_json(
    elements: list[_Element], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    """Convert elements to a JSON array: `<x>1</x><x>2</x>` gives `[1, 2]`.

    `schema` is the JSON schema of the array. `root` contains the definitions to which the
    references of `schema` point. `depth` is the number of elements around the array.
    """
    item_schema = schema.get("items")
    items = [_value_to_json(element.text, item_schema, root, depth + 1) for element in elements]
    return _join_items(items)


def _object_to_json(
    elements: list[_Element], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    """Convert elements to a JSON object: `<x>1</x><y>2</y>` gives `{"x": 1, "y": 2}`.

    The values of all elements with the same name become one array: `<x>1</x><x>2</x>` gives
    `{"x": [1, 2]}`.

    `schema` is the JSON schema of the object. `root` contains the definitions to which the
    references of `schema` point. `depth` is the number of elements around the object.
    """
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    values_of_name: dict[str, list[str]] = {}
    for element in elements:
        value = _value_to_json(element.text, schemas.get(element.name), root, depth + 1)
        values_of_name.setdefault(element.name, []).append(value)
    members = [
        quote_json(name) + ": " + (values[0] if len(values) == 1 else _join_items(values))
        for name, values in values_of_name.items()
    ]
    return "{" + ", ".join(members) + "}"


def _join_items(items: list[str]) -> str:
    """Return a JSON array of items that are already JSON: `["1", "2"]` gives `[1, 2]`."""
    return "[" + ", ".join(items) + "]"


def _split_elements(text: str) -> list[_Element] | None:
    """Split `<x>1</x><y>2</y>` into its elements. Return None if `text` contains anything else."""
    elements: list[_Element] = []
    pos = 0
    while (opening := _match_opening_tag(text, pos)) is not None:
        closing = _find_closing_tag(text, opening["name"], opening.end())
        if closing is None:
            return None
        elements.append(_Element(opening["name"], text[opening.end() : closing.start()]))
        pos = closing.end()
    has_other_text = bool(text[pos:].strip())
    return elements if elements and not has_other_text else None


def _find_closing_tag(text: str, name: str, pos: int) -> re.Match[str] | None:
    """Find the tag that closes the element `name`, which may contain elements of this name."""
    depth = 1
    for tag in _find_tags(text, pos):
        if tag["name"] != name:
            continue
        depth += -1 if tag["slash"] else 1
        if depth == 0:
            return tag
    return None
