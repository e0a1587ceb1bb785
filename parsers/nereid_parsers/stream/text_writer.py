"""Converts the text outside tool calls into events, and passes all text to a trace function."""

from __future__ import annotations

import re
from collections.abc import Callable

from nereid_parsers.events import ContentDelta, Event, ReasoningDelta

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
            lines at the start of that text are then removed together with the marker.
    """

    __slots__ = (
        "_call_text", "_events", "_last_text_type", "_num_prompt_chars", "_pending_parts",
        "_removed_whitespace", "_trace", "_whitespace", "has_content", "is_after_marker",
    )  # fmt: skip

    def __init__(self, events: list[Event]) -> None:
        """Create a writer that appends the events for reasoning and content to the list `events`.

        The writer does not append the events of tool calls.
        """
        self._events = events
        # ---- The trace.
        self._trace: Trace | None = None
        # The text of the open tool call that the trace function has not received, because the
        # parser may read the end of the tool call again, as other text.
        self._call_text: list[str] = []
        # ---- The text that has been written.
        self.has_content = False
        # The class of the last event, or None if a marker or a tool call follows the last event.
        self._last_text_type: type[ReasoningDelta] | type[ContentDelta] | None = None
        # If true, blank lines at the start of the next text are removed. The field becomes true
        # after a marker or a tool call, and false when visible text has been written. At the start
        # of a message, no marker precedes the text. If the prompt ends with a marker such as
        # `<think>`, the ReasoningReader sets this field to true.
        self.is_after_marker = False
        # ---- The text that is stored until later text shows how to classify it.
        # The pieces of the pending text, such as `<call>`, which may be markup or content.
        self._pending_parts: list[str] = []
        # The stored white space directly before the next text. If the next text is a marker, the
        # white space is removed together with the marker.
        self._whitespace: list[str] = []
        # The white space that was removed together with the marker after the last content: `\n` in
        # `One\n<call>..</call>Two`. The next content event starts with this white space, so that
        # `One` and `Two` stay separated.
        self._removed_whitespace = ""
        # ---- The prompt.
        # The number of characters of the prompt at the start of the next text. Events omit these
        # characters. Example: the prompt ends with `<th`, and the model writes `ink>`. The next
        # text is then `<think>`, and this number is 3.
        self._num_prompt_chars = 0

    @property
    def has_text(self) -> bool:
        """Whether text other than white space has been written since the last marker."""
        return self._last_text_type is not None

    def set_trace(self, trace: Trace | None) -> None:
        """From now on, call `trace` with each piece of text and its classification."""
        self._trace = trace

    def _classify(self, classification: str, text: str) -> None:
        """Pass `text` and its classification to the trace function. Omit text of the prompt."""
        if self._num_prompt_chars:
            text = self._without_prompt(text)
        if self._trace is not None and text:
            self._trace(classification, text)

    # ---- reasoning and content -------------------------------------------------------------------

    def write_reasoning(self, text: str) -> None:
        r"""Append an event for the reasoning `text`, but store its trailing white space for later.

        Example: after a marker, `write_reasoning("\n\nHm.\n")` appends `ReasoningDelta("Hm.")`. The
        blank lines before `Hm.` belong to the marker. The line break after `Hm.` is stored. The
        next text starts with this line break, unless a marker follows.
        """
        if self._num_prompt_chars:
            text = self._without_prompt(text)
        ready_text = self._store_trailing_whitespace(text)
        if not ready_text:
            return
        if self.is_after_marker:
            ready_text = self._without_blank_lines(ready_text)
        if self._trace is not None:
            self._trace(_REASONING, ready_text)
        self._events.append(ReasoningDelta(ready_text))
        self.is_after_marker = False
        self._last_text_type = ReasoningDelta

    def write_content(self, text: str) -> None:
        r"""Append an event for the content `text`, but store its trailing white space for later.

        Example: after a marker, `write_content("\n\nHi\n")` appends `ContentDelta("Hi")`. The blank
        lines before `Hi` belong to the marker, unless content precedes the marker. The line break
        after `Hi` is stored. The next text starts with this line break, unless a marker follows.
        """
        if self._num_prompt_chars:
            text = self._without_prompt(text)
        ready_text = self._store_trailing_whitespace(text)
        if not ready_text:
            return
        # If content precedes the marker, the blank lines separate two pieces of content, so they
        # are kept.
        if self.is_after_marker and not self.has_content:
            ready_text = self._without_blank_lines(ready_text)
        self._append_content(ready_text)

    def _store_trailing_whitespace(self, text: str) -> str:
        r"""Store the white space at the end of `text`. Return the text that can be written now.

        The result starts with the white space that was stored before this call. Example: if `"\n"`
        is stored, `"you "` gives `"\nyou"`, and `" "` is stored. If `text` is only white space, all
        white space stays stored, and the result is "".
        """
        visible = text.rstrip()
        ready_text = visible
        if visible and self._whitespace:
            ready_text = self._take_whitespace() + visible
        if len(visible) < len(text):
            self._whitespace.append(text[len(visible) :])
        return ready_text

    def _without_blank_lines(self, text: str) -> str:
        r"""Remove blank lines from the start of `text`. Pass these lines to the trace function.

        Example: `"\n\n  Hello"` gives `"  Hello"`.
        """
        match = _match_blank_lines(text)
        assert match is not None  # The regex also matches the empty text.
        self._classify(_MARKUP, match.group())
        return text[match.end() :]

    def _append_content(self, text: str, fault: str | None = None) -> None:
        r"""Append an event for the content `text`, and pass `text` to the trace function.

        The event starts with the white space between the last content and the marker after this
        content. Example: in `One\n<call>..</call>Two`, the marker `<call>` removes `"\n"`, and the
        last event is `ContentDelta("\nTwo")`, so that the client receives `One\nTwo`. The trace
        function receives `"\n"` once, as a part of the markup.

        `text` contains a character that is not white space. `fault` is the reason for returning
        text that looked like a marker as content, or None.
        """
        if self._trace is not None:
            self._trace(_CONTENT, text)
        self._events.append(ContentDelta(self._removed_whitespace + text, fault))
        self._removed_whitespace = ""
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
            self._whitespace.append(whitespace)

    def _take_whitespace(self) -> str:
        """Return and delete the stored white space."""
        whitespace = "".join(self._whitespace)
        self._whitespace = []
        return whitespace

    def drop_whitespace(self) -> None:
        r"""Remove the stored white space from the output, because a marker follows.

        Example: in `"Hi\n<call>"`, the line break is removed. The trace function receives the white
        space as "markup". White space that follows content is also saved in `_removed_whitespace`,
        because content after the marker restores this white space. No event follows the marker
        yet, so `_last_text_type` becomes None, and `has_text` becomes False.
        """
        whitespace = self._take_whitespace()
        if self._last_text_type is ContentDelta:
            self._removed_whitespace = whitespace
        self._classify(_MARKUP, whitespace)
        self._last_text_type = None

    def finish_whitespace(self, *, is_reasoning: bool, has_calls: bool) -> None:
        r"""At the end of the message, write or remove the stored white space.

        Examples of messages that end with a line break:

            message               the line break
            `<think>Hm\n`         belongs to the reasoning and is written.
            `Hi\n`                belongs to the content and is written.
            `\n`                  is content, because the message contains nothing else.
            `<call>..</call>\n`   is removed, because it directly follows a marker.
        """
        whitespace = self._take_whitespace()
        if not whitespace:
            return
        # Reasoning always follows an opening marker. This marker may be in the prompt.
        has_markup = self.is_after_marker or is_reasoning or has_calls
        if self.has_text and is_reasoning:
            self._classify(_REASONING, whitespace)
            self._events.append(ReasoningDelta(whitespace))
        elif self.has_text or not has_markup:
            self._classify(_CONTENT, whitespace)
            self._events.append(ContentDelta(whitespace))
        else:
            self._classify(_MARKUP, whitespace)  # Without an event, the white space is removed.

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
        content = self._without_prompt(self.pending_text + text)
        self._pending_parts = []
        if content.strip():
            self._append_content(self._take_whitespace() + content, fault)
        else:
            # White space is stored until later text shows whether a marker follows.
            self.store_whitespace(content)

    # ---- the text of calls -----------------------------------------------------------------------

    def accept_call_text(self, text: str, *, may_be_reread: bool) -> None:
        """Remove the pending text, and pass `text`, a piece of a tool call, to the trace function.

        The pending text is the opening marker of the tool call. Example: with the pending text
        `<call>` and the text `{"a": 1}`, the trace function receives `<call>` as "markup" and
        `{"a": 1}` as "call". The CallWriter appends the events of the tool call.

        Args:
            text: The next piece of the tool call, as the model wrote it.
            may_be_reread: Whether the parser may read the end of the tool call again, as other
                text. If so, the classification of `text` may change, so `text` is stored until
                `end_traced_call` is called.
        """
        if self._pending_parts:
            self.drop_pending()
        if self._num_prompt_chars:  # The prompt ends with the start of this tool call.
            text = self._without_prompt(text)
        if self._trace is None:
            return
        if may_be_reread:
            self._call_text.append(text)
        elif text:
            self._trace(_CALL, text)

    def shorten_traced_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters from the stored text of a tool call.

        Example: from `{"a": "x}</call>`, the last 7 characters `</call>` are removed. `num_chars`
        must be at least 1. If the stored text is shorter than `num_chars`, no text stays stored.
        """
        self._call_text = ["".join(self._call_text)[:-num_chars]]

    def end_traced_call(self) -> None:
        """Pass the stored text of the tool call to the trace function, and delete this text."""
        text = "".join(self._call_text)
        if self._trace is not None and text:
            self._trace(_CALL, text)
        self._call_text = []

    # ---- the prompt ------------------------------------------------------------------------------

    def mark_prompt_end(self, num_unwritten_chars: int) -> None:
        """Treat all text received so far as a part of the prompt. Later events omit this text.

        The pending text stays stored, because later text shows whether it is content. The event
        that contains this content omits the characters of the prompt, too.

        `num_unwritten_chars` is the number of characters of the prompt that this writer has not
        received yet, because a reader stores them.
        """
        # The stored white space belongs to the prompt. If it were not deleted here, it would be
        # written before the first content of the output.
        self._whitespace = []
        self._removed_whitespace = ""
        self._num_prompt_chars = len(self.pending_text) + num_unwritten_chars

    def _without_prompt(self, text: str) -> str:
        """Remove the characters of the prompt from the start of `text`, and return the rest.

        Example: the prompt ends with `<th`, so `_num_prompt_chars` is 3, and the model writes
        `ink>`. For the text `<think>`, the result is `ink>`, and `_num_prompt_chars` becomes 0.
        """
        num_prompt_chars = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= num_prompt_chars
        return text[num_prompt_chars:]
