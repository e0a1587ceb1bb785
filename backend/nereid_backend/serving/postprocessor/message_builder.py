# SPDX-License-Identifier: Apache-2.0
"""Parses the text of a choice into reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nereid_parsers import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Format,
    ReasoningDelta,
    Stage,
    StreamParser,
    ToolCallStart,
)
from nereid_parsers.format import Sections, Shown, UnknownTool

from nereid_backend.serving.wire import StreamContext

# No model can call this tool, because the name of the tool is a null character, which no model
# generates. If the parser knows only this tool, every tool call in the output is a call of an
# unknown tool.
_UNCALLABLE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "\0"}}


class PlainMessage:
    """A message that consists only of content. Reasoning and tool calls are not parsed.

    The class has the same attributes as ParsedMessage.
    """

    has_calls = False
    reads_reasoning = False
    is_reasoning = False

    def __init__(self) -> None:
        self._new_content: list[str] = []

    def feed(self, text: str) -> None:
        """Add text."""
        self._new_content.append(text)

    def finish(self) -> None:
        """Do nothing, because `feed` adds all text at once."""

    def take(self) -> dict[str, Any]:
        """Return the new content, such as {"content": "Hi"}, or {} if there is no new content."""
        content = "".join(self._new_content)
        self._new_content.clear()
        return {"content": content} if content else {}


class ParsedMessage:
    """A message whose text is parsed with a chat format.

    Example: for a format with <think> and </think> around reasoning, `feed` gets the text
    "<think>Add them.</think>It is 3." Then `take` returns
    {"reasoning": "Add them.", "content": "It is 3."}.

    Attributes:
        has_calls: whether the text so far contains the beginning of a tool call.
        reads_reasoning: whether the format has reasoning. If so, `feed` must be called for each
            single token, so that the number of reasoning tokens is exact.
    """

    def __init__(self, fmt: Format, context: StreamContext) -> None:
        """Initialise an empty message.

        Args:
            fmt: the chat format of the checkpoint.
            context: the data of the request that the postprocessor needs. Here, the tools, the end
                of the prompt, and the options for reasoning and tool calls are used.
        """
        self._context = context
        # Depending on the options of the request, the format `adapted` leaves reasoning or tool
        # calls in the content.
        adapted = _adapt_format(fmt, context)
        self._parser = StreamParser(adapted, tools=_callable_tools(context), prompt=context.prompt)
        self.reads_reasoning = _has_reasoning(adapted)
        self.has_calls = False
        # The fields of the next delta: the new parts of the reasoning and of the content, and the
        # tool calls by their index.
        self._new_texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._new_calls: dict[int, dict[str, Any]] = {}
        self._copied_marker = _marker_to_copy(adapted, context, self._parser)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""
        return self._parser.stage is Stage.REASONING

    def feed(self, text: str) -> None:
        """Add text."""
        self._add(self._parser.feed(text))

    def finish(self) -> None:
        """Tell the parser that the text has ended, and add the remaining events."""
        self._add(self._parser.finish())

    def take(self) -> dict[str, Any]:
        """Return the new parts of `reasoning`, `content` and `tool_calls` since the last call.

        Fields without a new part are left out. Only the first delta of a tool call contains its id
        and its name. Example: the first call returns {"tool_calls": [{"index": 0, "id": "a1",
        "name": "add", "arguments": '{"x"'}]}. The second call returns {"tool_calls": [{"index": 0,
        "arguments": ": 1}"}]}.
        """
        texts = {name: "".join(parts) for name, parts in self._new_texts.items()}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if self._new_calls:
            delta["tool_calls"] = list(self._new_calls.values())
        self._new_texts = {"reasoning": [], "content": []}
        self._new_calls = {}
        return delta

    def _add(self, events: Iterable[Event]) -> None:
        """Add the reasoning, the content and the tool calls in `events` to the next delta.

        If the request's option `separate_reasoning` is False, add reasoning to the content. If the
        option is True and `include_reasoning` is False, drop reasoning.
        """
        for event in events:
            match event:
                case ReasoningDelta(text):
                    if not self._context.separate_reasoning:
                        self._add_content(text)
                    elif self._context.include_reasoning:
                        self._new_texts["reasoning"].append(text)
                case ContentDelta(text):
                    self._add_content(text)
                case ToolCallStart(index, id=call_id, name=name):
                    self.has_calls = True
                    self._new_call(index).update(id=call_id, name=name)
                case ArgumentsDelta(index, text):
                    self._new_call(index)["arguments"] += text

    def _add_content(self, text: str) -> None:
        """Add a text to the content.

        Remove the marker, such as "<think>", that the parser has copied from the prompt, because a
        response contains only generated text. Only the first text can begin with this marker.
        """
        self._new_texts["content"].append(text.removeprefix(self._copied_marker))
        self._copied_marker = ""

    def _new_call(self, index: int) -> dict[str, Any]:
        """Return the entry of the next delta for the tool call with the index `index`.

        Create the entry if it is missing.
        """
        return self._new_calls.setdefault(index, {"index": index, "arguments": ""})


Message = PlainMessage | ParsedMessage


def _callable_tools(context: StreamContext) -> list[dict[str, Any]]:
    """Return the tools for the parser. The parser treats calls of all other tools as unknown.

    If the client forbids tool calls (`reads_calls` is False), every call in the output must be
    unknown, because the parser then leaves the call in the content. In this case, return only the
    tool `_UNCALLABLE_TOOL`, whose name no model can generate.
    """
    return [dict(tool) for tool in context.tools] if context.reads_calls else [_UNCALLABLE_TOOL]


def _has_reasoning(fmt: Format) -> bool:
    """Return whether a chat format separates reasoning from content.

    A format with the layout `Sections` can have markers around the reasoning. In the other layout,
    `Messages`, the reasoning is always a separate message.
    """
    return not isinstance(fmt.layout, Sections) or fmt.layout.reasoning is not None


def _marker_to_copy(fmt: Format, context: StreamContext, parser: StreamParser) -> str:
    """Return the marker that the parser copies from the end of the prompt to the content.

    The parser copies the marker if the prompt opens the reasoning, and the reasoning stays in the
    content. Example: the prompt ends with "<think>", and the model generates "a</think>b". The
    parser returns "<think>a</think>b", so that the markers form a pair. In all other cases, the
    result is "".

    `parser` has not read any text after the prompt.
    """
    prompt_opens_reasoning = parser.stage is Stage.REASONING
    if prompt_opens_reasoning and not context.separate_reasoning:
        return _opening_marker(fmt)
    return ""


def _opening_marker(fmt: Format) -> str:
    """Return the marker before the reasoning, such as "<think>"; "" if the format has no marker."""
    layout = fmt.layout
    if not isinstance(layout, Sections) or layout.reasoning is None:
        return ""
    return layout.reasoning.open.strip()


def _adapt_format(fmt: Format, context: StreamContext) -> Format:
    """Return the chat format `fmt`, adapted to the options `separate_reasoning` and `reads_calls`.

    If `separate_reasoning` is False, the result leaves reasoning in the content. If `reads_calls`
    is False, the result leaves tool calls in the content.
    """
    if not context.separate_reasoning:
        fmt = _with_inline_reasoning(fmt)
    return fmt if context.reads_calls else _without_calls(fmt)


def _with_inline_reasoning(fmt: Format) -> Format:
    """Return a chat format whose parser leaves reasoning and its markers in the content.

    A format without markers around reasoning is returned unchanged.
    """
    layout = fmt.layout
    if not isinstance(layout, Sections) or layout.reasoning is None:
        return fmt
    reasoning = replace(layout.reasoning, shown=Shown.INLINE)
    return replace(fmt, layout=replace(layout, reasoning=reasoning))


def _without_calls(fmt: Format) -> Format:
    """Return a chat format whose parser leaves tool calls in the content."""
    fmt = fmt.with_policy(replace(fmt.policy, unknown_tool=UnknownTool.CONTENT))
    return replace(fmt, layout=replace(fmt.layout, tools=None))
