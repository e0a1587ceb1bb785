"""Determine how a template writes tool calls: comparisons T1 to T8.

T1  content, and a call instead          where a call is written
T2  one call, and two                    the markup of a list of calls
T3  one function, and another            where the name is written
T4  one argument, and none               the markup of the arguments
T5  one argument, and two                the markup of the arguments
T6  one key and value, and others        where key and value are written
T7  a string, and a number               how the type of a value is shown
T7b a plain string, and one with markup  whether such strings are quoted
T8  a call, and content before the call  what ends the content

T1 and T2 also give the texts that the readers in `calls/` turn into a format. T3 to T7b only
explain that format in the report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Reasoning, ToolSection, Wrapper
from nereid_parsers.template.calls.call_forms import READERS
from nereid_parsers.template.calls.call_texts import CallFormat, CallTexts
from nereid_parsers.template.content import strip_reasoning_markers
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    NUMBER_VALUE,
    ONE_CALL,
    SECOND_KEY,
    SECOND_TOOL,
    SECOND_VALUE,
    SPECIAL_VALUE,
    TWO_ARGUMENTS,
    TWO_CALLS,
    AssistantMessage,
    Conversation,
    ProbeCall,
)
from nereid_parsers.template.difference import Comparison, Difference, markers
from nereid_parsers.template.frame import TurnFrame
from nereid_parsers.template.probe import COUNTER_MARK

_NO_CALLS = "none"
_CONTEXT_CHARS = 24  # characters of the context of a name that the report shows


@dataclass(frozen=True, slots=True)
class ToolFindings:
    """The result of the comparisons that concern tool calls.

    Attributes:
        part: The tool section of the format, or None if the template renders no tool calls.
        form: The name of the form of the tool calls, such as "JSON". "none" if there are no tool
            calls.
        is_parallel: Whether one message can have several tool calls.
        with_content: Whether one message can have both content and tool calls.
        end_markers: The markers after the tool calls that end the turn.
        comparisons: All comparisons.
        undecided: Sentences that describe what could not be inferred, and why.
    """

    part: ToolSection | None = None
    form: str = _NO_CALLS
    is_parallel: bool = False
    with_content: bool = False
    end_markers: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        """Whether the template renders tool calls in a known form."""
        return self.form != _NO_CALLS

    def without_calls(self) -> ToolFindings:
        """Return these findings without a format of tool calls."""
        return ToolFindings(comparisons=self.comparisons, undecided=self.undecided)


@dataclass(frozen=True, slots=True)
class CallRenderer:
    """Renders messages with tool calls.

    Attributes:
        frame: The frame of the model's turn.
        reasoning: The reasoning part of the format.
        wrapper: The markers around the content.
    """

    frame: TurnFrame
    reasoning: Reasoning | None = None
    wrapper: Wrapper | None = None

    def rendering(self, *calls: ProbeCall, content: str = "") -> str:
        """Return the rendered conversation with these tool calls, or "" if the template refuses."""
        return self.frame.prober.render(conversation_with_calls(calls, content)) or ""

    def text_of_calls(self, *calls: ProbeCall) -> str:
        """Return the text that a model would generate for these tool calls.

        The markers of empty reasoning and of empty content before the tool calls are removed.
        Return "" if the template refuses the tool calls. Example: "<think></think><call>..</call>"
        gives "<call>..</call>".
        """
        text = self.frame.generated_text(conversation_with_calls(calls))
        if text is None:
            return ""
        text = strip_reasoning_markers(text, self.reasoning)
        return text if self.wrapper is None else _strip_wrapper(text, self.wrapper)


def conversation_with_calls(calls: tuple[ProbeCall, ...], content: str = "") -> Conversation:
    """Return a conversation whose answer makes these tool calls."""
    return Conversation(AssistantMessage(content, calls=calls), tools=True)


def _strip_wrapper(text: str, wrapper: Wrapper) -> str:
    """Return `text` without the markers of empty content at its start.

    >>> _strip_wrapper("<answer></answer><call>..", Wrapper("<answer>", "</answer>"))
    '<call>..'
    """
    opening, closing = wrapper.open.strip(), wrapper.close.strip()
    bare = text.lstrip()
    if not opening or not bare.startswith(opening):
        return text
    after_opening = bare[len(opening) :]
    if not closing:
        return after_opening
    rest = after_opening.lstrip()
    return rest[len(closing) :] if rest.startswith(closing) else text


def find_tools(
    frame: TurnFrame, reasoning: Reasoning | None, wrapper: Wrapper | None
) -> ToolFindings:
    """Compare renderings with tool calls, and infer the format of the tool calls.

    Args:
        frame: The frame of the model's turn.
        reasoning: The reasoning part of the format.
        wrapper: The wrapper of content.
    """
    renderer = CallRenderer(frame, reasoning, wrapper)
    one_call, presence = compare_call_presence(renderer)
    if not one_call:
        return ToolFindings(comparisons=(presence,))
    two_calls, parallel = compare_two_calls(renderer)
    texts = CallTexts(
        one_call=one_call,
        two_arguments=renderer.text_of_calls(ProbeCall(arguments=TWO_ARGUMENTS)),
        number=renderer.text_of_calls(ProbeCall(arguments=((FIRST_KEY, NUMBER_VALUE),))),
        two_calls=two_calls,
        special_value=renderer.text_of_calls(ProbeCall(arguments=((FIRST_KEY, SPECIAL_VALUE),))),
    )
    comparisons = [presence, parallel, compare_names(renderer), *compare_arguments(renderer)]
    undecided: list[str] = []
    findings = ToolFindings(is_parallel=bool(two_calls))
    calls = infer_call_format(mask_call_numbers(texts), undecided)
    if calls is not None:
        findings = replace(
            findings,
            part=_tool_section(calls, undecided),
            form=calls.form,
            end_markers=_end_markers(calls),
        )
    content_and_call = compare_content_before_call(renderer)
    if content_and_call is not None:
        comparisons.append(content_and_call)
    return replace(
        findings,
        with_content=content_and_call is not None,
        comparisons=tuple(comparisons),
        undecided=tuple(undecided),
    )


# ---- the comparisons ----------------------------------------------------------------------------


def compare_call_presence(renderer: CallRenderer) -> tuple[str, Comparison]:
    """Compare a message with content and a message with a tool call instead of content (T1).

    Returns:
        A pair: the text of the tool call ("" if the template does not render tool calls), and the
        comparison.
    """
    content_only = Conversation(AssistantMessage(CONTENT_TEXT), tools=True)
    text = renderer.text_of_calls(*ONE_CALL)
    is_rendered = FIRST_TOOL in text and FIRST_KEY in text and FIRST_VALUE in text
    finding = "The template does not render the call."
    if is_rendered:
        finding = f"The call is written as {text!r}."
    comparison = Comparison(
        name="T1 call presence",
        changed="The message has a call instead of content.",
        left=renderer.frame.prober.render(content_only) or "",
        right=renderer.rendering(*ONE_CALL),
        finding=finding,
    )
    return text if is_rendered else "", comparison


def compare_two_calls(renderer: CallRenderer) -> tuple[str, Comparison]:
    """Compare a message with one tool call and a message with two tool calls (T2).

    Returns:
        A pair: the text of the two tool calls ("" if a message can have only one tool call), and
        the comparison.
    """
    text = renderer.text_of_calls(*TWO_CALLS)
    is_parallel = FIRST_TOOL in text and SECOND_TOOL in text and SECOND_VALUE in text
    finding = "A message can have several calls."
    if not is_parallel:
        why = renderer.frame.prober.refusals.get(
            conversation_with_calls(TWO_CALLS), "the template does not render the second call"
        )
        finding = f"A message can have only one call: {why}"
    comparison = Comparison(
        name="T2 two calls",
        changed="The message has a second call.",
        left=renderer.rendering(*ONE_CALL),
        right=renderer.rendering(*TWO_CALLS),
        finding=finding,
    )
    return text if is_parallel else "", comparison


def compare_names(renderer: CallRenderer) -> Comparison:
    """Compare tool calls of two functions (T3). Their difference is the text of the name."""
    comparison = Comparison(
        name="T3 function name",
        changed="The call names another function.",
        left=renderer.rendering(*ONE_CALL),
        right=renderer.rendering(ProbeCall(SECOND_TOOL)),
        finding="",
    )
    difference = comparison.parts()
    before = difference.prefix[-_CONTEXT_CHARS:]
    after = difference.suffix[:_CONTEXT_CHARS]
    return replace(comparison, finding=f"The name is written between {before!r} and {after!r}.")


def compare_arguments(renderer: CallRenderer) -> list[Comparison]:
    """Compare a tool call with one argument and tool calls with other arguments (T4 to T7b)."""
    changes = (
        ("T4 no argument", "The call has no argument.", ()),
        ("T5 two arguments", "The call has a second argument.", TWO_ARGUMENTS),
        (
            "T6 key and value",
            "The argument has another key and another value.",
            ((SECOND_KEY, SECOND_VALUE),),
        ),
        ("T7 type", "The value is a number instead of a string.", ((FIRST_KEY, NUMBER_VALUE),)),
        (
            "T7b special characters",
            "The value is a string with a line break and characters of markup.",
            ((FIRST_KEY, SPECIAL_VALUE),),
        ),
    )
    one_argument = renderer.rendering(*ONE_CALL)
    comparisons = []
    for name, changed, arguments in changes:
        text = renderer.rendering(ProbeCall(arguments=arguments))
        comparison = Comparison(name, changed, one_argument, text, "")
        finding = "The template refuses to render this call."
        if text:
            finding = _change_text(comparison.parts())
        comparisons.append(replace(comparison, finding=finding))
    return comparisons


def _change_text(difference: Difference) -> str:
    """Return a sentence that describes the difference between two renderings.

    >>> _change_text(Difference("<a>", "", "<b>", "</a>"))
    "'<b>' is added."
    """
    if not difference.left and not difference.right:
        return "The renderings are equal."
    if not difference.left:
        return f"{difference.right!r} is added."
    if not difference.right:
        return f"{difference.left!r} is removed."
    return f"{difference.left!r} becomes {difference.right!r}."


def compare_content_before_call(renderer: CallRenderer) -> Comparison | None:
    """Compare a tool call alone and a tool call with content before it (T8).

    Set `frame.inner_headers` if the template writes content and tool calls as two turns. Example:
    in "CONTENT<|end|><|start|>assistant<call>..", the model itself writes `<|end|>` and the header
    `<|start|>assistant`.

    Returns:
        The comparison, or None if a message cannot have both content and tool calls.
    """
    frame = renderer.frame
    text = frame.text_after_header(conversation_with_calls(ONE_CALL, CONTENT_TEXT))
    _, content, after_content = (text or "").partition(CONTENT_TEXT)
    if not content or FIRST_TOOL not in after_content:
        return None
    between = after_content[: after_content.rfind(FIRST_TOOL)]
    header = frame.header.strip()
    finding = "Content is written before the call."
    if header and header in between:
        finding = "Content and calls are written as separate turns."
        turn_end = markers(between[: between.find(header)])[:1]
        frame.inner_headers = (header, *turn_end)
    return Comparison(
        name="T8 content before a call",
        changed="The message has content.",
        left=renderer.rendering(*ONE_CALL),
        right=renderer.rendering(*ONE_CALL, content=CONTENT_TEXT),
        finding=finding,
    )


# ---- the format ---------------------------------------------------------------------------------


def infer_call_format(texts: CallTexts, undecided: list[str]) -> CallFormat | None:
    """Return the format from the first matching reader, or None if no reader matches `texts`.

    Append a sentence to `undecided` for each reader that infers an invalid format, and if no reader
    matches.
    """
    for reader in READERS:
        try:
            calls = reader(texts)
        except FormatError as error:
            undecided.append(f"The reader {reader.__name__} inferred an invalid format: {error}")
            continue
        if calls is not None:
            return calls
    undecided.append(
        f"The calls have no form that the analysis knows. A call is written as {texts.one_call!r}."
    )
    return None


def _tool_section(calls: CallFormat, undecided: list[str]) -> ToolSection | None:
    """Return the tool section with these tool calls, or None if the section is invalid.

    If the section is invalid, append the reason to `undecided`.
    """
    opening = calls.markup.open
    closing, _ = _split_section_close(calls)
    if not opening.strip():
        opening = ""
        closing = ""
    try:
        return ToolSection(
            calls.calls, open=opening, close=closing.rstrip(), separator=calls.markup.separator
        )
    except FormatError as error:
        undecided.append(f"The tool section is invalid: {error}")
        return None


def _end_markers(calls: CallFormat) -> tuple[str, ...]:
    """Return the markers that end the turn after the tool calls."""
    _, turn_ends = _split_section_close(calls)
    return tuple(marker for marker in turn_ends if marker != EOS_TOKEN)


def _split_section_close(calls: CallFormat) -> tuple[str, list[str]]:
    """Return the text that closes the tool section, and the markers after it, which end the turn.

    The closing text has the same number of markers as the opening text. Words in the opening text
    count as one marker. Example: for a section that opens with `<calls>`, the text
    "</calls><|end|>" gives ("</calls>", ["<|end|>"]).
    """
    opening, closing = calls.markup.open, calls.markup.close
    num_opening = len(markers(opening)) or int(bool(opening.strip()))
    turn_ends = markers(closing)[num_opening:]
    for marker in reversed(turn_ends):
        closing = closing[: closing.rfind(marker)]
    return closing, turn_ends


# ---- numbers of calls ---------------------------------------------------------------------------


def mask_call_numbers(texts: CallTexts) -> CallTexts:
    """Return `texts` with COUNTER_MARK in place of the digits that number the tool calls.

    The digits are found by comparing the two tool calls in `two_calls`. Examples: "0 zqFirstTool"
    and "1 zqSecondTool" have the digit before the name. "zqFirstTool index=0" and "zqSecondTool
    index=1" have the digit after the name.
    """
    before, after = _number_distances(texts.two_calls)

    def mask(text: str) -> str:
        for name in (SECOND_TOOL, FIRST_TOOL):
            name_at = text.find(name)
            if name_at < 0:
                continue
            if before:
                text = _mask_digit(text, name_at - before)
            if after:
                text = _mask_digit(text, name_at + len(name) + after - 1)
        return text

    return CallTexts(
        one_call=mask(texts.one_call),
        two_arguments=mask(texts.two_arguments),
        number=mask(texts.number),
        two_calls=mask(texts.two_calls),
        special_value=mask(texts.special_value),
    )


def _mask_digit(text: str, at: int) -> str:
    r"""Return `text` with COUNTER_MARK in place of the character at index `at`, if it is a digit.

    >>> _mask_digit("0 zqFirstTool", 0)
    '\ue010 zqFirstTool'
    """
    if not text[at : at + 1].isdigit():
        return text
    return text[:at] + COUNTER_MARK + text[at + 1 :]


def _number_distances(two_calls: str) -> tuple[int, int]:
    """Return the distances, in characters, from the name to the numbers before and after.

    A distance is 0 if the text contains no number on this side of the name.

    >>> _number_distances("<0 zqFirstTool><1 zqSecondTool>")
    (2, 0)
    """
    if FIRST_TOOL not in two_calls or SECOND_TOOL not in two_calls:
        return 0, 0
    before_first, _, after_first = two_calls.partition(FIRST_TOOL)
    before_second, _, after_second = two_calls.partition(SECOND_TOOL)
    before = _distance_to_number(before_first[::-1], before_second[::-1])
    after = _distance_to_number(after_first, after_second)
    return before, after


def _distance_to_number(first: str, second: str) -> int:
    """Return the position, from 1, of a digit that is one higher in `second` than in `first`.

    The digit must be the first difference between the two texts. The result is 0 if the first
    difference is not such a digit.

    >>> _distance_to_number(" index=0>", " index=1>")
    8
    """
    for position, (character, other_character) in enumerate(zip(first, second, strict=False), 1):
        if character != other_character:
            is_next = (
                character.isdigit()
                and other_character.isdigit()
                and int(other_character) == int(character) + 1
            )
            return position if is_next else 0
    return 0
