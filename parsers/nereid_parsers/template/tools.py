"""Compare rendered messages to infer how a template writes tool calls.

Each comparison renders two messages. A line of the table contains the label of a comparison, the
two messages, and the fact that the difference between the renderings shows.

T1   content; a tool call               the text of a tool call
T2   one tool call; two tool calls      the markup of a list of tool calls
T3   two functions                      where the name is written
T4   one argument; no argument          the markup of the arguments
T5   one argument; two arguments        the markup of the arguments
T6   two pairs of key and value         where the key and the value are written
T7   a string; a number                 how the type of a value is written
T7b  two strings, one with markup       whether strings with markup are quoted
T8   a call; content before the call    what ends the content

T1 and T2 return the rendered tool calls, from which the readers in `calls/` infer the format. The
comparisons T3 to T7b are in `calls/call_changes.py`, and only explain the format in the report. T8
is in `calls/content_before_call.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Reasoning, ToolSection, Wrapper
from nereid_parsers.template.calls import READERS
from nereid_parsers.template.calls.call_changes import record_changed_calls
from nereid_parsers.template.calls.call_names import mask_repeated_names
from nereid_parsers.template.calls.call_numbers import mask_call_numbers
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.calls.call_texts import CallFormat, CallTexts, split_text_after_calls
from nereid_parsers.template.calls.calls_without_arguments import add_call_without_arguments
from nereid_parsers.template.calls.content_before_call import (
    find_markup_before_call,
    record_content_before_call,
)
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    NUMBER_VALUE,
    ONE_CALL,
    SECOND_TOOL,
    SECOND_VALUE,
    SPECIAL_VALUE,
    TWO_ARGUMENTS,
    TWO_CALLS,
    AssistantMessage,
    Conversation,
    ProbeCall,
    conversation_with_calls,
)
from nereid_parsers.template.known_formats import add_family_variants
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.probe import Prober, restore_numbers_and_ids
from nereid_parsers.template.unrendered_calls import guess_tool_section

NO_CALLS = "none"  # The value of `ToolFindings.form` if the template renders no tool calls.


@dataclass(frozen=True, slots=True)
class ToolFindings:
    """The findings about how a chat template renders tool calls.

    Attributes:
        part: The tool section, which declares how the model writes all tool calls of a message.
            None if the template renders no tool calls, or if their format is unknown.
        form: The name of the form of the tool calls, such as "JSON". "none" if the template renders
            no tool calls.
        is_parallel: Whether one message can have several tool calls.
        with_content: Whether one message can have both content and tool calls.
        end_markers: The markers that follow the tool calls and end the model's turn.
        inner_headers: The turn markers that the model writes between the content and a tool call,
            such as `<|end|>` and `<|start|>assistant`. If other text than in an answer opens the
            content before a tool call, such as `<|note|>` instead of `<|answer|>`, also this text.
    """

    part: ToolSection | None = None
    form: str = NO_CALLS
    is_parallel: bool = False
    with_content: bool = False
    end_markers: tuple[str, ...] = ()
    inner_headers: tuple[str, ...] = ()


def find_tools(
    turn: ModelTurn, reasoning: Reasoning | None, wrapper: Wrapper | None
) -> ToolFindings:
    """Compare rendered conversations to infer how the template writes tool calls.

    Example: if two rendered tool calls are `<call>{"name": "f", ..}</call>` and
    `<call>{"name": "g", ..}</call>`, a tool call is a JSON object between `<call>` and `</call>`.

    `reasoning` contains the markers of reasoning, and `wrapper` contains the markers around the
    content. Each of them is None if there are no such markers.

    Mutates: `turn.prober`, which records comparisons for the report, with the labels T1 to T8. If
        the format cannot be inferred, a sentence with the reason is appended to its list
        `undecided`.
    """
    renderer = CallRenderer(turn, reasoning, wrapper)
    prober = turn.prober
    one_call = render_one_call(renderer)
    record_one_call(prober, one_call)  # T1
    if not one_call:
        guess = guess_tool_section(renderer)
        prober.undecided += guess.sentences
        return ToolFindings(part=guess.section)
    two_calls = render_two_calls(renderer)
    record_two_calls(prober, two_calls)  # T2
    texts = _call_texts(renderer, one_call, two_calls)
    record_changed_calls(prober)  # T3 to T7b, which only the report needs
    before_call = find_markup_before_call(renderer)
    if before_call is not None:
        record_content_before_call(prober, before_call)  # T8
    findings = ToolFindings(
        is_parallel=bool(two_calls),
        with_content=before_call is not None,
        inner_headers=() if before_call is None else before_call.inner_headers(),
    )
    # The two tool calls must differ only in their names and arguments, so their numbers are masked.
    # The prober has already masked numbers directly after the name, as in `f:0`.
    # `mask_call_numbers` also masks numbers at other places, as in `0 f` or `f index=0`.
    masked_texts = mask_repeated_names(mask_call_numbers(texts))
    call_format = _infer_call_format(masked_texts, prober.undecided)
    if call_format is None:
        return findings
    if _is_name_repeated_between_calls(call_format):
        prober.undecided.append(
            "The format of the calls could not be inferred: the text between two calls repeats the "
            f"name of the function. A call is written as {restore_numbers_and_ids(one_call)!r}."
        )
        return findings
    return _add_format(findings, call_format, masked_texts, prober.undecided)


def _is_name_repeated_between_calls(call_format: CallFormat) -> bool:
    """Return whether the text between two tool calls, or after all of them, contains `{name}`.

    `mask_repeated_names` replaces a name after the arguments with `{name}`. Only the closing marker
    of each tool call may contain `{name}`, because the parser replaces it only there.
    """
    markup = call_format.markup
    return any("{name}" in text for text in (markup.separator, markup.close))


def _add_format(
    findings: ToolFindings, call_format: CallFormat, texts: CallTexts, undecided: list[str]
) -> ToolFindings:
    """Return a copy of `findings` with the inferred format of tool calls.

    `call_format` was inferred from the rendered tool calls in `texts`. The copy contains the name
    of the form, such as "JSON", the end markers and the tool section, which is the declaration of
    all tool calls of a message. If the tool section is invalid, it is left out.

    Mutates: `undecided`. If the tool section is invalid, a sentence with the reason is appended.
    """
    findings_with_form = _add_form_and_end_markers(findings, call_format)
    try:
        rendered_section = _tool_section(call_format)
    except FormatError as error:
        undecided.append(f"The tool section is invalid: {error}")
        return findings_with_form
    section = add_call_without_arguments(rendered_section, call_format, texts.no_arguments)
    # Related models may write tool calls in other ways, which the template does not render.
    return replace(findings_with_form, part=add_family_variants(section))


def _add_form_and_end_markers(findings: ToolFindings, call_format: CallFormat) -> ToolFindings:
    """Return a copy of `findings` with the form of the tool calls and the markers after them.

    Example: if `call_format` was inferred from the rendered tool calls "<calls>..</calls><|end|>",
    the end markers are `<|end|>`, because this marker ends the model's turn.
    """
    turn_ends = split_text_after_calls(call_format.markup).turn_ends
    # EOS_TOKEN is an invented end-of-sequence token that the analysis passes to the template. No
    # model generates this token, so it is removed from the end markers.
    end_markers = tuple(marker for marker in turn_ends if marker != EOS_TOKEN)
    return replace(findings, form=call_format.form, end_markers=end_markers)


def _call_texts(renderer: CallRenderer, one_call: str, two_calls: str) -> CallTexts:
    """Return rendered tool calls whose differences show how the template writes a tool call.

    `one_call` and `two_calls` are already rendered. The function adds tool calls with other
    arguments. Examples: a tool call with two arguments shows how the template separates arguments.
    The argument SPECIAL_VALUE, a string with a line break and the characters `<&>`, shows the
    delimiters, such as `<![CDATA[`, that some templates write only around such strings.
    """
    return CallTexts(
        one_call=one_call,
        two_calls=two_calls,
        two_arguments=_render_call_with(renderer, TWO_ARGUMENTS),
        number=_render_call_with(renderer, ((FIRST_KEY, NUMBER_VALUE),)),
        special_value=_render_call_with(renderer, ((FIRST_KEY, SPECIAL_VALUE),)),
        no_arguments=_render_call_with(renderer, ()),
    )


def _render_call_with(renderer: CallRenderer, arguments: tuple[tuple[str, Any], ...]) -> str:
    """Render one tool call with the given arguments, which are pairs of a key and a value."""
    return renderer.text_of_calls(ProbeCall(arguments=arguments))


def render_one_call(renderer: CallRenderer) -> str:
    """Render a message with one tool call. Return the text of the tool call.

    The result is the text that a model would generate to make the tool call, such as
    "<call>..</call>". It is "" if the template does not render tool calls. In the result,
    placeholders replace the numbers and ids of tool calls.
    """
    text = renderer.text_of_calls(*ONE_CALL)
    # The three words are invented, so only a rendered tool call contains all of them.
    is_rendered = all(word in text for word in (FIRST_TOOL, FIRST_KEY, FIRST_VALUE))
    return text if is_rendered else ""


def record_one_call(prober: Prober, one_call: str) -> None:
    """Record the comparison T1 for the report: a message with content, and one with a tool call.

    `one_call` is the result of `render_one_call`: the text of the rendered tool call, such as
    "<call>..</call>", or "" if the template does not render tool calls.

    Mutates: `prober.comparisons`.
    """
    if one_call:
        # The report shows the number and the id of a tool call instead of placeholders.
        finding = f"The call is written as {restore_numbers_and_ids(one_call)!r}."
    else:
        finding = "The template does not render the call."
    prober.record(
        "T1 call presence",
        "The message has a call instead of content.",
        left=Conversation(AssistantMessage(CONTENT_TEXT), tools=True),
        right=conversation_with_calls(*ONE_CALL),
        finding=finding,
    )


def render_two_calls(renderer: CallRenderer) -> str:
    """Render a message with two tool calls. Return the text of the two tool calls.

    The result is the text that a model would generate to make the two tool calls, such as
    "<call>..</call><call>..</call>". It is "" if the template renders only one tool call of a
    message. In the result, placeholders replace the numbers and ids of tool calls.
    """
    text = renderer.text_of_calls(*TWO_CALLS)
    # The three words are invented. The first occurs only in the first tool call, and the other two
    # occur only in the second tool call.
    is_rendered = all(word in text for word in (FIRST_TOOL, SECOND_TOOL, SECOND_VALUE))
    return text if is_rendered else ""


def record_two_calls(prober: Prober, two_calls: str) -> None:
    """Record the comparison T2 for the report: a message with one tool call, and one with two.

    `two_calls` is the result of `render_two_calls`: the text of the two rendered tool calls, or ""
    if the template does not render two tool calls.

    Mutates: `prober.comparisons`.
    """
    conversation = conversation_with_calls(*TWO_CALLS)
    if two_calls:
        finding = "A message can have several calls."
    else:
        error_message = prober.error_message(conversation)  # None if the template did not fail.
        reason = error_message or "the template does not render the second call"
        finding = f"A message can have only one call: {reason}"
    prober.record(
        "T2 two calls",
        "The message has a second call.",
        left=conversation_with_calls(*ONE_CALL),
        right=conversation,
        finding=finding,
    )


def _infer_call_format(texts: CallTexts, undecided: list[str]) -> CallFormat | None:
    """Infer from rendered tool calls how a template writes tool calls.

    The functions in `READERS` are called in order, until one of them returns a format. Each
    function recognises one form of tool calls, for example JSON, and returns None for any other
    form. If a function recognises the form but infers an invalid format, it raises FormatError, and
    the next function is called. Return None if no function returns a format.

    Mutates: `undecided`, to which sentences about what could not be inferred are appended.
    """
    for read_calls in READERS:
        try:
            call_format = read_calls(texts)
        except FormatError as error:
            undecided.append(
                f"The function {read_calls.__name__} inferred an invalid format of the calls: "
                f"{error}"
            )
            continue
        if call_format is not None:
            return call_format
    undecided.append(
        "The calls have no form that the analysis knows. "
        f"A call is written as {restore_numbers_and_ids(texts.one_call)!r}."
    )
    return None


def _tool_section(call_format: CallFormat) -> ToolSection:
    """Build the declaration of all tool calls of a message, for example `<calls>..</calls>`.

    Example: in "<calls><call>f</call>, <call>g</call></calls><|end|>", `<calls>` opens the tool
    section, `</calls>` closes the tool section, and ", " separates the tool calls. `<|end|>` ends
    the message and does not belong to the tool section.

    Raises:
        FormatError: `ToolSection` rejects the declaration, because the parser could not read it.
    """
    calls = call_format.calls
    markup = call_format.markup
    if not markup.open.strip():  # If no marker opens the tool section, no marker closes it.
        return ToolSection(calls, separator=markup.separator)
    # White space after the closing marker belongs to the text that ends the message.
    close = split_text_after_calls(markup).section_close.rstrip()
    return ToolSection(calls, open=markup.open, close=close, separator=markup.separator)
