# SPDX-License-Identifier: Apache-2.0
"""What came back for one request, and when."""

import time
from dataclasses import dataclass, field
from typing import Literal

End = Literal["running", "whole", "cancelled", "broken", "hung"]


@dataclass
class Reply:
    """An answer as far as it came; times are those of time.monotonic.

    Attributes:
        started, ended: when it was sent, and when nothing more came.
        status: of HTTP, or what stands for it over gRPC; 0 while there is none.
        error: what the server said in place of an answer or in the middle of one.
        pieces: the text in the order of its coming: reasoning, content, arguments of calls.
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

    def say(self, piece: str) -> None:
        """Add a piece; one that says nothing (a heartbeat, a role) counts for nothing."""
        if piece:
            self.pieces.append(piece)
            self.times.append(time.monotonic())
