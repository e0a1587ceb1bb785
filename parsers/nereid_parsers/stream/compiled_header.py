"""Compiles and matches the patterns of message headers such as `<|channel|>final<|message|>`."""

from __future__ import annotations

from nereid_parsers.declarations import Messages, Route, Stage
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.compiled_call import CompiledCall, match_limited_head
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    PatternMatch,
    compile_pattern,
    skip_whitespace,
)


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
        # The first fixed text of the header. If the output ends inside a header, this text
        # distinguishes the incomplete header from content.
        self._first_literal = first_literal(route.header)  # Such as `<|channel|>`.
        # `_final_whitespace` is the exact white space that must follow a match of the pattern.
        if layout.header_end.strip():  # The header ends with a marker.
            self._header_pattern = compile_pattern(route.header + layout.header_end)
            self._final_whitespace = ""
        else:
            # A compiled pattern would accept any white space in place of the required white space.
            self._header_pattern = compile_pattern(route.header)
            self._final_whitespace = layout.header_end

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

        The header of a tool call matches only if the arguments start after the header. Examples:

            text                                     result
            `<|channel|>final<|message|>Hi`          `Head(end=27)`
            `<|channel|>final`                       NEED_MORE, because `<|message|>` may follow
            `to=sum<|message|>{`, for a tool call    `Head(end=17, name="sum")`
            `to=sum<|message|>Hi`, for a tool call   NO_MATCH, because arguments start with `{`

        Return the matched header, NEED_MORE or NO_MATCH.
        """
        return match_limited_head(self._match_head, text, pos, is_final)

    def _match_head(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Do the same as `match`, but do not limit the length of the header."""
        # In `>>>\nHello`, the line break is not skipped, because it ends an empty header.
        if not self._final_whitespace:
            pos = skip_whitespace(text, pos)
        match = self._header_pattern.match(text, pos, is_final)
        if not isinstance(match, PatternMatch):
            return match
        # The text must continue with the white space that the format requires, such as `\n` in
        # `>>>all\nHi`. If the header belongs to a tool call, the arguments must come next.
        whitespace = self._final_whitespace
        if not text.startswith(whitespace, match.end):
            may_follow = not is_final and whitespace.startswith(text[match.end :])
            return NEED_MORE if may_follow else NO_MATCH
        header_end = match.end + len(whitespace)
        if self.stage is Stage.CALLS:
            mismatch = self._message_call.body_start_mismatch(text, header_end, is_final)
            if mismatch is not None:
                return mismatch
        fields = match.fields
        return Head(header_end, name=fields.get("name", ""), call_id=fields.get("id", ""))
