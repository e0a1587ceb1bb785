"""Converts the text outside tool calls into events, and passes all text to a trace function."""

from __future__ import annotations

import re
from collections.abc import Callable

from nereid_parsers.events import ContentDelta, Event, ReasoningDelta
from nereid_parsers.stream.last_line import LastLine

# A function that is called for each piece of a message, in order. The arguments are the
# classification of the piece, such as "content", and its text. Example: for
# `Hi<call>{..}</call>`, the function receives `("content", "Hi")`, `("markup", "<call>")`,
# `("call", "{..}")` and `("markup", "</call>")`.
Trace = Callable[[str, str], None]

# The classifications of text.
_REASONING = "reasoning"
_CONTENT = "content"
_CALL = "call"
_MARKUP = "markup"  # Text that no event contains, for example the marker `</think>`.

# Matches the blank lines at the start of a text, but not the indentation of the first visible line.
_match_blank_lines = re.compile(r"(?:\s*[\r\n])?").match


class _Tracer:
    """Passes the pieces of a message, in order, to a trace function.

    Attributes:
        function: The trace function, or None if no function receives the pieces.
    """

    __slots__ = ("_call_parts", "_may_reread_calls", "function")

    def __init__(self, *, may_reread_calls: bool) -> None:
        """Create a tracer without a trace function.

        `may_reread_calls` is true if the parser may read the end of a tool call again, as other
        text. The text of a tool call is then stored until the tool call ends.
        """
        self.function: Trace | None = None
        self._may_reread_calls = may_reread_calls
        self._call_parts: list[str] = []  # The stored text of the open tool call.

    def add_call_text(self, text: str) -> None:
        """Pass a piece of a tool call to the trace function, or store the piece."""
        if self.function is None:
            return
        if self._may_reread_calls:
            self._call_parts.append(text)
        elif text:
            self.function(_CALL, text)

    def shorten_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters from the stored text of a tool call.

        Example: from `{"a": "x}</call>`, the last 7 characters `</call>` are removed. `num_chars`
        must be at least 1. If the stored text is shorter than `num_chars`, no text stays stored.
        """
        self._call_parts = ["".join(self._call_parts)[:-num_chars]]

    def end_call(self) -> None:
        """Pass the stored text of the tool call to the trace function, and delete this text."""
        text = "".join(self._call_parts)
        self._call_parts = []
        if self.function is not None and text:
            self.function(_CALL, text)


class TextWriter:
    r"""Appends events for reasoning and content to a list.

    The writer stores two kinds of text until later text shows how to classify them:

    - White space at the end of a text. If a marker follows, such as `<call>`, the white space
      belongs to the marker and is removed. Otherwise the white space belongs to the text.
    - Pending text, which looks like the start of a tool call or message. The pending text is
      removed if a tool call or message follows. Otherwise the pending text is content.

    Example: `write_content("Hi\n")` appends `ContentDelta("Hi")` and stores `"\n"`. If
    `write_content("you")` follows, `ContentDelta("\nyou")` is appended. If `drop_markup("<call>")`
    follows instead, `"\n"` is removed. If more content follows the marker, the removed white space
    is written before this content, so that the two pieces of content stay separated.

    Attributes:
        has_content: Whether content other than white space has been written.
        is_after_marker: Whether a marker or a tool call directly precedes the next text. Blank
            lines at the start of that text are then removed together with the marker. The marker
            may be in the prompt.
    """

    __slots__ = (
        "_content_separator", "_events", "_has_reasoning", "_last_line", "_last_text_type",
        "_num_prompt_chars", "_pending_parts", "_tracer", "_trailing_whitespace", "has_content",
        "is_after_marker",
    )  # fmt: skip

    def __init__(self, events: list[Event], *, may_reread_calls: bool) -> None:
        """Create a writer that appends the events for reasoning and content to the list `events`.

        A CallWriter appends the events of tool calls. `may_reread_calls` is true if the parser may
        read the end of a tool call again, as other text.
        """
        self._events = events
        self._tracer = _Tracer(may_reread_calls=may_reread_calls)
        # The pieces of the pending text, such as `<call>`, which may be markup or content.
        self._pending_parts: list[str] = []
        # The white space at the end of the received text. A marker that follows removes it.
        self._trailing_whitespace: list[str] = []
        # The white space between the last content and a marker, such as the line break in
        # `One\n<call>..</call>Two`. The next content event starts with this white space.
        self._content_separator = ""
        self._last_line = LastLine()  # It shows whether the content quotes a tag.
        self._has_reasoning = False  # Whether an event for reasoning has been appended.
        # The number of characters at the start of the next text that belong to the prompt. Example:
        # the prompt ends with `<th`, so the next text is `<think>`, and this number is 3.
        self._num_prompt_chars = 0
        # The type of the last event for visible text, or None if a marker follows this text.
        self._last_text_type: type[ReasoningDelta] | type[ContentDelta] | None = None
        self.has_content = False  # Whether visible content has been written.
        self.is_after_marker = False  # Whether a marker directly precedes the next visible text.

    @property
    def has_text_since_marker(self) -> bool:
        """Whether text other than white space has been written since the last marker."""
        return self._last_text_type is not None

    def quotes_next_tag(self) -> bool:
        """Return whether the text before the next tag, such as `<think>`, shows that it is quoted.

        Examples: the tag is quoted in `Write <think>`, and not in `Hi.<think>`.
        """
        return self._last_line.quotes_next_tag("".join(self._trailing_whitespace))

    def set_trace(self, trace: Trace | None) -> None:
        """From now on, call `trace` with each piece of text and its classification."""
        self._tracer.function = trace

    def _classify(self, classification: str, text: str) -> None:
        """Pass `text` and its classification to the trace function. Omit text of the prompt."""
        if self._num_prompt_chars:
            text = self._cut_prompt(text)
        if self._tracer.function is not None and text:
            self._tracer.function(classification, text)

    # ---- reasoning and content -------------------------------------------------------------------

    def write_reasoning(self, text: str) -> None:
        r"""Append an event for the reasoning `text`, but store its trailing white space for later.

        If earlier reasoning has ended, as in `<think>A</think>Hi<think>B`, a line break separates
        the two texts.

        Example: after a marker, `write_reasoning("\n\nHm.\n")` appends `ReasoningDelta("Hm.")`. The
        blank lines before `Hm.` belong to the marker. The line break after `Hm.` is stored. The
        next text starts with this line break, unless a marker follows.
        """
        ready_text = self._take_ready_text(text)
        if not ready_text:
            return
        if self.is_after_marker:
            ready_text = self._drop_blank_lines(ready_text)
        if self._tracer.function is not None:
            self._tracer.function(_REASONING, ready_text)
        starts_new_block = self._has_reasoning and not self.has_text_since_marker
        separator = "\n" if starts_new_block else ""
        self._events.append(ReasoningDelta(separator + ready_text))
        self._has_reasoning = True
        self.is_after_marker = False
        self._last_text_type = ReasoningDelta

    def write_content(self, text: str) -> None:
        r"""Append an event for the content `text`, but store its trailing white space for later.

        Blank lines after a marker are removed, unless they separate two pieces of content:

            message                    content events
            `<call>..</call>\n\nHi`    `ContentDelta("Hi")`
            `A<call>..</call>\n\nHi`   `ContentDelta("A")`, `ContentDelta("\n\nHi")`
        """
        ready_text = self._take_ready_text(text)
        if not ready_text:
            return
        if self.is_after_marker and not self.has_content:
            ready_text = self._drop_blank_lines(ready_text)
        self._append_content(ready_text)

    def _take_ready_text(self, text: str) -> str:
        r"""Return the part of the received `text` that can be written now, and store the rest.

        The white space at the end of `text` is stored, because a marker may follow. The result
        starts with the white space that was stored before this call. Example: if `"\n"` is stored,
        `"you "` gives `"\nyou"`, and `" "` is stored. If `text` is only white space, the result is
        "", and all white space stays stored.

        If `text` starts with characters of the prompt, these characters are removed.
        """
        if self._num_prompt_chars:
            text = self._cut_prompt(text)
        visible = text.rstrip()
        starts_with_stored = visible and self._trailing_whitespace
        ready_text = self._take_whitespace() + visible if starts_with_stored else visible
        if len(visible) < len(text):
            self._trailing_whitespace.append(text[len(visible) :])
        return ready_text

    def _drop_blank_lines(self, text: str) -> str:
        r"""Remove the blank lines at the start of `text`, because they belong to a marker.

        The trace function receives these lines as "markup". Return the rest of `text`. Example:
        `"\n\n  Hello"` gives `"  Hello"`.
        """
        match = _match_blank_lines(text)
        assert match is not None  # The regex also matches the empty text.
        self._classify(_MARKUP, match.group())
        return text[match.end() :]

    def _append_content(self, text: str, fault: str | None = None) -> None:
        r"""Append an event for the content `text`, and pass `text` to the trace function.

        If a marker separates `text` from the last content, the event starts with the white space
        before the marker. Example: for `One\n<call>..</call>Two`, the last event is
        `ContentDelta("\nTwo")`, so that the client receives `One\nTwo`.

        `text` contains a character that is not white space. If `text` looked like a tool call,
        `fault` describes why `text` is content.
        """
        # The trace function has already received `_content_separator`, as a part of the markup.
        if self._tracer.function is not None:
            self._tracer.function(_CONTENT, text)
        event_text = self._content_separator + text
        self._events.append(ContentDelta(event_text, fault))
        self._content_separator = ""
        self._last_line.add(event_text)
        self.has_content = True
        self.is_after_marker = False
        self._last_text_type = ContentDelta

    def write_content_exactly(self, text: str) -> None:
        """Append a content event with exactly `text`, including its white space and its markers.

        A marker is written completely, even if its first characters are the end of the prompt.
        """
        self._classify(_CONTENT, text)
        self._events.append(ContentDelta(text))

    def write_generated_content(self, text: str) -> None:
        """Append a content event for a marker, such as `<think>`, that the model did not write.

        The trace function does not receive this text.
        """
        self._events.append(ContentDelta(text))

    # ---- markers ---------------------------------------------------------------------------------

    def drop_markup(self, marker: str) -> None:
        """Remove a marker from the output, together with the stored white space before the marker.

        A marker is a fixed text of the format, for example `</think>`. The trace function receives
        the white space and the marker as "markup". `is_after_marker` becomes True, so that blank
        lines after the marker are removed, too.
        """
        self.drop_whitespace()
        self._classify(_MARKUP, marker)
        self.is_after_marker = True

    def treat_call_as_marker(self) -> None:
        """Record that a tool call directly precedes the next text.

        Blank lines at the start of the next text are then removed, as after a marker such as
        `</think>`.
        """
        self.is_after_marker = True
        self._last_text_type = None

    # ---- white space -----------------------------------------------------------------------------

    def store_whitespace(self, whitespace: str) -> None:
        """Store white space that follows a marker or a tool call.

        If there is pending text, the white space becomes a part of the pending text.
        """
        if not whitespace:
            return
        if self._pending_parts:
            self._pending_parts.append(whitespace)
        else:
            self._trailing_whitespace.append(whitespace)

    def _take_whitespace(self) -> str:
        """Return and delete the stored white space."""
        whitespace = "".join(self._trailing_whitespace)
        self._trailing_whitespace = []
        return whitespace

    def drop_whitespace(self) -> None:
        r"""Remove the stored white space from the output, because a marker follows.

        Example: in `"Hi\n<call>"`, the line break is removed. The trace function receives the line
        break as "markup". If more content follows the marker, as in `Hi\n<call>..</call>you`, the
        line break is written before `you`.
        """
        whitespace = self._take_whitespace()
        if self._last_text_type is ContentDelta:
            self._content_separator = whitespace
        self._classify(_MARKUP, whitespace)
        self._last_text_type = None  # No text follows the marker yet.

    def finish_whitespace(self, *, is_reasoning: bool, has_calls: bool) -> None:
        """At the end of the message, write or remove the stored white space.

        The white space is written if it belongs to reasoning or content. If it belongs to markup,
        no event is appended for it. `is_reasoning` is true if the message ends inside reasoning.
        `has_calls` is true if the message contains a tool call.
        """
        whitespace = self._take_whitespace()
        if not whitespace:
            return
        classification = self._class_of_last_whitespace(
            is_reasoning=is_reasoning, has_calls=has_calls
        )
        self._classify(classification, whitespace)
        if classification == _REASONING:
            self._events.append(ReasoningDelta(whitespace))
        elif classification == _CONTENT:
            self._events.append(ContentDelta(whitespace))

    def _class_of_last_whitespace(self, *, is_reasoning: bool, has_calls: bool) -> str:
        r"""Return the classification of the white space at the end of the message.

            message               result
            `<think>Hm\n`         "reasoning", because the white space follows reasoning
            `Hi\n`                "content", because the white space follows content
            `<call>..</call>\n`   "markup", because the white space follows a marker
            `\n`                  "content", because the message contains nothing else

        `is_reasoning` is true if the message ends inside reasoning. `has_calls` is true if the
        message contains a tool call.
        """
        if self.has_text_since_marker:
            return _REASONING if is_reasoning else _CONTENT
        # Reasoning always follows an opening marker. This marker may be in the prompt.
        has_markup = self.is_after_marker or is_reasoning or has_calls
        return _MARKUP if has_markup else _CONTENT

    # ---- pending text --------------------------------------------------------------------------

    @property
    def pending_text(self) -> str:
        """The received text that looks like the start of a tool call or of a message.

        If a tool call or message follows, the text is removed. Otherwise the text is content.
        """
        return "".join(self._pending_parts)

    def store_pending(self, text: str) -> None:
        """Add `text` to the pending text, which looks like the start of a tool call or message."""
        self._pending_parts.append(text)

    def drop_pending(self) -> None:
        """Remove the pending text, and the white space before this text, from the output."""
        self.drop_whitespace()
        self._classify(_MARKUP, self.pending_text)
        self._pending_parts = []

    def write_pending(self, text: str, fault: str) -> None:
        """Append a content event for the pending text and `text`, which are not a tool call.

        Example: with the pending text `<tool_call>` and the text ` is`, an event for the content
        `<tool_call> is` is appended. Afterwards, no text is pending.

        `fault` describes why the text is not a tool call, for the event's `reason`.
        """
        # The pending text may start in the prompt. Example: the prompt ends with `<tool`, and the
        # model writes `_call> is`. The characters `<tool` of the prompt are not a part of the
        # output.
        content = self._cut_prompt(self.pending_text + text)
        self._pending_parts = []
        if content.strip():
            self._append_content(self._take_whitespace() + content, fault)
        else:
            # White space is stored until later text shows whether a marker follows.
            self.store_whitespace(content)

    # ---- the text of calls -----------------------------------------------------------------------

    def drop_call_text(self, text: str) -> None:
        """Remove `text`, a piece of a tool call, from the output. The CallWriter writes its events.

        The pending text is removed, too, because it is the opening marker of the tool call. The
        trace function receives both texts. Example: with the pending text `<call>` and the piece
        `{"a": 1}`, it receives `<call>` as "markup" and `{"a": 1}` as "call".
        """
        if self._pending_parts:
            self.drop_pending()
        if self._num_prompt_chars:  # The prompt ends with the start of this tool call.
            text = self._cut_prompt(text)
        if self._tracer.function is not None:
            self._tracer.add_call_text(text)

    def shorten_traced_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters from the stored text of a tool call.

        `num_chars` must be at least 1.
        """
        self._tracer.shorten_call(num_chars)

    def end_traced_call(self) -> None:
        """Pass the stored text of the tool call to the trace function, and delete this text."""
        self._tracer.end_call()

    # ---- the prompt ------------------------------------------------------------------------------

    def mark_prompt_end(self, num_unwritten_chars: int) -> None:
        """Treat all text received so far as a part of the prompt. Later events omit this text.

        Example: the prompt ends with `<th`, which a reader stores, so `num_unwritten_chars` is 3.
        If the model writes `ink of it`, the text `<think of it` is content. The content event
        omits the prompt, and contains only `ink of it`.

        `num_unwritten_chars` is the number of characters at the end of the prompt that this writer
        has not received yet, because a reader stores them.
        """
        # White space of the prompt must not be written before the first content of the output.
        self._trailing_whitespace = []
        self._content_separator = ""
        self._has_reasoning = False
        # The pending text and the unwritten characters belong to the prompt, but they stay stored,
        # because later text shows whether they are content.
        self._num_prompt_chars = len(self.pending_text) + num_unwritten_chars

    def _cut_prompt(self, text: str) -> str:
        """Remove the characters of the prompt from the start of `text`, and return the rest.

        Example: the prompt ends with `<th`, so `_num_prompt_chars` is 3, and the model writes
        `ink>`. For the text `<think>`, the result is `ink>`, and `_num_prompt_chars` becomes 0.
        """
        num_prompt_chars = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= num_prompt_chars
        return text[num_prompt_chars:]
