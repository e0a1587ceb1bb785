"""Find the markers that a template writes around reasoning.

The markers are found by the searches R1 to R5. R1, R2, R3 and R5 each compare two renderings. R4
searches the source of the template. The second column of the table shows what is compared or
searched, and the third column shows what is found.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt contains
R3  a thinking switch on and off            pairs of tags that the instructions mention
R4  the string constants of the template    markers whose names refer to thinking
R5  a tool call without and with reasoning  the marker of a tool call that also ends reasoning

R1 to R4 are tried in this order until one of them finds markers. Then R5 adds the marker of a tool
call, if this marker also ends reasoning. The module `reasoning_in_prompts` contains R2 and R3.
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

    The result also contains the message fields from which the template renders reasoning. If the
    markers of reasoning cannot be found, the attribute `part` of the result is None.

    Args:
        turn: The text around the model's answers. `turn.prober` renders conversations with the
            template.

    Mutates: `turn.prober`, which records comparisons and undecided questions for the report.
    """
    findings = find_rendered_reasoning(turn)  # These findings contain no markers yet.
    markup = _find_markup(turn, findings.conversation)
    if markup is None:
        return findings
    part = replace(markup.part, opener=_infer_opener(turn, markup.part))
    if findings.conversation is not None:
        # A tool call may end the reasoning without a closing marker.
        interrupted_by = compare_reasoning_before_call(turn, part, findings.conversation)
        part = replace(part, interrupted_by=interrupted_by)
    return replace(findings, part=part, wrapper=markup.wrapper, inner_headers=markup.inner_headers)


def _find_markup(turn: ModelTurn, conversation: Conversation | None) -> ReasoningMarkup | None:
    """Find the markers of reasoning, such as `<think>` and `</think>`, or return None.

    Four searches are tried in order: in a rendered message with reasoning, in the generation
    prompts, in the instructions of a prompt, and in the source of the template. The first search
    that finds markers gives the result.

    Args:
        turn: The text around the model's answers. `turn.prober` renders conversations.
        conversation: A conversation whose reasoning the template renders. If there is none, the
            argument is None, and the first search is omitted.
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
    r"""Find out whether the prompt or the model writes the opening marker of reasoning.

    Return `Opener.PROMPT` if the default prompt ends with open reasoning, as in
    "<|im_start|>assistant\n<think>\n". Otherwise, return `Opener.MODEL`.
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
    report shows this message next to the message without reasoning, with the label R1.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        conversation: A conversation whose answer has reasoning. The template renders the reasoning.

    Mutates: `turn.prober`, which records the comparison. If a marker is missing, the prober records
        an undecided question instead.

    Returns:
        The markers around the reasoning and around the content. None if the opening marker or the
        closing marker of reasoning is missing.
    """
    answer = conversation.answer or AssistantMessage()
    around = _cut_at_reasoning(turn, conversation, has_content=bool(answer.content))
    pair = _markers_of_reasoning(turn, around)
    if not pair.opening or not pair.closing.strip():
        turn.prober.record_undecided(
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
        between: The text between the reasoning and the next part of the message. The next part is
            the content, or the name of the called function.
        after_content: The text after the content. None if the message has no content.
    """

    before: str
    between: str
    after_content: str | None


def _cut_at_reasoning(
    turn: ModelTurn, conversation: Conversation, *, has_content: bool
) -> _TextAroundReasoning:
    """Render a message, and return the texts before and after its reasoning.

    Example: the rendering "<think>REASONING</think><answer>CONTENT</answer>" gives `before`
    "<think>", `between` "</think><answer>" and `after_content` "</answer>". If the message has a
    tool call instead of content, `between` ends at the function's name, and `after_content` is
    None.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the message.
        conversation: A conversation whose answer is the message.
        has_content: Whether the message has content. Otherwise, the message has a tool call.
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

    Example: in "<think>REASONING</think><|assistant|><answer>CONTENT</answer>", the content is
    between `<answer>` and `</answer>`. The closing marker `</think>` and the header `<|assistant|>`
    also precede the content, but they are not markers of the content.

    Args:
        around: The texts around the reasoning of a rendered message.
        closing: The closing marker of reasoning, such as `</think>`.
        header: The text that opens an assistant message, such as `<|assistant|>`, or "". Some
            templates repeat this text before the content.
    """
    if around.after_content is None:
        return None  # The message has no content.
    after_closing = around.between.removeprefix(closing)
    before_content = after_closing.replace(header, "") if header else after_closing
    return content_wrapper(before_content, around.after_content)


def _markers_of_reasoning(turn: ModelTurn, around: _TextAroundReasoning) -> MarkerPair:
    """Return the opening marker and the closing marker of reasoning. A missing marker is "".

    Example: if the rendered message is "<think>REASONING</think>CONTENT", the markers are `<think>`
    and `</think>`.
    """
    opening = _opening_before_reasoning(turn, around.before)
    closing = closing_marker(around.between, opening)
    if not opening:
        # The opening marker may be derived from the closing marker: `<think>` from `</think>`.
        opening = first_occurring(turn, opening_spellings(closing.strip()))
    return MarkerPair(opening, closing)


def _opening_before_reasoning(turn: ModelTurn, before: str) -> str:
    r"""Return the opening marker of reasoning, such as `<think>`, or "" if there is none.

    Usually, the opening marker is a part of the rendered message. If the prompt already contains
    the opening marker, the message starts directly with the reasoning. Example: if `before` is ""
    and a generation prompt ends with "<|assistant|><think>\n", the result is "<think>\n".

    Args:
        turn: The generation prompts, and the header `<|assistant|>` before the model's answer.
        before: The text of the rendered message before the reasoning.
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

    Example: with the expression `content.split('</think>')`, a template removes the reasoning from
    earlier messages. The constant `</think>` is the closing marker of reasoning, and the opening
    marker `<think>` is derived from the closing marker. The report shows the finding with the label
    R4.

    Mutates: `turn.prober`, which records the finding.

    Returns:
        The markers in the first constant that contains markers of reasoning, or None.
    """
    for literal in turn.prober.template.literals:
        reasoning_pair = named_pair(literal)
        if reasoning_pair is not None:
            turn.prober.record_finding(
                "R4 source",
                f"A string constant of the template contains {reasoning_pair.closing!r}.",
            )
            # The constant may also contain the markers around the content: `<answer></answer>`.
            other_pairs = [pair for pair in empty_pairs(literal) if pair != reasoning_pair]
            return markup_of_pairs(reasoning_pair, other_pairs)
    return None


# ---- R5: reasoning before a call ----------------------------------------------------------------


def compare_reasoning_before_call(
    turn: ModelTurn, part: Reasoning, conversation: Conversation
) -> tuple[str, ...]:
    """Return the marker of a tool call that ends reasoning without a closing marker.

    Some templates omit the closing marker of reasoning, such as `</think>`, before a tool call.
    Example: in "<think>REASONING<tool_call>..", the marker `<tool_call>` ends the reasoning. The
    parser must then end the reasoning at `<tool_call>`. The report shows this message next to the
    message without reasoning, with the label R5.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        part: The markers of reasoning.
        conversation: A conversation whose reasoning the template renders.

    Mutates: `turn.prober`, which records the comparison. If no marker is between the reasoning and
        the tool call, the prober records an undecided question instead.

    Returns:
        A tuple with the marker, as the value of `Reasoning.interrupted_by`. The tuple is empty if
        the template writes the closing marker, or if no marker is found.
    """
    call_only = AssistantMessage(calls=ONE_CALL)
    without_reasoning = replace(conversation, answer=call_only, tools=True)
    with_reasoning = replace(without_reasoning, answer=replace(call_only, reasoning=REASONING_TEXT))
    rendered_message = turn.text_after_header(with_reasoning) or ""
    between = text_between(rendered_message, REASONING_TEXT, FIRST_TOOL)
    if between is None or part.close.strip() in between:
        return ()  # The message is not rendered, or the template writes the closing marker.
    markers_between = markers(between)
    if not markers_between:
        turn.prober.record_undecided(
            "R5: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return ()
    interruption = markers_between[0]  # such as `<tool_call>`
    turn.prober.record(
        "R5 reasoning before a call",
        "The message has reasoning.",
        left=without_reasoning,
        right=with_reasoning,
        finding=f"{interruption!r} ends reasoning that has no closing marker.",
    )
    return (interruption,)
