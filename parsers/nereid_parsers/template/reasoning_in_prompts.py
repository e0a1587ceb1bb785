"""Find the markers of reasoning by comparing prompts with different thinking switches.

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


def compare_thinking_switch(turn: ModelTurn) -> ReasoningMarkup | None:
    r"""Find the markers of reasoning in the generation prompts.

    A generation prompt is the text at the end of a prompt that opens the model's answer. `turn`
    contains one generation prompt for each setting of the thinking switches, such as
    `enable_thinking=False`. Example: if the generation prompt ends with "<think>\n\n</think>\n\n",
    the markers are `<think>\n` and `\n</think>\n\n`.

    The report shows this prompt next to the default prompt, with the label R2.

    Mutates: `turn.prober`, which records the comparison.

    Returns:
        The markers in the first prompt that contains markers of reasoning, or None.
    """
    for prompt in turn.prompts:
        closing = _closing_for_prompt(turn, prompt)
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


def _closing_for_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """Return the closing marker of the reasoning that `prompt` opens.

    A prompt ends with the header of an assistant message, such as `<|assistant|>`. Only the text
    after the header is searched. The first marker of this text may open reasoning. Example: the
    prompt "..<|assistant|><think>" opens reasoning with `<think>`, and the result is `</think>`.

    Args:
        turn: The text around the model's answers. `turn.prompts[0]` is the default prompt.
        prompt: A prompt for one setting of the thinking switches, such as enable_thinking=True.

    Returns:
        The closing marker, or "" if the prompt does not open reasoning.
    """
    opening, next_marker = first_two(markers(prompt.after_header))  # A missing marker is "".
    if is_thinking_marker(opening):
        return next_marker or _closing_of_name(turn, opening)
    possible_closings = closing_spellings(opening)
    if next_marker in possible_closings:
        return next_marker  # The prompt contains an empty block, such as `<notes></notes>`.
    # The name of the opening marker, such as `<notes>`, does not refer to thinking. The marker is
    # accepted only if a thinking switch has changed the prompt.
    is_added_by_switch = prompt.after_header != turn.prompts[0].after_header
    return first_occurring(turn, possible_closings) if is_added_by_switch else ""


def _closing_of_name(turn: ModelTurn, opening: str) -> str:
    """Derive the closing marker from the name of an opening marker: `</think>` from `<think>`.

    Some opening markers have several possible closing markers: `<|END_THINKING|>` and
    `</|START_THINKING|>` for `<|START_THINKING|>`. The result is the first closing marker that the
    template or a generation prompt contains. If they contain none, the result is the first possible
    closing marker. The result is "" if no closing marker can be derived.
    """
    possible_closings = closing_spellings(opening)
    first_spelling = possible_closings[0] if possible_closings else ""
    return first_occurring(turn, possible_closings) or first_spelling


def compare_instructions(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find the markers of reasoning in the instructions that a thinking switch adds to a prompt.

    A thinking switch is a template variable such as `enable_thinking`. Example: the switch adds the
    instruction "Write <think></think> and <answer></answer>". The markers `<think>` and `</think>`
    enclose the reasoning, and the markers `<answer>` and `</answer>` enclose the content.

    The report shows this prompt next to the default prompt, with the label R3.

    Mutates: `turn.prober`, which records the comparison.

    Returns:
        The markers, or None if no switch adds an instruction with markers of reasoning.
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
    """Return the pairs of tags in the instructions that a thinking switch adds to a prompt.

    Example: the default prompt is "Hello.", and `prompt` is "Write <think></think> and
    <answer></answer>. Hello." The result contains the pairs `<think></think>` and
    `<answer></answer>`. In instructions about thinking, the first pair encloses the reasoning. If
    the name of the first pair does not refer to thinking, the instructions have another purpose,
    and the result is [].

    Args:
        default: The prompt with the default values of the thinking switches.
        prompt: The prompt with another value of a thinking switch.
    """
    if prompt.switches.system:
        return []  # The analysis itself added a system message, so the text is no instruction.
    added_instructions = difference(default.text, prompt.text).right
    pairs = empty_pairs(added_instructions)
    is_about_thinking = bool(pairs) and is_thinking_marker(pairs[0].opening)
    return pairs if is_about_thinking else []


def first_occurring(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first candidate that occurs in the template or in a generation prompt, or "".

    A generation prompt is the text at the end of a prompt that opens the model's answer. Example:
    the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only "</think>".
    The result is "</think>".
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
