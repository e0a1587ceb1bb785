"""Check an inferred format by parsing the template's renderings and comparing the messages.

The analysis infers a format from differences, and may be wrong. This module parses the text that
the template renders for a message with the format. The result must be equal to the message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nereid_parsers.events import Message
from nereid_parsers.format import Format, Reasoning
from nereid_parsers.stream.parser import parse
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    ONE_CALL,
    RESULT_TEXT,
    TOOLS,
    TWO_CALLS,
    AssistantMessage,
    Conversation,
    ProbeCall,
)
from nereid_parsers.template.difference import drop_common_suffix
from nereid_parsers.template.frame import TurnFrame
from nereid_parsers.template.probe import unmask_call_ids
from nereid_parsers.template.reasoning import ReasoningFindings
from nereid_parsers.template.tools import ToolFindings, conversation_with_calls

ONE_CALL_PROOF = "one call"


@dataclass(frozen=True, slots=True)
class Proof:
    """A rendered message that was parsed with the inferred format.

    Attributes:
        name: The kind of message, such as "content and a tool call".
        prompt: The prompt before the message.
        text: The text that a model would generate for the message.
        differs: The parts of the message that the parser did not return as they were rendered:
            "reasoning", "content", "tool names" or "tool arguments".
    """

    name: str
    prompt: str
    text: str
    differs: tuple[str, ...]


def parse_renderings(
    fmt: Format, frame: TurnFrame, reasoning: ReasoningFindings, tools: ToolFindings
) -> list[Proof]:
    """Parse each kind of message that the template renders, and return the parts that differ.

    Example: "<think>Numbat thinks about it.</think>Wombat gives the answer." must be parsed as
    reasoning and content.
    """
    proofs = []
    for name, conversation in _conversations(reasoning, tools):
        prompt_and_text = _prompt_and_output(frame, reasoning.part, conversation)
        if prompt_and_text is None or conversation.answer is None:
            continue
        prompt, text = prompt_and_text
        offered = TOOLS if conversation.tools else []
        message = parse(text, format=fmt, tools=offered, prompt=prompt)
        differs = tuple(_differing_parts(conversation.answer, message))
        proofs.append(Proof(name, prompt, text, differs))
    return proofs


def _conversations(
    reasoning: ReasoningFindings, tools: ToolFindings
) -> Iterator[tuple[str, Conversation]]:
    """Yield a name and a conversation for each kind of message that the template renders."""
    content = AssistantMessage(CONTENT_TEXT)
    yield "content", Conversation(content)
    if reasoning.conversation is not None:
        yield "reasoning", reasoning.conversation
    if tools.has_calls:
        yield ONE_CALL_PROOF, conversation_with_calls(ONE_CALL)
    if tools.is_parallel:
        yield "two calls", conversation_with_calls(TWO_CALLS)
    if tools.with_content:
        yield "content and a call", conversation_with_calls(ONE_CALL, CONTENT_TEXT)
    if tools.has_calls:
        yield "content after a result", Conversation(content, tools=True, after_tool_result=True)


def _prompt_and_output(
    frame: TurnFrame, reasoning: Reasoning | None, conversation: Conversation
) -> tuple[str, str] | None:
    r"""Return the prompt, and the text that a model would generate for the answer.

    Return None if the template does not render the prompt or the answer. The text does not repeat
    the part that the prompt already contains. Example: if the prompt ends with "<think>\n", and the
    rendered message is "<think>\nREASONING</think>CONTENT", the text is
    "\nREASONING</think>CONTENT".
    """
    prompt = frame.prober.render(replace(conversation, answer=None, generation_prompt=True))
    if prompt is None:
        return None
    if conversation.after_tool_result:
        return _prompt_and_output_after_result(frame, reasoning, conversation, prompt)
    text = frame.generated_text(conversation)
    if text is None:
        return None
    text = unmask_call_ids(text)
    in_prompt = frame.prompt_after_header(prompt).strip()
    if in_prompt and text.lstrip().startswith(in_prompt):
        text = text.lstrip()[len(in_prompt) :]
    if reasoning is None:
        return prompt, text
    opening, closing = reasoning.open.strip(), reasoning.close.strip()
    if in_prompt.endswith(closing):
        # The prompt and the message both end an empty block of reasoning.
        text = text.lstrip().removeprefix(closing)
    is_open = in_prompt.endswith(opening) and closing not in in_prompt
    if is_open and closing not in text:
        # The prompt opens reasoning, but the message has no reasoning. So a model would write
        # the closing marker first.
        text = reasoning.close + text
    return prompt, text


def _prompt_and_output_after_result(
    frame: TurnFrame, reasoning: Reasoning | None, conversation: Conversation, prompt: str
) -> tuple[str, str] | None:
    """Return the prompt, and the text that a model would generate after a tool's result.

    Return None if the rendered conversation does not start with the prompt.
    """
    whole = frame.prober.render(conversation)
    if whole is None or RESULT_TEXT not in prompt or not whole.startswith(prompt):
        return None
    text = drop_common_suffix(whole[len(prompt) :], frame.trailing_text)
    text = frame.without_end_markers(text)
    is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.open.strip())
    if reasoning is not None and is_open and reasoning.close.strip() not in text:
        # The prompt opens reasoning, but the message has no reasoning. So a model would write
        # the closing marker first.
        text = reasoning.close + text
    return unmask_call_ids(prompt), unmask_call_ids(text)


def _differing_parts(answer: AssistantMessage, got: Message) -> Iterator[str]:
    """Yield the names of the message parts in which the parsed message differs from the answer."""
    if (got.reasoning or "").strip() != answer.reasoning:
        yield "reasoning"
    if (got.content or "").strip() != answer.content:
        yield "content"
    if [call.name for call in got.tool_calls] != [call.name for call in answer.calls]:
        yield "tool names"
        return
    for call, got_call in zip(answer.calls, got.tool_calls, strict=True):
        if not _has_arguments(call, got_call.arguments):
            yield "tool arguments"
            return


def _has_arguments(call: ProbeCall, arguments: str) -> bool:
    """Return whether `arguments`, as JSON, equal the arguments of `call`."""
    try:
        return bool(json.loads(arguments) == dict(call.arguments))
    except ValueError:
        return False
