"""Merges two JSON schemas into one schema that xgrammar enforces.

The merged schema accepts a value only if both schemas accept the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from nereid_parsers.constraints.enforceable_multiple import (
    ANNOTATIONS,
    Schema,
    is_integer,
    is_number,
)
from nereid_parsers.constraints.unenforced_keywords import ignored_keywords
from nereid_parsers.stream.values.json_text import json_type_of

# Maps the keyword of a bound to the function that returns the stricter of two bounds. Example:
# `minimum` is mapped to `max`, because the larger minimum is stricter.
_STRICTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
_PROPERTY_KEYWORDS = ("properties", "additionalProperties")
_LIMIT_OF_MULTIPLES = 2**64


class CannotMergeError(Exception):
    """Two schemas cannot be combined into one schema that xgrammar enforces."""


def merge_schemas(first: object, second: object) -> dict[str, Any]:
    """Merge two schemas. The merged schema accepts a value only if both schemas accept the value.

    Example: `{"type": "integer", "minimum": 1}` and `{"minimum": 3}` give
    `{"type": "integer", "minimum": 3}`. The schema `true` accepts every value, so a schema that is
    merged with `true` is returned unchanged.

    Raises:
        CannotMergeError: A schema is `false`, or is not a JSON schema. No value matches both
            schemas. The result has a combination of keywords that xgrammar does not enforce.
    """
    if first is True:
        return _as_dict(second)
    if second is True:
        return _as_dict(first)
    merged = _merge_keywords(_as_dict(first), _as_dict(second))
    if merged.get("enum") == []:
        raise CannotMergeError("no value of enum matches both schemas")
    if ignored_keywords(merged):
        raise CannotMergeError("xgrammar would ignore a keyword of the merged schema")
    return merged


def _as_dict(schema: object) -> dict[str, Any]:
    """Return a copy of a schema as a dict. The copy of the schema `true` is `{}`.

    Raises:
        CannotMergeError: The schema is `false`, which accepts no value, or is not a JSON schema.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise CannotMergeError("the schema accepts no value")
    return dict(schema)


def _merge_keywords(first: Schema, second: Schema) -> dict[str, Any]:
    """Merge two schemas keyword by keyword.

    Example: `{"type": "integer", "minimum": 1}` and `{"minimum": 3}` give
    `{"type": "integer", "minimum": 3}`.

    Raises:
        CannotMergeError: Two values of a keyword cannot be merged.
    """
    if _changes_meaning_of_items(first, second) or _changes_meaning_of_items(second, first):
        raise CannotMergeError("items cannot be merged with prefixItems")
    merged: dict[str, Any] = {**first, **second}
    common_keywords = [keyword for keyword in first if keyword in second]
    for keyword in common_keywords:
        if keyword not in _PROPERTY_KEYWORDS:
            merged[keyword] = _merge_values(keyword, first[keyword], second[keyword])
    # `properties` and `additionalProperties` depend on each other, so they are merged together.
    if any(keyword in merged for keyword in _PROPERTY_KEYWORDS):
        required_names = merged.get("required") or []
        merged |= _merge_properties(first, second, required_names)
    # The `enum` of one schema may contain values that the `type` of the other schema excludes.
    return _drop_impossible_choices(merged)


def _merge_values(keyword: str, first: Any, second: Any) -> object:  # noqa: ANN401 - JSON
    """Merge two values of a schema keyword into one value: 5 and 9 for `maxLength` give 5.

    The result enforces the restrictions of both values. Example: the values `["a", "b"]` and
    `["b", "c"]` of `enum` give `["b"]`. An annotation, such as `title`, enforces nothing, so
    `first` is returned.

    Raises:
        CannotMergeError: No single value of the keyword has the effect of both values.
    """
    if keyword in ANNOTATIONS or _hashable(first) == _hashable(second):
        return first
    if keyword == "type":
        return _common_types(first, second)
    if keyword == "required":
        return list(dict.fromkeys([*first, *second]))
    if keyword == "enum":
        return _common_values(first, second)
    if keyword == "items":
        return merge_schemas(first, second)
    if keyword in _STRICTER and is_number(first) and is_number(second):
        return _STRICTER[keyword](first, second)
    if keyword == "multipleOf" and is_integer(first) and is_integer(second):
        return _common_multiple(int(first), int(second))
    raise CannotMergeError(f"two values of {keyword} cannot be merged")


def _common_multiple(first: int, second: int) -> int:
    """Return the least common multiple of two values of `multipleOf`: 4 and 6 give 12.

    Raises:
        CannotMergeError: A value has more than 64 bits. With many such values, the least common
            multiple could become very long. Python writes no integer with more than 4,300 digits.
    """
    if max(abs(first), abs(second)) >= _LIMIT_OF_MULTIPLES:
        raise CannotMergeError("a value of multipleOf has more than 64 bits")
    return math.lcm(first, second)


def _common_values(first: list[Any], second: list[Any]) -> list[Any]:
    """Return the values in `first` that are also in `second`: `["a", "b"]`, `["b"]` gives `["b"]`.

    The values are looked up in a set, because a client may send tens of thousands of values.
    """
    allowed = set(map(_hashable, second))
    return [value for value in first if _hashable(value) in allowed]


def _hashable(value: object) -> object:
    """Convert a JSON value, so that two results are equal only if the JSON values are equal.

    In Python, `True == 1`, but in JSON, `true` and `1` are different values.
    """
    if isinstance(value, bool):
        return (bool, value)
    if isinstance(value, list):
        return (list, *map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((name, _hashable(inner)) for name, inner in value.items())
    return value


def _common_types(first: object, second: object) -> str | list[str]:
    """Intersect two values of the keyword `type`: return the types that both values allow.

    The type "number" also allows integers. Example: `"number"` and `["integer", "null"]` have the
    type `"integer"` in common.

    Raises:
        CannotMergeError: The two values have no type in common.
    """
    common = _allowed_types(first) & _allowed_types(second)
    if "number" in common:
        common.discard("integer")  # "number" already allows integers.
    if not common:
        raise CannotMergeError("the two schemas have no type in common")
    names = sorted(common)
    return names[0] if len(names) == 1 else names


def _allowed_types(value: object) -> set[Any]:
    """Convert a value of the keyword `type` to the set of allowed types.

    Example: `["number", "null"]` allows "number", "null" and "integer".
    """
    types = set(value) if isinstance(value, list) else {value}
    if "number" in types:
        types.add("integer")
    return types


def _changes_meaning_of_items(first: Schema, second: Schema) -> bool:
    """Return whether the keyword `items` would apply to fewer array elements after the merging.

    Example: `{"prefixItems": [A]}` and `{"items": B}`. In the second schema, the keyword `items`
    applies to all elements of an array. In the merged schema `{"prefixItems": [A], "items": B}`,
    the keyword would no longer apply to the first element.
    """
    return "prefixItems" in first and "items" in second and "prefixItems" not in second


def _merge_properties(first: Schema, second: Schema, required: list[str]) -> dict[str, Any]:
    """Merge the keywords `properties` and `additionalProperties` of two schemas.

    `additionalProperties` is the schema of all properties that `properties` does not contain. The
    schema False forbids a property. Example, in which the first schema forbids `b`:

        first   {"properties": {"a": {"minimum": 1}}, "additionalProperties": False}
        second  {"properties": {"a": {"maximum": 9}, "b": {}}}
        result  {"properties": {"a": {"minimum": 1, "maximum": 9}}, "additionalProperties": False}

    `required` contains the names of the properties that the object must have.

    Raises:
        CannotMergeError: No object matches both schemas, or xgrammar could not enforce the result,
            for example because a schema contains `patternProperties`.
    """
    if "patternProperties" in first or "patternProperties" in second:
        raise CannotMergeError("patternProperties cannot be merged")
    schema_by_name = _merge_listed_properties(first, second)
    others = _merge_other_properties(first, second)
    properties = _without_forbidden(schema_by_name, required, are_others_forbidden=others is False)
    if others is True:  # This is the default of `additionalProperties`.
        return {"properties": properties}
    return {"properties": properties, "additionalProperties": others}


def _merge_listed_properties(
    first: Schema, second: Schema
) -> dict[str, dict[str, Any] | Literal[False]]:
    """Merge the keyword `properties` of two schemas, property by property.

    Example: `{"properties": {"a": {"type": "string"}}}` and
    `{"properties": {"a": {"maxLength": 9}}}` give `{"a": {"type": "string", "maxLength": 9}}`. The
    value False means that one of the schemas forbids the property.
    """
    names = dict.fromkeys([*(first.get("properties") or {}), *(second.get("properties") or {})])
    return {
        name: _merge_or_forbid(_schema_of_property(first, name), _schema_of_property(second, name))
        for name in names
    }


def _merge_other_properties(first: Schema, second: Schema) -> dict[str, Any] | bool:
    """Merge the schemas that apply to all properties that `properties` does not contain.

    True accepts every value of such a property, and False forbids the property. Example:
    `{"additionalProperties": {"type": "string"}}` and `{}` give `{"type": "string"}`.
    """
    first_others = _schema_of_other_properties(first)
    second_others = _schema_of_other_properties(second)
    if first_others is True and second_others is True:
        return True
    return _merge_or_forbid(first_others, second_others)


def _without_forbidden(
    schema_by_name: dict[str, dict[str, Any] | Literal[False]],
    required: list[str],
    *,
    are_others_forbidden: bool,
) -> dict[str, dict[str, Any]]:
    """Copy the properties of an object, without the properties whose schema is False.

    The schema False forbids a property, but xgrammar does not support False as the schema of a
    property. A property that is not listed is forbidden only if the schema contains
    `{"additionalProperties": False}`. In this case, `are_others_forbidden` is true. Example: for
    the properties `{"a": {"type": "string"}, "b": False}`, `{"a": {"type": "string"}}` is returned.

    Raises:
        CannotMergeError: A forbidden property is `required`, so no object is valid. A property
            is forbidden, but the schema allows properties that are not listed.
    """
    forbidden_names = [name for name, schema in schema_by_name.items() if schema is False]
    if not set(required).isdisjoint(forbidden_names):
        raise CannotMergeError("a required property is forbidden")
    if forbidden_names and not are_others_forbidden:
        raise CannotMergeError("a property is forbidden, but other properties are allowed")
    return {name: schema for name, schema in schema_by_name.items() if schema is not False}


def _schema_of_property(schema: Schema, name: str) -> object:
    """Return the schema that applies to the property `name` of an object.

    If `properties` does not contain the name, `additionalProperties` applies to the property.
    """
    properties = schema.get("properties") or {}
    return properties.get(name, _schema_of_other_properties(schema))


def _schema_of_other_properties(schema: Schema) -> object:
    """Return the schema that applies to any property that is missing from `properties`.

    The default is the schema `true`, which accepts every value.
    """
    return schema.get("additionalProperties", True)


def _merge_or_forbid(first: object, second: object) -> dict[str, Any] | Literal[False]:
    """Merge two schemas of a property. Return False if one of the schemas is False.

    The schema False forbids the property.

    Raises:
        CannotMergeError: The two schemas are not False, but cannot be merged, for example because
            they contradict each other.
    """
    is_forbidden = first is False or second is False
    return False if is_forbidden else merge_schemas(first, second)


def _drop_impossible_choices(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema, and remove each value of `enum` that does not have the declared type.

    Example: `{"type": "string", "enum": ["a", 1]}` gives `{"type": "string", "enum": ["a"]}`.
    """
    json_type = schema.get("type")
    if "enum" not in schema or not isinstance(json_type, str):
        return schema
    types = ("number", "integer") if json_type == "number" else (json_type,)
    return {**schema, "enum": [value for value in schema["enum"] if json_type_of(value) in types]}
