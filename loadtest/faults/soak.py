# SPDX-License-Identifier: Apache-2.0
"""A soak: mixed traffic on `nereid serve` for as long as you like, and a fault every minute.

    python -m loadtest.faults.soak --minutes 30   a fault a minute, each kind in turn
    python -m loadtest.faults.soak --minutes 10 --every 10 --faults "executor stub"
    python -m loadtest.faults.soak --minutes 10 --faults none --users 16   is memory flat?

Half of the clients go away after a millisecond to a second, if they are not answered before; some
read slowly; the answers are checked: they must be what the same request got from the server at
rest. Between two faults everything must come to rest: no request and no block in use, open files
and memory of every process where they were, shared memory as at the start, no zombie. All along,
the memory of every process is sampled, and one that lives for some minutes may not keep growing.
One page of Markdown comes out; exit code 1 when something of this did not hold, or the server broke
without a fault of ours.
"""

import argparse
import asyncio
import collections
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client.traffic import Asker, Manner, Outcome, asks
from loadtest.faults.leftovers import Rests
from loadtest.faults.memory_slope import MAX_SLOPE_MIB_PER_MINUTE
from loadtest.faults.process_faults import FAULTS, Fault, recovered, table
from loadtest.faults.server_watch import Watch
from loadtest.server import processes
from loadtest.server.served import Served

_LATE_S = 5.0
_AFTERMATH_S = 2.0
_LEVELS = (
    ("num_requests_running", 1, ""),
    ("num_requests_waiting", 1, ""),
    ("kv_cache_usage_perc", 100, " %"),
)
_COUNTERS = {
    "prompt_tokens_total": "prompt tokens",
    "prefix_cache_hits_total": "of them found in the prefix cache",
    "generation_tokens_total": "tokens generated",
    "request_success_total stop": "answers that ended by themselves",
    "request_success_total length": "at their limit",
    "request_success_total abort": "because their client left",
    "request_success_total error": "with an error",
    "requests_refused_total": "refused",
    "num_preemptions_total": "preempted",
    "merged_responses_total": "updates merged",
}


@dataclass
class Wound:
    """A fault that happened, and until when requests may fail for it."""

    fault: Fault
    happened: float
    healed: float = float("inf")
    num_hurt: int = 0
    last_error_s: float = 0.0

    def explains(self, outcome: Outcome) -> bool:
        """Whether a request that failed may have failed because of it."""
        return not self.fault.is_harmless and self.meets(outcome.started, outcome.ended)

    def meets(self, began: float, ended: float) -> bool:
        """Whether it was felt at some moment of that time."""
        return ended >= self.happened and began <= self.healed + _AFTERMATH_S


@dataclass
class Book:
    """What happened.

    Attributes:
        counts: (kind of request, what became of it) -> how often.
        broken: what should not have been, in words.
        wounds: the faults.
        unexplained: requests that failed without one.
        firsts_s, gaps_s: times to the first event of streams, and between two events.
    """

    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    wounds: list[Wound] = field(default_factory=list)
    unexplained: list[Outcome] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        """Enter one request; one that ended as it may not is broken."""
        kind = outcome.kind
        self.counts[outcome.ask.kind, kind] += 1
        if outcome.first is not None and outcome.ask.is_stream:
            self.firsts_s.append(outcome.first)
            self.gaps_s += outcome.gaps[:50]
        if kind in ("ok", "cancelled"):
            return
        wound = next((w for w in reversed(self.wounds) if w.explains(outcome)), None)
        if kind in ("wrong", "hung"):
            self.broken.append(f"{outcome.ask.kind} was {kind}: {outcome.detail[:300]}")
            return
        if wound is None:
            self.unexplained.append(outcome)
            return
        wound.num_hurt += 1
        if outcome.started < wound.happened:
            wound.last_error_s = max(wound.last_error_s, outcome.ended - wound.happened)


class Soak:
    """One run against one server.

    Args:
        served: the server.
        rng: all chance comes from it.
        num_users: requests under way at a time.
        pause_s: a user waits so long on average between two requests.
    """

    def __init__(
        self, served: Served, rng: random.Random, num_users: int, pause_s: float = 0.0
    ) -> None:
        self._served = served
        self._pause_s = pause_s
        self._rng = rng
        self._num_users = num_users
        self.book = Book()
        url = f"http://127.0.0.1:{served.openai_port}"
        self._asker = Asker(url, served.http_url)
        self._asks = asks(rng, "chat", {"embedding": "embed", "rerank": "rerank"})
        self._expected: dict[str, str] = {}
        self.rests = Rests(served, self._asker)

    async def run(self, minutes: float, faults: Sequence[Fault], every_s: float) -> None:
        """Traffic with faults in turn, a rest before each."""
        await self._learn()
        end = time.monotonic() + minutes * 60
        turn = 0
        try:
            await self._rest("at the start")
            while time.monotonic() < end:
                left_s = min(every_s, end - time.monotonic())
                fault = faults[turn % len(faults)] if faults else None
                turn += 1
                await self._round(left_s, fault)
                await self._rest(f"after {fault.name}" if fault else "after traffic")
                print(f"{time.strftime('%H:%M:%S')} {self._line(fault)}", flush=True)
        finally:
            await self._asker.close()

    async def _learn(self) -> None:
        """Ask everything once, alone."""
        for ask in self._asks:
            outcome = await self._asker.ask(ask)
            if outcome.kind != "ok":
                raise RuntimeError(f"{ask.kind} at rest was {outcome.kind}: {outcome.detail}")
            self._expected[ask.key] = outcome.answer

    async def _round(self, seconds: float, fault: Fault | None) -> None:
        """Traffic for so long, and one fault in the middle of it."""
        stop = time.monotonic() + seconds
        users = [asyncio.create_task(self._user(stop)) for _ in range(self._num_users)]
        if fault is not None:
            await asyncio.sleep(seconds * self._rng.uniform(0.2, 0.4))
            await self._hurt(fault)
        await asyncio.gather(*users)

    async def _hurt(self, fault: Fault) -> None:
        wound = Wound(fault, time.monotonic())
        self.book.wounds.append(wound)
        try:
            await fault.happen(self._served)
        except KeyError:
            self.book.broken.append(f"{fault.name}: there is no such process")
            return
        took = await recovered(self._asker, self._asks[1], wound.happened)
        if took is None:
            self.book.broken.append(f"{fault.name}: the service did not come back")
            return
        pooled = [ask for ask in self._asks if ask.kind in ("embedding", "rerank")][:2]
        for ask in pooled:
            await recovered(self._asker, ask, wound.happened)
        wound.healed = time.monotonic()

    async def _user(self, stop: float) -> None:
        rng = random.Random(self._rng.random())
        while time.monotonic() < stop:
            ask = rng.choice(self._asks)
            manner = Manner()
            if rng.random() < 0.5:
                manner = Manner(cancel_after_s=10 ** rng.uniform(-3.0, 0.0))
            elif ask.is_stream and rng.random() < 0.1:
                manner = Manner(pause_s=rng.uniform(0.02, 0.2))
            outcome = await self._asker.ask(ask, manner, self._expected[ask.key])
            self.book.take(outcome)
            await asyncio.sleep(rng.uniform(0.0, 2 * self._pause_s))
            if outcome.kind not in ("ok", "cancelled"):
                await asyncio.sleep(0.2)  # as a client with manners would

    async def _rest(self, when: str) -> None:
        self.book.broken += await self.rests.check(when)

    def _line(self, fault: Fault | None) -> str:
        counts = collections.Counter[str]()
        for (_, kind), count in self.book.counts.items():
            counts[kind] += count
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        return f"{fault.name if fault else 'no fault'}: {told}; {len(self.book.broken)} broken"


def report(soak: Soak, watch: Watch, title: str) -> str:
    """One page of Markdown."""
    book = soak.book
    kinds = sorted({kind for _, kind in book.counts})
    names = sorted({name for name, _ in book.counts})
    rows = [[name, *(str(book.counts[name, kind]) for kind in kinds)] for name in names]
    total = [str(sum(book.counts[name, kind] for name in names)) for kind in kinds]
    broken = [*book.broken, *_late(book), *_unplanned(book, watch), *growing(watch)]
    parts = [
        f"## {title}",
        f"**{'nothing broke' if not broken else f'{len(broken)} things broke'}**",
        *(f"- {line}" for line in broken[:20]),
        table(["Requests", *kinds], [*rows, ["all", *total]]),
        _quantiles("Time to the first event", book.firsts_s),
        _quantiles("Time between two events", book.gaps_s),
        _quantiles("Time until nothing was in use any more", soak.rests.took_s),
        server_side(watch),
    ]
    if book.wounds:
        parts.append(
            table(["Fault", "Failed requests", "Last error", "Service again"], _wound_rows(book))
        )
    parts.append(process_table(soak.rests, watch))
    return "\n\n".join(parts) + "\n"


def _late(book: Book) -> list[str]:
    late = [wound for wound in book.wounds if wound.last_error_s > _LATE_S]
    return [f"{w.fault.name}: a request failed only after {w.last_error_s:.1f} s" for w in late]


def _unplanned(book: Book, watch: Watch) -> list[str]:
    """What broke without a fault of ours, and the requests that failed without anything broken."""
    outages = [o for o in watch.outages if not any(w.meets(o.began, o.ended) for w in book.wounds)]
    broken = []
    failed = book.unexplained
    for outage in outages:
        hurt = [one for one in failed if outage.explains(one.started, one.ended)]
        failed = [one for one in failed if one not in hurt]
        took = f"{len(hurt)} requests failed, service again within {outage.seconds:.0f} s"
        broken.append(f"the server broke by itself, {outage.reason}: {took}")
    return broken + [f"{one.ask.kind} was {one.kind}: {one.detail[:300]}" for one in failed]


def growing(watch: Watch) -> list[str]:
    """Processes whose memory does not stay flat, in words."""
    return [
        f"{role} grows by {trend.slope:.2f} MiB a minute; the limit is {MAX_SLOPE_MIB_PER_MINUTE:g}"
        for role, trend in watch.trends().items()
        if not trend.is_flat
    ]


def server_side(watch: Watch) -> str:
    """What the server's own metrics say of the time that was watched."""
    counted = ", ".join(
        f"{watch.totals[name]:,.0f} {told}"
        for name, told in _COUNTERS.items()
        if watch.totals[name]
    )
    running, waiting, cache = (
        f"{scale * watch.mean(name):.1f}{unit} (peak {scale * watch.peaks.get(name, 0):.0f}{unit})"
        for name, scale, unit in _LEVELS
    )
    told = f"{running} sequences ran at once, {waiting} waited, {cache} of the KV cache was in use"
    return f"The server's own count: {counted}. On average {told}."


def _wound_rows(book: Book) -> list[list[str]]:
    rows = []
    for wound in book.wounds:
        again = wound.healed - wound.happened
        error = f"{wound.last_error_s:.1f} s" if wound.num_hurt else "-"
        rows.append([wound.fault.name, str(wound.num_hurt), error, f"{again:.1f} s"])
    return rows


def process_table(rests: Rests, watch: Watch) -> str:
    """What every process held at its first and at its last rest, and how its memory went."""
    trends = watch.trends()
    rows = []
    for role, last in sorted(rests.last.items()):
        first, trend = rests.first[role], trends.get(role)
        slope = "-" if trend is None or trend.slope is None else f"{trend.slope:+.2f}"
        quarters = ", ".join(f"{mib:.0f}" for mib in trend.quarters_mib) if trend else ""
        files = [str(first.num_fds), str(last.num_fds)]
        rows.append([role, f"{first.rss_mib:.0f}", quarters, slope, *files])
    shared = [f"{mib:.0f}" for mib in (rests.shared_mib[0], rests.shared_mib[-1])]
    rows.append(["/dev/shm", *shared, "-", "", ""])
    head = ["MiB at its first rest", "in each quarter", "a minute", "Files at first", "at last"]
    return table(["Process", *head], rows)


def _quantiles(name: str, values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{name}: too few values"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    told = ", ".join(f"p{n} {cuts[n - 1] * 1000:.0f} ms" for n in (50, 90, 99))
    return f"{name}: {told} ({len(values)} values)"


def main() -> int:
    """Run it; 1 when an invariant broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=8, help="requests under way at a time")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="between requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="between faults")
    parser.add_argument("--faults", default="all", metavar="WORD", help="all, none, or a word")
    parser.add_argument("--model", type=Path, help="checkpoint (default: the demo)")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive it
    faults = [f for f in FAULTS if args.faults == "all" or args.faults in f.name]
    flags = ["--max-restarts=1000", "--restart-backoff=0", "--served-model-name=chat"]
    rng = random.Random(args.seed)
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        with Watch(served) as watch:
            soak = Soak(served, rng, args.users, args.pause)
            asyncio.run(soak.run(args.minutes, faults, args.every))
        if served.stop() != 0:
            soak.book.broken.append(f"nereid serve ended with {served.process}")
        left = processes.shared_memory(served)
    if left:
        soak.book.broken.append(f"shared memory was left behind: {left}")
    title = f"{args.minutes:g} minutes, {args.users} users, seed {args.seed}"
    page = report(soak, watch, title)
    print(page)
    if args.markdown:
        args.markdown.write_text(page)
    return int("**nothing broke**" not in page)


if __name__ == "__main__":
    sys.exit(main())
