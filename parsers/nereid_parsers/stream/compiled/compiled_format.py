"""Compiles a model's output format into the markers and regexes that the parser needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nereid_parsers.declarations import FormatData, Messages, Reasoning, Sections, Wrapper
from nereid_parsers.stream.compiled.compiled_call import CompiledCall, SectionMarkers
from nereid_parsers.stream.compiled.compiled_calls import CompiledCalls, compile_calls
from nereid_parsers.stream.compiled.compiled_header import CompiledHeader
from nereid_parsers.stream.lexer import Lexer
from nereid_parsers.stream.marker_kinds import MarkerKind, marker_kinds, visible_markers
from nereid_parsers.stream.pattern_matching import looks_like_markup
from nereid_parsers.tool_declarations import Call, ToolSection

_Kinds = dict[str, MarkerKind]  # Maps each marker to its meaning.


class MarkerLexer(Lexer):
    """Finds markers such as `</think>`, and contains the meaning of each marker.

    Attributes:
        kinds: The meaning of each marker. Example: `{"</think>": CLOSE_REASONING}`.
    """

    def __init__(self, kinds: _Kinds) -> None:
        """Create a lexer that finds the markers in `kinds`."""
        super().__init__(kinds)
        self.kinds = kinds


_NO_MARKERS = MarkerLexer({})  # A lexer that finds no marker in any text.


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """The compiled description of how a model writes reasoning, content and tool calls.

    Attributes:
        layout: The layout of the format.
        reasoning_markers: The markers inside the reasoning, and their meaning.
        reasoning_bounds: The opening and closing markers of the reasoning, and their meaning.
        content_markers: The markers outside the reasoning, and their meaning.
        content_only_markers: The markers in the state CONTENT_ONLY, in which the rest of the
            message is content. Only markers around content and messages have a meaning there.
        calls: The variants of a tool call. A variant is one of several ways to write a tool call.
        routes: The message headers.
        message_call: The declaration of a tool call that is a whole message. None if the format has
            no message headers.
        message_markers: The markers that start or end a message, if messages have headers.
    """

    layout: Sections | Messages
    reasoning_markers: MarkerLexer
    reasoning_bounds: MarkerLexer
    content_markers: MarkerLexer
    content_only_markers: Lexer
    calls: CompiledCalls
    routes: tuple[CompiledHeader, ...] = ()
    message_call: CompiledCall | None = None
    message_markers: MarkerLexer = _NO_MARKERS

    @property
    def reasoning(self) -> Reasoning | None:
        """The declaration of the markers around reasoning, or None if there are no such markers."""
        return self.layout.reasoning if isinstance(self.layout, Sections) else None

    @property
    def tools(self) -> ToolSection | None:
        """The declaration of tool calls inside messages. None if messages contain no calls."""
        return self.layout.tools

    @property
    def message_start(self) -> str:
        """The marker before a message header, or "" if messages have no headers."""
        return self.layout.start.strip() if isinstance(self.layout, Messages) else ""


@lru_cache(maxsize=512)
def compile_format(fmt: FormatData) -> CompiledFormat:
    """Compile the format of a model's output. The result is cached for equal formats."""
    if isinstance(fmt.layout, Messages):
        return _compile_messages(fmt, fmt.layout)
    return _compile_sections(fmt, fmt.layout)


def _compile_messages(fmt: FormatData, layout: Messages) -> CompiledFormat:
    """Compile a format in which each message has a header, such as `<|channel|>final<|message|>`.

    Example: `<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>` is a message with
    reasoning. The result contains the compiled headers, and these lexers:

        reasoning_markers, message_markers   find markers such as `<|start|>` and `<|end|>`
        content_markers                      also finds the markers of tool calls in the content
        content_only_markers                 finds only markers such as `<|end|>`
        reasoning_bounds                     finds nothing, because reasoning is a whole message
    """
    end_kinds = marker_kinds((*layout.ends, *fmt.ends), MarkerKind.END)  # Such as `<|end|>`.
    message_kinds = end_kinds | marker_kinds((layout.start,), MarkerKind.START_MESSAGE)
    message_markers = MarkerLexer(message_kinds)
    # The header shows whether a message is a tool call, so `{` in content does not start one.
    calls = compile_calls(layout.tools, end_kinds, allows_unmarked=False)
    message_call = _compile_message_call(layout)
    return CompiledFormat(
        layout=layout,
        reasoning_markers=message_markers,
        reasoning_bounds=_NO_MARKERS,
        content_markers=MarkerLexer(calls.kinds | message_kinds),
        content_only_markers=Lexer(end_kinds),
        calls=calls,
        routes=tuple(CompiledHeader(route, layout, message_call) for route in layout.routes),
        message_call=message_call,
        message_markers=message_markers,
    )


def _compile_message_call(layout: Messages) -> CompiledCall:
    """Compile a tool call that is a whole message, such as `<|start|>HEADER{"a": 1}<|call|>`.

    The header names the function, and a `CompiledHeader` matches this header. Arguments that are
    not valid JSON end at a marker that ends a message, such as `<|end|>`.
    """
    call = Call(layout.body, head="{name}", open=layout.start, close=layout.call_end)
    end_markers = tuple(visible_markers(layout.ends))
    return CompiledCall(call, SectionMarkers(opens=(), closes=end_markers))


def _compile_sections(fmt: FormatData, layout: Sections) -> CompiledFormat:
    """Compile a format in which markers such as `<think>` and `</think>` enclose the reasoning.

    The result contains four lexers, which find markers in different parts of a message:

        reasoning_markers      in the reasoning: for example `</think>` and `<call>`
        reasoning_bounds       after `<call>` in the reasoning: only `<think>` and `</think>`,
                               because these markers show whether `<call>` is a tool call
        content_markers        outside the reasoning: for example `<call>` and `<|end|>`
        content_only_markers   in content that no tool call may follow: for example `<|end|>`
    """
    end_kinds = marker_kinds(fmt.ends, MarkerKind.END)  # Such as `<|end|>`.
    calls = compile_calls(layout.tools, end_kinds, allows_unmarked=True)
    content_only_kinds = _kinds_in_content_only(layout.content, end_kinds)
    return CompiledFormat(
        layout=layout,
        reasoning_markers=MarkerLexer(_kinds_in_reasoning(layout, calls, end_kinds)),
        reasoning_bounds=MarkerLexer(_kinds_of_bounds(layout.reasoning)),
        content_markers=MarkerLexer(_kinds_in_content(layout, calls, content_only_kinds)),
        # The kind of these markers does not matter, because all of them are removed.
        content_only_markers=Lexer(content_only_kinds),
        calls=calls,
    )


def _kinds_of_bounds(reasoning: Reasoning | None) -> _Kinds:
    """Return the meaning of each marker around the reasoning.

    Example: `{"<think>": OPEN_REASONING, "</think>": CLOSE_REASONING}`.
    """
    # The parser uses this dict inside the reasoning. If one marker both opens and closes the
    # reasoning, it therefore has the meaning CLOSE_REASONING.
    return _opening_kinds(reasoning) | _closing_kinds(reasoning)


def _kinds_in_reasoning(layout: Sections, calls: CompiledCalls, end_kinds: _Kinds) -> _Kinds:
    """Return the meaning of each marker that the parser searches for inside the reasoning.

    Example: `{"<|end|>": END, "<call>": INTERRUPT, "<answer>": WRAP_CONTENT, "<think>":
    OPEN_REASONING, "</think>": CLOSE_REASONING}`. `end_kinds` contains the markers that end a
    message.
    """
    content_opens = (layout.content.open,) if layout.content else ()
    return _merge_lowest_priority_first(
        end_kinds,
        marker_kinds(_interrupting_markers(layout.reasoning, calls), MarkerKind.INTERRUPT),
        marker_kinds(content_opens, MarkerKind.WRAP_CONTENT),
        # These markers have the highest priority. If `<|end|>` both closes the reasoning and ends a
        # message, it closes the reasoning here, so the message continues with the content.
        _kinds_of_bounds(layout.reasoning),
    )


def _kinds_in_content_only(wrapper: Wrapper | None, end_kinds: _Kinds) -> _Kinds:
    """Return the meaning of each marker that the parser searches for in the state CONTENT_ONLY.

    In this state, the rest of the message is content. `wrapper` is the declaration of the markers
    around the content, and `end_kinds` contains the markers that end a message. Examples:

        `wrapper`                 markers in the result
        `<answer>`, `</answer>`   `<answer>`, `</answer>`, and the markers of `end_kinds`
        `Answer:`, `</answer>`    `</answer>`, and the markers of `end_kinds`
        None                      the markers of `end_kinds`
    """
    if wrapper is None:
        return end_kinds
    # Opening words, such as `Answer:`, may be ordinary text inside the content. Therefore, the
    # parser searches only for the closing marker there.
    opens_with_words = bool(_content_words(wrapper))
    markers = (wrapper.close,) if opens_with_words else (wrapper.open, wrapper.close)
    # One of the two markers may be empty. `marker_kinds` omits an empty marker.
    return end_kinds | marker_kinds(markers, MarkerKind.WRAP_CONTENT)


def _kinds_in_content(layout: Sections, calls: CompiledCalls, content_only_kinds: _Kinds) -> _Kinds:
    """Return the meaning of each marker that the parser searches for outside the reasoning.

    Example: `{"<call>": OPEN_CALL, "</think>": CLOSE_REASONING, "<think>": OPEN_REASONING,
    "Answer:": CONTENT_WORDS, "<|end|>": END}`. `content_only_kinds` contains the markers that end a
    message or enclose the content.
    """
    return _merge_lowest_priority_first(
        calls.kinds,
        _closing_kinds(layout.reasoning),
        # The opening markers have a higher priority than the closing markers: outside the
        # reasoning, a marker that both opens and closes the reasoning opens it.
        _opening_kinds(layout.reasoning),
        marker_kinds(_content_words(layout.content), MarkerKind.CONTENT_WORDS),
        content_only_kinds,
    )


def _merge_lowest_priority_first(*kinds_in_order: _Kinds) -> _Kinds:
    """Merge several dicts. Their priority increases from the first dict to the last dict.

    If several dicts contain the same marker, the last of these dicts determines its meaning.
    """
    merged: _Kinds = {}
    for kinds in kinds_in_order:
        merged |= kinds
    return merged


def _content_words(wrapper: Wrapper | None) -> tuple[str, ...]:
    """Return the words that precede the content, such as `Answer:`. Return () for a tag."""
    if wrapper is None or not wrapper.open.strip() or looks_like_markup(wrapper.open):
        return ()
    return (wrapper.open,)


def _opening_kinds(reasoning: Reasoning | None) -> _Kinds:
    """Return the markers that open the reasoning, such as `<think>`, with their meaning."""
    return marker_kinds(reasoning.opens if reasoning else (), MarkerKind.OPEN_REASONING)


def _closing_kinds(reasoning: Reasoning | None) -> _Kinds:
    """Return the markers that close the reasoning, such as `</think>`, with their meaning."""
    return marker_kinds(reasoning.closes if reasoning else (), MarkerKind.CLOSE_REASONING)


def _interrupting_markers(reasoning: Reasoning | None, calls: CompiledCalls) -> list[str]:
    """Return the markers that may start a tool call inside the reasoning.

    Example: `["<call>"]`, because a model may omit `</think>` and write `<think>Hm<call>`.
    """
    if reasoning is None:
        return []
    declared_markers = list(reasoning.interrupted_by)
    # Some formats close both the reasoning and tool calls with `<|end|>`. In these formats, the
    # reasoning `use <call> here<|end|>` looks like a tool call, because `<|end|>` follows `<call>`.
    # Therefore, only the declared markers may start a tool call inside the reasoning.
    if _have_common_close(reasoning, calls):
        return declared_markers
    opening_kinds = (MarkerKind.OPEN_CALL, MarkerKind.OPEN_SECTION)
    opening_markers = [marker for marker, kind in calls.kinds.items() if kind in opening_kinds]
    return declared_markers + opening_markers


def _have_common_close(reasoning: Reasoning, calls: CompiledCalls) -> bool:
    """Return whether the same marker closes both the reasoning and tool calls.

    Example: `<|end|>` closes the reasoning in `<think>Hm<|end|>`, and a tool call in
    `<call>..<|end|>`.
    """
    call_closes = {marker for variant in calls.all for marker in variant.closing_markers}
    return not call_closes.isdisjoint(visible_markers(reasoning.closes))
