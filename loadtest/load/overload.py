"""Send more requests than the server can answer, and measure accepted and rejected requests.

    python -m loadtest.load.overload [--factor 10] [--seconds 20]

The real server runs on a scripted engine of a known capacity: it runs a fixed number of sequences
at once, and each sequence takes a fixed number of steps of a fixed duration. The figures therefore
describe the queue, the server and the frontend, and not a model. Requests go to the OpenAI API.
They arrive at random times, which do not depend on earlier answers (an open loop). The client is
small and opens a new connection for each request, because it shares the machine with the server.
The table also shows how late the client sent its requests.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loadtest.client.light_client import Answer, posted
from loadtest.command_line import Option, parse_command_line
from loadtest.load.scripted_server import scripted_server
from loadtest.server.served import Served

_NAME = "scripted"
_NUM_SEQS = 8
_NUM_STEPS = 10
_STEP_MS = 50.0
CAPACITY_PER_S = _NUM_SEQS / (_NUM_STEPS * _STEP_MS / 1000)
# The longest time that a request may wait in the queue.
QUEUE_TIMEOUT_S = 1.0
_REQUEST_TIMEOUT_S = 60.0
_BODY = {
    "model": _NAME,
    "prompt": "Go",
    "max_tokens": _NUM_STEPS,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_SCRIPT = [{"when": "", "token_ids": [10], "delay_ms": _STEP_MS, "ends": False}]


@dataclass
class Phase:
    """The results of the requests of one phase.

    Attributes:
        offered_per_s: the mean number of arrivals per second.
        seconds: the time during which requests arrive.
        first_s: the time to first token of each finished request, in seconds.
        refused: the number of rejected requests for each HTTP status.
        refused_s: the time until each rejection, in seconds.
        retry_after: the values of the Retry-After headers of the rejections.
        wrong: descriptions of answers that were cut short or differ from the script.
        finished_in_time: the number of answers that ended while requests still arrived.
        late_s: the largest delay between the planned and the actual sending of a request.
    """

    offered_per_s: float
    seconds: float
    first_s: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    retry_after: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    finished_in_time: int = 0
    late_s: float = 0.0

    @property
    def throughput(self) -> float:
        """The number of finished answers per second."""
        return self.finished_in_time / self.seconds

    @property
    def slowest_first_s(self) -> float:
        """The 99th percentile of the time to first token in seconds, or 0 if there is no answer."""
        return float(np.percentile(self.first_s or [0.0], 99))

    def row(self, name: str) -> str:
        """Return the results as one row of the table `HEAD`. `name` is the first cell."""
        cells = (
            name,
            f"{self.offered_per_s:.0f}",
            f"{self.throughput:.1f}",
            _milliseconds(self.first_s, percentile=50),
            _milliseconds(self.first_s, percentile=99),
            f"{self.refused.total()}",
            _milliseconds(self.refused_s, percentile=99),
            ", ".join(f"{seconds} s" for seconds in sorted(self.retry_after)) or "-",
            f"{self.late_s * 1000:.0f}",
        )
        return f"| {' | '.join(cells)} |"

    def add_answer(self, first_s: float | None, num_tokens: int, *, is_in_time: bool) -> None:
        """Add a finished answer. `first_s` is its time to first token, or None without a token."""
        if num_tokens != _NUM_STEPS or first_s is None:
            self.wrong.append(f"an answer has {num_tokens} tokens instead of {_NUM_STEPS}")
            return
        self.first_s.append(first_s)
        self.finished_in_time += is_in_time

    def add_rejection(self, answer: Answer, text: str, after_s: float) -> None:
        """Add a rejection with the body `text` that arrived `after_s` seconds after the request."""
        retry_after = answer.headers.get("retry-after")
        self.refused[answer.status] += 1
        self.refused_s.append(after_s)
        if answer.status not in (429, 503) or retry_after is None:
            self.wrong.append(f"{answer.status} {text}")
        else:
            self.retry_after[retry_after] += 1


HEAD = (
    "| Phase | Offered/s | Finished/s | TTFT median ms | TTFT p99 ms | Rejected "
    "| Rejection p99 ms | Retry-After | Client late by ms |\n|---|---|---|---|---|---|---|---|---|"
)


def serve(folder: Path) -> Served:
    """Create a server with the scripted engine, but do not start it. Its script is in `folder`."""
    settings = {
        "NEREID_MAX_NUM_SEQS": str(_NUM_SEQS),
        "NEREID_DEFAULT_QUEUE_TIMEOUT_S": str(QUEUE_TIMEOUT_S),
    }
    flags = [f"--served-model-name={_NAME}"]
    return scripted_server(folder, _SCRIPT, settings=settings, flags=flags)


async def offer(served: Served, per_second: float, seconds: float, seed: int = 0) -> Phase:
    """Send requests at random times with a mean rate of `per_second`, and return the results."""
    rng = random.Random(seed)
    phase = Phase(per_second, seconds)
    running = []
    due = time.monotonic()
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        phase.late_s = max(phase.late_s, time.monotonic() - due)
        running.append(asyncio.create_task(_ask(served, phase, end)))
        due += rng.expovariate(per_second)
    await asyncio.gather(*running)
    return phase


async def _ask(served: Served, phase: Phase, end: float) -> None:
    """Send one request, and add its result to `phase`, whose last request is sent before `end`."""
    started, first_s, num_tokens = time.monotonic(), None, 0
    async with (
        asyncio.timeout(_REQUEST_TIMEOUT_S),
        posted(served.openai_port, "/v1/completions", _BODY) as answer,
    ):
        if answer.status != 200:
            text = await answer.text()
            phase.add_rejection(answer, text, time.monotonic() - started)
            return
        async for event in answer.events():
            if "error" in event:
                phase.wrong.append(str(event["error"]))
                return
            first_s = first_s or time.monotonic() - started
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    phase.add_answer(first_s, num_tokens, is_in_time=time.monotonic() <= end)


async def measure(served: Served, factor: float, seconds: float) -> dict[str, Phase]:
    """Run phases at half of the capacity, just above it (peak throughput), and far above it."""
    phases = {}
    for name, share in (("half", 0.5), ("peak", 1.3), ("overload", factor)):
        phases[name] = await offer(served, CAPACITY_PER_S * share, seconds)
        print(phases[name].row(f"{share:g} x capacity"), flush=True)
        await asyncio.sleep(2.0)
    return phases


def judge(phases: dict[str, Phase], least_share: float = 0.9, slack: float = 2.0) -> list[str]:
    """Return descriptions of the figures that violate a limit.

    Args:
        phases: the phases by name. The names "peak" and "overload" are required.
        least_share: the share of the peak throughput that must remain in the overload.
        slack: the 99th percentile of TTFT may be at most this multiple of the queue timeout.
    """
    peak, overload = phases["peak"], phases["overload"]
    problems = [f"{name}: {line}" for name, phase in phases.items() for line in phase.wrong[:3]]
    if overload.throughput < least_share * peak.throughput:
        problems.append(
            f"The throughput fell from {peak.throughput:.1f} to {overload.throughput:.1f} "
            "requests/s."
        )
    limit_s = slack * QUEUE_TIMEOUT_S
    if overload.slowest_first_s > limit_s:
        problems.append(
            f"The 99th percentile of the time to first token is {overload.slowest_first_s:.2f} s; "
            f"the limit is {limit_s:g} s."
        )
    if not overload.refused:
        problems.append("The server rejected no request, so it was not overloaded.")
    return problems


def _milliseconds(seconds: Sequence[float], percentile: float) -> str:
    return f"{np.percentile(seconds, percentile) * 1000:.0f}" if seconds else "-"


def main() -> int:
    """Run the phases and print a table. Return 1 if a limit is violated."""
    options = {
        "--factor": Option(10.0, "load of the overload, as multiple of capacity"),
        "--seconds": Option(20.0, "duration of each phase"),
    }
    args = parse_command_line(__doc__, options)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as served:
        capacity = f"The capacity is {CAPACITY_PER_S:g} requests/s."
        print(f"{capacity} The queue timeout is {QUEUE_TIMEOUT_S:g} s.\n\n{HEAD}", flush=True)
        phases = asyncio.run(measure(served, args.factor, args.seconds))
    problems = judge(phases)
    print("\n".join(problems) or "All figures are within the limits.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
