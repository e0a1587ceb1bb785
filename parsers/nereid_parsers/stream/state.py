"""The states of the stream parser."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The part of the message that is being read.

    UNDECIDED         A closing marker may still show that the text so far is reasoning.
    REASONING         Reasoning, which is returned as reasoning.
    INLINE_REASONING  Reasoning, which is returned as content.
    CONTENT           Content, in which markers may open other parts.
    CONTENT_ONLY      Content up to the end of the text.
    HEADER            The header of a message.
    CALL_START        The marker, the head and the first character of a call.
    CALL_BODY         The body of a call.
    BROKEN_CALL       Arguments that are not valid JSON, up to the next marker.
    CALL_END          The closing markers of a call.
    BETWEEN_CALLS     The text after a call, or after the opening marker of a section.

    The usual transitions are:

        UNDECIDED -> REASONING -> CONTENT -> CALL_START -> CALL_BODY -> CALL_END -> BETWEEN_CALLS
        BETWEEN_CALLS -> CALL_START, BETWEEN_CALLS -> CONTENT
        HEADER -> REASONING, HEADER -> CONTENT, HEADER -> CALL_BODY
    """

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    INLINE_REASONING = "inline_reasoning"
    CONTENT = "content"
    CONTENT_ONLY = "content_only"
    HEADER = "header"
    CALL_START = "call_start"
    CALL_BODY = "call_body"
    BROKEN_CALL = "broken_call"
    CALL_END = "call_end"
    BETWEEN_CALLS = "between_calls"
