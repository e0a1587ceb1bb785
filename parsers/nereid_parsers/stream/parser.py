"""The interface of the parser: `StreamParser` for text in pieces, `parse` for a complete text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_parsers.declarations import FormatData, Stage
from nereid_parsers.events import Event, Message, fold
from nereid_parsers.policy import Policy
from nereid_parsers.start_stage import find_start
from nereid_parsers.stream.argument_types import Tools
from nereid_parsers.stream.call_writer import generate_call_id
from nereid_parsers.stream.format_plan import plan_of
from nereid_parsers.stream.machine import Machine
from nereid_parsers.stream.text_writer import Trace


class StreamParser:
    """Parses one message while it is generated.

    The parser holds back only text that may still become a marker, and white space before such
    text. It never withdraws an event. The time is linear in the length of the text. No text that a
    model writes raises an exception.
    """

    def __init__(
        self,
        fmt: FormatData,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        *,
        policy: Policy | None = None,
        new_id: Callable[[], str] = generate_call_id,
        trace: Trace | None = None,
    ) -> None:
        """Create a parser for one message.

        Args:
            fmt: The format that the model writes.
            tools: The OpenAI tools list that the prompt offers. None if it is not known.
            prompt: The rendered prompt with its generation prompt. None if it is not known.
            policy: The policy to use instead of the format's own.
            new_id: A function that generates the id of a call to which the model gave no id.
            trace: A function that receives, in order, each piece of the text and its
                classification: "reasoning", "content", "call" or "markup".
        """
        self._machine = Machine(plan_of(fmt), Tools(tools), policy or fmt.policy, new_id)
        self._machine.start(find_start(fmt, prompt))
        self._machine.set_trace(trace)
        self._is_finished = False

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of the text and return its events.

        Raises:
            ValueError: `finish` has been called.
        """
        if self._is_finished:
            raise ValueError("feed was called after finish, but a parser reads only one message")
        return self._machine.feed(text)

    def finish(self) -> list[Event]:
        """End the text and return the events that were held back. A second call returns []."""
        if self._is_finished:
            return []
        self._is_finished = True
        return self._machine.finish()

    @property
    def stage(self) -> Stage:
        """The stage of the next character, as far as it is decided."""
        return self._machine.stage

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning has ended, in the text so far or in the prompt."""
        return self._machine.has_reasoned


@dataclass(frozen=True, slots=True)
class OutputStart:
    """The state of the reasoning at the end of a prompt.

    Attributes:
        stage: The stage in which the output starts. The header of a message counts as content.
        has_reasoned: Whether the prompt contains reasoning that is closed.
    """

    stage: Stage
    has_reasoned: bool


def output_start(fmt: FormatData, prompt: str | None) -> OutputStart:
    r"""Return the state in which the output after `prompt` starts.

    Example: with the reasoning marker `<think>`, the prompt `"..<think>\n"` gives
    `OutputStart(Stage.REASONING, has_reasoned=False)`.

    Args:
        fmt: The format of the output.
        prompt: The rendered prompt with its generation prompt. None if it is not known.
    """
    start = find_start(fmt, prompt)
    if not start.prefill:
        return OutputStart(start.stage or Stage.CONTENT, has_reasoned=False)
    machine = Machine(plan_of(fmt), Tools(None), fmt.policy, generate_call_id)
    machine.start(start)
    return OutputStart(machine.stage, machine.has_reasoned)


def parse(
    text: str,
    *,
    format: FormatData,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    policy: Policy | None = None,
) -> Message:
    r"""Parse a complete message. For the arguments see `StreamParser`.

    Example: `parse("<think>\nHm\n</think>\n\nHi", format=get_format("qwen3"))` returns
    `Message(reasoning="Hm", content="Hi", tool_calls=[])`.
    """
    parser = StreamParser(format, tools=tools, prompt=prompt, policy=policy)
    return fold([*parser.feed(text), *parser.finish()])
