# SPDX-License-Identifier: Apache-2.0
"""The parsed part of an answer: text in, the reasoning, content and tool calls of a delta out."""

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

# A tool that no model calls: with it offered, every call is of an unknown one.
_NO_TOOL = {"type": "function", "function": {"name": "\0"}}


class MessageBuilder(Protocol):
    """Turns text into the parts of a delta; `take` gives what came since it was last asked.

    Attributes:
        has_calls: a tool call has begun.
        reads_reasoning: whether there is reasoning to be told apart, so that tokens are to be fed
            one by one for an exact count.
    """

    has_calls: bool
    reads_reasoning: bool

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""

    def feed(self, text: str) -> None:
        """Take more text."""

    def finish(self) -> None:
        """The text is over."""

    def take(self) -> dict[str, Any]:
        """Parts of a delta: reasoning, content, tool_calls, as far as they have something new."""


class PlainMessage:
    """All text is content."""

    has_calls = False
    reads_reasoning = False
    is_reasoning = False

    def __init__(self) -> None:
        self._text: list[str] = []

    def feed(self, text: str) -> None:
        """Take more text."""
        self._text.append(text)

    def finish(self) -> None:
        """Nothing is held back."""

    def take(self) -> dict[str, Any]:
        """The content since the last time."""
        text = "".join(self._text)
        self._text.clear()
        return {"content": text} if text else {}


class ParsedMessage:
    """Text is read in a chat format.

    Args:
        fmt: the checkpoint's format.
        context: the request's tools, the end of its prompt, which says in what stage the output
            begins, and what is to become of reasoning and calls.
    """

    def __init__(self, fmt: Format, context: StreamContext) -> None:
        tools = [dict(tool) for tool in context.tools]
        if not context.separate_reasoning:
            fmt = _with_reasoning_inline(fmt)
        if not context.reads_calls:
            fmt, tools = _without_calls(fmt), [_NO_TOOL]
        self._parser = StreamParser(fmt, tools=tools, prompt=context.prompt)
        self._separates = context.separate_reasoning
        self._includes = context.include_reasoning
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: dict[int, dict[str, Any]] = {}
        self.has_calls = False
        layout = fmt.layout
        self.reads_reasoning = not isinstance(layout, Sections) or layout.reasoning is not None
        # The parser shows the marker with which the prompt opened reasoning; the model wrote none.
        self._borrowed = "" if self._separates else _borrowed_marker(fmt, self.is_reasoning)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""
        return self._parser.stage is Stage.REASONING

    def feed(self, text: str) -> None:
        """Take more text."""
        self._add(self._parser.feed(text))

    def finish(self) -> None:
        """The text is over: what was held back comes out."""
        self._add(self._parser.finish())

    def take(self) -> dict[str, Any]:
        """What is new; a call's id and name come with its first piece only."""
        delta: dict[str, Any] = {
            name: "".join(pieces) for name, pieces in self._texts.items() if pieces
        }
        if self._calls:
            delta["tool_calls"] = list(self._calls.values())
        for pieces in self._texts.values():
            pieces.clear()
        self._calls = {}
        return delta

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._reason(text)
                case ContentDelta(text):
                    self._say(text)
                case ToolCallStart(index, id=call_id, name=name):
                    self.has_calls = True
                    self._call(index).update(id=call_id, name=name)
                case ArgumentsDelta(index, text):
                    self._call(index)["arguments"] += text

    def _reason(self, text: str) -> None:
        if not self._separates:
            self._say(text)
        elif self._includes:
            self._texts["reasoning"].append(text)

    def _say(self, text: str) -> None:
        text, self._borrowed = text.removeprefix(self._borrowed), ""
        if text:
            self._texts["content"].append(text)

    def _call(self, index: int) -> dict[str, Any]:
        return self._calls.setdefault(index, {"index": index, "arguments": ""})


def _with_reasoning_inline(fmt: Format) -> Format:
    """The format whose reasoning is content, markers and all.

    In a row of messages there are no markers of reasoning; its text alone becomes content.
    """
    layout = fmt.layout
    if not isinstance(layout, Sections) or layout.reasoning is None:
        return fmt
    reasoning = replace(layout.reasoning, shown=Shown.INLINE)
    return replace(fmt, layout=replace(layout, reasoning=reasoning))


def _borrowed_marker(fmt: Format, is_reasoning: bool) -> str:
    layout = fmt.layout
    if not is_reasoning or not isinstance(layout, Sections) or layout.reasoning is None:
        return ""
    return layout.reasoning.open


def _without_calls(fmt: Format) -> Format:
    """The format that leaves tool calls in the content."""
    fmt = fmt.with_policy(replace(fmt.policy, unknown_tool=UnknownTool.CONTENT))
    layout = fmt.layout
    return replace(fmt, layout=replace(layout, tools=None))
