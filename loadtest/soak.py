# SPDX-License-Identifier: Apache-2.0
"""A soak: mixed traffic on `nereid serve` for as long as you like, and a fault every minute.

    python loadtest/soak.py --minutes 30 [--users 8] [--seed 0] [--faults none] [--markdown PATH]

Half of the clients go away at a random moment, some read slowly, the rest are checked: what they
get must be what the same request got from the server at rest. Between two faults everything must
come to rest: no request and no block in use, file descriptors and memory of every process where
they were, shared memory as at the start. One page of Markdown comes out; exit code 1 when something
of this did not hold.
"""

import argparse
import asyncio
import collections
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import processes
from faults import FAULTS, Fault, recovered, table
from processes import Size
from served import Served
from traffic import Asker, Manner, Outcome, asks

_REST_LIMIT_S = 15.0
_LATE_S = 5.0
_AFTERMATH_S = 2.0
_MAX_GROWTH_MIB = 48.0
_MAX_MORE_FDS = 6


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
        if self.fault.is_harmless:
            return False
        return outcome.ended >= self.happened and outcome.started <= self.healed + _AFTERMATH_S


@dataclass
class Book:
    """What happened.

    Attributes:
        counts: (kind of request, what became of it) -> how often.
        broken: what should not have been, in words.
        wounds: the faults.
        first, last: role -> what its process held at the first and at the last rest.
        firsts_s, gaps_s: times to the first event of streams, and between two events.
    """

    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    wounds: list[Wound] = field(default_factory=list)
    first: dict[str, Size] = field(default_factory=dict)
    last: dict[str, Size] = field(default_factory=dict)
    rests: list[float] = field(default_factory=list)
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
        if kind in ("wrong", "hung") or wound is None:
            self.broken.append(f"{outcome.ask.kind} was {kind}: {outcome.detail[:300]}")
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
        self._num_shm = 0

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
                manner = Manner(cancel_after_s=rng.expovariate(3.0) + 0.001)
            elif ask.is_stream and rng.random() < 0.1:
                manner = Manner(pause_s=rng.uniform(0.02, 0.2))
            outcome = await self._asker.ask(ask, manner, self._expected[ask.key])
            self.book.take(outcome)
            await asyncio.sleep(rng.uniform(0.0, 2 * self._pause_s))
            if outcome.kind not in ("ok", "cancelled"):
                await asyncio.sleep(0.2)  # as a client with manners would

    async def _rest(self, when: str) -> None:
        """Nothing may be in use, and no process may have grown."""
        book = self.book
        started = time.monotonic()
        await asyncio.sleep(0.3)  # the gauges are published every tenth of a second
        while busy := await asyncio.to_thread(processes.what_is_busy, self._served):
            if time.monotonic() - started > _REST_LIMIT_S:
                book.broken.append(f"{when}, not at rest after {_REST_LIMIT_S:g} s: {busy}")
                break
            await asyncio.sleep(0.1)
        book.rests.append(time.monotonic() - started)
        await asyncio.sleep(0.5)
        sizes = await asyncio.to_thread(processes.sizes, self._served)
        self._compare(sizes, when)
        num_shm = len(processes.shared_memory(self._served))
        self._num_shm = self._num_shm or num_shm
        if num_shm > self._num_shm:
            book.broken.append(f"{when}: {num_shm} shared-memory files, {self._num_shm} at first")

    def _compare(self, sizes: dict[str, Size], when: str) -> None:
        book = self.book
        for role, size in sizes.items():
            first = book.first.get(role)
            if first is None or first.pid != size.pid:  # its second rest is the first to compare
                book.first[role] = size
                continue
            if size.num_fds > first.num_fds + _MAX_MORE_FDS:
                told = f"{size.num_fds} file descriptors, {first.num_fds} at first"
                book.broken.append(f"{when}: {role} has {told}")
            if size.rss_mib > first.rss_mib + _MAX_GROWTH_MIB:
                told = f"{size.rss_mib:.0f} MiB, {first.rss_mib:.0f} at first"
                book.broken.append(f"{when}: {role} holds {told}")
        book.last = sizes

    def _line(self, fault: Fault | None) -> str:
        counts = collections.Counter[str]()
        for (_, kind), count in self.book.counts.items():
            counts[kind] += count
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        return f"{fault.name if fault else 'no fault'}: {told}; {len(self.book.broken)} broken"


def report(book: Book, title: str) -> str:
    """One page of Markdown."""
    kinds = sorted({kind for _, kind in book.counts})
    names = sorted({name for name, _ in book.counts})
    rows = [[name, *(str(book.counts[name, kind]) for kind in kinds)] for name in names]
    total = [str(sum(book.counts[name, kind] for name in names)) for kind in kinds]
    late = [w for w in book.wounds if w.last_error_s > _LATE_S]
    broken = book.broken + [
        f"{w.fault.name}: a request that ran failed only after {w.last_error_s:.1f} s" for w in late
    ]
    parts = [
        f"## {title}",
        f"**{'nothing broke' if not broken else f'{len(broken)} things broke'}**",
        *(f"- {line}" for line in broken[:20]),
        table(["Requests", *kinds], [*rows, ["all", *total]]),
        _quantiles("Time to the first event", book.firsts_s),
        _quantiles("Time between two events", book.gaps_s),
        _quantiles("Time until nothing was in use any more", book.rests),
        table(["Fault", "Failed requests", "Last error", "Service again"], _wound_rows(book)),
        table(["Process", "MiB at first", "at last", "Files at first", "at last"], _sizes(book)),
    ]
    return "\n\n".join(parts) + "\n"


def _wound_rows(book: Book) -> list[list[str]]:
    rows = []
    for wound in book.wounds:
        again = wound.healed - wound.happened
        error = f"{wound.last_error_s:.1f} s" if wound.num_hurt else "-"
        rows.append([wound.fault.name, str(wound.num_hurt), error, f"{again:.1f} s"])
    return rows


def _sizes(book: Book) -> list[list[str]]:
    rows = []
    for role, last in sorted(book.last.items()):
        first = book.first[role]
        mib = [f"{first.rss_mib:.0f}", f"{last.rss_mib:.0f}"]
        rows.append([role, *mib, str(first.num_fds), str(last.num_fds)])
    return rows


def _quantiles(name: str, values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{name}: too few values"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    told = ", ".join(f"p{n} {cuts[n - 1] * 1000:.0f} ms" for n in (50, 90, 99))
    return f"{name}: {told} ({len(values)} values)"


def main() -> int:
    """Run it; 1 when an invariant broke."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=8, help="requests under way at a time")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="between requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="between faults")
    parser.add_argument("--faults", default="all", metavar="WORD", help="all, none, or a word")
    parser.add_argument("--model", type=Path, help="checkpoint (default: the demo)")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    args = parser.parse_args()
    faults = [f for f in FAULTS if args.faults == "all" or args.faults in f.name]
    flags = ["--max-restarts=1000", "--restart-backoff=0", "--served-model-name=chat"]
    rng = random.Random(args.seed)
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        soak = Soak(served, rng, args.users, args.pause)
        asyncio.run(soak.run(args.minutes, faults, args.every))
        if served.stop() != 0:
            soak.book.broken.append(f"nereid serve ended with {served.process}")
        left = processes.shared_memory(served)
    if left:
        soak.book.broken.append(f"shared memory was left behind: {left}")
    title = f"{args.minutes:g} minutes, {args.users} users, seed {args.seed}"
    page = report(soak.book, title)
    print(page)
    if args.markdown:
        args.markdown.write_text(page)
    return int("**nothing broke**" not in page)


if __name__ == "__main__":
    sys.exit(main())
