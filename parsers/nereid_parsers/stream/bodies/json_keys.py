"""The roles of the keys in a JSON object that represents a tool call."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from nereid_parsers.tool_declarations import Keys


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


def _parent_paths(path: str) -> list[str]:
    """Return the paths of the objects that enclose a key: `a.b.c` gives `["a", "a.b"]`."""
    *outer_keys, _ = path.split(".")
    return [".".join(outer_keys[:depth]) for depth in range(1, len(outer_keys) + 1)]
