# SPDX-License-Identifier: Apache-2.0
"""The parsed part of an answer: text in, the reasoning, content and tool calls of a delta out."""

from collections.abc import Iterable
from typing import Any, Protocol

from nereid_parsers import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Format,
    ReasoningDelta,
    StreamParser,
    ToolCallStart,
)


class MessageBuilder(Protocol):
    """Turns text into the parts of a delta; `take` gives what came since it was last asked."""

    has_calls: bool

    def feed(self, text: str) -> None:
        """Take more text."""

    def finish(self) -> None:
        """The text is over."""

    def take(self) -> dict[str, Any]:
        """Parts of a delta: reasoning, content, tool_calls, as far as they have something new."""


class PlainMessage:
    """All text is content."""

    has_calls = False

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
        tools: OpenAI tools list of the request.
        prompt: end of the rendered prompt, which says in what stage the output begins.
    """

    def __init__(self, fmt: Format, tools: Iterable[dict[str, Any]], prompt: str) -> None:
        self._parser = StreamParser(fmt, tools=list(tools), prompt=prompt)
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: dict[int, dict[str, Any]] = {}
        self.has_calls = False

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
                    self._texts["reasoning"].append(text)
                case ContentDelta(text):
                    self._texts["content"].append(text)
                case ToolCallStart(index, id=call_id, name=name):
                    self.has_calls = True
                    self._call(index).update(id=call_id, name=name)
                case ArgumentsDelta(index, text):
                    self._call(index)["arguments"] += text

    def _call(self, index: int) -> dict[str, Any]:
        return self._calls.setdefault(index, {"index": index, "arguments": ""})
