"""Rewrites JSON schemas, so that xgrammar enforces keywords that it would otherwise ignore.

xgrammar 0.2.8 ignores an `allOf` of several schemas. It also ignores `multipleOf` for numbers and
for integers with bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from nereid_parsers.stream.values.argument_types import json_type_of

Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
"""Keywords that do not restrict the values. `_merge` keeps the value of the first schema."""
_STRICTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
"""Maps the keyword of a bound to the function that returns the stricter one of two bounds."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# If a schema has one of these keywords, xgrammar ignores all other keywords of the schema.
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "not", "if", "const", "enum"})
# The values of these keywords are JSON values, not schemas.
_VALUE_KEYWORDS = ("enum", "const", "default", "examples")
_LARGEST_MULTIPLE_OF = 1024
_MAX_MULTIPLES = 256
_MAX_DEPTH = 64


class _CannotMergeError(Exception):
    """Two schemas cannot be combined into one schema that xgrammar enforces."""


class _Resolved(NamedTuple):
    """A schema in which references were replaced by their definitions.

    Attributes:
        schema: The schema.
        inlined: The references that were replaced. If the schema contains one of these references
            again, the schema is recursive.
    """

    schema: Schema
    inlined: frozenset[str]


def enforceable(schema: object) -> Any:  # noqa: ANN401 - JSON
    """Rewrite a schema, so that xgrammar enforces more keywords.

    The new schema accepts the same values.

    The parts of an `allOf` are merged into one schema. A number that must be a multiple of an
    integer becomes an integer. An integer with bounds and `multipleOf` becomes a list of values.
    Other parts are not changed, so xgrammar may still ignore some of their keywords.

    Examples:
        {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]} returns
        {"type": "integer", "minimum": 1, "maximum": 5}.
        {"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 22} returns
        {"enum": [10, 15, 20]}.
    """
    return _rewrite(schema, root=schema, inlined=frozenset(), depth=0)


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
    """Rewrite a schema and all schemas inside it. See `enforceable` for the changes.

    Args:
        schema: A JSON schema, or a list or an object that contains schemas.
        root: The outermost schema, to which references refer.
        inlined: The references that were replaced by a definition which contains `schema`.
        depth: The number of values that enclose `schema`.
    """
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_rewrite(item, root, inlined, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    has_parts = isinstance(schema.get("allOf"), list)
    merged = _without_all_of(schema, root, inlined) if has_parts else _Resolved(schema, inlined)
    rewritten: dict[str, Any] = {}
    for keyword, value in _with_enforced_multiple(merged.schema).items():
        if keyword in _VALUE_KEYWORDS:  # The value contains JSON data, not schemas.
            rewritten[keyword] = value
        else:
            rewritten[keyword] = _rewrite(value, root, merged.inlined, depth + 1)
    return rewritten


def _without_all_of(schema: Schema, root: object, inlined: frozenset[str]) -> _Resolved:
    """Merge the keyword `allOf` of a schema with the other keywords of the schema.

    Example: `{"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}` gives
    `{"type": "integer", "minimum": 1, "maximum": 5}`. If the parts cannot be merged, `schema` and
    `inlined` are returned unchanged.
    """
    others = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    parts = schema["allOf"]
    is_one_reference = len(parts) == 1 and isinstance(parts[0], Mapping) and "$ref" in parts[0]
    if is_one_reference and _ANNOTATIONS.issuperset(others):
        # The other keywords are only annotations, such as `title`. They do not restrict the values,
        # so one schema can contain both `$ref` and the annotations.
        return _Resolved({**parts[0], **others}, inlined)
    try:
        resolved = [_resolve(part, root, inlined) for part in (others, *parts)]
        merged = functools.reduce(_merge, [part.schema for part in resolved])
    except (_CannotMergeError, TypeError, AttributeError):
        # TypeError and AttributeError show that the value of a keyword has a wrong type.
        return _Resolved(schema, inlined)
    return _Resolved(merged, frozenset().union(*(part.inlined for part in resolved)))


def _resolve(part: object, root: object, inlined: frozenset[str]) -> _Resolved:
    """Rewrite one member of an `allOf`, so that the member contains neither `$ref` nor `allOf`.

    A `$ref` is replaced by the definition that the `$ref` names. An `allOf` inside the part is
    merged.

    Raises:
        _CannotMergeError: The part is recursive, or refers to another document.
    """
    if part is True:  # The schemas `true` and `{}` accept every value.
        return _Resolved({}, inlined)
    if not isinstance(part, Mapping):
        raise _CannotMergeError
    target = _follow_reference(part, root, inlined)
    if "allOf" not in target.schema:
        return target
    merged = _without_all_of(target.schema, root, target.inlined)
    if "allOf" in merged.schema:
        raise _CannotMergeError
    return merged


def _follow_reference(part: Schema, root: object, inlined: frozenset[str]) -> _Resolved:
    """Merge a schema with the definition that its keyword `$ref` names.

    Without this keyword, return the schema unchanged.

    Raises:
        _CannotMergeError: The definition contains the reference again, or does not exist.
    """
    reference = part.get("$ref")
    if reference is None:
        return _Resolved(part, inlined)
    if not isinstance(reference, str) or reference in inlined:
        raise _CannotMergeError
    others = {keyword: value for keyword, value in part.items() if keyword != "$ref"}
    definition = _resolve(_target(reference, root), root, inlined | {reference})
    return _Resolved(_merge(others, definition.schema), definition.inlined)


def _target(reference: str, root: object) -> object:
    """Return the definition to which a reference points, for example "#/$defs/Address".

    Escape sequences in names (`~0`, `~1`) are not decoded, so a definition whose name contains such
    a sequence is not found.

    Raises:
        _CannotMergeError: The document has no such definition, or the reference points to another
            document.
    """
    document, *names = reference.split("/")
    if document != "#":
        raise _CannotMergeError
    target = root
    for name in names:
        if not isinstance(target, Mapping) or name not in target:
            raise _CannotMergeError
        target = target[name]
    return target


def _merge(first: object, second: object) -> dict[str, Any]:
    """Merge two schemas. The merged schema accepts a value only if both schemas accept the value.

    Example: `{"type": "integer", "minimum": 1}` and `{"minimum": 3}` give
    `{"type": "integer", "minimum": 3}`.

    Raises:
        _CannotMergeError: No value matches both schemas, or the result has a combination of
            keywords that xgrammar does not enforce.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return _merge_keywords(first, second)
    # One of the two schemas is `true`, which accepts every value, or `false`, which accepts none.
    # If one schema is `true`, the other schema is the result.
    if first is True:
        return dict(second) if isinstance(second, Mapping) else {}
    if second is True:
        return dict(first) if isinstance(first, Mapping) else {}
    raise _CannotMergeError


def _merge_keywords(first: Schema, second: Schema) -> dict[str, Any]:
    """Merge the keywords of two schemas. See `_merge`."""
    merged = dict(first)
    for keyword, value in second.items():
        if keyword not in merged:
            merged[keyword] = value
        elif merged[keyword] != value and keyword not in ("properties", "additionalProperties"):
            merged[keyword] = _merge_values(keyword, merged[keyword], value)
    # These two keywords depend on each other, so they are merged together.
    if "properties" in merged or "additionalProperties" in merged:
        merged |= _merge_properties(first, second, merged.get("required") or [])
    merged = _drop_impossible_choices(merged)
    _check_is_enforced(merged)
    return merged


def _merge_values(keyword: str, first: Any, second: Any) -> object:  # noqa: ANN401 - JSON
    """Return the value of `keyword` that has the effect of both values, `first` and `second`.

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
    """Return the types that both values of the keyword `type` allow.

    The type "number" also allows integers.

    Example: `"number"` and `["integer", "null"]` have the type `"integer"` in common.

    Raises:
        _CannotMergeError: The two values have no type in common.
    """
    first_types = _with_integer(set(first) if isinstance(first, list) else {first})
    second_types = _with_integer(set(second) if isinstance(second, list) else {second})
    common = first_types & second_types
    if "number" in common:
        common.discard("integer")  # "number" already allows integers.
    if not common:
        raise _CannotMergeError
    names = sorted(common)
    return names[0] if len(names) == 1 else names


def _with_integer(types: set[Any]) -> set[Any]:
    """Return `types`, with "integer" added if `types` contains "number", which allows integers."""
    return types | {"integer"} if "number" in types else types


def _merge_properties(first: Schema, second: Schema, required: list[str]) -> dict[str, Any]:
    """Merge the keywords `properties` and `additionalProperties` of two schemas.

    Example: the properties `{"a": {"type": "string"}}` and `{"a": {"maxLength": 9}}` give
    `{"a": {"type": "string", "maxLength": 9}}`.

    Raises:
        _CannotMergeError: No object matches both schemas, or xgrammar could not enforce the result.
    """
    if any("patternProperties" in schema for schema in (first, second)):
        raise _CannotMergeError
    first_properties = first.get("properties") or {}
    second_properties = second.get("properties") or {}
    # `additionalProperties` is the schema of all properties that `properties` does not declare.
    first_rest = first.get("additionalProperties", True)
    second_rest = second.get("additionalProperties", True)
    merged = {}
    for name in dict.fromkeys([*first_properties, *second_properties]):
        first_schema = first_properties.get(name, first_rest)
        second_schema = second_properties.get(name, second_rest)
        is_forbidden = first_schema is False or second_schema is False
        if not is_forbidden:
            merged[name] = _merge(first_schema, second_schema)
        elif name in required:
            raise _CannotMergeError
    if first_rest is True and second_rest is True:
        return {"properties": merged}  # `additionalProperties` is true by default.
    forbids_others = first_rest is False or second_rest is False
    rest = False if forbids_others else _merge(first_rest, second_rest)
    return {"properties": merged, "additionalProperties": rest}


def _drop_impossible_choices(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema in which all values of `enum` have the declared type.

    Example: `{"type": "string", "enum": ["a", 1]}` gives `{"type": "string", "enum": ["a"]}`.
    """
    json_type = schema.get("type")
    if "enum" not in schema or not isinstance(json_type, str):
        return schema
    return {**schema, "enum": [value for value in schema["enum"] if _has_type(value, json_type)]}


def _check_is_enforced(merged: dict[str, Any]) -> None:
    """Raise _CannotMergeError if xgrammar ignores a keyword, or if the schema allows no value.

    Example: xgrammar ignores `minLength` if the schema also has the keyword `pattern`.
    """
    restrictions = merged.keys() - _ANNOTATIONS
    if "enum" in restrictions and isinstance(merged.get("type"), str):
        restrictions -= {"type"}  # All values of `enum` already have this type.
    has_length = bool({"minLength", "maxLength"} & restrictions)
    is_length_ignored = has_length and "pattern" in merged
    # If a schema has a keyword such as `anyOf`, xgrammar ignores all its other keywords.
    is_other_keyword_ignored = bool(_ALTERNATIVES & restrictions) and len(restrictions) > 1
    has_no_values = merged.get("enum") == []
    if is_length_ignored or is_other_keyword_ignored or has_no_values:
        raise _CannotMergeError


def _with_enforced_multiple(schema: Schema) -> Schema:
    """Rewrite `schema` so that xgrammar enforces `multipleOf`.

    Examples:
        {"type": "number", "multipleOf": 2.0} gives {"type": "integer", "multipleOf": 2}.
        {"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 12} gives {"enum": [10]}.
        {"type": "number", "multipleOf": 0.5} is returned unchanged.
    """
    multiple = schema.get("multipleOf", 0)
    is_number = schema.get("type") in ("integer", "number")
    if not is_number or not _is_integer(multiple) or multiple < 1:
        return schema
    as_integer = {**schema, "type": "integer", "multipleOf": int(multiple)}
    has_bounds = any(bound in schema for bound in _BOUNDS)
    if "enum" in schema or not has_bounds:
        return as_integer
    multiples = _multiples(as_integer, int(multiple))
    if not multiples:
        return as_integer
    annotations = {key: value for key, value in schema.items() if key in _ANNOTATIONS}
    return {**annotations, "enum": multiples}


def _multiples(schema: Schema, multiple: int) -> list[int]:
    """Return all multiples of `multiple` within the bounds of a schema.

    Example: the multiples of 5 in `{"minimum": 1, "exclusiveMaximum": 15}` are [5, 10]. The result
    is [] if a bound is missing, or if there are more than `_MAX_MULTIPLES` multiples.
    """
    if not all(_is_number(schema[bound]) for bound in _BOUNDS if bound in schema):
        return []
    lowest = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
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
    """Return whether a JSON value has the type `name`. An integer also has the type "number"."""
    json_type = json_type_of(value)
    return json_type == name or (name == "number" and json_type == "integer")


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a number. A boolean is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    """Return whether a JSON value is an integer, such as 5 or 5.0."""
    return _is_number(value) and float(value).is_integer()  # type: ignore[arg-type]
