# SPDX-License-Identifier: Apache-2.0
"""Parses the text of JSON schemas, and finds the schemas inside a schema.

The function `path_of_problem` finds the part of a schema that a grammar library refuses.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nereid_backend.errors import RequestError

# The largest accepted nesting depth of schemas. A schema inside another schema adds one or two
# levels of JSON: {"items": {...}} adds one level, and {"properties": {"a": {...}}} adds two levels.
MAX_DEPTH = 64


_MAX_JSON_DEPTH = 2 * MAX_DEPTH


# The largest number of schemas that are compiled to locate an error. If a schema is invalid, the
# schemas inside it are compiled one by one to find the invalid schema. The same limit applies to
# the number of patterns if the patterns of a schema are compiled one by one.
MAX_LOCATED = 200


# The keywords of JSON Schema whose values are a schema, a list of schemas, or a map of schemas.
_SCHEMA_KEYWORDS = (
    "additionalProperties", "items", "propertyNames", "additionalItems", "not", "contains", "if",
    "then", "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")


_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


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


def path_of_problem(schema: object, has_problem: Callable[[Mapping[str, object]], bool]) -> str:
    """Return the path of the innermost part of a schema that causes an error.

    The grammar libraries do not report the position of an error. Therefore the schemas inside
    `schema` are compiled one by one, until the innermost schema with the error is found. At most
    MAX_LOCATED schemas are compiled. Example: if the type "foo" causes the error, the schema
    `{"properties": {"a": {"type": "foo"}}}` gives `$.properties.a`.

    Args:
        schema: the whole schema, which causes the error.
        has_problem: compiles a schema, and returns whether this schema causes the error, too.
    """
    definitions = _definitions_in(schema)
    problem_path = "$"
    num_compiled = 0
    # `subschemas` yields a schema first, and then the schemas inside it. When a schema is found to
    # cause the error, the search continues only with the schemas inside this schema.
    for part, path in subschemas(schema):
        can_contain_cause = _is_inside(path, problem_path)
        if not isinstance(part, Mapping) or not can_contain_cause:
            continue
        if num_compiled == MAX_LOCATED:
            break
        num_compiled += 1
        if has_problem(_with_definitions(part, path, definitions)):
            problem_path = path
    return problem_path


def _definitions_in(schema: object) -> dict[str, object]:
    """Return the definitions of a schema, to which other parts of the schema can refer.

    Example: `{"$defs": {"a": {}}, "type": "object"}` returns `{"$defs": {"a": {}}}`.
    """
    if not isinstance(schema, Mapping):
        return {}
    return {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}


def _with_definitions(
    part: Mapping[str, object], path: str, definitions: Mapping[str, object]
) -> dict[str, object]:
    """Return a part of a schema, with the definitions of the whole schema added.

    The part can then be compiled alone, although it may refer to the definitions. Example: the part
    `{"$ref": "#/$defs/a"}` gives `{"$defs": {"a": {}}, "$ref": "#/$defs/a"}`.

    If the part itself is in the definitions (its path begins with "$.$defs."), return it without
    the definitions. Otherwise, a definition that refers to an invalid definition would fail with
    the same error, and the search for the cause of the error would find the wrong definition.

    Args:
        part: the part.
        path: the position of the part in the whole schema, such as "$.properties.b".
        definitions: the definitions of the whole schema, such as {"$defs": {"a": {}}}.
    """
    is_definition = any(path.startswith(f"$.{keyword}.") for keyword in definitions)
    return dict(part) if is_definition else {**definitions, **part}


def _is_inside(path: str, outer_path: str) -> bool:
    """Return whether a path is inside another path. Example: `$.items` is inside `$`."""
    return path.startswith(outer_path) and depth_of(path) > depth_of(outer_path)


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
