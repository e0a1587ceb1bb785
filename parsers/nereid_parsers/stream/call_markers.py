"""Matches the markers after a tool call, such as `</tool_call>`, `</tool_calls>` and `, `."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    looks_like_markup,
    match_marker,
    skip_superfluous,
    skip_whitespace,
)
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.tool_declarations import ToolSection


class ClosingMarker(NamedTuple):
    """A closing marker, such as `</tool_call>`, that has been found after a tool call.

    Attributes:
        start: The position at which the marker starts. It is the end of the text if no character of
            the marker has arrived.
        end: The position after the marker, or NEED_MORE if the marker is incomplete.
        later_markers: The closing markers that may still follow.
    """

    start: int
    end: int
    later_markers: tuple[str, ...]


def match_closing_marker(markers: tuple[str, ...], text: str, pos: int) -> ClosingMarker | None:
    """Match one of the `markers` that close a tool call. If none of them matches, return None.

    The text at `pos` follows the arguments of the tool call. White space and superfluous brackets
    may precede the marker. A model may omit any of the markers, but the model does not change the
    order of the markers. Examples with the markers `</function>` and `</tool_call>`:

        text              result
        `</function>`     ClosingMarker(start=0, end=11, later_markers=("</tool_call>",))
        `}</tool_call>`   ClosingMarker(start=1, end=13, later_markers=())
        ` </func`         ClosingMarker(start=1, end=NEED_MORE, later_markers=("</tool_call>",))
        `}`               ClosingMarker(start=1, end=NEED_MORE, ..): a marker may follow the brace
        `Hello`           None

    `pos` is the position after the body of the tool call, or after the last closing marker.
    """
    start = skip_whitespace(text, pos)
    match = _match_first_marker(markers, text, start)
    if match is None:
        start_after_brackets = skip_superfluous(text, start)  # As in `}</tool_call>`.
        match = _match_first_marker(markers, text, start_after_brackets)
    return match


def _match_first_marker(markers: tuple[str, ...], text: str, pos: int) -> ClosingMarker | None:
    """Match the text at `pos` with each of the `markers`, and return the first match, or None.

    If a marker is incomplete, the later markers are not tried, because this marker takes precedence
    when more text completes it.
    """
    for index, marker in enumerate(markers):
        end = match_marker(marker, text, pos)
        if end != NO_MATCH:
            return ClosingMarker(pos, end, later_markers=markers[index + 1 :])
    return None


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

    def match_close(self, buffer: TextBuffer, *, is_empty: bool) -> int:
        """Test whether the unread text starts with the marker after all tool calls (`</calls>`).

        Examples for the marker `</calls>`: the unread text `</calls>Hi` gives the position of `Hi`,
        `</ca` gives NEED_MORE, and `Hi` gives NO_MATCH.

        `is_empty` is true if no tool call precedes the marker, as in `<calls></ca`.

        Returns:
            The position after the marker, NEED_MORE or NO_MATCH. If the message has ended, and the
            result is NEED_MORE, the caller removes the incomplete marker from the output.
        """
        # The text `<calls></ca` may be content, because it contains no tool call. At the end of the
        # message, `</ca` is therefore not treated as an incomplete marker.
        is_empty_message = is_empty and buffer.is_final
        for close in self.closes:  # The spellings of the marker.
            end = match_marker(close, buffer.text, buffer.pos)
            if end >= 0:  # The marker is complete.
                return end
            if end == NEED_MORE and not is_empty_message:
                return NEED_MORE
        return NO_MATCH

    def match_separator(self, buffer: TextBuffer) -> int:
        """Test whether the unread text starts with the separator between tool calls, such as `, `.

        White space before and after the separator is not compared. Examples:

            separator   unread text   result
            `, `        `,{"name"`    the position of `{`
            `, `        `Hi`          NO_MATCH
            `<sep>`     `<se`         NEED_MORE. At the end of the message also NEED_MORE, because
                                      the incomplete tag cannot be content.
            `and`       `an`          NEED_MORE. At the end of the message NO_MATCH, because the
                                      text may be content.

        Returns:
            The position after the separator, NEED_MORE or NO_MATCH.
        """
        separator = self._separator  # Without the white space around the separator.
        if not separator:
            return NO_MATCH
        if buffer.starts_with(separator):
            return buffer.pos + len(separator)
        if not buffer.is_prefix_of(separator):
            return NO_MATCH
        # The unread text is an incomplete separator, such as `<se` or `an`.
        may_be_content = buffer.is_final and not looks_like_markup(buffer.unread())
        return NO_MATCH if may_be_content else NEED_MORE
