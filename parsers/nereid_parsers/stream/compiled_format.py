"""Compiles a format into the markers, tool calls and message headers that the parser matches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from nereid_parsers.declarations import FormatData, Messages, Reasoning, Sections
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.compiled_call import CompiledCall, CompiledHeader
from nereid_parsers.stream.lexer import Lexer
from nereid_parsers.stream.pattern_matching import marker_spellings
from nereid_parsers.tool_declarations import Call, JsonArray, JsonObject, ToolSection

# The minimum length, in characters, of a closing marker that the parser recognises in content.
# Shorter markers, such as "}", are ignored, because such texts often occur in content.
_MIN_CLOSING_MARKER_CHARS = 4
# If the opening marker is missing, the parser recognises a tool call by the literal at the start of
# the header. This is the minimum length of the literal, in characters. Shorter texts often occur in
# content.
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
    WRAP_CONTENT      The content starts or ends. Inside the reasoning, only the start is a marker.
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
    """The compiled declarations of all variants of a tool call.

    Attributes:
        all: All variants, in the order in which they are tried.
        by_trigger: The variants that start with a marker. The keys are the markers.
        by_head: The variants that start with the header, because the model has omitted the opening
            marker. The keys are the first literals of the headers.
        unmarked: The variants that start without a marker.
        kinds: The meanings of the markers that belong to tool calls.
    """

    all: tuple[CompiledCall, ...] = ()
    by_trigger: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    by_head: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    unmarked: tuple[CompiledCall, ...] = ()
    kinds: dict[str, MarkerKind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """A format, compiled for the parser.

    Attributes:
        layout: The layout of the format.
        reasoning_markers: The lexer that finds the markers inside the reasoning.
        reasoning_closes: The lexer that finds the closing markers of the reasoning.
        content_markers: The lexer that finds the markers inside the content.
        outer_markers: The lexer for the markers that are removed even in the state CONTENT_ONLY.
        content_kinds: The meanings of the markers outside the reasoning.
        reasoning_kinds: The meanings of the markers inside the reasoning.
        calls: The variants of a tool call.
        routes: The message headers.
        message_call: The variant of a tool call that is a whole message, or None.
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

    The compiled format contains the markers for which the parser searches. Reasoning is a message
    of its own, so the only markers inside the reasoning are the markers that start or end a
    message. In the dicts, the keys are markers and the values are their meanings.
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
    """Compile the tool call of a layout in which each tool call is a message of its own.

    The header of such a message contains the function's name. The message is not in a tool section,
    but `CompiledCall` requires a section, because broken arguments end at the closing markers of a
    section. For messages, these closing markers are the end markers of messages.
    """
    section = ToolSection((Call(JsonObject()),), also_close=layout.ends)
    call = Call(layout.body, head="{name}", open=layout.start, close=layout.call_end)
    return CompiledCall(call, section)


def _compile_sections(fmt: FormatData, layout: Sections) -> CompiledFormat:
    """Compile a format in which markers enclose the reasoning, the content and the tool calls.

    The compiled format contains the markers for which the parser searches. In the dicts, the keys
    are markers and the values are their meanings.
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
    # If a format declares one text as several markers, the last dict in each union decides the
    # meaning of the text. An end-of-turn token in the content always ends the turn. A text that
    # both opens and closes the reasoning opens the reasoning when the parser reads content, and
    # closes the reasoning when the parser reads reasoning.
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
    """Return a dict whose keys are all spellings of the markers. Each value is `kind`.

    White space around the markers is removed. For the spellings see `marker_spellings`.
    """
    kinds: dict[str, MarkerKind] = {}
    for marker in _visible(markers):
        kinds |= dict.fromkeys(marker_spellings(marker), kind)
    return kinds


def _interrupting_markers(reasoning: Reasoning | None, calls: CompiledCalls) -> list[str]:
    """Return the markers that may start a tool call inside the reasoning.

    These are the declared markers, and usually also all opening markers of tool calls and tool
    sections. Example: `["<tool_call>"]`. The result is [] if the format has no reasoning.

    In some formats, one marker closes both the reasoning and a tool call, for example
    `<|end_message|>`. After an undeclared opening marker, this marker would not show whether the
    tool call or the whole reasoning ends. For such formats, only the declared markers are returned.
    """
    if reasoning is None:
        return []
    declared_markers = list(reasoning.interrupted_by)
    reasoning_closes = set(_visible(reasoning.closes))
    call_closes = {marker for variant in calls.all for marker in variant.closing_markers}
    shares_closing_marker = bool(reasoning_closes & call_closes)
    if shares_closing_marker:
        return declared_markers
    opening_kinds = (MarkerKind.OPEN_CALL, MarkerKind.OPEN_SECTION)
    opening_markers = [marker for marker, kind in calls.kinds.items() if kind in opening_kinds]
    return declared_markers + opening_markers


def _visible(markers: Iterable[str]) -> Iterator[str]:
    r"""Yield the markers without surrounding white space. Omit markers that are only white space.

    Example: `("<a>\n", "\n")` yields `"<a>"`.
    """
    return (marker.strip() for marker in markers if marker.strip())


def _compile_calls(tools: ToolSection | None, *, allows_unmarked: bool) -> CompiledCalls:
    """Compile all variants of a tool call, and group the variants by the text that starts them.

    A variant is one of several ways in which the model may write a tool call. The parser searches
    for the first text of each variant, such as `<tool_call>`, and then tries the variants that
    start with this text.

    Args:
        tools: The declaration of the tool calls, or None if the content contains no tool calls.
        allows_unmarked: Whether a tool call without a marker may start in the content. If markers
            surround the tool section, such a tool call never starts in the content.
    """
    if tools is None:
        return CompiledCalls()
    variants = [CompiledCall(call, tools) for call in _with_json_variants(tools.calls)]
    may_be_unmarked = allows_unmarked and not tools.opens
    unmarked = [variant for variant in variants if may_be_unmarked and variant.is_unmarked]
    by_trigger = _group_by_trigger(_variants_in_content(variants, tools))
    # If a text starts a variant with a marker and a variant without its marker, the first variant
    # has precedence.
    groups_without_marker = _group_by_trigger(_variants_without_marker(tools))
    by_head = {
        head_start: group
        for head_start, group in groups_without_marker.items()
        if head_start not in by_trigger
    }
    kinds = dict.fromkeys(by_head, MarkerKind.CALL_HEAD)
    kinds |= _call_kinds(tools, variants, by_trigger, unmarked)
    return CompiledCalls(
        all=tuple(variants),
        by_trigger=by_trigger,
        by_head=by_head,
        unmarked=tuple(unmarked),
        kinds=kinds,
    )


def _variants_in_content(variants: list[CompiledCall], tools: ToolSection) -> list[CompiledCall]:
    """Return the variants of tool calls that may start outside a tool section.

    If the format declares no tool section, these are all variants. Otherwise a model may omit the
    opening marker of the section, and a tool call may start in the content if the tool call itself
    has an opening marker.
    """
    has_section_marker = bool(tools.opens)
    if not has_section_marker:
        return variants
    return [variant for variant in variants if variant.call.open.strip()]


def _variants_without_marker(tools: ToolSection) -> Iterator[CompiledCall]:
    """Yield the variants of tool calls whose opening marker the model may omit.

    Such a variant starts with the header. The omitted marker is the opening marker of the tool call
    or of the tool section. Example: the declaration `<tool_call><function={name}>..</tool_call>`
    gives the variant `<function={name}>..</tool_call>`.
    """
    for call in tools.calls:
        has_marker = bool(call.open.strip() or tools.opens)
        if has_marker and _has_tag_in_head(call):
            yield CompiledCall(replace(call, open=""), tools, omits_marker=True)


def _with_json_variants(calls: tuple[Call, ...]) -> list[Call]:
    """Return the declared variants of a tool call, followed by additional JSON variants.

    Models sometimes write an array, `[{"name": "f", ..}]`, if the format declares an object,
    `{"name": "f", ..}`. Models also write an object if the format declares an array.
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
    """Return a dict that maps each marker to the variants that start with this marker.

    Example: `{"<tool_call>": (variant,)}`. Each spelling that `marker_spellings` returns for a
    marker is a key.
    """
    by_trigger: dict[str, tuple[CompiledCall, ...]] = {}
    for variant in variants:
        spellings = marker_spellings(variant.call.trigger) if variant.call.trigger else ()
        for trigger in spellings:
            by_trigger[trigger] = (*by_trigger.get(trigger, ()), variant)
    return by_trigger


def _call_kinds(
    tools: ToolSection,
    variants: Iterable[CompiledCall],
    opening_markers: Iterable[str],
    unmarked: Iterable[CompiledCall],
) -> dict[str, MarkerKind]:
    """Return a dict of the markers that belong to tool calls. Each value is the kind of the marker.

    Example: `{"<tool_call>": OPEN_CALL, "</tool_call>": CLOSE_CALLS}`. If one text has several
    kinds, the last kind that is assigned below applies. A variant is one of several ways in
    which the model may write a tool call.

    Args:
        tools: The declaration of the tool calls.
        variants: All variants of a tool call.
        opening_markers: The markers with which a tool call may start in the content.
        unmarked: The variants that start without a marker in the content.
    """
    kinds = dict.fromkeys(_long_closing_markers(variants), MarkerKind.CLOSE_CALLS)
    for variant in unmarked:
        kinds |= dict.fromkeys(variant.body_openings(), MarkerKind.UNMARKED_CALL)
    kinds |= dict.fromkeys(tools.closes, MarkerKind.CLOSE_CALLS)
    kinds |= dict.fromkeys(opening_markers, MarkerKind.OPEN_CALL)
    kinds |= _kinds(tools.opens, MarkerKind.OPEN_SECTION)
    return kinds


def _long_closing_markers(variants: Iterable[CompiledCall]) -> list[str]:
    """Return the closing markers of the variants, without short markers such as `}`.

    Content often contains such short texts.
    """
    return [
        marker
        for variant in variants
        for marker in variant.closing_markers
        if len(marker) >= _MIN_CLOSING_MARKER_CHARS
    ]
