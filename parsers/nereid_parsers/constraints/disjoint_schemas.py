"""Find out whether the parts of a `oneOf` are disjoint, so that no value matches two parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nereid_parsers.stream.values.argument_types import follow_references
from nereid_parsers.stream.values.json_text import json_type_of


def are_disjoint(options: list[Any], root: object) -> bool:
    """Return whether each value matches at most one of the schemas in `options`.

    For disjoint schemas, `oneOf` and `anyOf` accept the same values. Only the declared types, the
    constants, and the constants of required properties are compared. `root` contains the
    definitions to which the schemas may refer. Examples:

        {"type": "string"}, {"type": "integer"}   True
        {"const": "a"}, {"const": "b"}            True
        {"type": "string"}, {"const": "a"}        False
        {"minimum": 1}                            True, because there is only one schema
    """
    if len(options) < 2:
        return True
    options_by_type: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for option in options:
        schema = follow_references(option, root)
        json_type = _single_type(schema)
        if json_type is None:
            return False
        options_by_type[json_type].append(schema)
    # Schemas of different types never match the same value. Schemas of the same type must declare
    # different constants, so that each value matches at most one of them.
    return all(
        len(same_type) == 1 or _are_different(same_type) or _have_discriminator(same_type, root)
        for same_type in options_by_type.values()
    )


def _single_type(schema: object) -> str | None:
    """Return the JSON type of a schema, or None if the schema does not declare exactly one type.

    An integer matches the types "integer" and "number". Therefore, the result for both types is
    "number", so that different results mean disjoint types. Examples: `{"type": "string"}` and
    `{"const": "a"}` give "string".
    """
    if not isinstance(schema, Mapping):
        return None
    json_type = json_type_of(schema["const"]) if "const" in schema else schema.get("type")
    if not isinstance(json_type, str):  # Several types, or no type.
        return None
    return "number" if json_type == "integer" else json_type


def _have_discriminator(schemas: list[Mapping[str, Any]], root: object) -> bool:
    """Return whether a required property has different constants in all schemas of objects.

    Example: the result is True if one schema is
    `{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}`, and the other schema has the
    constant "b" instead of "a". pydantic writes such schemas for unions of models.
    """
    names: set[str] | None = None  # The properties that all schemas require.
    for schema in schemas:
        required = schema.get("required")
        if not isinstance(required, list) or not isinstance(schema.get("properties"), Mapping):
            return False
        required_names = {name for name in required if isinstance(name, str)}
        names = required_names if names is None else names & required_names
    return any(
        _are_different(
            [follow_references(schema["properties"].get(name), root) for schema in schemas]
        )
        for name in sorted(names or ())
    )


def _are_different(schemas: list[Any]) -> bool:
    """Return whether all schemas list their values, and no value is in two schemas.

    A schema lists its values with `const` or `enum`. Example: the result is True for
    `{"const": "a"}` and `{"enum": ["b", "c"]}`.
    """
    found: set[str] = set()
    for schema in schemas:
        if not isinstance(schema, Mapping):
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return False
        texts = {repr(value) for value in values}
        if texts & found:
            return False
        found |= texts
    return True
