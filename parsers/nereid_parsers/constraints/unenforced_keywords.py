"""Finds the keywords of a JSON schema that xgrammar 0.2.8 accepts but does not enforce.

Measurements show eight cases. xgrammar ignores `not`, `uniqueItems` and conditional keywords. It
enforces `multipleOf` only for integers without bounds. An `allOf` of several schemas accepts any
value. xgrammar treats `oneOf` as `anyOf`. Some keywords make xgrammar ignore others; see
`ignored_keywords`. Most keywords are ignored in a schema without `type`; see `_describe_untyped`.
References to other documents accept any value. The module enforceable_pattern describes which
patterns are not enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nereid_parsers.constraints.disjoint_schemas import are_disjoint
from nereid_parsers.constraints.enforceable_multiple import is_enforced_multiple
from nereid_parsers.constraints.enforceable_pattern import PatternError, check_pattern
from nereid_parsers.stream.values.json_text import json_type_of

_IGNORED_KEYWORDS = (
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames",
    "dependencies", "$dynamicRef", "$recursiveRef",
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
RESTRICTIONS = frozenset(
    {
        *_EXCLUSIVE_KEYWORDS,
        *("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "items", "prefixItems", "minItems"),
        *("maxItems", "properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties"),
    }
)
_LENGTHS = frozenset({"minLength", "maxLength"})
# xgrammar ignores these keywords in a schema without `type`; see `_describe_untyped`.
_ARRAY_KEYWORDS = frozenset({"minItems", "maxItems"})
_OBJECT_KEYWORDS = frozenset({"required", "patternProperties", "minProperties", "maxProperties"})
_NUMBER_AND_STRING_KEYWORDS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "format"),
    }
)
# The values of `format` that xgrammar enforces.
_ENFORCED_FORMATS = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_MAX_DEPTH = 64
# A function that yields a description of each unenforced keyword of a schema. The second argument
# is the path of the schema.
_Check = Callable[[Mapping[str, Any], str], Iterator[str]]


def unenforced_keywords(schema: object) -> list[str]:
    """Return a description of each keyword in `schema` that xgrammar does not enforce.

    `schema` is a JSON schema, for example of the arguments of a tool. Example: the schema
    `{"items": {"not": {}}}` gives `["not at $.items"]`.
    """
    return list(_describe_all(schema, "$", schema, _CHECKS_FOR_XGRAMMAR))


def unenforced_keywords_of_answer(schema: object) -> list[str]:
    """Return a description of each unenforced keyword in the schema of an answer.

    The library llguidance compiles the schema of an answer. This library enforces some patterns and
    some combinations of keywords that xgrammar does not enforce. These are not described. Example:
    the schema `{"items": {"not": {}}}` gives `["not at $.items"]`.
    """
    return list(_describe_all(schema, "$", schema, _CHECKS_FOR_LLGUIDANCE))


def _describe_all(
    schema: object, path: str, root: object, checks: tuple[_Check, ...], depth: int = 0
) -> Iterator[str]:
    """Yield a description of each unenforced keyword of `schema` and of the schemas inside it.

    Example: the schema `{"items": {"not": {}}}` at the path `$` yields "not at $.items". A schema
    at a depth of more than `_MAX_DEPTH` is described as a whole, so that the recursion always ends.

    Args:
        schema: The schema. Any value that is not an object has no keywords.
        path: The path of the schema, for the descriptions.
        root: The outermost schema, which contains the definitions.
        checks: Functions that yield the descriptions for one schema, without its inner schemas.
        depth: The number of schemas that enclose `schema`.
    """
    if not isinstance(schema, Mapping):
        return
    if depth > _MAX_DEPTH:
        yield f"the schema inside {depth} other schemas at {path}"
        return
    for check in checks:
        yield from check(schema, path)
    # xgrammar treats `oneOf` as `anyOf`, so a value must not match two of the parts.
    if isinstance(parts := schema.get("oneOf"), list) and not are_disjoint(parts, root):
        yield f"oneOf whose parts may overlap at {path}"
    for inner, inner_path in _inner_schemas(schema, path):
        yield from _describe_all(inner, inner_path, root, checks, depth + 1)


def _describe_unsupported(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of each keyword that is never enforced, such as `not`.

    Example: `{"not": {}}` at the path `$` yields "not at $".
    """
    for keyword in _IGNORED_KEYWORDS:
        if keyword in schema:
            yield f"{keyword} at {path}"


def _describe_overridden(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of each keyword that xgrammar ignores because of another keyword.

    Example: `{"pattern": "^a+$", "minLength": 2}` at the path `$` yields "minLength next to pattern
    at $".
    """
    for keyword, cause in ignored_keywords(schema).items():
        yield f"{keyword} next to {cause} at {path}"


def _describe_reference(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of `$ref` if it refers to another document, such as `"other.json"`.

    xgrammar enforces only references into the same document, such as `"#/$defs/city"`.
    """
    reference = schema.get("$ref")
    is_in_document = reference == "#" or str(reference).startswith("#/")
    if isinstance(reference, str) and not is_in_document:
        yield f"$ref to another document at {path}"


def _describe_untyped(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of each keyword that xgrammar ignores because `schema` has no `type`.

    `items` and `prefixItems` imply the type "array". `properties` and `additionalProperties` imply
    the type "object". Example: `{"minimum": 1}` at the path `$` yields "minimum without type at $".
    """
    if "type" in schema:
        return
    if any(keyword in schema for keyword in _EXCLUSIVE_KEYWORDS):
        return  # xgrammar ignores all other keywords for another reason; see `ignored_keywords`.
    implies_array = "items" in schema or "prefixItems" in schema
    implies_object = "properties" in schema or "additionalProperties" in schema
    ignored = set(_NUMBER_AND_STRING_KEYWORDS)
    if not implies_array:
        ignored |= _ARRAY_KEYWORDS
    if not implies_object:
        ignored |= _OBJECT_KEYWORDS
    for keyword in sorted(ignored & schema.keys()):
        yield f"{keyword} without type at {path}"


def _describe_unlisted(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of `required` if it contains a name that `properties` does not contain.

    xgrammar does not require such a property. Only the first of these names is described. Example:
    `{"type": "object", "required": ["a"]}` at the path `$` yields "required at $, because
    properties does not contain 'a'".
    """
    if "type" not in schema and "properties" not in schema:
        return  # `_describe_untyped` describes a `required` that has no effect without `type`.
    required = schema.get("required")
    properties = schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return
    unlisted = [name for name in required if isinstance(name, str) and name not in properties]
    if unlisted:
        yield f"required at {path}, because properties does not contain {unlisted[0]!r}"


def _describe_pattern(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of the keyword `pattern`, if xgrammar does not enforce the pattern.

    Example: `{"pattern": "a(b"}` at the path `$` yields "pattern at $, because the part '(b' at the
    position 1 has no closing parenthesis".
    """
    error = _pattern_error(schema)
    if error is not None:
        yield f"pattern at {path}, because {error}"


def _describe_pattern_of_answer(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a description of the keyword `pattern`, if llguidance does not enforce the pattern.

    llguidance enforces all patterns except two kinds: patterns with a lookaround, a word boundary
    or a backreference, and patterns such as `^"$`, which require a character that JSON writes with
    a backslash.
    """
    error = _pattern_error(schema)
    if error is not None and (error.is_lookahead or error.is_refused or error.needs_json_escape):
        yield f"pattern at {path}, because {error}"


def _pattern_error(schema: Mapping[str, Any]) -> PatternError | None:
    """Return the reason why xgrammar does not enforce the keyword `pattern`, if there is one."""
    pattern = schema.get("pattern")
    return check_pattern(pattern) if isinstance(pattern, str) else None


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
    """List each `multipleOf` or `allOf` that xgrammar does not enforce in `schema`.

    xgrammar enforces these keywords only in some cases: `multipleOf` only for integers without
    bounds, and `allOf` only for a single schema. The keywords of inner schemas are not described.
    Example: an `allOf` of two schemas at the path `$` yields "allOf of 2 parts at $".
    """
    if "multipleOf" in schema and not is_enforced_multiple(schema):
        yield f"multipleOf at {path}"
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield f"allOf of {len(all_of)} parts at {path}"


def ignored_keywords(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the keywords that xgrammar ignores because the schema contains another keyword.

    Each ignored keyword is mapped to the keyword that is the cause. Examples:

        {"anyOf": [..], "minimum": 1}            {"minimum": "anyOf"}
        {"pattern": "^a+$", "minLength": 2}      {"minLength": "pattern"}
        {"enum": ["a"], "type": "string"}        {}, because the type adds no restriction
    """
    cause = _overriding_keyword(schema)
    if cause is None:
        return {}
    restrictions = RESTRICTIONS & schema.keys()
    if cause == "format":
        ignored = restrictions & (_LENGTHS | {"pattern"})
    elif cause == "pattern":
        ignored = restrictions & _LENGTHS
    elif "type" in schema and _keyword_implies_types(schema, cause):
        # `type` is not reported, because the values have the right types even without it.
        ignored = restrictions - {cause, "type"}
    else:
        ignored = restrictions - {cause}
    return dict.fromkeys(sorted(ignored), cause)


def _overriding_keyword(schema: Mapping[str, Any]) -> str | None:
    """Return the keyword that makes xgrammar ignore other keywords of a schema, or None.

    Examples: `{"anyOf": [..], "minimum": 1}` gives "anyOf", and `{"pattern": "^a+$"}` gives
    "pattern".
    """
    for keyword in _EXCLUSIVE_KEYWORDS:
        if keyword in schema:
            return keyword
    # `str` converts a value of a wrong type, such as a list, which cannot be a member of a set.
    if str(schema.get("format")) in _ENFORCED_FORMATS:
        return "format"
    return "pattern" if "pattern" in schema else None


def _keyword_implies_types(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether `keyword` accepts only values of the types that the keyword `type` lists.

    Example: the result is True for the keyword `enum` in `{"type": "string", "enum": ["a"]}`,
    because `enum` accepts only a string. If the result is True, the schema accepts the same values
    without `type`. For the keyword `$ref`, the result is always True.

    `keyword` is a keyword of the schema, and one of `_EXCLUSIVE_KEYWORDS`.
    """
    types = schema["type"]
    allowed_types = types if isinstance(types, list) else [types]
    if "number" in allowed_types:  # Each integer is also a number.
        allowed_types = [*allowed_types, "integer"]
    value = schema[keyword]
    match keyword:
        case "$ref":
            return True
        case "const":
            return json_type_of(value) in allowed_types
        case "enum":
            return isinstance(value, list) and all(
                json_type_of(constant) in allowed_types for constant in value
            )
        case _:  # anyOf, oneOf or allOf
            return isinstance(value, list) and all(
                _has_one_of_types(option, allowed_types) for option in value
            )


def _has_one_of_types(schema: object, types: list[Any]) -> bool:
    """Return whether a schema declares one of the types.

    A schema with a keyword such as `$ref` or `enum` is assumed to accept only values of the types.
    """
    return isinstance(schema, Mapping) and (
        schema.get("type") in types or any(key in schema for key in _EXCLUSIVE_KEYWORDS)
    )


# xgrammar compiles the schemas of arguments, and llguidance compiles the schemas of answers. There
# is one exception: if an answer starts with reasoning, xgrammar compiles the schema of the answer.
# This schema is nevertheless examined with `_CHECKS_FOR_LLGUIDANCE`, although xgrammar enforces
# less.
_CHECKS_FOR_XGRAMMAR: tuple[_Check, ...] = (
    _describe_unsupported,
    _describe_partly_enforced,
    _describe_pattern,
    _describe_overridden,
    _describe_untyped,
    _describe_unlisted,
    _describe_reference,
)
_CHECKS_FOR_LLGUIDANCE: tuple[_Check, ...] = (
    _describe_unsupported,
    _describe_partly_enforced,
    _describe_pattern_of_answer,
)
