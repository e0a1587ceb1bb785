# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a grammar takes to compile. Also parses the text of JSON schemas."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nereid_backend.errors import RequestError

# The largest accepted nesting depth of schemas. A schema inside another schema adds one or two
# levels of JSON: {"items": {...}} adds one level, and {"properties": {"a": {...}}} adds two levels.
MAX_DEPTH = 64
_MAX_JSON_DEPTH = 2 * MAX_DEPTH

# The pattern of a repetition in a regular expression or a grammar: {3}, {3,}, {,5} or {3,5}.
_REPETITION = re.compile(r"\{(\d*)(?:,(\d*))?\}")
# The largest number of digits that are read from a bound. int() is slow for a very long number.
_MAX_DIGITS = 9

# The keywords of JSON Schema whose values are a schema, a list of schemas, or a map of schemas.
_SCHEMA_KEYWORDS = (
    "additionalProperties", "items", "propertyNames", "additionalItems", "not", "contains", "if",
    "then", "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LENGTH_KEYWORDS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip

# To compile one bound (a limit on repetitions), xgrammar 0.2.8 needs this number of seconds:
# repetitions * vocabulary size * a constant. The constant is _PATTERN_S for a bound in a pattern,
# such as a{0,50}, and _LENGTH_S for a length limit in a JSON schema, such as "maxLength": 50. The
# constants were measured on one core; see docs/history/sampling-and-constraints.md.
_PATTERN_S = 2.0e-7
_LENGTH_S = 1.0e-8


class _Bound(NamedTuple):
    """A limit on a number of repetitions, such as `{0,2000}` or `"maxLength": 2000`.

    Attributes:
        repetitions: the number of repetitions that the bound allows.
        unit_s: the time to compile one repetition for one token of the vocabulary, in seconds.
        place: a description of the position, for error messages.
    """

    repetitions: int
    unit_s: float
    place: str

    def seconds(self, vocab_size: int) -> float:
        """Return the compile time that this bound causes, for a vocabulary of `vocab_size`."""
        return self.repetitions * self.unit_s * vocab_size


def subschemas(schema: object, path: str = "$", depth: int = 0) -> Iterator[tuple[object, str]]:
    """Yield a JSON schema and all schemas inside it, each with its path.

    The search stops at a nesting depth of about MAX_DEPTH. Example: for the schema
    `{"properties": {"a": {"type": "string"}}}`, the function first yields this schema with the path
    `$`. It then yields the schema `{"type": "string"}` with the path `$.properties.a`.
    """
    yield schema, path
    if isinstance(schema, Mapping) and depth <= MAX_DEPTH:
        for part, part_path in _direct_subschemas(schema, path):
            yield from subschemas(part, part_path, depth + 1)


def _direct_subschemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas directly inside a schema, each with its path.

    Schemas inside these schemas are not yielded. `path` is the path of `schema`. Example: the
    schema {"items": {"type": "string"}} with the path "$" gives ({"type": "string"}, "$.items").
    """
    for keyword in _SCHEMA_KEYWORDS:  # such as "items": {...}
        if isinstance(part := schema.get(keyword), Mapping):
            yield part, f"{path}.{keyword}"
    for keyword in _LIST_KEYWORDS:  # such as "anyOf": [{...}, {...}]
        if isinstance(parts := schema.get(keyword), list):
            for index, part in enumerate(parts):
                yield part, f"{path}.{keyword}[{index}]"
    for keyword in _MAP_KEYWORDS:  # such as "properties": {"a": {...}}
        if isinstance(named_parts := schema.get(keyword), Mapping):
            for name, part in named_parts.items():
                yield part, f"{path}.{keyword}.{name}"


def depth_of(path: str) -> int:
    """Return the number of steps in a path. Example: `$.anyOf[1].items` has three steps."""
    return path.count(".") + path.count("[")


def parse_json(field_name: str, source: str) -> object:
    """Parse a JSON text from a request, and return the JSON value.

    Args:
        field_name: the field that contains the text, for error messages.
        source: the text.

    Raises:
        RequestError: if the text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{field_name}: the text is not JSON. The parser stopped at column {error.pos + 1}: "
            f"{error.msg}."
        ) from error
    except RecursionError as error:
        raise RequestError(
            f"{field_name}: the JSON is nested too deeply; the limit is {_MAX_JSON_DEPTH} levels."
        ) from error
    depth = _json_depth(value)
    if depth > _MAX_JSON_DEPTH:
        raise RequestError(
            f"{field_name}: the JSON is nested {depth} levels deep, but the limit is "
            f"{_MAX_JSON_DEPTH} levels."
        )
    return value


def _json_depth(value: object) -> int:
    """Return the nesting depth of a JSON value: the number of levels of objects and lists.

    Examples: the depth of 5 is 0, the depth of [] is 1, and the depth of {"a": [1, 2]} is 2. The
    function is not recursive, because a value can be nested more deeply than Python's recursion
    limit.
    """
    depth = 0
    containers = _containers_in([value])  # all objects and lists at one level of the JSON
    while containers:
        depth += 1
        next_level: list[object] = []
        for container in containers:
            next_level.extend(container.values() if isinstance(container, dict) else container)
        containers = _containers_in(next_level)
    return depth


def _containers_in(values: list[object]) -> list[dict[str, object] | list[object]]:
    """Return the JSON objects and lists among the given JSON values."""
    return [value for value in values if isinstance(value, dict | list)]


def compile_time_s(kind: str, source: str, vocab_size: int) -> float:
    """Estimate how many seconds xgrammar takes to compile a grammar.

    The time is estimated from the limits on repetitions in the grammar, such as `{0,2000}` or
    `"maxLength": 2000`. Such a limit is called a bound.
    """
    return sum(bound.seconds(vocab_size) for bound in _bounds(kind, source))


def check_cost(kind: str, source: str, vocab_size: int, limit_s: float) -> None:
    """Raise a RequestError if xgrammar would take too long to compile a grammar.

    Args:
        kind: one of core.grammar.KINDS.
        source: the text of the grammar.
        vocab_size: the number of tokens in the vocabulary.
        limit_s: the largest accepted estimate, in seconds.

    Raises:
        RequestError: if the estimate is above the limit. The message names the most expensive
            bound and the largest value that the limit allows.
    """
    total_s = compile_time_s(kind, source, vocab_size)
    if total_s <= limit_s:
        return
    worst = max(_bounds(kind, source), key=lambda bound: bound.seconds(vocab_size))
    max_repetitions = int(limit_s / (worst.unit_s * vocab_size))
    raise RequestError(
        f"{kind}: the grammar would take about {total_s:.0f} s to compile, but the limit is "
        f"{limit_s:g} s. The bound in {worst.place} asks for {worst.repetitions} repetitions. "
        f"Lower it to about {max_repetitions} or less."
    )


def pattern_repetitions(pattern: str) -> int:
    """Return the sum of all bounds in a regular expression. Example: 6 for `a{4}b{1,2}`."""
    return sum(bound.repetitions for bound in _pattern_bounds(pattern, "the pattern"))


def _bounds(kind: str, source: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a grammar."""
    if kind == "structural_tag":
        yield from _tag_bounds(json.loads(source), "$")
    elif kind == "json_schema":
        yield from _schema_bounds(json.loads(source), "$")
    else:
        yield from _pattern_bounds(source, "the text")


def _tag_bounds(node: object, path: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a structural tag.

    A structural tag is a JSON value that describes an answer. It can contain JSON schemas, regular
    expressions and grammars. Example: if a schema in the tag contains `"maxLength": 2000`, one of
    the limits is 2000 repetitions.

    Args:
        node: the tag, or a part of the tag that this function has found in it.
        path: the position of `node` in the tag, for error messages.
    """
    if isinstance(node, list):
        for index, part in enumerate(node):
            yield from _tag_bounds(part, f"{path}[{index}]")
    elif isinstance(node, Mapping):
        for key, part in node.items():
            part_path = f"{path}.{key}"
            if key == "json_schema":
                yield from _schema_bounds(part, part_path)
            elif key in ("pattern", "grammar") and isinstance(part, str):
                yield from _pattern_bounds(part, part_path)
            else:
                yield from _tag_bounds(part, part_path)


def _schema_bounds(schema: object, path: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a JSON schema: length limits and bounds in patterns."""
    for part, part_path in subschemas(schema, path):
        if not isinstance(part, Mapping):
            continue
        for keyword in _LENGTH_KEYWORDS:
            if isinstance(part.get(keyword), int):
                yield _Bound(part[keyword], _LENGTH_S, f"{part_path}.{keyword}")
        if isinstance(part.get("pattern"), str):
            yield from _pattern_bounds(part["pattern"], f"{part_path}.pattern")


def _pattern_bounds(pattern: str, path: str) -> Iterator[_Bound]:
    """Yield each bound (a limit on repetitions) in a regular expression or in a grammar.

    Example: `ab.{0,2000}` has one bound of 2000 at column 4. `path` is the position of the pattern,
    for error messages.
    """
    for match in _REPETITION.finditer(pattern):
        limits = [int(digits[:_MAX_DIGITS]) for digits in match.groups() if digits]
        if limits:
            yield _Bound(max(limits), _PATTERN_S, f"{path}, column {match.start() + 1}")
