"""Derive the JSON keys of a tool call from the field `transform` of a `response_template`.

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
    """Return the JSON keys whose values are the name, the arguments and the id of a tool call.

    A model writes a tool call as JSON. A transform describes how transformers converts this JSON
    into a tool call. In the example, transformers replaces the placeholder "{content.f}" with the
    value of the key `f`, so `f` is the key of the name.

    >>> transform = {"function": {"name": "{content.f}", "arguments": "{content.args}"}}
    >>> keys = keys_of_transform(transform)
    >>> keys.name, keys.arguments
    ('f', 'args')

    If one placeholder refers to the whole function, the keys `name` and `arguments` follow its
    path, `call`:

    >>> keys_of_transform("{content.call}").name
    'call.name'

    Args:
        transform: A rule, or a list of one rule. A rule is an object of placeholders, or one
            placeholder, such as "{content.tool}". None if there is no transform.

    Raises:
        FormatError: The transform is malformed, or does not contain the keys.
    """
    rule: Any = transform[0] if isinstance(transform, list) and len(transform) == 1 else transform
    match rule:
        case None:  # The model writes the JSON in the form that transformers returns.
            return Keys(name="function.name", arguments="function.arguments", id="id")
        case str(placeholder) | {"function": str(placeholder)}:
            # Example: for `{content.call}`, the keys are `call.name` and `call.arguments`.
            path = _path(placeholder)
            prefix = f"{path}." if path else ""
            return Keys(name=f"{prefix}name", arguments=f"{prefix}arguments")
        case {"function": Mapping() as function}:
            return _keys_of_placeholders(function, rule.get("id"))
        case Mapping() if "function" not in rule:
            return _keys_of_placeholders(rule, rule.get("id"))
        case _:
            raise FormatError(
                f"the transform {rule!r} does not return a tool call, because `function` is not "
                "an object"
            )


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
        FormatError: A placeholder is missing or malformed.
    """
    name_path = _path(function.get("name"))
    arguments_path = _path(function.get("arguments"))
    if not name_path or not arguments_path:  # `{content}`, which refers to the whole JSON object.
        raise FormatError(
            f"the transform {function!r} must take the name and the arguments from keys of the "
            "content, such as '{content.name}'"
        )
    id_path = _path(id_placeholder) if id_placeholder else ""
    return Keys(name=name_path, arguments=arguments_path, id=id_path or None)


def _path(placeholder: object) -> str:
    """Extract the path from a placeholder: `tool.name` from `{content.tool.name}`.

    A path consists of the keys that lead to a value in nested JSON objects, joined by dots.
    transformers replaces the placeholder with this value. In a placeholder, "content" refers to the
    whole JSON object, so the path does not contain this word.

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
