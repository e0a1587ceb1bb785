"""Find the JSON keys of the name, the arguments and the id in a rendered tool call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nereid_parsers.format import Keys, NameIsKey
from nereid_parsers.template.conversation import FIRST_KEY, FIRST_TOOL
from nereid_parsers.template.probe import ID_MARK

# The path of a value in a JSON object: the keys that lead to the value. Example: in
# `{"function": {"name": "f"}}`, the path of "f" is ("function", "name").
_Path = tuple[str, ...]


class _MemberPaths(NamedTuple):
    """The paths of the name, the arguments and the id in the JSON object of a tool call.

    Example: in `{"id": "1", "function": {"name": "f", "arguments": {}}}`, the path of the name is
    ("function", "name"). The path of the id is None if the object has no id.
    """

    name: _Path
    arguments: _Path
    id: _Path | None


def infer_keys(call: dict[str, Any]) -> Keys | NameIsKey:
    """Find the JSON keys of the name, the arguments and the id in a rendered tool call.

    The object is a rendered call of the function "zqFirstTool" with the argument "zqKeyOne". Two
    examples of an object and the result:

        {"function": "zqFirstTool", "args": {"zqKeyOne": ..}}    Keys("function", "args", ..)
        {"zqFirstTool": {"zqKeyOne": ..}}                        NameIsKey(), the name is a key

    A dot separates the keys of inner objects: "function.name" is the key of the name in
    {"function": {"name": ..}}. If the object contains no arguments, their key is assumed to be
    "arguments", the usual key. `Keys.extra` contains the keys that the parser ignores, such as
    "type". `Keys.order` is the order of the members in the object, such as ("name", "arguments").
    """
    name_path = find_path(call, lambda value: value == FIRST_TOOL)
    if name_path is None:
        return NameIsKey()  # The name is not a value, so the name is a key.
    paths = _MemberPaths(
        name=name_path,
        arguments=find_path(call, _has_first_argument) or ("arguments",),
        id=_find_id_path(call, name_path),
    )
    return Keys(
        name=".".join(paths.name),
        arguments=".".join(paths.arguments),
        id=None if paths.id is None else ".".join(paths.id),
        extra=_extra_keys(call, paths),
        order=_order_of_members(call, paths),
    )


def _extra_keys(call: dict[str, Any], paths: _MemberPaths) -> tuple[str, ...]:
    """Return the top-level keys of a tool call's JSON that the parser ignores.

    These are the keys that do not lead to the name, the arguments or the id. The key "type" is
    always included, because models may add this key even if the template does not write it.

    >>> call = {"function": "f", "args": {}, "index": 0}
    >>> _extra_keys(call, _MemberPaths(name=("function",), arguments=("args",), id=None))
    ('index', 'type')
    """
    used_keys = [path[0] for path in paths if path is not None]
    other_keys = [key for key in call if key not in used_keys]
    return tuple(dict.fromkeys((*other_keys, "type")))  # "type" occurs only once.


def _order_of_members(call: dict[str, Any], paths: _MemberPaths) -> tuple[str, ...]:
    """Return the order of the name, the arguments, the id and the type in a tool call's JSON.

    If the output of a model is constrained, the model must write these members in this order. An id
    at the end is omitted from the result, because the constraint treats such an id as optional. The
    type belongs to the result only if the JSON contains `"type": "function"`.

    >>> paths = _MemberPaths(name=("function",), arguments=("args",), id=("call_id",))
    >>> _order_of_members({"call_id": "1", "function": "f", "args": {}}, paths)
    ('id', 'name', 'arguments')
    >>> _order_of_members({"type": "function", "function": "f", "args": {}, "call_id": "1"}, paths)
    ('type', 'name', 'arguments')

    Only the top-level keys are compared. If one inner object contains the name and the arguments,
    the name precedes the arguments in the result. If one inner object contains the id and another
    member, the id is omitted from the result.
    """
    name_key, arguments_key = paths.name[0], paths.arguments[0]
    members_by_key: dict[str, tuple[str, ...]]
    if name_key == arguments_key:  # {"function": {"name": .., "arguments": ..}}
        members_by_key = {name_key: ("name", "arguments")}
    else:
        members_by_key = {name_key: ("name",), arguments_key: ("arguments",)}
    if paths.id is not None:
        # {"function": {"id": .., "name": ..}, ..}: the key "function" represents the name.
        members_by_key.setdefault(paths.id[0], ("id",))
    if call.get("type") == "function":
        members_by_key.setdefault("type", ("type",))
    order = tuple(member for key in call for member in members_by_key.get(key, ()))
    ends_with_id = order[-1] == "id"  # The order contains at least the name.
    return order[:-1] if ends_with_id else order


def _find_id_path(call: dict[str, Any], name_path: _Path) -> _Path | None:
    """Return the keys that lead to the id in `call`, the JSON object of a tool call.

    The id is the first value that contains ID_MARK, the placeholder character for ids. If there is
    no such value, the id is the value of the first top-level key with the word "id", such as
    "call_id". Return None if there is no such key.

    A template may write the function's name under the key "id". Therefore, the key of the name is
    skipped, as in the second example:

    >>> _find_id_path({"name": "f", "call": {"id": ID_MARK}}, name_path=("name",))
    ('call', 'id')
    >>> _find_id_path({"id": "f", "call_id": 1}, name_path=("id",))
    ('call_id',)
    """
    marked_path = find_path(call, lambda value: isinstance(value, str) and ID_MARK in value)
    if marked_path is not None:
        return marked_path
    id_key_paths = ((key,) for key in call if "id" in key.lower().split("_"))
    return next((path for path in id_key_paths if path != name_path), None)


def _has_first_argument(value: object) -> bool:
    """Return whether `value`, a JSON object or a string with JSON, contains the key `FIRST_KEY`."""
    return isinstance(value, str | dict) and FIRST_KEY in value


def find_path(value: dict[str, Any], is_wanted: Callable[[object], bool]) -> _Path | None:
    """Search a JSON object for a value that `is_wanted` accepts. Return the path of this value.

    The path is the sequence of keys that leads to the value. Inner objects of the JSON object
    `value` are searched too, but arrays are not searched. Return None if there is no such value.

    >>> find_path({"id": 1, "function": {"name": "f"}}, lambda value: value == "f")
    ('function', 'name')
    """
    for key, member in value.items():
        if is_wanted(member):
            return (key,)
        path_in_member = find_path(member, is_wanted) if isinstance(member, dict) else None
        if path_in_member is not None:
            return (key, *path_in_member)
    return None
