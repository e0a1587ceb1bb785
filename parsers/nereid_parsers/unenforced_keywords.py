"""Finds the keywords of a JSON schema that xgrammar 0.2.8 accepts but does not enforce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED_KEYWORDS = (
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames",
)  # fmt: skip
# The values of these keywords are schemas, lists of schemas, or objects whose values are schemas.
_SCHEMA_KEYWORDS = ("additionalProperties", "items", "propertyNames", "additionalItems")
_SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_MAX_DEPTH = 64


def unenforced(schema: object) -> list[str]:
    """Return a description of each part of `schema` that xgrammar does not enforce.

    Measured with xgrammar 0.2.8: `not`, `uniqueItems` and conditional keywords are ignored.
    `multipleOf` is enforced only for integers. An `allOf` of several schemas accepts any value.
    `oneOf` is treated as `anyOf`.

    Example: `unenforced({"items": {"multipleOf": 2}})` returns `["multipleOf at $.items"]`.
    """
    return list(_describe_all(schema, "$", 0))


def _describe_all(schema: object, path: str, depth: int) -> Iterator[str]:
    """Yield the descriptions for `schema` and for all schemas inside `schema`.

    Args:
        schema: The JSON schema.
        path: The path of `schema` in the outermost schema, for example `$.items`.
        depth: The number of schemas that enclose `schema`.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    for keyword in _IGNORED_KEYWORDS:
        if keyword in schema:
            yield f"{keyword} at {path}"
    yield from _describe_partial(schema, path)
    for inner, inner_path in _inner_schemas(schema, path):
        yield from _describe_all(inner, inner_path, depth + 1)


def _inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """Yield each schema inside `schema` with its path. Keywords that are absent may yield None.

    Example: `{"items": {"type": "string"}}` at the path `$` yields `({"type": "string"},
    "$.items")`.
    """
    for keyword in _SCHEMA_KEYWORDS:
        yield schema.get(keyword), f"{path}.{keyword}"
    for keyword in _SCHEMA_LIST_KEYWORDS:
        options = schema.get(keyword)
        for number, option in enumerate(options if isinstance(options, list) else ()):
            yield option, f"{path}.{keyword}[{number}]"
    for keyword in _SCHEMA_MAP_KEYWORDS:
        inner_by_name = schema.get(keyword)
        for name, inner in (inner_by_name if isinstance(inner_by_name, Mapping) else {}).items():
            yield inner, f"{path}.{keyword}.{name}"


def _describe_partial(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield descriptions of the keywords that xgrammar enforces only in some cases."""
    if "multipleOf" in schema:
        yield f"multipleOf at {path}"
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield f"allOf of {len(all_of)} parts at {path}"
    one_of = schema.get("oneOf")
    if isinstance(one_of, list) and len(one_of) > 1 and not _are_disjoint(one_of):
        yield f"oneOf whose parts may overlap at {path}"


def _are_disjoint(options: list[Any]) -> bool:
    """Return whether no value can match two of the schemas, based on their types or constants.

    If the result is True, `oneOf` and `anyOf` accept the same values.
    """
    keys = [_type_or_constant(option) for option in options]
    return None not in keys and len(set(keys)) == len(keys)


def _type_or_constant(schema: object) -> str | None:
    """Return a text that differs for two schemas that cannot accept the same value, or None.

    Examples: `{"type": "string"}` gives `"string"`, `{"const": 1}` gives `"const 1"`.
    """
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return f"const {schema['const']!r}"
    kind = schema.get("type")
    return kind if isinstance(kind, str) else None
