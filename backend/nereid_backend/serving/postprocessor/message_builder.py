# SPDX-License-Identifier: Apache-2.0
"""Parses the text of a choice into reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

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

# A tool whose name no model writes. If it is the only tool, every call has an unknown name.
_UNCALLABLE_TOOL = {"type": "function", "function": {"name": "\0"}}


class MessageBuilder(Protocol):
    """Converts text to the fields of a delta.

    Attributes:
        has_calls: whether the text has the beginning of a tool call.
        reads_reasoning: whether reasoning is separated from content. The text must then be fed
            token by token, so that the number of reasoning tokens is exact.
    """

    has_calls: bool
    reads_reasoning: bool

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""

    def feed(self, text: str) -> None:
        """Add text."""

    def finish(self) -> None:
        """Parse the text that was held back. No more text follows."""

    def take(self) -> dict[str, Any]:
        """Return the new fields of a delta since the last call: reasoning, content, tool_calls."""


class PlainMessage:
    """A message whose text is all content."""

    has_calls = False
    reads_reasoning = False
    is_reasoning = False

    def __init__(self) -> None:
        self._text: list[str] = []

    def feed(self, text: str) -> None:
        """Add text."""
        self._text.append(text)

    def finish(self) -> None:
        """Do nothing, because no text is held back."""

    def take(self) -> dict[str, Any]:
        """Return the content since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return {"content": text} if text else {}


class ParsedMessage:
    """A message whose text is parsed with a chat format.

    Args:
        fmt: the chat format of the checkpoint.
        context: the part of the request that the postprocessor needs. The tools, the end of the
            prompt and the options for reasoning and tool calls are used here.
    """

    def __init__(self, fmt: Format, context: StreamContext) -> None:
        tools = [dict(tool) for tool in context.tools]
        if not context.separate_reasoning:
            fmt = _with_reasoning_inline(fmt)
        if not context.reads_calls:
            fmt = _without_calls(fmt)
            tools = [_UNCALLABLE_TOOL]
        self._parser = StreamParser(fmt, tools=tools, prompt=context.prompt)
        self._separates = context.separate_reasoning
        self._includes = context.include_reasoning
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: dict[int, dict[str, Any]] = {}
        self.has_calls = False
        layout = fmt.layout
        self.reads_reasoning = not isinstance(layout, Sections) or layout.reasoning is not None
        # If reasoning stays in the content and the prompt has opened it, the parser adds the
        # opening marker to the content. The model did not write that marker, so it is removed.
        self._added_marker = (
            "" if self._separates else _marker_opened_by_prompt(fmt, self.is_reasoning)
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""
        return self._parser.stage is Stage.REASONING

    def feed(self, text: str) -> None:
        """Add text."""
        self._add(self._parser.feed(text))

    def finish(self) -> None:
        """Parse the text that was held back. No more text follows."""
        self._add(self._parser.finish())

    def take(self) -> dict[str, Any]:
        """Return the new fields of a delta. Only the first delta of a call has its id and name."""
        delta: dict[str, Any] = {
            name: "".join(texts) for name, texts in self._texts.items() if texts
        }
        if self._calls:
            delta["tool_calls"] = list(self._calls.values())
        for texts in self._texts.values():
            texts.clear()
        self._calls = {}
        return delta

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._add_reasoning(text)
                case ContentDelta(text):
                    self._add_content(text)
                case ToolCallStart(index, id=call_id, name=name):
                    self.has_calls = True
                    self._call(index).update(id=call_id, name=name)
                case ArgumentsDelta(index, text):
                    self._call(index)["arguments"] += text

    def _add_reasoning(self, text: str) -> None:
        if not self._separates:
            self._add_content(text)
        elif self._includes:
            self._texts["reasoning"].append(text)

    def _add_content(self, text: str) -> None:
        text = text.removeprefix(self._added_marker)
        self._added_marker = ""
        if text:
            self._texts["content"].append(text)

    def _call(self, index: int) -> dict[str, Any]:
        """Return the delta of the call `index`, which is created if necessary."""
        return self._calls.setdefault(index, {"index": index, "arguments": ""})


def _with_reasoning_inline(fmt: Format) -> Format:
    """Return the format with reasoning and its markers as a part of the content.

    Formats in which reasoning is a message of its own (Messages) have no markers around reasoning.
    They are returned unchanged.
    """
    layout = fmt.layout
    if not isinstance(layout, Sections) or layout.reasoning is None:
        return fmt
    reasoning = replace(layout.reasoning, shown=Shown.INLINE)
    return replace(fmt, layout=replace(layout, reasoning=reasoning))


def _marker_opened_by_prompt(fmt: Format, is_reasoning: bool) -> str:
    """Return the marker that opens reasoning, if the output begins inside reasoning; else ""."""
    layout = fmt.layout
    if not is_reasoning or not isinstance(layout, Sections) or layout.reasoning is None:
        return ""
    return layout.reasoning.open


def _without_calls(fmt: Format) -> Format:
    """Return the format with tool calls as a part of the content."""
    fmt = fmt.with_policy(replace(fmt.policy, unknown_tool=UnknownTool.CONTENT))
    layout = fmt.layout
    return replace(fmt, layout=replace(layout, tools=None))
