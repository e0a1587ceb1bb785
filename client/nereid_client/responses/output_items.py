"""The output items of a response that is being generated, and the events of these items.

The methods of the items return events without sequence numbers. The response builder adds the
sequence numbers.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from nereid_client.responses.input_items import new_id
from nereid_client.streaming.custom_tool_input import InputDecoder
from nereid_client.streaming.deltas import TokenLogprob

Json = dict[str, Any]


@dataclass(frozen=True)
class TextKind:
    """The types and field names in output items and events for one kind of text.

    Attributes:
        item_type: the type of the item.
        part_type: the type of the part that contains the text.
        text_event: the prefix of the event types for the text, such as "response.output_text".
        part_event: the prefix of the event types for the part, such as "response.content_part".
        index_name: the name of the event field that contains the index of the part.
    """

    item_type: str
    part_type: str
    text_event: str
    part_event: str
    index_name: str = "content_index"


MESSAGE = TextKind("message", "output_text", "response.output_text", "response.content_part")
REASONING = TextKind(
    "reasoning", "reasoning_text", "response.reasoning_text", "response.content_part"
)
SUMMARY = TextKind(
    "reasoning",
    "summary_text",
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
    "summary_index",
)
"""Reasoning in the field `summary`. The reasoning is complete, because it is not summarised."""


@dataclass
class TextItem:
    """An output item with text: a message or a reasoning item. The item has one content part.

    Attributes:
        index: the index of the item in the field `output` of the response.
        kind: MESSAGE, REASONING or SUMMARY.
        id: the id of the item.
    """

    index: int
    kind: TextKind
    id: str = field(init=False)
    _pieces: list[str] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_id(self.kind.item_type)

    def add(self, text: str, logprobs: Sequence[Json]) -> Json:
        """Append text and its log-probabilities, and return the event for the new text."""
        self._pieces.append(text)
        self._logprobs += logprobs
        event = {"type": f"{self.kind.text_event}.delta", **self._place, "delta": text}
        return event | {"logprobs": list(logprobs)} if self.kind is MESSAGE else event

    def item(self, status: str) -> Json:
        """Return the item as JSON, with the given value of the field `status`."""
        return self._item(status, [self._part("".join(self._pieces), self._logprobs)])

    def opening(self) -> list[Json]:
        """Return the events that announce the start of the item to the client."""
        item = self._item("in_progress", [])
        return [
            {"type": "response.output_item.added", "output_index": self.index, "item": item},
            {"type": f"{self.kind.part_event}.added", **self._place, "part": self._part("", ())},
        ]

    def closing(self, status: str) -> list[Json]:
        """Return the events that announce the end of the item to the client."""
        part = self._part("".join(self._pieces), self._logprobs)
        done = {"type": f"{self.kind.text_event}.done", **self._place, "text": part["text"]}
        if self.kind is MESSAGE:
            done["logprobs"] = part["logprobs"]
        item = self.item(status)
        return [
            done,
            {"type": f"{self.kind.part_event}.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    @property
    def _place(self) -> Json:
        """The fields of an event that identify the content part of this item."""
        return {"item_id": self.id, "output_index": self.index, self.kind.index_name: 0}

    def _part(self, text: str, logprobs: Sequence[Json]) -> Json:
        """Return the content part as JSON. If the item is a message, the part has `logprobs`."""
        part: Json = {"type": self.kind.part_type, "text": text}
        if self.kind is MESSAGE:
            part |= {"annotations": [], "logprobs": list(logprobs)}
        return part

    def _item(self, status: str, parts: list[Json]) -> Json:
        """Return the item as JSON.

        The field `content` contains `parts`. If the kind is SUMMARY, the field `summary` contains
        them.
        """
        item: Json = {"id": self.id, "type": self.kind.item_type, "status": status}
        if self.kind is MESSAGE:
            return item | {"role": "assistant", "content": parts}
        if self.kind is SUMMARY:
            return item | {"summary": parts, "content": []}
        return item | {"summary": [], "content": parts}


@dataclass
class CallItem:
    """An output item that contains a function call.

    Attributes:
        index: the index of the item in the field `output` of the response.
        call_index: the number of the call among the tool calls of the response.
        call_id: the id of the call. The client sends the output of the tool with this id.
        name: the name of the tool.
        namespace: the namespace of the tool, or None.
        id: the id of the item.
    """

    index: int
    call_index: int
    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(init=False)
    _pieces: list[str] = field(default_factory=list)

    _item_type: ClassVar[str] = "function_call"
    _event_type: ClassVar[str] = "response.function_call_arguments"
    _text_field: ClassVar[str] = "arguments"
    """The field of the item that contains the text of the call."""
    _done_fields: ClassVar[Sequence[str]] = ("name", "arguments")
    """The fields of the item that the event at the end of the text repeats."""

    def __post_init__(self) -> None:
        self.id = new_id(self._item_type)

    def add(self, arguments: str) -> list[Json]:
        """Append a piece of the arguments, and return the events for the new text."""
        return self._add_text(arguments)

    def item(self, status: str) -> Json:
        """Return the item as JSON, with the given value of the field `status`."""
        item = {
            "id": self.id,
            "type": self._item_type,
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            self._text_field: "".join(self._pieces),
        }
        return item if self.namespace is None else item | {"namespace": self.namespace}

    def opening(self) -> list[Json]:
        """Return the events that announce the start of the item to the client."""
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    def closing(self, status: str) -> list[Json]:
        """Return the events that announce the end of the item to the client."""
        item = self.item(status)
        done_fields = {name: item[name] for name in self._done_fields}
        return [
            {"type": f"{self._event_type}.done", **self._place, **done_fields},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    def _add_text(self, text: str) -> list[Json]:
        """Append text to the call, and return the event. Return no event for an empty text."""
        if not text:
            return []
        self._pieces.append(text)
        return [{"type": f"{self._event_type}.delta", **self._place, "delta": text}]

    @property
    def _place(self) -> Json:
        """The fields that identify this item in events."""
        return {"item_id": self.id, "output_index": self.index}


@dataclass
class CustomCallItem(CallItem):
    """An output item that contains a call of a custom tool.

    The model calls a function that replaces the custom tool. The item contains the input of the
    tool instead of the function's arguments.
    """

    _decoder: InputDecoder = field(default_factory=InputDecoder)

    _item_type: ClassVar[str] = "custom_tool_call"
    _event_type: ClassVar[str] = "response.custom_tool_call_input"
    _text_field: ClassVar[str] = "input"
    _done_fields: ClassVar[Sequence[str]] = ("input",)

    def add(self, arguments: str) -> list[Json]:
        """Decode a piece of the function's arguments, and return the events for the new input."""
        return self._add_text(self._decoder.add(arguments))

    def closing(self, status: str) -> list[Json]:
        """Append the rest of the input, and return the events that announce the item's end."""
        rest = self._add_text(self._decoder.finish())
        return rest + super().closing(status)


class LogprobMatcher:
    """Finds the log-probabilities that belong to each piece of text.

    Log-probabilities arrive for every token that the model generates, including the tokens of
    markers and function calls. If the postprocessor delays a text, the log-probabilities of the
    text's tokens arrive before the text.
    """

    def __init__(self) -> None:
        self._unassigned: list[TokenLogprob] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Add the log-probabilities of generated tokens."""
        self._unassigned += entries

    def pop(self, text: str) -> list[TokenLogprob]:
        """Remove and return the log-probabilities of the tokens that form a text.

        Tokens before the text belong to markers such as `</think>`, which are no part of any text.
        Their log-probabilities are removed. Those of the tokens after the text are kept. If the
        tokens do not contain the text, because the postprocessor has changed the text, all
        log-probabilities are removed and returned.

        Example: after the tokens "<m>", "Hel", "lo" and " you" have been added, the text "Hello"
        returns the entries of "Hel" and "lo". The entry of " you" is kept.
        """
        if not self._unassigned:
            return []
        tokens = [_bytes(entry) for entry in self._unassigned]
        begin, end = _tokens_of_text(text.encode(), tokens)
        text_entries = self._unassigned[begin:end]
        self._unassigned = self._unassigned[end:]
        return text_entries

    def clear(self) -> None:
        """Remove all log-probabilities that were not assigned to a text."""
        self._unassigned = []


def _tokens_of_text(text: bytes, tokens: Sequence[bytes]) -> tuple[int, int]:
    """Return the index of a text's first token, and the index after its last token.

    If the postprocessor has changed the text, for example to repair JSON, the tokens do not contain
    the text. All tokens then belong to the text.

    Example: the text b"Hello" and the tokens [b"<m>", b"Hel", b"lo", b" you"] return (1, 3).
    """
    first_byte = b"".join(tokens).find(text)
    if first_byte < 0:
        return 0, len(tokens)
    last_byte = first_byte + len(text) - 1
    # `token_ends[i]` is the index after the last byte of token i. A byte belongs to the first token
    # whose end is greater than the index of the byte.
    token_ends = list(accumulate(map(len, tokens)))
    first_token = bisect_right(token_ends, first_byte)
    last_token = bisect_right(token_ends, last_byte)
    return first_token, last_token + 1


def _bytes(entry: TokenLogprob) -> bytes:
    """Return the bytes of a token. If `entry` contains no bytes, encode the token's text."""
    return entry["token"].encode() if entry["bytes"] is None else bytes(entry["bytes"])
