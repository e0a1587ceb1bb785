"""The states of the stream parser."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The part of the message that the parser is reading.

    UNCLASSIFIED           Text that is reasoning if a closing marker follows, otherwise content.
    REASONING              Reasoning that the parser returns as reasoning.
    INLINE_REASONING       Reasoning that the parser returns as content.
    INTERRUPTED_REASONING  Reasoning after the start of a tool call. If the reasoning is never
                           closed, or is opened again, the text is a tool call, otherwise it is
                           reasoning.
    CONTENT                Content, in which a marker may start reasoning or a tool call.
    CONTENT_ONLY           Content up to the end of the message.
    PLAIN_MESSAGE          The content of a message that contains no tool calls.
    HEADER                 The header of a message.
    CALL_START             The marker, the header and the first character of a tool call.
    CALL_BODY              The body of a tool call.
    BROKEN_CALL            Arguments that are not valid JSON, up to the next marker.
    CALL_END               The closing markers of a tool call.
    BETWEEN_CALLS          The text after a tool call, or after the opening marker of a section.

    The usual transitions are:

        from UNCLASSIFIED to REASONING or CONTENT
        from REASONING to CONTENT
        from CONTENT to CALL_START
        from CALL_START to CALL_BODY
        from CALL_BODY to CALL_END
        from CALL_END to BETWEEN_CALLS
        from BETWEEN_CALLS to CALL_START or CONTENT
        from HEADER to REASONING, CONTENT or CALL_BODY
    """

    UNCLASSIFIED = "unclassified"
    REASONING = "reasoning"
    INLINE_REASONING = "inline_reasoning"
    INTERRUPTED_REASONING = "interrupted_reasoning"
    CONTENT = "content"
    CONTENT_ONLY = "content_only"
    PLAIN_MESSAGE = "plain_message"
    HEADER = "header"
    CALL_START = "call_start"
    CALL_BODY = "call_body"
    BROKEN_CALL = "broken_call"
    CALL_END = "call_end"
    BETWEEN_CALLS = "between_calls"
