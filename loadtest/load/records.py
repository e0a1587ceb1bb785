# SPDX-License-Identifier: Apache-2.0
"""What is kept of each request: a line of JSON."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest.client.reply import Reply
from loadtest.load.check_reply import Fault
from loadtest.load.load_requests import Ask


@dataclass(frozen=True)
class Record:
    """One request.

    Attributes:
        scenario, door: which sent it, and where to.
        started: by time.time, so that it can be laid beside the server's gauges.
        late_s: how long after its due time it was sent; the load generator's own fault.
        ttft_s: until the first piece that said something; None if none came.
        gaps_s: between two pieces that said something.
        e2e_s: until its end.
        num_tokens: of the answer; 0 where nobody counted them.
        outcome: ok, cancelled (by its client), rejected (as it should be), or its first fault.
        faults: all of them, in words.
    """

    scenario: str
    door: str
    started: float
    late_s: float
    ttft_s: float | None
    gaps_s: list[float]
    e2e_s: float
    num_tokens: int
    outcome: str
    is_stream: bool
    faults: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        """Whether it ended as it should."""
        return not self.faults

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between two tokens; pieces may carry several."""
        if self.num_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.num_tokens - 1)


def record(
    scenario: str, ask: Ask, reply: Reply, faults: Sequence[Fault], late_s: float = 0.0
) -> Record:
    """The record of a judged reply."""
    fine = "ok" if ask.refused_with is None else "rejected"
    outcome = "cancelled" if reply.end == "cancelled" else fine
    return Record(
        scenario,
        ask.door,
        time.time() - (time.monotonic() - reply.started),
        late_s,
        reply.times[0] - reply.started if reply.times else None,
        [round(b - a, 6) for a, b in zip(reply.times, reply.times[1:], strict=False)],
        reply.ended - reply.started,
        reply.num_tokens or 0,
        faults[0].kind if faults else outcome,
        ask.is_stream,
        [str(fault) for fault in faults],
    )


def write(path: Path, records: Iterable[Record]) -> None:
    """All records, a line each."""
    lines = (json.dumps(asdict(one)) + "\n" for one in records)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Record]:
    """What `write` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
