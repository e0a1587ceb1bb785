# SPDX-License-Identifier: Apache-2.0
"""Changes the parts of JSON schemas that llguidance rejects or handles incorrectly."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from nereid_backend.grammar.schema_parts import subschemas

# The distance between an exclusive bound and the inclusive bound that replaces it. Example:
# "greater than 3" becomes "at least 3.000000001".
_BOUND_DISTANCE = 1e-9
# The limits of llguidance 1.9 for bounds. `maximum` of an integer may be at most _LARGEST_INTEGER.
# llguidance converts all other bounds to floats, even `minimum` of an integer. The absolute value
# of these bounds may be at most _LARGEST_FLOAT, which is the largest float below 2**63.
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_FLOAT = 2**63 - 1024
# The keywords of JSON Schema whose values are lengths or counts.
_LENGTHS = frozenset(
    f"{bound}{word}"
    for bound in ("min", "max")
    for word in ("Length", "Items", "Properties", "Contains")
)


class _Bound(NamedTuple):
    """A minimum or a maximum of a number in JSON Schema.

    Attributes:
        inclusive: the keyword of the inclusive bound.
        exclusive: the keyword of the exclusive bound.
        direction: 1 if the allowed numbers are larger than the bound, -1 if they are smaller.
        strictest: returns the bound that excludes the most numbers; `max` for a minimum.
        loosest_integer: the least strict bound of an integer that llguidance accepts.
        loosest_number: the least strict bound of any other number that llguidance accepts.
    """

    inclusive: str
    exclusive: str
    direction: int
    strictest: Callable[[Iterable[float]], float]
    loosest_integer: int
    loosest_number: int


_MINIMUM = _Bound("minimum", "exclusiveMinimum", 1, max, -_LARGEST_FLOAT, -_LARGEST_FLOAT)
_MAXIMUM = _Bound("maximum", "exclusiveMaximum", -1, min, _LARGEST_INTEGER, _LARGEST_FLOAT)


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


def limit_bounds(schema: object) -> None:
    """Replace minimums and maximums that llguidance 1.9 refuses because of their size.

    llguidance refuses a minimum of -2**63 or less, and a maximum of 2**63 or more. The changed
    schema does not allow numbers beyond these limits. A minimum above the limits is not changed.

    Example: {"maximum": 1e300} becomes {"maximum": 9223372036854774784}.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if not isinstance(part, dict):
            continue
        is_integer = part.get("type") == "integer"
        for bound in (_MINIMUM, _MAXIMUM):
            loosest = bound.loosest_integer if is_integer else bound.loosest_number
            for keyword in (bound.inclusive, bound.exclusive):
                value = part.get(keyword)
                if _is_number(value):
                    part[keyword] = bound.strictest([value, loosest])


def ignore_additional_items(schema: object) -> None:
    """Remove the keyword `additionalItems` if the value of `items` is not a list.

    In this case, the keyword has no meaning, but llguidance 1.9 then ignores `prefixItems`.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if isinstance(part, dict) and not isinstance(part.get("items"), list):
            part.pop("additionalItems", None)


def replace_exclusive_bounds(schema: object) -> None:
    """If llguidance 1.9 handles an exclusive bound incorrectly, make the bound inclusive.

    Example: with {"exclusiveMinimum": 3, "maximum": 3.6}, llguidance allows the number 3. The
    schema becomes {"minimum": 3.000000001, "maximum": 3.6}.

    Mutates: schema.
    """
    for part, _ in subschemas(schema):
        if not isinstance(part, dict):
            continue
        for bound, opposite in ((_MINIMUM, _MAXIMUM), (_MAXIMUM, _MINIMUM)):
            if _allows_excluded_number(part, bound, opposite):
                _make_inclusive(part, bound)
                break  # If llguidance handled both bounds incorrectly, no number would be allowed.


def _allows_excluded_number(schema: Mapping[str, object], bound: _Bound, opposite: _Bound) -> bool:
    """Return whether llguidance 1.9 wrongly allows the number that an exclusive bound excludes.

    llguidance has this bug if the number is an integer, the opposite bound is less than 1 away, and
    an exclusive minimum is at least 0, or an exclusive maximum is at most 0.

    Examples: {"exclusiveMinimum": 3, "maximum": 3.6} and {"exclusiveMaximum": -3, "minimum": -3.6}
    return True for the exclusive bound. {"exclusiveMinimum": 3, "maximum": 4} returns False.
    """
    excluded = schema.get(bound.exclusive)
    opposite_numbers = _numbers(schema, opposite)
    if not _is_integer(excluded) or not opposite_numbers:
        return False
    # `direction` is 1 for a minimum and -1 for a maximum.
    points_away_from_zero = bound.direction * excluded >= 0
    size_of_range = bound.direction * (opposite.strictest(opposite_numbers) - excluded)
    return points_away_from_zero and size_of_range < 1


def _make_inclusive(schema: dict[str, Any], bound: _Bound) -> None:
    """Replace the exclusive bound of a schema by an inclusive bound.

    Example: {"exclusiveMinimum": 3} becomes {"minimum": 3.000000001}. If the schema also has a
    stricter "minimum", such as 3.5, the schema keeps this minimum.

    Mutates: schema.
    """
    excluded = schema.pop(bound.exclusive)
    first_allowed = excluded + bound.direction * _BOUND_DISTANCE
    schema[bound.inclusive] = bound.strictest([*_numbers(schema, bound), first_allowed])


def _numbers(schema: Mapping[str, object], bound: _Bound) -> list[float]:
    """Return the numbers that a schema contains for a bound: inclusive, exclusive or both.

    Example: for a lower bound, the schema `{"minimum": 1, "exclusiveMinimum": 3}` gives [1, 3].
    Values that are not numbers are left out.
    """
    values = (schema.get(bound.inclusive), schema.get(bound.exclusive))
    return [value for value in values if _is_number(value)]


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number without a fraction, such as 3 or 3.0."""
    return _is_number(value) and value == int(value)
