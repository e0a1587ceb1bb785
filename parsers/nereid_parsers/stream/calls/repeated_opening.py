"""Finds an opening marker that the model has repeated before a tool call: `<call><call>f()`."""

from __future__ import annotations

from collections.abc import Mapping

from nereid_parsers.stream.calls.call_markers import longest_marker_at_start
from nereid_parsers.stream.calls.expected_call import ExpectedCall
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import (
    MAX_HEAD_CHARS,
    NO_MATCH,
    Mismatch,
    skip_whitespace,
)
from nereid_parsers.stream.text_buffer import TextBuffer

_OPENING_KINDS = (MarkerKind.OPEN_CALL, MarkerKind.OPEN_SECTION)


def find_repeated_opening(
    expected: ExpectedCall, buffer: TextBuffer, kinds: Mapping[str, MarkerKind], num_read_chars: int
) -> str | Mismatch:
    """Return the opening marker that follows another opening marker, as in `<call><call>`.

    Instead of a tool call, the model has written a second marker. White space between the two
    markers is skipped. Examples for the marker `<call>`:

        unread text      result
        `<call><call>`   `<call>`, the second marker
        `<call><ca`      NEED_MORE, or NO_MATCH at the end of the message
        `<call> is`      NO_MATCH

    Args:
        expected: The tool call that does not start in the unread text.
        buffer: The text of the message.
        kinds: The kind of each marker of the format.
        num_read_chars: The number of characters of the repeated markers that have been read.
    """
    if not _starts_with_marker(expected, kinds):
        return NO_MATCH
    next_start = position_after_opening(expected, buffer)
    num_unread_chars = next_start - buffer.pos
    if num_read_chars + num_unread_chars > MAX_HEAD_CHARS:
        # Without this limit, a model that repeats the marker forever would make the stored text
        # grow without end.
        return NO_MATCH
    next_text = buffer.text[next_start : next_start + MAX_HEAD_CHARS]
    openings = [marker for marker, kind in kinds.items() if kind in _OPENING_KINDS]
    return longest_marker_at_start(next_text, openings, is_final=buffer.is_final)


def position_after_opening(expected: ExpectedCall, buffer: TextBuffer) -> int:
    """Return the position after the unread opening marker and the white space after the marker.

    If the opening marker has already been read, only white space is skipped.
    """
    return skip_whitespace(buffer.text, buffer.pos + len(expected.unread_opening))


def _starts_with_marker(expected: ExpectedCall, kinds: Mapping[str, MarkerKind]) -> bool:
    """Return whether the expected tool call starts with a marker, which a model may repeat.

    A tool call without a marker starts with `{` or `<function=`, which models do not repeat.
    """
    opening = expected.unread_opening
    is_marker_read = not opening
    return is_marker_read or kinds.get(opening) is MarkerKind.OPEN_CALL
