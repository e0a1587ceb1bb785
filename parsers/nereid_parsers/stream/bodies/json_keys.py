"""Decides what the keys mean in a JSON object that represents a tool call."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.tool_declarations import Keys, NameIsKey

# Models sometimes write the arguments under one of these keys, although the format declares another
# key.
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters", "input", "args"})
# Models sometimes enclose the name and the arguments in an object with one of these keys.
_WRAPPER_KEYS = frozenset({"function", "tool_call"})


class KeyRole(Enum):
    """The meaning of a key in a JSON object that represents a tool call.

    Example: in `{"name": "f", "arguments": {}, "type": 1}`, the roles are NAME, ARGUMENTS and
    IGNORED.

    NAME       The value is the function's name.
    ID         The value is the id of the tool call.
    ARGUMENTS  The value contains the arguments.
    PARENT     The value is a declared object that contains the name or the arguments.
    WRAPPER    The value is an object that contains the name and the arguments, although the format
               does not declare this object.
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


@dataclass(slots=True)
class CallParts:
    """The parts of a tool call that have been read from its JSON object.

    Attributes:
        name: The function's name, or None if the name has not been read.
        call_id: The id of the tool call, or "" if no id has been read.
        has_arguments: Whether the arguments have started.
        has_all_arguments: Whether the arguments have ended.
        early_arguments: The pieces of arguments that precede the name. The pieces are stored until
            the name starts the tool call.
    """

    name: str | None = None
    call_id: str = ""
    has_arguments: bool = False
    has_all_arguments: bool = False
    early_arguments: list[str] = field(default_factory=list)


@lru_cache(maxsize=256)
def declared_roles(keys: Keys) -> dict[str, KeyRole]:
    """Return the role of each key that the format declares for a tool call's JSON object.

    The keys of the result are paths: the key of an inner object is preceded by the outer keys.
    Example for the tool call `{"id": "1", "function": {"name": "f", "arguments": {}}}`:

    >>> roles = declared_roles(Keys("function.name", "function.arguments", id="id"))
    >>> for path, role in roles.items():
    ...     print(path, role.name)
    function PARENT
    id ID
    function.arguments ARGUMENTS
    function.name NAME
    """
    parent_paths = (*_parent_paths(keys.name), *_parent_paths(keys.arguments))
    roles_by_rising_precedence = [  # If a format declares a path twice, the last role applies.
        *((path, KeyRole.PARENT) for path in parent_paths),
        *((path, KeyRole.ID) for path in (keys.id,) if path),
        *((path, KeyRole.ARGUMENTS) for path in (keys.arguments, *keys.also)),
        (keys.name, KeyRole.NAME),
    ]
    return dict(roles_by_rising_precedence)


class KeyRoles:
    """Assigns a role, such as name, arguments or id, to each key of a tool call's JSON object.

    The role depends on the format's declaration of the keys, and on the parts of the tool call that
    precede the key.
    """

    __slots__ = ("_is_confirmed", "_keys", "_parts", "_writer")

    def __init__(
        self, keys: Keys | NameIsKey, parts: CallParts, writer: CallWriter, *, is_confirmed: bool
    ) -> None:
        """Create an object that decides what the keys of one JSON object mean.

        The reader of the object changes `parts`. `is_confirmed` is true if a marker or an earlier
        tool call shows that the object is a tool call.
        """
        self._keys = keys
        self._parts = parts
        self._writer = writer
        self._is_confirmed = is_confirmed

    def role_of(self, path: str, *, is_object: bool) -> KeyRole:
        """Return the meaning of a key, which decides how the value of the key is read.

        Examples:
            In `{"name": "f", "arguments": {}}`, the keys have the roles NAME and ARGUMENTS.
            In `{"name": "f", "name": "g"}`, the second key has the role IGNORED.
            In `{"f": {"a": 1}}`, if the format declares `NameIsKey`, the key has the role
            ARGUMENTS, because its value contains the arguments.

        Args:
            path: The keys from the outermost object to the current key, joined by dots.
            is_object: Whether the value of the key is an object. This is important only for a key
                that the format does not declare.
        """
        has_arguments = self._parts.has_arguments
        if isinstance(self._keys, NameIsKey):
            # The only key of the object is the name of the function. A second key is not valid.
            return KeyRole.INVALID if has_arguments else KeyRole.ARGUMENTS
        role = declared_roles(self._keys).get(path)
        if role is None:
            return self._role_of_undeclared(path, self._keys, is_object=is_object)
        is_repeated_name = role is KeyRole.NAME and self._parts.name is not None
        are_repeated_arguments = role is KeyRole.ARGUMENTS and has_arguments
        return KeyRole.IGNORED if is_repeated_name or are_repeated_arguments else role

    def _role_of_undeclared(self, path: str, keys: Keys, *, is_object: bool) -> KeyRole:
        """Return the meaning of a key that the format does not declare, such as `input`.

        Models often write the arguments under another key, or enclose the whole tool call in an
        object. The writer then stores a description of this deviation for the events. Examples for
        the declared keys `name` and `arguments`:

            object                                           key        role
            `{"name": "f", "input": {}}`                     input      ARGUMENTS
            `{"function": {"name": "f", "arguments": {}}}`   function   WRAPPER
            `{"name": "f", "arguments": {}, "note": 1}`      note       IGNORED, or INVALID if the
                                                                        object may be content
        """
        parent_path, _, key = path.rpartition(".")
        # Something other than the keys must show that the object is a tool call: a marker, an
        # earlier tool call, or the name of an offered tool.
        is_recognizable = self._is_confirmed or self._writer.tools.is_known
        if is_object and is_recognizable and not self._parts.has_arguments:
            is_beside_arguments = parent_path == keys.arguments.rpartition(".")[0]
            if key in _ARGUMENTS_KEYS and is_beside_arguments:
                self._writer.add_deviation(f"the arguments are under the key {key!r}")
                return KeyRole.ARGUMENTS
            # Only a key of the outermost object, which has no name yet, can be a wrapper.
            if path in _WRAPPER_KEYS and self._parts.name is None:
                self._writer.add_deviation(f"the tool call is under the key {key!r}")
                return KeyRole.WRAPPER
        if key in keys.extra:  # The format names this key, for example `type`.
            return KeyRole.IGNORED
        is_certainly_call = self._is_confirmed or self._writer.is_open
        return KeyRole.IGNORED if is_certainly_call else KeyRole.INVALID


def _parent_paths(path: str) -> list[str]:
    """Return the paths of the objects that enclose a key: `a.b.c` gives `["a", "a.b"]`."""
    *outer_keys, _ = path.split(".")
    return [".".join(outer_keys[:depth]) for depth in range(1, len(outer_keys) + 1)]
