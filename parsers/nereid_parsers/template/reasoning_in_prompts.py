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

    Mutates: `turn.prober`, which records the prompt with the markers and the default prompt for the
        report, with the label R2.

    Returns:
        The markers in the first prompt that contains markers of reasoning, or None.
    """
    for prompt in turn.prompts:
        closing = _closing_for_prompt(turn, prompt)
        if not closing:
            continue
        # The first marker after the header, and the white space after this marker. In the
        # docstring's example, these are `<think>\n`.
        opening = first_opening(prompt.after_header)
        reasoning = Reasoning(opening, _with_probable_line_breaks(closing, opening))
        # For the default prompt, no switch is set, so `describe` returns "".
        turn.prober.record(
            "R2 thinking switch",
            prompt.switches.describe() or UNCHANGED,
            left=turn.prompts[0].conversation,
            right=prompt.conversation,
            finding=f"The prompt opens reasoning with {opening!r}. "
            f"The marker {closing!r} closes reasoning.",
        )
        return ReasoningMarkup(reasoning)
    return None


def _closing_for_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """If `prompt` opens reasoning, return the marker that closes this reasoning.

    Examples of the text after the header, such as `<|assistant|>`, and of the result:

    (1) `<think><|end|>`     `<|end|>`, because only the end of thinking can follow `<think>`
    (2) `<think>`            `</think>`, because the name of the marker refers to thinking
    (3) `<notes></notes>`    `</notes>`, because the second marker closes the first marker
    (4) `<notes>`            `</notes>`, if a thinking switch such as enable_thinking=True has added
                             `<notes>`, and `</notes>` occurs in the template or in a prompt
    (5) `<|channel|>`        "", because this marker does not open reasoning

    Args:
        turn: The text around the model's answers. `turn.prompts[0]` is the default prompt.
        prompt: A prompt for one setting of the thinking switches, such as enable_thinking=True.

    Returns:
        The closing marker, or "" if the prompt does not open reasoning.
    """
    first, second = first_two(markers(prompt.after_header))  # A missing marker is "".
    possible_closings = closing_spellings(first)  # Such as ["</think>"] for `<think>`.
    used_closing = first_in_template_or_prompts(turn, possible_closings)
    if is_thinking_marker(first):
        if second:  # Case 1
            return second
        # Case 2. If the template and the prompts contain no spelling of the closing marker, the
        # first spelling is used, because it is the most probable.
        first_spelling, _ = first_two(possible_closings)
        return used_closing or first_spelling
    if second in possible_closings:  # Case 3
        return second
    is_changed_by_switch = prompt.after_header != turn.prompts[0].after_header
    return used_closing if is_changed_by_switch else ""  # Case 4 or case 5


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

    A thinking switch is a template variable such as `enable_thinking`. Example: the switch adds the
    instruction "Write <think></think> and <answer></answer>". The markers `<think>` and `</think>`
    enclose the reasoning, and the markers `<answer>` and `</answer>` enclose the content.

    Mutates: `turn.prober`, which records the prompt with the instruction and the default prompt for
        the report, with the label R3.

    Returns:
        The markers, or None if no switch adds an instruction with markers of reasoning.
    """
    for prompt in turn.prompts[1:]:
        default = turn.prompts[0]  # the prompt with the default values of all switches
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
        reasoning_pair, *other_pairs = pairs  # The first pair encloses the reasoning.
        return markup_of_pairs(reasoning_pair, other_pairs)
    return None


def _pairs_in_instructions(default: GenerationPrompt, prompt: GenerationPrompt) -> list[MarkerPair]:
    """Return the pairs of tags in the text that a switch like `enable_thinking` adds to a prompt.

    Example: the default prompt is "Hello.", and `prompt` is "Write <think></think> and
    <answer></answer>. Hello." The result contains the pairs `<think></think>` and
    `<answer></answer>`. The first pair encloses the reasoning.

    Args:
        default: The prompt with the default values of the thinking switches.
        prompt: The prompt with another value of a thinking switch.
    """
    # If `switches.system` is set, the analysis has added a system message, such as "/no_think", to
    # the prompt. This text does not come from the template, so it shows nothing about the markers
    # that the template uses.
    is_text_from_analysis = bool(prompt.switches.system)
    if is_text_from_analysis:
        return []
    added_instructions = difference(default.text, prompt.text).right
    pairs = empty_pairs(added_instructions)
    # The added text describes reasoning only if the name of the first pair of tags refers to
    # thinking, as in `<think></think>`.
    is_about_thinking = bool(pairs) and is_thinking_marker(pairs[0].opening)
    return pairs if is_about_thinking else []


def first_in_template_or_prompts(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first marker in `candidates` that occurs in the template or in a prompt.

    Example: the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only
    "</think>". The result is "</think>". The result is "" if no candidate occurs.

    Args:
        turn: The compiled template, and the generation prompts. A generation prompt is the text at
            the end of a prompt that opens the model's answer.
        candidates: The markers, the most probable marker first.
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
