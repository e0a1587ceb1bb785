"""Records of requests, stored as one JSON object per line."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest.client.ask import Ask
from loadtest.client.reply import Reply
from loadtest.load.check_reply import Fault


@dataclass(frozen=True)
class Record:
    """The record of one request.

    Attributes:
        scenario: the scenario that sent the request.
        endpoint: the endpoint.
        started: the time of sending. It is from time.time, like the times of the server's metrics.
        late_s: the delay between the planned and the actual sending, caused by the load generator.
        ttft_s: the time to the first chunk with text, or None if no text arrived.
        gaps_s: the times between two chunks with text.
        e2e_s: the time until the end of the request.
        num_tokens: the number of tokens of the answer, or 0 if the server did not report it.
        outcome: "ok", "cancelled" (by the client), "rejected" (as expected), or the kind of the
            first fault.
        is_stream: whether the answer was streamed.
        faults: the descriptions of all faults.
    """

    scenario: str
    endpoint: str
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
        """Whether the request ended as expected."""
        return not self.faults

    @property
    def token_gap_s(self) -> float | None:
        """The mean time between two tokens. A chunk may contain several tokens."""
        if self.num_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.num_tokens - 1)


def record(
    scenario: str, ask: Ask, reply: Reply, faults: Sequence[Fault], late_s: float = 0.0
) -> Record:
    """Return the record of a reply whose faults are known."""
    fine = "ok" if ask.refused_with is None else "rejected"
    outcome = "cancelled" if reply.end == "cancelled" else fine
    return Record(
        scenario,
        ask.endpoint,
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
    """Write all records to a file, one per line."""
    lines = (json.dumps(asdict(one)) + "\n" for one in records)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Record]:
    """Read the records that `write` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
