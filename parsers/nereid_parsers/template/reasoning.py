"""Determine how a template marks reasoning: comparisons R1 to R6.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt contains
R3  a thinking switch on and off            pairs of tags that the instructions mention
R4  a message without reasoning             an empty pair of tags before the content
R5  the string constants of the template    markers whose names refer to thinking
R6  a call without and with reasoning       markers that end reasoning without a closing marker

The first of R1 to R5 that finds markers is used. R6 then adds to its result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from nereid_parsers.format import Opener, Reasoning, Wrapper
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_TOOL,
    NO_SWITCHES,
    ONE_CALL,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
)
from nereid_parsers.template.difference import (
    Comparison,
    closing_spellings,
    markers,
    opening_spellings,
)
from nereid_parsers.template.frame import GenerationPrompt, TurnFrame
from nereid_parsers.template.probe import REASONING_FIELDS
from nereid_parsers.template.reasoning_markers import (
    closing_marker,
    content_wrapper,
    empty_pairs,
    first_opening,
    is_thinking_marker,
    last_marker_alone,
    last_opening,
    named_pair,
)

# A message part that was printed as JSON or as a Python dict, rather than rendered.
_PRINTED_PART = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
_MAX_SWITCHES_TRIED = 6
_UNCHANGED = "Nothing is changed."

# The answers with reasoning, in the order in which they are tried. Some templates render reasoning
# only in messages with tool calls.
_ANSWERS_WITH_REASONING = (
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT),
    AssistantMessage("", REASONING_TEXT, ONE_CALL),
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT, ONE_CALL),
)


@dataclass(frozen=True, slots=True)
class MarkerFinding:
    """The markers of reasoning that one comparison shows.

    Attributes:
        part: The reasoning part of the format.
        comparison: The comparison.
        wrapper: The markers around the content, if the comparison shows them.
    """

    part: Reasoning
    comparison: Comparison
    wrapper: Wrapper | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFindings:
    """The result of all comparisons that concern reasoning.

    Attributes:
        part: The reasoning part of the format; None if the template renders no reasoning.
        wrapper: The markers around the content, if a comparison shows them.
        conversation: A conversation whose reasoning the template renders; None if there is none.
        fields: The message fields from which reasoning is rendered; or "parts" or "blocks", see
            `Prober.reasoning_form`.
        switches: The text that each switch puts after the header in the generation prompt, if that
            text differs from the default. Example: {"enable_thinking=False": "<think></think>"}.
        comparisons: The comparisons that found something.
        undecided: Sentences that say what could not be decided, and why.
    """

    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    conversation: Conversation | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    undecided: tuple[str, ...] = ()


def find_reasoning(frame: TurnFrame) -> ReasoningFindings:
    """Infer the markers of reasoning from the first comparison that shows them."""
    rendered = find_rendered_reasoning(frame)
    undecided: list[str] = []
    finding = None
    if rendered.conversation is not None:
        finding = compare_reasoning_presence(frame, rendered.conversation, undecided)
    if finding is None:
        finding = (
            compare_thinking_switch(frame)
            or compare_instructions(frame)
            or compare_empty_block(frame)
            or search_source(frame)
        )
    if finding is None:
        return replace(rendered, undecided=tuple(undecided))
    part = finding.part
    comparisons = [finding.comparison]
    if rendered.conversation is not None:
        interruption = compare_reasoning_before_call(frame, part, rendered.conversation, undecided)
        if interruption is not None:
            part = interruption.part
            comparisons.append(interruption.comparison)
    return replace(
        rendered,
        part=replace(part, opener=_infer_opener(frame, part)),
        wrapper=finding.wrapper,
        comparisons=tuple(comparisons),
        undecided=tuple(undecided),
    )


def find_rendered_reasoning(frame: TurnFrame) -> ReasoningFindings:
    """Return the findings about the reasoning that the template renders, without its markers."""
    conversation = _find_conversation(frame)
    fields = () if conversation is None else _rendered_fields(frame, conversation)
    return ReasoningFindings(
        conversation=conversation, fields=fields, switches=_effects_of_switches(frame)
    )


# ---- what is rendered ---------------------------------------------------------------------------


def _find_conversation(frame: TurnFrame) -> Conversation | None:
    """Return a conversation whose answer has reasoning that the template renders, or None.

    Try all kinds of answers, settings of the switches and forms of reasoning. Set
    `prober.reasoning_form` to the form that the template renders.
    """
    prober = frame.prober
    settings = [prompt.switches for prompt in frame.prompts[:_MAX_SWITCHES_TRIED]]
    forms = ["", "parts"]
    if any("blocks" in literal for literal in prober.template.literals):
        forms.append("blocks")
    for answer in _ANSWERS_WITH_REASONING:
        for switches in settings or [NO_SWITCHES]:
            conversation = Conversation(answer, tools=bool(answer.calls), switches=switches)
            for form in forms:
                prober.reasoning_form = form
                text = frame.text_after_header(conversation)
                if text is not None and _is_rendered(answer, text):
                    return conversation
    prober.reasoning_form = ""
    return None


def _is_rendered(answer: AssistantMessage, text: str) -> bool:
    """Return whether `text` contains the reasoning, content and tool calls of `answer`, in order.

    A text that prints parts of the message as JSON or as a Python dict is not accepted.
    """
    if _PRINTED_PART.search(text):
        return False
    _, reasoning, after = text.partition(REASONING_TEXT)
    if not reasoning:
        return False
    if answer.content and CONTENT_TEXT not in after:
        return False
    return not answer.calls or FIRST_TOOL in after


def _rendered_fields(frame: TurnFrame, conversation: Conversation) -> tuple[str, ...]:
    """Return the message fields from which the template renders reasoning.

    Example: ("reasoning_content",) for a template that contains `message.reasoning_content`.
    """
    prober = frame.prober
    form = prober.reasoning_form
    if form:
        return (form,)
    rendered = []
    for name in REASONING_FIELDS:
        prober.reasoning_form = name
        text = prober.render(conversation)
        if text is not None and REASONING_TEXT in text:
            rendered.append(name)
    prober.reasoning_form = form
    return tuple(rendered)


def _effects_of_switches(frame: TurnFrame) -> dict[str, str]:
    """Return the text that each switch adds after the header in the generation prompt.

    Settings without an effect are omitted. A setting of several switches is also omitted if a
    subset of these switches has the same effect.

    Example: {"enable_thinking=False": "<think></think>"}.
    """
    if not frame.prompts:
        return {}
    default = frame.prompts[0].after_header
    effects: dict[str, str] = {}
    settings_by_effect: dict[str, list[set[object]]] = {}
    for prompt in sorted(frame.prompts[1:], key=_num_variables):
        if prompt.after_header == default:
            continue
        setting: set[object] = {*prompt.switches.variables, prompt.switches.system}
        known_settings = settings_by_effect.setdefault(prompt.after_header, [])
        if not any(known <= setting for known in known_settings):
            known_settings.append(setting)
            effects[prompt.switches.describe()] = prompt.after_header
    return effects


def _num_variables(prompt: GenerationPrompt) -> int:
    return len(prompt.switches.variables)


# ---- R1: a message without and with reasoning ---------------------------------------------------


def compare_reasoning_presence(
    frame: TurnFrame, conversation: Conversation, undecided: list[str]
) -> MarkerFinding | None:
    """Compare a message without and with reasoning (R1).

    Example: "<think>REASONING</think>CONTENT" shows the markers `<think>` and `</think>`. Sets
    `frame.inner_headers` if a header is written between reasoning and content.

    Args:
        frame: The frame of the model's turn.
        conversation: A conversation whose reasoning the template renders.
        undecided: The list to which a sentence is added if a marker is missing.
    """
    if conversation.answer is None:
        return None
    text = frame.text_after_header(conversation) or ""
    before, _, after = text.partition(REASONING_TEXT)
    has_content = bool(conversation.answer.content)
    between, next_part, after_next_part = after.partition(
        CONTENT_TEXT if has_content else FIRST_TOOL
    )
    if not next_part:
        between = frame.without_end_markers(after)
    opening = _opening_marker(frame, before)
    closing = closing_marker(between, opening)
    if not closing.strip():
        undecided.append(
            "R1: The end of reasoning cannot be recognised, because no marker follows the "
            f"reasoning, but only {between!r}."
        )
        return None
    if not opening:
        candidates = _occurring(frame, opening_spellings(closing.strip()))
        opening = next(iter(candidates), "")
    if not opening:
        undecided.append(
            f"R1: The start of reasoning cannot be recognised: {closing!r} closes the reasoning, "
            "but no marker opens it."
        )
        return None
    after_closing = between[len(closing) :]
    header = frame.header.strip()
    if header and header in between:
        frame.inner_headers = (header,)
        after_closing = after_closing.replace(header, "")
    without_reasoning = replace(conversation.answer, reasoning="")
    comparison = Comparison(
        name="R1 reasoning presence",
        changed="The message has reasoning.",
        left=frame.prober.render(replace(conversation, answer=without_reasoning)) or "",
        right=frame.prober.render(conversation) or "",
        finding=f"Reasoning is written between {opening!r} and {closing!r}.",
    )
    also_open = last_marker_alone(opening, closing + frame.header)
    return MarkerFinding(
        Reasoning(opening, closing, also_open=also_open),
        comparison,
        content_wrapper(after_closing, after_next_part) if has_content else None,
    )


def _opening_marker(frame: TurnFrame, before: str) -> str:
    """Return the marker that opens the reasoning, from the text before the reasoning.

    If that text is blank, return the marker in the generation prompt. Return "" if no marker opens
    the reasoning.
    """
    if before.strip():
        return last_opening(before)
    openings = (first_opening(prompt.after_header) for prompt in frame.prompts)
    return next((opening for opening in openings if opening), "")


# ---- R2, R3: the thinking switches --------------------------------------------------------------


def compare_thinking_switch(frame: TurnFrame) -> MarkerFinding | None:
    r"""Compare the generation prompts with a thinking switch on and off (R2).

    Example: the prompt ends with "<think>\n\n</think>\n\n" if the switch is off.
    """
    for prompt in frame.prompts:
        closing = _closing_in_prompt(frame, prompt)
        if not closing:
            continue
        opening = first_opening(prompt.after_header)
        line_break = "\n" if opening.endswith("\n") else ""
        comparison = Comparison(
            name="R2 thinking switch",
            changed=prompt.switches.describe() or _UNCHANGED,
            left=frame.prompts[0].text,
            right=prompt.text,
            finding=(
                f"The prompt opens reasoning with {opening!r}. "
                f"The marker {closing!r} closes reasoning."
            ),
        )
        part = Reasoning(opening, f"{line_break}{closing}{line_break}{line_break}")
        return MarkerFinding(part, comparison)
    return None


def _closing_in_prompt(frame: TurnFrame, prompt: GenerationPrompt) -> str:
    """Return the marker that closes the reasoning which a prompt opens.

    Return "" if the prompt opens no reasoning. If the prompt does not contain the closing marker,
    derive it from the opening marker: `</think>` from `<think>`.
    """
    prompt_markers = markers(prompt.after_header)
    if not prompt_markers:
        return ""
    candidates = closing_spellings(prompt_markers[0])
    is_named = is_thinking_marker(prompt_markers[0])
    if len(prompt_markers) > 1 and (is_named or prompt_markers[1] in candidates):
        return prompt_markers[1]
    if not is_named and prompt.after_header == frame.prompts[0].after_header:
        return ""  # Neither a switch nor the marker's name shows that this is reasoning.
    occurring = _occurring(frame, candidates)
    if occurring:
        return occurring[0]
    return candidates[0] if is_named and candidates else ""


def compare_instructions(frame: TurnFrame) -> MarkerFinding | None:
    """Compare the whole prompts with a thinking switch on and off (R3).

    A switch may add instructions that mention pairs of tags. Example: "Write <think></think> and
    <answer></answer>" shows the markers of reasoning and the wrapper of content.
    """
    default = frame.prompts[0].text if frame.prompts else ""
    for prompt in frame.prompts[1:]:
        if prompt.text == default or prompt.switches.system:
            continue
        changed = prompt.switches.describe()
        comparison = Comparison("R3 instructions", changed, default, prompt.text, "")
        pairs = empty_pairs(comparison.parts().right)
        if not pairs or not is_thinking_marker(pairs[0][0]):
            continue
        names = ", ".join(opening + closing for opening, closing in pairs)
        finding = f"The instructions mention the pairs of tags {names}."
        return MarkerFinding(
            _reasoning_on_own_lines(*pairs[0]),
            replace(comparison, finding=finding),
            Wrapper(*pairs[1]) if len(pairs) > 1 else None,
        )
    return None


def _reasoning_on_own_lines(opening: str, closing: str) -> Reasoning:
    r"""Return the usual form of reasoning, for markers whose white space is not known.

    >>> part = _reasoning_on_own_lines("<think>", "</think>")
    >>> part.open, part.close
    ('<think>\n', '\n</think>\n\n')
    """
    return Reasoning(f"{opening}\n", f"\n{closing}\n\n")


# ---- R4, R5: markers without reasoning ----------------------------------------------------------


def compare_empty_block(frame: TurnFrame) -> MarkerFinding | None:
    """Search a message without reasoning for an opening marker and its closing marker (R4).

    Example: "<think></think>CONTENT" shows the markers `<think>` and `</think>`.
    """
    conversation = Conversation(AssistantMessage(CONTENT_TEXT))
    text = frame.text_after_header(conversation) or ""
    before_content, content, _ = text.partition(CONTENT_TEXT)
    pairs = empty_pairs(before_content) if content else []
    if not pairs:
        return None
    opening, closing = pairs[0]
    rendering = frame.prober.render(conversation) or ""
    finding = f"The message starts with the empty pair of tags {opening + closing}."
    comparison = Comparison("R4 empty block", _UNCHANGED, rendering, rendering, finding)
    return MarkerFinding(Reasoning(opening, closing), comparison)


def search_source(frame: TurnFrame) -> MarkerFinding | None:
    """Search the string constants of the template for markers of reasoning (R5).

    Example: a template that removes reasoning from earlier messages with
    `content.split('</think>')` shows the marker `</think>`.
    """
    for literal in frame.prober.template.literals:
        pair = named_pair(literal)
        if pair is None:
            continue
        finding = f"A string constant of the template contains {pair[1]!r}."
        other_pairs = [other for other in empty_pairs(literal) if other != pair]
        return MarkerFinding(
            _reasoning_on_own_lines(*pair),
            Comparison("R5 source", _UNCHANGED, "", "", finding),
            Wrapper(*other_pairs[0]) if other_pairs else None,
        )
    return None


# ---- R6: reasoning before a call ----------------------------------------------------------------


def compare_reasoning_before_call(
    frame: TurnFrame, part: Reasoning, conversation: Conversation, undecided: list[str]
) -> MarkerFinding | None:
    """Compare a tool call without and with reasoning directly before it (R6).

    Some templates omit the closing marker of reasoning there. Example: in
    "<think>REASONING<tool_call>..", the marker `<tool_call>` interrupts the reasoning.

    Args:
        frame: The frame of the model's turn.
        part: The reasoning part of the format.
        conversation: A conversation whose reasoning the template renders.
        undecided: The list to which a sentence is added if no marker separates the reasoning from
            the tool call.

    Returns:
        `part` with the marker that interrupts reasoning, or None if there is no such marker.
    """
    answer = AssistantMessage("", REASONING_TEXT, ONE_CALL)
    conversation = replace(conversation, answer=answer, tools=True)
    text = frame.text_after_header(conversation)
    if text is None or REASONING_TEXT not in text or FIRST_TOOL not in text:
        return None
    between = text[text.find(REASONING_TEXT) + len(REASONING_TEXT) : text.rfind(FIRST_TOOL)]
    if part.close.strip() in between:
        return None
    between_markers = markers(between)
    if not between_markers:
        undecided.append(
            "R6: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return None
    call_only = replace(conversation, answer=AssistantMessage(calls=ONE_CALL))
    comparison = Comparison(
        name="R6 reasoning before a call",
        changed="The message has reasoning.",
        left=frame.prober.render(call_only) or "",
        right=frame.prober.render(conversation) or "",
        finding=f"{between_markers[0]!r} ends reasoning that has no closing marker.",
    )
    return MarkerFinding(replace(part, interrupted_by=(between_markers[0],)), comparison)


# ---- helpers ------------------------------------------------------------------------------------


def _infer_opener(frame: TurnFrame, part: Reasoning) -> Opener:
    """Return PROMPT if the default prompt opens and does not close reasoning, otherwise MODEL."""
    default = frame.prompts[0].after_header if frame.prompts else ""
    is_open = part.open.strip() in default and part.close.strip() not in default
    return Opener.PROMPT if is_open else Opener.MODEL


def _occurring(frame: TurnFrame, candidates: list[str]) -> list[str]:
    """Return the candidates that occur in the template's text or in a generation prompt."""
    texts = [*frame.prober.template.literals, *(prompt.after_header for prompt in frame.prompts)]
    return [marker for marker in candidates if any(marker in text for text in texts)]
