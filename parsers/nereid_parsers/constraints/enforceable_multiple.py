"""Rewrites `multipleOf` and the bounds of numbers in JSON schemas, so that xgrammar enforces them.

xgrammar 0.2.8 enforces `multipleOf` only for integers without bounds. It refuses the bounds of an
integer if they are not whole numbers, or if they do not fit into 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

Schema = Mapping[str, Any]

# Schema keywords that do not restrict the value, such as `title`. If two schemas with different
# titles are merged, the merged schema has the title of the first schema.
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The smallest and the largest integer that xgrammar accepts as a bound.
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
# The largest value of `multipleOf` that xgrammar enforces.
_LARGEST_MULTIPLE_OF = 1024
# A schema with `multipleOf` and bounds is rewritten as a list of all allowed values. The list may
# not be longer than this limit, because a long list would make the grammar too large.
_MAX_MULTIPLES = 256
# No multiples are listed if a bound or the value of `multipleOf` is 2**53 or more. A bound may be a
# float, and floats cannot represent all integers above 2**53.
_LIMIT_OF_NUMBERS = 2**53


def is_enforced_multiple(schema: Schema) -> bool:
    """Return whether xgrammar enforces the keyword `multipleOf` of a schema.

    Example: the result is True for `{"type": "integer", "multipleOf": 5}`, and False if the schema
    also has a bound, such as `minimum`.
    """
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
    integers without bounds. If `schema` has bounds, the result therefore lists all allowed values.
    If there are too many values for a list, the result keeps the bounds and is not enforced.

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
    # The list of all allowed values would replace other keywords, such as `enum` and `not`.
    has_other_keywords = bool(schema.keys() - ANNOTATIONS - {"type", "multipleOf", *_BOUNDS})
    if has_other_keywords:
        return as_integer
    multiples = _multiples(schema, int(multiple))
    if not multiples:  # None, or an empty list. An empty `enum` is not valid.
        return as_integer
    annotations = {key: value for key, value in schema.items() if key in ANNOTATIONS}
    return {**annotations, "enum": multiples}


def _multiples(schema: Schema, multiple: int) -> list[int] | None:
    """Return all multiples of `multiple` within the bounds of a schema.

    Example: the multiples of 5 in `{"minimum": 1, "exclusiveMaximum": 15}` are [5, 10]. Return None
    if the multiples cannot be listed, because a bound is missing, not a number or too large, or
    because there are too many multiples.
    """
    bounds = [schema[keyword] for keyword in _BOUNDS if keyword in schema]
    are_valid = all(is_number(n) and abs(n) < _LIMIT_OF_NUMBERS for n in (*bounds, multiple))
    if not are_valid:
        return None
    factors = _factors(schema, multiple)
    if factors is None or len(factors) > _MAX_MULTIPLES:
        return None
    return [factor * multiple for factor in factors]


def _factors(schema: Schema, multiple: int) -> range | None:
    """Return the integers `n` for which the bounds of a schema allow the product `n * multiple`.

    Examples for the multiple 5: `{"minimum": 10, "maximum": 20}` gives 2 to 4, because 2 * 5 and
    4 * 5 are allowed, and `{"exclusiveMinimum": 10, "exclusiveMaximum": 20}` gives only 3. Return
    None if there is no lower bound or no upper bound.
    """
    smallest = _smallest_factor(schema, multiple)
    largest = _largest_factor(schema, multiple)
    if smallest is None or largest is None:
        return None
    return range(smallest, largest + 1)


def _smallest_factor(schema: Schema, multiple: int) -> int | None:
    """Return the smallest integer `n` for which the lower bounds allow `n * multiple`.

    Example for the multiple 5: `{"minimum": 7}` gives 2, because 1 * 5 is too small. Return None if
    the schema has no lower bound.
    """
    factors: list[int] = []  # For each lower bound, the smallest `n` that it allows.
    if "minimum" in schema:
        factors.append(_divide_rounding_up(schema["minimum"], multiple))
    if "exclusiveMinimum" in schema:
        factors.append(_divide_rounding_down(schema["exclusiveMinimum"], multiple) + 1)
    return max(factors, default=None)


def _largest_factor(schema: Schema, multiple: int) -> int | None:
    """Return the largest integer `n` for which the upper bounds allow `n * multiple`.

    Example for the multiple 5: `{"maximum": 12}` gives 2, because 3 * 5 is too large. Return None
    if the schema has no upper bound.
    """
    factors: list[int] = []  # For each upper bound, the largest `n` that it allows.
    if "maximum" in schema:
        factors.append(_divide_rounding_down(schema["maximum"], multiple))
    if "exclusiveMaximum" in schema:
        factors.append(_divide_rounding_up(schema["exclusiveMaximum"], multiple) - 1)
    return min(factors, default=None)


def _divide_rounding_down(number: float, divisor: int) -> int:
    """Divide, and round the result down: 7 divided by 5 gives 1, and -7 divided by 5 gives -2."""
    return int(number // divisor)


def _divide_rounding_up(number: float, divisor: int) -> int:
    """Divide, and round the result up: 7 divided by 5 gives 2, and -7 divided by 5 gives -1."""
    return -int(-number // divisor)


def with_integer_bounds(schema: Schema) -> Schema:
    """Rewrite the bounds of an integer as whole numbers of at most 64 bits.

    xgrammar refuses other bounds of integers. Example:
    `{"type": "integer", "minimum": 0.5, "maximum": 18446744073709551615}` gives
    `{"type": "integer", "minimum": 1, "maximum": 9223372036854775807}`.

    A schema that allows other numbers than integers is returned unchanged.
    """
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    if "integer" not in types or "number" in types:
        return schema
    rewritten = dict(schema)
    for keyword in _BOUNDS:
        if keyword in schema and _is_finite_number(schema[keyword]):
            rewritten[keyword] = _integer_bound(keyword, schema[keyword])
    return rewritten


def _integer_bound(keyword: str, bound: float) -> int:
    """Round the bound of a JSON schema to an integer, because the schema allows only integers.

    The bound is also limited to the range of 64-bit integers, unless no such integer satisfies it.
    `keyword` is the keyword that declares the bound. Examples:

        minimum 0.5            1, the smallest allowed integer
        exclusiveMinimum 0.5   0, so that 1 is the smallest allowed integer
        maximum 2**70          2**63 - 1, the largest integer of 64 bits
        minimum 2**70          2**70, because no integer of 64 bits satisfies the bound
    """
    match keyword:
        case "minimum":
            return max(math.ceil(bound), _MIN_INT64)
        case "exclusiveMinimum":
            return max(math.floor(bound), _MIN_INT64)
        case "maximum":
            return min(math.floor(bound), _MAX_INT64)
        case _:  # exclusiveMaximum
            return min(math.ceil(bound), _MAX_INT64)


def _is_finite_number(value: object) -> bool:
    """Return whether a JSON value is a number other than NaN and infinity."""
    # `math.isfinite` raises an error for an integer that is larger than every float.
    return is_integer(value) or (is_number(value) and math.isfinite(value))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number. A boolean is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is an integer, such as 5 or 5.0. A boolean is not an integer."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
