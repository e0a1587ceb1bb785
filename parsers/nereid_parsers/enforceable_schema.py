"""Rewrites keywords of a JSON schema that xgrammar ignores into keywords that it enforces.

xgrammar 0.2.8 ignores an `allOf` of several schemas. It also ignores `multipleOf` for numbers and
for integers with bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from nereid_parsers.stream.argument_types import json_type_of

Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
"""Keywords that do not restrict the values. The first of two values of such a keyword is kept."""
_STRICTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
"""Maps a bound to the function that selects the stricter one of two values."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# xgrammar ignores the other keywords of a schema that has one of these keywords.
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "not", "if", "const", "enum"})
_LARGEST_MULTIPLE_OF = 1024
_MAX_MULTIPLES = 256
_MAX_DEPTH = 64


class _CannotMergeError(Exception):
    """Two schemas have no common schema that xgrammar enforces."""


def enforceable(schema: object) -> Any:  # noqa: ANN401 - JSON
    """Return a schema that accepts the same values, and whose keywords xgrammar enforces.

    The parts of an `allOf` are merged into one schema. A number that must be a multiple of an
    integer becomes an integer. An integer with bounds and `multipleOf` becomes a list of values.
    Other parts are not changed, so xgrammar may still ignore some of their keywords.

    Examples:
        {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]} returns
        {"type": "integer", "minimum": 1, "maximum": 5}.
        {"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 22} returns
        {"enum": [10, 15, 20]}.
    """
    return _rewrite(schema, schema, frozenset(), 0)


def is_enforced_multiple(schema: Schema) -> bool:
    """Return whether xgrammar enforces the keyword `multipleOf` of a schema."""
    multiple = schema["multipleOf"]
    return (
        schema.get("type") == "integer"
        and _is_integer(multiple)
        and 1 <= multiple <= _LARGEST_MULTIPLE_OF
        and not any(bound in schema for bound in _BOUNDS)
    )


def _rewrite(schema: object, root: object, inlined: frozenset[str], depth: int) -> Any:  # noqa: ANN401 - JSON
    """Rewrite a schema and all schemas inside it, see `enforceable`.

    Args:
        schema: A JSON schema, or a list or an object that contains schemas.
        root: The outermost schema, to which references refer.
        inlined: The references that were replaced by their definitions around `schema`.
        depth: The number of values that enclose `schema`.
    """
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_rewrite(item, root, inlined, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("allOf"), list):
        schema, inlined = _without_all_of(schema, root, inlined)
    if "multipleOf" in schema:
        schema = _with_enforced_multiple(schema)
    return {
        keyword: value
        if keyword in ("enum", "const", "default", "examples")
        else _rewrite(value, root, inlined, depth + 1)
        for keyword, value in schema.items()
    }


def _without_all_of(
    schema: Schema, root: object, inlined: frozenset[str]
) -> tuple[Schema, frozenset[str]]:
    """Merge the keyword `allOf` of a schema with the other keywords of the schema.

    Returns:
        The merged schema, and the references that were replaced by their definitions. If the parts
        cannot be merged, `schema` and `inlined` are returned.
    """
    others = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    parts = schema["allOf"]
    is_reference = len(parts) == 1 and isinstance(parts[0], Mapping) and "$ref" in parts[0]
    if is_reference and _ANNOTATIONS.issuperset(others):
        return {**parts[0], **others}, inlined
    try:
        resolved = [_resolve(part, root, inlined) for part in (others, *parts)]
        merged = functools.reduce(_merge, [part for part, _ in resolved])
    except (_CannotMergeError, TypeError, AttributeError):
        # The last two errors mean that a keyword has a value of a wrong type.
        return schema, inlined
    return merged, frozenset().union(*(references for _, references in resolved))


def _resolve(part: object, root: object, inlined: frozenset[str]) -> tuple[Schema, frozenset[str]]:
    """Replace the keywords `$ref` and `allOf` in a part of an `allOf`.

    Returns:
        The part without these keywords, and the references that were replaced by their definitions.

    Raises:
        _CannotMergeError: The part is recursive, or it refers to another document.
    """
    if part is True:
        return {}, inlined
    if not isinstance(part, Mapping):
        raise _CannotMergeError
    reference = part.get("$ref")
    if reference is not None:
        if not isinstance(reference, str) or reference in inlined:
            raise _CannotMergeError
        others = {keyword: value for keyword, value in part.items() if keyword != "$ref"}
        target, inlined = _resolve(_target(reference, root), root, inlined | {reference})
        part = _merge(others, target)
    if "allOf" in part:
        part, inlined = _without_all_of(part, root, inlined)
        if "allOf" in part:
            raise _CannotMergeError
    return part, inlined


def _target(reference: str, root: object) -> object:
    """Return the definition that a reference such as "#/$defs/Address" names.

    Raises:
        _CannotMergeError: The document has no such definition.
    """
    target = root
    start, *names = reference.split("/")
    for name in names:
        if not isinstance(target, Mapping) or name not in target:
            raise _CannotMergeError
        target = target[name]
    if start != "#":
        raise _CannotMergeError
    return target


def _merge(first: object, second: object) -> dict[str, Any]:
    """Merge two schemas into one schema that accepts only the values which both schemas accept.

    Raises:
        _CannotMergeError: No value matches both schemas, or the result has a combination of
            keywords that xgrammar does not enforce.
    """
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        if first is True or second is True:
            other = second if first is True else first
            return dict(other) if isinstance(other, Mapping) else {}
        raise _CannotMergeError
    merged = dict(first)
    for keyword, value in second.items():
        if keyword not in merged:
            merged[keyword] = value
        elif merged[keyword] != value and keyword not in ("properties", "additionalProperties"):
            merged[keyword] = _merge_values(keyword, merged[keyword], value)
    if "properties" in merged or "additionalProperties" in merged:
        merged |= _merge_properties(first, second, merged.get("required") or [])
    _check_combination(merged)
    return merged


def _merge_values(keyword: str, first: Any, second: Any) -> object:  # noqa: ANN401 - JSON
    """Combine two values of a keyword into one value that has the effect of both values.

    Example: for the keyword `maxLength` and the values 5 and 9, the result is 5.

    Raises:
        _CannotMergeError: No single value of the keyword has the effect of both values.
    """
    if keyword in _ANNOTATIONS:
        return first
    if keyword == "type":
        return _common_types(first, second)
    if keyword == "required":
        return list(dict.fromkeys([*first, *second]))
    if keyword == "enum":
        return [value for value in first if value in second]
    if keyword == "items":
        return _merge(first, second)
    if keyword in _STRICTER and _is_number(first) and _is_number(second):
        return _STRICTER[keyword](first, second)
    if keyword == "multipleOf" and _is_integer(first) and _is_integer(second):
        return math.lcm(int(first), int(second))
    raise _CannotMergeError


def _common_types(first: object, second: object) -> str | list[str]:
    """Return the types that both values of `type` allow. An integer is a number, too.

    Example: `"number"` and `["integer", "null"]` have the type `"integer"` in common.
    """
    first_types: set[Any] = set(first) if isinstance(first, list) else {first}
    second_types: set[Any] = set(second) if isinstance(second, list) else {second}
    for types, other_types in ((first_types, second_types), (second_types, first_types)):
        if "number" in types and "number" not in other_types and "integer" in other_types:
            types.add("integer")
    common = sorted(first_types & second_types)
    if not common:
        raise _CannotMergeError
    return common[0] if len(common) == 1 else common


def _merge_properties(first: Schema, second: Schema, required: list[str]) -> dict[str, Any]:
    """Return the keywords `properties` and `additionalProperties` of the merged schema.

    Example: the properties `{"a": {"type": "string"}}` and `{"a": {"maxLength": 9}}` give
    `{"a": {"type": "string", "maxLength": 9}}`.

    Raises:
        _CannotMergeError: No object matches both schemas, or xgrammar could not enforce the result.
    """
    if any("patternProperties" in schema for schema in (first, second)):
        raise _CannotMergeError
    first_properties = first.get("properties") or {}
    second_properties = second.get("properties") or {}
    # The schemas of all properties that the keyword `properties` does not declare.
    first_rest = first.get("additionalProperties", True)
    second_rest = second.get("additionalProperties", True)
    merged = {}
    for name in dict.fromkeys([*first_properties, *second_properties]):
        first_schema = first_properties.get(name, first_rest)
        second_schema = second_properties.get(name, second_rest)
        if False not in (first_schema, second_schema):
            merged[name] = _merge(first_schema, second_schema)
        elif name in required:
            raise _CannotMergeError  # One schema requires a property that the other one forbids.
    result: dict[str, Any] = {"properties": merged}
    if False in (first_rest, second_rest):
        result["additionalProperties"] = False
    elif (first_rest, second_rest) != (True, True):
        result["additionalProperties"] = _merge(first_rest, second_rest)
    return result


def _check_combination(merged: dict[str, Any]) -> None:
    """Raise _CannotMergeError if xgrammar ignores keywords of a merged schema.

    The values of `enum` with a wrong type are removed from `merged`.
    """
    restrictions = merged.keys() - _ANNOTATIONS
    if "enum" in restrictions and isinstance(merged.get("type"), str):
        merged["enum"] = [value for value in merged["enum"] if _has_type(value, merged["type"])]
        restrictions -= {"type"}
    has_ignored_length = "pattern" in merged and bool({"minLength", "maxLength"} & restrictions)
    has_ignored_part = bool(_ALTERNATIVES & restrictions) and len(restrictions) > 1
    if has_ignored_length or has_ignored_part or merged.get("enum") == []:
        raise _CannotMergeError


def _with_enforced_multiple(schema: Schema) -> Schema:
    """Rewrite `schema` so that xgrammar enforces `multipleOf`, or return `schema` unchanged."""
    multiple = schema["multipleOf"]
    if schema.get("type") not in ("integer", "number") or not _is_integer(multiple):
        return schema
    if multiple < 1:
        return schema
    schema = {**schema, "type": "integer", "multipleOf": int(multiple)}
    if "enum" in schema or not any(bound in schema for bound in _BOUNDS):
        return schema
    multiples = _multiples(schema, int(multiple))
    if not multiples:
        return schema
    keywords = schema.keys() & _ANNOTATIONS
    return {**{keyword: schema[keyword] for keyword in keywords}, "enum": multiples}


def _multiples(schema: Schema, multiple: int) -> list[int]:
    """Return all multiples within the bounds of a schema, or [] if there are too many or none.

    Example: the multiples of 5 in `{"minimum": 1, "exclusiveMaximum": 15}` are [5, 10].
    """
    if not all(_is_number(schema[bound]) for bound in _BOUNDS if bound in schema):
        return []
    lowest = max(
        schema.get("minimum", -math.inf),
        schema.get("exclusiveMinimum", -math.inf),
    )
    highest = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    if not math.isfinite(lowest) or not math.isfinite(highest):
        return []
    first_factor = math.ceil(lowest / multiple)
    last_factor = math.floor(highest / multiple)
    if last_factor - first_factor >= _MAX_MULTIPLES:
        return []
    excluded = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    values = (factor * multiple for factor in range(first_factor, last_factor + 1))
    return [value for value in values if value not in excluded]


def _has_type(value: object, name: str) -> bool:
    """Return whether a JSON value has a type. An integer is a number, too."""
    found = json_type_of(value)
    return found == name or (name == "number" and found == "integer")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    """Return whether a JSON value is an integer, such as 5 or 5.0."""
    return _is_number(value) and float(value).is_integer()  # type: ignore[arg-type]
