"""Find the markers of reasoning by comparing prompts with and without thinking.

A generation prompt is the text at the end of a prompt that opens the model's answer. A thinking
switch is a template variable, such as `enable_thinking`, that turns thinking on or off. The value
of a thinking switch may change the generation prompt (comparison R2), or add instructions to the
prompt (comparison R3).
"""

from __future__ import annotations

from nereid_parsers.format import Reasoning
from nereid_parsers.template.difference import (
    closing_spellings,
    difference,
    first_two,
    markers,
)
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn
from nereid_parsers.template.probe import UNCHANGED
from nereid_parsers.template.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    empty_pairs,
    first_opening,
    is_thinking_marker,
    markup_of_pairs,
)


def find_markers_in_prompts(turn: ModelTurn) -> ReasoningMarkup | None:
    r"""Find the markers of reasoning, such as `<think>`, at the ends of rendered prompts.

    A generation prompt is the text at the end of a prompt that opens the model's answer. `turn`
    contains one generation prompt for each setting of the thinking switches, such as
    `enable_thinking=False`. Example: if the generation prompt ends with "<think>\n\n</think>\n\n",
    the markers are `<think>\n` and `\n</think>\n\n`.

    Mutates: `turn.prober`, which records the comparison R2 for the report.

    Returns:
        The markers in the first prompt that contains markers of reasoning, or None.
    """
    for prompt in turn.prompts:
        closing = _closing_for_prompt(turn, prompt)
        if not closing:
            continue
        opening = first_opening(prompt.after_header)  # `<think>\n` in the example
        turn.prober.record(
            "R2 thinking switch",
            # For the default prompt, no switch is set, so `describe` returns "".
            prompt.switches.describe() or UNCHANGED,
            left=turn.prompts[0].conversation,
            right=prompt.conversation,
            finding=f"The prompt opens reasoning with {opening!r}. "
            f"The marker {closing!r} closes reasoning.",
        )
        return ReasoningMarkup(Reasoning(opening, _with_probable_line_breaks(closing, opening)))
    return None


def _closing_for_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """If `prompt` opens reasoning, return the marker that closes this reasoning. Otherwise, "".

    The text after the header, such as `<|assistant|>`, opens reasoning in three cases:

    1. The first marker refers to thinking: `<think>`. The second marker closes the reasoning. If
       there is no second marker, the closing marker is derived from the first marker: `</think>`.
    2. The second marker is the closing marker of the first marker: `<notes></notes>`.
    3. A thinking switch, such as enable_thinking=True, has added the first marker, and the closing
       marker of the first marker occurs in the template or in a prompt.
    """
    first, second = first_two(markers(prompt.after_header))  # A missing marker is "".
    possible_closings = closing_spellings(first)
    if is_thinking_marker(first):  # Case 1
        most_probable_closing, _ = first_two(possible_closings)
        used_closing = first_in_template_or_prompts(turn, possible_closings)
        return second or used_closing or most_probable_closing
    if second in possible_closings:  # Case 2
        return second
    is_changed_by_switch = prompt.after_header != turn.prompts[0].after_header
    if is_changed_by_switch:  # Case 3
        return first_in_template_or_prompts(turn, possible_closings)
    return ""


def _with_probable_line_breaks(closing: str, opening: str) -> str:
    r"""Return `closing` with the line breaks that a model probably writes around this marker.

    If a line break follows the opening marker, the closing marker is probably on a line of its own,
    before an empty line. Otherwise, the closing marker is returned unchanged.

    >>> _with_probable_line_breaks("</think>", opening="<think>\n")
    '\n</think>\n\n'
    >>> _with_probable_line_breaks("</think>", opening="<think>")
    '</think>'
    """
    is_on_own_line = opening.endswith("\n")
    return f"\n{closing}\n\n" if is_on_own_line else closing


def find_markers_in_instructions(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find markers of reasoning in the text that a switch like `enable_thinking` adds to a prompt.

    Example: a switch adds the instruction "Write <think></think> and <answer></answer>". The
    markers `<think>` and `</think>` enclose the reasoning, and the markers `<answer>` and
    `</answer>` enclose the content.

    Mutates: `turn.prober`, which records the comparison R3 for the report.

    Returns:
        The markers, or None if no switch adds an instruction with markers of reasoning.
    """
    if not turn.prompts:
        return None
    default, *switched_prompts = turn.prompts
    for prompt in switched_prompts:
        pairs = _pairs_in_instructions(default, prompt)
        if not pairs:
            continue
        names = ", ".join(pair.opening + pair.closing for pair in pairs)
        turn.prober.record(
            "R3 instructions",
            prompt.switches.describe(),
            left=default.conversation,
            right=prompt.conversation,
            finding=f"The instructions mention the pairs of tags {names}.",
        )
        reasoning_pair, *other_pairs = pairs
        return markup_of_pairs(reasoning_pair, content_pair=next(iter(other_pairs), None))
    return None


def _pairs_in_instructions(default: GenerationPrompt, prompt: GenerationPrompt) -> list[MarkerPair]:
    """Return the pairs of tags in the text that a switch like `enable_thinking` adds to a prompt.

    Example: the default prompt is "Hello.", and `prompt` is "Write <think></think> and
    <answer></answer>. Hello." The result contains the pairs `<think></think>` and
    `<answer></answer>`. The first pair encloses the reasoning. If the name of the first pair does
    not refer to thinking, the text is about something else, and the result is [].
    """
    if prompt.switches.system:
        # The analysis has added a system message, such as "/no_think". The added text does not come
        # from the template, so it does not show the markers of the template.
        return []
    added_instructions = difference(default.text, prompt.text).right
    pairs = empty_pairs(added_instructions)
    return pairs if pairs and is_thinking_marker(pairs[0].opening) else []


def first_in_template_or_prompts(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first marker in `candidates` that occurs in the template or in a prompt.

    Example: the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only
    "</think>". The result is "</think>". The result is "" if no candidate occurs.

    The most probable marker is first in `candidates`.
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
