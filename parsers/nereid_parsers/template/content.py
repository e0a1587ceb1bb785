"""Find the markers around the content of a message, and the markers that end the message."""

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

# Matches markers that alternate with words, such as `<|out|>turn<|of|>`.
_MARKERS_AND_WORDS = re.compile(rf"(?:{MARKER.pattern})(?:\w+(?:{MARKER.pattern}))+")
# Matches a text that may end a turn although MARKER does not match it, such as `{end}` or
# `=== end ===`. The text must contain both a word and punctuation. The parser removes the text from
# all content, and a single word or single punctuation marks often occur in ordinary content.
_WORD_IN_PUNCTUATION = re.compile(r"[^\w\s][^\w\n]*\w[^\n]*[^\w\s]")


@dataclass(frozen=True, slots=True)
class ContentFindings:
    """The markers around the content of an assistant message, and the markers that end the message.

    Attributes:
        wrapper: The markers around the content of the answer, or None if there are no markers.
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


def find_content_markers(turn: ModelTurn, reasoning: ReasoningFindings) -> ContentFindings:
    """Find the markers around the content of an answer, and the markers that end the answer.

    The two markers around the content are called the wrapper. Example: the rendered answer
    "<answer>CONTENT</answer><|im_end|>" has the wrapper `<answer>`, `</answer>` and the end marker
    `<|im_end|>`.

    Mutates: `turn.prober`. If the template renders the content, the comparison C1 is recorded for
    the report.

    Some templates write a wrapper only after reasoning, so the wrapper of the findings about
    reasoning is used if the answer has no wrapper.
    """
    conversation = Conversation(AssistantMessage(CONTENT_TEXT))
    answer = turn.text_after_header(conversation) or ""
    if CONTENT_TEXT not in answer:
        return ContentFindings(reasoning.wrapper)
    findings = _markers_in_answer(answer, turn, reasoning)
    turn.prober.record(
        "C1 content",
        "The assistant answers.",
        left=Conversation(),
        right=conversation,
        finding=findings.describe(),
    )
    return findings


def _markers_in_answer(
    answer: str, turn: ModelTurn, reasoning: ReasoningFindings
) -> ContentFindings:
    """Find the markers around CONTENT_TEXT in a rendered answer, and the markers at its end.

    The two markers around the content are called the wrapper. Example: in the rendered answer
    "<think></think><answer>CONTENT</answer><|im_end|>", the wrapper is `<answer>`, `</answer>`, and
    `<|im_end|>` ends the answer. If no marker precedes the content, the result contains the wrapper
    that was found after reasoning (`reasoning.wrapper`).
    """
    before_content, _, after_content = answer.partition(CONTENT_TEXT)
    # An empty block of reasoning, such as `<think></think>`, does not open the content.
    opening = strip_reasoning_markers(before_content, reasoning.part).lstrip()
    if not opening:
        return ContentFindings(reasoning.wrapper, tuple(_end_markers(after_content, turn)))
    closing = _wrapper_close(after_content, opening.strip(), turn.after_user_message)
    after_wrapper = after_content.removeprefix(closing)
    return ContentFindings(Wrapper(opening, closing), tuple(_end_markers(after_wrapper, turn)))


def find_content_markers_beside_calls(
    turn: ModelTurn, reasoning: Reasoning | None
) -> Wrapper | None:
    """Find markers that surround content in messages with tool calls, but not in other messages.

    Example: a message with content is rendered as "<say>CONTENT</say><call>..", and a message
    without content as "<say></say><call>..". The result is `Wrapper("<say>", "</say>")`. The second
    message proves that the markers do not belong to the tool call.

    Mutates: `turn.prober`. If there are markers, the comparison C2 is recorded for the report.

    Returns:
        The markers, or None if there are no such markers.
    """
    call_only = conversation_with_calls(*ONE_CALL)
    with_content = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    rendered_call = turn.text_after_header(call_only) or ""
    rendered_content = turn.text_after_header(with_content) or ""
    wrapper = _markers_around_content(strip_reasoning_markers(rendered_content, reasoning))
    if wrapper is None:
        return None
    empty_content = rf"\s*{re.escape(wrapper.open)}\s*{re.escape(wrapper.close)}"
    if re.match(empty_content, strip_reasoning_markers(rendered_call, reasoning)) is None:
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
    """Return the markers before and after CONTENT_TEXT in `text`, a rendered answer.

    Return None unless exactly one marker precedes the content, and a marker follows the content.

    >>> _markers_around_content(f"<say>{CONTENT_TEXT}</say><call>")
    Wrapper(open='<say>', close='</say>')
    >>> _markers_around_content(f"Answer: {CONTENT_TEXT}</say>") is None
    True
    """
    before, _, after = text.partition(CONTENT_TEXT)
    opening = before.strip()
    closing = leading_marker(after)
    if MARKER.fullmatch(opening) is None or not closing:
        return None
    return Wrapper(opening, closing)


def strip_reasoning_markers(text: str, reasoning: Reasoning | None) -> str:
    r"""Remove markers of reasoning, such as `<think></think>`, from the start of a rendered answer.

    Some templates write the markers of reasoning even if a message has no reasoning. Without these
    markers, the answer starts with its content or with a tool call. If the model writes no
    reasoning (`reasoning` is None), `text` is returned unchanged.

    >>> strip_reasoning_markers("<think></think>\n\nHello", Reasoning("<think>", "</think>\n\n"))
    'Hello'
    """
    if reasoning is None:
        return text
    reasoning_markers = stripped_markers(reasoning)
    # The white space at the end of the closing marker belongs to the marker. Any further white
    # space belongs to the content.
    space_after_close = reasoning.close[len(reasoning.close.rstrip()) :]
    rest = text
    while True:  # Each pass removes one marker, and the white space around it.
        stripped = rest.lstrip()
        found_markers = [marker for marker in reasoning_markers if stripped.startswith(marker)]
        if not found_markers:
            return rest
        rest = stripped.removeprefix(found_markers[0]).removeprefix(space_after_close)


def stripped_markers(reasoning: Reasoning | None) -> list[str]:
    r"""Return the markers of reasoning, such as `<think>`, without the white space around them.

    >>> stripped_markers(Reasoning("<think>", "</think>\n")), stripped_markers(None)
    (['<think>', '</think>'], [])
    """
    if reasoning is None:
        return []
    return [marker.strip() for marker in (*reasoning.opens, *reasoning.closes)]


def _end_markers(after: str, turn: ModelTurn) -> list[str]:
    """Return the markers that follow the content and end the message. Return [] if there are none.

    The first marker ends the message. The text after this marker may end the message, too, or may
    open the next message. It ends the message if it also follows a user's message, and is not in
    the header of the model's turn. There are four cases:

        after an answer           after a user's message   result
    (1) `<|eom|><|eot|>`          `<|eot|>`                ["<|eom|>", "<|eot|>"]
    (2) `<|out|>turn<|of|>`       `<|out|>turn<|of|>`      ["<|out|>turn<|of|>"]
    (3) `<|im_end|><|x|>`         `<|im_end|>`             ["<|im_end|>"]
    (4) `{end}`                   `{end}`                  ["{end}"]

    `after` is the text after the content of an answer.
    """
    after_content = after.lstrip()
    after_user_message = turn.after_user_message.lstrip()
    first, second = first_two(leading_markers(after_content))  # A missing marker is "".
    if first == EOS_TOKEN:
        return []
    if not first:
        word = _end_word(after_content, after_user_message, turn.header)
        return [] if word is None else [word]  # Case 4
    is_new = second != first  # For `<|eot|><|eot|>`, the result contains the marker only once.
    ends_user_turn = bool(second) and second == leading_marker(after_user_message)
    if is_new and ends_user_turn and second not in turn.header:
        return [first, second]  # Case 1
    with_words = _end_markers_with_words(after_content, after_user_message, turn.header)
    return with_words or [first]  # Case 2 or case 3


def _end_word(after_content: str, after_user_message: str, header: str) -> str | None:
    """Return the text that ends every message, if the text is a word between punctuation marks.

    Return None if no such text ends every message.

    >>> _end_word("{end}", after_user_message="{end}{bot}", header="{bot}")
    '{end}'
    """
    turn_end = after_content.partition(EOS_TOKEN)[0].strip()
    is_in_punctuation = _WORD_IN_PUNCTUATION.fullmatch(turn_end) is not None
    ends_every_message = after_user_message.startswith(turn_end) and turn_end not in header
    return turn_end if is_in_punctuation and ends_every_message else None


def _end_markers_with_words(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Return the markers and words that end a message, such as `<|out|>turn<|of|>`, as a list.

    If another end marker follows this text, such as `<|over|>`, the result contains that marker,
    too. Return [] if the message does not end with markers and words.

    >>> _end_markers_with_words("<|out|>turn<|of|><|over|>", "<|out|>turn<|of|><|over|>", "<|in|>")
    ['<|out|>turn<|of|>', '<|over|>']
    >>> _end_markers_with_words("<|out|>turn<|of|><|in|>", "<|out|>turn<|of|><|in|>", "<|in|>")
    ['<|out|>turn<|of|>']
    """
    turn_end = _turn_end_with_words(after_content, after_user_message, header)
    if not turn_end:
        return []
    next_match = MARKER.match(after_content.removeprefix(turn_end))
    next_marker = next_match.group() if next_match is not None else ""
    ends_user_turn = after_user_message.removeprefix(turn_end).startswith(next_marker)
    is_end_marker = ends_user_turn and next_marker not in ("", EOS_TOKEN, *markers(header))
    return [turn_end, next_marker] if is_end_marker else [turn_end]


def _turn_end_with_words(after_content: str, after_user_message: str, header: str) -> str:
    """Return the text, such as `<|out|>turn<|of|>`, that ends every message and contains words.

    The text consists of markers, with a single word between two markers. Return "" if no such text
    ends every message, or if a part of the text opens the model's turn.

    >>> _turn_end_with_words("<|out|>turn<|of|> Hi", "<|out|>turn<|of|>", header="<|in|>")
    '<|out|>turn<|of|>'
    """
    match = _MARKERS_AND_WORDS.match(after_content)
    if match is None or not after_user_message.startswith(match.group()):
        return ""
    turn_end = match.group()
    # If the header is `bot<|sep|>`, only the first marker of `<|out|>bot<|sep|>` ends a message.
    after_first_marker = turn_end.removeprefix(leading_marker(turn_end))
    next_header = header.strip()
    if next_header and next_header in after_first_marker:
        return ""
    return turn_end


def _wrapper_close(after: str, opening: str, after_user_message: str) -> str:
    r"""Return the markup that closes the content, or "" if no markup closes the content.

    If several markers open the content, the closing text has several markers, too. Otherwise, the
    first marker after the content closes the content or ends the message. These are examples of the
    three cases, in which every message ends with `<|im_end|>`:

        case   before the content    after the content                result
        1      <|in|>answer<|sep|>   <|out|>answer<|sep|><|im_end|>   "<|out|>answer<|sep|>"
        2      <answer>              <|im_end|>                       ""
        3      <answer>              \n</answer><|im_end|>            "\n</answer>"
    """
    closing_with_several_markers = compound_closing(after, opening)
    if closing_with_several_markers:  # Case 1
        return closing_with_several_markers
    marker = leading_marker(after)
    # A marker that also follows a user's message ends the turn. Exception: if `<answer>` opens the
    # content, `</answer>` always closes the content.
    is_turn_end = marker == EOS_TOKEN or marker in after_user_message
    if not marker or (is_turn_end and marker not in closing_spellings(opening)):  # Case 2
        return ""
    space_before_marker, _, _ = after.partition(marker)
    return space_before_marker + marker  # Case 3
