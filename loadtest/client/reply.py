"""The reply to one request, with the arrival times of its chunks."""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["running", "whole", "cancelled", "broken", "hung"]
# Embeddings may differ by float32 rounding, because other texts are computed in the same batch.
TOLERANCE = 1e-3


@dataclass
class Reply:
    """A reply, as far as it has arrived. Times are from time.monotonic.

    Attributes:
        started: the time of sending.
        ended: the time at which the client stopped reading.
        status: the HTTP status; for gRPC, the equivalent HTTP status. 0 until the status is known.
        error: the error message of the server, instead of an answer or within an answer.
        pieces: the texts of the chunks in order of arrival: reasoning, content, and tool calls.
        channels: the same text, separated into the reasoning, the content and the tool calls of
            each choice. The order of text in different channels does not matter, because one
            response may contain text of several channels.
        times: the arrival time of each chunk with text.
        finish_reasons: all finish reasons. A correct stream has exactly one finish reason.
        num_tokens: the number of tokens that the server reported; None if it reported no number.
        numbers: the numbers of embeddings, or the scores of a ranking.
        ids: the ids of all chunks. In a correct stream, all chunks have the same id.
        end: "whole" if the stream ended as the protocol requires, "broken" if the connection ended
            before.
    """

    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0
    error: str = ""
    pieces: list[str] = field(default_factory=list)
    channels: dict[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: int | None = None
    numbers: list[float] | None = None
    ids: set[str] = field(default_factory=set)
    end: End = "running"

    @property
    def text(self) -> str:
        """The text of all chunks."""
        return "".join(self.pieces)

    @property
    def is_refused(self) -> bool:
        """Whether the server rejected the request because it had too much work."""
        return self.status in (429, 503)

    @property
    def answer(self) -> str:
        """The answer as JSON: the numbers, or the text of each channel.

        Two correct replies to the same request have the same answer, with or without streaming.
        """
        return json.dumps(self.channels if self.numbers is None else self.numbers, sort_keys=True)

    def add_delta(self, delta: dict[str, Any], choice: int = 0) -> None:
        """Add the text of a delta from a chat, from a text completion, or from the ensemble.

        Args:
            delta: the delta, or the whole message of an answer that is not streamed.
            choice: the index of the choice to which the delta belongs.
        """
        num_before = len(self.pieces)
        prefix = f"choice {choice} " if choice else ""
        self.add_text(delta.get("reasoning") or "", f"{prefix}reasoning")
        self.add_text(delta.get("content") or delta.get("text") or "", f"{prefix}content")
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function = call.get("function", call)
            text = (function.get("name") or "") + (function.get("arguments") or "")
            self.add_text(text, f"{prefix}call {call.get('index', number)}")
        if len(self.pieces) > num_before + 1:  # all texts of a delta arrived in one chunk
            self.pieces[num_before:] = ["".join(self.pieces[num_before:])]
            del self.times[num_before + 1 :]

    def add_text(self, text: str, channel: str = "content") -> None:
        """Add a text that arrived now. An empty text, such as a heartbeat or a role, is ignored."""
        if text:
            self.pieces.append(text)
            self.channels[channel] = self.channels.get(channel, "") + text
            self.times.append(time.monotonic())

    def add_ending(self, fields: dict[str, Any]) -> None:
        """Store the finish reason and the number of tokens if `fields` contain them.

        Args:
            fields: a chunk or a choice of the OpenAI API, or a delta of the ensemble.
        """
        if reason := fields.get("finish_reason"):
            self.finish_reasons.append(reason)
        if usage := fields.get("usage"):
            self.num_tokens = usage["completion_tokens"]
