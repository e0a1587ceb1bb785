"""Checks the events of a Responses API stream: their order, and the types of the openai library."""

from dataclasses import dataclass, field
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

Json = dict[str, Any]

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
_ENDS = ("completed", "failed", "incomplete")


@dataclass
class _Item:
    """An output item of a response, as a client builds it from the events of the stream.

    Attributes:
        text: the joined deltas of the item's text (or of a function call's arguments).
        is_text_done: whether the event has arrived that ends the text.
        part: the state of the item's content part: "none", "added" or "done".
        final: the item of the event `output_item.done`.
    """

    id: str
    text: str = ""
    is_text_done: bool = False
    part: str = "none"
    final: Json | None = None


@dataclass
class StreamCheck:
    """Checks the events of one stream in order.

    Attributes:
        is_typed: whether the values must have the types of the openai library. Set it to false
            for requests with values of other types, because the response repeats these values.
        items: the output items so far.
        final: the response object of the last event, or None before that event.
    """

    is_typed: bool = True
    items: list[_Item] = field(default_factory=list)
    final: Json | None = None

    def run(self, events: list[Json]) -> Json:
        """Check all events of a stream, and return the final response object."""
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            assert self.final is None, "an event after the last event"
            if self.is_typed:
                _EVENT.validate_python(event)
            self._check_event(event)
        assert self.final is not None, "a stream without an end"
        assert self.final["output"] == [item.final for item in self.items]
        if self.is_typed:
            Response.model_validate(self.final)
        return self.final

    def _check_event(self, event: Json) -> None:
        """Check that an event may follow the earlier events, and store what it adds."""
        kind = event["type"].removeprefix("response.")
        if kind in _ENDS:
            self.final = event["response"]
        elif kind == "output_item.added":
            assert all(item.final for item in self.items), "two items are open"
            assert event["output_index"] == len(self.items)
            assert event["item"]["status"] == "in_progress"
            self.items.append(_Item(event["item"]["id"]))
        elif "output_index" in event:
            item = self.items[event["output_index"]]
            assert item is self.items[-1]
            assert item.final is None
            assert item.id == event.get("item_id", item.id)
            self._check_item_event(kind, event, item)
        else:
            assert kind in ("created", "queued", "in_progress")
            assert not self.items

    def _check_item_event(self, kind: str, event: Json, item: _Item) -> None:
        """Check an event of the open item.

        The events of a text arrive in this order: part added, deltas, text done, part done, item
        done. A function call has no part.
        """
        if kind.startswith(("content_part.", "reasoning_summary_part.")):
            is_added = kind.endswith(".added")
            assert item.part == ("none" if is_added else "added")
            assert item.is_text_done is not is_added
            assert event["part"]["text"] == item.text
            item.part = "added" if is_added else "done"
        elif kind.endswith(".delta"):
            assert not item.is_text_done
            assert item.part == ("none" if "arguments" in kind else "added")
            item.text += event["delta"]
        elif kind == "output_item.done":
            assert item.is_text_done
            assert item.part != "added"
            assert text_of(event["item"]) == item.text
            assert event["item"]["id"] == item.id
            item.final = event["item"]
        else:
            assert kind.endswith(("_text.done", "_arguments.done"))
            assert event.get("text", event.get("arguments")) == item.text
            item.is_text_done = True


def text_of(item: Json) -> str:
    """Return the text of an output item. For a function call, return the arguments."""
    parts = item.get("content") or item.get("summary")
    text = item["arguments"] if item["type"] == "function_call" else parts[0]["text"]
    assert isinstance(text, str)
    return text
