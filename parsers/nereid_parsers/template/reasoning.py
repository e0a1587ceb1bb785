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

from nereid_parsers.format import Opener, Reasoning
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

    Mutates: `turn.prober`, which records comparisons and undecided questions for the report.
    """
    findings = find_rendered_reasoning(turn)
    # If the template renders no reasoning, `findings.conversation` is None. The markers may
    # nevertheless occur in a prompt or in the source of the template.
    markup = _find_markup(turn, findings.conversation)
    if markup is None:
        return findings
    # The template writes the opening marker if the default prompt opens reasoning and does not
    # close the reasoning, as in "<|im_start|>assistant\n<think>\n". Otherwise, the model writes the
    # opening marker.
    prompt_end = turn.prompts[0].after_header if turn.prompts else ""  # such as "<think>\n"
    is_open = markup.part.open.strip() in prompt_end and markup.part.close.strip() not in prompt_end
    part = replace(
        markup.part,
        opener=Opener.PROMPT if is_open else Opener.MODEL,
        interrupted_by=find_interruption(turn, markup.part, findings.conversation),
    )
    return replace(findings, part=part, wrapper=markup.wrapper, inner_headers=markup.inner_headers)


def _find_markup(turn: ModelTurn, conversation: Conversation | None) -> ReasoningMarkup | None:
    """Return the markers of reasoning, such as `<think>`. Return None if no markers are found.

    The markers are searched in four places: a rendered message with reasoning, the generation
    prompts, the instructions of a prompt, and the source of the template. The first place that
    contains markers gives the result. If `conversation` is None, the template renders no reasoning,
    and no rendered message is searched.

    Mutates: `turn.prober`, which records the successful search for the report.
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


# ---- R1: a message without and with reasoning ---------------------------------------------------


def find_markers_in_message(turn: ModelTurn, conversation: Conversation) -> ReasoningMarkup | None:
    """Find the markers, such as `<think>`, around the reasoning in a rendered message.

    Example: the message "<think>REASONING</think>CONTENT" contains the markers `<think>` and
    `</think>`.

    Mutates: `turn.prober`, which records the comparison R1 or an undecided question for the report.

    The answer of `conversation` has reasoning, and also content or a call of FIRST_TOOL. The
    template renders all of them.

    Returns:
        The markers around the reasoning and around the content. None if the opening marker or the
        closing marker of reasoning is missing.
    """
    text = turn.text_after_header(conversation) or ""
    before, _, rest = text.partition(REASONING_TEXT)
    has_content = conversation.answer is not None and bool(conversation.answer.content)
    after_reasoning, _, after_content = rest.partition(CONTENT_TEXT if has_content else FIRST_TOOL)
    pair = _markers_of_reasoning(turn, before, after_reasoning)
    is_marker_missing = not pair.opening.strip() or not pair.closing.strip()
    if is_marker_missing:
        turn.prober.undecided.append(
            "R1: The markers of reasoning cannot be recognised. The template writes reasoning "
            f"between {before!r} and {after_reasoning!r}."
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
    markup = declare_reasoning(pair, header, after_reasoning)
    if not has_content:
        return markup
    # The closing marker of reasoning is no marker of the content. Neither is the header, which some
    # templates repeat before the content.
    before_content = after_reasoning.removeprefix(pair.closing).replace(header, "")
    return replace(markup, wrapper=content_wrapper(before_content, after_content))


def _without_reasoning(conversation: Conversation) -> Conversation:
    """Return a copy of a conversation in which the answer has no reasoning."""
    answer = conversation.answer or AssistantMessage()
    return replace(conversation, answer=replace(answer, reasoning=""))


def _markers_of_reasoning(turn: ModelTurn, before: str, after_reasoning: str) -> MarkerPair:
    """Return the opening and closing markers of reasoning. A missing marker is "" or white space.

    `before` and `after_reasoning` are the texts around the reasoning in a rendered message.
    Usually, both markers are in the message or in a prompt, as in "<think>REASONING</think>". If
    the opening marker is in neither, it is derived from the closing marker: `<think>` from
    `</think>`. A derived marker must occur in the template or in a prompt.
    """
    opening = _opening_before_reasoning(turn, before)
    closing = closing_marker(after_reasoning, opening)
    if not opening:
        opening = first_in_template_or_prompts(turn, opening_spellings(closing.strip()))
    return MarkerPair(opening, closing)


def _opening_before_reasoning(turn: ModelTurn, before: str) -> str:
    r"""Return the opening marker of reasoning, such as `<think>`, or "" if there is none.

    Usually, the rendered message contains the opening marker. In some templates, the prompt ends
    with this marker, so the message starts directly with the reasoning. Example: `before` is "",
    and the prompt ends with "<|assistant|><think>\n". The result is "<think>\n".
    """
    if before.strip():
        return last_opening(before)  # The reasoning directly follows `before`.
    # In a prompt, other markers, such as `</think>`, may follow the opening marker. Therefore, the
    # opening marker is the first marker after the header.
    openings = (first_opening(prompt.after_header) for prompt in turn.prompts)
    return next(filter(None, openings), "")


# ---- R4: the template's source ------------------------------------------------------------------


def find_markers_in_source(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find the markers of reasoning, such as `</think>`, in the string constants of a template.

    Example: a template contains the expression `content.split('</think>')`, which removes the
    reasoning from earlier messages. The constant `</think>` is the closing marker of reasoning. The
    opening marker `<think>` is derived from the closing marker. A constant may also contain the
    markers around the content: `<think></think><answer></answer>`.

    Mutates: `turn.prober`, which records the finding R4 for the report.

    Returns:
        The markers in the first constant that contains markers of reasoning, or None.
    """
    for literal in turn.prober.template.literals:
        reasoning_pair = named_pair(literal)
        if reasoning_pair is None:
            continue
        turn.prober.record_without_comparison(
            "R4 source",
            finding=f"A string constant of the template contains {reasoning_pair.closing!r}.",
        )
        other_pairs = (pair for pair in empty_pairs(literal) if pair != reasoning_pair)
        return markup_of_pairs(reasoning_pair, content_pair=next(other_pairs, None))
    return None


# ---- R5: reasoning before a call ----------------------------------------------------------------


def find_interruption(
    turn: ModelTurn, part: Reasoning, conversation: Conversation | None
) -> tuple[str, ...]:
    """Return the marker, such as `<tool_call>`, that ends reasoning instead of `</think>`.

    Example: in "<think>REASONING<tool_call>..", the template has omitted `</think>`, so the parser
    must end the reasoning at `<tool_call>`.

    Mutates: `turn.prober`, which records the comparison R5 or an open question for the report.

    `conversation` is a conversation whose reasoning the template renders, or None. To find the
    marker, the same conversation is rendered with another answer: reasoning and a call.

    Returns:
        A tuple with this one marker, as the value of `Reasoning.interrupted_by`. The tuple is empty
        if the template writes the closing marker, or if there is no marker.
    """
    if conversation is None:
        return ()
    answer = AssistantMessage(reasoning=REASONING_TEXT, calls=ONE_CALL)
    with_reasoning = replace(conversation, answer=answer, tools=True)
    rendered_message = turn.text_after_header(with_reasoning) or ""
    before_call = text_between(rendered_message, REASONING_TEXT, FIRST_TOOL)
    if before_call is None or part.close.strip() in before_call:
        return ()  # The message is not rendered, or the template writes the closing marker.
    interruption, _ = first_two(markers(before_call))
    if not interruption:
        turn.prober.undecided.append(
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
