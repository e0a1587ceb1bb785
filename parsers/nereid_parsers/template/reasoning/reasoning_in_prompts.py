"""Find the markers of reasoning by comparing prompts with and without thinking.

A generation prompt is the text at the end of a prompt that opens the model's answer. A thinking
switch is a template variable, such as `enable_thinking`, that turns thinking on or off. The value
of a thinking switch may change the generation prompt (comparison R2), or add instructions to the
prompt (comparison R3).
"""

from __future__ import annotations

from nereid_parsers.format import Reasoning
from nereid_parsers.template.markup.difference import difference
from nereid_parsers.template.markup.marker_pairs import closing_spellings
from nereid_parsers.template.markup.markers import first_two, markers
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn
from nereid_parsers.template.probe import UNCHANGED, Prober
from nereid_parsers.template.reasoning.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    empty_pairs,
    first_opening,
    is_thinking_marker,
    markup_of_pairs,
)


def find_markers_in_prompts(turn: ModelTurn) -> ReasoningMarkup | None:
    r"""Find the markers of reasoning, such as `<think>`, at the ends of rendered prompts.

    The generation prompt is the last part of a prompt. It opens the model's answer. `turn` contains
    one generation prompt for each setting of the thinking switches, such as
    `enable_thinking=False`. Example: if the generation prompt ends with "<think>\n\n</think>\n\n",
    the markers are `<think>\n` and `\n</think>\n\n`.

    Mutates: `turn.prober`, which records the comparison "R2" for the report.

    Returns:
        The markers from the first generation prompt that opens reasoning, or None if there is no
        such prompt.
    """
    for prompt in turn.prompts:
        pair = _pair_in_prompt(turn, prompt)
        if pair is not None:
            _record_prompt(turn, prompt, pair)
            # `</think>` becomes "\n</think>\n\n" if the opening marker is "<think>\n".
            closing = _with_probable_line_breaks(pair.closing, pair.opening)
            return ReasoningMarkup(Reasoning(pair.opening, closing))
    return None


def _record_prompt(turn: ModelTurn, prompt: GenerationPrompt, pair: MarkerPair) -> None:
    """Record a comparison of the default prompt with `prompt` for the report.

    In the report, this comparison has the label "R2". `pair` contains the markers of reasoning,
    such as `<think>` and `</think>`, that were found for `prompt`.

    Mutates: `turn.prober.comparisons`.
    """
    default_prompt = turn.prompts[0]
    turn.prober.record(
        "R2 thinking switch",
        # For the default prompt, no switch is set, so `describe` returns "".
        prompt.switches.describe() or UNCHANGED,
        left=default_prompt.conversation,
        right=prompt.conversation,
        finding=f"The prompt opens reasoning with {pair.opening!r}. "
        f"The marker {pair.closing!r} closes reasoning.",
    )


def _pair_in_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> MarkerPair | None:
    r"""If `prompt` opens reasoning, return the opening and the closing marker of reasoning.

    Example: if the prompt ends with "<|assistant|><think>\n", where `<|assistant|>` is the header,
    the result is the pair of "<think>\n" and "</think>". If no closing marker is known, return
    None, because the parser could not find the end of the reasoning.
    """
    closing = _closing_for_prompt(turn, prompt)
    return MarkerPair(first_opening(prompt.after_header), closing) if closing else None


def _closing_for_prompt(turn: ModelTurn, prompt: GenerationPrompt) -> str:
    """If `prompt` opens reasoning, return the marker that closes this reasoning. Otherwise, "".

    The text after the header, such as `<|assistant|>`, opens reasoning in three cases:

    1. The first marker refers to thinking: `<think>`. The second marker closes the reasoning. If
       there is no second marker, the closing marker is derived from the first marker: `</think>`.
    2. The second marker is the closing marker of the first marker: `<notes></notes>`.
    3. A thinking switch, such as enable_thinking=True, has added the first marker, such as
       `<notes>`. The closing marker is derived, and must occur in the template or in a prompt.
    """
    first, second = first_two(markers(prompt.after_header))  # A missing marker is "".
    if not first:
        return ""
    possible_closings = closing_spellings(first)
    if is_thinking_marker(first):  # Case 1
        return second or _most_probable_marker(turn, possible_closings)
    if second in possible_closings:  # Case 2
        return second
    default_prompt = turn.prompts[0]  # No thinking switch is set in this prompt.
    is_changed_by_switch = prompt.after_header != default_prompt.after_header
    if is_changed_by_switch:  # Case 3
        return first_used_marker(turn, possible_closings)
    return ""


def _most_probable_marker(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first candidate that occurs in the template or in a prompt, else the first one.

    Example: for the candidates ["<|/THINK|>", "</|THINK|>"], the result is "</|THINK|>" if the
    template contains only this marker. The result is "<|/THINK|>" if the template contains neither
    marker. Return "" if there are no candidates.
    """
    default = candidates[0] if candidates else ""
    return first_used_marker(turn, candidates) or default


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

    Mutates: `turn.prober`, which records the default prompt and the prompt with the instruction for
        the report.

    Returns:
        The markers, or None if no switch adds an instruction with markers of reasoning.
    """
    if not turn.prompts:
        return None
    default_prompt, *switched_prompts = turn.prompts  # No switch is set in the first prompt.
    for switched_prompt in switched_prompts:
        pairs = _pairs_in_instructions(default_prompt, switched_prompt)
        if pairs:
            _record_instructions(turn.prober, default_prompt, switched_prompt, pairs)
            content_pair = pairs[1] if len(pairs) > 1 else None
            return markup_of_pairs(pairs[0], content_pair)
    return None


def _record_instructions(
    prober: Prober,
    default_prompt: GenerationPrompt,
    switched_prompt: GenerationPrompt,
    pairs: list[MarkerPair],
) -> None:
    """Record the comparison R3 for the report: the prompts without and with instructions.

    `pairs` are the pairs of tags, such as `<think></think>`, that the instructions contain.

    Mutates: `prober.comparisons`.
    """
    names = ", ".join(pair.opening + pair.closing for pair in pairs)
    prober.record(
        "R3 instructions",
        switched_prompt.switches.describe(),
        left=default_prompt.conversation,
        right=switched_prompt.conversation,
        finding=f"The instructions mention the pairs of tags {names}.",
    )


def _pairs_in_instructions(
    default_prompt: GenerationPrompt, switched_prompt: GenerationPrompt
) -> list[MarkerPair]:
    """Return the pairs of tags in the text that a switch like `enable_thinking` adds to a prompt.

    Example: the default prompt is "Hello.", and the prompt with the switch is "Write <think>
    </think> and <answer></answer>. Hello." The result contains the pairs of `<think>` and
    `<answer>`. The first pair encloses the reasoning. If the name of the first pair does not refer
    to thinking, the instructions do not describe reasoning, and the result is [].
    """
    if switched_prompt.switches.system:
        # The analysis has added a system message, such as "/no_think". The added text does not come
        # from the template, so it does not show the markers of the template.
        return []
    added_instructions = difference(default_prompt.text, switched_prompt.text).right
    pairs = empty_pairs(added_instructions)
    if not pairs or not is_thinking_marker(pairs[0].opening):
        return []
    return pairs


def first_used_marker(turn: ModelTurn, candidates: list[str]) -> str:
    """Return the first marker in `candidates` that occurs in the template or in a prompt.

    Example: the candidates are ["<|END_THINKING|>", "</think>"], and the template contains only
    "</think>". The result is "</think>". The result is "" if no candidate occurs.
    """
    texts = [*turn.prober.template.literals, *(prompt.after_header for prompt in turn.prompts)]
    for candidate in candidates:
        if any(candidate in text for text in texts):
            return candidate
    return ""
