"""Rewrites `multipleOf` and the bounds of numbers in JSON schemas, so that xgrammar enforces them.

xgrammar 0.2.8 enforces `multipleOf` only for integers without bounds. It refuses the bounds of an
integer if they are not whole numbers, or if they do not fit into 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
# Maps each bound of an integer to the function that converts the bound to an equivalent integer.
_WHOLE_BOUNDS: dict[str, Callable[[float], int]] = {
    "minimum": math.ceil,
    "maximum": math.floor,
    "exclusiveMinimum": math.floor,
    "exclusiveMaximum": math.ceil,
}
# The smallest and the largest integer that xgrammar accepts as a bound.
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
# The largest value of `multipleOf` that xgrammar enforces.
_LARGEST_MULTIPLE_OF = 1024
# A schema with `multipleOf` and bounds is rewritten as a list of all allowed values. The list may
# not be longer than this limit, because a long list would make the grammar too large.
_MAX_MULTIPLES = 256
# No multiples are listed if a bound or the value of `multipleOf` is 2**53 or more. The code divides
# the bound by this value as floats, and floats cannot represent all integers above 2**53.
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
    A schema that cannot be rewritten is returned unchanged.

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
    # The list of all allowed values would replace other keywords, such as `enum` and `not`.
    has_other_keywords = bool(schema.keys() - ANNOTATIONS - {"type", "multipleOf", *_BOUNDS})
    if has_other_keywords or not has_bounds:
        return as_integer
    # `multiples` is empty if the bounds allow no multiple, or if the multiples cannot be listed,
    # for example because there are too many. In both cases, no `enum` is added, because an empty
    # `enum` is not valid.
    multiples = _multiples(schema, int(multiple))
    if not multiples:
        return as_integer
    annotations = {key: value for key, value in schema.items() if key in ANNOTATIONS}
    return {**annotations, "enum": multiples}


def with_integer_bounds(schema: Schema) -> Schema:
    """Rewrite the bounds of an integer as whole numbers of at most 64 bits.

    xgrammar refuses other bounds of integers. The result accepts only integers that `schema`
    accepts, too. It does not accept integers of more than 64 bits if `schema` has a bound of more
    than 64 bits. Bounds that no integer of 64 bits satisfies are not changed.

    Example: `{"type": "integer", "minimum": 0.5, "maximum": 18446744073709551615}` gives
    `{"type": "integer", "minimum": 1, "maximum": 9223372036854775807}`.
    """
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "integer" not in types or "number" in types:
        return schema
    rewritten = dict(schema)
    for keyword, to_whole_number in _WHOLE_BOUNDS.items():
        bound = schema.get(keyword)
        # `math.isfinite` fails for huge integers, which are finite.
        if is_integer(bound) or (is_number(bound) and math.isfinite(bound)):
            whole = to_whole_number(bound)
            is_maximum = keyword in ("maximum", "exclusiveMaximum")
            rewritten[keyword] = min(whole, _MAX_INT64) if is_maximum else max(whole, _MIN_INT64)
    return rewritten


def _multiples(schema: Schema, multiple: int) -> list[int]:
    """Return all multiples of `multiple` within the bounds of a schema.

    Example: the multiples of 5 in `{"minimum": 1, "exclusiveMaximum": 15}` are [5, 10]. The result
    is [] if the multiples cannot be listed, for example because there is no upper bound.
    """
    bounds = [schema[keyword] for keyword in _BOUNDS if keyword in schema]
    if not all(is_number(n) and abs(n) < _LIMIT_OF_NUMBERS for n in (*bounds, multiple)):
        return []
    factors = _factors(schema, multiple)
    if len(factors) > _MAX_MULTIPLES:
        return []
    return [factor * multiple for factor in factors]


def _factors(schema: Schema, multiple: int) -> range:
    """Return the integers `n` for which the bounds of a schema allow the product `n * multiple`.

    Examples for the multiple 5: `{"minimum": 10, "maximum": 20}` gives 2 to 4, because 2 * 5 and
    4 * 5 are allowed, and `{"exclusiveMinimum": 10, "exclusiveMaximum": 20}` gives only 3. The
    result is empty if there is no lower bound or no upper bound.
    """
    smallest_factors: list[int] = []  # For each lower bound, the smallest `n` that it allows.
    largest_factors: list[int] = []  # For each upper bound, the largest `n` that it allows.
    if "minimum" in schema:
        smallest_factors.append(math.ceil(schema["minimum"] / multiple))
    if "exclusiveMinimum" in schema:
        smallest_factors.append(math.floor(schema["exclusiveMinimum"] / multiple) + 1)
    if "maximum" in schema:
        largest_factors.append(math.floor(schema["maximum"] / multiple))
    if "exclusiveMaximum" in schema:
        largest_factors.append(math.ceil(schema["exclusiveMaximum"] / multiple) - 1)
    if not smallest_factors or not largest_factors:
        return range(0)
    return range(max(smallest_factors), min(largest_factors) + 1)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number. A boolean is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is an integer, such as 5 or 5.0. A boolean is not an integer."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
