"""Matches the markers after a tool call, such as `</tool_call>`, `</tool_calls>` and `, `."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ClosingMarker:
    """A closing marker, such as `</tool_call>`, that has been found after a tool call.

    Attributes:
        end: The position after the marker.
        later_markers: The closing markers that may still follow.
    """

    end: int
    later_markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IncompleteMarker:
    """An incomplete closing marker, such as `</tool_c`, at the end of the text.

    Attributes:
        prefix: The characters of the marker that have arrived, for example `</func`. "" if the text
            ends directly before the place at which the marker may start.
    """

    prefix: str


def match_closing_marker(
    markers: tuple[str, ...], text: str, pos: int
) -> ClosingMarker | IncompleteMarker | None:
    """Match one of the `markers` that close a tool call. If none of them matches, return None.

    The text at `pos` follows the arguments of the tool call. White space and superfluous brackets
    may precede the marker. A model may omit any of the markers, but the model does not change the
    order of the markers. Examples with the markers `</function>` and `</tool_call>`:

        text              result
        `</function>`     ClosingMarker(end=11, later_markers=("</tool_call>",))
        `}</tool_call>`   ClosingMarker(end=13, later_markers=())
        ` </func`         IncompleteMarker(prefix="</func")
        ` `               IncompleteMarker(prefix=""), because a marker may follow the space
        `Hello`           None

    `pos` is the position after the body of the tool call, or after the last closing marker.
    """
    start = skip_whitespace(text, pos)
    match = _match_first_marker(markers, text, start)
    if match is None:
        start_after_brackets = skip_superfluous(text, start)  # As in `}</tool_call>`.
        match = _match_first_marker(markers, text, start_after_brackets)
    return match


def _match_first_marker(
    markers: tuple[str, ...], text: str, pos: int
) -> ClosingMarker | IncompleteMarker | None:
    """Match the text at `pos` with each of the `markers`, and return the first match, or None."""
    for index, marker in enumerate(markers):
        end = match_marker(marker, text, pos)
        if end == NEED_MORE:
            # More text may complete this marker. The later markers are not tried yet, because this
            # marker takes precedence.
            return IncompleteMarker(text[pos:])
        if end != NO_MATCH:
            return ClosingMarker(end, later_markers=markers[index + 1 :])
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

        Args:
            buffer: The buffer that contains the text.
            is_empty: Whether no tool call precedes the marker, as in `<calls></ca`.

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
