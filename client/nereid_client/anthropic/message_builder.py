"""Converts the backend's deltas to a message of Anthropic's API, or to the events of a stream.

A stream consists of these events:

1. message_start and ping
2. for each block: content_block_start, several content_block_delta, content_block_stop
3. message_delta and message_stop
"""

import base64
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, BackendError
from nereid_client.streaming.deltas import Delta, ToolCallPiece, Usage, unfinished_error

Json = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Maps a finish reason that the backend sends to the stop reason in the message."""


class MessageBuilder:
    """A message that is being generated.

    `add` returns the events of a stream. After the last delta, `message` returns the whole message.
    """

    def __init__(self, message_id: str, model: str, *, shows_thinking: bool = True) -> None:
        self._id = message_id
        self._model = model
        self._shows_thinking = shows_thinking
        # The content blocks.
        self._finished: list[Json] = []  # the complete blocks
        self._block: _Block | None = None  # the current block
        self._num_calls = 0  # the number of tool calls that have started
        # These fields describe the end of the message.
        self._usage: Usage = {"prompt_tokens": 0, "completion_tokens": 0}
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    @property
    def is_over(self) -> bool:
        """Whether the last delta has been added."""
        return self._stop["stop_reason"] is not None

    def message(self) -> Json:
        """Return the message with all blocks that are complete."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._finished,
            **self._stop,
            "usage": _usage(self._usage) | {"service_tier": "standard"},
        }

    def opening(self, first: Delta | None) -> list[Json]:
        """Return the events message_start and ping, which start the stream.

        message_start contains the token counts of the first delta.
        """
        self._usage = (first or {}).get("usage", self._usage)
        return [{"type": "message_start", "message": self.message()}, {"type": "ping"}]

    def add(self, delta: Delta) -> list[Json]:
        """Append a delta to the message, and return the events that describe the change.

        Raises:
            ApiError: the finish reason of the delta shows that the server aborted the request.
            BackendError: the delta continues a tool call that has ended.
        """
        self._usage = delta.get("usage", self._usage)
        events = []
        if reasoning := delta.get("reasoning"):
            # A new block starts with an empty signature. The signature is a hash of the whole text,
            # which is still incomplete.
            events += self._add_text(reasoning, "thinking", {"thinking": "", "signature": ""})
        if content := delta.get("content"):
            events += self._add_text(content, "text", {"text": ""})
        for piece in delta.get("tool_calls", ()):
            events += self._add_call(piece)
        if "finish_reason" in delta:
            events += self._end_message(delta)
        return events

    async def add_all(self, deltas: AsyncGenerator[Delta]) -> None:
        """Append all deltas of a stream.

        Raises:
            ApiError: the server aborted the request.
            BackendError: a delta is invalid, or the stream ends without a finish reason.
        """
        async with aclosing(deltas):
            async for delta in deltas:
                self.add(delta)
        if not self.is_over:
            raise unfinished_error()

    def _add_text(self, text: str, kind: str, empty: Json) -> list[Json]:
        """Append a text to the current block.

        If the current block has another type than `kind`, start a new block first.

        Args:
            text: the text.
            kind: "text" or "thinking".
            empty: the fields of a new block, except its type.
        """
        events = []
        if self._block is None or self._block.kind != kind:
            events += self._start_block(_Block({"type": kind, **empty}))
        return events + self._append_to_block(text)

    def _add_call(self, piece: ToolCallPiece) -> list[Json]:
        """Append a piece of a tool call. The first piece of a call starts a new block.

        Raises: BackendError if the tool call with this number has ended.
        """
        arguments = piece.get("arguments", "")
        if self._is_current_call(piece["index"]):
            return self._append_to_block(arguments)
        is_new_call = piece["index"] >= self._num_calls
        if not is_new_call:
            raise BackendError(
                "INTERNAL",
                f"The Triton server sent arguments of tool call {piece['index']} after this call "
                "had ended",
            )
        self._num_calls = piece["index"] + 1
        call = {"id": piece.get("id", ""), "name": piece.get("name", ""), "input": {}}
        start_events = self._start_block(_Block({"type": "tool_use", **call}))
        return start_events + self._append_to_block(arguments)

    def _is_current_call(self, number: int) -> bool:
        """Return whether the current block is tool call number `number`."""
        is_call = self._block is not None and self._block.kind == "tool_use"
        return is_call and number == self._num_calls - 1

    def _start_block(self, block: "_Block") -> list[Json]:
        """Finish the current block and start a new block. Return the events for both steps."""
        events = self._finish_block()
        self._block = block
        start = {"type": "content_block_start", "index": len(self._finished)}
        return [*events, start | {"content_block": block.opening}]

    def _append_to_block(self, text: str) -> list[Json]:
        """Append a text to the current block, and return the event with this text.

        Return no event if the text is empty, or if the text is reasoning that the client did not
        request.
        """
        if self._block is None or not text:
            return []
        delta = self._block.add(text)
        is_shown = self._block.kind != "thinking" or self._shows_thinking
        return [self._delta_event(delta)] if is_shown else []

    def _finish_block(self) -> list[Json]:
        """Add the current block to the complete blocks, and return the last events of the block.

        The last events of a thinking block contain its signature. If thinking is not shown, the
        complete block contains no text.
        """
        if self._block is None:
            return []
        whole_block = self._block.whole()
        events = []
        if self._block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": whole_block["signature"]}
            events.append(self._delta_event(signature))
            if not self._shows_thinking:
                whole_block["thinking"] = ""
        events.append({"type": "content_block_stop", "index": len(self._finished)})
        self._finished.append(whole_block)
        self._block = None
        return events

    def _delta_event(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._finished), "delta": delta}

    def _end_message(self, delta: Delta) -> list[Json]:
        """End the message with the stop reason from the last delta, and return the last events.

        Raises: ApiError if Anthropic's API has no stop reason for the delta's finish reason, for
            example because the server aborted the request.
        """
        events = self._finish_block()
        self._stop = self._stop_fields(delta["finish_reason"], delta.get("stop_reason"))
        message_delta = {
            "type": "message_delta",
            "delta": self._stop,
            "usage": _usage(self._usage),
        }
        return [*events, message_delta, {"type": "message_stop"}]

    def _stop_fields(self, finish_reason: str, matched: object) -> Json:
        """Return the fields of the message that say why the message ended.

        Args:
            finish_reason: the reason in OpenAI's API, such as "stop".
            matched: the stop sequence that the model has generated. For a stop token, this value is
                the id of the token. None if the message has ended for another reason.
        """
        if finish_reason not in _STOP_REASONS:
            raise ApiError(500, f"The server ended the request with the reason {finish_reason}")
        if finish_reason == "stop" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        stop_reason = _STOP_REASONS[finish_reason]
        if finish_reason == "stop" and self._num_calls:
            # If the request forces the model to call a certain function, the backend's finish
            # reason is "stop", as in OpenAI's API, and not "tool_calls".
            stop_reason = "tool_use"
        return {"stop_reason": stop_reason, "stop_sequence": None}


class _Block:
    """A content block that is being generated.

    Args:
        opening: the block in the event content_block_start.

    Attributes:
        kind: the type of the block: "text", "thinking" or "tool_use".
    """

    def __init__(self, opening: Json) -> None:
        self.opening = opening
        self.kind: str = opening["type"]
        self._pieces: list[str] = []

    def add(self, text: str) -> Json:
        """Append a text to the block, and return the `delta` of the event with this text."""
        self._pieces.append(text)
        delta_type, key = _DELTAS[self.kind]
        return {"type": delta_type, key: text}

    def whole(self) -> Json:
        """Return the whole block."""
        text = "".join(self._pieces)
        if self.kind == "tool_use":
            return self.opening | {"input": _tool_input(text)}
        if self.kind == "thinking":
            return self.opening | {"thinking": text, "signature": _signature(text)}
        return self.opening | {"text": text}


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Maps the type of a block to the type of its deltas, and to the key of the text in a delta."""


def _signature(reasoning: str) -> str:
    """Return the signature of a thinking block: a hash of the reasoning text.

    Anthropic's servers sign reasoning in order to recognize the reasoning in a later request. Some
    clients send reasoning back only if it has a signature. The frontend does not check signatures.
    """
    return base64.b64encode(hashlib.sha256(reasoning.encode()).digest()).decode()


def _tool_input(arguments: str) -> Json:
    """Parse the arguments of a tool call, and return them as an object.

    If the arguments are not a valid JSON object, return an object that contains their text. For
    example, the model may reach max_tokens inside the arguments, or may write the value NaN.

    Examples: '{"a": 1}' returns {"a": 1}, and '{"a": ' returns {"unparsed_arguments": '{"a": '}.
    """
    try:
        # With strict=False, strings may contain line breaks. Models sometimes write a line break
        # instead of the escape sequence \n.
        parsed = json.loads(arguments or "{}", strict=False)
        # `json.loads` accepts NaN and half of a surrogate pair, but JSON does not allow them.
        # `json.dumps` and `encode` raise an error for such values.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed_arguments": arguments}


def _usage(usage: Usage) -> Json:
    """Return the token counts in the format of Anthropic's API.

    The field input_tokens does not contain the tokens that were read from the prefix cache. The
    field cache_creation_input_tokens is 0, because Nereid does not bill writes to the cache.
    """
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking},
    }
