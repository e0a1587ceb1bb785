"""The roles of the keys in a JSON object that represents a tool call."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

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


def is_undeclared_arguments_key(path: str, keys: Keys) -> bool:
    """Return whether models sometimes write the arguments under the undeclared key `path`.

    The key must be in the same object as the declared key. Example: if `keys` declares
    `function.arguments`, the result is True for `function.input`, and False for `input`.
    """
    parent, _, key = path.rpartition(".")
    declared_parent, _, _ = keys.arguments.rpartition(".")
    return key in _ARGUMENTS_KEYS and parent == declared_parent


def is_undeclared_wrapper_key(path: str) -> bool:
    """Return whether models sometimes write the whole tool call under the undeclared key `path`.

    Example: the result is True for the path `function` of `{"function": {"name": "f", ..}}`.
    """
    return path in _WRAPPER_KEYS


def _parent_paths(path: str) -> list[str]:
    """Return the paths of the objects that enclose a key: `a.b.c` gives `["a", "a.b"]`."""
    *outer_keys, _ = path.split(".")
    return [".".join(outer_keys[:depth]) for depth in range(1, len(outer_keys) + 1)]
