"""Determine how a template marks reasoning: comparisons R1 to R6.

R1  a message without and with reasoning    the markers around the reasoning
R2  a thinking switch on and off            the markers that the generation prompt writes
R3  the same                                pairs of tags that the instructions mention
R4  a message without reasoning             an empty pair of tags before the content
R5  no comparison, but the template's text  markers whose names speak of thinking
R6  reasoning directly before a call        markers that end reasoning without a closing marker

R2 to R5 are tried in this order until one of them finds markers, if R1 finds none. The message of
R1 is also used to check the format (`proof.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from nereid_parsers.format import Opener, Reasoning, Wrapper
from nereid_parsers.template.difference import (
    MARKER,
    Comparison,
    closing_spellings,
    markers,
    opening_spellings,
)
from nereid_parsers.template.frame import GenerationPrompt, TurnFrame
from nereid_parsers.template.probe import (
    CONTENT_TEXT,
    FIRST_TOOL,
    NO_SWITCHES,
    ONE_CALL,
    REASONING_FIELDS,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
)

# A message part that was printed as JSON or as a Python dict, rather than rendered.
_PRINTED_PART = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
_THINKING_WORDS = ("think", "thought", "reason", "inner")
_MAX_SWITCHES_TRIED = 6

# The answers with reasoning, in the order in which they are tried. Some templates render reasoning
# only in messages with calls.
_ANSWERS_WITH_REASONING = (
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT),
    AssistantMessage("", REASONING_TEXT, ONE_CALL),
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT, ONE_CALL),
)


@dataclass(slots=True)
class ReasoningFindings:
    """The result of the comparisons that concern reasoning.

    Attributes:
        part: The reasoning part of the format; None if the template renders no reasoning.
        wrapper: The markers around the content, if the message with reasoning shows them.
        conversation: A conversation whose reasoning the template renders; None if there is none.
        fields: The message fields from which reasoning is rendered; or "parts" or "blocks", see
            `Prober.reasoning_form`.
        switches: What each switch makes the generation prompt write after the header, if that
            differs from the default. Example: {"enable_thinking=False": "<think></think>"}.
        comparisons: The comparisons that found something.
        undecided: Sentences that say what could not be decided, and why.
    """

    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    conversation: Conversation | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def find_reasoning(frame: TurnFrame) -> ReasoningFindings:
    """Compare renderings until one comparison finds the markers of reasoning, or none does."""
    found = ReasoningFindings()
    for compare in (
        compare_reasoning_presence,
        compare_thinking_switch,
        compare_instructions,
        compare_empty_block,
        compare_source,
    ):
        if found.part is None:
            compare(frame, found)
    record_switches(frame, found)
    if found.part is not None:
        compare_reasoning_before_call(frame, found)
        found.part = replace(found.part, opener=_infer_opener(frame, found.part))
    return found


def record_reasoning(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Store in `found` which reasoning the template renders, without inferring its markers."""
    found.conversation = _find_conversation(frame)
    if found.conversation is not None:
        found.fields = _rendered_fields(frame, found.conversation)
    record_switches(frame, found)


def is_thinking_marker(marker: str) -> bool:
    """Return whether the name of a marker speaks of thinking.

    >>> is_thinking_marker("<|START_THINKING|>"), is_thinking_marker("<response>")
    (True, False)
    """
    return any(word in marker.lower() for word in _THINKING_WORDS)


# ---- R1: a message without and with reasoning ---------------------------------------------------


def compare_reasoning_presence(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Comparison R1: a message without and with reasoning.

    Sets `found.part`, `found.wrapper`, `found.conversation` and `found.fields`, and
    `frame.inner_headers`. Example: "<think>REASONING</think>CONTENT" shows the markers `<think>`
    and `</think>`.
    """
    conversation = _find_conversation(frame)
    if conversation is None or conversation.answer is None:
        return
    found.conversation = conversation
    found.fields = _rendered_fields(frame, conversation)
    text = frame.text_after_header(conversation) or ""
    before, _, after = text.partition(REASONING_TEXT)
    next_part = CONTENT_TEXT if conversation.answer.content else FIRST_TOOL
    if next_part in after:
        between = after[: after.find(next_part)]
    else:
        between = frame.without_end_markers(after)
    opening = _opening_marker(frame, before)
    closing = _closing_marker(between, opening)
    if not closing.strip():
        found.undecided.append(
            "R1: The end of reasoning cannot be recognised, because no marker follows the "
            f"reasoning, but only {between!r}."
        )
        return
    if not opening:
        candidates = _occurring(frame, opening_spellings(closing.strip()))
        opening = next(iter(candidates), "")
    if not opening:
        found.undecided.append(
            f"R1: The start of reasoning cannot be recognised: {closing!r} closes the reasoning, "
            "but no marker opens it."
        )
        return
    also_open = _last_marker_alone(opening, closing + frame.header)
    found.part = Reasoning(opening, closing, also_open=also_open)
    header = frame.header.strip()
    rest = between[len(closing) :]
    if header:
        rest = rest.replace(header, "")
        if header in between:
            frame.inner_headers = (header,)
    found.wrapper = _content_wrapper(rest, after) if next_part == CONTENT_TEXT else None
    without_reasoning = replace(conversation.answer, reasoning="")
    found.comparisons.append(
        Comparison(
            name="R1 reasoning presence",
            changed="The message has reasoning.",
            left=frame.prober.render(replace(conversation, answer=without_reasoning)) or "",
            right=frame.prober.render(conversation) or "",
            finding=f"Reasoning is written between {opening!r} and {closing!r}.",
        )
    )


def _find_conversation(frame: TurnFrame) -> Conversation | None:
    """Return a conversation whose answer has reasoning that the template renders, or None.

    Tries kinds of answers, settings of the switches and forms of reasoning. Sets
    `prober.reasoning_form` to the form that is rendered.
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
    """Return whether `text` has the answer's reasoning and, after it, its content and calls.

    A text that prints parts of the message as JSON or as a Python dict does not count.
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
    """Return the message fields from which the template renders reasoning, each tried alone."""
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


def _opening_marker(frame: TurnFrame, before: str) -> str:
    """Return the marker that opens reasoning, from the text before the reasoning.

    If that text is blank, the generation prompt contains the marker. "" if nothing opens reasoning.
    """
    if before.strip():
        return _last_opening(before)
    for prompt in frame.prompts:
        opening = _first_opening(prompt.after_header)
        if opening:
            return opening
    return ""


def _last_opening(before: str) -> str:
    r"""Return the marker at the end of the text before reasoning, with the white space around it.

    The marker may consist of several markers and words without white space between them. Words that
    follow a marker after white space open the reasoning themselves.

    >>> _last_opening("Hello.\n<think>\n")
    '\n<think>\n'
    >>> _last_opening("Hello. <|open|>think<|sep|>")
    ' <|open|>think<|sep|>'
    >>> _last_opening("<|start|>\nHere is my reasoning:\n")
    '\nHere is my reasoning:\n'
    """
    found = list(MARKER.finditer(before))
    if not found:
        return before.lstrip("\n")
    last = found[-1]
    after_marker = before[last.end() :]
    if after_marker.strip() and after_marker[0].isspace():
        start = last.end()
    else:
        last_word = before[: last.end()].split()[-1]
        # A marker with a space in it is longer than the last word.
        start = last.end() - max(len(last_word), len(last.group()))
    return before[len(before[:start].rstrip()) :]


def _first_opening(after_header: str) -> str:
    r"""Return the marker with which a prompt opens reasoning, with the white space after it.

    Words before the first marker open the reasoning themselves.

    >>> _first_opening("<think>\n</think>")
    '<think>\n'
    >>> _first_opening("Here is my reasoning:\n<end>")
    'Here is my reasoning:\n'
    """
    first = MARKER.search(after_header)
    if first is None:
        return after_header if after_header.strip() else ""
    words = after_header[: first.start()]
    if words.strip():
        return words
    return _up_to_next_word(after_header, first.end())


def _closing_marker(between: str, opening: str) -> str:
    r"""Return the marker that closes reasoning, with the white space around it.

    Words before the first marker close the reasoning themselves. If the opening consists of several
    markers, the closing ends with the same words and markers.

    >>> _closing_marker("\n</think>\n\n<response>", "<think>\n")
    '\n</think>\n\n'
    >>> _closing_marker("<|close|>think<|sep|><|open|>", "<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    Args:
        between: The text between the reasoning and the next part of the message.
        opening: The marker that opens reasoning.
    """
    opening_markers = markers(opening)
    if len(opening_markers) > 1:
        tail = opening.strip()[len(opening_markers[0]) :]
        tail_at = between.find(tail)
        if 0 <= tail_at <= len(opening):
            return between[: tail_at + len(tail)]
    first = MARKER.search(between)
    if first is None:
        return between
    words = between[: first.start()]
    return words if words.strip() else _up_to_next_word(between, first.end())


def _up_to_next_word(text: str, end: int) -> str:
    r"""Return `text[:end]` and the white space that follows it.

    >>> _up_to_next_word("<a>\n<b>", 3)
    '<a>\n'
    """
    return text[: len(text) - len(text[end:].lstrip())]


def _last_marker_alone(opening: str, other_markup: str) -> tuple[str, ...]:
    """Return the last of several opening markers as another spelling of the opening.

    Models sometimes write only this marker. The result is empty if there is only one marker, or if
    the last marker occurs in other markup, too.

    >>> _last_marker_alone("<|message|><|thinking|>", "<|end|>")
    ('<|thinking|>',)
    >>> _last_marker_alone("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    ()
    """
    found = markers(opening)
    if len(found) < 2 or not opening.rstrip().endswith(found[-1]) or found[-1] in other_markup:
        return ()
    return (found[-1],)


def _content_wrapper(before_content: str, after_reasoning: str) -> Wrapper | None:
    """Return the markers around the content that follows reasoning, or None if it has no marker.

    Example: the text "<answer>" before the content and "</answer>" after it are a wrapper.

    Args:
        before_content: The text between the closing marker of reasoning and the content.
        after_reasoning: All the text after the reasoning.
    """
    if not before_content.strip():
        return None
    content_at = after_reasoning.find(CONTENT_TEXT)
    following = markers(after_reasoning[content_at + len(CONTENT_TEXT) :])
    close = ""
    if following and following[0] in closing_spellings(before_content.strip()):
        close = following[0]
    return Wrapper(before_content.lstrip(), close)


# ---- R2, R3: the thinking switches --------------------------------------------------------------


def compare_thinking_switch(frame: TurnFrame, found: ReasoningFindings) -> None:
    r"""Comparison R2: the generation prompts with a thinking switch on and off. Sets `found.part`.

    Example: the prompt ends with "<think>\n\n</think>\n\n" if the switch is off.
    """
    for prompt in frame.prompts:
        closing = _closing_in_prompt(frame, prompt)
        if not closing:
            continue
        opening = _first_opening(prompt.after_header)
        line_break = "\n" if opening.endswith("\n") else ""
        found.part = Reasoning(opening, f"{line_break}{closing}{line_break}{line_break}")
        found.comparisons.append(
            Comparison(
                name="R2 thinking switch",
                changed=prompt.switches.describe() or "Nothing is changed.",
                left=frame.prompts[0].text,
                right=prompt.text,
                finding=(
                    f"The prompt opens reasoning with {opening!r}. "
                    f"The marker {closing!r} closes reasoning."
                ),
            )
        )
        return


def _closing_in_prompt(frame: TurnFrame, prompt: GenerationPrompt) -> str:
    """Return the marker that closes the reasoning that a prompt opens, or "".

    The result is "" if the prompt opens no reasoning. If the prompt does not contain the closing
    marker, the marker is derived from the opening marker: `</think>` from `<think>`.
    """
    found = markers(prompt.after_header)
    if not found:
        return ""
    candidates = closing_spellings(found[0])
    is_named = is_thinking_marker(found[0])
    if len(found) > 1 and (is_named or found[1] in candidates):
        return found[1]
    if not is_named and prompt.after_header == frame.prompts[0].after_header:
        return ""  # Neither a switch nor the marker's name shows that this is reasoning.
    occurring = _occurring(frame, candidates)
    if occurring:
        return occurring[0]
    return candidates[0] if is_named and candidates else ""


def compare_instructions(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Comparison R3: the prompts with a thinking switch on and off.

    A switch may add instructions that mention pairs of tags, such as `<think></think>`. Sets
    `found.part` from the first pair, and `found.wrapper` from the second.
    """
    default = frame.prompts[0].text if frame.prompts else ""
    for prompt in frame.prompts[1:]:
        if prompt.text == default or prompt.switches.system:
            continue
        changed = prompt.switches.describe()
        comparison = Comparison("R3 instructions", changed, default, prompt.text, "")
        pairs = _empty_pairs(comparison.parts().right)
        if not pairs or not is_thinking_marker(pairs[0][0]):
            continue
        opening, closing = pairs[0]
        found.part = Reasoning(f"{opening}\n", f"\n{closing}\n\n")
        found.wrapper = Wrapper(*pairs[1]) if len(pairs) > 1 else None
        names = ", ".join(opening + closing for opening, closing in pairs)
        finding = f"The instructions mention the pairs of tags {names}."
        found.comparisons.append(replace(comparison, finding=finding))
        return


def _empty_pairs(text: str) -> list[tuple[str, str]]:
    """Return the pairs of an opening marker and its closing marker with nothing between them.

    >>> _empty_pairs("Write <think></think>, then <answer> </answer>.")
    [('<think>', '</think>'), ('<answer>', '</answer>')]
    """
    pairs = []
    for one, other in pairwise(MARKER.finditer(text)):
        is_empty = not text[one.end() : other.start()].strip()
        if is_empty and other.group() in closing_spellings(one.group()):
            pairs.append((one.group(), other.group()))
    return pairs


def record_switches(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Store in `found.switches` what each switch makes the generation prompt write.

    A setting of several switches is left out if some of them alone have the same effect.
    """
    if not frame.prompts:
        return
    default = frame.prompts[0].after_header
    settings_by_effect: dict[str, list[set[object]]] = {}
    for prompt in sorted(frame.prompts[1:], key=_num_variables):
        if prompt.after_header == default:
            continue
        setting: set[object] = {*prompt.switches.variables, prompt.switches.system}
        known = settings_by_effect.setdefault(prompt.after_header, [])
        if not any(smaller <= setting for smaller in known):
            known.append(setting)
            found.switches[prompt.switches.describe()] = prompt.after_header


def _num_variables(prompt: GenerationPrompt) -> int:
    return len(prompt.switches.variables)


# ---- R4, R5: markers without any reasoning ------------------------------------------------------


def compare_empty_block(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Comparison R4: a message without reasoning. Sets `found.part`.

    Some templates render an empty pair of tags for such a message: "<think></think>CONTENT".
    """
    conversation = Conversation(AssistantMessage(CONTENT_TEXT))
    before_content, content, _ = (frame.text_after_header(conversation) or "").partition(
        CONTENT_TEXT
    )
    pairs = _empty_pairs(before_content) if content else []
    if not pairs:
        return
    opening, closing = pairs[0]
    found.part = Reasoning(opening, closing)
    text = frame.prober.render(conversation) or ""
    finding = f"The message starts with the empty pair of tags {opening + closing}."
    found.comparisons.append(
        Comparison("R4 empty block", "Nothing is changed.", text, text, finding)
    )


def compare_source(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Search the string constants of the template for markers of reasoning (step R5).

    Sets `found.part` and `found.wrapper`. Example: the template removes reasoning from earlier
    messages with `content.split('</think>')`.
    """
    for literal in frame.prober.template.literals:
        pair = _named_pair(literal)
        if pair is None:
            continue
        opening, closing = pair
        found.part = Reasoning(f"{opening}\n", f"\n{closing}\n\n")
        other_pairs = [other for other in _empty_pairs(literal) if other != pair]
        found.wrapper = Wrapper(*other_pairs[0]) if other_pairs else None
        finding = f"A string constant of the template contains {closing!r}."
        found.comparisons.append(Comparison("R5 source", "Nothing is changed.", "", "", finding))
        return


def _named_pair(literal: str) -> tuple[str, str] | None:
    """Return the opening and the closing marker of reasoning that a string constant shows.

    The constant contains both markers, or it is the closing marker.

    >>> _named_pair("Write <think>your thoughts</think> first.")
    ('<think>', '</think>')
    >>> _named_pair("</think>")
    ('<think>', '</think>')
    """
    found = markers(literal)
    for closing in dict.fromkeys(marker for marker in found if is_thinking_marker(marker)):
        openings = [marker for marker in opening_spellings(closing) if marker != closing]
        for opening in openings:
            if opening in found:
                return opening, closing
        if openings and literal.strip() == closing:
            return openings[0], closing
    return None


# ---- R6: reasoning before a call ----------------------------------------------------------------


def compare_reasoning_before_call(frame: TurnFrame, found: ReasoningFindings) -> None:
    """Comparison R6: a call without and with reasoning directly before it.

    Some templates then omit the closing marker of reasoning. Example: in
    "<think>REASONING<tool_call>..", the marker `<tool_call>` interrupts the reasoning. Sets
    `found.part.interrupted_by`.
    """
    if found.conversation is None or found.part is None:
        return
    answer = AssistantMessage("", REASONING_TEXT, ONE_CALL)
    conversation = replace(found.conversation, answer=answer, tools=True)
    text = frame.text_after_header(conversation)
    if text is None or REASONING_TEXT not in text or FIRST_TOOL not in text:
        return
    between = text[text.find(REASONING_TEXT) + len(REASONING_TEXT) : text.rfind(FIRST_TOOL)]
    if found.part.close.strip() in between:
        return
    found_markers = markers(between)
    if not found_markers:
        found.undecided.append(
            "R6: The end of reasoning before a call cannot be recognised, because no marker is "
            "written between the reasoning and the call."
        )
        return
    found.part = replace(found.part, interrupted_by=(found_markers[0],))
    call_only = replace(conversation, answer=AssistantMessage("", "", ONE_CALL))
    found.comparisons.append(
        Comparison(
            name="R6 reasoning before a call",
            changed="The message has reasoning.",
            left=frame.prober.render(call_only) or "",
            right=frame.prober.render(conversation) or "",
            finding=f"{found_markers[0]!r} ends reasoning that has no closing marker.",
        )
    )


# ---- helpers ------------------------------------------------------------------------------------


def _infer_opener(frame: TurnFrame, part: Reasoning) -> Opener:
    """Return whether the prompt or the model writes the opening marker of reasoning."""
    default = frame.prompts[0].after_header if frame.prompts else ""
    is_open = part.open.strip() in default and part.close.strip() not in default
    return Opener.PROMPT if is_open else Opener.MODEL


def _occurring(frame: TurnFrame, candidates: list[str]) -> list[str]:
    """Return those candidates that occur in the template's text or in a generation prompt."""
    texts = list(_texts_of_template(frame))
    return [marker for marker in candidates if any(marker in text for text in texts)]


def _texts_of_template(frame: TurnFrame) -> Iterator[str]:
    yield from frame.prober.template.literals
    for prompt in frame.prompts:
        yield prompt.after_header
