"""Schema keywords that xgrammar 0.2.8 accepts and does not enforce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED = (
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames",
)  # fmt: skip
_SINGLE = ("additionalProperties", "items", "propertyNames", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_MAX_DEPTH = 64


def unenforced(schema: object) -> list[str]:
    """Where a schema asks for more than its constraint will hold, as readable lines.

    Measured on xgrammar 0.2.8: `not`, `uniqueItems`, conditionals and the like are passed over,
    `multipleOf` holds for integers only, an `allOf` of several parts is taken as free, and `oneOf`
    means `anyOf`.
    """
    return list(_walk(schema, "$", 0))


def _walk(schema: object, path: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    for word in _IGNORED:
        if word in schema:
            yield f"{word} at {path}"
    yield from _limits(schema, path)
    for inner, where in _inner(schema, path):
        yield from _walk(inner, where, depth + 1)


def _inner(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """The schemas inside a schema, and where they stand."""
    for word in _SINGLE:
        yield schema.get(word), f"{path}.{word}"
    for word in _LISTS:
        options = schema.get(word)
        for number, option in enumerate(options if isinstance(options, list) else ()):
            yield option, f"{path}.{word}[{number}]"
    for word in _MAPS:
        named = schema.get(word)
        for name, inner in (named if isinstance(named, Mapping) else {}).items():
            yield inner, f"{path}.{word}.{name}"


def _limits(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if "multipleOf" in schema:
        yield f"multipleOf at {path}"
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) > 1:
        yield f"allOf of {len(every)} parts at {path}"
    choices = schema.get("oneOf")
    if isinstance(choices, list) and len(choices) > 1 and not _are_disjoint(choices):
        yield f"oneOf whose parts may overlap at {path}"


def _are_disjoint(options: list[Any]) -> bool:
    """Whether no value can fit two of the options: their types or constants differ."""
    kinds = [_kind(option) for option in options]
    return None not in kinds and len(set(kinds)) == len(kinds)


def _kind(option: object) -> str | None:
    if not isinstance(option, Mapping):
        return None
    if "const" in option:
        return f"const {option['const']!r}"
    kind = option.get("type")
    return kind if isinstance(kind, str) else None
