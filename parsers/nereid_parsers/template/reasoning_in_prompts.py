"""Find the markers of reasoning in generation prompts (comparisons R2 and R3).

A generation prompt is the text at the end of a prompt that opens the model's answer. Thinking
switches are template variables, such as `enable_thinking`, that may change the generation prompt.
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
        return ReasoningMarkup(Reasoning(opening, _add_line_breaks(closing, opening)))
    return None


def _add_line_breaks(closing: str, opening: str) -> str:
    r"""Return the closing marker with the line breaks that a model probably writes around it.

    If a line break follows the opening marker, each of the two markers is probably on a line of its
    own.

    >>> _add_line_breaks("</think>", "<think>\n"), _add_line_breaks("</think>", "<think>")
    ('\n</think>\n\n', '</think>')
    """
    is_on_own_line = opening.endswith("\n")
    return f"\n{closing}\n\n" if is_on_own_line else closing


def _closing_in_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """Return the closing marker of reasoning if `prompt` opens reasoning, or else "".

    The first marker of the prompt opens reasoning in two cases:

    1. The name of the marker refers to thinking, as in `<think>`. The next marker of the prompt is
       the closing marker. If there is no next marker, the closing marker is derived from the name.
       A spelling that the template contains is preferred.
    2. The marker has another name, such as `<notes>`. The prompt must also contain the closing
       marker `</notes>`. Or a thinking switch must add `<notes>` to the prompt, and the template
       must contain `</notes>`.

    Args:
        turn: The text around the model's answers. `turn.prompts[0]` is the default prompt.
        prompt: A prompt with a setting of the thinking switches, such as enable_thinking=True.
    """
    opening, next_marker = first_two(markers(prompt.after_header))  # A missing marker is "".
    possible_closings = closing_spellings(opening)
    if is_thinking_marker(opening):
        first_spelling = possible_closings[0] if possible_closings else ""
        return next_marker or first_occurring(turn, possible_closings) or first_spelling
    if next_marker in possible_closings:
        return next_marker
    is_added_by_switch = prompt.after_header != turn.prompts[0].after_header
    return first_occurring(turn, possible_closings) if is_added_by_switch else ""


def compare_instructions(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find the markers of reasoning in the instructions that a thinking switch adds to a prompt.

    A thinking switch is a template variable such as `enable_thinking`. Example: the instruction
    "Write <think></think> and <answer></answer>" shows the markers of reasoning and the markers
    around the content. Return None if no switch adds such instructions.

    The report compares the prompt with the default prompt, with the label R3.
    """
    for prompt in turn.prompts[1:]:
        default = turn.prompts[0]
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
        return markup_of_pairs(pairs[0], pairs[1:])
    return None


def _pairs_in_instructions(default: GenerationPrompt, prompt: GenerationPrompt) -> list[MarkerPair]:
    """Return the pairs of tags in the instructions that `prompt` contains and `default` does not.

    The first pair encloses reasoning. Example: the instruction "Write <think></think> and
    <answer></answer>" contains the pairs `<think></think>` and `<answer></answer>`. Return [] if
    there are no pairs, or if the name of the first pair does not refer to thinking.
    """
    if prompt.switches.system:
        return []  # The added text is the system message of the probe, not an instruction.
    instructions = difference(default.text, prompt.text).right
    pairs = empty_pairs(instructions)
    mentions_reasoning = bool(pairs) and is_thinking_marker(pairs[0].opening)
    return pairs if mentions_reasoning else []


def first_occurring(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first candidate that the template or a generation prompt contains, or "".

    Example: the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only
    "</think>". Then the result is "</think>".
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
