"""Converts the text outside tool calls into events, and classifies all text for a trace."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.events import ContentDelta, Event, ReasoningDelta

# A function that receives the classification and the text of each piece. The function receives the
# pieces in order, and each piece exactly once.
Trace = Callable[[str, str], None]

# The classifications of text. "markup" is text, such as a marker, that no event contains.
REASONING = "reasoning"
CONTENT = "content"
CALL = "call"
MARKUP = "markup"


class TextWriter:
    r"""Appends the events of reasoning and content to a list.

    The writer stores three kinds of text until more text shows how to classify it:

    - White space at the end of a text. If a marker follows, the white space belongs to the marker.
      Otherwise it belongs to the text.
    - Pending text, which looks like the start of a tool call or message. The pending text is
      removed if a tool call or message follows. Otherwise it is content.
    - The text of a tool call, as long as a part of it may be read again. Only the trace receives
      this text later.

    Example: `write("Hi\n", ContentDelta)` appends `ContentDelta("Hi")`. If `write_markup("<call>")`
    follows, `"\n"` is removed. If `write("you", ContentDelta)` follows instead, the writer appends
    `ContentDelta("\nyou")`. White space that was removed between content and a marker is restored
    if more content follows the marker, so that the two pieces of content stay separated.

    Attributes:
        has_content: Whether content other than white space has been written.
        is_after_marker: Whether a marker directly precedes the next text. Blank lines at the start
            of that text then belong to the marker.
        has_text: Whether text other than white space has been written since the last marker.
        pending: The pieces of the pending text.
    """

    __slots__ = (
        "_call_text", "_events", "_is_last_text_content", "_num_prompt_chars",
        "_removed_whitespace", "_trace", "_whitespace", "has_content", "has_text",
        "is_after_marker", "pending",
    )  # fmt: skip

    def __init__(self, events: list[Event]) -> None:
        """Create a writer that appends to `events`, and that has no trace function."""
        self._events = events
        self._trace: Trace | None = None
        # The text that precedes the next text.
        self.has_content = False  # Whether the message has content other than white space.
        self.has_text = False  # Whether text has been written since the last marker.
        self._is_last_text_content = False  # If false, the last text was reasoning.
        self.is_after_marker = False  # Whether a marker directly precedes the next text.
        # Text that has been read, but not classified.
        self.pending: list[str] = []  # Text that looks like the start of a tool call or message.
        # White space that follows the last text. More text or a marker will classify it.
        self._whitespace: list[str] = []
        # The white space between the last content and the marker that followed this content.
        self._removed_whitespace = ""
        self._call_text: list[str] = []  # The text of a tool call that may be read again.
        # The number of characters at the start of the next text that belong to the prompt.
        self._num_prompt_chars = 0

    def set_trace(self, trace: Trace | None) -> None:
        """From now on, pass each piece of text and its classification to the function `trace`."""
        self._trace = trace

    def _classify(self, classification: str, text: str) -> None:
        """Pass a piece of text and its classification to the trace function."""
        if self._num_prompt_chars:
            text = self._without_prompt(text)
        if self._trace is not None and text:
            self._trace(classification, text)

    # ---- reasoning, content and markers ----------------------------------------------------------

    def write_content_exactly(self, text: str) -> None:
        """Write `text` as content, without removing white space or markers from `text`."""
        self._classify(CONTENT, text)
        self._events.append(ContentDelta(text))

    def write_generated_content(self, text: str) -> None:
        """Write content that the model did not generate. Do not pass it to the trace function."""
        self._events.append(ContentDelta(text))

    def write(self, text: str, event_type: type[ReasoningDelta] | type[ContentDelta]) -> None:
        r"""Append an event for `text`, without the white space at the end of `text`.

        This white space is stored. It precedes the text of the next call, unless a marker follows.
        Example: after a marker, `"\n\nHi\n"` appends an event with the text `Hi`. The blank lines
        before `Hi` belong to the marker. The line break after `Hi` is stored.

        Args:
            text: The text.
            event_type: The type of the event.
        """
        if self._num_prompt_chars:  # The text starts with the end of the prompt.
            text = self._without_prompt(text)
        visible = text.rstrip()
        if visible:
            self._append(self._take_whitespace() + visible, event_type)
        trailing_whitespace = text[len(visible) :]
        if trailing_whitespace:
            self._whitespace.append(trailing_whitespace)

    def _append(self, text: str, event_type: type[ReasoningDelta] | type[ContentDelta]) -> None:
        r"""Append an event for `text`, and pass `text` to the trace function.

        The last character of `text` is not white space.

        The event of content also restores the white space that was removed between the previous
        content and a marker. The trace does not receive this white space again, because it has
        already received the white space as "markup". Example: in `One\n<call>..</call>Two`, the
        last event is `ContentDelta("\nTwo")`, and the trace receives `Two`.

        Changes `has_text`, `has_content`, `is_after_marker` and `_is_last_text_content`, which
        describe the last text.
        """
        is_content = event_type is ContentDelta
        if self.is_after_marker:
            text = self._strip_after_marker(text, is_content)
        if self._trace is not None:
            self._trace(CONTENT if is_content else REASONING, text)
        if is_content:
            restored_whitespace = self._take_removed_whitespace()
            self._events.append(ContentDelta(restored_whitespace + text))
            self.has_content = True
        else:
            self._events.append(ReasoningDelta(text))
        self.has_text = True
        self._is_last_text_content = is_content

    def _strip_after_marker(self, text: str, is_content: bool) -> str:
        r"""Return the text after a marker, without the blank lines that belong to the marker.

        Example: after `</think>`, the text `"\n\nHi"` gives `"Hi"`. Blank lines between two pieces
        of content separate these pieces, so they are kept. `is_after_marker` becomes False.
        """
        self.is_after_marker = False
        continues_content = is_content and self.has_content
        return text if continues_content else self._without_blank_lines(text)

    def _take_removed_whitespace(self) -> str:
        r"""Return the white space that was removed after the last content, and delete it.

        Example: in `"One\n<call>..</call>\nTwo"`, the first line break is removed before the tool
        call, and restored before `Two`. The content is `"One\n\nTwo"`.
        """
        whitespace = self._removed_whitespace
        self._removed_whitespace = ""
        return whitespace

    def _take_whitespace(self) -> str:
        """Return and forget the stored white space."""
        if not self._whitespace:
            return ""
        whitespace = "".join(self._whitespace)
        self._whitespace = []
        return whitespace

    def _without_blank_lines(self, text: str) -> str:
        r"""Return `text` without the blank lines at its start. Classify these lines as "markup".

        Example: `"\n\n  Hello"` gives `"  Hello"`.
        """
        leading_whitespace = text[: len(text) - len(text.lstrip())]
        last_line_end = max(leading_whitespace.rfind("\n"), leading_whitespace.rfind("\r"))
        first_visible_line = last_line_end + 1  # 0 if there is no blank line.
        self._classify(MARKUP, text[:first_visible_line])
        return text[first_visible_line:]

    def write_markup(self, marker: str) -> None:
        """Remove a marker from the output, together with the stored white space before the marker.

        A marker is a fixed text of the format, for example `</think>`. The trace receives the
        marker and the white space as "markup". Sets `is_after_marker`, so that blank lines after
        the marker are removed, too.
        """
        self.drop_whitespace()
        self._classify(MARKUP, marker)
        self.is_after_marker = True

    def start_after_call(self) -> None:
        """Prepare for the text after a tool call. This text is treated like text after a marker."""
        self.is_after_marker = True
        self.has_text = False

    # ---- white space -----------------------------------------------------------------------------

    def store_whitespace(self, whitespace: str) -> None:
        """Store white space between two markers.

        If there is pending text, the white space becomes a part of the pending text.
        """
        if not whitespace:
            return
        if self.pending:
            self.pending.append(whitespace)
        else:
            self._whitespace.append(whitespace)

    def drop_whitespace(self) -> None:
        r"""Remove the stored white space from the output, because a marker follows.

        Example: in `"Hi\n<call>"`, the line break is removed. White space after content is stored
        in `_removed_whitespace`. If more content follows the marker, this white space is written
        before that content, so that the two pieces stay separated. `has_text` becomes False,
        because no text follows the marker yet.
        """
        whitespace = self._take_whitespace()
        follows_content = self.has_text and self._is_last_text_content
        if follows_content:
            self._removed_whitespace = whitespace
        self._classify(MARKUP, whitespace)
        self.has_text = False

    def finish_whitespace(self, *, is_reasoning: bool, has_calls: bool) -> None:
        """Write or remove the stored white space, because the message has ended.

        There are three cases:

        - Reasoning or content precedes the white space. The white space belongs to this text.
        - A marker or a tool call precedes the white space, so the white space is removed. The trace
          receives the white space as "markup".
        - The message contains only white space, so the white space is content.

        Args:
            is_reasoning: Whether the message ended inside the reasoning.
            has_calls: Whether the message contains tool calls.
        """
        whitespace = self._take_whitespace()
        if not whitespace:
            return
        has_markup = self.is_after_marker or is_reasoning or has_calls
        directly_follows_markup = has_markup and not self.has_text
        if directly_follows_markup:
            self._classify(MARKUP, whitespace)
        elif is_reasoning:
            self._classify(REASONING, whitespace)
            self._events.append(ReasoningDelta(whitespace))
        else:
            self._classify(CONTENT, whitespace)
            self._events.append(ContentDelta(whitespace))

    # ---- pending text --------------------------------------------------------------------------

    @property
    def pending_text(self) -> str:
        """The text that is not classified yet.

        If a tool call or a message follows, the text is removed. Otherwise the text is content.
        """
        return "".join(self.pending)

    def store_pending(self, text: str) -> None:
        """Add text to the pending text."""
        self.pending.append(text)

    def drop_pending(self) -> None:
        """Remove the pending text, and the white space before it, from the output."""
        self.drop_whitespace()
        self._classify(MARKUP, self.pending_text)
        self.pending = []

    def write_pending(self, text: str, fault: str) -> None:
        """Write the pending text, followed by `text`, as content.

        The pending text looked like a marker, so no event contains it yet. If both texts contain
        only white space, store the white space, because a marker may follow. Example: with the
        pending text `<tool_call>` and the text ` is`, an event for the content `<tool_call> is` is
        appended. Afterwards, no text is pending, and the last text is content.

        Args:
            text: The text after the pending text.
            fault: The reason that the event gives for returning a marker as content.
        """
        new_text = self._without_prompt(self.pending_text + text)
        self.pending = []
        is_visible = bool(new_text.strip())
        if not is_visible:
            self.store_whitespace(new_text)
            return
        content = self._take_whitespace() + new_text
        self._classify(CONTENT, content)
        # The trace has already received the restored white space, classified as "markup".
        restored_whitespace = self._take_removed_whitespace()
        self._events.append(ContentDelta(restored_whitespace + content, fault))
        self.is_after_marker = False
        self.has_content = True
        self.has_text = True
        self._is_last_text_content = True

    # ---- the text of calls -----------------------------------------------------------------------

    def write_call(self, text: str, *, may_be_reread: bool) -> None:
        """Classify the text of a tool call as "call", and remove the pending text before it.

        Only the trace receives this text. The CallWriter appends the events of the tool call.

        Args:
            text: The text.
            may_be_reread: Whether the parser may read the end of the text again, as other text. If
                so, the trace receives the text only when `end_call` is called.
        """
        if self.pending:
            self.drop_pending()
        if self._trace is None:
            if self._num_prompt_chars:
                self._without_prompt(text)  # Only counts the characters of the prompt.
        elif may_be_reread:
            self._call_text.append(text)
        else:
            self._classify(CALL, text)

    def shorten_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters of the stored text of a tool call."""
        text = "".join(self._call_text)
        self._call_text = [text[: max(0, len(text) - num_chars)]]

    def end_call(self) -> None:
        """Pass the stored text of a tool call to the trace function."""
        if self._call_text:
            self._classify(CALL, "".join(self._call_text))
            self._call_text = []

    # ---- the prompt ------------------------------------------------------------------------------

    def forget_prompt(self, num_unread_chars: int) -> None:
        """Treat all earlier text as a part of the prompt. No events are returned for the prompt.

        Args:
            num_unread_chars: The number of characters of the prompt that have not been read.
        """
        self._whitespace = []
        self._removed_whitespace = ""
        self._num_prompt_chars = len(self.pending_text) + num_unread_chars

    def _without_prompt(self, text: str) -> str:
        """Remove the characters of the prompt from the start of `text`, and return the rest.

        These characters are subtracted from `_num_prompt_chars`.

        Example: the prompt ends with `<th`, and the model writes `ink>`. For the marker `<think>`,
        the result is `ink>`.
        """
        num_prompt_chars = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= num_prompt_chars
        return text[num_prompt_chars:]
