# SPDX-License-Identifier: Apache-2.0
"""Changes the parts of JSON schemas that llguidance rejects or handles incorrectly."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

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
        if not isinstance(part, dict):
            continue
        excluded_minimum = part.get("exclusiveMinimum")
        excluded_maximum = part.get("exclusiveMaximum")
        lower_bounds = _numbers(part, ("minimum", "exclusiveMinimum"))
        upper_bounds = _numbers(part, ("maximum", "exclusiveMaximum"))
        if not lower_bounds or not upper_bounds:
            continue
        # If both conditions are true, "exclusiveMinimum" is at least 0 and "exclusiveMaximum" is at
        # most 0, so no number satisfies the schema. It is then enough to replace one of the two
        # bounds.
        if _allows_excluded_minimum(excluded_minimum, min(upper_bounds)):
            new_minimum = part.pop("exclusiveMinimum") + _BOUND_DISTANCE
            part["minimum"] = max(*lower_bounds, new_minimum)
        elif _allows_excluded_maximum(excluded_maximum, max(lower_bounds)):
            new_maximum = part.pop("exclusiveMaximum") - _BOUND_DISTANCE
            part["maximum"] = min(*upper_bounds, new_maximum)


def _numbers(schema: Mapping[str, object], keywords: Sequence[str]) -> list[float]:
    """Return the numeric values of `keywords` in a schema. Leave out all other values."""
    values = [schema.get(keyword) for keyword in keywords]
    return [value for value in values if _is_number(value)]


def _allows_excluded_minimum(minimum: object, upper_bound: float) -> bool:
    """Return whether llguidance would wrongly accept the excluded minimum of a schema.

    `minimum` is the value of "exclusiveMinimum", and None if the schema has no such bound.
    llguidance handles negative lower bounds correctly.
    """
    return _is_integer(minimum) and minimum >= 0 and upper_bound < minimum + 1


def _allows_excluded_maximum(maximum: object, lower_bound: float) -> bool:
    """Return whether llguidance would wrongly accept the excluded maximum of a schema.

    `maximum` is the value of "exclusiveMaximum", and None if the schema has no such bound.
    llguidance handles positive upper bounds correctly.
    """
    return _is_integer(maximum) and maximum <= 0 and lower_bound > maximum - 1


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number without a fraction, such as 3 or 3.0."""
    return _is_number(value) and value == int(value)
