"""Find the markers that a template writes around reasoning.

R1, R2, R3 and R5 each compare two renderings. R4 searches the source of the template. The left
column of the table shows what is compared or searched, and the right column shows what is found.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt contains
R3  a thinking switch on and off            pairs of tags that the instructions mention
R4  the string constants of the template    markers whose names refer to thinking
R5  a call without and with reasoning       the marker of a call that also ends reasoning

R1 to R4 are tried in this order until one of them finds markers. Then R5 adds the marker of a call,
if this marker also ends reasoning.
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
    closing_spellings,
    difference,
    first_two,
    markers,
    opening_spellings,
    text_between,
)
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn
from nereid_parsers.template.probe import UNCHANGED
from nereid_parsers.template.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    closing_marker,
    content_wrapper,
    declare_reasoning,
    empty_pairs,
    first_opening,
    is_thinking_marker,
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
    conversation = findings.conversation
    markup = _first_markup(turn, conversation)
    if markup is None:
        return findings
    interrupted_by: tuple[str, ...] = ()
    if conversation is not None:
        interrupted_by = compare_reasoning_before_call(turn, markup.part, conversation)
    opener = _infer_opener(turn, markup.part)
    part = replace(markup.part, opener=opener, interrupted_by=interrupted_by)
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
    has_content = bool(answer.content)
    # The name of the called function follows the reasoning if the message has no content.
    next_text = CONTENT_TEXT if has_content else FIRST_TOOL
    around = _cut_at_reasoning(turn, conversation, next_text)
    opening, closing = _markers_of_reasoning(turn, around)
    if not opening or not closing.strip():
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
        finding=f"Reasoning is written between {opening!r} and {closing!r}.",
    )
    markup = declare_reasoning(opening, closing, turn.header.strip(), around.between)
    if not has_content:
        return markup
    wrapper = _wrapper_after_reasoning(around, closing, turn.header.strip())
    return replace(markup, wrapper=wrapper)


class _TextAroundReasoning(NamedTuple):
    """The text around the reasoning of a rendered message.

    Example: the text "<think>REASONING</think><answer>CONTENT</answer>" has `before` "<think>",
    `between` "</think><answer>" and `after` "</answer>".
    """

    before: str
    between: str
    after: str


def _cut_at_reasoning(
    turn: ModelTurn, conversation: Conversation, next_text: str
) -> _TextAroundReasoning:
    """Render a message. Return the text around the reasoning and around `next_text`.

    Example: if `next_text` is CONTENT, "<think>REASONING</think><answer>CONTENT</answer>" gives
    "<think>", "</think><answer>" and "</answer>".
    """
    text = turn.text_after_header(conversation) or ""
    before, _, after_reasoning = text.partition(REASONING_TEXT)
    between, _, after = after_reasoning.partition(next_text)
    return _TextAroundReasoning(before, between, after)


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
    before_content = around.between.removeprefix(closing)
    if header:
        before_content = before_content.replace(header, "")
    return content_wrapper(before_content, around.after)


def _markers_of_reasoning(turn: ModelTurn, around: _TextAroundReasoning) -> MarkerPair:
    """Return the opening and the closing marker of reasoning. A missing marker is ""."""
    opening = _opening_before_reasoning(turn, around.before)
    closing = closing_marker(around.between, opening)
    if not opening:
        # The opening marker may be derived from the closing marker: `<think>` from `</think>`.
        opening = _first_occurring(turn, opening_spellings(closing.strip()))
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


# ---- R2, R3: the thinking switches --------------------------------------------------------------


def compare_thinking_switch(turn: ModelTurn) -> ReasoningMarkup | None:
    r"""Find the markers of reasoning in the generation prompts.

    A generation prompt opens the model's answer. `turn` contains one prompt for each setting of the
    template's thinking switches, for example `enable_thinking=False`. Example: if a prompt ends
    with "<think>\n\n</think>\n\n", the markers are `<think>\n` and `\n</think>\n\n`.

    The report compares this prompt with the default prompt, with the label R2.

    Returns:
        The markers of the first prompt that contains markers of reasoning, or None.
    """
    for prompt in turn.prompts:
        closing = _closing_in_prompt(turn, prompt)
        if not closing:
            continue
        opening = first_opening(prompt.after_header)
        turn.prober.record(
            "R2 thinking switch",
            prompt.switches.describe() or UNCHANGED,
            left=turn.prompts[0].conversation,
            right=prompt.conversation,
            finding=f"The prompt opens reasoning with {opening!r}. "
            f"The marker {closing!r} closes reasoning.",
        )
        # If a line break follows the opening marker, the closing marker is probably also on a line
        # of its own.
        is_on_own_line = opening.endswith("\n")
        close = f"\n{closing}\n\n" if is_on_own_line else closing
        return ReasoningMarkup(Reasoning(opening, close))
    return None


def _closing_in_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """Return the closing marker of reasoning if `prompt` contains the opening marker, or else "".

    There are three cases. Each example is the end of a prompt:

        `<think></think>`   The prompt itself contains the closing marker.
        `<think>`           The name of the marker refers to thinking. The closing marker is derived
                            from the opening marker. A spelling that the template contains is
                            preferred.
        `<notes>`           The name does not refer to thinking. The marker opens reasoning if a
                            thinking switch adds the marker, and the template has a closing marker.

    Args:
        turn: The text around the model's answers. `turn.prompts[0]` is the default prompt.
        prompt: A prompt with a setting of the thinking switches, such as enable_thinking=True.
    """
    opening, second = first_two(markers(prompt.after_header))  # A missing marker is "".
    possible_closings = closing_spellings(opening)
    has_thinking_name = is_thinking_marker(opening)
    is_closed_in_prompt = bool(second) and (has_thinking_name or second in possible_closings)
    if is_closed_in_prompt:
        return second
    closing_in_template = _first_occurring(turn, possible_closings)
    if has_thinking_name:
        derived_closing = possible_closings[0] if possible_closings else ""
        return closing_in_template or derived_closing
    is_added_by_switch = prompt.after_header != turn.prompts[0].after_header
    return closing_in_template if is_added_by_switch else ""


def compare_instructions(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find the markers of reasoning in the instructions that a thinking switch adds to a prompt.

    A thinking switch is a template variable such as `enable_thinking`. Example: the instruction
    "Write <think></think> and <answer></answer>" shows the markers of reasoning and the markers
    around the content. Return None if no switch adds such instructions.

    The report compares the prompt with the default prompt, with the label R3.
    """
    if not turn.prompts:
        return None
    default, *others = turn.prompts
    for prompt in others:
        if prompt.switches.system:
            continue  # The added text is the system message of the probe, not an instruction.
        added_text = difference(default.text, prompt.text).right
        pairs = empty_pairs(added_text)  # such as `<think></think>` and `<answer></answer>`
        mentions_reasoning = bool(pairs) and is_thinking_marker(pairs[0].opening)
        if not mentions_reasoning:
            continue
        names = ", ".join(pair.opening + pair.closing for pair in pairs)
        turn.prober.record(
            "R3 instructions",
            prompt.switches.describe(),
            left=default.conversation,
            right=prompt.conversation,
            finding=f"The instructions mention the pairs of tags {names}.",
        )
        return markup_of_pairs(pairs[0], pairs[1:])
    return None


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
        if reasoning_pair is None:
            continue
        turn.prober.record_finding(
            "R4 source", f"A string constant of the template contains {reasoning_pair.closing!r}."
        )
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
        return ()
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


def _first_occurring(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first candidate that the template or a generation prompt contains, or "".

    Example: the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only
    "</think>". Then the result is "</think>".
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
