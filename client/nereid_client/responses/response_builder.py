"""One response as it is written: deltas in, items and numbered events out."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, BackendError
from nereid_client.protocol.responses_request import named_in_chat
from nereid_client.responses.output_items import Call, Text, Tokens, Written
from nereid_client.streaming.deltas import Delta, ToolCallPiece, Usage, add_up, unfinished
from nereid_client.streaming.openai_logprobs import chat_logprobs

Json = dict[str, Any]

_KINDS = ("reasoning", "content", "tool_calls")
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class Answer:
    """A response that grows; it can be looked at at any time.

    Each method that changes it returns the events that tell of the change, numbered from 0 without
    a gap: an item is added before its parts, a part before its deltas, and each is done before the
    next item is added. Their concatenated deltas are the final object's texts.

    Attributes:
        frame: what the response object repeats of the request.
        status: queued, in_progress, and at the end completed, incomplete, failed or cancelled.
    """

    def __init__(self, frame: Json, *, is_queued: bool = False) -> None:
        self.frame = frame
        self._in_namespaces = named_in_chat(frame.get("tools") or ())
        self.status = "queued" if is_queued else "in_progress"
        self._done: list[Json] = []
        self._open: Written | None = None
        self._num_calls = 0
        self._tokens = Tokens()
        self._usage: Usage | None = None
        self._error: Json | None = None
        self._incomplete: Json | None = None
        self._completed_at: int | None = None
        self._sequence_number = 0

    @property
    def id(self) -> str:
        """The response's."""
        return str(self.frame["id"])

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.status not in ("queued", "in_progress")

    @property
    def _is_summary_wanted(self) -> bool:
        """Whether reasoning is asked for as a summary, which is where many clients look for it."""
        return (self.frame.get("reasoning") or {}).get("summary") is not None

    @property
    def output(self) -> list[Json]:
        """The items so far."""
        written = [] if self._open is None else [self._open.item("in_progress")]
        return [*self._done, *written]

    def as_json(self) -> Json:
        """The response object."""
        return {
            **self.frame,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": self.output,
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def opening(self) -> list[Json]:
        """The events before the first delta."""
        return [self._of_response("created"), self._of_response(self.status)]

    def take(self, delta: Delta) -> list[Json]:
        """Go on with a delta.

        Raises: BackendError for a piece of a call that is over.
        """
        events = []
        if self.status == "queued":
            self.status = "in_progress"
            events.append(self._of_response("in_progress"))
        self._usage = delta.get("usage", self._usage)
        self._tokens.add(delta.get("logprobs", ()))
        if reasoning := delta.get("reasoning"):
            events += self._write(reasoning, is_reasoning=True)
        if content := delta.get("content"):
            events += self._write(content, is_reasoning=False)
        for piece in delta.get("tool_calls", ()):
            events += self._call(piece)
        if "finish_reason" in delta:
            events += self._finish(delta["finish_reason"])
        return events

    def fail(self, error: ApiError) -> list[Json]:
        """End it with an error."""
        code = _ERROR_CODES.get(error.status, "server_error")
        self._error = {"code": code, "message": error.message}
        return self._end("failed", "failed")

    def cancel(self) -> list[Json]:
        """End it where it stands. The API has no event for it; `response.incomplete` tells."""
        return self._end("cancelled", "incomplete")

    async def take_all(self, deltas: AsyncGenerator[Delta]) -> None:
        """Take an answer to its end.

        Raises: BackendError, also when there is no finish reason.
        """
        async with aclosing(deltas):
            async for delta in deltas:
                self.take(delta)
        if not self.is_over:
            raise unfinished()

    def _write(self, text: str, *, is_reasoning: bool) -> list[Json]:
        taken = self._tokens.take(text)
        events = []
        written = self._open
        if not isinstance(written, Text) or written.is_reasoning != is_reasoning:
            index = len(self._done) + (self._open is not None)
            written = Text(index, is_reasoning, is_reasoning and self._is_summary_wanted)
            events += self._begin(written)
        logprobs = [] if is_reasoning else chat_logprobs(taken)["content"]
        return [*events, self._numbered(written.add(text, logprobs))]

    def _call(self, piece: ToolCallPiece) -> list[Json]:
        self._tokens.drop()
        events = []
        call = self._open
        if not isinstance(call, Call) or call.call_index != piece["index"]:
            if piece["index"] < self._num_calls:
                raise BackendError("INTERNAL", f"call {piece['index']} goes on after its end")
            self._num_calls = piece["index"] + 1
            index = len(self._done) + (self._open is not None)
            namespace, name = self._in_namespaces.get(piece.get("name", ""), (None, None))
            name = name or piece.get("name", "")
            call = Call(index, piece["index"], piece.get("id", ""), name, namespace)
            events += self._begin(call)
        if arguments := piece.get("arguments"):
            events.append(self._numbered(call.add(arguments)))
        return events

    def _begin(self, written: Written) -> list[Json]:
        closed = self._close("completed")
        self._open = written
        return closed + [self._numbered(event) for event in written.opening()]

    def _close(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        closing = [self._numbered(event) for event in self._open.closing(status)]
        self._done.append(self._open.item(status))
        self._open = None
        return closing

    def _finish(self, reason: str) -> list[Json]:
        if reason == "abort":
            return self.fail(ApiError(500, "the server gave the answer up"))
        if reason == "length":
            self._incomplete = {"reason": "max_output_tokens"}
            return self._end("incomplete", "incomplete")
        self._completed_at = int(time.time())
        return self._end("completed", "completed")

    def _end(self, status: str, event: str) -> list[Json]:
        events = self._close("completed" if status == "completed" else "incomplete")
        self.status = status
        return [*events, self._of_response(event)]

    def _of_response(self, kind: str) -> Json:
        return self._numbered({"type": f"response.{kind}", "response": self.as_json()})

    def _numbered(self, event: Json) -> Json:
        numbered = {"type": event["type"], "sequence_number": self._sequence_number, **event}
        self._sequence_number += 1
        return numbered


def by_kind(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours that add to the same kind of item, added up: the order of items stays as it is."""
    runs: list[list[Delta]] = []
    kinds: set[str] = set()
    for delta in deltas:
        own = {kind for kind in _KINDS if kind in delta}
        if runs and len(kinds | own) <= 1:
            runs[-1].append(delta)
            kinds |= own
        else:
            runs.append([delta])
            kinds = own
    return [run[0] if len(run) == 1 else add_up(run) for run in runs]


def _usage(usage: Usage) -> Json:
    """OpenAI's shape. Cached tokens are never paid for, so none are written in its sense."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
    }
