"""Output items while they are written: what they look like, and the events that tell of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereid_client.responses.input_items import new_id
from nereid_client.streaming.deltas import TokenLogprob

Json = dict[str, Any]


class Written(Protocol):
    """An output item that grows.

    Attributes:
        index: its place in `output`, for ever.
    """

    index: int

    def item(self, status: str) -> Json:
        """What it looks like now."""
        ...

    def opening(self) -> list[Json]:
        """The events that begin it, unnumbered."""
        ...

    def closing(self, status: str) -> list[Json]:
        """The events that end it."""
        ...


@dataclass
class Text:
    """A message, or reasoning; either has one part of text.

    Attributes:
        is_reasoning: which of the two.
        is_summary: whether reasoning stands in the item's `summary`, not in its `content`.
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
        """Go on with this text; its event."""
        self._pieces.append(text)
        self._logprobs += logprobs
        event = {"type": f"{self._kind}.delta", **self._place, "delta": text}
        return event if self.is_reasoning else event | {"logprobs": list(logprobs)}

    def item(self, status: str) -> Json:
        """See `Written`."""
        return self._item(status, [self._part()])

    def opening(self) -> list[Json]:
        """See `Written`."""
        empty = Text(self.index, self.is_reasoning, self.is_summary, self.id)._part()
        begun = self._item("in_progress", [])
        return [
            {"type": "response.output_item.added", "output_index": self.index, "item": begun},
            {"type": f"{self._kind_of_part}.added", **self._place, "part": empty},
        ]

    def closing(self, status: str) -> list[Json]:
        """See `Written`."""
        part = self._part()
        done = {"type": f"{self._kind}.done", **self._place, "text": part["text"]}
        if not self.is_reasoning:
            done["logprobs"] = part["logprobs"]
        item = self.item(status)
        return [
            done,
            {"type": f"{self._kind_of_part}.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    @property
    def _kind(self) -> str:
        if self.is_summary:
            return "response.reasoning_summary_text"
        return "response.reasoning_text" if self.is_reasoning else "response.output_text"

    @property
    def _kind_of_part(self) -> str:
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
class Call:
    """A call of a function.

    Attributes:
        call_index: which of the answer's calls.
        call_id: what its output will name.
        name: the function's.
        namespace: where the function stands, if in one.
    """

    index: int
    call_index: int
    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: new_id("function_call"))
    _pieces: list[str] = field(default_factory=list)

    def add(self, arguments: str) -> Json:
        """Go on with the arguments; the event."""
        self._pieces.append(arguments)
        return {
            "type": "response.function_call_arguments.delta",
            "item_id": self.id,
            "output_index": self.index,
            "delta": arguments,
        }

    def item(self, status: str) -> Json:
        """See `Written`."""
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
        """See `Written`."""
        begun = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": begun}]

    def closing(self, status: str) -> list[Json]:
        """See `Written`."""
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


class Tokens:
    """Finds the log-probabilities of a piece of text among those that have come.

    They come for every token the model writes, markers and calls among them, and before their text
    where that is held back.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """These have come."""
        self._waiting += entries

    def take(self, text: str) -> list[TokenLogprob]:
        """Those of this text. What stands before it goes, what stands behind it waits."""
        if not self._waiting:
            return []
        wanted = text.encode()
        written = [_bytes(entry) for entry in self._waiting]
        begin = b"".join(written).find(wanted)
        if begin < 0:  # such as text that was mended: no token can be left out for sure
            taken, self._waiting = self._waiting, []
            return taken
        end = begin + len(wanted)
        first = last = at = 0
        for number, raw in enumerate(written, start=1):
            at += len(raw)
            if at <= begin:
                first = number
            if at < end:
                last = number
        taken = self._waiting[first : last + 1]
        self._waiting = self._waiting[last + 1 :]
        return taken

    def drop(self) -> None:
        """What has come belongs to no text."""
        self._waiting = []


def _bytes(entry: TokenLogprob) -> bytes:
    return entry["token"].encode() if entry["bytes"] is None else bytes(entry["bytes"])
