"""Removes a superfluous object around arguments: `{"arguments": {"a": 1}}` becomes `{"a": 1}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from nereid_parsers.stream.values.argument_types import Tools, loads

_WRAPPER_KEYS = ("arguments", "parameters", "properties", "input")
# The maximum number of white-space characters before the first key. If there are more, the filter
# no longer searches for the key, and returns all text. Without this limit, the parsing time would
# not be linear, because the search starts again with each new piece of text.
_MAX_WHITESPACE_CHARS = 64
_QUOTED_KEYS = tuple(f'"{key}"' for key in _WRAPPER_KEYS)


def may_be_wrapped(function: str, tools: Tools) -> bool:
    """Return whether the arguments of `function` may be inside a superfluous outer object.

    This is the case if the tool declares its arguments, and no argument has a name that is in
    `_WRAPPER_KEYS`. Example: if the tool declares only the argument `city`, the outer object in
    `{"arguments": {"city": "x"}}` is superfluous.
    """
    properties = tools.parameters.get(function, {}).get("properties")
    return isinstance(properties, Mapping) and not any(key in properties for key in _WRAPPER_KEYS)


def unwrap(arguments: str) -> str | None:
    r"""Return the arguments without a superfluous outer object, or None if there is no such object.

    Some models write the arguments as the only member of another object. The key of this member is
    one of `_WRAPPER_KEYS`, and its value is an object or the JSON text of an object.

    Examples: `{"arguments": {"a": 1}}` and `{"input": "{\"a\": 1}"}` give `{"a": 1}`. The text
    `{"arguments": {"a": 1}, "b": 2}` gives None.
    """
    outer = _parse_json(arguments)
    if not isinstance(outer, dict) or len(outer) != 1:
        return None
    key, value = outer.popitem()  # The object has only one member.
    if key not in _WRAPPER_KEYS:
        return None
    inner = _parse_json(value) if isinstance(value, str) else value
    return json.dumps(inner, ensure_ascii=False) if isinstance(inner, dict) else None


def _parse_json(text: str) -> object:
    """Parse JSON text. Return None if `text` is not JSON."""
    try:
        return loads(text)
    except ValueError:
        return None


class _WaitsFor(Enum):
    """The part of the arguments for which a `WrapperFilter` waits.

    OPENING_BRACE  The opening brace has not arrived.
    FIRST_KEY      The brace has been passed on. The first key is not complete.
    END            The first key may belong to a superfluous object. All later text is stored until
                   the arguments end.
    """

    OPENING_BRACE = "opening_brace"
    FIRST_KEY = "first_key"
    END = "end"


class StoredText(NamedTuple):
    """The text that a `WrapperFilter` still stores when the arguments end.

    Attributes:
        text: The text, without the superfluous object around the arguments.
        is_unwrapped: Whether a superfluous object was removed.
    """

    text: str
    is_unwrapped: bool


class WrapperFilter:
    """Removes a superfluous object around arguments: `{"arguments": {"a": 1}}` becomes `{"a": 1}`.

    Example: the text `{"city": ` is passed on, because it starts with another key. The text
    `{"arguments": {"city": "x"}}` is stored until the arguments end.

    Attributes:
        is_passing: Whether `add` returns all text unchanged from now on.
    """

    __slots__ = ("_stored_text", "_waits_for", "is_passing")

    def __init__(self, is_passing: bool) -> None:
        """Create a filter for the arguments of one tool call.

        Args:
            is_passing: Whether `add` returns all text unchanged.
        """
        self.is_passing = is_passing
        self._waits_for = _WaitsFor.OPENING_BRACE
        self._stored_text: list[str] = []

    def add(self, text: str) -> str:
        """Filter the next piece of the arguments. Return the text that the filter need not store.

        A superfluous object may enclose the arguments, as in `{"arguments": {"age": 3}}`. The
        filter stores the text until the first key shows that there is no such object.

        Example: for the pieces `{`, `"a`, `ge": ` and `3}`, the results are `{`, "", `"age": ` and
        `3}`. The piece `"a` was stored, because it could become the key `"arguments"`.

        Mutates: `_waits_for` and `_stored_text`. `_read_brace` and `_read_key` set the next state,
            and remove the text that they return from `_stored_text`.
        """
        if self.is_passing:  # The arguments have no superfluous object.
            return text
        self._stored_text.append(text)
        if self._waits_for is _WaitsFor.END:  # The first key was `"arguments"`.
            return ""
        stored_text = "".join(self._stored_text)
        if self._waits_for is _WaitsFor.OPENING_BRACE:
            return self._read_brace(stored_text)
        return self._read_key(stored_text)  # `_waits_for` is FIRST_KEY.

    def _read_brace(self, text: str) -> str:
        """Read the opening brace of the arguments. Return the text that the filter need not store.

        The filter removes a superfluous object, as in `{"arguments": {"a": 1}}`. Examples:

            text                result
            white space         "", because the brace may follow
            much white space    the white space. All later text is passed on, too.
            `{"a`               `{`. `"a` stays stored, because it may become the key `"arguments"`
                                of a superfluous object.
            `[`                 `[`, because no object starts. All later text is passed on, too.

        Args:
            text: All text that has arrived. It may start with white space.

        Mutates: `_waits_for`. After the brace, the filter waits for the first key.
        """
        visible = text.lstrip()
        if not visible and len(text) <= _MAX_WHITESPACE_CHARS:
            return ""
        if not visible.startswith("{"):
            return self._stop_filtering(text)
        self._waits_for = _WaitsFor.FIRST_KEY
        whitespace, brace, after_brace = text.partition("{")
        # The text after the brace may contain the first key. `_read_key` returns this text, or ""
        # if the text must be stored for later.
        text_from_key = self._read_key(after_brace)
        return whitespace + brace + text_from_key

    def _read_key(self, text: str) -> str:
        """Read the first key of the arguments. Return `text`, or "" if the text must be stored.

        If the first key is `"arguments"` or a similar word, a superfluous object may enclose the
        arguments. The text is then stored. Examples:

            text            result
            `"arg`          "", because more text may complete the key `"arguments"`
            `"arguments"`   "". Later text is stored, too, until the arguments end.
            `"age`          `"age`. All later text is passed on, too.

        Args:
            text: All text that has arrived after the opening brace.

        Mutates: `_stored_text` and `_waits_for`. `_stop_filtering(text)` deletes the stored text,
            and returns `text`.
        """
        key_start = text.lstrip()
        num_whitespace_chars = len(text) - len(key_start)
        if num_whitespace_chars > _MAX_WHITESPACE_CHARS:
            # Whenever a new piece arrives, this method reads all stored text again. Therefore, the
            # amount of stored white space is limited. Otherwise, the parsing time could become
            # quadratic.
            return self._stop_filtering(text)
        self._stored_text = [text]  # `text` contains all earlier pieces after the brace.
        is_wrapper_key = key_start.startswith(_QUOTED_KEYS)
        if is_wrapper_key:
            self._waits_for = _WaitsFor.END
            return ""
        may_become_wrapper_key = any(
            quoted_key.startswith(key_start) for quoted_key in _QUOTED_KEYS
        )
        if may_become_wrapper_key:
            return ""
        return self._stop_filtering(text)

    def _stop_filtering(self, text: str) -> str:
        """End the filtering, so that `add` returns all later text unchanged. Return `text`.

        `text` is all text that is still stored. The filter deletes its copy of this text.
        """
        self.is_passing = True
        self._stored_text = []
        return text

    def finish(self) -> StoredText:
        """At the end of the arguments, return the stored text. Remove the wrapper, if there is one.

        A wrapper is a superfluous object around the arguments. The opening brace of the arguments
        has already been passed on, so the result does not contain this brace. Examples:

            whole arguments              stored text                 result
            `{"arguments": {"a": 1}}`    `"arguments": {"a": 1}}`    `"a": 1}`
            `{"arguments": 1, "b": 2}`   `"arguments": 1, "b": 2}`   the stored text
        """
        stored_text = "".join(self._stored_text)
        starts_like_wrapper = self._waits_for is _WaitsFor.END
        inner_object = unwrap("{" + stored_text) if starts_like_wrapper else None
        if inner_object is None:
            return StoredText(stored_text, is_unwrapped=False)
        return StoredText(inner_object.removeprefix("{"), is_unwrapped=True)
