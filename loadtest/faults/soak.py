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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.client.reply import Reply
from loadtest.client.traffic import Outcome, asks
from loadtest.faults.fault_rows import Fault, Section, make_asker, recovered
from loadtest.faults.leftovers import IdleChecks, stop
from loadtest.faults.process_faults import FAULTS
from loadtest.faults.server_watch import Watch
from loadtest.faults.traffic_report import (
    count_table,
    growing,
    outcomes,
    percentiles,
    process_table,
    server_side,
    verdict,
)
from loadtest.server.served import Served

_LATE_S = 5.0
_AFTERMATH_S = 2.0  # requests may still fail for this time after the service answers again
_PAUSE_AFTER_ERROR_S = 0.2
_MAX_TIMED_CHUNKS = 50  # only the first chunks of each stream are measured
_CANCELLED_SHARE = 0.5
_SLOW_SHARE = 0.1  # the share of the other streams
_POOLING_MODELS = {"embedding": "embed", "rerank": "rerank"}


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

    def take(self, outcome: Outcome) -> None:
        """Count a request that failed because of this fault."""
        self.num_hurt += 1
        if outcome.reply.started < self.happened:
            self.last_error_s = max(self.last_error_s, outcome.reply.ended - self.happened)


@dataclass
class Results:
    """The results of a soak test.

    Attributes:
        counts: the number of requests for each kind of request and each outcome.
        broken: descriptions of failed checks.
        injected: the injected faults.
        unexplained: failed requests that no injected fault explains.
        firsts_s: the times to the first text of streams, in seconds.
        gaps_s: the times between two chunks with text, in seconds.
    """

    counts: collections.Counter[tuple[str, ...]] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    unexplained: list[Outcome] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        """Add one request to the results. An outcome that is not allowed is a failed check."""
        self.counts[outcome.ask.kind, outcome.kind] += 1
        if outcome.ask.is_stream:
            self._take_times(outcome.reply)
        if outcome.kind in ("wrong", "hung"):
            self.broken.append(_description(outcome))
        elif outcome.kind not in ("ok", "cancelled"):
            self._take_failure(outcome)

    def _take_times(self, reply: Reply) -> None:
        """Add the times between the first chunks of a stream."""
        if reply.times:
            self.firsts_s.append(reply.times[0] - reply.started)
            times = reply.times[:_MAX_TIMED_CHUNKS]
            self.gaps_s += [later - sooner for sooner, later in itertools.pairwise(times)]

    def _take_failure(self, outcome: Outcome) -> None:
        """Attribute a failed request to the latest fault that explains its failure."""
        for injection in reversed(self.injected):
            if injection.explains(outcome):
                injection.take(outcome)
                return
        self.unexplained.append(outcome)


def _description(outcome: Outcome) -> str:
    return f"{outcome.ask.kind} was {outcome.kind}: {outcome.detail[:300]}"


class Soak:
    """One soak test of one server.

    Args:
        served: the server.
        rng: the source of all random choices.
        num_users: the number of requests at a time.
    """

    def __init__(self, served: Served, rng: random.Random, num_users: int) -> None:
        self._served = served
        self._rng = rng
        self._num_users = num_users
        self._asker = make_asker(served)
        self._asks = asks(rng, "chat", _POOLING_MODELS)
        self._expected: dict[str, str] = {}
        self.results = Results()
        self.checks = IdleChecks(served, self._asker)

    async def run(self, minutes: float, faults: Sequence[Fault], every_s: float) -> None:
        """Send traffic, inject a fault every `every_s` seconds, and check the idle server.

        The faults are injected in turn. If there are no faults, all rounds consist of traffic only.
        """
        await self._learn()
        end = time.monotonic() + minutes * 60
        try:
            await self._check("at the start")
            for fault in itertools.cycle(faults or [None]):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return
                await self._round(min(every_s, left_s), fault)
                await self._check(f"after {fault.name}" if fault else "after traffic")
                print(time.strftime("%H:%M:%S"), self._progress(fault), flush=True)
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
            await self._inject(fault)
        await asyncio.gather(*users)

    async def _inject(self, fault: Fault) -> None:
        """Cause a fault, and wait until the language model and the pooling models answer again."""
        injection = InjectedFault(fault, time.monotonic())
        self.results.injected.append(injection)
        try:
            await fault.happen(self._served)
        except KeyError:
            self.results.broken.append(f"{fault.name}: the process was not found")
            return
        text = next(ask for ask in self._asks if ask.kind == "whole chat")
        if await recovered(self._asker, text, injection.happened) is None:
            self.results.broken.append(f"{fault.name}: the service did not recover")
            return
        for kind in _POOLING_MODELS:
            probe = next(ask for ask in self._asks if ask.kind == kind)
            await recovered(self._asker, probe, injection.happened)
        injection.healed = time.monotonic()

    async def _user(self, stop: float) -> None:
        """Send random requests until the time `stop`. Cancel some, and read some slowly."""
        rng = random.Random(self._rng.random())
        while time.monotonic() < stop:
            ask = rng.choice(self._asks)
            expected = self._expected[ask.key]
            if rng.random() < _CANCELLED_SHARE:
                ask = ask.cancelled(after_s=10 ** rng.uniform(-3.0, 0.0))  # 1 ms to 1 s
            elif ask.is_stream and rng.random() < _SLOW_SHARE:
                ask = ask.read_slowly(pause_s=rng.uniform(0.02, 0.2))
            outcome = await self._asker.ask(ask, expected)
            self.results.take(outcome)
            if outcome.kind not in ("ok", "cancelled"):
                # A well-behaved client does not send the next request at once after an error.
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _check(self, when: str) -> None:
        self.results.broken += await self.checks.check(when)

    def _progress(self, fault: Fault | None) -> str:
        requests, num_failed = outcomes(self.results.counts), len(self.results.broken)
        return f"{fault.name if fault else 'no fault'}: {requests}; {num_failed} failed checks"


def report(soak: Soak, watch: Watch, title: str) -> Section:
    """Return the report as one page of Markdown."""
    results = soak.results
    broken = [*results.broken, *_late(results), *_unplanned(results, watch), *growing(watch)]
    paragraphs = [
        f"## {title}",
        *verdict(broken, max_lines=20),
        count_table("Requests", results.counts, part=0),
        percentiles("Time to the first text", results.firsts_s),
        percentiles("Time between two chunks with text", results.gaps_s),
        percentiles("Time until the server was idle", soak.checks.took_s),
        server_side(watch),
    ]
    if results.injected:
        head = ("Fault", "Failed requests", "Last error", "Recovery")
        paragraphs.append(table(head, map(_injection_row, results.injected)))
    paragraphs.append(process_table(soak.checks, watch))
    return Section("\n\n".join(paragraphs), is_broken=bool(broken))


def _late(results: Results) -> list[str]:
    """Return descriptions of running requests that failed long after a fault."""
    return [
        f"{injection.fault.name}: a request failed only after {injection.last_error_s:.1f} s"
        for injection in results.injected
        if injection.last_error_s > _LATE_S
    ]


def _unplanned(results: Results, watch: Watch) -> list[str]:
    """Return descriptions of outages without an injected fault, and of unexplained failures."""
    broken = []
    unexplained = results.unexplained
    for outage in watch.outages:
        if any(injection.meets(outage.began, outage.ended) for injection in results.injected):
            continue
        others = [
            outcome
            for outcome in unexplained
            if not outage.explains(outcome.reply.started, outcome.reply.ended)
        ]
        num_failed = len(unexplained) - len(others)
        unexplained = others
        broken.append(
            f"the server failed without an injected fault ({outage.reason}): {num_failed} requests "
            f"failed, and it recovered within {outage.seconds:.0f} s"
        )
    return broken + [_description(outcome) for outcome in unexplained]


def _injection_row(injection: InjectedFault) -> list[str]:
    recovery_s = injection.healed - injection.happened
    last_error = f"{injection.last_error_s:.1f} s" if injection.num_hurt else "-"
    return [injection.fault.name, str(injection.num_hurt), last_error, f"{recovery_s:.1f} s"]


def main() -> int:
    """Run the soak test. Return 1 if a check failed."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="duration of the traffic")
    add("--users", type=int, default=8, help="number of requests at a time")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--every", type=float, default=60.0, metavar="S", help="seconds between faults")
    faults_help = "`all`, `none`, or a word that the names of the faults must contain"
    add("--faults", default="all", metavar="WORD", help=faults_help)
    add("--model", type=Path, help="folder of the checkpoint (default: the demo)")
    add("--markdown", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    if args.faults not in ("all", "none"):
        command_line.check_word(parser, "--faults", args.faults, [one.name for one in FAULTS])
    command_line.exit_on_sigterm()
    faults = [fault for fault in FAULTS if args.faults == "all" or args.faults in fault.name]
    flags = ["--max-restarts=1000", "--restart-backoff=0", "--served-model-name=chat"]
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        with Watch(served) as watch:
            soak = Soak(served, random.Random(args.seed), args.users)
            asyncio.run(soak.run(args.minutes, faults, args.every))
        soak.results.broken += stop(served)
    title = f"{args.minutes:g} minutes, {args.users} users, seed {args.seed}"
    section = report(soak, watch, title)
    command_line.print_report(section.text, args.markdown)
    return int(section.is_broken)


if __name__ == "__main__":
    sys.exit(main())
