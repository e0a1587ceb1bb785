"""Find the markers of reasoning in the source of a template, such as in `split("</think>")`."""

from __future__ import annotations

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    ONE_CALL,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
    conversation_with_calls,
)
from nereid_parsers.template.markup.marker_pairs import closing_spellings
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.reasoning.reasoning_markers import (
    MarkerPair,
    ReasoningMarkup,
    empty_pairs,
    first_marker,
    markup_of_pairs,
    thinking_pair,
)


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
        reasoning_pair = thinking_pair(literal)
        if reasoning_pair is not None:
            turn.prober.record_source_finding(
                "R4 source",
                finding=f"A string constant of the template contains {reasoning_pair.closing!r}.",
            )
            return markup_of_pairs(reasoning_pair, _content_pair(literal, reasoning_pair))
    return None


def _content_pair(literal: str, reasoning_pair: MarkerPair) -> MarkerPair | None:
    """Return the markers around the content, such as `<answer>`, that `literal` contains.

    `literal` is a string constant of a template. Example: "<think></think><answer></answer>"
    contains the markers `<answer>` and `</answer>` beside the pair of reasoning markers. Return
    None if `literal` contains no other pair.
    """
    other_pairs = (pair for pair in empty_pairs(literal) if pair != reasoning_pair)
    return next(other_pairs, None)


def find_markers_of_removed_text(turn: ModelTurn) -> ReasoningMarkup | None:
    """Find two markers such that the template removes the text between them from earlier answers.

    The removed text is reasoning, because templates remove nothing else from the content. Example:
    the template renders the content `<|channel>REASONING<channel|>CONTENT` as `CONTENT`, so
    `<|channel>` and `<channel|>` enclose reasoning. The closing marker must be a string constant of
    the template, because the template must search the content for this marker. The opening marker
    is a string constant, or follows the header in a prompt.

    Mutates: `turn.prober`, which records the finding "R4" for the report.

    Returns:
        The markers, or None if the template removes no text between two markers.
    """
    literals = dict.fromkeys(literal.strip() for literal in turn.prober.template.literals)
    # If the template writes the opening marker into the prompt, the marker may be only a part of a
    # string constant, such as `<|assistant|><ponder>`.
    openings_in_prompts = [first_marker(prompt.after_header) for prompt in turn.prompts]
    for opening in dict.fromkeys([*openings_in_prompts, *literals]):
        for closing in closing_spellings(opening):
            if closing in literals and _is_text_removed(turn, opening, closing):
                turn.prober.record_source_finding(
                    "R4 source",
                    finding="The template removes the text between "
                    f"{opening!r} and {closing!r} from earlier answers.",
                )
                return markup_of_pairs(MarkerPair(opening, closing), None)
    return None


def _is_text_removed(turn: ModelTurn, opening: str, closing: str) -> bool:
    """Return whether the template removes two markers, and the text between them, from the content.

    Example: the template renders `<think>REASONING</think>CONTENT` as `CONTENT`. Return False for
    the markers of tool calls, because these markers do not enclose reasoning.
    """
    content = opening + REASONING_TEXT + closing + CONTENT_TEXT
    answer = turn.text_after_header(Conversation(AssistantMessage(content)))
    if answer is None or CONTENT_TEXT not in answer:
        return False
    if any(text in answer for text in (opening, REASONING_TEXT, closing)):
        return False
    answer_with_call = turn.text_after_header(conversation_with_calls(*ONE_CALL)) or ""
    is_marker_of_calls = opening in answer_with_call
    return not is_marker_of_calls
