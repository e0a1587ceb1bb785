"""What the machine says: events, the blanks held back before them, the account of its input."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.events import ContentDelta, Event, ReasoningDelta
from nereid_parsers.stream.body import CallSink

Trace = Callable[[str, str], None]


class Speech:
    """The text to be read, and what was made of it so far.

    Every piece of input is told to `trace(kind, text)` once and in order, as "reasoning",
    "content", "call" or "markup"; what is told as reasoning or content is what the events say.
    """

    def __init__(self, sink: CallSink) -> None:
        self.text = ""  # what is being read
        self.at = 0  # up to where it was consumed
        self.final = False  # no more will come
        self.sink = sink
        self.out: list[Event] = sink.out
        self.is_fresh = False  # what comes next follows a marker: blank lines first are markup
        self.has_spoken = False  # content that is not blank was given
        self._trace: Trace | None = None
        self._blanks: list[str] = []
        self._said = False  # something not blank was said in the present stretch of text
        self._told_late: list[str] = []  # a call's text, while parts of it may be read again
        self._borrowed = 0  # characters of the prompt that are still held

    def set_trace(self, trace: Trace | None) -> None:
        """From now on, tell `trace` what each piece of text was taken for."""
        self._trace = trace

    def take(self) -> list[Event]:
        """The events since the last time."""
        events = self.out
        if events:
            self.out = self.sink.out = []
            return events
        return []

    def _tell(self, kind: str, text: str) -> None:
        if self._borrowed:
            text = self._own(text)
        if self._trace is not None and text:
            self._trace(kind, text)

    def _take_marker(self, marker: str) -> None:
        """Consume a marker, and the blanks held back before it."""
        self._drop_blanks()
        self.at += len(marker)
        self._tell("markup", marker)
        self.is_fresh = True

    def _drop_blanks(self) -> None:
        if self._blanks:
            self._tell("markup", "".join(self._blanks))
            self._blanks = []
        self._said = False

    def _say(self, text: str, event: type[ReasoningDelta] | type[ContentDelta]) -> None:
        """Give text out, but for blanks at its end, which count as markup if a marker follows."""
        if self._borrowed:
            text = self._own(text)
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return
        ends_at = len(body)
        if self._blanks:
            body = "".join(self._blanks) + body
            self._blanks = []
        if self.is_fresh:
            # Between two stretches of content, blank lines part them; they are markup only before.
            is_first = event is ReasoningDelta or not self.has_spoken
            body = self._without_blank_lines(body) if is_first else body
            self.is_fresh = False
        if ends_at < len(text):
            self._blanks.append(text[ends_at:])
        self._said = True
        if event is ContentDelta:
            self.has_spoken = True
            self._tell("content", body)
        else:
            self._tell("reasoning", body)
        self.out.append(event(body))

    def _without_blank_lines(self, text: str) -> str:
        """Text without the blank lines at its start, which belong to the marker before it."""
        lead = len(text) - len(text.lstrip())
        cut = max(text.rfind("\n", 0, lead), text.rfind("\r", 0, lead)) + 1
        self._tell("markup", text[:cut])
        return text[cut:]

    def _flush_blanks(self, is_reasoning: bool) -> None:
        """At the end blanks belong to the text before them; alone, to no one if calls were made."""
        blanks = "".join(self._blanks)
        self._blanks = []
        if not blanks:
            return
        if self._said or not (self.is_fresh or is_reasoning or self.sink.count):
            event: Event = ReasoningDelta(blanks) if is_reasoning else ContentDelta(blanks)
            self._tell("reasoning" if is_reasoning else "content", blanks)
            self.out.append(event)
        else:
            self._tell("markup", blanks)

    def _own(self, text: str) -> str:
        """Held text without what the prompt put before it."""
        borrowed = min(self._borrowed, len(text))
        self._borrowed -= borrowed
        return text[borrowed:]

    def _tell_call(self, text: str) -> None:
        if self.sink.holds and self._trace is not None:
            self._told_late.append(text)
        else:
            self._tell("call", text)

    def _flush_call(self) -> None:
        if self._told_late:
            self._tell("call", "".join(self._told_late))
            self._told_late = []
