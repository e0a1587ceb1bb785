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
from nereid_parsers.template.markup.marker_pairs import closing_spellings
from nereid_parsers.template.markup.markers import (
    MARKER,
    compound_closing,
    first_two,
    leading_marker,
    leading_markers,
    markers,
)
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.reasoning.rendered_reasoning import ReasoningFindings

# Matches markers that alternate with words, such as `<|end|>message<|sep|>`.
_MARKERS_AND_WORDS = re.compile(rf"(?:{MARKER.pattern})(?:\w+(?:{MARKER.pattern}))+")
# Matches a text that may end a turn although MARKER does not match it, such as `{end}` or
# `=== end ===`. The parser removes the text from all content. Therefore, the text must contain both
# a word and punctuation: a word alone, or punctuation alone, often occurs in ordinary content.
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
    `<|im_end|>`. Some templates write a wrapper only after reasoning. If the answer has no wrapper,
    the result therefore contains the wrapper that was found after reasoning (`reasoning.wrapper`).

    Mutates: `turn.prober`. If the template renders the content, the comparison C1 is recorded for
    the report.
    """
    conversation = Conversation(AssistantMessage(CONTENT_TEXT))
    answer = turn.text_after_header(conversation)
    if answer is None or CONTENT_TEXT not in answer:
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
    "<answer>CONTENT</answer><|im_end|>", the wrapper is `<answer>`, `</answer>`, and `<|im_end|>`
    ends the answer. If this answer has no wrapper, the result contains the wrapper that the
    template writes only after reasoning (`reasoning.wrapper`).
    """
    _, _, after_content = answer.partition(CONTENT_TEXT)
    wrapper = _wrapper_in_answer(answer, reasoning.part, turn.after_user_message)
    closing = "" if wrapper is None else wrapper.close
    end_markers = _end_markers(after_content.removeprefix(closing), turn)
    return ContentFindings(wrapper or reasoning.wrapper, tuple(end_markers))


def _wrapper_in_answer(
    answer: str, reasoning: Reasoning | None, after_user_message: str
) -> Wrapper | None:
    """Return the markers around CONTENT_TEXT in a rendered answer. Return None if there are none.

    Markers of reasoning, such as `<think></think>`, may precede the content, but do not open the
    content. `after_user_message` is the text after a user's message, such as "<|im_end|>".

    >>> answer = f"<think></think><answer>{CONTENT_TEXT}</answer><|im_end|>"
    >>> _wrapper_in_answer(answer, Reasoning("<think>", "</think>"), "<|im_end|>")
    Wrapper(open='<answer>', close='</answer>')
    """
    before_content, _, after_content = answer.partition(CONTENT_TEXT)
    opening = strip_reasoning_markers(before_content, reasoning).lstrip()
    if not opening:
        return None
    return Wrapper(opening, _wrapper_close(after_content, opening.strip(), after_user_message))


def find_content_markers_beside_calls(
    turn: ModelTurn, reasoning: Reasoning | None
) -> Wrapper | None:
    """Find markers that surround content in messages with tool calls, but not in other messages.

    Example: a message with content and a tool call is rendered as "<say>CONTENT</say><call>..". The
    result is `Wrapper("<say>", "</say>")`. It is None if there are no such markers.

    Mutates: `turn.prober`. If there are markers, the comparison C2 is recorded for the report.
    """
    call_only = conversation_with_calls(*ONE_CALL)
    content_and_call = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    wrapper = _wrapper_beside_calls(
        text_of_call=_text_after_reasoning(turn, call_only, reasoning),
        text_of_both=_text_after_reasoning(turn, content_and_call, reasoning),
    )
    if wrapper is not None:
        turn.prober.record(
            "C2 content with a call",
            "The message has content.",
            left=call_only,
            right=content_and_call,
            finding="In messages with calls, content is written between "
            f"{wrapper.open!r} and {wrapper.close!r}.",
        )
    return wrapper


def _text_after_reasoning(
    turn: ModelTurn, conversation: Conversation, reasoning: Reasoning | None
) -> str:
    """Render a conversation. Return its answer without the markers of reasoning at the start.

    Return "" if the template fails to render the conversation.
    """
    answer = turn.text_after_header(conversation) or ""
    return strip_reasoning_markers(answer, reasoning)


def _wrapper_beside_calls(text_of_call: str, text_of_both: str) -> Wrapper | None:
    """Return the markers that enclose the content in messages with a tool call, or None.

    The markers are those around CONTENT_TEXT in `text_of_both`, a rendered answer with content and
    a tool call. They belong to the content only if `text_of_call`, a rendered answer without
    content, starts with these two markers. Otherwise, the result is None.

    >>> _wrapper_beside_calls("<say></say><call>", f"<say>{CONTENT_TEXT}</say><call>")
    Wrapper(open='<say>', close='</say>')
    """
    wrapper = _markers_around_content(text_of_both)
    if wrapper is None:
        return None
    empty_content = rf"\s*{re.escape(wrapper.open)}\s*{re.escape(wrapper.close)}"
    has_empty_content = re.match(empty_content, text_of_call) is not None
    return wrapper if has_empty_content else None


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

    White space after the markers belongs to the content, except for the white space at the end of
    `reasoning.close`. In this example, the third line break remains:

    >>> strip_reasoning_markers("</think>\n\n\nHello", Reasoning("<think>", "</think>\n\n"))
    '\nHello'
    """
    if reasoning is None:
        return text
    any_marker = "|".join(re.escape(marker) for marker in stripped_markers(reasoning))
    space_after_close = reasoning.close.removeprefix(reasoning.close.rstrip())  # "\n\n"
    marker_with_space = rf"\s*(?:{any_marker})(?:{space_after_close})?"
    return re.sub(rf"\A(?:{marker_with_space})+", "", text)


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

    `after` is the text after the content of an answer. If this text starts with a marker, the
    marker ends the message. Other text, such as a second marker or a word, ends the message only if
    the template writes this text after a user's message, too. Examples, in the order in which the
    function tries the cases:

        after an answer           after a user's message    result
        EOS_TOKEN                 any text                  []
        {end}                     {end}                     ["{end}"]
        <|eom|><|eot|>            <|eot|>                   ["<|eom|>", "<|eot|>"]
        <|end|>message<|sep|>     <|end|>message<|sep|>     ["<|end|>message<|sep|>"]
        <|im_end|><|other|>       <|im_end|>                ["<|im_end|>"]
    """
    after_content = after.lstrip()
    after_user_message = turn.after_user_message.lstrip()
    first_marker = leading_marker(after_content)
    if first_marker == EOS_TOKEN:
        return []  # EOS_TOKEN is the placeholder of an unknown token, so no model writes it.
    if not first_marker:
        return _end_in_punctuation(after_content, after_user_message, turn.header)
    return (
        _two_end_markers(after_content, after_user_message, turn.header)
        or _end_markers_with_words(after_content, after_user_message, turn.header)
        or [first_marker]
    )


def _end_in_punctuation(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Return a list with the text that ends every message: a word in punctuation, such as `{end}`.

    Return [] if messages do not end with such a text. `after_content` and `after_user_message` are
    the texts after an answer and after a user's message. `header` opens an answer.

    >>> _end_in_punctuation("{end}", after_user_message="{end}{bot}", header="{bot}")
    ['{end}']

    In this example, the text after each message is the header of the next message:

    >>> _end_in_punctuation("{bot}", after_user_message="{bot}", header="{bot}")
    []
    """
    end_text = after_content.partition(EOS_TOKEN)[0].strip()
    if _WORD_IN_PUNCTUATION.fullmatch(end_text) is None:
        return []
    opens_next_message = end_text in header
    ends_user_message = after_user_message.startswith(end_text)
    return [end_text] if ends_user_message and not opens_next_message else []


def _two_end_markers(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Return the two markers that end an answer, such as `<|eom|>` and `<|eot|>`.

    Return [] if only one marker ends the answer. The second marker ends the answer if it is the
    first or the second marker after a user's message:

    >>> _two_end_markers("<|eom|><|eot|>", after_user_message="<|eot|>", header="<|bot|>")
    ['<|eom|>', '<|eot|>']
    >>> _two_end_markers("<|eom|><|eot|>", after_user_message="<|eom|><|eot|>", header="<|bot|>")
    ['<|eom|>', '<|eot|>']

    A second marker that belongs to `header` opens the next message, so only the first marker ends
    the answer:

    >>> _two_end_markers("<|eot|><|bot|>", after_user_message="<|eot|><|bot|>", header="<|bot|>")
    []
    """
    first, second = first_two(leading_markers(after_content))  # A missing marker is "".
    if second in ("", first, EOS_TOKEN):  # No model writes the placeholder EOS_TOKEN.
        return []
    ends_user_message = second in first_two(leading_markers(after_user_message))
    opens_next_message = second in header
    return [first, second] if ends_user_message and not opens_next_message else []


def _end_markers_with_words(after_content: str, after_user_message: str, header: str) -> list[str]:
    """Return the text with markers and words that ends every message, such as `<end>turn<sep>`.

    The result is a list. It is empty if messages end in another way. If the next marker also ends
    every message, the list contains this marker, too:

    >>> _end_markers_with_words("<end>turn<sep><over>", "<end>turn<sep><over>", header="<bot>")
    ['<end>turn<sep>', '<over>']

    A marker that does not follow a user's message is not an end marker. Neither is a marker of
    `header`, because the header opens the next message:

    >>> _end_markers_with_words("<end>turn<sep><pad>", "<end>turn<sep>", header="<bot>")
    ['<end>turn<sep>']
    >>> _end_markers_with_words("<end>turn<sep><bot>", "<end>turn<sep><bot>", header="<bot>")
    ['<end>turn<sep>']
    """
    turn_end = _turn_end_with_words(after_content, after_user_message, header)
    if not turn_end:
        return []
    next_match = MARKER.match(after_content.removeprefix(turn_end))
    if next_match is None:
        return [turn_end]
    next_marker = next_match.group()
    ends_user_message = after_user_message.startswith(turn_end + next_marker)
    is_other_marker = next_marker in markers(header) or next_marker == EOS_TOKEN
    return [turn_end, next_marker] if ends_user_message and not is_other_marker else [turn_end]


def _turn_end_with_words(after_content: str, after_user_message: str, header: str) -> str:
    """Return the text with markers and words that ends every message, such as `<end>turn<sep>`.

    A single word is between two markers. Return "" if messages end in another way.

    >>> _turn_end_with_words("<end>turn<sep> Hello", "<end>turn<sep>", header="<bot>")
    '<end>turn<sep>'

    In the next example, only `<end>` ends a message, because `bot<sep>` is the header that opens
    the next message. The result is then "", too:

    >>> _turn_end_with_words("<end>bot<sep> Hello", "<end>bot<sep>", header="bot<sep>")
    ''
    """
    match = _MARKERS_AND_WORDS.match(after_content)
    if match is None:
        return ""
    turn_end = match.group()
    if not after_user_message.startswith(turn_end):
        return ""
    after_first_marker = turn_end.removeprefix(leading_marker(turn_end))  # `turn<sep>`
    next_header = header.strip()
    contains_next_header = bool(next_header) and next_header in after_first_marker
    return "" if contains_next_header else turn_end


def _wrapper_close(after: str, opening: str, after_user_message: str) -> str:
    r"""Return the markup that closes the content, or "" if no markup closes the content.

    If several markers open the content, the closing text has several markers, too. Otherwise, the
    first marker after the content closes the content or ends the message. In these examples, every
    message ends with `<|im_end|>`:

        before the content    after the content                result
        <|in|>answer<|sep|>   <|out|>answer<|sep|><|im_end|>   "<|out|>answer<|sep|>"
        <answer>              \n</answer><|im_end|>            "\n</answer>"
        <answer>              <|out|><|im_end|>                "<|out|>"
        <answer>              <|im_end|>                       ""

    Args:
        after: The text after the content of a rendered answer.
        opening: The text before the content, which opens the content.
        after_user_message: The text after a user's message. It starts with the end of the message.
    """
    several_markers = compound_closing(after, opening)
    if several_markers:
        return several_markers
    marker = leading_marker(after)
    if not marker:
        return ""
    space_before_marker, _, _ = after.partition(marker)
    closing = space_before_marker + marker
    if marker in closing_spellings(opening):
        return closing  # `</answer>` always closes `<answer>`.
    # Any other marker closes the content, unless the marker ends messages.
    ends_message = marker == EOS_TOKEN or marker in after_user_message
    return "" if ends_message else closing
