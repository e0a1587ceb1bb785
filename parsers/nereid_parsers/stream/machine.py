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
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.calls.between_calls_reader import BetweenCallsReader
from nereid_parsers.stream.calls.call_reader import CallReader
from nereid_parsers.stream.compiled.compiled_format import CompiledFormat
from nereid_parsers.stream.content_reader import ContentReader
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.reasoning_reader import ReasoningReader
from nereid_parsers.stream.state import State
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter
from nereid_parsers.stream.tracer import Trace
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
        # If a quote is missing, as in `{"a": "x}</call> Hi`, the parser searches for `</call>` in
        # the arguments, and reads `</call> Hi` again. Only stored arguments can be searched.
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
            State.UNCLASSIFIED: self._unclassified_reader.read_and_classify,
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
            State.BETWEEN_CALLS: self._between_calls_reader.read,
        }

    def _enter(self, state: State) -> None:
        """Change the state to `state`, and select the method that reads text in this state."""
        self._state = state
        # It is faster to look up the method here than for each piece of text.
        self._read = self._read_methods[state]

    def start(self, start_point: StartPoint) -> None:
        """Enter the state in which the parser starts to read the model's output.

        The prompt may contain the beginning of the message, which is called the "prefill". The
        prefill is read first. Example: the prefill `<think>` leads to the state REASONING.

        `start_point` describes where in the message the prefill starts, for example in the content.
        """
        self._enter(self._prepare_first_state(start_point))
        if start_point.prefill:
            prefill_events = self.feed(start_point.prefill)
            self._discard_prefill(prefill_events)

    def _prepare_first_state(self, start_point: StartPoint) -> State:
        """Return the state that reads the first text of the message, and prepare its reader.

        The first case that applies decides:

            start point                  state
            in the header of a message   HEADER
            uncertain                    UNCLASSIFIED, because the first marker will show whether
                                         the text before this marker is reasoning or content
            in the reasoning             REASONING or INLINE_REASONING
            in the content               CONTENT
        """
        if start_point.stage is None:
            return State.HEADER
        starts_in_reasoning = start_point.stage is Stage.REASONING
        may_be_in_reasoning = self._unclassified_reader.is_needed()
        is_uncertain = not start_point.is_prompt_known and may_be_in_reasoning
        if is_uncertain:
            # A message without markers is reasoning if the start point is in the reasoning.
            self._unclassified_reader.is_reasoning_by_default = starts_in_reasoning
            return State.UNCLASSIFIED
        if starts_in_reasoning:
            return self._reasoning_reader.start_opened()  # REASONING or INLINE_REASONING
        return State.CONTENT

    def _discard_prefill(self, events: list[Event]) -> None:
        """Discard the `events` of the prefill, because the client already knows the prompt.

        A part of the prefill that the output continues is kept: an open tool call, inline reasoning
        and the beginning of a marker, such as `<th`.
        """
        self._keep_open_call(events)
        if self._state is State.INLINE_REASONING:
            # The client receives this reasoning as content. The content must start with the marker
            # `<think>`, even if the prompt contains the marker.
            self._reasoning_reader.write_opening_marker()
        self._text_writer.mark_prompt_end(num_unwritten_chars=self._num_unwritten_chars())

    def _keep_open_call(self, events: list[Event]) -> None:
        """If the prefill ends inside a tool call, do not discard the events of this tool call.

        `events` are the events of the prefill. The output continues the tool call, which becomes
        the first tool call of the output.
        """
        self._events += self._call_writer.copy_events_of_open_call(events)
        self._call_writer.restart_numbering()
        self._call_writer.forbid_cuts_in_prompt()

    def _num_unwritten_chars(self) -> int:
        """Return the number of characters at the end of the prefill that are not written yet.

        Example: `<th` may become a marker, so the output decides the meaning of these characters.
        """
        num_unread_chars = len(self._buffer.unread())
        return num_unread_chars + self._reasoning_reader.num_stored_chars()

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
        """Parse the remaining text at the end of the message, and return its events.

        The last characters of the message may not have been parsed yet, because their meaning
        depended on the text that would follow. Examples: `<` at the end of `Hi <` is now content,
        and `<tool_call>{"name": "f"` is a tool call without arguments. The machine cannot be used
        after this call.
        """
        self._read_unread_text()
        self._finish_last_state()
        self._text_writer.finish_whitespace(
            is_reasoning=self._state is State.REASONING, has_calls=self._call_reader.has_calls()
        )
        return self._events

    def _read_unread_text(self) -> None:
        """Read the text that is left in the buffer, because no more text can change its meaning.

        Example: the unread text `<th` is content, because the marker `<think>` is not complete.
        """
        self._buffer.is_final = True
        if self._state is State.UNCLASSIFIED:  # No marker has shown whether the text is reasoning.
            self._enter(self._unclassified_reader.finish())
        if self._state in (State.REASONING, State.CONTENT, State.CONTENT_ONLY):
            is_reasoning = self._state is State.REASONING
            self._content_reader.drop_incomplete_marker(is_reasoning=is_reasoning)
        self._run()

    def _finish_last_state(self) -> None:
        """Finish the part of the message that is still incomplete, such as a tool call.

        Unread text may follow this part, such as another tool call, which is then read and
        finished, too.
        """
        while (next_state := self._finish_state()) is not None:
            self._enter(next_state)
            self._run()

    def _finish_state(self) -> State | None:
        """Finish the part of the message that the current state reads, if it is incomplete.

        Return the state in which the rest of the text is read, or None if nothing is left to read.
        """
        match self._state:
            case State.INTERRUPTED_REASONING:  # The stored text starts with a tool call.
                return self._reasoning_reader.finish_interrupted()
            case State.CALL_BODY:  # Such as `<call>{"name": "f"`.
                return self._call_reader.finish_body()
            case State.BROKEN_CALL:  # Such as `<call>{"a": x`.
                self._call_reader.finish_broken()
            case State.HEADER:  # Such as `<|start|>`.
                self._header_reader.finish()
            case State.CALL_START | State.BETWEEN_CALLS:  # Such as `<tool_calls>`.
                self._between_calls_reader.finish()
            case _:  # Nothing is incomplete.
                pass
        return None

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
