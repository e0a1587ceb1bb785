"""Matches the markers after a tool call: closing markers, separators and the end of a section."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    looks_like_markup,
    match_marker,
)
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.tool_declarations import ToolSection


@dataclass(frozen=True, slots=True)
class ClosingMarker:
    """A closing marker of a tool call in the text.

    Attributes:
        end: The position after the marker.
        later_markers: The closing markers that may still follow.
    """

    end: int
    later_markers: tuple[str, ...]


def match_closing_marker(markers: tuple[str, ...], text: str, start: int) -> ClosingMarker | int:
    """Match one of the closing markers of a tool call at the position `start`.

    A model may omit any of the markers, but does not change their order. Example: with the markers
    `("</function>", "</tool_call>")`, the text `</function>` at position 0 gives
    `ClosingMarker(11, ("</tool_call>",))`, and `</tool_call>` gives `ClosingMarker(12, ())`.

    Returns:
        The marker, NEED_MORE or NO_MATCH. At the end of the text, the result is NEED_MORE, because
        a closing marker may still follow.
    """
    for index, marker in enumerate(markers):
        end = match_marker(marker, text, start)
        if end == NEED_MORE:
            return NEED_MORE
        if end != NO_MATCH:
            return ClosingMarker(end, later_markers=markers[index + 1 :])
    return NO_MATCH


class SectionMarkers:
    """The markers that may follow a tool call inside a tool section, or between two tool calls.

    Attributes:
        closes: The markers that close the tool section. Empty if the format has no such markers.
    """

    __slots__ = ("_separator", "closes")

    def __init__(self, tools: ToolSection | None) -> None:
        """Store the markers of `tools`. Without a declaration of tool calls, nothing matches."""
        self.closes = tools.closes if tools is not None else ()
        self._separator = tools.separator.strip() if tools is not None else ""

    def match_close(self, buffer: TextBuffer, *, is_empty: bool) -> int:
        """Match a closing marker of the tool section at the start of the unread text.

        Args:
            buffer: The buffer that contains the text.
            is_empty: Whether no tool call has started in the section. If the message ends with an
                incomplete marker in such a section, the result is NO_MATCH, because
                `CallReader.finish_empty_section` handles the text of such a section.

        Returns:
            The end of the marker, NEED_MORE or NO_MATCH.
        """
        may_wait = not (buffer.is_final and is_empty)
        for close in self.closes:
            match = match_marker(close, buffer.text, buffer.pos)
            if match >= 0:
                return match
            if match == NEED_MORE and may_wait:
                return NEED_MORE
        return NO_MATCH

    def match_separator(self, buffer: TextBuffer) -> int:
        """Match the separator between two tool calls at the start of the unread text.

        Example: with the separator `, `, the text `,{"name"` gives the position after the comma.

        Returns:
            The end of the separator, without its white space. NEED_MORE if the text ends inside the
            separator, or NO_MATCH.
        """
        separator = self._separator
        if not separator:
            return NO_MATCH
        if buffer.starts_with(separator):
            return buffer.pos + len(separator)
        if not buffer.is_prefix_of(separator):
            return NO_MATCH
        # At the end of the message, a tag such as `<sep` is an incomplete separator. Other text,
        # such as `,`, is more likely content.
        may_be_separator = not buffer.is_final or looks_like_markup(buffer.unread())
        return NEED_MORE if may_be_separator else NO_MATCH
