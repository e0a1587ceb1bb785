"""Records of requests, stored as one JSON object per line."""

import itertools
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
        endpoint: the endpoint, as in `Ask`.
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
    def ended(self) -> float:
        """The time of the end of the request, from time.time."""
        return self.started + self.e2e_s

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
    outcome = "ok" if ask.refused_with is None else "rejected"
    if reply.end == "cancelled":
        outcome = "cancelled"
    return Record(
        scenario=scenario,
        endpoint=ask.endpoint,
        started=time.time() - (time.monotonic() - reply.started),
        late_s=late_s,
        ttft_s=reply.times[0] - reply.started if reply.times else None,
        gaps_s=[round(end - start, 6) for start, end in itertools.pairwise(reply.times)],
        e2e_s=reply.ended - reply.started,
        num_tokens=reply.num_tokens or 0,
        outcome=faults[0].kind if faults else outcome,
        is_stream=ask.is_stream,
        faults=[str(fault) for fault in faults],
    )


def write(path: Path, records: Iterable[Record]) -> None:
    """Write all records to a file, one per line."""
    lines = (json.dumps(asdict(one)) + "\n" for one in records)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Record]:
    """Read the records that `write` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
