"""Derive the JSON keys of a tool call from the field `transform` of a `response_template`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Keys

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class _Rule(NamedTuple):
    """The rule by which the library `transformers` builds a tool call from the model's JSON.

    Attributes:
        function: An object with one placeholder for the name and one for the arguments, such as
            {"name": "{content.f}", "arguments": "{content.args}"}. Or a single placeholder, such as
            "{content.call}", for an object that contains the name and the arguments.
        id: The placeholder for the id, or None if the model writes no id.
    """

    function: Mapping[str, Any] | str
    id: object


def keys_of_transform(transform: object) -> Keys:
    """Return the JSON keys whose values are the name, the arguments and the id of a tool call.

    A model writes a tool call as JSON. A transform describes how transformers converts this JSON
    into a tool call. In the example, transformers replaces the placeholder "{content.f}" with the
    value of the key `f`, so `f` is the key of the name.

    >>> transform = {"function": {"name": "{content.f}", "arguments": "{content.args}"}}
    >>> keys = keys_of_transform(transform)
    >>> keys.name, keys.arguments
    ('f', 'args')

    A placeholder may also refer to an object with the name and the arguments:

    >>> keys = keys_of_transform({"function": "{content.call}"})
    >>> keys.name, keys.arguments
    ('call.name', 'call.arguments')

    Args:
        transform: A rule such as in the example, or a list of one rule. None if there is no
            transform.

    Raises:
        FormatError: The transform is malformed, or does not contain the keys.
    """
    rule = _parse_rule(transform)
    if rule is None:  # The model writes the JSON in the form that transformers returns.
        return Keys(name="function.name", arguments="function.arguments", id="id")
    if isinstance(rule.function, str):
        return _keys_in_function(rule.function)
    return _keys_of_placeholders(rule.function, id_placeholder=rule.id)


def _parse_rule(transform: object) -> _Rule | None:
    """Return the only rule of a transform, or None if there is no transform.

    A rule may omit the member `function`. The whole rule is then the function:

    >>> _parse_rule({"name": "{content.f}", "arguments": "{content.args}"}).function
    {'name': '{content.f}', 'arguments': '{content.args}'}
    >>> _parse_rule("{content.call}").function
    '{content.call}'

    Raises:
        FormatError: The rule, or its member `function`, is neither an object nor a placeholder.
    """
    rule = transform[0] if isinstance(transform, list) and len(transform) == 1 else transform
    if rule is None:
        return None
    if isinstance(rule, str):  # a placeholder
        return _Rule(rule, id=None)
    members = rule if isinstance(rule, Mapping) else {}
    function = members.get("function", rule)
    if not isinstance(function, str | Mapping):
        raise FormatError(
            f"the transform {rule!r} does not return a tool call, because `function` is not an "
            "object"
        )
    return _Rule(function, members.get("id"))


def _keys_in_function(placeholder: str) -> Keys:
    """Return the JSON keys of a tool call, if one placeholder refers to the whole function.

    Example: `{content.call}` refers to the function in `{"call": {"name": .., "arguments": ..}}`,
    and `{content}` refers to the whole JSON that the model writes.

    >>> _keys_in_function("{content.call}").name, _keys_in_function("{content}").name
    ('call.name', 'name')

    Raises:
        FormatError: `placeholder` is not a placeholder.
    """
    path_of_function = _placeholder_path(placeholder)  # `call`, or None for `{content}`.
    if path_of_function is None:
        return Keys(name="name", arguments="arguments")
    return Keys(name=f"{path_of_function}.name", arguments=f"{path_of_function}.arguments")


def _keys_of_placeholders(function: Mapping[str, Any], id_placeholder: object) -> Keys:
    """Return the JSON keys to which placeholders refer, such as `f` for `{content.f}`.

    The model writes a tool call as a JSON object. The result names the members of this object that
    contain the function's name, the arguments and the id of the tool call.

    >>> function = {"name": "{content.f}", "arguments": "{content.a}"}
    >>> keys = _keys_of_placeholders(function, "{content.number}")
    >>> keys.name, keys.arguments, keys.id
    ('f', 'a', 'number')

    `id_placeholder` is None if the model writes no id.

    Raises:
        FormatError: A placeholder is missing or malformed, or the placeholder of the name or of the
            arguments refers to the whole object.
    """
    name_path = _placeholder_path(function.get("name"))
    arguments_path = _placeholder_path(function.get("arguments"))
    if name_path is None or arguments_path is None:
        raise FormatError(
            f"the transform {function!r} must take the name and the arguments from keys of the "
            "content, such as '{content.name}'"
        )
    id_path = _placeholder_path(id_placeholder) if id_placeholder else None
    return Keys(name=name_path, arguments=arguments_path, id=id_path)


def _placeholder_path(placeholder: object) -> str | None:
    """Extract the path from a placeholder: `tool.name` from `{content.tool.name}`.

    A path consists of the keys that lead to a value in nested JSON objects, joined by dots.
    transformers replaces the placeholder with this value. The placeholder `{content}` refers to the
    whole JSON object, so it has no path, and the result is None.

    >>> _placeholder_path("{content.tool.name}"), _placeholder_path("{content}")
    ('tool.name', None)

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
    return None if path == "content" else path.removeprefix("content.")
