"""Compiles a format into the markers, tool calls and message headers that the parser matches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from nereid_parsers.declarations import FormatData, Messages, Reasoning, Sections
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.compiled_header import CompiledHeader
from nereid_parsers.stream.lexer import Lexer
from nereid_parsers.stream.pattern_matching import marker_spellings
from nereid_parsers.tool_declarations import Call, JsonArray, JsonObject, ToolSection

# The minimum length, in characters, of a closing marker that the parser recognises in content.
# Shorter markers, such as "}", are ignored, because such texts often occur in content.
_MIN_CLOSING_MARKER_CHARS = 4
# If the opening marker is missing, the parser recognises a tool call by the first literal of the
# header, for example `<function=`. The literal must have at least this number of characters,
# because shorter texts often occur in content.
_MIN_HEAD_MARKER_CHARS = 8


class MarkerKind(Enum):
    """The meaning of a marker.

    OPEN_REASONING    The reasoning starts.
    CLOSE_REASONING   The reasoning ends.
    INTERRUPT         A tool call starts inside the reasoning, and ends the reasoning.
    OPEN_SECTION      A section of tool calls starts.
    OPEN_CALL         A tool call starts.
    CALL_HEAD         The header of a tool call starts. The model has omitted the marker before it.
    UNMARKED_CALL     A tool call without a marker starts with this text.
    CLOSE_CALLS       A tool call or a section of tool calls ends.
    WRAP_CONTENT      The content starts or ends. Inside the reasoning, the content can only start.
    START_MESSAGE     A message starts.
    END               A message or the model's turn ends.
    """

    OPEN_REASONING = "open_reasoning"
    CLOSE_REASONING = "close_reasoning"
    INTERRUPT = "interrupt"
    OPEN_SECTION = "open_section"
    OPEN_CALL = "open_call"
    CALL_HEAD = "call_head"
    UNMARKED_CALL = "unmarked_call"
    CLOSE_CALLS = "close_calls"
    WRAP_CONTENT = "wrap_content"
    START_MESSAGE = "start_message"
    END = "end"


@dataclass(frozen=True, slots=True)
class CompiledCalls:
    """The compiled variants of a tool call, grouped by the text with which a variant starts.

    A variant is one of several ways in which the model may write a tool call. The parser searches
    for the first text of each variant, and then tries the variants that start with this text.

    Attributes:
        all: All declared variants, in the order in which the parser tries them.
        by_trigger: The variants that start with a marker, as in `<call><function=sum>`. The keys
            are the markers, here `<call>`.
        by_head: The variants that start with the header, because the model has omitted the marker,
            as in `<function=sum>`. The keys are the first literals of the headers, here
            `<function=`.
        unmarked: The variants for which the format declares no marker, as in `{"name": "sum"}`.
        kinds: The markers of tool calls, with the meaning of each marker.
    """

    all: tuple[CompiledCall, ...] = ()
    by_trigger: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    by_head: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    unmarked: tuple[CompiledCall, ...] = ()
    kinds: dict[str, MarkerKind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """A format in the compiled form that the stream parser uses.

    Attributes:
        layout: The layout of the format.
        reasoning_markers: The lexer that finds the markers inside the reasoning.
        reasoning_closes: The lexer that finds the closing markers of the reasoning.
        content_markers: The lexer that finds the markers inside the content.
        outer_markers: The lexer that finds the markers around messages and content. The parser
            removes these markers even if the rest of the message is content (CONTENT_ONLY).
        content_kinds: The markers outside the reasoning, with the meaning of each marker.
        reasoning_kinds: The markers inside the reasoning, with the meaning of each marker.
        calls: The variants of a tool call. A variant is one of several ways to write a tool call.
        routes: The message headers.
        message_call: The declaration of a tool call that is a whole message. None if the format has
            no message headers.
    """

    layout: Sections | Messages
    reasoning_markers: Lexer
    reasoning_closes: Lexer
    content_markers: Lexer
    outer_markers: Lexer
    content_kinds: dict[str, MarkerKind]
    reasoning_kinds: dict[str, MarkerKind]
    calls: CompiledCalls
    routes: tuple[CompiledHeader, ...] = ()
    message_call: CompiledCall | None = None

    @property
    def reasoning(self) -> Reasoning | None:
        """Describes how a model writes reasoning. None if the format has no reasoning."""
        return self.layout.reasoning if isinstance(self.layout, Sections) else None

    @property
    def tools(self) -> ToolSection | None:
        """Describes how a model writes tool calls. None if the format has no tool calls."""
        return self.layout.tools

    @property
    def message_start(self) -> str:
        """The marker before the header of a message. "" if the layout is not `Messages`."""
        return self.layout.start.strip() if isinstance(self.layout, Messages) else ""


@lru_cache(maxsize=512)
def compile_format(fmt: FormatData) -> CompiledFormat:
    """Compile a format. Equal formats share one compiled format from the cache."""
    if isinstance(fmt.layout, Messages):
        return _compile_messages(fmt, fmt.layout)
    return _compile_sections(fmt, fmt.layout)


def _compile_messages(fmt: FormatData, layout: Messages) -> CompiledFormat:
    """Compile a format in which the model's output is a sequence of messages with headers.

    Example: `<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>` is a message with
    reasoning. The result contains the compiled headers, and the markers for which the parser
    searches. Reasoning is a separate message, so the parser searches inside the reasoning only for
    the markers that start or end a message, here `<|start|>assistant` and `<|end|>`.
    """
    ends = _kinds((*layout.ends, *fmt.ends), MarkerKind.END)
    message_kinds = ends | _kinds((layout.start,), MarkerKind.START_MESSAGE)
    calls = _compile_calls(layout.tools, allows_unmarked=False)
    content_kinds = calls.kinds | message_kinds
    message_call = _compile_message_call(layout)
    return CompiledFormat(
        layout=layout,
        reasoning_markers=Lexer(message_kinds),
        reasoning_closes=Lexer(()),
        content_markers=Lexer(content_kinds),
        outer_markers=Lexer(ends),
        content_kinds=content_kinds,
        reasoning_kinds=message_kinds,
        calls=calls,
        routes=tuple(CompiledHeader(route, layout, message_call) for route in layout.routes),
        message_call=message_call,
    )


def _compile_message_call(layout: Messages) -> CompiledCall:
    """Compile the tool call of a layout in which each tool call is a separate message.

    The header of such a message contains the function's name. `CompiledCall` requires a tool
    section, because arguments that are not valid JSON end at the closing markers of the section.
    Messages are not in a section, so the end markers of messages are passed as the closing markers
    of a section.
    """
    section = ToolSection((Call(JsonObject()),), also_close=layout.ends)
    call = Call(layout.body, head="{name}", open=layout.start, close=layout.call_end)
    return CompiledCall(call, section)


def _compile_sections(fmt: FormatData, layout: Sections) -> CompiledFormat:
    """Compile a format in which markers enclose the reasoning, the content and the tool calls.

    The result contains the markers for which the parser searches. Example: for the text
    `<think>Hm</think>Hi<call>..</call><|end|>`, these markers are

        reasoning_kinds  {"</think>": CLOSE_REASONING, "<think>": OPEN_REASONING,
                         "<call>": INTERRUPT, "<|end|>": END}
        content_kinds    {"<think>": OPEN_REASONING, "</think>": CLOSE_REASONING,
                         "<call>": OPEN_CALL, "</call>": CLOSE_CALLS, "<|end|>": END}
        outer_kinds      {"<|end|>": END}, and the markers around the content if there are any
    """
    reasoning = layout.reasoning
    wrapper = layout.content  # The markers around the content, or None.
    calls = _compile_calls(layout.tools, allows_unmarked=True)
    opens = _kinds(reasoning.opens if reasoning else (), MarkerKind.OPEN_REASONING)
    closes = _kinds(reasoning.closes if reasoning else (), MarkerKind.CLOSE_REASONING)
    interrupts = _kinds(_interrupting_markers(reasoning, calls), MarkerKind.INTERRUPT)
    wrapper_opens = _kinds((wrapper.open,) if wrapper else (), MarkerKind.WRAP_CONTENT)
    wrapper_closes = _kinds((wrapper.close,) if wrapper else (), MarkerKind.WRAP_CONTENT)
    ends = _kinds(fmt.ends, MarkerKind.END)
    # If several dicts of a union contain one marker, the last of these dicts decides its meaning.
    # Example: a marker that both opens and closes the reasoning has the meaning OPEN_REASONING in
    # `content_kinds`, and CLOSE_REASONING in `reasoning_kinds`.
    outer_kinds = ends | wrapper_opens | wrapper_closes
    content_kinds = calls.kinds | closes | opens | outer_kinds
    reasoning_kinds = ends | interrupts | wrapper_opens | opens | closes
    return CompiledFormat(
        layout=layout,
        reasoning_markers=Lexer(reasoning_kinds),
        reasoning_closes=Lexer(closes),
        content_markers=Lexer(content_kinds),
        outer_markers=Lexer(outer_kinds),
        content_kinds=content_kinds,
        reasoning_kinds=reasoning_kinds,
        calls=calls,
    )


def _kinds(markers: Iterable[str], kind: MarkerKind) -> dict[str, MarkerKind]:
    """Return a dict that maps each spelling of each marker to `kind`.

    The spellings of a marker differ in their white space, see `marker_spellings`. White space
    around a marker is removed. Example: for the marker `<a>b` and the kind END, the result contains
    `{"<a>b": END, "<a> b": END}`.
    """
    kinds: dict[str, MarkerKind] = {}
    for marker in _visible(markers):
        kinds |= dict.fromkeys(marker_spellings(marker), kind)
    return kinds


def _interrupting_markers(reasoning: Reasoning | None, calls: CompiledCalls) -> list[str]:
    """Return the markers that may start a tool call inside the reasoning.

    Example: `["<call>"]`, because a model may write `<think>Hm<call>` without `</think>`. The
    result contains the markers that the format declares for this purpose. The result also contains
    the opening markers of all tool calls and tool sections, unless one marker closes both the
    reasoning and a tool call. The result is [] if the format has no reasoning.
    """
    if reasoning is None:
        return []
    declared_markers = list(reasoning.interrupted_by)
    if _shares_closing_marker(reasoning, calls):
        return declared_markers
    opening_kinds = (MarkerKind.OPEN_CALL, MarkerKind.OPEN_SECTION)
    opening_markers = [marker for marker, kind in calls.kinds.items() if kind in opening_kinds]
    return declared_markers + opening_markers


def _shares_closing_marker(reasoning: Reasoning, calls: CompiledCalls) -> bool:
    """Return whether one marker, such as `<|end_message|>`, closes reasoning and also tool calls.

    After the start of a tool call inside the reasoning, the text up to this marker would be
    ambiguous: the marker ends either the tool call or the whole reasoning.
    """
    reasoning_closes = set(_visible(reasoning.closes))
    call_closes = {marker for variant in calls.all for marker in variant.closing_markers}
    return bool(reasoning_closes & call_closes)


def _visible(markers: Iterable[str]) -> Iterator[str]:
    r"""Yield the markers without surrounding white space. Omit markers that are only white space.

    Example: `("<a>\n", "\n")` yields `"<a>"`.
    """
    return (marker.strip() for marker in markers if marker.strip())


def _compile_calls(tools: ToolSection | None, *, allows_unmarked: bool) -> CompiledCalls:
    """Compile the variants of a tool call, and group the variants by their first text.

    A variant is one of several ways in which the model may write a tool call. The parser searches
    for the first text of each variant, and then tries the variants that start with this text.
    Examples of the groups:

        group       tool call in this group             first text
        by_trigger  `<call><function=sum>..</call>`     `<call>`, the declared marker
        by_head     `<function=sum>..</call>`           `<function=`, because `<call>` is missing
        unmarked    `{"name": "sum", ..}`               `{`, because no marker is declared

    Args:
        tools: The declaration of the tool calls, or None if the content contains no tool calls.
        allows_unmarked: Whether the group `unmarked` may contain variants. The group is always
            empty if markers enclose the tool calls of a message.
    """
    if tools is None:
        return CompiledCalls()
    variants = [CompiledCall(call, tools) for call in _with_json_variants(tools.calls)]
    by_trigger = _group_by_trigger(_variants_in_content(variants, tools))
    by_head = _group_by_trigger(_variants_without_marker(tools))
    for text in by_trigger:  # If a text is in both groups, only `by_trigger` is used.
        by_head.pop(text, None)
    may_be_unmarked = allows_unmarked and not tools.opens
    unmarked = [variant for variant in variants if may_be_unmarked and variant.is_unmarked]
    calls = CompiledCalls(
        all=tuple(variants), by_trigger=by_trigger, by_head=by_head, unmarked=tuple(unmarked)
    )
    return replace(calls, kinds=_call_kinds(tools, calls))


def _variants_in_content(variants: list[CompiledCall], tools: ToolSection) -> list[CompiledCall]:
    """Return the variants of a tool call that may start in the content.

    Some formats enclose all tool calls of a message in a tool section, as in
    `<calls><call>..</call></calls>`. A model may omit the marker `<calls>`. The tool call `<call>`
    then starts in the content, so variants with an opening marker are returned. Variants without an
    opening marker start only inside the section. If the format has no tool section, all variants
    are returned.
    """
    has_section_marker = bool(tools.opens)
    if not has_section_marker:
        return variants
    return [variant for variant in variants if variant.call.open.strip()]


def _variants_without_marker(tools: ToolSection) -> Iterator[CompiledCall]:
    """Yield a variant without the opening marker for each tool call whose marker may be missing.

    A model may omit the opening marker of a tool call or of a tool section, and start with the
    header. Example: the declaration `<tool_call><function={name}>..</tool_call>` gives the variant
    `<function={name}>..</tool_call>`. A header such as `{name}` does not show that a tool call
    starts, so a tool call with this header gives no variant.
    """
    for call in tools.calls:
        has_marker = bool(call.open.strip() or tools.opens)
        if has_marker and _has_tag_in_head(call):
            yield CompiledCall(replace(call, open=""), tools, omits_marker=True)


def _with_json_variants(calls: tuple[Call, ...]) -> list[Call]:
    """Return the declared variants of a tool call, followed by additional JSON variants.

    A model sometimes writes an array, `[{"name": "f", ..}]`, although the format declares an
    object, `{"name": "f", ..}`, or the reverse. Example: if only an object is declared, the result
    contains the declaration of the object, and then the declaration of an array of such objects.
    """
    json_variants: list[Call] = []
    for call in calls:
        if isinstance(call.body, JsonObject):
            json_variants.append(replace(call, body=JsonArray(call.body.keys)))
        elif isinstance(call.body, JsonArray):
            json_variants.append(replace(call, body=JsonObject(call.body.keys)))
    without_duplicates = dict.fromkeys((*calls, *json_variants))
    return list(without_duplicates)


def _has_tag_in_head(call: Call) -> bool:
    """Return whether the first tag of the header alone identifies a tool call.

    Examples: the result is True for `<function={name}>`, and False for `{name}`.
    """
    literal = first_literal(call.head)
    is_tag = "<" in literal and not literal[0].isalnum()
    return is_tag and len(literal) >= _MIN_HEAD_MARKER_CHARS


def _group_by_trigger(variants: Iterable[CompiledCall]) -> dict[str, tuple[CompiledCall, ...]]:
    """Return a dict that maps the first text of a tool call to the variants that start with it.

    The first text (the trigger) is the opening marker, or the first literal of the header if there
    is no marker. Variants without a trigger are omitted. A key is one spelling of a trigger: the
    spellings differ in their white space, see `marker_spellings`. Example: two variants with the
    marker `<call>` give `{"<call>": (variant_1, variant_2)}`.
    """
    by_trigger: dict[str, tuple[CompiledCall, ...]] = {}
    for variant in variants:
        spellings = marker_spellings(variant.call.trigger) if variant.call.trigger else ()
        for trigger in spellings:
            by_trigger[trigger] = (*by_trigger.get(trigger, ()), variant)
    return by_trigger


def _call_kinds(tools: ToolSection, calls: CompiledCalls) -> dict[str, MarkerKind]:
    """Return the markers of tool calls. Each key is a marker, and each value is its meaning.

    The parser searches the content for these markers. Example:
    `{"<tool_call>": OPEN_CALL, "</tool_call>": CLOSE_CALLS}`.

    Args:
        tools: The declaration of the tool calls.
        calls: The variants of a tool call, grouped by the texts with which the variants start. The
            attribute `kinds` is not used.
    """
    first_texts = [text for variant in calls.unmarked for text in variant.body_openings()]
    # If a marker is in several dicts, the last of these dicts decides the meaning of the marker.
    return {
        **dict.fromkeys(calls.by_head, MarkerKind.CALL_HEAD),
        **dict.fromkeys(_long_closing_markers(calls.all), MarkerKind.CLOSE_CALLS),
        **dict.fromkeys(first_texts, MarkerKind.UNMARKED_CALL),
        **dict.fromkeys(tools.closes, MarkerKind.CLOSE_CALLS),
        **dict.fromkeys(calls.by_trigger, MarkerKind.OPEN_CALL),
        **_kinds(tools.opens, MarkerKind.OPEN_SECTION),
    }


def _long_closing_markers(variants: Iterable[CompiledCall]) -> list[str]:
    """Return the closing markers of the variants, except short markers such as `}`.

    A marker is short if it has fewer than `_MIN_CLOSING_MARKER_CHARS` characters. Such a text often
    occurs in content, where it closes no tool call.
    """
    return [
        marker
        for variant in variants
        for marker in variant.closing_markers
        if len(marker) >= _MIN_CLOSING_MARKER_CHARS
    ]
