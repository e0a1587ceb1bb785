"""Reads the text before the first marker. The marker shows whether this text is reasoning."""

from __future__ import annotations

from nereid_parsers.declarations import Opener, Shown
from nereid_parsers.policy import StrayClose
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.reasoning_reader import ReasoningReader
from nereid_parsers.stream.state import State


class UnclassifiedReader:
    """Reads a message up to the first marker, such as `</think>`, if the prompt is not known.

    An unknown prompt may end with the opening marker of the reasoning, such as `<think>`. The text
    after the prompt is then reasoning, and otherwise content. The reader therefore stores the text
    until the first marker has arrived. Then the reader puts the stored text back into the buffer,
    and the text is read again, as reasoning or as content.

    Example: in `Let me see.</think>Hi`, the marker `</think>` shows that `Let me see.` is
    reasoning. In `Let me see.<tool_call>`, `<tool_call>` shows that `Let me see.` is content.

    Attributes:
        is_reasoning_by_default: Whether the text is reasoning if the message contains no marker.
    """

    __slots__ = (
        "_buffer", "_format", "_reasoning_reader", "_stored_text", "_stray_close",
        "is_reasoning_by_default",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, reasoning: ReasoningReader) -> None:
        """Create a reader for the text in `context`. `reasoning` is the reader for reasoning."""
        self._buffer = context.buffer
        self._format = context.format
        self._stray_close = context.policy.stray_close  # The rule for `</think>` without `<think>`.
        self._reasoning_reader = reasoning
        self._stored_text: list[str] = []
        self.is_reasoning_by_default = False

    def is_needed(self) -> bool:
        """Return whether the text before the first marker can be either reasoning or content.

        This method is used if the prompt is not known. Text without an opening marker, such as `Hm`
        in `Hm</think>Hi`, may be reasoning in two cases:

        - Some templates of the model family end the prompt with `<think>` (`Opener.EITHER`).
        - The policy treats text before `</think>` as reasoning, even without `<think>`
          (`StrayClose.REASONING`).
        """
        reasoning = self._format.reasoning
        if reasoning is None or reasoning.shown is Shown.INLINE:
            return False  # The client receives all text as content, so no decision is needed.
        prompt_may_open_reasoning = reasoning.opener is Opener.EITHER
        opening_may_be_missing = self._stray_close is StrayClose.REASONING
        return prompt_may_open_reasoning or opening_may_be_missing

    def read_and_classify(self) -> State | None:
        """Store the text up to the first marker. This marker shows whether the text is reasoning.

        Examples: `</think>` closes the reasoning, so `Let me see.` in `Let me see.</think>` is
        reasoning. Before any other marker, such as `<tool_call>`, the text is content.

        The stored text is put back into the buffer before the marker. Return the state in which the
        parser reads it as reasoning or as content, or None if no marker has arrived.
        """
        text_end, marker = self._format.content_markers.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(text_end))
        if not marker:
            return None
        closes_reasoning = self._format.content_markers.kinds[marker] is MarkerKind.CLOSE_REASONING
        return self._restart(is_reasoning=closes_reasoning)

    def finish(self) -> State:
        """At the end of a message without a marker, classify the stored text.

        The text is reasoning if `is_reasoning_by_default` is True, and otherwise content. The text
        is put back into the buffer. Return the state in which the parser reads it.
        """
        return self._restart(is_reasoning=self.is_reasoning_by_default)

    def _restart(self, *, is_reasoning: bool) -> State:
        """Put the stored text back into the buffer, because it is now known what the text is.

        Return the state in which the text is read: the state for reasoning if `is_reasoning` is
        true, and otherwise the state CONTENT.
        """
        self._buffer.push_back("".join(self._stored_text))
        self._stored_text = []
        return self._reasoning_reader.start_opened() if is_reasoning else State.CONTENT
