"""The state machine of the stream parser. It consists of the following nine objects.

TextBuffer          stores the text that has not been read.
UnclassifiedReader  reads the first text if it may be reasoning or content.
ReasoningReader     reads reasoning, and passes its text to a TextWriter.
ContentReader       reads content, and passes its text to the TextWriter.
HeaderReader        reads message headers.
CallReader          reads tool calls, and passes their names and arguments to a CallWriter.
BetweenCallsReader  reads the separators and markers between tool calls.
TextWriter          appends the events of reasoning and content to a list.
CallWriter          appends the events of tool calls to the same list.

The classes that read each piece of a tool call declare `__slots__`. In a measurement without
`__slots__`, the parser took about 3 % longer for a tool call in pieces of one character.
"""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.declarations import Stage
from nereid_parsers.events import Event
from nereid_parsers.policy import Policy
from nereid_parsers.start_stage import StartPoint
from nereid_parsers.stream.between_calls_reader import BetweenCallsReader
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
from nereid_parsers.stream.unclassified_reader import UnclassifiedReader
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
    the next state, or None if more text is required. Text that the method has not read stays in the
    buffer, and the method is called again when more text has arrived.
    """

    def __init__(
        self, fmt: CompiledFormat, tools: Tools, policy: Policy, new_id: Callable[[], str]
    ) -> None:
        """Create the readers and writers for one message, and enter the state CONTENT.

        All readers read from one buffer, and all writers append to one list of events. A reader
        receives the readers that it calls, so these readers are created first. Example: a tool call
        may follow content, so the ContentReader calls the CallReader.

        `new_id` generates an id for a tool call to which the model gave no id.
        """
        self._events: list[Event] = []
        self._buffer = TextBuffer()
        self._call_writer = CallWriter(self._events, tools, policy, new_id)
        # The parser can read the end of a tool call again only if the arguments are stored.
        may_reread_calls = self._call_writer.stores_arguments
        self._text_writer = TextWriter(self._events, may_reread_calls=may_reread_calls)
        context = ReaderContext(fmt, policy, self._buffer, self._text_writer)
        self._call_reader = CallReader(context, self._call_writer)
        self._between_calls_reader = BetweenCallsReader(context, self._call_reader)
        self._header_reader = HeaderReader(context, self._call_reader)
        self._reasoning_reader = ReasoningReader(context, self._call_reader, self._header_reader)
        self._unclassified_reader = UnclassifiedReader(context, self._reasoning_reader)
        self._content_reader = ContentReader(
            context, self._call_reader, self._header_reader, self._reasoning_reader
        )
        self._read_methods = self._methods_by_state()
        self._enter(State.CONTENT)

    def _methods_by_state(self) -> dict[State, Callable[[], State | None]]:
        """Return a dict that maps each state to the method that reads text in this state.

        Each method reads text from the buffer, and returns the next state, or None if more text is
        required. Example: in the state HEADER, the HeaderReader reads the header of a message.
        """
        return {
            State.UNCLASSIFIED: self._unclassified_reader.read_to_first_marker,
            State.REASONING: self._reasoning_reader.read,
            State.INLINE_REASONING: self._reasoning_reader.read_inline,
            State.INTERRUPTED_REASONING: self._reasoning_reader.store_until_closed,
            State.CONTENT: self._content_reader.read,
            State.CONTENT_ONLY: self._content_reader.read_content_only,
            State.PLAIN_MESSAGE: self._content_reader.read_plain_message,
            State.HEADER: self._header_reader.read,
            State.CALL_START: self._call_reader.read_start,
            State.CALL_BODY: self._call_reader.read_body,
            State.BROKEN_CALL: self._call_reader.read_broken,
            State.CALL_END: self._call_reader.read_end,
            State.BETWEEN_CALLS: self._between_calls_reader.read,
        }

    def _enter(self, state: State) -> None:
        """Change the state to `state`, and select the method that reads text in this state."""
        self._state = state
        # The method is looked up here once, and not again for each piece of text. This is faster,
        # because the state changes rarely.
        self._read = self._read_methods[state]

    def start(self, start_point: StartPoint) -> None:
        """Enter the state in which the parser starts to read the model's output.

        The first case that applies decides:

            start point                            state
            inside a header (`stage` is None)      HEADER
            with a prefill, such as `<think>`      the state after the prefill, here REASONING
            the prompt is not known                UNCLASSIFIED, if reasoning may start without a
                                                   marker
            in the reasoning                       REASONING or INLINE_REASONING
            any other                              CONTENT

        Args:
            start_point: The part of the message (reasoning or content) at the end of the prompt.
                `prefill` is the beginning of the message that the prompt contains, or "".
        """
        starts_in_reasoning = start_point.stage is Stage.REASONING
        if start_point.stage is None:
            self._enter(State.HEADER)
        elif start_point.prefill:
            prefill_events = self.feed(start_point.prefill)
            self._forget_prompt(prefill_events)
        elif not start_point.is_prompt_known and self._unclassified_reader.is_needed():
            # The first marker will show whether the text before this marker is reasoning or
            # content. If the message contains no marker, `start_point.stage` decides.
            self._unclassified_reader.is_reasoning_by_default = starts_in_reasoning
            self._enter(State.UNCLASSIFIED)
        elif starts_in_reasoning:
            self._enter(self._reasoning_reader.start_opened())
        else:
            self._enter(State.CONTENT)

    def _forget_prompt(self, events: list[Event]) -> None:
        """Discard the `events` of the prefill, because the client already knows the prompt."""
        # If the prefill ends inside a tool call, the events of this tool call are kept, because the
        # output continues the tool call.
        self._events += self._call_writer.renumbered_open_call(events)
        self._call_writer.restart_numbering()
        # In the state INLINE_REASONING, the client receives reasoning as content. This content
        # starts with the marker `<think>`, even if the prompt contains the marker.
        if self._state is State.INLINE_REASONING:
            self._reasoning_reader.write_opening_marker()
        # The last characters of the prefill, such as `<th`, may not have been written yet, because
        # the output decides their meaning. The TextWriter omits these characters later.
        num_unread_chars = len(self._buffer.unread())
        num_stored_chars = self._reasoning_reader.num_stored_chars()
        self._text_writer.mark_prompt_end(num_unwritten_chars=num_unread_chars + num_stored_chars)

    def set_trace(self, trace: Trace | None) -> None:
        """Pass each later piece of text, together with its classification, to `trace`."""
        self._text_writer.set_trace(trace)

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of the message, and return the new events.

        The end of `text` stays in the buffer if it may be the start of a marker.
        """
        self._buffer.append(text)
        self._run()
        events = self._events[:]
        self._events.clear()
        return events

    def _run(self) -> None:
        """Parse the unread text until no text is left, or until more text is required."""
        buffer = self._buffer
        while buffer.pos < len(buffer.text):
            state = self._read()
            if state is None:
                return
            if state is not self._state:
                self._enter(state)

    def finish(self) -> list[Event]:
        """Parse the remaining text at the end of the message, and return the last events.

        Text may be stored or unread, because more text could have changed its meaning. This text is
        now classified. Examples: `Hi <` is content, and `<tool_call>{"name": "f"` is a tool call
        without arguments. The machine cannot be used after this call.
        """
        self._buffer.is_final = True
        if self._state is State.UNCLASSIFIED:  # No marker has shown whether the text is reasoning.
            self._enter(self._unclassified_reader.finish())
        if self._state in (State.REASONING, State.CONTENT, State.CONTENT_ONLY):
            self._content_reader.drop_incomplete_marker(self._state)
        self._run()
        # Each `_finish_...` method handles certain states, and does nothing in other states. The
        # order matters: `_finish_interrupted_reasoning` may read an incomplete tool call from the
        # stored text, and `_finish_incomplete_calls` then ends this tool call.
        self._finish_interrupted_reasoning()
        self._finish_incomplete_calls()
        self._finish_broken_call_or_marker()
        self._text_writer.finish_whitespace(
            is_reasoning=self._state is State.REASONING, has_calls=self._call_reader.has_calls()
        )
        return self._events

    def _finish_interrupted_reasoning(self) -> None:
        """At the end of the message, read a tool call that was found inside unclosed reasoning.

        In the state INTERRUPTED_REASONING, all text from the tool call on has been stored, because
        a closing marker would have shown that the text is reasoning. `finish_interrupted` puts the
        stored text back into the buffer, and the text is then read as a tool call.
        """
        if self._state is State.INTERRUPTED_REASONING:
            self._enter(self._reasoning_reader.finish_interrupted())
            self._run()

    def _finish_incomplete_calls(self) -> None:
        """At the end of the message, end each incomplete tool call.

        There may be several. If a quote is missing in the arguments, the text after the tool call
        was read as a part of the arguments. `finish_body` then ends the tool call at its closing
        marker. The text after the marker is read again, and may contain another tool call.
        """
        while self._state is State.CALL_BODY:
            self._enter(self._call_reader.finish_body())
            self._run()

    def _finish_broken_call_or_marker(self) -> None:
        """Handle a message that ends inside invalid arguments, or directly after a marker.

        Examples: the message ends in `<call>{"a": x`, directly after the marker `<|start|>` of a
        message, or directly after the marker `<tool_calls>`.
        """
        if self._state is State.BROKEN_CALL:
            self._call_reader.finish_broken()
        elif self._state is State.HEADER:
            self._header_reader.finish()
        elif self._state in (State.CALL_START, State.BETWEEN_CALLS):
            self._between_calls_reader.finish()

    @property
    def stage(self) -> Stage:
        """The kind of text that probably follows: reasoning, content or tool calls.

        Example: after `<think>`, reasoning probably follows.
        """
        if self._state is State.UNCLASSIFIED:
            is_reasoning = self._unclassified_reader.is_reasoning_by_default
            return Stage.REASONING if is_reasoning else Stage.CONTENT
        return _STAGES.get(self._state, Stage.CALLS)

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning has ended."""
        return self._reasoning_reader.has_reasoned
