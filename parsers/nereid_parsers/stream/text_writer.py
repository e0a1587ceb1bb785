"""Converts the text outside tool calls into events, and passes all text to a trace function."""

from __future__ import annotations

import re

from nereid_parsers.events import ContentDelta, Event, ReasoningDelta
from nereid_parsers.stream.last_line import LastLine
from nereid_parsers.stream.tracer import Trace, Tracer

# The classifications of text.
_REASONING = "reasoning"
_CONTENT = "content"
_MARKUP = "markup"  # Text that no event contains, for example the marker `</think>`.

# Matches the blank lines at the start of a text, but not the indentation of the first visible line.
_match_blank_lines = re.compile(r"(?:\s*[\r\n])?").match


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
        self._tracer = Tracer(may_reread_calls=may_reread_calls)
        # The pieces of the pending text, such as `<call>`, which may be markup or content.
        self._pending_parts: list[str] = []
        # The white space at the end of the received text, such as `\n` in `One\n`. It is written
        # together with the next text, unless a marker follows.
        self._trailing_whitespace: list[str] = []
        # If a marker follows, as in `One\n<call>..</call>Two`, the white space `\n` is moved from
        # `_trailing_whitespace` to this attribute. The next content event is then `\nTwo`.
        self._content_separator = ""
        self._last_line = LastLine()  # It shows whether the content only mentions a tag.
        self._has_reasoning = False  # Whether an event for reasoning has been appended.
        # The next text starts with this number of characters of the prompt. Events omit these
        # characters. Example: the prompt ends with `<th`, and the model writes `ink>`. Then the
        # next text is `<think>`, and this number is 3.
        self._num_prompt_chars = 0
        # The type of the last event for visible text, or None if a marker follows this text.
        self._last_text_type: type[ReasoningDelta] | type[ContentDelta] | None = None
        self.has_content = False  # Whether visible content has been written.
        self.is_after_marker = False  # Whether a marker directly precedes the next visible text.

    @property
    def has_text_since_marker(self) -> bool:
        """Whether text other than white space has been written since the last marker."""
        return self._last_text_type is not None

    def mentions_next_tag(self) -> bool:
        """Return whether the content only mentions the next tag. Such a tag is no markup.

        Examples: the result is True for `Write <think>`, and False for `Hi.<think>`.
        """
        return self._last_line.mentions_next_tag("".join(self._trailing_whitespace))

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

        Examples of messages:

            message                         events
            `<think>\n\nHm.\n`              `ReasoningDelta("Hm.")`. The blank lines after the
                                            marker are removed, and the last line break is stored.
            `<think>A</think>Hi<think>B`    `ReasoningDelta("A")`, `ContentDelta("Hi")` and
                                            `ReasoningDelta("\nB")`. A line break separates the two
                                            blocks of reasoning.
        """
        ready_text = self._take_ready_text(text)
        if not ready_text:
            return
        if self.is_after_marker:
            ready_text = self._drop_blank_lines(ready_text)
        if self._tracer.function is not None:
            self._tracer.function(_REASONING, ready_text)
        is_start_of_block = not self.has_text_since_marker  # As `B` after the second `<think>`.
        separator = "\n" if is_start_of_block and self._has_reasoning else ""
        self._events.append(ReasoningDelta(separator + ready_text))
        self._has_reasoning = True
        self.is_after_marker = False
        self._last_text_type = ReasoningDelta

    def write_content(self, text: str) -> None:
        r"""Append an event for the content `text`. `_take_ready_text` stores trailing white space.

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
        ready_text = text.rstrip()
        new_whitespace = text[len(ready_text) :]
        if ready_text and self._trailing_whitespace:
            ready_text = self._take_whitespace() + ready_text
        if new_whitespace:
            self._trailing_whitespace.append(new_whitespace)
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
        # The trace function receives only `text`, because it has already received the white space
        # before the marker as a part of the markup.
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

        Examples: after `Hi`, a line break is written as content. After `<call>..</call>`, a line
        break belongs to the markup, so no event contains this line break. `is_reasoning` is true if
        the message ends inside reasoning. `has_calls` is true if the message contains a tool call.
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
        if self.has_text_since_marker:  # As in `<think>Hm\n` and `Hi\n`.
            return _REASONING if is_reasoning else _CONTENT
        # Either a marker precedes the white space, or the message contains nothing else. If the
        # marker is in the prompt, such as `<think>`, only `is_reasoning` shows the marker.
        has_marker = self.is_after_marker or is_reasoning or has_calls
        return _MARKUP if has_marker else _CONTENT

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
        """Remove `text`, a piece of a tool call, from the content.

        The CallWriter writes the events of the tool call. The pending text is removed, too, because
        it is the opening marker of the tool call. The trace function receives both texts. Example:
        with the pending text `<call>` and the piece `{"a": 1}`, it receives `<call>` as "markup"
        and `{"a": 1}` as "call".
        """
        if self._pending_parts:
            self.drop_pending()
        # If the prompt ends with the start of this tool call, `drop_pending` has cut the prompt out
        # of the pending text. `text` may start with other characters of the prompt.
        if self._num_prompt_chars:
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
        # The first event must not start with the white space at the end of the prompt. It must not
        # start with the line break between two blocks of reasoning either, although the prompt may
        # contain a block.
        self._trailing_whitespace = []
        self._content_separator = ""
        self._has_reasoning = False
        # The pending text and the unwritten characters are the end of the prompt. They are kept,
        # because they may be the beginning of a marker that the output completes. `_cut_prompt`
        # removes this number of characters from the next text.
        self._num_prompt_chars = len(self.pending_text) + num_unwritten_chars

    def _cut_prompt(self, text: str) -> str:
        """Remove the characters of the prompt from the start of `text`, and return the rest.

        Example: the prompt ends with `<th`, so `_num_prompt_chars` is 3, and the model writes
        `ink>`. For the text `<think>`, the result is `ink>`, and `_num_prompt_chars` becomes 0.
        """
        num_prompt_chars = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= num_prompt_chars
        return text[num_prompt_chars:]
