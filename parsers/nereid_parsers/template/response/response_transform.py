"""Derive the JSON keys of a tool call from the member `transform` of a response template.

A transform describes how transformers builds a tool call from the JSON that the model has written.
Placeholders refer to the keys of this JSON:

    {"function": {"name": "{content.tool}", "arguments": "{content.args}"}}

This transform shows that the model writes `{"tool": .., "args": ..}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Keys

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def keys_of_transform(transform: object) -> Keys:
    """Return the JSON keys that contain the name, the arguments and the id of a tool call.

    A key may be a path of nested keys that are separated by dots, such as "function.name".

    >>> transform = {"function": {"name": "{content.f}", "arguments": "{content.args}"}}
    >>> keys = keys_of_transform(transform)
    >>> keys.name, keys.arguments
    ('f', 'args')

    Args:
        transform: The rule by which transformers builds a tool call from the JSON, or a list of one
            such rule. A rule is one placeholder, such as "{content.tool}", or an object of
            placeholders. None if the JSON already has the form of a tool call.

    Raises:
        FormatError: The transform does not contain the keys.
    """
    is_list_of_one = isinstance(transform, list) and len(transform) == 1
    rule: Any = transform[0] if is_list_of_one else transform  # type: ignore[index]
    if rule is None:
        return Keys(name="function.name", arguments="function.arguments", id="id")
    function = _function_of_rule(rule)
    if isinstance(function, str):
        return _usual_keys(_path(function))
    return _keys_of_rule(rule, function)


def _function_of_rule(rule: object) -> str | Mapping[str, Any]:
    """Return the part of a rule that describes the name and the arguments.

    The part is a placeholder or an object with the members `name` and `arguments`. It is the member
    `function` of the rule, or the whole rule if there is no such member.

    >>> _function_of_rule({"function": "{content}"}), _function_of_rule("{content}")
    ('{content}', '{content}')

    Raises:
        FormatError: The part has another type.
    """
    function = rule.get("function", rule) if isinstance(rule, Mapping) else rule
    if not isinstance(function, str | Mapping):
        raise FormatError(
            f"the transform {rule!r} does not return a tool call, because `function` is not "
            "an object"
        )
    return function


def _keys_of_rule(rule: Mapping[str, Any], function: Mapping[str, Any]) -> Keys:
    """Return the JSON keys in the placeholders of a transform, such as `f` in `{content.f}`.

    >>> function = {"name": "{content.f}", "arguments": "{content.a}"}
    >>> keys = _keys_of_rule({"id": "{content.number}", "function": function}, function)
    >>> keys.name, keys.arguments, keys.id
    ('f', 'a', 'number')

    Args:
        rule: The transform. It may contain a placeholder for the id.
        function: The object that contains the placeholders for the name and the arguments.

    Raises:
        FormatError: A placeholder is missing or malformed.
    """
    name_path = _path(function.get("name"))
    arguments_path = _path(function.get("arguments"))
    if not name_path or not arguments_path:
        raise FormatError(
            f"the transform {rule!r} must take the name and the arguments from keys of the "
            "content, such as '{content.name}'"
        )
    id_placeholder = rule.get("id")
    id_path = _path(id_placeholder) if id_placeholder else ""
    return Keys(name=name_path, arguments=arguments_path, id=id_path or None)


def _usual_keys(function_path: str) -> Keys:
    """Return the paths of the keys `name` and `arguments` in the object at `function_path`.

    >>> _usual_keys("function").name, _usual_keys("").name
    ('function.name', 'name')
    """
    prefix = f"{function_path}." if function_path else ""
    return Keys(name=f"{prefix}name", arguments=f"{prefix}arguments")


def _path(placeholder: object) -> str:
    """Convert a placeholder to a path, for example `{content.tool.name}` to `tool.name`.

    A path consists of keys that are joined by dots. The word "content" in a placeholder refers to
    the whole JSON object, so the path does not contain this word.

    >>> _path("{content.tool.name}"), _path("{content}")
    ('tool.name', '')

    Raises:
        FormatError: The value is not a placeholder.
    """
    match = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    if match is None:
        raise FormatError(
            f"{placeholder!r} in the response_template is not a placeholder. A placeholder is a "
            "string such as '{content.name}'."
        )
    path = match.group(1)
    return "" if path == "content" else path.removeprefix("content.")
