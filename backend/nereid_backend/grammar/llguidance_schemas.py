# SPDX-License-Identifier: Apache-2.0
"""Changes the parts of JSON schemas that llguidance rejects or handles incorrectly."""

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
    "minimum": 3.000000001.

    A schema normally has only one lower bound and only one upper bound. If a schema has "minimum"
    and "exclusiveMinimum" together, the new "minimum" overwrites the old value.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if not isinstance(part, dict):
            continue
        excluded_minimum = part.get("exclusiveMinimum")
        excluded_maximum = part.get("exclusiveMaximum")
        # The opposite bound can be inclusive or exclusive; None if the schema has neither.
        upper_bound = part.get("maximum", excluded_maximum)
        lower_bound = part.get("minimum", excluded_minimum)
        if _allows_excluded_minimum(excluded_minimum, upper_bound):
            part["minimum"] = part.pop("exclusiveMinimum") + _BOUND_DISTANCE
        # If the conditions of the `if` and the `elif` are both true, the schema allows no number.
        # It is then enough to replace the minimum.
        elif _allows_excluded_maximum(excluded_maximum, lower_bound):
            part["maximum"] = part.pop("exclusiveMaximum") - _BOUND_DISTANCE


def _allows_excluded_minimum(minimum: object, upper_bound: object) -> bool:
    """Return whether llguidance would wrongly accept the excluded minimum of a schema.

    `minimum` is the value of "exclusiveMinimum", and `upper_bound` is the upper bound; None if the
    schema has no such bound. llguidance handles negative lower bounds correctly.
    """
    if not _is_integer(minimum) or not _is_number(upper_bound):
        return False
    return minimum >= 0 and upper_bound < minimum + 1


def _allows_excluded_maximum(maximum: object, lower_bound: object) -> bool:
    """Return whether llguidance would wrongly accept the excluded maximum of a schema.

    `maximum` is the value of "exclusiveMaximum", and `lower_bound` is the lower bound; None if the
    schema has no such bound. llguidance handles positive upper bounds correctly.
    """
    if not _is_integer(maximum) or not _is_number(lower_bound):
        return False
    return maximum <= 0 and lower_bound > maximum - 1


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number without a fraction, such as 3 or 3.0."""
    return _is_number(value) and value == int(value)
