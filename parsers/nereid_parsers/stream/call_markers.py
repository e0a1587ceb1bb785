"""Matches the markers after a tool call: closing markers, separators and the end of a section."""

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
    """A closing marker of a tool call that was found in the text.

    Attributes:
        end: The position after the marker.
        later_markers: The closing markers that may still follow.
    """

    end: int
    later_markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IncompleteMarker:
    """The beginning of a closing marker at the end of the text. More text may complete the marker.

    Attributes:
        start: The position at which the marker starts. If no character of the marker has arrived,
            this is the end of the text.
    """

    start: int


def match_closing_marker(
    markers: tuple[str, ...], text: str, pos: int
) -> ClosingMarker | IncompleteMarker | None:
    """Match one of the closing markers of a tool call. Return None if no marker matches.

    White space and superfluous brackets may precede the marker. A model may omit any of the
    markers, but does not change their order. Examples with the markers `</function>` and
    `</tool_call>`:

        text              result
        `</function>`     ClosingMarker(end=11, later_markers=("</tool_call>",))
        `}</tool_call>`   ClosingMarker(end=13, later_markers=())
        ` </func`         IncompleteMarker(start=1)
        `Hello`           None

    Args:
        markers: The closing markers, in the order in which the model writes them.
        text: The text.
        pos: The position after the body of the tool call, or after the last closing marker.
    """
    start = skip_whitespace(text, pos)
    match = _match_first_marker(markers, text, start)
    if match is not None:
        return match
    start_after_brackets = skip_superfluous(text, start)
    return _match_first_marker(markers, text, start_after_brackets)


def _match_first_marker(
    markers: tuple[str, ...], text: str, pos: int
) -> ClosingMarker | IncompleteMarker | None:
    """Return the match of the first of the markers that matches at `pos`, or None.

    The text between `pos` and the end of the text may also be the beginning of a marker.
    """
    for index, marker in enumerate(markers):
        end = match_marker(marker, text, pos)
        if end == NEED_MORE:
            return IncompleteMarker(pos)
        if end != NO_MATCH:
            return ClosingMarker(end, later_markers=markers[index + 1 :])
    return None


class SectionMarkers:
    """Matches the closing markers of a tool section, and the separator between its tool calls.

    Attributes:
        closes: The markers that close the tool section. Empty if the format has no such markers.
    """

    __slots__ = ("_separator", "closes")

    def __init__(self, tools: ToolSection | None) -> None:
        """Store the markers of `tools`. If `tools` is None, no marker matches."""
        self.closes = tools.closes if tools is not None else ()
        self._separator = tools.separator.strip() if tools is not None else ""

    def match_close(self, buffer: TextBuffer, *, is_empty: bool) -> int:
        """Match a marker that closes the tool section. The unread text must start with the marker.

        A tool section is the part of a message that contains all tool calls. Example: the text
        `</tool_calls>` gives the position after the marker, and `</tool_c` gives NEED_MORE.

        Args:
            buffer: The buffer that contains the text.
            is_empty: Whether no tool call has started in the section. If the message ends with an
                incomplete marker in such a section, the result is NO_MATCH, because
                `CallReader.finish_empty_section` handles the text of such a section.

        Returns:
            The end of the marker, NEED_MORE or NO_MATCH.
        """
        ignores_incomplete = is_empty and buffer.is_final
        for close in self.closes:
            end = match_marker(close, buffer.text, buffer.pos)
            is_ignored = end == NEED_MORE and ignores_incomplete
            if end != NO_MATCH and not is_ignored:
                return end
        return NO_MATCH

    def match_separator(self, buffer: TextBuffer) -> int:
        """Match the separator between tool calls. The unread text must start with the separator.

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
        if not buffer.is_final:
            return NEED_MORE
        # At the end of the message, a tag such as `<sep` is an incomplete separator. Other text,
        # such as `,`, is more likely content.
        return NEED_MORE if looks_like_markup(buffer.unread()) else NO_MATCH
