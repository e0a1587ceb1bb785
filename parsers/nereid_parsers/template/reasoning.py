"""Find the markers that a template writes around reasoning.

R1, R2, R3 and R5 each compare two renderings. R4 searches the source of the template. The left
column of the table shows what is compared or searched, and the right column shows what is found.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt contains
R3  a thinking switch on and off            pairs of tags that the instructions mention
R4  the string constants of the template    markers whose names refer to thinking
R5  a call without and with reasoning       the marker of a call that also ends reasoning

R1 to R4 are tried in this order until one of them finds markers. Then R5 adds the marker of a call,
if this marker also ends reasoning. The module `reasoning_in_prompts` contains R2 and R3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import Opener, Reasoning, Wrapper
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_TOOL,
    ONE_CALL,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
)
from nereid_parsers.template.difference import (
    markers,
    opening_spellings,
    text_between,
)
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.reasoning_in_prompts import (
    compare_instructions,
    compare_thinking_switch,
    first_occurring,
)
from nereid_parsers.template.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    closing_marker,
    content_wrapper,
    declare_reasoning,
    empty_pairs,
    first_opening,
    last_opening,
    markup_of_pairs,
    named_pair,
)
from nereid_parsers.template.rendered_reasoning import ReasoningFindings, find_rendered_reasoning


def find_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Infer how the template writes reasoning, for example between `<think>` and `</think>`.

    Several comparisons of renderings are tried. The first comparison that shows markers determines
    the markers. If no comparison shows markers, the attribute `part` of the result is None.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
    """
    findings = find_rendered_reasoning(turn)  # These findings contain no markers yet.
    markup = _first_markup(turn, findings.conversation)
    if markup is None:
        return findings
    part = replace(markup.part, opener=_infer_opener(turn, markup.part))
    if findings.conversation is not None:
        # A tool call may end the reasoning without a closing marker.
        interrupted_by = compare_reasoning_before_call(turn, part, findings.conversation)
        part = replace(part, interrupted_by=interrupted_by)
    return replace(findings, part=part, wrapper=markup.wrapper, inner_headers=markup.inner_headers)


def _first_markup(turn: ModelTurn, conversation: Conversation | None) -> ReasoningMarkup | None:
    """Search for the markers of reasoning in up to four ways, and return the first result.

    Return None if no comparison shows markers. `conversation` is a conversation whose reasoning the
    template renders, or None.
    """
    if conversation is not None:
        markup = compare_reasoning_presence(turn, conversation)
        if markup is not None:
            return markup
    for search in (compare_thinking_switch, compare_instructions, search_source):
        markup = search(turn)
        if markup is not None:
            return markup
    return None


def _infer_opener(turn: ModelTurn, part: Reasoning) -> Opener:
    r"""Return `Opener.PROMPT` if reasoning starts in the default prompt, or else `Opener.MODEL`.

    Example: the prompt "<|im_start|>assistant\n<think>\n" opens reasoning.
    """
    default = turn.prompts[0].after_header if turn.prompts else ""
    is_open = part.open.strip() in default and part.close.strip() not in default
    return Opener.PROMPT if is_open else Opener.MODEL


# ---- R1: a message without and with reasoning ---------------------------------------------------


def compare_reasoning_presence(
    turn: ModelTurn, conversation: Conversation
) -> ReasoningMarkup | None:
    """Find the markers around the reasoning in a rendered message.

    Example: "<think>REASONING</think>CONTENT" shows the markers `<think>` and `</think>`. The
    report compares this message with the same message without reasoning, with the label R1.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        conversation: A conversation whose reasoning the template renders.

    Mutates: `turn.prober`, which records the comparison. If a marker is missing, a sentence is
        appended to `turn.prober.undecided` for the report.

    Returns:
        The markers, or None if one of the markers is missing.
    """
    answer = conversation.answer or AssistantMessage()
    around = _cut_at_reasoning(turn, conversation, has_content=bool(answer.content))
    pair = _markers_of_reasoning(turn, around)
    if not pair.opening or not pair.closing.strip():
        turn.prober.undecided.append(
            "R1: The markers of reasoning cannot be recognised. The template writes reasoning "
            f"between {around.before!r} and {around.between!r}."
        )
        return None
    turn.prober.record(
        "R1 reasoning presence",
        "The message has reasoning.",
        left=replace(conversation, answer=replace(answer, reasoning="")),
        right=conversation,
        finding=f"Reasoning is written between {pair.opening!r} and {pair.closing!r}.",
    )
    header = turn.header.strip()
    markup = declare_reasoning(pair.opening, pair.closing, header, around.between)
    return replace(markup, wrapper=_wrapper_after_reasoning(around, pair.closing, header))


class _TextAroundReasoning(NamedTuple):
    """The text around the reasoning of a rendered message.

    Example: the text "<think>REASONING</think><answer>CONTENT</answer>" has `before` "<think>",
    `between` "</think><answer>" and `after_content` "</answer>".

    Attributes:
        before: The text before the reasoning.
        between: The text between the reasoning and the next part of the message, which is the
            content or the name of the called function.
        after_content: The text after the content, or None if the message has no content.
    """

    before: str
    between: str
    after_content: str | None


def _cut_at_reasoning(
    turn: ModelTurn, conversation: Conversation, *, has_content: bool
) -> _TextAroundReasoning:
    """Render a message, and return the text around the reasoning and around the content.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the message.
        conversation: The conversation. Its answer is the message.
        has_content: Whether the message has content. Otherwise the message has a tool call.
    """
    text = turn.text_after_header(conversation) or ""
    before, _, after_reasoning = text.partition(REASONING_TEXT)
    if has_content:
        between, _, after_content = after_reasoning.partition(CONTENT_TEXT)
        return _TextAroundReasoning(before, between, after_content)
    between, _, _ = after_reasoning.partition(FIRST_TOOL)
    return _TextAroundReasoning(before, between, after_content=None)


def _wrapper_after_reasoning(
    around: _TextAroundReasoning, closing: str, header: str
) -> Wrapper | None:
    """Return the markers around the content that follows the reasoning, or None.

    Example: the text "<think>REASONING</think><answer>CONTENT</answer>" has the wrapper `<answer>`,
    `</answer>`.

    Args:
        around: The texts around the reasoning.
        closing: The closing marker of reasoning.
        header: The header of the model's turn. Some templates repeat the header before the content.
    """
    if around.after_content is None:
        return None
    before_content = around.between.removeprefix(closing)
    if header:  # The header is not a part of the wrapper.
        before_content = before_content.replace(header, "")
    return content_wrapper(before_content, around.after_content)


def _markers_of_reasoning(turn: ModelTurn, around: _TextAroundReasoning) -> MarkerPair:
    """Return the opening and the closing marker of reasoning. A missing marker is ""."""
    opening = _opening_before_reasoning(turn, around.before)
    closing = closing_marker(around.between, opening)
    if not opening:
        # The opening marker may be derived from the closing marker: `<think>` from `</think>`.
        opening = first_occurring(turn, opening_spellings(closing.strip()))
    return MarkerPair(opening, closing)


def _opening_before_reasoning(turn: ModelTurn, before: str) -> str:
    r"""Return the opening marker of reasoning, or "". `before` is the text before the reasoning.

    If `before` is blank, the marker may be in the generation prompt. Example: if `before` is ""
    and a generation prompt ends with "<think>\n", the result is "<think>\n".
    """
    if before.strip():
        return last_opening(before)
    for prompt in turn.prompts:
        opening = first_opening(prompt.after_header)
        if opening:
            return opening
    return ""


# ---- R4: the template's source ------------------------------------------------------------------


def search_source(turn: ModelTurn) -> ReasoningMarkup | None:
    """Search the string constants of the template for markers of reasoning.

    Example: a template that removes reasoning from earlier messages with
    `content.split('</think>')` shows the marker `</think>`, from which `<think>` is derived. The
    report shows this finding with the label R4. Return None if no constant contains a marker of
    reasoning.
    """
    for literal in turn.prober.template.literals:
        reasoning_pair = named_pair(literal)
        if reasoning_pair is not None:
            turn.prober.record_finding(
                "R4 source",
                f"A string constant of the template contains {reasoning_pair.closing!r}.",
            )
            # The constant may also contain the markers around the content, as an empty pair.
            other_pairs = [pair for pair in empty_pairs(literal) if pair != reasoning_pair]
            return markup_of_pairs(reasoning_pair, other_pairs)
    return None


# ---- R5: reasoning before a call ----------------------------------------------------------------


def compare_reasoning_before_call(
    turn: ModelTurn, part: Reasoning, conversation: Conversation
) -> tuple[str, ...]:
    """Find out which tool-call marker ends the reasoning if the template omits the closing marker.

    Some templates omit the closing marker of reasoning before a tool call. Example: in
    "<think>REASONING<tool_call>..", the marker `<tool_call>` interrupts the reasoning. The report
    compares this message with the same message without reasoning, with the label R5.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        part: The reasoning part of the format, which declares the markers of reasoning.
        conversation: A conversation whose reasoning the template renders.

    Mutates: `turn.prober`, which records the comparison. If nothing marks the end of the reasoning,
        a sentence is appended to `turn.prober.undecided` for the report.

    Returns:
        A tuple with this marker, or () if there is no such marker. The tuple is the value of
        `Reasoning.interrupted_by`.
    """
    call_only = AssistantMessage(calls=ONE_CALL)
    reasoning_and_call = replace(call_only, reasoning=REASONING_TEXT)
    with_reasoning = replace(conversation, answer=reasoning_and_call, tools=True)
    text = turn.text_after_header(with_reasoning) or ""
    between = text_between(text, REASONING_TEXT, FIRST_TOOL)
    if between is None or part.close.strip() in between:
        return ()  # The template does not render the message, or it writes the closing marker.
    markers_between = markers(between)
    if not markers_between:
        turn.prober.undecided.append(
            "R5: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return ()
    interruption = markers_between[0]  # such as `<tool_call>`
    turn.prober.record(
        "R5 reasoning before a call",
        "The message has reasoning.",
        left=replace(with_reasoning, answer=call_only),
        right=with_reasoning,
        finding=f"{interruption!r} ends reasoning that has no closing marker.",
    )
    return (interruption,)
