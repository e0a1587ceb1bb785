"""Removes a superfluous object around arguments: `{"arguments": {"a": 1}}` becomes `{"a": 1}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nereid_parsers.stream.argument_types import Tools, loads

_WRAPPER_KEYS = ("arguments", "parameters", "properties", "input")
# Arguments with more white space before the first key are never delayed, so that the time for each
# character does not grow with the white space.
_MAX_BLANKS = 64
_QUOTED_KEYS = tuple(f'"{key}"' for key in _WRAPPER_KEYS)


def may_be_wrapped(function: str, tools: Tools) -> bool:
    """Return whether a superfluous object may enclose the arguments of `function`.

    This is the case if the tool declares its arguments, and none of them has one of the names in
    `_WRAPPER_KEYS`. Example: `{"arguments": {"city": "x"}}` can only be an extra object if the only
    declared argument is `city`.
    """
    properties = tools.parameters.get(function, {}).get("properties")
    return isinstance(properties, Mapping) and not any(key in properties for key in _WRAPPER_KEYS)


def unwrap(arguments: str) -> str | None:
    r"""Return the JSON text inside the superfluous object, or None if there is no such object.

    Examples: `{"arguments": {"a": 1}}` and `{"input": "{\"a\": 1}"}` give `{"a": 1}`. The text
    `{"arguments": {"a": 1}, "b": 2}` gives None.
    """
    try:
        outer = loads(arguments)
        if not isinstance(outer, dict) or len(outer) != 1:
            return None
        [(key, inner)] = outer.items()
        if isinstance(inner, str):
            inner = loads(inner)
    except ValueError:
        return None
    if key not in _WRAPPER_KEYS or not isinstance(inner, dict):
        return None
    return json.dumps(inner, ensure_ascii=False)


class WrapperFilter:
    """Delays the JSON text of arguments as long as a superfluous object may enclose them.

    Example: the text `{"city": ` is passed on, because it starts with another key. The text
    `{"arguments": {"city": "x"}}` is stored until the arguments end.
    """

    __slots__ = ("_has_brace", "_is_wrapped", "_pieces", "is_passing")

    def __init__(self, is_passing: bool) -> None:
        """Create a filter for the arguments of one tool call.

        Args:
            is_passing: Whether all text is passed on unchanged.
        """
        self.is_passing = is_passing
        self._has_brace = False
        self._is_wrapped = False
        self._pieces: list[str] = []  # The delayed text.

    def add(self, text: str) -> str:
        """Add a piece of the arguments. Return the text that is no longer delayed.

        Example: for the pieces `{`, `"a`, `ge": ` and `3}`, the results are `{`, "", `"age": ` and
        `3}`.
        """
        if self.is_passing:
            return text
        self._pieces.append(text)
        if self._is_wrapped:
            return ""
        delayed = "".join(self._pieces)
        start = 0 if self._has_brace else _end_of_brace(delayed)
        key = delayed[max(start, 0) :].lstrip()
        key_start = len(delayed) - len(key)
        if key_start <= _MAX_BLANKS and (start < 0 or key.startswith(_QUOTED_KEYS)):
            self._is_wrapped = start >= 0
            return self._keep(delayed, max(start, 0))
        if key_start <= _MAX_BLANKS and any(name.startswith(key) for name in _QUOTED_KEYS):
            return self._keep(delayed, start)
        self.is_passing = True
        self._pieces = []
        return delayed

    def _keep(self, text: str, start: int) -> str:
        """Delay the text from `start` on, and return the text before `start`."""
        self._has_brace = self._has_brace or start > 0
        self._pieces = [text[start:]]
        return text[:start]

    def finish(self) -> tuple[str, bool]:
        """Return the delayed text, and whether a superfluous object was removed from this text."""
        text = "".join(self._pieces)
        inner = unwrap("{" + text) if self._is_wrapped else None
        return (text, False) if inner is None else (inner[1:], True)


def _end_of_brace(text: str) -> int:
    """Return the position after the opening brace of an object, or -1 if `text` is only blank.

    Examples: ` {"a"` gives 2. For text that is not an object, such as `[1]`, the result is 0.
    """
    start = text.lstrip()
    if not start:
        return -1
    return len(text) - len(start) + 1 if start.startswith("{") else 0
