"""Finds the keywords of a JSON schema that xgrammar 0.2.8 accepts but does not enforce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nereid_parsers.enforceable_multiple import is_enforced_multiple
from nereid_parsers.enforceable_pattern import check_pattern
from nereid_parsers.stream.values.argument_types import json_type_of

_IGNORED_KEYWORDS = (
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames",
)  # fmt: skip
# The value of a keyword in `_SCHEMA_KEYWORDS` is a schema. The value of a keyword in
# `_SCHEMA_LIST_KEYWORDS` is a list of schemas. The value of a keyword in `SCHEMA_MAP_KEYWORDS` is
# an object, and the values in this object are schemas.
_SCHEMA_KEYWORDS = ("additionalProperties", "items", "propertyNames", "additionalItems")
_SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
# The values of these keywords are JSON values, not schemas.
VALUE_KEYWORDS = ("enum", "const", "default", "examples")
# If a schema has one of these keywords, xgrammar ignores all other keywords of the schema. If a
# schema has several of these keywords, xgrammar enforces only the one that comes first in this
# tuple.
_EXCLUSIVE_KEYWORDS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# Keywords that restrict a value. xgrammar can enforce these keywords, but ignores some of them if
# the schema also contains certain other keywords.
_RESTRICTIONS = frozenset(
    {
        *_EXCLUSIVE_KEYWORDS,
        *("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "items", "prefixItems", "minItems"),
        *("maxItems", "properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties"),
    }
)
_LENGTHS = frozenset({"minLength", "maxLength"})
# The values of `format` that xgrammar enforces.
_ENFORCED_FORMATS = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_MAX_DEPTH = 64


def unenforced(schema: object, *, is_answer: bool = False) -> list[str]:
    """Return a description of each keyword in `schema` that xgrammar does not enforce.

    Measurements with xgrammar 0.2.8 show six cases. xgrammar ignores `not`, `uniqueItems` and
    conditional keywords. xgrammar enforces `multipleOf` only for integers without bounds. An
    `allOf` of several schemas accepts any value. xgrammar treats `oneOf` as `anyOf`. Some keywords
    make xgrammar ignore others; see `ignored_keywords`. The module enforceable_pattern describes
    which regular expressions are not enforced.

    Example: `unenforced({"items": {"multipleOf": 2}})` returns `["multipleOf at $.items"]`.

    Args:
        schema: The JSON schema.
        is_answer: Whether the schema describes the whole answer, and not the arguments of a tool
            call. If the answer has no reasoning, the server compiles the schema with the library
            llguidance, which enforces more than xgrammar. Therefore, only patterns with lookaheads
            and patterns that xgrammar would write as invalid JSON are described for an answer.
    """
    return list(_describe_all(schema, "$", 0, is_answer))


def _describe_all(schema: object, path: str, depth: int, is_answer: bool) -> Iterator[str]:
    """Yield a description of each keyword that xgrammar does not enforce.

    The keywords of `schema` and of the schemas inside `schema` are described. Schemas at a depth of
    more than `_MAX_DEPTH` are skipped, so that the recursion always ends. Example:
    `{"items": {"not": {}}}` at the path `$` yields "not at $.items".

    Args:
        schema: The JSON schema.
        path: The path of `schema` in the outermost schema, for example `$.items`.
        depth: The number of schemas that enclose `schema`.
        is_answer: As in `unenforced`.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    for keyword in _IGNORED_KEYWORDS:
        if keyword in schema:
            yield f"{keyword} at {path}"
    yield from _describe_partly_enforced(schema, path)
    pattern = schema.get("pattern")
    error = check_pattern(pattern) if isinstance(pattern, str) else None
    is_unsafe = error is not None and (error.is_lookahead or error.needs_json_escape)
    if error is not None and (is_unsafe or not is_answer):
        yield f"pattern at {path}, because {error}"
    if not is_answer:
        for keyword, cause in ignored_keywords(schema).items():
            yield f"{keyword} next to {cause} at {path}"
    for inner, inner_path in _inner_schemas(schema, path):
        yield from _describe_all(inner, inner_path, depth + 1, is_answer)


def _inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """Yield each value inside `schema` that may be a schema, with the path of the value.

    Such a value is the value of a keyword, or a member of a list or an object that is the value of
    a keyword. Example: `{"items": {"type": "string"}}` at the path `$` yields
    `({"type": "string"}, "$.items")`.
    """
    for keyword in _SCHEMA_KEYWORDS:
        if keyword in schema:
            yield schema[keyword], f"{path}.{keyword}"
    for keyword in _SCHEMA_LIST_KEYWORDS:
        options = schema.get(keyword)
        if isinstance(options, list):
            for index, option in enumerate(options):
                yield option, f"{path}.{keyword}[{index}]"
    for keyword in SCHEMA_MAP_KEYWORDS:
        schema_by_name = schema.get(keyword)
        if isinstance(schema_by_name, Mapping):
            for name, inner in schema_by_name.items():
                yield inner, f"{path}.{keyword}.{name}"


def _describe_partly_enforced(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """List each `multipleOf`, `allOf` or `oneOf` that xgrammar does not enforce in `schema`.

    xgrammar enforces these keywords only in some cases: `multipleOf` only for integers without
    bounds, `allOf` only for a single schema, and `oneOf` only for schemas of which each value
    matches at most one, because xgrammar treats `oneOf` as `anyOf`. The keywords of inner schemas
    are not described. Example: an `allOf` of two schemas at the path `$` yields
    "allOf of 2 parts at $".

    Args:
        schema: The JSON schema.
        path: The path of `schema` in the outermost schema, for example `$.items`.
    """
    if "multipleOf" in schema and not is_enforced_multiple(schema):
        yield f"multipleOf at {path}"
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield f"allOf of {len(all_of)} parts at {path}"
    one_of = schema.get("oneOf")
    if isinstance(one_of, list) and not _are_disjoint(one_of):
        yield f"oneOf whose parts may overlap at {path}"


def ignored_keywords(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the keywords that xgrammar ignores because the schema contains another keyword.

    Each ignored keyword is mapped to the keyword that is the cause. Examples:

        {"anyOf": [..], "minimum": 1}            {"minimum": "anyOf"}
        {"pattern": "^a+$", "minLength": 2}      {"minLength": "pattern"}
        {"enum": ["a"], "type": "string"}        {}, because the type adds no restriction
    """
    restrictions = _RESTRICTIONS & schema.keys()
    for cause in _EXCLUSIVE_KEYWORDS:
        if cause in schema:
            ignored = restrictions - {cause}
            if "type" in ignored and _types_add_no_restriction(schema, cause):
                ignored -= {"type"}
            return dict.fromkeys(sorted(ignored), cause)
    if str(schema.get("format")) in _ENFORCED_FORMATS:
        return dict.fromkeys(sorted(restrictions & (_LENGTHS | {"pattern"})), "format")
    if "pattern" in schema:
        return dict.fromkeys(sorted(restrictions & _LENGTHS), "pattern")
    return {}


def _types_add_no_restriction(schema: Mapping[str, Any], cause: str) -> bool:
    """Return whether a schema would accept the same values without its keyword `type`.

    This is so if all values of `enum` or `const` have one of the types, or if all schemas of an
    `anyOf` declare one of the types themselves. Example: in `{"type": "string", "enum": ["a"]}`,
    the type has no effect. References are assumed to be of the right type.

    Args:
        schema: A JSON schema.
        cause: A keyword of the schema, one of `_EXCLUSIVE_KEYWORDS`.
    """
    types = schema.get("type")
    allowed_types = types if isinstance(types, list) else [types]
    if "number" in allowed_types:
        allowed_types = [*allowed_types, "integer"]
    if cause == "$ref":
        return True
    values = [schema["const"]] if cause == "const" else schema[cause]
    if not isinstance(values, list):
        return False
    if cause in ("const", "enum"):
        return all(json_type_of(value) in allowed_types for value in values)
    return all(
        isinstance(option, Mapping)
        and (
            option.get("type") in allowed_types or any(key in option for key in _EXCLUSIVE_KEYWORDS)
        )
        for option in schema[cause]
    )


def _are_disjoint(options: list[Any]) -> bool:
    """Return whether each value matches at most one of the schemas in `options`.

    For disjoint schemas, `oneOf` and `anyOf` accept the same values. Only the declared types and
    constants are compared. Examples:

        {"type": "string"}, {"type": "integer"}   True
        {"const": "a"}, {"const": "b"}            True
        {"type": "string"}, {"const": "a"}        False
        {"minimum": 1}                            True, because there is only one schema
    """
    if len(options) < 2:
        return True
    options_by_type: dict[str, list[Mapping[str, Any]]] = {}
    for option in options:
        json_type = _single_type(option)
        if json_type is None:
            return False
        options_by_type.setdefault(json_type, []).append(option)
    # Schemas of different types never match the same value, because `_single_type` returns "number"
    # for integers, too. If several schemas have the same type, they must declare different
    # constants, so that each value matches at most one of them.
    return all(
        len(same_type) == 1 or _have_different_constants(same_type)
        for same_type in options_by_type.values()
    )


def _single_type(schema: object) -> str | None:
    """Return the JSON type of a schema, or None if the schema does not declare exactly one type.

    An integer is also a number, so the result for integers is "number". Examples: `{"type":
    "string"}` and `{"const": "a"}` give "string".
    """
    if not isinstance(schema, Mapping):
        return None
    json_type = json_type_of(schema["const"]) if "const" in schema else schema.get("type")
    if not isinstance(json_type, str):  # Several types, or no type.
        return None
    return "number" if json_type == "integer" else json_type


def _have_different_constants(schemas: list[Mapping[str, Any]]) -> bool:
    """Return whether all schemas declare constants that differ from each other."""
    constants = {repr(schema["const"]) for schema in schemas if "const" in schema}
    return len(constants) == len(schemas)
