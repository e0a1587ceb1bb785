"""Check an inferred `Format` by parsing rendered messages with this `Format`.

The analysis infers a format by comparing rendered conversations, so the format may be wrong. To
check the format, this module renders a message with the template, and parses the rendered text with
the format. The parsed message must be equal to the original message.
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
    FIRST_KEY,
    NO_SWITCHES,
    ONE_CALL,
    REASONING_TEXT,
    RESULT_TEXT,
    TOOLS,
    TWO_ARGUMENTS,
    TWO_CALLS,
    AssistantMessage,
    Conversation,
    ProbeCall,
    conversation_with_calls,
)
from nereid_parsers.template.model_turn import ModelTurn, prompt_after_header
from nereid_parsers.template.probe import restore_numbers_and_ids
from nereid_parsers.template.reasoning.rendered_reasoning import ReasoningFindings
from nereid_parsers.template.tools import NO_CALLS, ToolFindings

# The names of the test messages with one tool call. If the parser returns a wrong tool call for one
# of these messages, the analysis removes the tool calls from the format.
_NAME_OF_ONE_CALL = "one call"
_NAME_OF_TWO_ARGUMENTS = "a call with two arguments"
ONE_CALL_PROOFS = (_NAME_OF_ONE_CALL, _NAME_OF_TWO_ARGUMENTS)
# This text is longer than REASONING_TEXT, from which the analysis has inferred the markers. If a
# template writes the length of the reasoning into a marker, the inferred marker is then missing.
_OTHER_REASONING = f"{REASONING_TEXT}\n\nThen Numbat decides."
_CALL_WITH_SPECIAL_CHARACTERS = ProbeCall(arguments=((FIRST_KEY, 'a "b" \\n <c> & {d: [1, 2]}\n'),))


@dataclass(frozen=True, slots=True)
class Proof:
    """A rendered message, and the result of parsing it with the inferred `Format`.

    Attributes:
        name: The kind of message, such as "content and a call".
        prompt: The rendered prompt before the message.
        text: The text that a model would generate after the prompt.
        differs: The names of the parts of the message that the parser returned wrongly:
            "reasoning", "content", "tool names" or "tool arguments". Empty if the format is right.
    """

    name: str
    prompt: str
    text: str
    differs: tuple[str, ...]


class _Sample(NamedTuple):
    """A conversation that is rendered to check a format.

    Attributes:
        name: The kind of answer, such as "content and a call". The report shows this name.
        conversation: The conversation. It ends with an answer of the model.
    """

    name: str
    conversation: Conversation


def parse_renderings(
    fmt: Format, turn: ModelTurn, reasoning: ReasoningFindings, tools: ToolFindings
) -> list[Proof]:
    """Parse rendered messages to check a `Format`. Return one `Proof` for each message.

    Several messages, for example a message with a tool call, are rendered with the template. The
    rendered texts are parsed with the format. The parsed message must be equal to the original
    message. Example: "<think>Numbat thinks about it.</think>Wombat gives the answer." must be
    parsed as reasoning and content. A `Proof` lists the parts that the parser returned wrongly.
    Messages that the template does not render are omitted.

    The findings show which kinds of messages the template renders.
    """
    samples = _samples(reasoning, tools)
    proofs = (_parse_sample(sample, fmt, turn, reasoning.part) for sample in samples)
    return [proof for proof in proofs if proof is not None]


def _parse_sample(
    sample: _Sample, fmt: Format, turn: ModelTurn, reasoning: Reasoning | None
) -> Proof | None:
    """Render the answer of a conversation, and parse the rendered text with the format `fmt`.

    The result lists the parts of the parsed answer that differ from the original answer. It is None
    if the template does not render the answer, or leaves out a part of the answer.
    """
    conversation = sample.conversation
    answer = conversation.answer or AssistantMessage()
    prompt = turn.prober.render(replace(conversation, answer=None, generation_prompt=True))
    if prompt is None:
        return None
    text = _text_after_prompt(turn, reasoning, conversation, prompt)
    if text is None or not _contains_all_parts(text, answer):
        return None
    # The texts contain placeholders for the numbers and ids of tool calls.
    real_prompt = restore_numbers_and_ids(prompt)
    real_text = restore_numbers_and_ids(text)
    offered_tools = TOOLS if conversation.tools else []
    parsed = parse(real_text, format=fmt, tools=offered_tools, prompt=real_prompt)
    differing_parts = tuple(_differing_parts(answer, parsed))
    return Proof(sample.name, real_prompt, real_text, differs=differing_parts)


def _contains_all_parts(text: str, answer: AssistantMessage) -> bool:
    """Return whether a rendered answer contains the reasoning, the content and all tool calls.

    Some templates leave out parts of a message. Example: a template renders reasoning only before
    tool calls.
    """
    names = [call.name for call in answer.calls]
    has_text = answer.reasoning in text and answer.content in text
    return has_text and all(text.count(name) >= names.count(name) for name in names)


def _text_after_prompt(
    turn: ModelTurn, reasoning: Reasoning | None, conversation: Conversation, prompt: str
) -> str | None:
    """Render the answer of a conversation. Return what a model would write after `prompt`.

    Example: the prompt is "..<|assistant|><think>", and the rendered answer is
    "<|assistant|><think>Hm.</think>Hello.<|end|>". The result is "Hm.</think>Hello.". It is None if
    the template does not render the answer after the prompt.

    `reasoning` declares the markers of reasoning. It is None if the model writes no reasoning.
    """
    if conversation.after_tool_result:
        answer = _answer_to_result(turn, conversation, prompt)
    else:
        answer = _answer_to_question(turn, reasoning, conversation, prompt)
    if answer is None or reasoning is None:
        return answer
    return _close_open_reasoning(answer, prompt, reasoning)


def _answer_to_question(
    turn: ModelTurn, reasoning: Reasoning | None, conversation: Conversation, prompt: str
) -> str | None:
    """Render the answer to a user's question. Return the part after `prompt`.

    The markers that end the answer are removed. Examples for an answer with the content "Hello.":

        end of the prompt    rendered answer                        result
        <bot><think>         <bot><think>Hm.</think>Hello.<end>     Hm.</think>Hello.
        <bot><think></think> <bot></think>Hello.<end>               Hello.

    In the second example, the prompt already contains `</think>`, so a model would not write this
    marker, although the rendered answer repeats it. Return None if the template does not render the
    answer.
    """
    answer = turn.generated_text(conversation)  # Without the header and the end markers.
    if answer is None:
        return None
    prompt_end = prompt_after_header(prompt, turn.header).strip()  # Such as "<think>".
    answer_after_prompt = _drop_prompt_end(answer, prompt_end)
    if reasoning is None:
        return answer_after_prompt
    return _drop_repeated_closing(answer_after_prompt, prompt_end, reasoning.close.strip())


def _answer_to_result(turn: ModelTurn, conversation: Conversation, prompt: str) -> str | None:
    """Render a chat with the result of a tool call, and return the answer after `prompt`.

    The markers that end the answer are removed. Example: the prompt is "..RESULT<|assistant|>", and
    the conversation is rendered as "..RESULT<|assistant|>CONTENT<|end|>". This function returns
    "CONTENT". It returns None if the template renders no result of a tool call, or does not write
    the answer after the prompt.
    """
    rendering = turn.prober.render(conversation)
    if rendering is None or RESULT_TEXT not in prompt:
        return None
    # Some templates write no header before the answer. Therefore, the start of the answer is found
    # by comparing the rendering with the prompt.
    if not rendering.startswith(prompt):
        return None
    return turn.drop_end_of_message(rendering.removeprefix(prompt))


def _samples(reasoning: ReasoningFindings, tools: ToolFindings) -> Iterator[_Sample]:
    """Yield the conversations that are rendered to check a format.

    There is one conversation for each kind of answer that the template can render. Example: if the
    form of tool calls is known, a conversation is yielded whose answer is one tool call. The report
    shows the conversations in this order.
    """
    answer = AssistantMessage(CONTENT_TEXT)
    has_calls = tools.form != NO_CALLS
    yield _Sample("content", Conversation(answer))
    yield from _samples_with_reasoning(reasoning, has_calls=has_calls)
    if has_calls:
        yield from _samples_with_calls(is_parallel=tools.is_parallel)
        after_result = Conversation(answer, tools=True, after_tool_result=True)
        yield _Sample("content after a result", after_result)


def _samples_with_reasoning(reasoning: ReasoningFindings, *, has_calls: bool) -> Iterator[_Sample]:
    """Yield conversations whose answers have reasoning.

    The first is the conversation in which the analysis has found reasoning, if there is one. The
    others have a longer reasoning text, because some templates write the length of the reasoning
    into a marker. They are yielded even if the analysis has found no reasoning, because a template
    may render reasoning where the analysis does not expect it, for example after the content. If
    the template renders tool calls (`has_calls`), two of the answers also have a tool call.
    """
    conversation_of_analysis = reasoning.conversation
    if conversation_of_analysis is None:
        switches = NO_SWITCHES
    else:
        yield _Sample("reasoning", conversation_of_analysis)
        # Some templates render reasoning only if a thinking switch has this setting.
        switches = conversation_of_analysis.switches
    answers = {"reasoning and content": AssistantMessage(CONTENT_TEXT, _OTHER_REASONING)}
    if has_calls:
        answers |= {
            "reasoning, content and a call": AssistantMessage(
                CONTENT_TEXT, _OTHER_REASONING, ONE_CALL
            ),
            "reasoning and a call": AssistantMessage("", _OTHER_REASONING, ONE_CALL),
        }
    for name, answer in answers.items():
        conversation = Conversation(answer, tools=bool(answer.calls), switches=switches)
        yield _Sample(name, conversation)


def _samples_with_calls(*, is_parallel: bool) -> Iterator[_Sample]:
    """Yield conversations whose answers have tool calls.

    Answers with several tool calls are yielded only if the template renders them (`is_parallel`).
    """
    calls_by_name: dict[str, tuple[ProbeCall, ...]] = {
        _NAME_OF_ONE_CALL: ONE_CALL,
        _NAME_OF_TWO_ARGUMENTS: (ProbeCall(arguments=TWO_ARGUMENTS),),
        "a call without arguments": (ProbeCall(arguments=()),),
        "special characters in a call": (_CALL_WITH_SPECIAL_CHARACTERS,),
    }
    if is_parallel:
        calls_by_name |= {"two calls": TWO_CALLS, "three calls": (*TWO_CALLS, *ONE_CALL)}
    for name, calls in calls_by_name.items():
        yield _Sample(name, conversation_with_calls(*calls))
    content_and_call = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    yield _Sample("content and a call", content_and_call)


def _drop_prompt_end(answer: str, prompt_end: str) -> str:
    r"""If a rendered answer starts with `prompt_end`, remove `prompt_end` from the answer.

    A prompt may end with the start of the answer, such as `<think>`. The model continues after this
    start, and does not write the start again.

    >>> _drop_prompt_end("<think>\nI see.</think>Hello.", prompt_end="<think>")
    '\nI see.</think>Hello.'

    If the answer does not start with `prompt_end`, or if `prompt_end` is "", the answer is returned
    unchanged.
    """
    if prompt_end and answer.lstrip().startswith(prompt_end):
        return answer.lstrip().removeprefix(prompt_end)
    return answer


def _drop_repeated_closing(answer: str, prompt_end: str, closing: str) -> str:
    """If `prompt_end` ends with the closing marker of reasoning, remove this marker from `answer`.

    A prompt may end with empty reasoning, such as `<think></think>`. Then the model does not write
    the marker `</think>` again. But some templates write `</think>` before the content of each
    rendered answer:

    >>> _drop_repeated_closing("</think>Hello.", prompt_end="<think></think>", closing="</think>")
    'Hello.'

    White space at the start of `answer` is removed, too, because it belongs to the closing marker.
    """
    if not prompt_end.endswith(closing):
        return answer
    return answer.lstrip().removeprefix(closing)


def _close_open_reasoning(text: str, prompt: str, reasoning: Reasoning) -> str:
    """If the prompt opens reasoning that the answer does not close, prepend the closing marker.

    A model would write this marker, because the reasoning must end before the content:

    >>> _close_open_reasoning("Hello.", "<|assistant|><think>", Reasoning("<think>", "</think>"))
    '</think>Hello.'

    White space around the markers is ignored, because templates vary this white space.
    """
    is_open = prompt.rstrip().endswith(reasoning.open.strip())
    is_closed_by_answer = reasoning.close.strip() in text
    return reasoning.close + text if is_open and not is_closed_by_answer else text


def _differing_parts(answer: AssistantMessage, parsed: Message) -> Iterator[str]:
    """Compare a parsed message with the original answer. Yield the names of the parts that differ.

    The names are "reasoning", "content", "tool names" and "tool arguments". The arguments are
    compared only if the two messages call the same functions in the same order.
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
    pairs_of_calls = zip(answer.calls, parsed.tool_calls, strict=True)
    if not all(_has_arguments(call, parsed_call.arguments) for call, parsed_call in pairs_of_calls):
        yield "tool arguments"


def _has_arguments(call: ProbeCall, arguments: str) -> bool:
    """Return whether the JSON text `arguments` contains exactly the arguments of `call`.

    Return False if `arguments` is not valid JSON.
    """
    try:
        return bool(json.loads(arguments) == dict(call.arguments))
    except ValueError:
        return False
