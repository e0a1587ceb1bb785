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
    """The role of a key in a JSON object that represents a tool call.

    Example: in `{"name": "f", "arguments": {}, "type": 1}`, the roles are NAME, ARGUMENTS and
    IGNORED.

    NAME       The value is the function's name.
    ID         The value is the id of the tool call.
    ARGUMENTS  The value contains the arguments.
    PARENT     The value is an object that contains the name or the arguments.
    WRAPPER    The value is an object that contains the name and the arguments, but the format does
               not declare this object.
    IGNORED    The value is skipped.
    INVALID    The key shows that the object is not a tool call.
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

    The path of an inner key contains the outer keys. Example for the tool call
    `{"id": "1", "function": {"name": "f", "arguments": {}}}`:

    >>> roles = declared_roles(Keys("function.name", "function.arguments", id="id"))
    >>> for path, role in roles.items():
    ...     print(path, role.name)
    function PARENT
    id ID
    function.arguments ARGUMENTS
    function.name NAME
    """
    # If the format declares one path for several roles, a later assignment replaces an earlier one.
    roles: dict[str, KeyRole] = {}
    for path in (keys.name, keys.arguments):
        roles |= dict.fromkeys(_parent_paths(path), KeyRole.PARENT)
    if keys.id:
        roles[keys.id] = KeyRole.ID
    roles |= dict.fromkeys((keys.arguments, *keys.also), KeyRole.ARGUMENTS)
    roles[keys.name] = KeyRole.NAME
    return roles


class Deviation(NamedTuple):
    """The role of a key that the format does not declare.

    Attributes:
        role: The role that the parser assigns to the key.
        description: The description of the deviation from the format, for the events.
    """

    role: KeyRole
    description: str


def deviation_of(path: str, keys: Keys, *, has_name: bool) -> Deviation | None:
    """Return the role of a key that the format does not declare, or None to reject the key.

    Models sometimes write another key than the declared key of the arguments, or enclose the whole
    tool call in an object. Examples for the declared keys `name` and `arguments`:

        object                              path       role
        `{"name": "f", "input": {}}`        input      ARGUMENTS
        `{"function": {"name": "f", ..}}`   function   WRAPPER
        `{"name": "f", "note": 1}`          note       None

    Args:
        path: The path of the key. `keys` does not declare this path.
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
