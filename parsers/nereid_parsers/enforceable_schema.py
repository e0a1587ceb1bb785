"""Rewrites JSON schemas, so that xgrammar enforces keywords that it would otherwise ignore.

xgrammar 0.2.8 ignores an `allOf` of several schemas. It also ignores `multipleOf` for numbers and
for integers with bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from nereid_parsers.enforceable_multiple import (
    ANNOTATIONS,
    Schema,
    is_integer,
    is_number,
    with_enforced_multiple,
)
from nereid_parsers.stream.values.argument_types import json_type_of

_STRICTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
"""Maps the keyword of a bound to the function that returns the stricter one of two bounds."""
_PROPERTY_KEYWORDS = ("properties", "additionalProperties")
# If a schema has one of these keywords, xgrammar ignores all other keywords of the schema.
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "not", "if", "const", "enum"})
# The values of these keywords are JSON values, not schemas.
_VALUE_KEYWORDS = ("enum", "const", "default", "examples")
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
    """Return a copy of a JSON schema, rewritten so that xgrammar enforces more of the keywords.

    xgrammar constrains the output of the model, but ignores some keywords of JSON schemas. The copy
    accepts the same values as `schema`.

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


def _rewrite(schema: object, root: object, inlined: frozenset[str], depth: int) -> Any:  # noqa: ANN401 - JSON
    """Rewrite a schema and all schemas inside the schema, so that xgrammar enforces more keywords.

    The parts of an `allOf` are merged, and `multipleOf` is rewritten. For examples see
    `enforceable`.

    Args:
        schema: A JSON schema, or a list or an object that contains schemas.
        root: The outermost schema, to which references (`$ref`) refer.
        inlined: The references whose definitions contain `schema`. If `schema` contains one of
            these references again, the schema is recursive, so the reference is not replaced.
        depth: The number of values that enclose `schema`.
    """
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_rewrite(item, root, inlined, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("allOf"), list):
        merged = _without_all_of(schema, root, inlined)
    else:
        merged = _Resolved(schema, inlined)
    rewritten: dict[str, Any] = {}
    for keyword, value in with_enforced_multiple(merged.schema).items():
        if keyword in _VALUE_KEYWORDS:  # The value contains JSON data, not schemas.
            rewritten[keyword] = value
        else:
            rewritten[keyword] = _rewrite(value, root, merged.inlined, depth + 1)
    return rewritten


def _without_all_of(schema: Schema, root: object, inlined: frozenset[str]) -> _Resolved:
    """Merge the parts in the keyword `allOf` of a schema with the schema's other keywords.

    Example: `{"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}` gives
    `{"type": "integer", "minimum": 1, "maximum": 5}`. If the parts cannot be merged, `schema` and
    `inlined` are returned unchanged.

    Args:
        schema: The schema with the keyword `allOf`.
        root: The outermost schema, to which references (`$ref`) refer.
        inlined: The references whose definitions contain `schema`.

    Returns:
        The merged schema, and all references that were replaced by their definitions so far.
    """
    others = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    parts = schema["allOf"]
    has_only_annotations = ANNOTATIONS.issuperset(others)  # such as `title`
    if has_only_annotations and _is_one_reference(parts):
        # Annotations do not restrict the values, so one schema can contain both `$ref` and the
        # annotations.
        return _Resolved({**parts[0], **others}, inlined)
    try:
        return _merge_parts([others, *parts], root, inlined)
    except (_CannotMergeError, TypeError, AttributeError):
        # TypeError and AttributeError show that the value of a keyword has a wrong type.
        return _Resolved(schema, inlined)


def _merge_parts(parts: list[object], root: object, inlined: frozenset[str]) -> _Resolved:
    """Merge several schemas into one schema that accepts the values which all schemas accept.

    References in `parts` are replaced by their definitions. For the other arguments and the result
    see `_without_all_of`.

    Raises:
        _CannotMergeError: The parts cannot be merged.
    """
    resolved_parts = [_resolve(part, root, inlined) for part in parts]
    merged = functools.reduce(_merge, [part.schema for part in resolved_parts])
    all_inlined = frozenset().union(*(part.inlined for part in resolved_parts))
    return _Resolved(merged, all_inlined)


def _is_one_reference(parts: list[Any]) -> bool:
    """Return whether `parts`, the value of an `allOf`, is one reference: `[{"$ref": ..}]`."""
    return len(parts) == 1 and isinstance(parts[0], Mapping) and "$ref" in parts[0]


def _resolve(part: object, root: object, inlined: frozenset[str]) -> _Resolved:
    """Rewrite one member of an `allOf`, so that the member contains neither `$ref` nor `allOf`.

    A `$ref` is replaced by the definition to which the `$ref` refers. The parts of an inner `allOf`
    are merged. The caller needs this form to merge two members keyword by keyword.

    Example: if the definition `T` is `{"type": "integer"}`, the member `{"$ref": "#/$defs/T"}`
    gives `{"type": "integer"}`.

    Args:
        part: The member.
        root: The outermost schema, which contains the definitions.
        inlined: The references whose definitions contain `part`. If `part` contains one of these
            references again, the schema is recursive.

    Returns:
        The rewritten part, and all references that were replaced so far.

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
    if "allOf" in merged.schema:  # The parts of the inner `allOf` could not be merged.
        raise _CannotMergeError
    return merged


def _follow_reference(part: Schema, root: object, inlined: frozenset[str]) -> _Resolved:
    """Merge a schema with the definition to which the schema's keyword `$ref` refers.

    A schema without `$ref` is returned unchanged. Example: if the definition `T` is
    `{"type": "integer"}`, `{"$ref": "#/$defs/T", "minimum": 1}` gives
    `{"minimum": 1, "type": "integer"}`.

    Args:
        part: The schema.
        root: The outermost schema, which contains the definitions.
        inlined: The references whose definitions contain `part`. The references in the result also
            contain the `$ref` of `part`.

    Raises:
        _CannotMergeError: The definition contains the reference again, or does not exist.
    """
    reference = part.get("$ref")
    if reference is None:
        return _Resolved(part, inlined)
    if not isinstance(reference, str):
        raise _CannotMergeError
    is_recursive = reference in inlined
    if is_recursive:
        raise _CannotMergeError
    others = {keyword: value for keyword, value in part.items() if keyword != "$ref"}
    target = _target(reference, root)
    definition = _resolve(target, root, inlined | {reference})
    return _Resolved(_merge(others, definition.schema), definition.inlined)


def _target(reference: str, root: object) -> object:
    """Return the definition to which a reference points.

    Example: "#/$defs/Address" gives `root["$defs"]["Address"]`.

    Escape sequences in names (`~0`, `~1`) are not decoded, so a definition whose name contains such
    a sequence is not found.

    Raises:
        _CannotMergeError: The document has no such definition, or the reference points to another
            document.
    """
    document, *names = reference.split("/")
    is_in_root = document == "#"
    if not is_in_root:
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
    """Return a schema with the keywords of two schemas. A value must match both schemas.

    Example: `{"type": "integer", "minimum": 1}` and `{"minimum": 3}` give
    `{"type": "integer", "minimum": 3}`.

    Raises:
        _CannotMergeError: No value matches both schemas, or the result has a combination of
            keywords that xgrammar does not enforce.
    """
    merged: dict[str, Any] = {**first, **second}
    common_keywords = [keyword for keyword in first if keyword in second]
    for keyword in common_keywords:
        if keyword not in _PROPERTY_KEYWORDS:
            merged[keyword] = _merge_values(keyword, first[keyword], second[keyword])
    # `properties` and `additionalProperties` depend on each other, so they are merged together.
    if any(keyword in merged for keyword in _PROPERTY_KEYWORDS):
        merged |= _merge_properties(first, second, merged.get("required") or [])
    merged = _drop_impossible_choices(merged)
    _check_is_enforced(merged)
    return merged


def _merge_values(keyword: str, first: Any, second: Any) -> object:  # noqa: ANN401 - JSON
    """Merge two values of a schema keyword into one value that enforces both.

    Examples: the values 5 and 9 of `maxLength` give 5. The values `["a", "b"]` and `["b", "c"]` of
    `enum` give `["b"]`. An annotation, such as `title`, enforces nothing, so `first` is returned.

    Raises:
        _CannotMergeError: No single value of the keyword has the effect of both values.
    """
    if keyword in ANNOTATIONS or first == second:
        return first
    if keyword == "type":
        return _common_types(first, second)
    if keyword == "required":
        return list(dict.fromkeys([*first, *second]))
    if keyword == "enum":
        return [value for value in first if value in second]
    if keyword == "items":
        return _merge(first, second)
    if keyword in _STRICTER and is_number(first) and is_number(second):
        return _STRICTER[keyword](first, second)
    if keyword == "multipleOf" and is_integer(first) and is_integer(second):
        return math.lcm(int(first), int(second))
    raise _CannotMergeError


def _common_types(first: object, second: object) -> str | list[str]:
    """Return the types that both values of the keyword `type` allow.

    The type "number" also allows integers.

    Example: `"number"` and `["integer", "null"]` have the type `"integer"` in common.

    Raises:
        _CannotMergeError: The two values have no type in common.
    """
    common = _allowed_types(first) & _allowed_types(second)
    if "number" in common:
        common.discard("integer")  # "number" already allows integers.
    if not common:
        raise _CannotMergeError
    names = sorted(common)
    return names[0] if len(names) == 1 else names


def _allowed_types(value: object) -> set[Any]:
    """Return the types that a value of the keyword `type` allows.

    Example: `["number", "null"]` allows "number", "null" and "integer".
    """
    types = set(value) if isinstance(value, list) else {value}
    if "number" in types:
        types.add("integer")
    return types


def _merge_properties(first: Schema, second: Schema, required: list[str]) -> dict[str, Any]:
    """Merge the keywords `properties` and `additionalProperties` of two schemas.

    `additionalProperties` is the schema of all properties that `properties` does not declare.

    Example: `{"properties": {"a": {"type": "string"}}}` and `{"properties": {"a": {"maxLength":
    9}}}` give `{"properties": {"a": {"type": "string", "maxLength": 9}}}`.

    Args:
        first: A schema of an object.
        second: Another schema of the object.
        required: The names of the properties that the object must have.

    Raises:
        _CannotMergeError: No object matches both schemas, or xgrammar could not enforce the result.
    """
    if "patternProperties" in first or "patternProperties" in second:
        raise _CannotMergeError
    first_properties = first.get("properties") or {}
    second_properties = second.get("properties") or {}
    # The default of `additionalProperties` is the schema `true`, which accepts every value.
    first_rest = first.get("additionalProperties", True)
    second_rest = second.get("additionalProperties", True)
    properties: dict[str, object] = {}
    for name in dict.fromkeys([*first_properties, *second_properties]):
        first_schema = first_properties.get(name, first_rest)
        second_schema = second_properties.get(name, second_rest)
        merged = _merge_or_forbid(first_schema, second_schema)
        is_forbidden = merged is False
        if is_forbidden and name in required:
            raise _CannotMergeError
        if not is_forbidden:
            properties[name] = merged
    if first_rest is True and second_rest is True:
        return {"properties": properties}
    rest = _merge_or_forbid(first_rest, second_rest)
    return {"properties": properties, "additionalProperties": rest}


def _merge_or_forbid(first: object, second: object) -> dict[str, Any] | Literal[False]:
    """Merge two schemas of a property. Return False if one of the schemas is False.

    The schema False forbids the property.
    """
    is_forbidden = first is False or second is False
    return False if is_forbidden else _merge(first, second)


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
    has_no_values = merged.get("enum") == []
    if has_no_values:
        raise _CannotMergeError
    has_length = "minLength" in merged or "maxLength" in merged
    if has_length and "pattern" in merged:
        raise _CannotMergeError
    # If a schema has a keyword such as `anyOf`, xgrammar ignores all other keywords.
    restrictions = merged.keys() - ANNOTATIONS
    if "enum" in restrictions and isinstance(merged.get("type"), str):
        restrictions -= {"type"}  # All values of `enum` already have this type.
    if _ALTERNATIVES & restrictions and len(restrictions) > 1:
        raise _CannotMergeError


def _has_type(value: object, name: str) -> bool:
    """Return whether a JSON value has the type `name`. An integer also has the type "number"."""
    json_type = json_type_of(value)
    return json_type == name or (name == "number" and json_type == "integer")
