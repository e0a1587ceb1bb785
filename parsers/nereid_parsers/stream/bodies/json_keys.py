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

    NAME             The value is the function's name.
    ID               The value is the id of the tool call.
    ARGUMENTS        The value contains the arguments.
    NAMED_ARGUMENTS  The key is the function's name, and the value contains the arguments, as in
                     `{"f": {"a": 1}}`.
    PARENT           The value is a declared object that contains the name or the arguments.
    WRAPPER          The value is an object that contains the name and the arguments, although the
                     format does not declare this object.
    IGNORED          The value is skipped.
    INVALID          The key shows that the object is not a tool call.
    """

    NAME = "name"
    ID = "id"
    ARGUMENTS = "arguments"
    NAMED_ARGUMENTS = "named_arguments"
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
    id_paths = (keys.id,) if keys.id else ()
    # `keys.also` contains other keys under which a model may write the arguments.
    arguments_paths = (keys.arguments, *keys.also)
    # If a format declares a path twice, the last of these dicts determines its role.
    return (
        dict.fromkeys(parent_paths, KeyRole.PARENT)
        | dict.fromkeys(id_paths, KeyRole.ID)
        | dict.fromkeys(arguments_paths, KeyRole.ARGUMENTS)
        | {keys.name: KeyRole.NAME}
    )


class KeyRoles:
    """Assigns a role, such as name, arguments or id, to each key of a tool call's JSON object."""

    __slots__ = ("_declared_roles", "_is_confirmed", "_keys", "_parts", "_writer")

    def __init__(
        self, keys: Keys, parts: CallParts, writer: CallWriter, *, is_confirmed: bool
    ) -> None:
        """Prepare to assign roles to the keys of the JSON object of one tool call.

        Args:
            keys: The keys that the format declares, such as `name` and `arguments`.
            parts: The parts of the tool call that have been read. The caller keeps them up to date.
            writer: The writer of the tool call, which collects deviations from the declared keys.
            is_confirmed: Whether a marker or an earlier tool call shows that the JSON object is a
                tool call.
        """
        self._keys = keys
        self._declared_roles = declared_roles(keys)
        self._parts = parts
        self._writer = writer
        self._is_confirmed = is_confirmed

    def assign_role(self, path: str, *, is_object: bool) -> KeyRole:
        """Return the role of a key that was read. The role determines how the value is read.

        Examples: in `{"name": "f", "arguments": {}}`, the keys have the roles NAME and ARGUMENTS.
        In `{"name": "f", "name": "g"}`, the second key is a repetition, so its role is IGNORED.

        If the format does not declare the key, but the key has the role ARGUMENTS or WRAPPER, a
        description of this deviation is stored.

        Args:
            path: The keys from the outermost object to the current key, joined by dots.
            is_object: Whether the value of the key is an object. The role of a declared key does
                not depend on this.
        """
        declared_role = self._declared_roles.get(path)
        if declared_role is not None:
            return KeyRole.IGNORED if self._is_repeated(declared_role) else declared_role
        role = self._role_of_undeclared(path, is_object=is_object)
        self._add_deviation(role, path)
        return role

    def _is_repeated(self, role: KeyRole) -> bool:
        """Return whether an earlier key of the object has the role NAME or ARGUMENTS."""
        if role is KeyRole.NAME:
            return self._parts.name is not None
        return role is KeyRole.ARGUMENTS and self._parts.has_arguments

    def _role_of_undeclared(self, path: str, *, is_object: bool) -> KeyRole:
        """Return the role of a key that the format does not declare, such as `input`.

        Models often write the arguments under another key, or enclose the whole tool call in an
        object. Examples for the declared keys `name` and `arguments`:

            object                                           key        role
            `{"name": "f", "input": {}}`                     input      ARGUMENTS
            `{"function": {"name": "f", "arguments": {}}}`   function   WRAPPER
            `{"name": "f", "arguments": {}, "note": 1}`      note       IGNORED or INVALID, see
                                                                        `_may_be_ignored`
        """
        may_contain_arguments = is_object and self._accepts_other_keys()
        if may_contain_arguments and self._is_arguments_synonym(path):
            return KeyRole.ARGUMENTS
        if may_contain_arguments and self._is_wrapper(path):
            return KeyRole.WRAPPER
        return KeyRole.IGNORED if self._may_be_ignored(path) else KeyRole.INVALID

    def _may_be_ignored(self, path: str) -> bool:
        """Return whether an undeclared key, such as `note`, is skipped together with its value.

        If the result is False, the key shows that the object is content and not a tool call. The
        key is skipped if a marker or an open tool call shows that the object is a tool call, or
        if the format declares that a tool call may contain the key, such as `type` (`Keys.extra`).
        """
        is_call = self._is_confirmed or self._writer.is_open
        return is_call or _last_key(path) in self._keys.extra

    def _accepts_other_keys(self) -> bool:
        """Return whether the arguments may be under a key that the format does not declare.

        The arguments must not have been found yet. In addition, a marker or an earlier tool call
        must show that the object is a tool call, because an undeclared key does not show this.
        If the offered tools are known, the name of an offered tool can show this instead.
        """
        is_recognizable = self._is_confirmed or self._writer.tools.is_known
        return is_recognizable and not self._parts.has_arguments

    def _is_arguments_synonym(self, path: str) -> bool:
        """Return whether a key such as `input` is a synonym of the declared key of the arguments.

        The synonym must be a key of the same object as the declared key. Example: if the format
        declares the path `function.arguments`, the path `function.input` is a synonym, but the path
        `input` is not.
        """
        is_synonym = _last_key(path) in _ARGUMENTS_KEYS
        return is_synonym and _parent_path(path) == _parent_path(self._keys.arguments)

    def _is_wrapper(self, path: str) -> bool:
        """Return whether the object under the key `path` contains the whole tool call.

        The format does not declare this key. Example: `function` in `{"function": {"name": "f"}}`.
        Only a key of the outermost object can be such a wrapper. The name of the function must not
        precede the key.
        """
        return path in _WRAPPER_KEYS and self._parts.name is None

    def _add_deviation(self, role: KeyRole, path: str) -> None:
        """Store a description of the deviation if an undeclared key is ARGUMENTS or WRAPPER.

        The end event of the tool call contains the description. An ignored key, such as `note`, is
        no deviation. `path` is the path of the key.
        """
        if role is KeyRole.ARGUMENTS:
            self._writer.add_deviation(f"the arguments are under the key {_last_key(path)!r}")
        elif role is KeyRole.WRAPPER:
            self._writer.add_deviation(f"the tool call is under the key {_last_key(path)!r}")


class NameIsKeyRoles:
    """Assigns a role to the key of an object such as `{"f": {"a": 1}}`, where `f` is the function.

    A tool call has only one such key. The object is not a tool call if another key follows.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: CallParts) -> None:
        """Store `parts`, which the caller keeps up to date while it reads the JSON object."""
        self._parts = parts

    def assign_role(self, path: str, *, is_object: bool) -> KeyRole:  # noqa: ARG002 - as above
        """Return NAMED_ARGUMENTS for the first key, and INVALID for any other key."""
        return KeyRole.INVALID if self._parts.has_arguments else KeyRole.NAMED_ARGUMENTS


def create_roles(
    keys: Keys | NameIsKey, parts: CallParts, writer: CallWriter, *, is_confirmed: bool
) -> KeyRoles | NameIsKeyRoles:
    """Create the object that assigns roles to the keys of a tool call's JSON object.

    `keys` declares the keys of the name and of the arguments, or that the name itself is a key. See
    `KeyRoles.__init__` for the other parameters.
    """
    if isinstance(keys, NameIsKey):
        return NameIsKeyRoles(parts)
    return KeyRoles(keys, parts, writer, is_confirmed=is_confirmed)


def _parent_paths(path: str) -> list[str]:
    """Return the paths of the objects that enclose a key: `a.b.c` gives `["a", "a.b"]`."""
    *outer_keys, _ = path.split(".")
    return [".".join(outer_keys[:depth]) for depth in range(1, len(outer_keys) + 1)]


def _parent_path(path: str) -> str:
    """Return the path of the object that contains a key: `a.b.c` gives `a.b`, and `a` gives ""."""
    return path.rpartition(".")[0]


def _last_key(path: str) -> str:
    """Return the key at the end of a path: `a.b.c` gives `c`."""
    return path.rpartition(".")[2]
