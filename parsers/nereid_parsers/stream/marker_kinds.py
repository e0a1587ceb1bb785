"""Defines the meanings of markers, and maps each spelling of a marker to its meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from nereid_parsers.stream.pattern_matching import marker_spellings


class MarkerKind(Enum):
    """The meaning of a marker. A marker is a fixed text of the format, for example `<think>`.

    OPEN_REASONING    The reasoning starts.
    CLOSE_REASONING   The reasoning ends.
    INTERRUPT         A tool call starts inside the reasoning, and ends the reasoning.
    OPEN_SECTION      A section of tool calls starts.
    OPEN_CALL         A tool call starts.
    CALL_HEAD         The header of a tool call starts, and its opening marker is missing.
    UNMARKED_CALL     A tool call without a marker starts with this text.
    CLOSE_CALLS       A tool call or a section of tool calls ends.
    WRAP_CONTENT      The content starts or ends. Inside the reasoning, the content can only start.
    CONTENT_WORDS     The content starts after words, such as `Answer:`, instead of a tag.
    START_MESSAGE     A message starts.
    END               A message or the model's turn ends.
    """

    OPEN_REASONING = "open_reasoning"
    CLOSE_REASONING = "close_reasoning"
    INTERRUPT = "interrupt"
    OPEN_SECTION = "open_section"
    OPEN_CALL = "open_call"
    CALL_HEAD = "call_head"
    UNMARKED_CALL = "unmarked_call"
    CLOSE_CALLS = "close_calls"
    WRAP_CONTENT = "wrap_content"
    CONTENT_WORDS = "content_words"
    START_MESSAGE = "start_message"
    END = "end"


def marker_kinds(markers: Iterable[str], kind: MarkerKind) -> dict[str, MarkerKind]:
    """Return a dict that maps each spelling of each marker to `kind`.

    The spellings of a marker differ only in their white space, which a model may change. White
    space around a marker is removed. Example: for the marker `<a>b` and the kind END, the result
    contains `{"<a>b": END, "<a> b": END}`.
    """
    kinds: dict[str, MarkerKind] = {}
    for marker in visible_markers(markers):
        kinds |= dict.fromkeys(marker_spellings(marker), kind)
    return kinds


def visible_markers(markers: Iterable[str]) -> Iterator[str]:
    r"""Strip white space from each marker. Omit markers that consist only of white space.

    Example: `("<a>\n", "\n")` yields `"<a>"`.
    """
    return (marker.strip() for marker in markers if marker.strip())
