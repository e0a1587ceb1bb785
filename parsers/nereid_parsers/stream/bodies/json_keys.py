"""The roles of the keys in a JSON object that represents a tool call."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from nereid_parsers.tool_declarations import Keys

# Keys that models sometimes write instead of the declared key of the arguments.
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters", "input", "args"})
# Models sometimes enclose the name and the arguments in an object with one of these keys.
_WRAPPER_KEYS = frozenset({"function", "tool_call"})


class KeyRole(Enum):
    """The role of a member in the JSON object of a tool call.

    NAME       The value is the function's name.
    ID         The value is the id of the tool call.
    ARGUMENTS  The value contains the arguments.
    PARENT     The value is an object that contains the name or the arguments.
    WRAPPER    The value is an object that contains the name and the arguments, but the format does
               not declare this object.
    IGNORED    The value is skipped.
    INVALID    The member shows that the object is not a tool call.
    """

    NAME = "name"
    ID = "id"
    ARGUMENTS = "arguments"
    PARENT = "parent"
    WRAPPER = "wrapper"
    IGNORED = "ignored"
    INVALID = "invalid"


@lru_cache(maxsize=256)
def declared_roles(keys: Keys) -> dict[str, KeyRole]:
    """Return a dict that maps the path of each declared key to the role of this key.

    The role selects how the parser reads the value of the key. Example:
    `Keys("function.name", "function.arguments", id="id")` gives the role PARENT for `function`,
    NAME for `function.name`, ARGUMENTS for `function.arguments` and ID for `id`. If a path has
    several roles, the last one in the order PARENT, ID, ARGUMENTS, NAME applies.
    """
    roles: dict[str, KeyRole] = {}
    for path in (keys.name, keys.arguments):
        roles |= dict.fromkeys(_parent_paths(path), KeyRole.PARENT)
    if keys.id:
        roles[keys.id] = KeyRole.ID
    roles |= dict.fromkeys((keys.arguments, *keys.also), KeyRole.ARGUMENTS)
    roles[keys.name] = KeyRole.NAME
    return roles


class Deviation(NamedTuple):
    """The role of an undeclared key that the parser accepts, and a description of the deviation."""

    role: KeyRole
    description: str


def deviation_of(path: str, keys: Keys, *, has_name: bool) -> Deviation | None:
    """Return the role of an undeclared key as a `Deviation`, or None if the key is not accepted.

    Examples: if `keys` declares `function.arguments`, the path `function.input` has the role
    ARGUMENTS. The path `function` of `{"function": {"name": "f", ..}}` has the role WRAPPER if
    `keys` does not declare `function`.

    Args:
        path: The path of a key that `keys` does not declare.
        keys: The declaration of the keys.
        has_name: Whether the name of the function precedes the key.
    """
    key = last_key(path)
    is_beside_arguments = _parent(path) == _parent(keys.arguments)
    if key in _ARGUMENTS_KEYS and is_beside_arguments:
        return Deviation(KeyRole.ARGUMENTS, f"the arguments are under the key {key!r}")
    if path in _WRAPPER_KEYS and not has_name:
        return Deviation(KeyRole.WRAPPER, f"the tool call is under the key {key!r}")
    return None


def last_key(path: str) -> str:
    """Return the last key of a path: `a.b.c` gives `c`."""
    return path.rpartition(".")[2]


def _parent(path: str) -> str:
    """Return a path without its last key: `a.b.c` gives `a.b`, and `a` gives ""."""
    return path.rpartition(".")[0]


def _parent_paths(path: str) -> list[str]:
    """Return the paths of the objects that enclose a key: `a.b.c` gives `["a", "a.b"]`."""
    *outer_keys, _ = path.split(".")
    return [".".join(outer_keys[:depth]) for depth in range(1, len(outer_keys) + 1)]
