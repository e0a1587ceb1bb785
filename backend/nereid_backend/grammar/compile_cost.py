# SPDX-License-Identifier: Apache-2.0
"""What a grammar would cost to compile, told before it is tried; and the parts of a schema."""

import json
import re
from collections.abc import Iterator, Mapping

from nereid_backend.errors import RequestError

MAX_DEPTH = 64
_BOUND = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_SINGLE = (
    "additionalProperties", "items", "propertyNames", "additionalItems", "not", "contains", "if",
    "then", "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# Seconds that xgrammar 0.2.8 takes for each unit of a bound and each token of the vocabulary, on
# one core: docs/constraints.md has the measurement.
_PATTERN_S = 2.0e-7
_LENGTH_S = 1.0e-8
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def subschemas(schema: object, path: str = "$", depth: int = 0) -> Iterator[tuple[object, str]]:
    """Every part of a JSON schema that is itself one, and its path; the whole is "$"."""
    yield schema, path
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    for word in _SINGLE:
        if isinstance(schema.get(word), Mapping):
            yield from subschemas(schema[word], f"{path}.{word}", depth + 1)
    for word in _LISTS:
        parts = schema.get(word)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from subschemas(part, f"{path}.{word}[{number}]", depth + 1)
    for word in _MAPS:
        named = schema.get(word)
        for name, part in (named if isinstance(named, Mapping) else {}).items():
            yield from subschemas(part, f"{path}.{word}.{name}", depth + 1)


def depth_of(path: str) -> int:
    """How deep a path goes."""
    return path.count(".") + path.count("[")


def load(name: str, source: str) -> object:
    """JSON from text.

    Raises:
        RequestError: it is none, or nested deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name}: is no JSON at column {error.pos + 1}: {error.msg}") from error
    except RecursionError as error:
        raise RequestError(f"{name}: is nested deeper than {MAX_DEPTH} levels") from error
    deepest = _nesting(value)
    if deepest > 2 * MAX_DEPTH:  # each level of a schema is two of JSON
        raise RequestError(f"{name}: is nested {deepest} levels deep; the limit is {2 * MAX_DEPTH}")
    return value


def _nesting(value: object) -> int:
    level, here = 0, [value]
    while here:
        level += 1
        below: list[object] = []
        for one in here:
            if isinstance(one, Mapping):
                below += one.values()
            elif isinstance(one, list):
                below += one
        here = below
    return level - 1


def check_cost(kind: str, source: str, vocab_size: int, limit_s: float) -> None:
    """Refuse what xgrammar would take far too long to compile.

    Raises:
        RequestError: with the costliest bound, where it stands, and how large it may be.
    """
    found = list(_bounds(kind, source))
    cost = sum(bound * each for bound, each, _ in found) * vocab_size
    if cost <= limit_s:
        return
    bound, each, where = max(found, key=lambda one: one[0] * one[1])
    most = int(limit_s / (each * vocab_size))
    raise RequestError(
        f"{kind}: {where} asks for {bound} repetitions, and all bounds together would take about "
        f"{cost:.0f} s to compile; the limit is {limit_s:g} s, so at most about {most} of these"
    )


def _bounds(kind: str, source: str) -> Iterator[tuple[int, float, str]]:
    """(bound, seconds for each of it and each token, where it stands)."""
    if kind == "structural_tag":
        yield from _tag_bounds(json.loads(source), "$")
    elif kind == "json_schema":
        yield from _schema_bounds(json.loads(source), "$")
    else:
        yield from _pattern_bounds(source, kind)


def _tag_bounds(node: object, path: str) -> Iterator[tuple[int, float, str]]:
    if isinstance(node, list):
        for number, part in enumerate(node):
            yield from _tag_bounds(part, f"{path}[{number}]")
    if not isinstance(node, Mapping):
        return
    for word, part in node.items():
        where = f"{path}.{word}"
        if word == "json_schema":
            yield from _schema_bounds(part, where)
        elif word in ("pattern", "grammar") and isinstance(part, str):
            yield from _pattern_bounds(part, where)
        else:
            yield from _tag_bounds(part, where)


def _schema_bounds(schema: object, path: str) -> Iterator[tuple[int, float, str]]:
    for part, where in subschemas(schema, path):
        if not isinstance(part, Mapping):
            continue
        for word in _LENGTHS:
            if isinstance(part.get(word), int):
                yield part[word], _LENGTH_S, f"{where}.{word}"
        if isinstance(part.get("pattern"), str):
            yield from _pattern_bounds(part["pattern"], f"{where}.pattern")


def _pattern_bounds(pattern: str, where: str) -> Iterator[tuple[int, float, str]]:
    for match in _BOUND.finditer(pattern):
        bounds = [int(text[:9]) for text in match.groups() if text]
        if bounds:
            yield max(bounds), _PATTERN_S, f"{where}, column {match.start() + 1},"
