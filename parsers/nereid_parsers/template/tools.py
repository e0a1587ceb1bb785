"""Compare rendered messages to infer how a template writes tool calls.

Each comparison renders two messages. The table shows what the messages contain, and what the
difference between the renderings shows.

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
comparisons T3 to T7b are in `calls/call_changes.py`. They only explain the format in the report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Reasoning, ToolSection, Wrapper
from nereid_parsers.template.calls import READERS
from nereid_parsers.template.calls.call_changes import compare_changed_calls
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    mask_call_numbers,
    split_text_after_calls,
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
from nereid_parsers.template.difference import markers, text_between
from nereid_parsers.template.known_formats import (
    add_family_variants,
    markers_of_phrases,
    recognise_tool_section,
)
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.probe import Prober, unmask_call_ids

# These words occur in the markers of tool lists and of tool results. If the word "call" replaces
# such a word, the result may be a marker of tool calls. Example: `<|tool_list_start|>` becomes
# `<|tool_call_start|>`.
_NOT_CALL_WORD = re.compile(r"list|response|result|output")
NO_CALLS = "none"  # The value of `ToolFindings.form` if the template renders no tool calls.


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
        inner_headers: Headers that the model itself writes between the content and a tool call.
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
    """Infer how the template writes tool calls, by comparing renderings of conversations.

    Example: if two rendered tool calls are `<call>{"name": "f", ..}</call>` and
    `<call>{"name": "g", ..}</call>`, a tool call is a JSON object between `<call>` and `</call>`.

    Mutates: `turn.prober`. It records the comparisons with the labels T1 to T8 for the report. If
    the format cannot be inferred, a sentence is appended to `turn.prober.undecided`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
        reasoning: The reasoning part of the format.
        wrapper: The markers around the content, or None.
    """
    renderer = CallRenderer(turn, reasoning, wrapper)
    one_call = compare_call_presence(renderer)  # T1
    if not one_call:
        return ToolFindings(part=recognise_unrendered_calls(renderer))
    two_calls = compare_two_calls(renderer)  # T2
    texts = _render_calls(renderer, one_call, two_calls)
    compare_changed_calls(turn.prober)  # T3 to T7b. Only the report needs these comparisons.
    content_before_call = compare_content_before_call(turn)  # T8
    findings = ToolFindings(
        is_parallel=bool(two_calls),
        with_content=content_before_call.is_rendered,
        inner_headers=content_before_call.inner_headers,
    )
    undecided = turn.prober.undecided
    call_format = infer_call_format(mask_call_numbers(texts), undecided)
    return findings if call_format is None else _add_format(findings, call_format, undecided)


def _add_format(
    findings: ToolFindings, call_format: CallFormat, undecided: list[str]
) -> ToolFindings:
    """Return a copy of `findings` with the inferred format of tool calls.

    The new findings also contain the markers after the tool calls that end the turn. Example: in
    "<calls>..</calls><|end|>", the marker `<|end|>` ends the turn.

    Args:
        findings: The findings without a format.
        call_format: The format of one tool call, and the markup around all tool calls.
        undecided: The sentences that the report shows as "Not decided".

    Mutates: `undecided`. A sentence is appended if the format is invalid.
    """
    after_calls = split_text_after_calls(call_format.markup)
    section = _tool_section(call_format, after_calls.section_close, undecided)
    # `add_family_variants` also declares the tool calls that related models write.
    part = None if section is None else add_family_variants(section)
    # EOS_TOKEN is a placeholder that the template renders for an unknown token.
    end_markers = [marker for marker in after_calls.turn_ends if marker != EOS_TOKEN]
    return replace(findings, part=part, form=call_format.form, end_markers=tuple(end_markers))


def _render_calls(renderer: CallRenderer, one_call: str, two_calls: str) -> CallTexts:
    """Render the tool calls from which the functions in `calls/` infer the format.

    Args:
        renderer: Renders messages with tool calls.
        one_call: The text of one tool call, which is already rendered.
        two_calls: The text of two tool calls, or "" if a message can have only one tool call.
    """
    number = ProbeCall(arguments=((FIRST_KEY, NUMBER_VALUE),))
    special_value = ProbeCall(arguments=((FIRST_KEY, SPECIAL_VALUE),))
    return CallTexts(
        one_call=one_call,
        two_arguments=renderer.text_of_calls(ProbeCall(arguments=TWO_ARGUMENTS)),
        number=renderer.text_of_calls(number),
        two_calls=two_calls,
        special_value=renderer.text_of_calls(special_value),
    )


# ---- the comparisons ----------------------------------------------------------------------------


def compare_call_presence(renderer: CallRenderer) -> str:
    """Compare a message with content and a message with a tool call (T1).

    The prober records the comparison for the report.

    Returns:
        The text of the tool call, or "" if the template does not render tool calls.
    """
    text = renderer.text_of_calls(*ONE_CALL)
    # No template contains this name, key or value. If `text` contains all three, the template has
    # rendered the tool call.
    is_rendered = all(word in text for word in (FIRST_TOOL, FIRST_KEY, FIRST_VALUE))
    if is_rendered:
        finding = f"The call is written as {unmask_call_ids(text)!r}."
    else:
        finding = "The template does not render the call."
    renderer.turn.prober.record(
        "T1 call presence",
        "The message has a call instead of content.",
        left=Conversation(AssistantMessage(CONTENT_TEXT), tools=True),
        right=conversation_with_calls(*ONE_CALL),
        finding=finding,
    )
    return text if is_rendered else ""


def compare_two_calls(renderer: CallRenderer) -> str:
    """Compare a message with one tool call and a message with two tool calls (T2).

    The prober records the comparison for the report. If the template raises an error for the second
    tool call, the report contains the error message.

    Returns:
        The text of the two tool calls, or "" if a message can have only one tool call.
    """
    prober = renderer.turn.prober
    two_calls = conversation_with_calls(*TWO_CALLS)
    text = renderer.text_of_calls(*TWO_CALLS)
    is_parallel = all(word in text for word in (FIRST_TOOL, SECOND_TOOL, SECOND_VALUE))
    if is_parallel:
        finding = "A message can have several calls."
    else:
        why = prober.refusals.get(two_calls, "the template does not render the second call")
        finding = f"A message can have only one call: {why}"
    prober.record(
        "T2 two calls",
        "The message has a second call.",
        left=conversation_with_calls(*ONE_CALL),
        right=two_calls,
        finding=finding,
    )
    return text if is_parallel else ""


class ContentBeforeCall(NamedTuple):
    """The result of comparison T8.

    Attributes:
        is_rendered: Whether a message can have both content and tool calls.
        inner_headers: The header and the end marker that the model itself writes between the
            content and the tool call. Empty if the content and the tool call are in one turn.
    """

    is_rendered: bool
    inner_headers: tuple[str, ...] = ()


def compare_content_before_call(turn: ModelTurn) -> ContentBeforeCall:
    """Find out whether the template renders a message that has both content and a tool call.

    Some templates write the content and the tool call as two turns. Example: in
    "CONTENT<|end|><|start|>assistant<call>..", the model itself writes the marker `<|end|>` and the
    header `<|start|>assistant`. These two texts are the `inner_headers` of the result.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations, and
            records the comparison with the label T8 for the report.
    """
    with_content = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)
    text = turn.text_after_header(with_content) or ""
    between = text_between(text, CONTENT_TEXT, FIRST_TOOL)
    if between is None:
        return ContentBeforeCall(is_rendered=False)
    inner_headers = _headers_between(between, turn.header.strip())
    if inner_headers:
        finding = "Content and calls are written as separate turns."
    else:
        finding = "Content is written before the call."
    call_only = conversation_with_calls(*ONE_CALL)
    turn.prober.record(
        "T8 content before a call",
        "The message has content.",
        left=call_only,
        right=with_content,
        finding=finding,
    )
    return ContentBeforeCall(is_rendered=True, inner_headers=inner_headers)


def _headers_between(between: str, header: str) -> tuple[str, ...]:
    """Return the header and the end marker that a template writes between content and a tool call.

    The texts exist only if the template writes the content and the tool call as two turns.

    >>> _headers_between("<|end|><|start|>assistant<call>", "<|start|>assistant")
    ('<|start|>assistant', '<|end|>')

    Args:
        between: The text between the content and the name of the function.
        header: The header of the model's turn. The result is () if `between` contains no header.
    """
    if not header or header not in between:
        return ()
    before_header, _, _ = between.partition(header)
    end_markers = markers(before_header)
    return (header, end_markers[0]) if end_markers else (header,)


def recognise_unrendered_calls(renderer: CallRenderer) -> ToolSection | None:
    """Find the declaration of the tool calls, if the template itself renders no tool calls.

    The registry of formats declares how known models write tool calls. Such a declaration (a tool
    section) is found by its markers, which occur in the template or in the vocabulary.

    Mutates: `undecided` of the prober. A sentence about the result is appended for the report.

    Returns:
        The section, or None if the template does not offer the tools to the model, renders a part
        of a tool call, or contains the markers of no registered section.
    """
    prober = renderer.turn.prober
    prompt = prober.render(Conversation(generation_prompt=True, tools=True)) or ""
    offers_tools = FIRST_TOOL in prompt
    if not offers_tools:
        return None
    is_partly_rendered = FIRST_TOOL in renderer.text_of_calls(*ONE_CALL)
    markers_of_calls = _possible_call_markers(prober)
    section = None if is_partly_rendered else recognise_tool_section(markers_of_calls)
    prober.undecided.append(_describe_unrendered_calls(section))
    return section


def _describe_unrendered_calls(section: ToolSection | None) -> str:
    """Describe for the report how a model writes tool calls that the template does not render.

    Args:
        section: The declaration of the tool calls, or None if it is not known.
    """
    if section is None:
        return (
            "The template offers tools but renders no complete call. Calls are returned as content."
        )
    opening = section.open or section.calls[0].open
    return (
        "The template offers tools but renders no calls. The format of the calls was "
        f"recognised, not inferred: {opening.strip()!r} opens a call."
    )


def _possible_call_markers(prober: Prober) -> set[str]:
    """Return possible markers of tool calls, for a template that renders no tool calls.

    The result contains the markers in the text of the template, and the added tokens of the
    tokenizer. The result also contains markers that are derived from the markers of tools and of
    their results. Example: `<|tool_call_start|>` is derived from `<|tool_list_start|>`.
    """
    literal_text = "\n".join(prober.template.literals)
    # Some phrases in a template identify the model family, and each family has known markers.
    template_markers = [*markers(literal_text), *markers_of_phrases(literal_text)]
    derived_markers = [_NOT_CALL_WORD.sub("call", marker) for marker in template_markers]
    return {*prober.added_tokens, *template_markers, *derived_markers}


# ---- the format ---------------------------------------------------------------------------------


def infer_call_format(texts: CallTexts, undecided: list[str]) -> CallFormat | None:
    """Return the format of rendered tool calls, or None if no reader recognises their form.

    Each reader in `READERS` is a function that recognises one form of tool calls, for example JSON.
    The result of the first reader that recognises the form is returned.

    Args:
        texts: The rendered tool calls.
        undecided: The sentences that the report shows as "Not decided".

    Mutates: `undecided`. A sentence is appended for each reader that infers an invalid format.
    Another sentence is appended if no reader recognises the form.
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
        f"A call is written as {unmask_call_ids(texts.one_call)!r}."
    )
    return None


def _tool_section(calls: CallFormat, close: str, undecided: list[str]) -> ToolSection | None:
    """Declare the tool section of the format, or return None if the section is invalid.

    A tool section consists of all tool calls and the markers around them, such as
    `<calls>..</calls>`.

    Args:
        calls: The inferred format of the tool calls.
        close: The text after all tool calls, without the markers that end the turn.
        undecided: The sentences that the report shows as "Not decided".

    Mutates: `undecided`. The reason is appended if the section is invalid.
    """
    has_opening_marker = bool(calls.markup.open.strip())
    try:
        if not has_opening_marker:  # Such a section cannot have a closing marker either.
            return ToolSection(calls.calls, separator=calls.markup.separator)
        return ToolSection(
            calls.calls,
            open=calls.markup.open,
            close=close.rstrip(),
            separator=calls.markup.separator,
        )
    except FormatError as error:
        undecided.append(f"The tool section is invalid: {error}")
        return None
