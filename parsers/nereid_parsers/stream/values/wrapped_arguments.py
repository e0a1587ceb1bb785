"""Removes a superfluous object around arguments: `{"arguments": {"a": 1}}` becomes `{"a": 1}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum

from nereid_parsers.stream.values.argument_types import Tools
from nereid_parsers.stream.values.json_text import escape_surrogates, loads

_WRAPPER_KEYS = ("arguments", "parameters", "properties", "input")
# The maximum number of white-space characters before the first key. After more white space, the
# filter returns all text, because the search for the key starts again with each piece of text.
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
    if not isinstance(inner, dict):
        return None
    return escape_surrogates(json.dumps(inner, ensure_ascii=False))


def _parse_json(text: str) -> object:
    """Parse JSON text. Return None if `text` is not JSON."""
    try:
        return loads(text)
    except ValueError:
        return None


class _Position(Enum):
    """The position in the arguments up to which a `WrapperFilter` has read.

    BEFORE_BRACE       The opening brace has not arrived.
    IN_FIRST_KEY       The brace has been passed on. The first key is not complete.
    INSIDE_WRAPPER     The first key is `"arguments"` or a similar word, so the object is probably
                       superfluous. All later text is stored until the arguments end.
    NO_WRAPPER         The first key is any other key. All text is passed on.
    """

    BEFORE_BRACE = "before_brace"
    IN_FIRST_KEY = "in_first_key"
    INSIDE_WRAPPER = "inside_wrapper"
    NO_WRAPPER = "no_wrapper"


class WrapperFilter:
    """Removes a superfluous object around arguments: `{"arguments": {"a": 1}}` becomes `{"a": 1}`.

    Example: the text `{"city": ` is passed on, because it starts with another key. The text
    `{"arguments": {"city": "x"}}` is stored until the arguments end.

    Attributes:
        is_passing: Whether `add` returns all text unchanged from now on.
        is_unwrapped: Whether `finish` has removed a superfluous object.
    """

    __slots__ = ("_position", "_stored_parts", "is_passing", "is_unwrapped")

    def __init__(self, is_passing: bool) -> None:
        """Create a filter for the arguments of one tool call.

        If `is_passing` is true, `add` returns all text unchanged.
        """
        self.is_passing = is_passing
        self.is_unwrapped = False
        self._position = _Position.BEFORE_BRACE
        self._stored_parts: list[str] = []  # The text that `add` has not returned.

    def add(self, text: str) -> str:
        """Add the next piece of the arguments. Return the text that can be passed on.

        The filter stores the text until the first key shows whether an object such as
        `{"arguments": {"age": 3}}` encloses the arguments. Examples:

            pieces                             results
            `{`, `"a`, `ge": `, `3}`           `{`, "", `"age": `, `3}`: the piece `"a` was stored,
                                               because it could become the key `"arguments"`
            `{`, `"arguments": `, `{"age": `   `{`, "", "": the text is stored until `finish`
        """
        if self.is_passing:  # The arguments have no superfluous object.
            return text
        self._stored_parts.append(text)
        if self._position is _Position.INSIDE_WRAPPER:
            return ""
        # Both methods below remove the text that they return from `_stored_parts`. The stored text
        # is short, because the first key is not complete.
        stored_text = "".join(self._stored_parts)
        if self._position is _Position.BEFORE_BRACE:
            return self._filter_brace(stored_text)
        return self._filter_key(stored_text)

    def _filter_brace(self, text: str) -> str:
        """Read the opening brace of the arguments. Return the text that can be passed on.

        Examples of `text`, which is all text that has arrived:

            `[`      `[` and all later text are passed on, because no object starts.
            ` `      Nothing is passed on, because the brace may follow.
            `{"a`    `{` is passed on. `"a` is stored, because it may become `"arguments"`.
        """
        before_brace, brace, after_brace = text.partition("{")
        if before_brace.strip():
            return self._pass_all(text)
        if brace:
            self._position = _Position.IN_FIRST_KEY
            return before_brace + brace + self._filter_key(after_brace)
        if len(text) > _MAX_WHITESPACE_CHARS:
            return self._pass_all(text)
        return ""

    def _filter_key(self, text: str) -> str:
        """Return `text` if it can be passed on. Otherwise store `text`, and return "".

        `text` is all text that has arrived after the opening brace. The first key decides: `"age`
        is returned, but `"arg` is stored, because it may become the key `"arguments"`.
        """
        self._position = _position_after_brace(text)
        if self._position is _Position.NO_WRAPPER:
            return self._pass_all(text)
        self._stored_parts = [text]  # Without the brace, which has been passed on.
        return ""

    def _pass_all(self, text: str) -> str:
        """Stop filtering: return `text`, and let `add` return all later text unchanged."""
        self.is_passing = True
        self._stored_parts = []
        return text

    def finish(self) -> str:
        """Return the stored text at the end of the arguments, without a superfluous outer object.

        `add` has already returned the opening brace of the arguments, so the stored text and the
        result start after this brace. Examples:

            stored text                 result
            `"arguments": {"a": 1}}`    `"a": 1}`, because the outer object is superfluous
            `"arguments": 1, "b": 2}`   the stored text, because the outer object has two members

        If the outer object is removed, `is_unwrapped` becomes True.
        """
        stored_text = "".join(self._stored_parts)
        if self._position is not _Position.INSIDE_WRAPPER:
            return stored_text
        inner_members = _unwrap_members(stored_text)
        if inner_members is None:
            return stored_text
        self.is_unwrapped = True
        return inner_members


def _position_after_brace(text: str) -> _Position:
    """Return the position that a filter has reached. `text` is all text after the opening brace.

    Examples: `"arg` gives IN_FIRST_KEY, because it may become the key `"arguments"`. `"arguments"`
    gives INSIDE_WRAPPER, and `"age` gives NO_WRAPPER.
    """
    key = text.lstrip()
    num_whitespace_chars = len(text) - len(key)
    if num_whitespace_chars > _MAX_WHITESPACE_CHARS:
        return _Position.NO_WRAPPER
    if key.startswith(_QUOTED_KEYS):
        return _Position.INSIDE_WRAPPER
    may_become_wrapper = any(quoted_key.startswith(key) for quoted_key in _QUOTED_KEYS)
    return _Position.IN_FIRST_KEY if may_become_wrapper else _Position.NO_WRAPPER


def _unwrap_members(members: str) -> str | None:
    """Return the members of the inner object if `members` belong to a superfluous outer object.

    Both texts start after the opening brace and end with the closing brace. Example:
    `"arguments": {"a": 1}}` gives `"a": 1}`. Return None if no outer object is superfluous.
    """
    inner_object = unwrap("{" + members)
    return None if inner_object is None else inner_object.removeprefix("{")
