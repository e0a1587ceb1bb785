"""Compiles and matches the patterns of message headers such as `<|channel|>final<|message|>`."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.declarations import Messages, Route, Stage
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.compiled.compiled_call import CompiledCall, match_limited_head
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
    compile_pattern,
    skip_whitespace,
)


class _HeaderPattern(NamedTuple):
    """The pattern of a header, and the white space that must follow the pattern.

    Attributes:
        pattern: The compiled pattern. It accepts any amount of white space between its parts.
        whitespace: The exact white space that ends the header, for example a line break. "" if a
            marker ends the header, because the pattern then contains this marker.
    """

    pattern: Pattern
    whitespace: str


def _compile_header_pattern(header: str, header_end: str) -> _HeaderPattern:
    r"""Compile the pattern `header`, such as `<|channel|>final`, and the text that ends the header.

    Examples for the header `all`:

        `header_end`    pattern          white space
        `<|message|>`   `all<|message|>` ""
        `\n`            `all`            `\n`
        ""              `all`            ""
    """
    if header_end.strip():  # The header ends with a marker.
        return _HeaderPattern(compile_pattern(header + header_end), whitespace="")
    # In a pattern, a line break matches any white space. A pattern with this line break would match
    # the space in `all Hi`, too. Therefore, the white space is not a part of the pattern, and is
    # compared separately.
    return _HeaderPattern(compile_pattern(header), whitespace=header_end)


class CompiledHeader:
    """The compiled pattern of a message header, such as `<|channel|>final<|message|>`.

    Attributes:
        stage: The part of the message that the body is: reasoning, content or a tool call.
        has_calls: Whether the body may contain tool calls.
    """

    def __init__(self, route: Route, layout: Messages, message_call: CompiledCall) -> None:
        r"""Compile `route`, which describes a message header such as `<|channel|>final`.

        `layout.header_end` is the text that ends each header: a marker such as `<|message|>`, or
        white space such as the line break in `>>>all\nHello`, or "". `message_call` tests whether
        arguments follow the header of a tool call.
        """
        self.stage = route.stage
        self.has_calls = route.has_calls  # Whether the content may contain tool calls.
        self._message_call = message_call
        # The first fixed text of the header, such as `<|channel|>`. If the output ends inside a
        # header, this text distinguishes the incomplete header from content.
        self._first_literal = first_literal(route.header)
        self._header = _compile_header_pattern(route.header, layout.header_end)

    def has_started(self, text: str, pos: int) -> bool:
        """Return whether the text at `pos` starts with the header's first literal (`<|channel|>`).

        If the message ends inside a header, the caller uses the result to distinguish the header
        from content. Example: the header `<|channel|>{word}<|message|>` starts with the literal
        `<|channel|>`, so the result is True for `<|channel|>fin`.
        """
        pos = skip_whitespace(text, pos)
        return bool(self._first_literal) and text.startswith(self._first_literal, pos)

    def match(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Match the header of a message, such as `<|channel|>final<|message|>`, at `pos`.

        The header of a tool call matches only if the arguments start after the header. A header has
        a limited length, see `match_limited_head`. Examples:

            text                                     result
            `<|channel|>final<|message|>Hi`          `Head(end=27)`
            `<|channel|>final`                       NEED_MORE, because `<|message|>` may follow
            `to=sum<|message|>{`, for a tool call    `Head(end=17, name="sum")`
            `to=sum<|message|>Hi`, for a tool call   NO_MATCH, because arguments start with `{`

        Return the matched header, NEED_MORE or NO_MATCH.
        """
        return match_limited_head(self._match_head, text, pos, is_final)

    def _match_head(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        r"""Match a header of any length at `pos`. Return the matched header, NEED_MORE or NO_MATCH.

        A header consists of a text that matches the pattern, and of the required white space, for
        example `\n` in `>>>all\nHi`. If the header belongs to a tool call, arguments must follow.
        """
        pattern, whitespace = self._header
        # White space before the header is skipped, unless white space must end the header. Example:
        # in `>>>\nHello`, the line break ends an empty header. If the line break were skipped,
        # `Hello` would be read as the header.
        start = pos if whitespace else skip_whitespace(text, pos)
        match = pattern.match(text, start, is_final)
        if not isinstance(match, PatternMatch):
            return match
        head_end = match.end + len(whitespace)
        whitespace_mismatch = self._whitespace_mismatch(text, match.end, is_final)
        if whitespace_mismatch is not None:
            return whitespace_mismatch
        body_mismatch = self._body_mismatch(text, head_end, is_final)
        if body_mismatch is not None:
            return body_mismatch
        fields = match.fields
        return Head(head_end, name=fields.get("name", ""), call_id=fields.get("id", ""))

    def _whitespace_mismatch(self, text: str, pos: int, is_final: bool) -> Mismatch | None:
        r"""Return None if the white space that ends the header starts at `pos`.

        Otherwise return NEED_MORE or NO_MATCH. Examples for the white space `\n` after `all`:
        `all\n` gives None, `all` gives NEED_MORE, and `all Hi` gives NO_MATCH. If `is_final` shows
        that no more text follows, `all` gives NO_MATCH.
        """
        whitespace = self._header.whitespace
        if text.startswith(whitespace, pos):
            return None
        may_follow = not is_final and whitespace.startswith(text[pos:])
        return NEED_MORE if may_follow else NO_MATCH

    def _body_mismatch(self, text: str, pos: int, is_final: bool) -> Mismatch | None:
        """Return None if the text at `pos` can be the body of the message.

        Reasoning and content can be any text. The body of a tool call must start with arguments,
        such as `{`. If arguments cannot start at `pos`, return NO_MATCH. If more text is required
        to decide, return NEED_MORE.
        """
        if self.stage is not Stage.CALLS:
            return None
        return self._message_call.body_start_mismatch(text, pos, is_final)
