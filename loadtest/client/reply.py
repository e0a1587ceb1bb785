# SPDX-License-Identifier: Apache-2.0
"""What came back for one request, and when."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["running", "whole", "cancelled", "broken", "hung"]


@dataclass
class Reply:
    """An answer as far as it came; times are those of time.monotonic.

    Attributes:
        started, ended: when it was sent, and when nothing more came.
        status: of HTTP, or what stands for it over gRPC; 0 while there is none.
        error: what the server said in place of an answer or in the middle of one.
        pieces: the text in the order of its coming: reasoning, content, arguments of calls.
        channels: the same by what it is part of. Between two channels there is no order: pieces of
            both may come in one response, or in two.
        times: when each piece that said something came.
        finish_reasons: all that came; one, if all is well.
        num_tokens: of the answer, as the server counted them; None if it did not say.
        numbers: what an embedding or a ranking consists of.
        ids: of the chunks; all of a stream have one.
        end: whole when the protocol's own end came; broken when the connection ended before.
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
        """All of it."""
        return "".join(self.pieces)

    def say_delta(self, delta: dict[str, Any]) -> None:
        """Add what a delta of a chat, a completion or the ensemble says; see docs/contract.md."""
        now = len(self.pieces)
        for name in ("reasoning", "content", "text"):
            self.say(delta.get(name) or "", name)
        for call in delta.get("tool_calls") or ():
            told = call.get("function", call)
            said = (told.get("name") or "") + (told.get("arguments") or "")
            self.say(said, f"call {call.get('index', 0)}")
        self._join(now)

    def _join(self, first: int) -> None:
        """What came in one response is one piece."""
        if len(self.pieces) > first + 1:
            self.pieces[first:] = ["".join(self.pieces[first:])]
            del self.times[first + 1 :]

    def say(self, piece: str, channel: str = "content") -> None:
        """Add a piece; one that says nothing (a heartbeat, a role) counts for nothing."""
        if piece:
            self.pieces.append(piece)
            self.channels[channel] = self.channels.get(channel, "") + piece
            self.times.append(time.monotonic())
