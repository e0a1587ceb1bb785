"""Converts an object or array that is written as nested tags: `<x>1</x>` becomes `{"x": 1}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from json.encoder import encode_basestring as quote_json
from typing import Any, NamedTuple

from nereid_parsers.stream.values.argument_types import json_types_of, to_json

_CONTAINERS = frozenset({"object", "array"})
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
    """Convert the text of an argument to JSON if the text consists of elements, or if it is empty.

    Return None for any other text. Also return None if `schema` allows a type other than object,
    array and null, for example a string. Example: `<x>1</x><y>2</y>` gives `{"x": 1, "y": 2}`.

    The references (`$ref`) of `schema` are looked up in `root`.
    """
    types = json_types_of(schema, root)
    if not types or not types <= _CONTAINERS | {"null"}:
        return None
    if text.strip() and _split_elements(text) is None:
        return None
    return _to_json(text, schema, root, depth=0)


def _to_json(text: str, schema: object, root: Mapping[str, Any], depth: int) -> str:
    """Convert the text of an element to JSON. The schema and the text decide its type.

    Examples:
        type in the schema   text               result
        object               `<x>1</x>`         `{"x": 1}`
        array                `<x>1</x>`         `[1]`
        none                 `<item>1</item>`   `[1]`
        none                 `<x>1</x>`         `{"x": 1}`
        object               (empty)            `{}`
        array                (empty)            `[]`
        integer              `1`                `1`
    """
    types = json_types_of(schema, root)  # None if the schema declares no type.
    allows_containers = types is None or bool(types & _CONTAINERS)
    elements = _split_elements(text) if allows_containers and depth < _MAX_DEPTH else None
    if elements is not None:
        declared = schema if isinstance(schema, Mapping) else {}
        is_array = elements[0].name == _ARRAY_ITEM if types is None else "object" not in types
        convert = _array_to_json if is_array else _object_to_json
        return convert(elements, declared, root, depth)
    if types and types <= _CONTAINERS and not text.strip():
        return "[]" if "array" in types else "{}"
    return to_json(text, types)


def _array_to_json(
    elements: list[_Element], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    """Convert each element to an item of an array: `<x>1</x><x>2</x>` becomes `[1, 2]`."""
    item_schema = schema.get("items")
    items = [_to_json(element.text, item_schema, root, depth + 1) for element in elements]
    return _join_items(items)


def _object_to_json(
    elements: list[_Element], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    """Convert each element to a member of an object: `<x>1</x><y>2</y>` becomes `{"x": 1, "y": 2}`.

    The values of all elements with the same name become one array.
    """
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    values_of_name: dict[str, list[str]] = {}
    for element in elements:
        value = _to_json(element.text, schemas.get(element.name), root, depth + 1)
        values_of_name.setdefault(element.name, []).append(value)
    members = []
    for name, values in values_of_name.items():
        value = values[0] if len(values) == 1 else _join_items(values)
        members.append(f"{quote_json(name)}: {value}")
    return f"{{{', '.join(members)}}}"


def _join_items(items: list[str]) -> str:
    """Return a JSON array of items that are already JSON: `["1", "2"]` gives `[1, 2]`."""
    return f"[{', '.join(items)}]"


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
