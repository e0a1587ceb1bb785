"""The public interface. `StreamParser` parses a text in pieces; `parse` parses a complete text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_parsers.declarations import FormatData, Stage
from nereid_parsers.events import Event, Message, fold
from nereid_parsers.policy import Policy
from nereid_parsers.start_stage import StartPoint, find_start
from nereid_parsers.stream.call_writer import generate_call_id
from nereid_parsers.stream.compiled.compiled_format import compile_format
from nereid_parsers.stream.machine import Machine
from nereid_parsers.stream.tracer import Trace
from nereid_parsers.stream.values.argument_types import Tools


class StreamParser:
    """Parses one model message while the model generates it.

    The parser returns text at once, except text that may become a marker, such as `<to`, and the
    white space before such text. An event that has been returned is never withdrawn. The parsing
    time is linear in the length of the text. The parser accepts any text of the model without an
    exception.
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
            fmt: The output format of the model.
            tools: The tools that the prompt offers, as an OpenAI tools list. None if the tools are
                not known.
            prompt: The rendered prompt, including its generation prompt. None if the prompt is not
                known.
            policy: The rules for cases that the format does not define, for example for unknown
                functions. None means the policy of the format.
            new_id: A function that generates an id for each tool call to which the model gave no
                id.
            trace: A function that receives each piece of the text, in order, and the classification
                of this piece: "reasoning", "content", "call" or "markup".
        """
        self._machine = Machine(compile_format(fmt), Tools(tools), policy or fmt.policy, new_id)
        self._machine.start(find_start(fmt, prompt))  # May parse text at the end of the prompt.
        self._machine.set_trace(trace)  # From now on, so that the trace contains no prompt text.
        self._is_finished = False

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of the text and return the new events.

        Raises:
            ValueError: `finish` has been called.
        """
        if self._is_finished:
            raise ValueError(
                "feed() was called after finish(). Create a new StreamParser for each message."
            )
        return self._machine.feed(text)

    def finish(self) -> list[Event]:
        """Parse the end of the text, and return the last events. A second call returns []."""
        if self._is_finished:
            return []
        self._is_finished = True
        return self._machine.finish()

    @property
    def stage(self) -> Stage:
        """The kind of text that probably follows: reasoning, content or tool calls."""
        return self._machine.stage


@dataclass(frozen=True, slots=True)
class OutputStart:
    """Describes where in a message the model's output starts, for example in the reasoning.

    Attributes:
        stage: The part of the message: reasoning, content or tool calls. If the output starts in
            the header of a message, the stage is CONTENT.
        has_reasoned: Whether the prompt contains reasoning that has been closed.
    """

    stage: Stage
    has_reasoned: bool


def output_start(fmt: FormatData, prompt: str | None) -> OutputStart:
    r"""Return where in a message the model's output starts, for example in the reasoning.

    A prompt may contain the beginning of the model's message, which is called the "prefill". The
    output continues the prefill. Examples, with the reasoning markers `<think>` and `</think>`:

        end of the prompt                        result
        `"<|assistant|><think>\n"`               REASONING
        `"<|assistant|><think>Hm.</think>Well"`  CONTENT, and `has_reasoned` is true

    If the output starts in the header of a message, the stage of the message is not known. The
    result is then CONTENT.

    Args:
        fmt: The format of the output.
        prompt: The rendered prompt, including its generation prompt. None if the prompt is not
            known.
    """
    start = find_start(fmt, prompt)
    if start.prefill:
        # Only a parser can find out whether the prefill ends in reasoning, content or a tool call.
        machine = _machine_after_prefill(fmt, start)
        return OutputStart(machine.stage, machine.has_reasoned)
    if start.stage is None:  # The output starts in a header.
        return OutputStart(Stage.CONTENT, has_reasoned=False)
    return OutputStart(start.stage, has_reasoned=False)


def _machine_after_prefill(fmt: FormatData, start: StartPoint) -> Machine:
    """Return the state machine of a parser that has parsed the prefill of `start`.

    The tools and ids of tool calls do not matter, because the machine parses no output.
    """
    machine = Machine(compile_format(fmt), Tools(None), fmt.policy, generate_call_id)
    machine.start(start)
    return machine


def parse(
    text: str,
    *,
    format: FormatData,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    policy: Policy | None = None,
) -> Message:
    r"""Parse the complete text of a message into reasoning, content and tool calls.

    Example: `parse("<think>\nHm\n</think>\n\nHi", format=get_format("qwen3"))` returns
    `Message(reasoning="Hm", content="Hi", tool_calls=[])`.

    Args:
        text: The text of a message that the model has finished.
        format: The output format of the model.
        tools: The tools that the prompt offers, as an OpenAI tools list. None if they are unknown.
        prompt: The rendered prompt, including its generation prompt. None if it is unknown.
        policy: The rules for cases that the format does not define. None means the policy of the
            format.
    """
    parser = StreamParser(format, tools=tools, prompt=prompt, policy=policy)
    return fold([*parser.feed(text), *parser.finish()])
