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

# No model writes the name of this tool. If this tool is the only one, every call has an unknown
# name.
_UNCALLABLE_TOOL = {"type": "function", "function": {"name": "\0"}}


class PlainMessage:
    """A message without reasoning and tool calls. It has the same attributes as ParsedMessage."""

    has_calls = False
    reads_reasoning = False
    is_reasoning = False

    def __init__(self) -> None:
        self._new_content: list[str] = []

    def feed(self, text: str) -> None:
        """Add text."""
        self._new_content.append(text)

    def finish(self) -> None:
        """Do nothing, because no text is held back."""

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
        reads_reasoning: whether the format has reasoning. The text must then be fed token by token,
            so that the number of reasoning tokens is exact.
    """

    def __init__(self, fmt: Format, context: StreamContext) -> None:
        """Initialise the state of a message without text.

        Args:
            fmt: the chat format of the checkpoint.
            context: the part of the request that the postprocessor needs. The tools, the end of the
                prompt and the options for reasoning and tool calls are used here.
        """
        fmt = _adapt_format(fmt, context)
        tools = [dict(tool) for tool in context.tools]
        if not context.reads_calls:
            tools = [_UNCALLABLE_TOOL]
        # In a format of the kind Messages, reasoning is a separate message and has no markers.
        reasoning = fmt.layout.reasoning if isinstance(fmt.layout, Sections) else None
        self._parser = StreamParser(fmt, tools=tools, prompt=context.prompt)
        self._context = context
        self._new_texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._new_calls: dict[int, dict[str, Any]] = {}
        self.has_calls = False
        self.reads_reasoning = reasoning is not None or not isinstance(fmt.layout, Sections)
        # If the prompt ends with the marker that opens reasoning, the parser adds this marker to
        # inline reasoning. The model did not write the marker, so it is removed from the content.
        is_opened_by_prompt = self.is_reasoning and not context.separate_reasoning
        self._added_marker = reasoning.open.strip() if reasoning and is_opened_by_prompt else ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to reasoning."""
        return self._parser.stage is Stage.REASONING

    def feed(self, text: str) -> None:
        """Add text."""
        self._add(self._parser.feed(text))

    def finish(self) -> None:
        """Parse the text that the parser has held back. No more text follows."""
        self._add(self._parser.finish())

    def take(self) -> dict[str, Any]:
        """Return the fields `reasoning`, `content` and `tool_calls` since the last call.

        Fields without a value are left out. Only the first delta of a call has its id and name.
        Example: {"tool_calls": [{"index": 0, "id": "a1", "name": "add", "arguments": '{"x"'}]}, and
        then {"tool_calls": [{"index": 0, "arguments": ": 1}"}]}.
        """
        texts = {name: "".join(parts) for name, parts in self._new_texts.items()}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if self._new_calls:
            delta["tool_calls"] = list(self._new_calls.values())
        self._new_texts = {"reasoning": [], "content": []}
        self._new_calls = {}
        return delta

    def _add(self, events: Iterable[Event]) -> None:
        """Add the parser's events to the fields of the next delta."""
        for event in events:
            match event:
                case ReasoningDelta(text) if self._context.separate_reasoning:
                    if self._context.include_reasoning:
                        self._new_texts["reasoning"].append(text)
                case ReasoningDelta(text) | ContentDelta(text):
                    # The parser adds the complete marker to the beginning of the first text.
                    self._new_texts["content"].append(text.removeprefix(self._added_marker))
                    self._added_marker = ""
                case ToolCallStart(index, id=call_id, name=name):
                    self.has_calls = True
                    self._new_call(index).update(id=call_id, name=name)
                case ArgumentsDelta(index, text):
                    self._new_call(index)["arguments"] += text

    def _new_call(self, index: int) -> dict[str, Any]:
        """Return the entry of the call `index` in the next delta. Create it if necessary."""
        return self._new_calls.setdefault(index, {"index": index, "arguments": ""})


Message = PlainMessage | ParsedMessage


def _adapt_format(fmt: Format, context: StreamContext) -> Format:
    """Return the format with the request's options for reasoning and tool calls."""
    if not context.separate_reasoning:
        fmt = _with_inline_reasoning(fmt)
    return fmt if context.reads_calls else _without_calls(fmt)


def _with_inline_reasoning(fmt: Format) -> Format:
    """Return the format with reasoning and its markers as a part of the content.

    A format without markers around reasoning is returned unchanged.
    """
    layout = fmt.layout
    if not isinstance(layout, Sections) or layout.reasoning is None:
        return fmt
    reasoning = replace(layout.reasoning, shown=Shown.INLINE)
    return replace(fmt, layout=replace(layout, reasoning=reasoning))


def _without_calls(fmt: Format) -> Format:
    """Return the format with tool calls as a part of the content."""
    fmt = fmt.with_policy(replace(fmt.policy, unknown_tool=UnknownTool.CONTENT))
    return replace(fmt, layout=replace(fmt.layout, tools=None))
