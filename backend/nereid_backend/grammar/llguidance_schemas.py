# SPDX-License-Identifier: Apache-2.0
"""Changes the parts of JSON schemas that llguidance rejects or handles incorrectly."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from nereid_backend.grammar.compile_cost import subschemas

# The distance between an exclusive bound and the inclusive bound that replaces it. Example:
# "greater than 3" becomes "at least 3.000000001".
_BOUND_DISTANCE = 1e-9
# The keywords of JSON Schema whose values are lengths or counts.
_LENGTHS = frozenset(
    f"{bound}{word}"
    for bound in ("min", "max")
    for word in ("Length", "Items", "Properties", "Contains")
)


class _Bound(NamedTuple):
    """The two keywords for a bound of a number. `sign` is 1 for a minimum and -1 for a maximum."""

    inclusive: str
    exclusive: str
    sign: int


_MINIMUM = _Bound("minimum", "exclusiveMinimum", 1)
_MAXIMUM = _Bound("maximum", "exclusiveMaximum", -1)


def convert_lengths_to_integers(schema: object) -> None:
    """Convert the lengths and counts in a schema to integers.

    JSON Schema accepts 30.0 as an integer, but llguidance does not. Example: {"maxLength": 30.0}
    becomes {"maxLength": 30}.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if not isinstance(part, dict):
            continue
        for keyword in _LENGTHS & part.keys():
            if _is_integer(part[keyword]):
                part[keyword] = int(part[keyword])


def replace_exclusive_bounds(schema: object) -> None:
    """Replace the bounds that llguidance 1.9 handles incorrectly.

    If an exclusive bound is an integer and the opposite bound is less than 1 away, llguidance
    allows the excluded number. Example: with "exclusiveMinimum": 3 and "maximum": 3.6, llguidance
    allows 3. This function replaces the exclusive bound by the inclusive bound
    "minimum": 3.000000001. If the schema also has a stricter "minimum", it is kept.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if isinstance(part, dict) and not _replace_exclusive_bound(part, _MINIMUM, _MAXIMUM):
            # If llguidance handled both exclusive bounds incorrectly, no number would satisfy the
            # schema, so it is enough to replace one of them.
            _replace_exclusive_bound(part, _MAXIMUM, _MINIMUM)


def _replace_exclusive_bound(schema: dict[str, Any], bound: _Bound, opposite: _Bound) -> bool:
    """Replace one exclusive bound of a schema if llguidance handles it incorrectly.

    An exclusive minimum is handled incorrectly if it is an integer of at least 0, and the opposite
    bound is less than 1 away. For a maximum, the signs of all numbers are changed first, so that
    the same rule applies.

    Returns:
        Whether the bound was replaced.

    Mutates: schema.
    """
    sign = bound.sign
    excluded = schema.get(bound.exclusive)
    own_bounds = [sign * number for number in _numbers(schema, bound)]
    opposite_bounds = [sign * number for number in _numbers(schema, opposite)]
    if not _is_integer(excluded) or not opposite_bounds:
        return False
    if sign * excluded < 0 or min(opposite_bounds) >= sign * excluded + 1:
        return False
    del schema[bound.exclusive]
    schema[bound.inclusive] = sign * max(*own_bounds, sign * excluded + _BOUND_DISTANCE)
    return True


def _numbers(schema: Mapping[str, object], bound: _Bound) -> list[float]:
    """Return the values of the two keywords of a bound in a schema, if they are numbers."""
    values = (schema.get(bound.inclusive), schema.get(bound.exclusive))
    return [value for value in values if _is_number(value)]


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number without a fraction, such as 3 or 3.0."""
    return _is_number(value) and value == int(value)
