"""Find the markers that a template writes around reasoning, such as `<think>`.

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
    first_two,
    markers,
    opening_spellings,
    text_between,
)
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.reasoning_in_prompts import (
    find_markers_in_instructions,
    find_markers_in_prompts,
    first_in_template_or_prompts,
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
    findings = find_rendered_reasoning(turn)  # The markers are still missing.
    # If the template renders no reasoning, `findings.conversation` is None. The markers may
    # nevertheless occur in a prompt or in the source of the template.
    markup = _find_markup(turn, findings.conversation)
    if markup is None:
        return findings
    # `opener` states who writes the opening marker: the model, or the template at the end of the
    # prompt.
    part = replace(markup.part, opener=_infer_opener(turn, markup.part))
    if findings.conversation is not None:
        # The opening marker of a tool call, such as `<tool_call>`, may end the reasoning instead of
        # `</think>`.
        interruption = find_interruption(turn, part, findings.conversation)
        part = replace(part, interrupted_by=interruption)
    # `markup` may also contain the markers around the content (`wrapper`), and the headers between
    # the reasoning and the content (`inner_headers`).
    return replace(findings, part=part, wrapper=markup.wrapper, inner_headers=markup.inner_headers)


def _find_markup(turn: ModelTurn, conversation: Conversation | None) -> ReasoningMarkup | None:
    """Return the markers of reasoning, such as `<think>`. Return None if no markers are found.

    The markers are searched in four places: a rendered message with reasoning, the generation
    prompts, the instructions of a prompt, and the source of the template. The first place that
    contains markers gives the result.

    Mutates: `turn.prober`, which records the successful search for the report.

    Args:
        turn: The text around the model's answers. `turn.prober` renders conversations.
        conversation: A conversation whose reasoning the template renders. If the template renders
            no reasoning, the argument is None, and no rendered message is searched.
    """
    if conversation is not None:
        markup = find_markers_in_message(turn, conversation)
        if markup is not None:
            return markup
    for search in (find_markers_in_prompts, find_markers_in_instructions, find_markers_in_source):
        markup = search(turn)
        if markup is not None:
            return markup
    return None


def _infer_opener(turn: ModelTurn, part: Reasoning) -> Opener:
    r"""Find out whether the template or the model writes the opening marker of reasoning.

    Return `Opener.PROMPT` if the default prompt opens reasoning and does not close the reasoning,
    as in "<|im_start|>assistant\n<think>\n". Otherwise, return `Opener.MODEL`.
    """
    prompt_end = turn.prompts[0].after_header if turn.prompts else ""  # such as "<think>\n"
    is_open = part.open.strip() in prompt_end and part.close.strip() not in prompt_end
    return Opener.PROMPT if is_open else Opener.MODEL


# ---- R1: a message without and with reasoning ---------------------------------------------------


def find_markers_in_message(turn: ModelTurn, conversation: Conversation) -> ReasoningMarkup | None:
    """Find the markers, such as `<think>`, around the reasoning in a rendered message.

    Example: the message "<think>REASONING</think>CONTENT" contains the markers `<think>` and
    `</think>`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        conversation: A conversation whose answer has reasoning. The template renders the reasoning.

    Mutates: `turn.prober`, which records the message with and without reasoning for the report,
        with the label R1. If a marker is missing, the prober records an undecided question instead.

    Returns:
        The markers around the reasoning and around the content. None if the opening marker or the
        closing marker of reasoning is missing.
    """
    around = _cut_at_reasoning(turn, conversation)  # The texts before and after the reasoning.
    pair = _markers_of_reasoning(turn, around)
    is_marker_missing = not pair.opening.strip() or not pair.closing.strip()
    if is_marker_missing:
        turn.prober.record_undecided(
            "R1: The markers of reasoning cannot be recognised. The template writes reasoning "
            f"between {around.before!r} and {around.after_reasoning!r}."
        )
        return None
    turn.prober.record(
        "R1 reasoning presence",
        "The message has reasoning.",
        left=_without_reasoning(conversation),
        right=conversation,
        finding=f"Reasoning is written between {pair.opening!r} and {pair.closing!r}.",
    )
    header = turn.header.strip()
    # If the header occurs again between the reasoning and the content, `markup` declares this
    # second header as an inner header. The parser must remove inner headers from the output.
    markup = declare_reasoning(pair, header, around.after_reasoning)
    return replace(markup, wrapper=_wrapper_after_reasoning(around, pair.closing, header))


def _without_reasoning(conversation: Conversation) -> Conversation:
    """Return a copy of a conversation in which the answer has no reasoning."""
    answer = conversation.answer or AssistantMessage()
    return replace(conversation, answer=replace(answer, reasoning=""))


class _TextAroundReasoning(NamedTuple):
    """The texts around the reasoning and around the content of a rendered message.

    Example: "<think>REASONING</think><answer>CONTENT</answer>" has `before` "<think>",
    `after_reasoning` "</think><answer>" and `after_content` "</answer>".

    Attributes:
        before: The text before the reasoning.
        after_reasoning: The text between the reasoning and the content. If the message has no
            content, the text between the reasoning and the name of the called function.
        after_content: The text after the content. None if the message has no content.
    """

    before: str
    after_reasoning: str
    after_content: str | None


def _cut_at_reasoning(turn: ModelTurn, conversation: Conversation) -> _TextAroundReasoning:
    """Render an answer with reasoning. Return the texts around the reasoning and the content.

    Example: the rendered answer "<think>REASONING</think><answer>CONTENT</answer>" is cut into
    `before` "<think>", `after_reasoning` "</think><answer>" and `after_content` "</answer>".

    Args:
        turn: The text around the model's answers. `turn.prober` renders the answer.
        conversation: A conversation whose answer has reasoning, and also content or a tool call.
            The caller has found that the template renders all of them.
    """
    text = turn.text_after_header(conversation) or ""
    before, _, rest = text.partition(REASONING_TEXT)
    has_content = conversation.answer is not None and bool(conversation.answer.content)
    if has_content:
        after_reasoning, _, after_content = rest.partition(CONTENT_TEXT)
        return _TextAroundReasoning(before, after_reasoning, after_content)
    after_reasoning, _, _ = rest.partition(FIRST_TOOL)  # up to the name of the called function
    # None means that the message has no content. The text "" would mean that the message has
    # content, but no text after the content.
    return _TextAroundReasoning(before, after_reasoning, after_content=None)


def _wrapper_after_reasoning(
    around: _TextAroundReasoning, closing: str, header: str
) -> Wrapper | None:
    """Return the markers around the content that follows the reasoning, or None if there are none.

    Example: in "<think>REASONING</think><|assistant|><answer>CONTENT</answer>", the content is
    between `<answer>` and `</answer>`. The closing marker `</think>` and the header `<|assistant|>`
    also precede the content, but they are not markers of the content.

    Args:
        around: The texts around the reasoning and the content of the message. If the message has no
            content, the result is None.
        closing: The closing marker of reasoning, such as `</think>`.
        header: The text that opens an assistant message, such as `<|assistant|>`, or "". Some
            templates repeat this text before the content.
    """
    if around.after_content is None:
        return None
    after_closing = around.after_reasoning.removeprefix(closing)
    before_content = after_closing.replace(header, "") if header else after_closing
    return content_wrapper(before_content, around.after_content)


def _markers_of_reasoning(turn: ModelTurn, around: _TextAroundReasoning) -> MarkerPair:
    """Return the opening and closing markers of reasoning. A missing marker is "" or white space.

    Example: if the rendered message is "<think>REASONING</think>CONTENT", the markers are `<think>`
    and `</think>`.

    Args:
        turn: The generation prompts and the template. If the rendered message does not contain the
            opening marker, the marker is searched there.
        around: The texts around the reasoning of the rendered message.
    """
    opening = _opening_before_reasoning(turn, around.before)
    # If there is no opening marker, the first marker after the reasoning is the closing marker.
    closing = closing_marker(around.after_reasoning, opening)
    if not opening:
        # The opening marker is derived from the closing marker, for example `<think>` from
        # `</think>`. If the closing marker is blank, nothing can be derived, and `opening` stays
        # "".
        opening = first_in_template_or_prompts(turn, opening_spellings(closing.strip()))
    return MarkerPair(opening, closing)


def _opening_before_reasoning(turn: ModelTurn, before: str) -> str:
    r"""Return the opening marker of reasoning, such as `<think>`, or "" if there is none.

    Usually, the rendered message contains the opening marker. In some templates, the prompt ends
    with this marker, so the message starts directly with the reasoning. Example: `before` is "",
    and the prompt ends with "<|assistant|><think>\n". The result is "<think>\n".

    Args:
        turn: The prompts of the template. Each prompt ends with the header of the model's answer,
            such as `<|assistant|>`, and with the text after this header.
        before: The text of the rendered message before the reasoning.
    """
    if before.strip():
        # The reasoning directly follows `before`. Therefore, the last marker in `before` opens the
        # reasoning. If words follow this marker, the words open the reasoning.
        return last_opening(before)
    # In a prompt, other text may follow the opening marker. For example, `</think>` follows if
    # thinking is off. Therefore, the first marker after the header opens the reasoning, not the
    # last.
    openings = [first_opening(prompt.after_header) for prompt in turn.prompts]
    return next((opening for opening in openings if opening), "")


# ---- R4: the template's source ------------------------------------------------------------------


def find_markers_in_source(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find the markers of reasoning, such as `</think>`, in the string constants of a template.

    Example: a template contains the expression `content.split('</think>')`, which removes the
    reasoning from earlier messages. The constant `</think>` is the closing marker of reasoning. The
    opening marker `<think>` is derived from the closing marker.

    Mutates: `turn.prober`, which records the finding for the report, with the label R4.

    Returns:
        The markers in the first constant that contains markers of reasoning, or None.
    """
    for literal in turn.prober.template.literals:
        reasoning_pair = named_pair(literal)
        if reasoning_pair is None:
            continue
        turn.prober.record_finding(
            "R4 source",
            f"A string constant of the template contains {reasoning_pair.closing!r}.",
        )
        # The constant may also contain the markers around the content: `<answer></answer>`.
        other_pairs = [pair for pair in empty_pairs(literal) if pair != reasoning_pair]
        return markup_of_pairs(reasoning_pair, other_pairs)
    return None


# ---- R5: reasoning before a call ----------------------------------------------------------------


def find_interruption(
    turn: ModelTurn, part: Reasoning, conversation: Conversation
) -> tuple[str, ...]:
    """Return the marker, such as `<tool_call>`, that ends reasoning instead of `</think>`.

    Example: in "<think>REASONING<tool_call>..", the template has omitted `</think>`, so the parser
    must end the reasoning at `<tool_call>`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        part: The markers of reasoning.
        conversation: A conversation whose reasoning the template renders. Its setting of the
            thinking switches is used, but its answer is replaced with reasoning and a tool call.

    Mutates: `turn.prober`, which records the comparison R5 or an open question for the report.

    Returns:
        A tuple with this one marker, as the value of `Reasoning.interrupted_by`. The tuple is empty
        if the template writes the closing marker, or if there is no marker.
    """
    answer = AssistantMessage(reasoning=REASONING_TEXT, calls=ONE_CALL)
    with_reasoning = replace(conversation, answer=answer, tools=True)
    rendered_message = turn.text_after_header(with_reasoning) or ""
    before_call = text_between(rendered_message, REASONING_TEXT, FIRST_TOOL)
    if before_call is None or part.close.strip() in before_call:
        return ()  # The message is not rendered, or the template writes the closing marker.
    interruption, _ = first_two(markers(before_call))  # such as `<tool_call>`, or ""
    if not interruption:
        turn.prober.record_undecided(
            "R5: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return ()
    turn.prober.record(
        "R5 reasoning before a call",
        "The message has reasoning.",
        left=_without_reasoning(with_reasoning),
        right=with_reasoning,
        finding=f"{interruption!r} ends reasoning that has no closing marker.",
    )
    return (interruption,)
