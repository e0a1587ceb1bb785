"""Check an inferred format by parsing rendered messages with the format.

The analysis infers a format from differences, so the format may be wrong. To check the format, this
module renders a message with the template, and parses the rendered text with the format. The result
must be equal to the message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    conversation_with_calls,
)
from nereid_parsers.template.difference import drop_common_suffix
from nereid_parsers.template.model_turn import ModelTurn, prompt_after_header
from nereid_parsers.template.probe import unmask_call_ids
from nereid_parsers.template.rendered_reasoning import ReasoningFindings
from nereid_parsers.template.tools import NO_CALLS, ToolFindings

ONE_CALL_PROOF = "one call"


@dataclass(frozen=True, slots=True)
class Proof:
    """A rendered message that was parsed with the inferred format.

    Attributes:
        name: The kind of message, such as "content and a tool call".
        prompt: The prompt before the message.
        text: The text that a model would generate for the message.
        differs: The parts of the message that the parser returned wrongly: "reasoning", "content",
            "tool names" or "tool arguments".
    """

    name: str
    prompt: str
    text: str
    differs: tuple[str, ...]


def parse_renderings(
    fmt: Format, turn: ModelTurn, reasoning: ReasoningFindings, tools: ToolFindings
) -> list[Proof]:
    """Check the format: parse one rendered message of each kind, and record what differs.

    The kinds are, for example, a message with reasoning and a message with a tool call. Example:
    the rendered message "<think>Numbat thinks about it.</think>Wombat gives the answer." must be
    parsed as reasoning and content. Messages that the template does not render are omitted.

    Args:
        fmt: The inferred format, which may be wrong.
        turn: The text around the model's answers. `turn.prober` renders the messages.
        reasoning: The findings about reasoning.
        tools: The findings about tool calls.
    """
    proofs = []
    for name, conversation in _conversations(reasoning, tools):
        rendered = _render_answer(turn, reasoning.part, conversation)
        if rendered is not None:
            proofs.append(_parse_answer(fmt, name, conversation, rendered))
    return proofs


class _RenderedAnswer(NamedTuple):
    """The prompt of a conversation, and the text that a model would generate after the prompt."""

    prompt: str
    text: str


def _render_answer(
    turn: ModelTurn, reasoning: Reasoning | None, conversation: Conversation
) -> _RenderedAnswer | None:
    """Render the prompt of a conversation, and the answer that a model would generate.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        reasoning: The inferred markers of reasoning, or None.
        conversation: A conversation that ends with an answer.

    Returns:
        The prompt and the answer, or None if the template does not render the conversation.
    """
    # The generation prompt is the last part of a prompt, such as `<|assistant|>`. The model's
    # answer follows the generation prompt.
    without_answer = replace(conversation, answer=None, generation_prompt=True)
    prompt = turn.prober.render(without_answer)
    if prompt is None:
        return None
    answer = _text_after_prompt(turn, reasoning, conversation, prompt)
    if answer is None:
        return None
    # In a rendering, placeholders replace the ids of tool calls. The parser needs the real ids.
    return _RenderedAnswer(unmask_call_ids(prompt), unmask_call_ids(answer))


def _parse_answer(
    fmt: Format, name: str, conversation: Conversation, rendered: _RenderedAnswer
) -> Proof:
    """Parse a rendered answer with the inferred format, and compare the result with the answer.

    The attribute `differs` of the result names the parts that the parser returned wrongly, such as
    "content".

    Args:
        fmt: The inferred format.
        name: The kind of message for the report, such as "one call".
        conversation: The conversation with the answer.
        rendered: The rendered prompt and the rendered answer.
    """
    offered_tools = TOOLS if conversation.tools else []
    message = parse(rendered.text, format=fmt, tools=offered_tools, prompt=rendered.prompt)
    answer = conversation.answer or AssistantMessage()
    differing_parts = tuple(_differing_parts(answer, message))
    return Proof(name, rendered.prompt, rendered.text, differs=differing_parts)


def _conversations(
    reasoning: ReasoningFindings, tools: ToolFindings
) -> Iterator[tuple[str, Conversation]]:
    """Yield a name and a conversation for each kind of message that the template renders.

    The analysis checks the inferred format with these conversations. Example: if the template
    renders tool calls, one pair is the name "one call" and a conversation whose answer has a tool
    call. The findings `reasoning` and `tools` show which kinds of messages the template renders.
    """
    content = AssistantMessage(CONTENT_TEXT)
    has_calls = tools.form != NO_CALLS
    yield "content", Conversation(content)
    if reasoning.conversation is not None:
        yield "reasoning", reasoning.conversation
    if has_calls:
        yield ONE_CALL_PROOF, conversation_with_calls(*ONE_CALL)
    if tools.is_parallel:
        yield "two calls", conversation_with_calls(*TWO_CALLS)
    if tools.with_content:
        yield "content and a call", conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    if has_calls:
        yield "content after a result", Conversation(content, tools=True, after_tool_result=True)


def _text_after_prompt(
    turn: ModelTurn, reasoning: Reasoning | None, conversation: Conversation, prompt: str
) -> str | None:
    """Render the answer of `conversation` as the text that a model would generate after `prompt`.

    If the prompt already contains the start of the answer, this start is not a part of the result.
    Example: if the prompt is "..<|assistant|><think>" and the rendered answer is
    "<think>Hm.</think>Hello.<|end|>", the result is "Hm.</think>Hello.". Return None if the
    template does not render the answer after the prompt.
    """
    if conversation.after_tool_result:
        answer = _text_after_tool_result(turn, conversation, prompt)
    else:
        answer = _text_after_question(turn, reasoning, conversation, prompt)
    if answer is None or reasoning is None:
        return answer
    return _close_open_reasoning(answer, prompt, reasoning)


def _text_after_question(
    turn: ModelTurn, reasoning: Reasoning | None, conversation: Conversation, prompt: str
) -> str | None:
    """Render the answer. Omit the start of the answer if `prompt` already contains this start.

    The header is the text that opens an answer, such as "<|assistant|>". Example: the prompt
    "..<|assistant|><think>" and the rendering "..<|assistant|><think>Hm.</think>Hello." give
    "Hm.</think>Hello.". Return None if the template fails to render the conversation.
    """
    answer = turn.generated_text(conversation)
    if answer is None:
        return None
    start_of_answer = prompt_after_header(prompt, turn.header).strip()  # such as "<think>"
    return _drop_repetition(answer, start_of_answer, reasoning)


def _text_after_tool_result(turn: ModelTurn, conversation: Conversation, prompt: str) -> str | None:
    """Render a conversation that starts with `prompt`, and return the answer after the prompt.

    Return None if the rendered conversation does not start with the prompt. Example: the prompt
    "..RESULT<|assistant|>" and the rendering "..RESULT<|assistant|>CONTENT<|end|>" give "CONTENT".
    """
    rendering = turn.prober.render(conversation) or ""
    if RESULT_TEXT not in prompt or not rendering.startswith(prompt):
        return None
    answer = rendering.removeprefix(prompt)
    # A user's message ends with `turn.trailing_text`, so an answer may end with the same text.
    without_trailing_text = drop_common_suffix(answer, turn.trailing_text)
    return turn.without_end_markers(without_trailing_text)


def _drop_repetition(text: str, prompt_end: str, reasoning: Reasoning | None) -> str:
    r"""Remove the start of a rendered answer, if this start repeats the end of the prompt.

    A model would not write this start again. If the prompt ends with empty reasoning, the answer
    may repeat only the closing marker, as in the second example.

    >>> _drop_repetition("<think>\nI see.</think>Hello.", "<think>", None)
    '\nI see.</think>Hello.'
    >>> _drop_repetition("</think>Hello.", "<think></think>", Reasoning("<think>", "</think>"))
    'Hello.'

    Args:
        text: The rendered answer without the header, which is the text that opens the answer.
        prompt_end: The end of the prompt, after the same header.
        reasoning: The markers of reasoning, or None if they are not known.
    """
    without_space = text.lstrip()
    is_repeated = bool(prompt_end) and without_space.startswith(prompt_end)
    without_prompt_end = without_space.removeprefix(prompt_end) if is_repeated else text
    if reasoning is None:
        return without_prompt_end
    closing = reasoning.close.strip()
    is_closed_in_prompt = prompt_end.endswith(closing)
    if not is_closed_in_prompt:
        return without_prompt_end
    return without_prompt_end.lstrip().removeprefix(closing)


def _close_open_reasoning(text: str, prompt: str, reasoning: Reasoning) -> str:
    """Put the closing marker of reasoning before `text` if `prompt` ends with the opening marker.

    A model would write the marker first, because the message has no reasoning.

    >>> _close_open_reasoning("Hello.", "<|assistant|><think>", Reasoning("<think>", "</think>"))
    '</think>Hello.'
    """
    is_open = prompt.rstrip().endswith(reasoning.open.strip())
    is_closed_by_text = reasoning.close.strip() in text
    if not is_open or is_closed_by_text:
        return text
    return reasoning.close + text


def _differing_parts(answer: AssistantMessage, parsed: Message) -> Iterator[str]:
    """Yield the name of each part of `answer` that the parser returned wrongly.

    The names are "reasoning", "content", "tool names" and "tool arguments". The arguments are
    compared only if the names of the tool calls are equal.
    """
    if (parsed.reasoning or "").strip() != answer.reasoning:
        yield "reasoning"
    if (parsed.content or "").strip() != answer.content:
        yield "content"
    parsed_names = [call.name for call in parsed.tool_calls]
    names = [call.name for call in answer.calls]
    if parsed_names != names:
        yield "tool names"
        return
    pairs = zip(answer.calls, parsed.tool_calls, strict=True)
    if not all(_has_arguments(call, parsed_call.arguments) for call, parsed_call in pairs):
        yield "tool arguments"


def _has_arguments(call: ProbeCall, arguments: str) -> bool:
    """Return whether the JSON text `arguments` contains the same arguments as `call`."""
    try:
        return bool(json.loads(arguments) == dict(call.arguments))
    except ValueError:
        return False
