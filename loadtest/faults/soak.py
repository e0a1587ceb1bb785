"""Run a soak test: mixed traffic on `nereid serve`, with a fault every minute.

    python -m loadtest.faults.soak --minutes 30            # one fault a minute, each kind in turn
    python -m loadtest.faults.soak --minutes 10 --every 10 --faults "executor stub"
    python -m loadtest.faults.soak --minutes 10 --faults none --users 16   # checks only memory

Half of the clients cancel after a millisecond to a second, and some clients read slowly. Every
complete answer must equal the answer that the idle server gave to the same request.
After each fault, the server must become idle: no request and no KV cache block may remain in use,
the open files and the memory of every process and the shared memory must be back at their earlier
values, and no zombie process may remain. The memory of every process is also sampled during the
run, and must not keep growing.
The program prints one page of Markdown. The exit code is 1 if one of these checks failed, or if a
part of the server failed without an injected fault.
"""

import asyncio
import collections
import itertools
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.client.traffic import Asker, Outcome, asks
from loadtest.faults.fault_rows import Fault, recovered
from loadtest.faults.leftovers import Rests
from loadtest.faults.process_faults import FAULTS
from loadtest.faults.server_watch import Watch
from loadtest.faults.traffic_report import (
    count_table,
    growing,
    outcomes,
    percentiles,
    process_table,
    server_side,
)
from loadtest.server import processes
from loadtest.server.served import Served

_LATE_S = 5.0
_AFTERMATH_S = 2.0


@dataclass
class InjectedFault:
    """A fault that was injected, and the time until which requests may fail because of it.

    Attributes:
        fault: the fault.
        happened: the time of the fault, from time.monotonic.
        healed: the time at which the service answered again.
        num_hurt: the number of requests that failed because of the fault.
        last_error_s: the largest time from the fault to the failure of a request that was running.
    """

    fault: Fault
    happened: float
    healed: float = float("inf")
    num_hurt: int = 0
    last_error_s: float = 0.0

    def explains(self, outcome: Outcome) -> bool:
        """Return whether a failed request may have failed because of this fault."""
        return not self.fault.is_harmless and self.meets(outcome.reply.started, outcome.reply.ended)

    def meets(self, began: float, ended: float) -> bool:
        """Return whether the fault had an effect at some moment between `began` and `ended`."""
        return ended >= self.happened and began <= self.healed + _AFTERMATH_S


@dataclass
class Book:
    """The results of a soak test.

    Attributes:
        counts: the number of requests for each kind of request and each outcome.
        broken: descriptions of failed checks.
        injected: the injected faults.
        unexplained: failed requests that no injected fault explains.
        firsts_s: the times to the first text of streams, in seconds.
        gaps_s: the times between two chunks with text, in seconds.
    """

    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    unexplained: list[Outcome] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        """Add one request to the results. An outcome that is not allowed is a failed check."""
        kind = outcome.kind
        self.counts[outcome.ask.kind, kind] += 1
        reply = outcome.reply
        if reply.times and outcome.ask.is_stream:
            self.firsts_s.append(reply.times[0] - reply.started)
            self.gaps_s += [b - a for a, b in itertools.pairwise(reply.times[:50])]
        if kind in ("ok", "cancelled"):
            return
        injection = next((w for w in reversed(self.injected) if w.explains(outcome)), None)
        if kind in ("wrong", "hung"):
            self.broken.append(f"{outcome.ask.kind} was {kind}: {outcome.detail[:300]}")
            return
        if injection is None:
            self.unexplained.append(outcome)
            return
        injection.num_hurt += 1
        if reply.started < injection.happened:
            injection.last_error_s = max(injection.last_error_s, reply.ended - injection.happened)


class Soak:
    """One soak test of one server.

    Args:
        served: the server.
        rng: the source of all random choices.
        num_users: the number of requests at a time.
        pause_s: the mean pause of a user between two requests, in seconds.
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
        """Send traffic, inject a fault every `every_s` seconds, and check the idle server."""
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
        """Send every request once to the idle server, and store the answers as expected answers."""
        for ask in self._asks:
            outcome = await self._asker.ask(ask)
            if outcome.kind != "ok":
                raise RuntimeError(
                    f"The idle server did not answer a request of the kind {ask.kind!r}: "
                    f"{outcome.kind}: {outcome.detail}"
                )
            self._expected[ask.key] = outcome.reply.answer

    async def _round(self, seconds: float, fault: Fault | None) -> None:
        """Send traffic for `seconds`, and inject one fault in the first half."""
        stop = time.monotonic() + seconds
        users = [asyncio.create_task(self._user(stop)) for _ in range(self._num_users)]
        if fault is not None:
            await asyncio.sleep(seconds * self._rng.uniform(0.2, 0.4))
            await self._hurt(fault)
        await asyncio.gather(*users)

    async def _hurt(self, fault: Fault) -> None:
        injection = InjectedFault(fault, time.monotonic())
        self.book.injected.append(injection)
        try:
            await fault.happen(self._served)
        except KeyError:
            self.book.broken.append(f"{fault.name}: the process was not found")
            return
        took = await recovered(self._asker, self._asks[1], injection.happened)
        if took is None:
            self.book.broken.append(f"{fault.name}: the service did not recover")
            return
        pooled = [ask for ask in self._asks if ask.kind in ("embedding", "rerank")][:2]
        for ask in pooled:
            await recovered(self._asker, ask, injection.happened)
        injection.healed = time.monotonic()

    async def _user(self, stop: float) -> None:
        rng = random.Random(self._rng.random())
        while time.monotonic() < stop:
            ask = rng.choice(self._asks)
            expected = self._expected[ask.key]
            if rng.random() < 0.5:
                ask = ask.cancelled(10 ** rng.uniform(-3.0, 0.0))
            elif ask.is_stream and rng.random() < 0.1:
                ask = ask.read_slowly(rng.uniform(0.02, 0.2))
            outcome = await self._asker.ask(ask, expected)
            self.book.take(outcome)
            await asyncio.sleep(rng.uniform(0.0, 2 * self._pause_s))
            if outcome.kind not in ("ok", "cancelled"):
                await asyncio.sleep(0.2)  # as a well-behaved client does after an error

    async def _rest(self, when: str) -> None:
        self.book.broken += await self.rests.check(when)

    def _line(self, fault: Fault | None) -> str:
        requests, num_failed = outcomes(self.book.counts), len(self.book.broken)
        return f"{fault.name if fault else 'no fault'}: {requests}; {num_failed} failed checks"


def report(soak: Soak, watch: Watch, title: str) -> str:
    """Return the report as one page of Markdown."""
    book = soak.book
    broken = [*book.broken, *_late(book), *_unplanned(book, watch), *growing(watch)]
    parts = [
        f"## {title}",
        f"**{f'{len(broken)} checks failed' if broken else 'no check failed'}**",
        *(f"- {line}" for line in broken[:20]),
        count_table("Requests", book.counts, 0),
        percentiles("Time to the first text", book.firsts_s),
        percentiles("Time between two chunks with text", book.gaps_s),
        percentiles("Time until the server was idle", soak.rests.took_s),
        server_side(watch),
    ]
    if book.injected:
        parts.append(
            table(["Fault", "Failed requests", "Last error", "Recovery"], _injection_rows(book))
        )
    parts.append(process_table(soak.rests, watch))
    return "\n\n".join(parts) + "\n"


def _late(book: Book) -> list[str]:
    late = [injection for injection in book.injected if injection.last_error_s > _LATE_S]
    return [f"{w.fault.name}: a request failed only after {w.last_error_s:.1f} s" for w in late]


def _unplanned(book: Book, watch: Watch) -> list[str]:
    """Return descriptions of outages without an injected fault, and of unexplained failures."""
    outages = [
        o for o in watch.outages if not any(w.meets(o.began, o.ended) for w in book.injected)
    ]
    broken = []
    failed = book.unexplained
    for outage in outages:
        hurt = [one for one in failed if outage.explains(one.reply.started, one.reply.ended)]
        failed = [one for one in failed if one not in hurt]
        took = f"{len(hurt)} requests failed, and it recovered within {outage.seconds:.0f} s"
        broken.append(f"the server failed without an injected fault ({outage.reason}): {took}")
    return broken + [f"{one.ask.kind} was {one.kind}: {one.detail[:300]}" for one in failed]


def _injection_rows(book: Book) -> list[list[str]]:
    rows = []
    for injection in book.injected:
        again = injection.healed - injection.happened
        error = f"{injection.last_error_s:.1f} s" if injection.num_hurt else "-"
        rows.append([injection.fault.name, str(injection.num_hurt), error, f"{again:.1f} s"])
    return rows


def main() -> int:
    """Run the soak test. Return 1 if a check failed."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="duration of the traffic")
    add("--users", type=int, default=8, help="number of requests at a time")
    add("--pause", type=float, default=0.0, metavar="S", help="mean pause between requests")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--every", type=float, default=60.0, metavar="S", help="seconds between faults")
    add(
        "--faults",
        default="all",
        metavar="WORD",
        help="`all`, `none`, or a word that the names of the faults must contain",
    )
    add("--model", type=Path, help="folder of the checkpoint (default: the demo)")
    add("--markdown", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    # SystemExit leaves the `with` block, which stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults = [f for f in FAULTS if args.faults == "all" or args.faults in f.name]
    flags = ["--max-restarts=1000", "--restart-backoff=0", "--served-model-name=chat"]
    rng = random.Random(args.seed)
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        with Watch(served) as watch:
            soak = Soak(served, rng, args.users, args.pause)
            asyncio.run(soak.run(args.minutes, faults, args.every))
        if served.stop() != 0:
            soak.book.broken.append(f"nereid serve did not end with exit code 0: {served.process}")
        left = processes.shared_memory(served)
    if left:
        soak.book.broken.append(f"shared-memory files were not removed: {', '.join(left)}")
    title = f"{args.minutes:g} minutes, {args.users} users, seed {args.seed}"
    page = report(soak, watch, title)
    print(page)
    if args.markdown:
        args.markdown.write_text(page)
    return int("**no check failed**" not in page)


if __name__ == "__main__":
    sys.exit(main())
