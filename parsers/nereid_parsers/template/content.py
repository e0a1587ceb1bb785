"""Find the markers around the content, and the markers that end a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    ONE_CALL,
    AssistantMessage,
    Conversation,
    conversation_with_calls,
)
from nereid_parsers.template.difference import (
    MARKER,
    closing_spellings,
    compound_closing,
    first_two,
    leading_marker,
    leading_markers,
    markers,
)
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.rendered_reasoning import ReasoningFindings

# Markers with a word between them: `<|out|>turn<|of|>`.
_MARKERS_AND_WORDS = re.compile(rf"(?:{MARKER.pattern})(?:\w+(?:{MARKER.pattern}))+")


@dataclass(frozen=True, slots=True)
class ContentFindings:
    """The result of comparison C1.

    Attributes:
        wrapper: The markers around the content, or None if the content has no markers.
        end_markers: The markers that end the model's turn.
    """

    wrapper: Wrapper | None = None
    end_markers: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the findings as sentences for the report."""
        text = "Content is written without markers."
        if self.wrapper is not None:
            text = f"Content is written between {self.wrapper.open!r} and {self.wrapper.close!r}."
        return f"{text} {self.end_markers[0]!r} ends the turn." if self.end_markers else text


def compare_content(turn: ModelTurn, reasoning: ReasoningFindings) -> ContentFindings:
    """Find the markers around the content of an answer, and the markers that end the turn.

    Example: the rendered answer "<answer>CONTENT</answer><|im_end|>" shows the wrapper `<answer>`,
    `</answer>` and the end marker `<|im_end|>`.

    The report shows a comparison with the label C1: a conversation without an answer, and the same
    conversation with an answer.

    Args:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations, and records the comparison for the report.
        reasoning: The findings about reasoning. If the rendered answer shows no wrapper, the
            wrapper of these findings is used.
    """
    conversation = Conversation(AssistantMessage(CONTENT_TEXT))
    answer = turn.text_after_header(conversation) or ""
    before, content, after = answer.partition(CONTENT_TEXT)
    is_rendered = bool(content)
    if not is_rendered:
        return ContentFindings(reasoning.wrapper)
    markup_before = strip_reasoning_markers(before, reasoning.part).lstrip()
    wrapper = _wrapper_around(markup_before, after, turn)
    after_wrapper = after if wrapper is None else after.removeprefix(wrapper.close)
    end_markers = _end_markers(after_wrapper, turn)
    findings = ContentFindings(wrapper or reasoning.wrapper, tuple(end_markers))
    turn.prober.record(
        "C1 content",
        "The assistant answers.",
        left=Conversation(),
        right=conversation,
        finding=findings.describe(),
    )
    return findings


def _wrapper_around(markup_before: str, after: str, turn: ModelTurn) -> Wrapper | None:
    """Return the markers around the content, or None if no markup precedes the content.

    Example: the text before the content is "<answer>", and the text after the content is
    "</answer><|im_end|>". The markers are `<answer>` and `</answer>`.

    Args:
        markup_before: The text before the content, without the markers of reasoning.
        after: The text after the content.
        turn: The text around the model's answers.
    """
    if not markup_before:
        return None
    closing = _wrapper_close(after, markup_before.strip(), turn)
    return Wrapper(markup_before, closing)


def compare_content_with_call(turn: ModelTurn, reasoning: Reasoning | None) -> Wrapper | None:
    """Find content markers that a template writes only in messages with tool calls.

    Such a template also writes the markers if the content is empty. Example: a message without
    content is rendered as "<say></say><call>..", and a message with content is rendered as
    "<say>CONTENT</say><call>..". So `<say>` and `</say>` are the markers.

    Args:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations, and records the comparison with the label C2 for the report.
        reasoning: The reasoning part of the format. Its markers are not content markers.

    Returns:
        The markers, or None if there are no such markers.
    """
    call_only = conversation_with_calls(*ONE_CALL)
    with_content = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    text_with_content = _text_without_reasoning(turn, with_content, reasoning)
    text_without_content = _text_without_reasoning(turn, call_only, reasoning)
    before, _, after = text_with_content.partition(CONTENT_TEXT)
    opening = before.strip()  # such as `<say>`
    closing = leading_marker(after)  # such as `</say>`
    has_one_opening_marker = MARKER.fullmatch(opening) is not None
    if not has_one_opening_marker or not closing:
        return None
    empty_content = rf"\s*{re.escape(opening)}\s*{re.escape(closing)}"
    starts_with_empty_content = re.match(empty_content, text_without_content) is not None
    if not starts_with_empty_content:
        return None
    finding = f"In messages with calls, content is written between {opening!r} and {closing!r}."
    turn.prober.record(
        "C2 content with a call",
        "The message has content.",
        left=call_only,
        right=with_content,
        finding=finding,
    )
    return Wrapper(opening, closing)


def _text_without_reasoning(
    turn: ModelTurn, conversation: Conversation, reasoning: Reasoning | None
) -> str:
    """Render an answer, and remove the markers of empty reasoning (`<think></think>`).

    Return "" if the template fails to render the conversation. Example: the answer
    "<think></think><call>.." gives "<call>..".
    """
    return strip_reasoning_markers(turn.text_after_header(conversation) or "", reasoning)


def strip_reasoning_markers(text: str, reasoning: Reasoning | None) -> str:
    r"""Remove the markers of reasoning from the start of `text`, a rendered answer.

    Some templates write these markers even if a message has no reasoning. Without them, the text
    starts with the content or with a tool call.

    >>> strip_reasoning_markers("<think></think>\n\nHello", Reasoning("<think>", "</think>\n\n"))
    'Hello'
    """
    if reasoning is None:
        return text
    all_markers = (*reasoning.opens, *reasoning.closes)
    reasoning_markers = [marker.strip() for marker in all_markers]
    space_after_close = reasoning.close.removeprefix(reasoning.close.rstrip())  # such as "\n\n"
    while True:  # Each pass removes one marker.
        stripped = text.lstrip()
        found_markers = [marker for marker in reasoning_markers if stripped.startswith(marker)]
        if not found_markers:
            return text
        text = stripped.removeprefix(found_markers[0]).removeprefix(space_after_close)


def _end_markers(after: str, turn: ModelTurn) -> list[str]:
    """Find the markers that end the model's turn. `after` is the text after the content.

    There are three cases. For each case, the columns show the text after the content, the text
    after a user's message, and the result:

        `<|im_end|>`              `<|im_end|>`              one marker: ["<|im_end|>"]
        `<|eom|><|eot|>`          `<|eot|>`                 two markers: ["<|eom|>", "<|eot|>"]
        `<|out|>turn<|of|>`       `<|out|>turn<|of|>`       markers with a word between them:
                                                            ["<|out|>turn<|of|>"]

    The result is [] if no marker follows the content.
    """
    after_content = after.lstrip()
    after_user_message = turn.trailing_text.lstrip()
    first, second = first_two(leading_markers(after_content))  # A missing marker is "".
    if first in ("", EOS_TOKEN):  # EOS_TOKEN is a placeholder for an unknown token.
        return []
    # The second marker (`<|eot|>`) ends the turn if a user's message ends with the same marker.
    # Otherwise, the second marker may open the next turn.
    is_another_marker = second not in ("", first)
    ends_user_message = second == leading_marker(after_user_message)
    opens_next_turn = second in turn.header
    if is_another_marker and ends_user_message and not opens_next_turn:
        return [first, second]
    with_words = _end_markers_with_words(after_content, after_user_message, turn.header)
    return with_words if with_words else [first]


def _end_markers_with_words(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Find the text that ends a turn, if the text contains words, as in `<|out|>turn<|of|>`.

    The first item of the result is the text at the start of `after_content` that consists of
    markers and words. The result is [] if a user's message does not end with the same text, or if
    the text contains the header of the model's next turn. If one more marker follows the text in
    both messages, this marker is the second item.

    >>> _end_markers_with_words("<|out|>turn<|of|><|over|>", "<|out|>turn<|of|><|over|>", "<|in|>")
    ['<|out|>turn<|of|>', '<|over|>']

    Args:
        after_content: The text after the content of an answer.
        after_user_message: The text after a user's message.
        header: The text that opens the model's turn.
    """
    match = _MARKERS_AND_WORDS.match(after_content)
    if match is None or not after_user_message.startswith(match.group()):
        return []
    turn_end = match.group()  # `<|out|>turn<|of|>`
    after_first_marker = turn_end.removeprefix(leading_marker(turn_end))  # `turn<|of|>`
    contains_next_header = bool(header.strip()) and header.strip() in after_first_marker
    if contains_next_header:
        return []
    next_match = MARKER.match(after_content, match.end())
    next_marker = next_match.group() if next_match is not None else ""  # `<|over|>`
    ends_user_message = after_user_message.startswith(turn_end + next_marker)
    # Three texts do not end a turn: the empty text, the placeholder EOS_TOKEN, and a marker of the
    # header, which opens the next turn.
    can_end_turn = next_marker not in ("", EOS_TOKEN, *markers(header))
    return [turn_end, next_marker] if ends_user_message and can_end_turn else [turn_end]


def _wrapper_close(after: str, opening: str, turn: ModelTurn) -> str:
    r"""Return the marker that closes the content, or "" if there is no such marker.

    The first marker after the content closes the content, unless this marker ends the whole turn.
    The white space before the marker is a part of the result. Examples for the opening marker
    `<answer>`, if every message ends with `<|im_end|>`:

        "\n</answer><|im_end|>"   "\n</answer>"
        "<|im_end|>"              "", because this marker ends the turn

    Args:
        after: The text after the content.
        opening: The marker before the content.
        turn: The text around the model's answers. `turn.trailing_text` is the text after a user's
            message.
    """
    # If several markers open the content, as in `<|open|>answer<|sep|>`, several markers also close
    # the content.
    several_markers = compound_closing(after, opening)
    if several_markers:
        return several_markers
    marker = leading_marker(after)
    if not marker:
        return ""
    # If a marker also follows the user's message, the marker usually ends a turn. Exception: a
    # marker such as `</answer>`, which has the same name as the opening marker `<answer>`, closes
    # the content.
    follows_user_message = marker == EOS_TOKEN or marker in turn.trailing_text
    has_name_of_opening = marker in closing_spellings(opening)
    if follows_user_message and not has_name_of_opening:
        return ""
    before_marker, _, _ = after.partition(marker)
    return before_marker + marker
