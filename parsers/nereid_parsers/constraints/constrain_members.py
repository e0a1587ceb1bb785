"""Build the grammar nodes for the required and the optional members of a JSON object."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.constraints.constrain_nodes import (
    NOTHING,
    Node,
    const,
    joined,
    one_of,
    optional,
    separated_tags,
    sequence,
)
from nereid_parsers.constraints.constrain_request import ObjectSchema

# If all arguments of a tool are optional, a grammar that enforces their order grows with the square
# of the number of arguments. If a tool has more than `_MAX_ORDERED_MEMBERS` such arguments, the
# grammar allows any order.
_MAX_ORDERED_MEMBERS = 6


def separated_members(
    schema: ObjectSchema, member_node: Callable[[str], Node], separator: str
) -> Node:
    """Return the grammar node for the members of an object, separated by `separator`.

    The required members come first. The model may omit optional members. Examples with the
    separator `,`, for the required member a and the optional members b and c:

        members     matching texts
        a, b, c     `a`, `a,b`, `a,c`, `a,b,c`
        b, c        the empty text, `b`, `c`, `b,c`

    Args:
        schema: The schema of the object, for example of the object of a tool's arguments.
        member_node: Returns the node for the member with the given key.
        separator: The text between two members.
    """
    required = [member_node(key) for key in schema.required_keys]
    optionals = [member_node(key) for key in schema.optional_keys]
    if not required:
        return _list_of_optional(optionals, separator)
    all_required = joined(required, separator)
    return sequence(all_required, *_optional_followers(optionals, separator))


def _list_of_optional(members: list[Node], separator: str) -> Node:
    """Return the grammar node for a list in which each of `members` is optional.

    Example: if the members match `a`, `b` and `c`, and the separator is `,`, the grammar is
    `(a(,b)?(,c)? | b(,c)? | c)?`. It matches the empty text, `a`, `a,c` and `b,c`, for example. If
    there are more than `_MAX_ORDERED_MEMBERS` members, the node also matches other orders, such as
    `b,a`, because a node that enforces the order would be too large.
    """
    if not members:
        return NOTHING
    if len(members) > _MAX_ORDERED_MEMBERS:
        return optional(separated_tags(members, separator))
    # Any member can be the first member of the list, because the members before it can be omitted.
    # The grammar therefore has one alternative for each possible first member.
    alternatives = [
        sequence(first, *_optional_followers(members[index + 1 :], separator))
        for index, first in enumerate(members)
    ]
    return optional(one_of(*alternatives))


def _optional_followers(members: list[Node], separator: str) -> list[Node]:
    """For each member, return an optional node that matches `separator` and then the member."""
    return [optional(sequence(const(separator), member)) for member in members]
