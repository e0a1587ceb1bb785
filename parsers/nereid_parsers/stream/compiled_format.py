"""Compiles a model's output format into the markers and regexes that the parser needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nereid_parsers.declarations import FormatData, Messages, Reasoning, Sections
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.compiled_calls import CompiledCalls, compile_calls
from nereid_parsers.stream.compiled_header import CompiledHeader
from nereid_parsers.stream.lexer import Lexer
from nereid_parsers.stream.marker_kinds import MarkerKind, marker_kinds, visible_markers
from nereid_parsers.tool_declarations import Call, JsonObject, ToolSection

_NO_MARKERS = Lexer(())  # A lexer that finds no marker in any text.


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """The compiled description of how a model writes reasoning, content and tool calls.

    Attributes:
        layout: The layout of the format.
        reasoning_markers: The lexer that finds the markers inside the reasoning.
        reasoning_closes: The lexer that finds the closing markers of the reasoning.
        content_markers: The lexer that finds the markers inside the content.
        content_only_markers: The lexer that finds markers in the state CONTENT_ONLY, in which the
            rest of the message is content. It finds only the markers around content and messages.
        content_kinds: The markers outside the reasoning, with the meaning of each marker.
        reasoning_kinds: The markers inside the reasoning, with the meaning of each marker.
        calls: The variants of a tool call. A variant is one of several ways to write a tool call.
        routes: The message headers.
        message_call: The declaration of a tool call that is a whole message. None if the format has
            no message headers.
        message_markers: The lexer that finds the markers that start or end a message. It finds no
            markers if the format has no message headers.
    """

    layout: Sections | Messages
    reasoning_markers: Lexer
    reasoning_closes: Lexer
    content_markers: Lexer
    content_only_markers: Lexer
    content_kinds: dict[str, MarkerKind]
    reasoning_kinds: dict[str, MarkerKind]
    calls: CompiledCalls
    routes: tuple[CompiledHeader, ...] = ()
    message_call: CompiledCall | None = None
    message_markers: Lexer = _NO_MARKERS

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
    reasoning. The result contains the compiled headers, and the markers that the parser searches
    for. Each dict `..._kinds` maps such markers to their meanings.
    """
    end_kinds = marker_kinds((*layout.ends, *fmt.ends), MarkerKind.END)  # Such as `<|end|>`.
    start_kinds = marker_kinds((layout.start,), MarkerKind.START_MESSAGE)
    boundary_kinds = end_kinds | start_kinds
    boundaries = Lexer(boundary_kinds)
    # The header shows whether a message is a tool call, so `{` in content does not start one.
    calls = compile_calls(layout.tools, allows_unmarked=False)
    content_kinds = calls.kinds | boundary_kinds
    message_call = _compile_message_call(layout)
    return CompiledFormat(
        layout=layout,
        # Reasoning is a separate message. It is closed by the end of the message, and not by a
        # marker such as `</think>`.
        reasoning_markers=boundaries,
        reasoning_kinds=boundary_kinds,
        reasoning_closes=_NO_MARKERS,
        content_markers=Lexer(content_kinds),
        content_kinds=content_kinds,
        content_only_markers=Lexer(end_kinds),
        calls=calls,
        routes=tuple(CompiledHeader(route, layout, message_call) for route in layout.routes),
        message_call=message_call,
        message_markers=boundaries,
    )


def _compile_message_call(layout: Messages) -> CompiledCall:
    """Compile the declaration of messages that are tool calls. Their headers name the function.

    `CompiledCall` requires a tool section, because arguments that are not valid JSON end at the
    closing markers of the section. Messages are not in a section, so the end markers of messages
    are passed as the closing markers of a section.
    """
    section = ToolSection((Call(JsonObject()),), also_close=layout.ends)
    call = Call(layout.body, head="{name}", open=layout.start, close=layout.call_end)
    return CompiledCall(call, section)


def _compile_sections(fmt: FormatData, layout: Sections) -> CompiledFormat:
    """Compile a format in which markers such as `<think>` and `</think>` enclose the reasoning.

    The result contains the markers that the parser searches for in each part of a message. A marker
    such as `<|end_message|>` may have several meanings. In each part, the last of these meanings
    applies:

        part           markers
        content only   the end of the turn, the markers around the content
        content        tool calls, the end and the start of reasoning, the markers of "content only"
        reasoning      the end of the turn, interrupting tool calls, the start of the content, the
                       start and the end of reasoning
    """
    reasoning = layout.reasoning
    wrapper = layout.content  # The markers around the content, or None.
    calls = compile_calls(layout.tools, allows_unmarked=True)
    opens = marker_kinds(reasoning.opens if reasoning else (), MarkerKind.OPEN_REASONING)
    closes = marker_kinds(reasoning.closes if reasoning else (), MarkerKind.CLOSE_REASONING)
    interrupts = marker_kinds(_interrupting_markers(reasoning, calls), MarkerKind.INTERRUPT)
    wrapper_opens = marker_kinds((wrapper.open,) if wrapper else (), MarkerKind.WRAP_CONTENT)
    wrapper_closes = marker_kinds((wrapper.close,) if wrapper else (), MarkerKind.WRAP_CONTENT)
    ends = marker_kinds(fmt.ends, MarkerKind.END)
    content_only_kinds = ends | wrapper_opens | wrapper_closes
    content_kinds = calls.kinds | closes | opens | content_only_kinds
    reasoning_kinds = ends | interrupts | wrapper_opens | opens | closes
    return CompiledFormat(
        layout=layout,
        reasoning_markers=Lexer(reasoning_kinds),
        reasoning_kinds=reasoning_kinds,
        reasoning_closes=Lexer(closes),
        content_markers=Lexer(content_kinds),
        content_kinds=content_kinds,
        content_only_markers=Lexer(content_only_kinds),
        calls=calls,
    )


def _interrupting_markers(reasoning: Reasoning | None, calls: CompiledCalls) -> list[str]:
    """Return the markers that may start a tool call inside the reasoning.

    Example: `["<call>"]`, because a model may write `<think>Hm<call>` without `</think>`. The
    result is [] if the format has no reasoning.
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
    """Return whether one marker, such as `<|end_message|>`, closes both reasoning and tool calls.

    In `<think>Hm<call>..<|end_message|>`, it is then unclear whether `<call>` starts a tool call or
    is quoted in the reasoning, because the last marker closes either of them.
    """
    reasoning_closes = set(visible_markers(reasoning.closes))
    call_closes = {marker for variant in calls.all for marker in variant.closing_markers}
    return bool(reasoning_closes & call_closes)
