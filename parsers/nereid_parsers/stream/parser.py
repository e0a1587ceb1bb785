"""START HERE: `StreamParser` turns text that arrives in pieces into events; `parse` folds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereid_parsers.events import Event, Message, fold
from nereid_parsers.format import Format, Policy, Stage
from nereid_parsers.stage import StartPoint, find_start
from nereid_parsers.stream.body import CallSink, made_up_id
from nereid_parsers.stream.machine import Machine, undecided_applies
from nereid_parsers.stream.plan import plan_of
from nereid_parsers.stream.schema import Tools
from nereid_parsers.stream.speech import Trace


class StreamParser:
    """Parses one message as it is generated.

    Time is linear in the text. What was given out is never taken back; held back is only what may
    still become a marker, and blanks before it. Model output never raises.
    """

    def __init__(
        self,
        fmt: Format,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        *,
        policy: Policy | None = None,
        new_id: Callable[[], str] = made_up_id,
        trace: Trace | None = None,
    ) -> None:
        """Make a parser for one message.

        fmt      how the model writes.
        tools    the OpenAI tools list that the prompt offers; None if that is not known.
        prompt   the rendered prompt, generation prompt included; None if that is not known.
        policy   instead of the format's own.
        new_id   makes the id of a call to which the model gave none.
        trace    is told, in order, every piece of the text and what it was taken for: "reasoning",
                 "content", "call" or "markup".
        """
        policy = policy or fmt.policy
        sink = CallSink([], Tools(tools), policy, new_id)
        self._machine = Machine(plan_of(fmt), sink, policy)
        self._begin(
            find_start(fmt, prompt), undecided_applies(policy, self._machine.reasoning_part)
        )
        self._machine.set_trace(trace)
        self._is_finished = False

    def feed(self, text: str) -> list[Event]:
        """Take more text; the events that it brings.

        Raises: ValueError after `finish`, a mistake of the caller's.
        """
        if self._is_finished:
            raise ValueError("feed after finish: a parser reads one message")
        self._machine.feed(text)
        return self._machine.take()

    def finish(self) -> list[Event]:
        """The text is over; the events that were held back. A second time: nothing."""
        if self._is_finished:
            return []
        self._is_finished = True
        self._machine.finish()
        return self._machine.take()

    @property
    def stage(self) -> Stage:
        """What the next character belongs to, as far as that is known."""
        machine = self._machine
        if machine.state in (machine.reasoning, machine.inline):
            return Stage.REASONING
        if machine.state == machine.undecided:
            return Stage.REASONING if machine.default_is_reasoning else Stage.CONTENT
        texts = (machine.content, machine.rest, machine.header)
        return Stage.CONTENT if machine.state in texts else Stage.CALLS

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning is over, in the text so far or in the prompt's end."""
        return self._machine.has_reasoned

    def _begin(self, begin: StartPoint, may_be_undecided: bool) -> None:
        machine = self._machine
        if begin.stage is None:  # a header
            machine.state = machine.header
        elif begin.prefill:
            machine.feed(begin.prefill)
            machine.forget_prompt()
        elif not begin.is_prompt_known and may_be_undecided:
            machine.state = machine.undecided
            machine.default_is_reasoning = begin.stage is Stage.REASONING
        elif begin.stage is Stage.REASONING:
            machine.state = machine.start_reasoning()


def stage_of(fmt: Format, prompt: str | None) -> Stage:
    """Where output that follows `prompt` starts; a message's header counts as content."""
    return StreamParser(fmt, prompt=prompt).stage


def parse(
    text: str,
    *,
    format: Format,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    policy: Policy | None = None,
) -> Message:
    """Parse a whole message: the fold of a StreamParser's events."""
    parser = StreamParser(format, tools=tools, prompt=prompt, policy=policy)
    return fold([*parser.feed(text), *parser.finish()])
