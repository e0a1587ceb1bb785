"""Matches the markers between and after tool calls: `</tool_call>`, `</tool_calls>` and `, `."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    looks_like_markup,
    match_marker,
    skip_superfluous,
    skip_whitespace,
)
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.tool_declarations import ToolSection


class NoMarker(Enum):
    """Describes unread text that does not start with a complete marker.

    INCOMPLETE  The unread text may be the start of a marker, such as `</tool_c`.
    CUT_OFF     The message has ended inside a marker, such as `</tool_c`. The caller removes this
                incomplete marker from the output.
    OTHER_TEXT  The unread text is not a marker.
    """

    INCOMPLETE = "incomplete"
    CUT_OFF = "cut_off"
    OTHER_TEXT = "other_text"


class ClosingMarker(NamedTuple):
    """A complete closing marker, such as `</tool_call>`, that has been found after a tool call.

    Attributes:
        end: The position after the marker.
        later_markers: The closing markers that may still follow, without the found marker.
    """

    end: int
    later_markers: tuple[str, ...]


def match_closing_marker(markers: tuple[str, ...], buffer: TextBuffer) -> ClosingMarker | NoMarker:
    """Match the closing markers of a tool call with the start of the unread text.

    The unread text follows the arguments of the tool call, or an earlier closing marker. A model
    may omit some of the `markers`, but keeps their order. A model may also write too many closing
    brackets before a marker. Examples with the markers `</function>` and `</tool_call>`:

        unread text       result
        `</function>`     ClosingMarker(end=11, later_markers=("</tool_call>",))
        `}</tool_call>`   ClosingMarker(end=13, later_markers=())
        `</func`          INCOMPLETE. At the end of the message: CUT_OFF
        `}`               INCOMPLETE. At the end of the message: OTHER_TEXT
        `Hello`           OTHER_TEXT
    """
    start = skip_whitespace(buffer.text, buffer.pos)
    match_at_start = _match_first_marker(markers, buffer, start)
    if match_at_start is not NoMarker.OTHER_TEXT:
        return match_at_start
    start_after_brackets = skip_superfluous(buffer.text, start)  # As in `}</tool_call>`.
    return _match_first_marker(markers, buffer, start_after_brackets)


def _match_first_marker(
    markers: tuple[str, ...], buffer: TextBuffer, start: int
) -> ClosingMarker | NoMarker:
    """Match the text at `start` with each of the `markers`, and return the first match.

    If a marker is incomplete, the later markers are not tried, because this marker takes precedence
    when more text completes it. Example: for the marker `</call>`, the text `</ca` gives
    INCOMPLETE, or CUT_OFF at the end of the message.
    """
    for index, marker in enumerate(markers):
        end = match_marker(marker, buffer.text, start)
        if isinstance(end, int):
            return ClosingMarker(end, later_markers=markers[index + 1 :])
        if end is NEED_MORE:
            return _kind_of_incomplete_marker(buffer, start)
    return NoMarker.OTHER_TEXT


def _kind_of_incomplete_marker(buffer: TextBuffer, start: int) -> NoMarker:
    """Classify the text from `start` on. It is a part of a marker, such as `</ca`, or is empty.

    Before the end of the message, the result is INCOMPLETE, because the rest may still arrive. At
    the end of the message, the result is CUT_OFF, or OTHER_TEXT if the text is empty.
    """
    if not buffer.is_final:
        return NoMarker.INCOMPLETE
    has_marker_started = start < len(buffer.text)
    return NoMarker.CUT_OFF if has_marker_started else NoMarker.OTHER_TEXT


def longest_marker_at_start(text: str, markers: list[str], *, is_final: bool) -> str | Mismatch:
    """Return the longest marker with which `text` starts. Return NO_MATCH if there is none.

    Return NEED_MORE if more text may follow (`is_final` is false), and could complete a longer
    marker. Examples for the markers `<a>` and `<a><b>`:

        text     result
        `<a>x`   `<a>`
        `<a><`   NEED_MORE, because the marker `<a><b>` may follow
        `x`      NO_MATCH
    """
    may_become_longer = any(len(text) < len(each) and each.startswith(text) for each in markers)
    if may_become_longer and not is_final:
        return NEED_MORE
    found = [marker for marker in markers if text.startswith(marker)]
    return max(found, key=len) if found else NO_MATCH


class CallSection:
    """The part of a message that contains all tool calls, as in `<calls>{..}, {..}</calls>`.

    The methods match the closing markers of the section, and the separator between two tool calls.
    Example: in `<calls>{..}, {..}</calls>`, the closing marker is `</calls>`, and the separator is
    `, `.

    Attributes:
        closes: The markers that close the tool section. Empty if the format has no such markers.
        is_open: Whether the opening marker of the section has been read, and no closing marker.
    """

    __slots__ = ("_separator", "closes", "is_open")

    def __init__(self, tools: ToolSection | None) -> None:
        """Store the closing markers and the separator, for example `</calls>` and `, `.

        If `tools` is None, the format declares no tool calls, so no text matches.
        """
        self.is_open = False
        self.closes = tools.closes if tools is not None else ()
        self._separator = tools.separator.strip() if tools is not None else ""

    def match_close(self, buffer: TextBuffer, *, follows_call: bool) -> int | NoMarker:
        """Find the end of the marker after all tool calls, such as `</calls>`, in the unread text.

        `follows_call` is true if a tool call precedes the text. Examples for the marker `</calls>`:

            unread text   result
            `</calls>Hi`  the position of `Hi`
            `</ca`        INCOMPLETE. At the end of the message: CUT_OFF after a tool call,
                          otherwise OTHER_TEXT
            `Hi`          OTHER_TEXT
        """
        # If the message `<calls></ca` ends here, `</ca` is content, like any other text.
        is_incomplete_content = buffer.is_final and not follows_call
        for close in self.closes:  # The format's alternative markers, in the order of precedence.
            end = match_marker(close, buffer.text, buffer.pos)
            if isinstance(end, int):
                return end
            if end is NEED_MORE and not is_incomplete_content:
                return _kind_of_incomplete_marker(buffer, buffer.pos)
        return NoMarker.OTHER_TEXT

    def match_separator(self, buffer: TextBuffer) -> int | NoMarker:
        """Find the end of the separator between tool calls, such as `, `, in the unread text.

        The unread text starts with the separator or with other text. White space before and after
        the separator is ignored. Examples:

            separator   unread text   result
            `, `        `,{"name"`    the position of `{`
            `, `        `Hi`          OTHER_TEXT
            `<sep>`     `<se`         INCOMPLETE. At the end of the message: CUT_OFF
            `and`       `an`          INCOMPLETE. At the end of the message: OTHER_TEXT, because
                                      the text is not a tag, so it may be content
        """
        separator = self._separator  # Without the white space around the separator.
        if not separator:
            return NoMarker.OTHER_TEXT
        if buffer.starts_with(separator):
            return buffer.pos + len(separator)
        if not buffer.is_prefix_of(separator):
            return NoMarker.OTHER_TEXT
        if not buffer.is_final:
            return NoMarker.INCOMPLETE
        is_tag = looks_like_markup(buffer.unread())  # An incomplete tag, such as `<se`.
        return NoMarker.CUT_OFF if is_tag else NoMarker.OTHER_TEXT
