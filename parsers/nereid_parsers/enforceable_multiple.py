"""Rewrites the keyword `multipleOf` of JSON schemas, so that xgrammar enforces the keyword.

xgrammar 0.2.8 enforces `multipleOf` only for integers without bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
"""Keywords that do not restrict the values. A merged schema has the value of the first schema."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The largest value of `multipleOf` that xgrammar enforces.
_LARGEST_MULTIPLE_OF = 1024
# The largest number of multiples that a schema may list. A longer list would make the grammar too
# large.
_MAX_MULTIPLES = 256


def is_enforced_multiple(schema: Schema) -> bool:
    """Return whether xgrammar enforces the keyword `multipleOf` of a schema."""
    multiple = schema["multipleOf"]
    return (
        schema.get("type") == "integer"
        and is_integer(multiple)
        and 1 <= multiple <= _LARGEST_MULTIPLE_OF
        and not any(bound in schema for bound in _BOUNDS)
    )


def with_enforced_multiple(schema: Schema) -> Schema:
    """Rewrite a schema so that xgrammar enforces the schema's keyword `multipleOf`.

    The result accepts the same numbers as `schema`. xgrammar enforces `multipleOf` only for
    integers without bounds. If `schema` has bounds, the result lists all allowed values. A schema
    that cannot be rewritten is returned unchanged.

    Examples:
        {"type": "number", "multipleOf": 2.0} gives {"type": "integer", "multipleOf": 2}.
        {"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 12} gives {"enum": [10]}.
        {"type": "number", "multipleOf": 0.5} is returned unchanged.
    """
    multiple = schema.get("multipleOf", 0)  # 0 is not a valid value of the keyword.
    allows_only_numbers = schema.get("type") in ("integer", "number")
    is_positive_integer = is_integer(multiple) and multiple >= 1
    if not allows_only_numbers or not is_positive_integer:
        return schema
    as_integer = {**schema, "type": "integer", "multipleOf": int(multiple)}
    has_bounds = any(bound in schema for bound in _BOUNDS)
    if "enum" in schema or not has_bounds:
        return as_integer
    multiples = _multiples(as_integer, int(multiple))
    if not multiples:
        return as_integer
    annotations = {key: value for key, value in schema.items() if key in ANNOTATIONS}
    return {**annotations, "enum": multiples}


def _multiples(schema: Schema, multiple: int) -> list[int]:
    """Return all multiples of `multiple` within the bounds of a schema.

    Example: the multiples of 5 in `{"minimum": 1, "exclusiveMaximum": 15}` are [5, 10]. The result
    is [] if a bound is missing or is not a number, or if there are more than `_MAX_MULTIPLES`
    multiples.
    """
    bounds = _finite_bounds(schema)
    if bounds is None:
        return []
    first_factor = math.ceil(bounds.lowest / multiple)
    last_factor = math.floor(bounds.highest / multiple)
    num_multiples = last_factor - first_factor + 1
    if num_multiples > _MAX_MULTIPLES:
        return []
    multiples = [factor * multiple for factor in range(first_factor, last_factor + 1)]
    # `_finite_bounds` treats exclusive bounds as allowed values.
    excluded = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    return [value for value in multiples if value not in excluded]


class _Bounds(NamedTuple):
    """The lower and the upper bound of the numbers that a schema allows."""

    lowest: float
    highest: float


def _finite_bounds(schema: Schema) -> _Bounds | None:
    """Return the bounds of a schema, or None if a bound is missing or is not a number.

    An exclusive bound is returned like an inclusive bound, although it is not an allowed value.
    Example: the bounds of `{"minimum": 1, "exclusiveMaximum": 15}` are 1 and 15.
    """
    bounds = [schema[keyword] for keyword in _BOUNDS if keyword in schema]
    if not all(is_number(bound) for bound in bounds):
        return None
    lowest = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    highest = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    has_both_bounds = math.isfinite(lowest) and math.isfinite(highest)
    return _Bounds(lowest, highest) if has_both_bounds else None


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number. A boolean is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a JSON value is an integer, such as 5 or 5.0."""
    return is_number(value) and float(value).is_integer()  # type: ignore[arg-type]
