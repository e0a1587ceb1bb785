"""Build the output items and the stream events of a response from deltas."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, BackendError
from nereid_client.protocol.responses_tools import OfferedTool, converted_tools
from nereid_client.responses.output_items import (
    MESSAGE,
    REASONING,
    SUMMARY,
    CallItem,
    CustomCallItem,
    LogprobMatcher,
    TextItem,
    TextKind,
)
from nereid_client.streaming.deltas import Delta, ToolCallPiece, Usage, unfinished_error
from nereid_client.streaming.openai_logprobs import chat_logprobs

Json = dict[str, Any]

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""Maps an HTTP status to the `code` in the error of a response. The default is "server_error"."""
_TOO_LONG = "context_length_exceeded"
"""The code of an ApiError that becomes the `code` of the response, because agents look for it."""


class ResponseBuilder:
    """A response that is being generated. `as_json` returns its current state at any time.

    Each method that changes the response returns the events that describe the change. Events are
    numbered from 0 without a gap. For each item, there are these events in this order: "item
    added", "part added", the deltas of the part, "part done" and "item done". Then the events of
    the next item follow. The joined deltas of a part are the final text of the part.

    Attributes:
        status: "queued" or "in_progress" while the response is generated, and "completed",
            "incomplete", "failed" or "cancelled" when it has ended.
    """

    def __init__(self, request_fields: Json, *, is_queued: bool = False) -> None:
        """Create a response without output.

        Args:
            request_fields: the fields of the response object that repeat the fields of the request.
            is_queued: whether the response starts with the status "queued".
        """
        self._request_fields = request_fields
        self._converted_tools = converted_tools(request_fields.get("tools") or ())
        # If the request asks for a summary of the reasoning, the complete reasoning is the summary.
        has_summary = (request_fields.get("reasoning") or {}).get("summary") is not None
        self._reasoning_kind = SUMMARY if has_summary else REASONING

        # The fields of the response object.
        self.status = "queued" if is_queued else "in_progress"
        self._completed_at: int | None = None  # the Unix time in seconds
        self._error: Json | None = None
        self._incomplete: Json | None = None  # the reason why the response is incomplete
        self._finished_items: list[Json] = []  # the finished output items as JSON
        self._usage: Usage | None = None

        # The state of the generation.
        self._current_item: TextItem | CallItem | None = None
        self._num_calls = 0  # the number of tool calls that have started
        self._logprobs = LogprobMatcher()  # assigns log-probabilities to the texts of items
        self._sequence_number = 0  # the number of the next event

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self._request_fields["id"])

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self.status not in ("queued", "in_progress")

    @property
    def output(self) -> list[Json]:
        """The output items so far. The last item may be in progress."""
        item = self._current_item
        return [*self._finished_items, *([item.item("in_progress")] if item else [])]

    def as_json(self) -> Json:
        """Return the response object."""
        return {
            **self._request_fields,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": self.output,
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def opening(self) -> list[Json]:
        """Return the events at the start of the stream, before the events of the first delta."""
        return [self._response_event("created"), self._response_event(self.status)]

    def add(self, delta: Delta) -> list[Json]:
        """Append a delta to the response, and return the events that describe the change.

        Raises: BackendError if the delta continues a tool call that has ended.
        """
        events = []
        if self.status == "queued":
            self.status = "in_progress"
            events.append(self._response_event("in_progress"))
        self._usage = delta.get("usage", self._usage)
        self._logprobs.add(delta.get("logprobs", ()))
        if reasoning := delta.get("reasoning"):
            events += self._add_text(reasoning, self._reasoning_kind)
        if content := delta.get("content"):
            events += self._add_text(content, MESSAGE)
        for piece in delta.get("tool_calls", ()):
            events += self._add_call(piece)
        if "finish_reason" in delta:
            events += self._end_because(delta["finish_reason"])
        return events

    def fail(self, error: ApiError) -> list[Json]:
        """End the response with an error."""
        code = _ERROR_CODES.get(error.status, "server_error")
        if error.code == _TOO_LONG:
            code = _TOO_LONG
        self._error = {"code": code, "message": error.message}
        return self._end("failed", "failed")

    def cancel(self) -> list[Json]:
        """End the response with the status "cancelled".

        The API has no event for this status, so the event is `response.incomplete`.
        """
        return self._end("cancelled", "incomplete")

    async def add_all(self, deltas: AsyncGenerator[Delta]) -> None:
        """Append all deltas of a stream.

        Raises: BackendError, also if the stream has no finish reason.
        """
        async with aclosing(deltas):
            async for delta in deltas:
                self.add(delta)
        if not self.is_over:
            raise unfinished_error()

    def _add_text(self, text: str, kind: TextKind) -> list[Json]:
        """Append text of one kind. If the current item has another kind, start a new item."""
        # Reasoning items contain no log-probabilities. `pop` is also called for reasoning, so that
        # the next message does not receive the log-probabilities of the reasoning.
        entries = self._logprobs.pop(text)
        events = []
        item = self._current_item
        if not isinstance(item, TextItem) or item.kind is not kind:
            item = TextItem(self._next_output_index, kind)
            events += self._start_item(item)
        logprobs = chat_logprobs(entries)["content"] if kind is MESSAGE else []
        return [*events, self._numbered(item.add(text, logprobs))]

    def _add_call(self, piece: ToolCallPiece) -> list[Json]:
        """Append a piece of a tool call to the call's item. The first piece starts the item."""
        self._logprobs.clear()  # calls have no log-probabilities
        events = []
        call = self._current_item
        if not isinstance(call, CallItem) or call.call_index != piece["index"]:
            call = self._new_call(piece)
            events += self._start_item(call)
        if arguments := piece.get("arguments"):
            events += [self._numbered(event) for event in call.add(arguments)]
        return events

    def _new_call(self, piece: ToolCallPiece) -> CallItem:
        """Create the output item for a tool call. `piece` is the first piece of this call.

        If the tool belongs to a namespace, the item contains the namespace and the tool's own name
        instead of their joined name. If the function replaces a custom tool, the item is a call of
        the custom tool.

        Raises: BackendError if the tool call with this index has ended.
        """
        call_index = piece["index"]  # the number of the call among the calls of the response
        if call_index < self._num_calls:
            raise BackendError(
                "INTERNAL",
                f"The Triton server sent arguments of tool call {call_index} after this call had "
                "ended",
            )
        self._num_calls = call_index + 1
        chat_name = piece.get("name", "")
        tool = self._converted_tools.get(chat_name, OfferedTool(chat_name))
        item_class = CustomCallItem if tool.is_custom else CallItem
        call_id = piece.get("id", "")
        return item_class(self._next_output_index, call_index, call_id, tool.name, tool.namespace)

    @property
    def _next_output_index(self) -> int:
        """The index that the next output item will have in the field `output` of the response."""
        return len(self._finished_items) + (self._current_item is not None)

    def _start_item(self, item: TextItem | CallItem) -> list[Json]:
        """Finish the current item and start a new item. Return the events for both steps."""
        closing = self._finish_item("completed")
        self._current_item = item
        return closing + [self._numbered(event) for event in item.opening()]

    def _finish_item(self, status: str) -> list[Json]:
        """Finish the current item if there is one, and return its last events."""
        item = self._current_item
        if item is None:
            return []
        closing = [self._numbered(event) for event in item.closing(status)]
        self._finished_items.append(item.item(status))
        self._current_item = None
        return closing

    def _end_because(self, finish_reason: str) -> list[Json]:
        """End the response according to the backend's finish reason, and return the last events."""
        if finish_reason == "abort":
            return self.fail(ApiError(500, "The server aborted the response"))
        if finish_reason == "length":
            self._incomplete = {"reason": "max_output_tokens"}
            return self._end("incomplete", "incomplete")
        self._completed_at = int(time.time())
        return self._end("completed", "completed")

    def _end(self, status: str, event: str) -> list[Json]:
        """End the current output item and the response, and return the events for both.

        Args:
            status: the status of the response, such as "completed".
            event: the last part of the last event's type, such as "completed" for the event
                `response.completed`.
        """
        events = self._finish_item("completed" if status == "completed" else "incomplete")
        self.status = status
        return [*events, self._response_event(event)]

    def _response_event(self, kind: str) -> Json:
        return self._numbered({"type": f"response.{kind}", "response": self.as_json()})

    def _numbered(self, event: Json) -> Json:
        numbered = {"type": event["type"], "sequence_number": self._sequence_number, **event}
        self._sequence_number += 1
        return numbered


def _usage(usage: Usage) -> Json:
    """Return the token counts in the format of the Responses API.

    `cache_write_tokens` is 0, because the field is for servers that bill writes to the cache.
    """
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
    }
