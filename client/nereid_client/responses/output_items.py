"""The output items of a response while they are generated, and their events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereid_client.responses.input_items import new_id
from nereid_client.streaming.deltas import TokenLogprob

Json = dict[str, Any]


class OutputItem(Protocol):
    """An output item that is being generated.

    Attributes:
        index: its index in the field `output` of the response.
    """

    index: int

    def item(self, status: str) -> Json:
        """Return the item as JSON, with this status."""
        ...

    def opening(self) -> list[Json]:
        """Return the events at the start of the item, without sequence numbers."""
        ...

    def closing(self, status: str) -> list[Json]:
        """Return the events at the end of the item, without sequence numbers."""
        ...


@dataclass
class TextItem:
    """A message or a reasoning item. Both have one part with text.

    Attributes:
        index: its index in the field `output` of the response.
        is_reasoning: whether it is a reasoning item.
        is_summary: whether the reasoning is in the field `summary` instead of `content`.
        id: the id of the item.
    """

    index: int
    is_reasoning: bool
    is_summary: bool = False
    id: str = ""
    _pieces: list[str] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = self.id or new_id("reasoning" if self.is_reasoning else "message")

    def add(self, text: str, logprobs: Sequence[Json]) -> Json:
        """Append text and its log-probabilities, and return the event."""
        self._pieces.append(text)
        self._logprobs += logprobs
        event = {"type": f"{self._text_kind}.delta", **self._place, "delta": text}
        return event if self.is_reasoning else event | {"logprobs": list(logprobs)}

    def item(self, status: str) -> Json:
        """Return the item as JSON, with this status."""
        return self._item(status, [self._part()])

    def opening(self) -> list[Json]:
        """Return the events at the start of the item, without sequence numbers."""
        empty = TextItem(self.index, self.is_reasoning, self.is_summary, self.id)._part()
        item = self._item("in_progress", [])
        return [
            {"type": "response.output_item.added", "output_index": self.index, "item": item},
            {"type": f"{self._part_kind}.added", **self._place, "part": empty},
        ]

    def closing(self, status: str) -> list[Json]:
        """Return the events at the end of the item, without sequence numbers."""
        part = self._part()
        done = {"type": f"{self._text_kind}.done", **self._place, "text": part["text"]}
        if not self.is_reasoning:
            done["logprobs"] = part["logprobs"]
        item = self.item(status)
        return [
            done,
            {"type": f"{self._part_kind}.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    @property
    def _text_kind(self) -> str:
        if self.is_summary:
            return "response.reasoning_summary_text"
        return "response.reasoning_text" if self.is_reasoning else "response.output_text"

    @property
    def _part_kind(self) -> str:
        return "response.reasoning_summary_part" if self.is_summary else "response.content_part"

    @property
    def _place(self) -> Json:
        part = "summary_index" if self.is_summary else "content_index"
        return {"item_id": self.id, "output_index": self.index, part: 0}

    def _part(self) -> Json:
        text = "".join(self._pieces)
        if self.is_reasoning:
            return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _item(self, status: str, parts: list[Json]) -> Json:
        if not self.is_reasoning:
            kind: Json = {"type": "message", "role": "assistant"}
            return {"id": self.id, **kind, "status": status, "content": parts}
        summary, content = (parts, []) if self.is_summary else ([], parts)
        kind = {"type": "reasoning", "summary": summary}
        return {"id": self.id, **kind, "status": status, "content": content}


@dataclass
class CallItem:
    """A function call.

    Attributes:
        index: its index in the field `output` of the response.
        call_index: its number among the function calls of the response.
        call_id: the id that the output of the function will refer to.
        name: the name of the function.
        namespace: the namespace of the function, None if it has none.
        id: the id of the item.
    """

    index: int
    call_index: int
    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: new_id("function_call"))
    _pieces: list[str] = field(default_factory=list)

    def add(self, arguments: str) -> Json:
        """Append a piece of the arguments, and return the event."""
        self._pieces.append(arguments)
        return {
            "type": "response.function_call_arguments.delta",
            "item_id": self.id,
            "output_index": self.index,
            "delta": arguments,
        }

    def item(self, status: str) -> Json:
        """Return the item as JSON, with this status."""
        item = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self._pieces),
        }
        return item if self.namespace is None else item | {"namespace": self.namespace}

    def opening(self) -> list[Json]:
        """Return the events at the start of the item, without sequence numbers."""
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    def closing(self, status: str) -> list[Json]:
        """Return the events at the end of the item, without sequence numbers."""
        item = self.item(status)
        return [
            {
                "type": "response.function_call_arguments.done",
                "item_id": self.id,
                "output_index": self.index,
                "name": self.name,
                "arguments": item["arguments"],
            },
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]


class LogprobMatcher:
    """Assigns log-probabilities to pieces of text.

    Log-probabilities arrive for every token that the model generates, including the tokens of
    markers and function calls. If the text of a token is held back, the log-probabilities of the
    token arrive before its text.
    """

    def __init__(self) -> None:
        self._unassigned: list[TokenLogprob] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Add log-probabilities that have arrived."""
        self._unassigned += entries

    def take(self, text: str) -> list[TokenLogprob]:
        """Return and remove the log-probabilities of a text.

        Tokens before the text belong to markers and are removed. Tokens after it are kept.

        Example: after the tokens "<m>", "Hel", "lo", " you", the text "Hello" returns those of
        "Hel" and "lo", and keeps that of " you".
        """
        if not self._unassigned:
            return []
        wanted = text.encode()
        tokens = [_bytes(entry) for entry in self._unassigned]
        begin = b"".join(tokens).find(wanted)
        if begin < 0:
            # The postprocessor changed the text, for example repaired it. Return all tokens,
            # because it is unknown which of them belong to the text.
            taken, self._unassigned = self._unassigned, []
            return taken
        end = begin + len(wanted)
        first = last = position = 0
        for number, token in enumerate(tokens, start=1):
            position += len(token)
            if position <= begin:
                first = number
            if position < end:
                last = number
        taken = self._unassigned[first : last + 1]
        self._unassigned = self._unassigned[last + 1 :]
        return taken

    def drop(self) -> None:
        """Remove all log-probabilities, because their tokens belong to no text."""
        self._unassigned = []


def _bytes(entry: TokenLogprob) -> bytes:
    return entry["token"].encode() if entry["bytes"] is None else bytes(entry["bytes"])
