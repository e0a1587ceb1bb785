"""Find the markers around the content, and the markers that end a turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    # Some templates write a wrapper only after reasoning.
    findings = ContentFindings(
        wrapper=wrapper or reasoning.wrapper,
        end_markers=tuple(_end_markers(after_wrapper, turn)),
    )
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
    text_without_content = _text_without_reasoning(turn, call_only, reasoning)
    text_with_content = _text_without_reasoning(turn, with_content, reasoning)
    wrapper = _markers_around_content(text_with_content)
    if wrapper is None or not _starts_with_empty_content(text_without_content, wrapper):
        return None
    turn.prober.record(
        "C2 content with a call",
        "The message has content.",
        left=call_only,
        right=with_content,
        finding="In messages with calls, content is written between "
        f"{wrapper.open!r} and {wrapper.close!r}.",
    )
    return wrapper


def _markers_around_content(text: str) -> Wrapper | None:
    """Return the markers around the content in a rendered answer.

    Return None if other text than one marker precedes the content, or if no marker follows the
    content.

    >>> _markers_around_content(f"<say>{CONTENT_TEXT}</say><call>")
    Wrapper(open='<say>', close='</say>')
    """
    before, _, after = text.partition(CONTENT_TEXT)
    opening = before.strip()
    closing = leading_marker(after)
    is_one_marker = MARKER.fullmatch(opening) is not None
    return Wrapper(opening, closing) if is_one_marker and closing else None


def _starts_with_empty_content(text: str, wrapper: Wrapper) -> bool:
    """Return whether `text` starts with the markers of content, and with nothing between them.

    >>> _starts_with_empty_content("<say> </say><call>", Wrapper("<say>", "</say>"))
    True
    """
    empty_content = rf"\s*{re.escape(wrapper.open)}\s*{re.escape(wrapper.close)}"
    return re.match(empty_content, text) is not None


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
    reasoning_markers = [marker.strip() for marker in (*reasoning.opens, *reasoning.closes)]
    space_after_close = reasoning.close.removeprefix(reasoning.close.rstrip())  # such as "\n\n"
    rest = text
    after_marker = _text_after_marker(rest, reasoning_markers)
    while after_marker is not None:
        rest = after_marker.removeprefix(space_after_close)
        after_marker = _text_after_marker(rest, reasoning_markers)
    return rest


def _text_after_marker(text: str, possible_markers: Sequence[str]) -> str | None:
    """Return the text after one of the markers at the start of `text`. Ignore leading white space.

    Return None if `text` does not start with one of the markers.

    >>> _text_after_marker(" <think>Hello", ["<think>", "</think>"])
    'Hello'
    """
    stripped = text.lstrip()
    for marker in possible_markers:
        if stripped.startswith(marker):
            return stripped.removeprefix(marker)
    return None


def _end_markers(after: str, turn: ModelTurn) -> list[str]:
    """Find the markers that end the model's turn. `after` is the text after the content.

    There are three cases. For each case, the columns show the text after the content, the text
    after a user's message, and the result:

        `<|eom|><|eot|>`          `<|eot|>`                 two markers: ["<|eom|>", "<|eot|>"]
        `<|out|>turn<|of|>`       `<|out|>turn<|of|>`       markers with a word between them:
                                                            ["<|out|>turn<|of|>"]
        `<|im_end|>`              any text                  one marker: ["<|im_end|>"]

    The result is [] if no marker follows the content.
    """
    after_content = after.lstrip()
    after_user_message = turn.trailing_text.lstrip()
    first, second = first_two(leading_markers(after_content))  # A missing marker is "".
    if first in ("", EOS_TOKEN):  # EOS_TOKEN is a placeholder for an unknown token.
        return []
    if second != first and _ends_turn(second, after_user_message, turn.header):
        return [first, second]
    with_words = _end_markers_with_words(after_content, after_user_message, turn.header)
    return with_words if with_words else [first]


def _ends_turn(marker: str, after_user_message: str, header: str) -> bool:
    """Return whether a marker ends a turn, because a user's message ends with the same marker.

    A marker of the header opens the next turn, so it does not end a turn.

    >>> _ends_turn("<|eot|>", after_user_message="<|eot|>", header="<|start|>")
    True
    """
    return bool(marker) and marker == leading_marker(after_user_message) and marker not in header


def _end_markers_with_words(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Find the text that ends a turn, if the text contains words, as in `<|out|>turn<|of|>`.

    One more marker may follow the text. The result is [] if no such text ends a turn.

    >>> _end_markers_with_words("<|out|>turn<|of|><|over|>", "<|out|>turn<|of|><|over|>", "<|in|>")
    ['<|out|>turn<|of|>', '<|over|>']

    Args:
        after_content: The text after the content of an answer.
        after_user_message: The text after a user's message.
        header: The text that opens the model's turn.
    """
    turn_end = _turn_end_with_words(after_content, after_user_message, header)
    if not turn_end:
        return []
    rest_of_answer = after_content.removeprefix(turn_end)
    rest_of_user_message = after_user_message.removeprefix(turn_end)
    next_marker = _shared_first_marker(rest_of_answer, rest_of_user_message)
    # EOS_TOKEN is a placeholder. A marker of the header opens the next turn.
    is_end_marker = next_marker not in ("", EOS_TOKEN, *markers(header))
    return [turn_end, next_marker] if is_end_marker else [turn_end]


def _turn_end_with_words(after_content: str, after_user_message: str, header: str) -> str:
    """Return the markers and words with which both texts start, or "" if there are none.

    The result is also "" if the markers and words contain the header of the model's next turn.

    >>> _turn_end_with_words("<|out|>turn<|of|> Hi", "<|out|>turn<|of|>", "<|in|>")
    '<|out|>turn<|of|>'

    Args:
        after_content: The text after the content of an answer.
        after_user_message: The text after a user's message.
        header: The text that opens the model's turn.
    """
    match = _MARKERS_AND_WORDS.match(after_content)
    if match is None or not after_user_message.startswith(match.group()):
        return ""
    turn_end = match.group()
    after_first_marker = turn_end.removeprefix(leading_marker(turn_end))  # `turn<|of|>`
    contains_next_header = bool(header.strip()) and header.strip() in after_first_marker
    return "" if contains_next_header else turn_end


def _shared_first_marker(text: str, other: str) -> str:
    """Return the marker with which both texts start, or "" if there is no such marker.

    >>> _shared_first_marker("<|over|>Hello", "<|over|>")
    '<|over|>'
    """
    match = MARKER.match(text)
    marker = match.group() if match is not None else ""
    return marker if other.startswith(marker) else ""


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
    if not marker or _ends_whole_turn(marker, opening, turn.trailing_text):
        return ""
    before_marker, _, _ = after.partition(marker)
    return before_marker + marker


def _ends_whole_turn(marker: str, opening: str, after_user_message: str) -> bool:
    """Return whether a marker after the content ends the turn, and not only the content.

    A marker that also follows a user's message usually ends a turn. Exception: a marker such as
    `</answer>`, which has the same name as the opening marker `<answer>`, closes the content.

    >>> _ends_whole_turn("<|im_end|>", "<answer>", after_user_message="<|im_end|>")
    True
    >>> _ends_whole_turn("</answer>", "<answer>", after_user_message="</answer>")
    False
    """
    follows_user_message = marker == EOS_TOKEN or marker in after_user_message
    has_name_of_opening = marker in closing_spellings(opening)
    return follows_user_message and not has_name_of_opening
