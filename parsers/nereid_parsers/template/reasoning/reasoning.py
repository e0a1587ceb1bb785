"""Find the markers that a template writes around reasoning, such as `<think>`.

The markers are found by the searches R1 to R5. R1, R2, R3 and R5 each compare two renderings. R4
searches the source of the template. The second column of the table shows what is compared or
searched, and the third column shows what is found.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt contains
R3  a thinking switch on and off            pairs of tags that the instructions mention
R4  the string constants of the template    markers whose names refer to thinking, or markers
                                            between which the template removes text from answers
R5  a tool call without and with reasoning  the marker of a tool call that also ends reasoning

R1 to R4 are tried in this order until one of them finds markers. Then R5 adds the marker of a tool
call, if this marker also ends reasoning. R2 and R3 are in the module `reasoning_in_prompts`, and R4
is in the module `reasoning_in_source`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from nereid_parsers.format import Opener, Reasoning
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_TOOL,
    ONE_CALL,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
)
from nereid_parsers.template.markup.difference import text_between
from nereid_parsers.template.markup.marker_pairs import opening_spellings
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.reasoning.reasoning_in_prompts import (
    find_markers_in_instructions,
    find_markers_in_prompts,
    first_used_marker,
)
from nereid_parsers.template.reasoning.reasoning_in_source import (
    find_markers_in_source,
    find_markers_of_removed_text,
)
from nereid_parsers.template.reasoning.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    closing_marker,
    content_wrapper,
    declare_reasoning,
    first_marker,
    first_opening,
    opening_of_reasoning,
)
from nereid_parsers.template.reasoning.rendered_reasoning import (
    ReasoningFindings,
    find_rendered_reasoning,
)


class _TextsAroundReasoning(NamedTuple):
    """The texts around the reasoning in a rendered message.

    The examples are from the message "<think>REASONING</think><answer>CONTENT</answer>".

    Attributes:
        before_reasoning: The text before the reasoning: `<think>`.
        after_reasoning: The text between the reasoning and the content: `</think><answer>`. If the
            message has no content, the text ends before the function's name of the tool call.
        after_content: The text after the content: `</answer>`. None if the message has no content.
    """

    before_reasoning: str
    after_reasoning: str
    after_content: str | None


def find_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Infer how the template writes reasoning, for example between `<think>` and `</think>`.

    The result also contains the message fields from which the template renders reasoning. If the
    markers of reasoning cannot be found, the attribute `part` of the result is None.

    Mutates: `turn.prober`, which records comparisons and problems for the report. From
        now on, the prober writes reasoning in the form that the template renders.
    """
    # The first step finds a conversation whose reasoning the template renders, or None. The markers
    # are still unknown, and `rendered.part` is None.
    rendered = find_rendered_reasoning(turn)
    turn.prober.form = rendered.form  # The conversations below are rendered in this form.
    # Even if the template renders no reasoning, the markers may occur in a prompt or in the source
    # of the template.
    markup = _find_markup(turn, rendered.conversation)
    if markup is None:
        return rendered
    interruption = find_interruption(turn, rendered.conversation, markup.part.close)
    reasoning = replace(
        markup.part,
        opener=_writer_of_opening(turn, markup.part, rendered.conversation),
        interrupted_by=() if interruption is None else (interruption,),
    )
    return replace(
        rendered, part=reasoning, wrapper=markup.wrapper, inner_headers=markup.inner_headers
    )


def _writer_of_opening(
    turn: ModelTurn, reasoning: Reasoning, conversation: Conversation | None
) -> Opener:
    r"""Return an `Opener`, which states where the opening marker of reasoning comes from.

    The first case that applies decides. Examples for the marker `<think>`:

        FORCED   Nothing writes `<think>`: neither the template nor a prompt contains this marker.
                 But even an answer without reasoning starts with `</think>`.
        PROMPT   The default prompt opens the reasoning and does not close the reasoning, as in
                 "<|im_start|>assistant\n<think>\n".
        MODEL    In all other cases, the model writes `<think>`.

    `conversation` is a conversation whose reasoning the template renders, or None.
    """
    is_marker_used = bool(first_used_marker(turn, [reasoning.open.strip()]))
    if not is_marker_used and _is_always_closed(turn, conversation, reasoning.close):
        return Opener.FORCED
    if not turn.prompts:
        return Opener.MODEL
    prompt_end = turn.prompts[0].after_header  # "<think>\n" in the example
    is_opened = reasoning.open.strip() in prompt_end
    is_closed = reasoning.close.strip() in prompt_end
    return Opener.PROMPT if is_opened and not is_closed else Opener.MODEL


def _find_markup(turn: ModelTurn, conversation: Conversation | None) -> ReasoningMarkup | None:
    """Return the markers of reasoning, such as `<think>`. Return None if no markers are found.

    The function searches these texts in this order, and stops when it has found markers:

    1. a rendered message with reasoning, unless `conversation` is None
    2. the generation prompts
    3. the instructions in a prompt
    4. the string constants of the template
    5. earlier answers, from which the template removes the reasoning

    If `conversation` is None, the template renders no reasoning.

    Mutates: `turn.prober`, which records the successful search for the report.
    """
    searches: list[Callable[[ModelTurn], ReasoningMarkup | None]] = [
        find_markers_in_prompts,
        find_markers_in_instructions,
        find_markers_in_source,
        find_markers_of_removed_text,
    ]
    if conversation is not None:
        searches.insert(0, partial(find_markers_in_message, conversation=conversation))
    for search in searches:
        markup = search(turn)
        if markup is not None:
            return markup
    return None


# ---- R1: a message without and with reasoning ---------------------------------------------------


def find_markers_in_message(turn: ModelTurn, conversation: Conversation) -> ReasoningMarkup | None:
    """Find the markers, such as `<think>`, around the reasoning in a rendered message.

    Example: the message "<think>REASONING</think>CONTENT" contains the markers `<think>` and
    `</think>`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the message.
        conversation: A conversation that the template renders completely. Its answer has reasoning,
            followed by content or by a call of FIRST_TOOL.

    Mutates: `turn.prober`. If the markers are found, it records the comparison "R1" for the report.
        Otherwise, it records that the markers cannot be recognised.

    Returns:
        The markers around the reasoning and around the content. None if the opening marker or the
        closing marker of reasoning is missing.
    """
    texts = _texts_around_reasoning(turn, conversation)
    pair = _markers_of_reasoning(turn, conversation, texts.before_reasoning, texts.after_reasoning)
    if pair is None:
        turn.prober.undecided.append(
            "R1: The markers of reasoning cannot be recognised. The template writes reasoning "
            f"between {texts.before_reasoning!r} and {texts.after_reasoning!r}."
        )
        return None
    turn.prober.record(
        "R1 reasoning presence",
        "The message has reasoning.",
        left=_without_reasoning(conversation),
        right=conversation,
        finding=f"Reasoning is written between {pair.opening!r} and {pair.closing!r}.",
    )
    return _declare_message(texts, pair, turn.header.strip())


def _is_always_closed(turn: ModelTurn, conversation: Conversation | None, closing: str) -> bool:
    """Return whether an answer without reasoning starts with the closing marker of reasoning.

    The function removes the reasoning from the answer of `conversation`, and renders the answer.
    Example: if the rendered answer is "</think>CONTENT", the result is True for the marker
    `</think>`. If `conversation` is None, the result is False.
    """
    if conversation is None or not closing.strip():
        return False
    answer = turn.text_after_header(_without_reasoning(conversation)) or ""
    return answer.lstrip().startswith(closing.strip())


def _texts_around_reasoning(turn: ModelTurn, conversation: Conversation) -> _TextsAroundReasoning:
    """Render a conversation. Return the texts around the reasoning of its answer.

    The answer has reasoning, followed by content or by a call of FIRST_TOOL. The template renders
    the whole answer.
    """
    message = turn.text_after_header(conversation) or ""
    before_reasoning, _, rest = message.partition(REASONING_TEXT)
    answer = conversation.answer or AssistantMessage()
    if not answer.content:
        after_reasoning, _, _ = rest.partition(FIRST_TOOL)
        return _TextsAroundReasoning(before_reasoning, after_reasoning, after_content=None)
    after_reasoning, _, after_content = rest.partition(CONTENT_TEXT)
    return _TextsAroundReasoning(before_reasoning, after_reasoning, after_content)


def _declare_message(
    texts: _TextsAroundReasoning, pair: MarkerPair, header: str
) -> ReasoningMarkup:
    """Describe the markers around the reasoning and the content of a rendered message.

    Example: "<think>REASONING</think><answer>CONTENT</answer>" has the reasoning markers `<think>`
    and `</think>`, and the content markers `<answer>` and `</answer>`.

    `pair` contains the markers of reasoning. `header` is the text, such as `<|assistant|>`, that
    opens an assistant message. Some templates repeat the header before the content.
    """
    markup = declare_reasoning(pair, header, texts.after_reasoning)
    if texts.after_content is None:  # The message has no content.
        return markup
    # Neither the closing marker of reasoning nor the header is a marker of the content.
    before_content = texts.after_reasoning.removeprefix(pair.closing).replace(header, "")
    return replace(markup, wrapper=content_wrapper(before_content, texts.after_content))


def _without_reasoning(conversation: Conversation) -> Conversation:
    """Return a copy of a conversation in which the answer has no reasoning."""
    answer = conversation.answer or AssistantMessage()
    return replace(conversation, answer=replace(answer, reasoning=""))


def _markers_of_reasoning(
    turn: ModelTurn, conversation: Conversation, before: str, after_reasoning: str
) -> MarkerPair | None:
    """Return the opening and closing markers of reasoning, such as `<think>` and `</think>`.

    The answer of `conversation` has reasoning. `before` is the text before the reasoning in the
    rendered answer, and `after_reasoning` is the text after the reasoning. If no opening marker is
    found, it is derived from the closing marker. Return None if one of the two markers is missing.
    """
    opening = _opening_before_reasoning(turn, text_before_reasoning=before)
    closing = closing_marker(after_reasoning, opening)
    if not opening:
        opening = _derive_opening(turn, conversation, closing)
    is_marker_missing = not opening.strip() or not closing.strip()
    return None if is_marker_missing else MarkerPair(opening, closing)


def _derive_opening(turn: ModelTurn, conversation: Conversation, closing: str) -> str:
    """Derive the opening marker of reasoning from the closing marker: `<think>` from `</think>`.

    The result must occur in the template or in a prompt. Otherwise, the text `closing` may not be a
    marker of reasoning, and the result is "". There is one exception: if even an answer without
    reasoning starts with `closing`, this text must be the closing marker, so the result is the
    first possible opening marker. The answer of `conversation` has reasoning.
    """
    possible_openings = opening_spellings(closing.strip())
    used_opening = first_used_marker(turn, possible_openings)
    if not used_opening and _is_always_closed(turn, conversation, closing):
        return next(iter(possible_openings), "")
    return used_opening


def _opening_before_reasoning(turn: ModelTurn, text_before_reasoning: str) -> str:
    r"""Return the opening marker of reasoning, such as `<think>`, or "" if there is none.

    Usually, `text_before_reasoning` in a rendered message contains the opening marker, as in
    "<think>\n". In some templates, the prompt ends with this marker, so the message starts directly
    with the reasoning. Example: the text before the reasoning is "", and a prompt ends with
    "<|assistant|><think>\n". The result is "<think>\n".
    """
    if text_before_reasoning.strip():
        return opening_of_reasoning(text_before_reasoning)
    # The opening marker is the first marker after the header of a prompt. It is not always the last
    # marker, because `</think>` may follow the opening marker in a prompt that turns off thinking.
    for prompt in turn.prompts:
        opening = first_opening(prompt.after_header)
        if opening:
            return opening
    return ""


# ---- R5: reasoning before a call ----------------------------------------------------------------


def find_interruption(
    turn: ModelTurn, conversation: Conversation | None, closing: str
) -> str | None:
    """Find the marker of a tool call, such as `<tool_call>`, that ends reasoning before the call.

    Example: in "<think>REASONING<tool_call>..", the template has omitted the closing marker
    `</think>`, so the parser must end the reasoning at `<tool_call>`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the message.
        conversation: A conversation whose reasoning the template renders, or None if there is none.
            The conversation is rendered with another answer, which has reasoning and a tool call.
        closing: The closing marker of reasoning.

    Mutates: `turn.prober`. If the closing marker is missing, the prober records the comparison R5
        for the report. If no other marker ends the reasoning, the prober records this problem.

    Returns:
        The marker, or None if the closing marker or no marker precedes the tool call.
    """
    if conversation is None:
        return None
    answer = AssistantMessage(reasoning=REASONING_TEXT, calls=ONE_CALL)
    conversation_with_call = replace(conversation, answer=answer, tools=True)
    message = turn.text_after_header(conversation_with_call) or ""
    before_call = text_between(message, REASONING_TEXT, FIRST_TOOL)
    if before_call is None or closing.strip() in before_call:
        return None  # The message is not rendered, or contains the closing marker.
    interruption = first_marker(before_call)
    if not interruption:
        turn.prober.undecided.append(
            "R5: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return None
    turn.prober.record(
        "R5 reasoning before a call",
        "The message has reasoning.",
        left=_without_reasoning(conversation_with_call),
        right=conversation_with_call,
        finding=f"{interruption!r} ends reasoning that has no closing marker.",
    )
    return interruption
