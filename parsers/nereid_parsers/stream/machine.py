"""The state machine of the stream parser. Seven objects store, read and write the text.

TextBuffer       stores the text that has not been read.
ReasoningReader  reads reasoning, and passes its text to a TextWriter.
ContentReader    reads content, and passes its text to the TextWriter.
HeaderReader     reads message headers.
CallReader       reads tool calls, and passes their names and arguments to a CallWriter.
TextWriter       appends the events of reasoning and content to a list.
CallWriter       appends the events of tool calls to the same list.

The classes that read each piece of a tool call declare `__slots__`. In a measurement without
`__slots__`, the parser took about 3 % longer for a tool call in pieces of one character.
"""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.declarations import Stage
from nereid_parsers.events import Event
from nereid_parsers.policy import Policy
from nereid_parsers.start_stage import StartPoint
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled_format import CompiledFormat
from nereid_parsers.stream.content_reader import ContentReader
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.reasoning_reader import ReasoningReader
from nereid_parsers.stream.state import State
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter, Trace
from nereid_parsers.stream.values.argument_types import Tools

_STAGES = {
    State.REASONING: Stage.REASONING,
    State.INLINE_REASONING: Stage.REASONING,
    State.INTERRUPTED_REASONING: Stage.REASONING,
    State.CONTENT: Stage.CONTENT,
    State.CONTENT_ONLY: Stage.CONTENT,
    State.PLAIN_MESSAGE: Stage.CONTENT,
    State.HEADER: Stage.CONTENT,
}


class Machine:
    """Reads one message and collects the events of this message.

    Example: `feed("<think>Hm</think>Hi")` starts in the state CONTENT. The marker `<think>` leads
    to the state REASONING, and `</think>` leads back to CONTENT. The result is
    `[ReasoningDelta("Hm"), ContentDelta("Hi")]`.

    For each state, a table contains the method that reads text in this state. The method returns
    the next state, or None if it needs more text. Text that a method has not read is passed to the
    method again, together with the text that follows.
    """

    def __init__(
        self, format: CompiledFormat, tools: Tools, policy: Policy, new_id: Callable[[], str]
    ) -> None:
        """Create the readers and writers, and enter the state CONTENT.

        The readers share one buffer and one list of events. For the parameters see `StreamParser`.
        """
        self._events: list[Event] = []
        self._buffer = TextBuffer()
        self._text_writer = TextWriter(self._events)
        self._call_writer = CallWriter(self._events, tools, policy, new_id)
        context = ReaderContext(format, policy, self._buffer, self._text_writer)
        self._call_reader = CallReader(context, self._call_writer)
        self._header_reader = HeaderReader(context, self._call_reader)
        self._reasoning_reader = ReasoningReader(context, self._call_reader, self._header_reader)
        self._content_reader = ContentReader(
            context, self._call_reader, self._header_reader, self._reasoning_reader
        )
        self._read_methods = self._methods_by_state()
        self._enter(State.CONTENT)

    def _methods_by_state(self) -> dict[State, Callable[[], State | None]]:
        """Return the table of the methods that read text, one for each state.

        Each method returns the next state, or None if the method needs more text.
        """
        return {
            State.UNCLASSIFIED: self._reasoning_reader.read_unclassified,
            State.REASONING: self._reasoning_reader.read,
            State.INLINE_REASONING: self._reasoning_reader.read_inline,
            State.INTERRUPTED_REASONING: self._reasoning_reader.read_interrupted,
            State.CONTENT: self._content_reader.read,
            State.CONTENT_ONLY: self._content_reader.read_content_only,
            State.PLAIN_MESSAGE: self._content_reader.read_plain_message,
            State.HEADER: self._header_reader.read,
            State.CALL_START: self._call_reader.read_start,
            State.CALL_BODY: self._call_reader.read_body,
            State.BROKEN_CALL: self._call_reader.read_broken,
            State.CALL_END: self._call_reader.read_end,
            State.BETWEEN_CALLS: self._call_reader.read_between,
        }

    def _enter(self, state: State) -> None:
        """Change the state to `state`, and select the method that reads text in this state."""
        self._state = state
        # The method is looked up here, not for each piece of text, because the state rarely
        # changes.
        self._read = self._read_methods[state]

    def start(self, start_point: StartPoint) -> None:
        """Enter the state in which the output starts. The state before this call is CONTENT.

        Example: if the prompt ends with `<think>`, the output starts in the state REASONING.

        Args:
            start_point: The start of the output, which the prompt determines. If the prompt already
                contains the beginning of the message, `start_point.prefill` is this beginning.
        """
        starts_in_reasoning = start_point.stage is Stage.REASONING
        if start_point.stage is None:  # The prompt ends inside the header of a message.
            self._enter(State.HEADER)
        elif start_point.prefill:
            # Parsing the prefill shows the state in which the output starts. The client receives no
            # events for the prefill.
            self._forget_prompt(self.feed(start_point.prefill))
        elif self._delays_first_text(start_point):
            # The first text may be reasoning or content. A marker will show which of the two it is.
            # If no marker follows, the text is reasoning if the output starts in the reasoning.
            self._reasoning_reader.is_reasoning_by_default = starts_in_reasoning
            self._enter(State.UNCLASSIFIED)
        elif starts_in_reasoning:
            self._enter(self._reasoning_reader.start_opened())

    def _delays_first_text(self, start_point: StartPoint) -> bool:
        """Return whether the first text is stored until a marker shows if the text is reasoning."""
        is_ambiguous = self._reasoning_reader.delays_unclassified_text()
        return is_ambiguous and not start_point.is_prompt_known

    def _forget_prompt(self, events: list[Event]) -> None:
        """Treat all earlier text as a part of the prompt, and discard the events of the prompt.

        The model has not generated this text, so the client receives no events for it. There is one
        exception: if a tool call is open at the end of the prompt, its arguments continue in the
        output, so the next `feed` returns the events of this tool call.

        Args:
            events: All events of the prompt.
        """
        open_call_events = self._call_writer.restart_numbering(events)
        # The prompt also includes text that has not been classified yet.
        num_stored_chars = self._reasoning_reader.num_stored_chars()
        num_unread_chars = len(self._buffer.unread())
        self._text_writer.forget_prompt(num_stored_chars + num_unread_chars)
        if self._state is State.INLINE_REASONING:
            # The events of the prompt are discarded, including the event with the opening marker.
            # The client needs this marker, so the marker is written again.
            self._reasoning_reader.repeat_opening_marker()
        self._events += open_call_events

    def set_trace(self, trace: Trace | None) -> None:
        """From now on, pass each piece of text and its classification to the function `trace`."""
        self._text_writer.set_trace(trace)

    def feed(self, text: str) -> list[Event]:
        """Parse as much of `text` as possible, and return the new events."""
        self._buffer.append(text)
        self._run()
        events = self._events[:]
        self._events.clear()
        return events

    def _run(self) -> None:
        """Parse the unread text until no text is left, or until a reader needs more text."""
        buffer = self._buffer
        while buffer.pos < len(buffer.text):
            state = self._read()
            if state is None:
                return
            if state is not self._state:
                self._enter(state)

    def finish(self) -> list[Event]:
        """Parse all remaining text as the end of the message, and return the last events.

        Text that was stored because more text could have changed its meaning is now reasoning,
        content or a tool call. The machine cannot be used after this call.
        """
        self._buffer.is_final = True
        # The order of these steps is important, because a step may enter a state that only a later
        # step can end.
        self._finish_before_reading()
        self._run()
        self._finish_interrupted_reasoning()
        self._finish_incomplete_calls()
        self._finish_state()
        self._text_writer.finish_whitespace(
            is_reasoning=self._state is State.REASONING, has_calls=self._call_reader.has_calls()
        )
        return self._events

    def _finish_before_reading(self) -> None:
        """Classify the stored text, and remove an incomplete marker at the end of the message.

        Stored text may be reasoning or content, and no more text can show which of the two it is.
        """
        if self._state is State.UNCLASSIFIED:
            self._enter(self._reasoning_reader.finish_unclassified())
        if self._state in (State.REASONING, State.CONTENT, State.CONTENT_ONLY):
            self._content_reader.finish_marker(self._state)

    def _finish_interrupted_reasoning(self) -> None:
        """Read a tool call inside the reasoning if the reasoning was never closed.

        In the state INTERRUPTED_REASONING, the text of the tool call has been stored.
        `finish_interrupted` puts this text back into the buffer.
        """
        if self._state is State.INTERRUPTED_REASONING:
            self._enter(self._reasoning_reader.finish_interrupted())
            self._run()

    def _finish_incomplete_calls(self) -> None:
        """End an incomplete tool call at the end of the message.

        `finish_body` may find the closing marker in the stored arguments. The text after this
        marker is then read again, and may contain another incomplete tool call.
        """
        while self._state is State.CALL_BODY:
            self._enter(self._call_reader.finish_body())
            self._run()

    def _finish_state(self) -> None:
        """At the end of the message, end an incomplete tool call, header or tool section."""
        if self._state is State.BROKEN_CALL:
            self._call_reader.finish_broken()
        elif self._state is State.HEADER:
            self._header_reader.finish()
        elif self._state in (State.CALL_START, State.BETWEEN_CALLS):
            self._call_reader.finish_empty_section()

    @property
    def stage(self) -> Stage:
        """The part of the message to which the next character probably belongs."""
        if self._state is State.UNCLASSIFIED:
            is_reasoning = self._reasoning_reader.is_reasoning_by_default
            return Stage.REASONING if is_reasoning else Stage.CONTENT
        return _STAGES.get(self._state, Stage.CALLS)

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning has ended."""
        return self._reasoning_reader.has_reasoned
