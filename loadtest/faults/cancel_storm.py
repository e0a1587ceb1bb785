# SPDX-License-Identifier: Apache-2.0
"""A storm of cancels: thousands of requests through every door, half of them given up at random.

    python -m loadtest.faults.cancel_storm   10,000 requests on each engine
    python -m loadtest.faults.cancel_storm --engine demo --requests 2000 --seed 7

Two servers, one after the other: the demo model, with more users than can run, a step of few tokens
and a KV cache that is too small, so that requests are given up while they are queued, prefilled,
decoded, preempted and held to a grammar; and the scripted engine, whose answers are known
beforehand and come fast. Clients leave after a random time or after a random number of events.
Doors: OpenAI chats and completions, streams and whole, the Triton server's gRPC streams and its
generate_stream. (Its generate does not notice that a client has gone.)

What must hold, every --rest requests and at the end:

    every answer that was not given up is, byte for byte, what the same request got alone
    no request, sequence or KV block is in use, in the engine or in the frontend
    no process is a zombie, none has more files open, /dev/shm holds no more than at first
    no process's memory keeps growing (judged where it was watched for some minutes)
    no request failed, hung or was refused, but while a server that had crashed was away
    every request, asked once more at the end, has the answer it had at the start

Server 2.51 can crash when a gRPC cancel meets the end of its stream (docs/triton-server.md). Each
crash is told; more than --crashes of them, or one that `nereid serve` did not mend, are a failure.
Exit code 1, and a list, when something did not hold.
"""

import argparse
import asyncio
import collections
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.client.cancellable_stream import GrpcDoor
from loadtest.client.traffic import Ask, Asker, Manner, Outcome
from loadtest.faults import cancel_storm_requests
from loadtest.faults.cancel_storm_requests import Load, door_of
from loadtest.faults.leftovers import Rests
from loadtest.faults.process_faults import table
from loadtest.faults.server_watch import Watch
from loadtest.faults.soak import growing, process_table, server_side
from loadtest.server import processes
from loadtest.server.served import ALONE, Served

_SHARE_GIVEN_UP = 0.5
_FIRST_GUESS_S = 0.3
_REMEMBERED = 0.9
_CHECKED_ENDS = ("wrong", "hung")
_HEALING_LIMIT_S = 60.0


class Storm:
    """One storm on one server.

    Args:
        served: the server.
        load: what is asked of it.
        rng: all chance comes from it.
        watch: sees when the server breaks.
        tell: gets a line of progress now and then.
        is_rude: whether gRPC clients cancel streams whose finish reason they have read, too.

    Attributes:
        counts: (door, state, what became of it) -> how many requests.
        broken: what did not hold, in words.
        rests: what the server held between the parts of the storm.
    """

    def __init__(
        self,
        served: Served,
        load: Load,
        rng: random.Random,
        watch: Watch,
        tell: Callable[[str], None] = print,
        is_rude: bool = False,
    ) -> None:
        self._served = served
        self._load = load
        self._rng = rng
        self._watch = watch
        self._tell = tell
        url = f"http://127.0.0.1:{served.openai_port}"
        self._asker = Asker(
            url, served.http_url, make_grpc=lambda: GrpcDoor(served.grpc_url, is_rude)
        )
        self._asks = [ask for group in load.groups for ask in group]
        self._expected = dict(load.known)
        self._typical_s: dict[str, float] = {}
        self._left = 0
        self._suspects: list[Outcome] = []
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.broken: list[str] = []
        self.rests = Rests(served, self._asker)

    async def run(self, num_requests: int, rest_every: int) -> None:
        """So many requests, with a rest after each part of so many."""
        try:
            await self._ask_alone("at the start")
            self.broken += await self.rests.check("at the start")
            begun = time.monotonic()
            done = 0
            while done < num_requests:
                part = min(rest_every, num_requests - done)
                await self._part(part)
                done += part
                await self._healed()
                self.broken += await self.rests.check(f"after {done} requests")
                self._judge()
                rate = done / (time.monotonic() - begun)
                self._tell(f"{time.strftime('%H:%M:%S')} {self._line(done, rate)}")
            await self._ask_alone("at the end")
        finally:
            await self._asker.close()

    async def _part(self, num_requests: int) -> None:
        self._left = num_requests
        users = (self._user() for _ in range(self._load.num_users))
        await asyncio.gather(*users)

    async def _user(self) -> None:
        rng = random.Random(self._rng.random())
        while self._left > 0:
            self._left -= 1
            ask = rng.choice(self._asks)
            manner = self._manner(rng, ask)
            expected = self._expected[ask.key]
            if ask.kind == cancel_storm_requests.LONG:
                ask = cancel_storm_requests.fresh(ask, rng)
            outcome = await self._asker.ask(ask, manner, expected)
            self._take(outcome)
            if outcome.kind in ("refused", "lost", "failed"):
                await asyncio.sleep(0.2)  # as a client with manners would

    def _manner(self, rng: random.Random, ask: Ask) -> Manner:
        """Whether a client stays; else when it goes, at any moment of such a request's life."""
        if rng.random() >= _SHARE_GIVEN_UP:
            return Manner()
        if ask.is_stream and rng.random() < 0.3:
            return Manner(cancel_after_events=1 + int(rng.expovariate(0.3)))
        return Manner(cancel_after_s=0.001 + rng.random() * self._typical(ask))

    def _typical(self, ask: Ask) -> float:
        return self._typical_s.get(ask.kind, _FIRST_GUESS_S)

    def _take(self, outcome: Outcome) -> None:
        ask, kind = outcome.ask, outcome.kind
        if kind == "cancelled":
            kind_told = "given up" if outcome.first is None else "given up half-way"
        else:
            kind_told = kind
        self.counts[door_of(ask), ask.kind, kind_told] += 1
        if kind == "ok":
            took_s = outcome.ended - outcome.started
            before_s = self._typical_s.get(ask.kind, took_s)
            self._typical_s[ask.kind] = _REMEMBERED * before_s + (1 - _REMEMBERED) * took_s
        elif kind in _CHECKED_ENDS:
            self.broken.append(_told(outcome))
        elif kind != "cancelled":
            self._suspects.append(outcome)

    async def _healed(self) -> None:
        """Wait for a server that is being started again."""
        deadline = time.monotonic() + _HEALING_LIMIT_S
        await asyncio.to_thread(self._watch.look)
        while any(outage.ended == float("inf") for outage in self._watch.outages):
            if time.monotonic() > deadline:
                self.broken.append(f"the server did not come back in {_HEALING_LIMIT_S:g} s")
                return
            await asyncio.sleep(0.5)
            await asyncio.to_thread(self._watch.look)

    def _judge(self) -> None:
        """Requests that failed must have an outage to blame."""
        for outcome in self._suspects:
            span = (outcome.started, outcome.ended)
            if not any(outage.explains(*span) for outage in self._watch.outages):
                self.broken.append(_told(outcome))
        self._suspects = []

    async def _ask_alone(self, when: str) -> None:
        """Ask everything once, one after the other, and see that it is what it should be."""
        for group in self._load.groups:
            for ask in group:
                outcome = await self._asker.ask(ask)
                told = f"{when}: {door_of(ask)}, {ask.kind}"
                if outcome.kind != "ok":
                    self.broken.append(f"{told}: {outcome.kind}: {outcome.detail}")
                wanted = self._expected.setdefault(ask.key, outcome.answer)
                if outcome.answer != wanted:
                    self.broken.append(f"{told}: expected {wanted!r}, got {outcome.answer!r}")
            answers = {self._expected[ask.key].split("\x1f")[-1] for ask in group}
            if len(answers) > 1:
                self.broken.append(f"{when}: {group[0].kind}: doors differ: {answers}")

    def _line(self, done: int, rate: float) -> str:
        kinds = collections.Counter[str]()
        for (_, _, kind), count in self.counts.items():
            kinds[kind] += count
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        crashes = len(self._watch.outages)
        return f"{done} ({rate:.0f}/s): {told}; {crashes} crashes; {len(self.broken)} broken"


def _told(outcome: Outcome) -> str:
    ask = outcome.ask
    return f"{door_of(ask)}, {ask.kind}: {outcome.kind}: {outcome.detail[:300]}"


def states(watch: Watch) -> str:
    """In which state requests were when their clients left, by the executor's own count."""
    came, begun, first, ended = (
        watch.totals[name]
        for name in (
            "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count",
            "time_to_first_token_seconds_count",
            "requests_disconnected_total",
        )
    )
    queued, prefilling = came - begun, begun - first
    return (
        f"Of {came:,.0f} requests that reached the executor, {ended:,.0f} were given up there: "
        f"{queued:,.0f} queued, {prefilling:,.0f} prefilling, "
        f"{max(ended - queued - prefilling, 0):,.0f} decoding."
    )


def report(storm: Storm, watch: Watch, title: str, max_crashes: int) -> tuple[str, bool]:
    """Some Markdown, and whether everything held."""
    kinds = sorted({kind for _, _, kind in storm.counts})
    broken = [*storm.broken, *growing(watch)]
    if len(watch.outages) > max_crashes:
        broken.append(f"{len(watch.outages)} crashes; at most {max_crashes} were allowed")
    crashes = [
        f"- the server crashed: {outage.reason}; service again within {outage.seconds:.0f} s"
        for outage in watch.outages
    ]
    parts = [
        f"### {title}",
        f"**{'everything held' if not broken else f'{len(broken)} things broke'}**",
        *(f"- {line}" for line in broken[:30]),
        *crashes,
        table(["Door", *kinds], _rows(storm, kinds, 0)),
        table(["State", *kinds], _rows(storm, kinds, 1)),
        states(watch),
        server_side(watch),
        process_table(storm.rests, watch),
    ]
    return "\n\n".join(parts) + "\n", not broken


def _rows(storm: Storm, kinds: list[str], part: int) -> list[list[str]]:
    sums = collections.Counter[tuple[str, str]]()
    for key, count in storm.counts.items():
        sums[key[part], key[2]] += count
        sums["all", key[2]] += count
    names = sorted({key[part] for key in storm.counts})
    return [[name, *(str(sums[name, kind]) for kind in kinds)] for name in [*names, "all"]]


def serve(load: Load) -> Served:
    """The server for a load, not yet started."""
    flags = [f"--served-model-name={cancel_storm_requests.MODEL}", "--log-level=warning"]
    restarts = ["--max-restarts=1000", "--restart-backoff=0"]
    return Served(environment=load.environment, arguments=[*flags, *ALONE, *restarts])


def _blow(args: argparse.Namespace, load: Load, engine: str, num_requests: int) -> tuple[str, bool]:
    with serve(load) as served, Watch(served) as watch:
        print(f"{engine}: {num_requests} requests, {load.num_users} at a time", flush=True)
        storm = Storm(served, load, random.Random(args.seed), watch, _print, args.rude)
        asyncio.run(storm.run(num_requests, args.rest))
        watch.look()
        if watch.outages and args.keep_log:
            args.keep_log.write_text(served.server_log)
        if served.stop() != 0:
            storm.broken.append(f"nereid serve ended with {served.process}")
        storm.broken += [f"left behind: {name}" for name in processes.shared_memory(served)]
    title = f"{engine} engine, {num_requests} requests, seed {args.seed}"
    return report(storm, watch, title, args.crashes)


def _print(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run it; 1 when something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10000, metavar="N", help="on each engine")
    parser.add_argument("--engine", choices=("both", "demo", "scripted"), default="both")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, choices and moments")
    parser.add_argument(
        "--rest", type=int, default=1000, metavar="N", help="requests between rests"
    )
    parser.add_argument(
        "--variety", type=int, default=8, metavar="N", help="prompts of each kind (default 8)"
    )
    parser.add_argument(
        "--crashes", type=int, default=0, metavar="N", help="of the Triton server, allowed in each"
    )
    parser.add_argument(
        "--rude",
        action="store_true",
        help="gRPC clients also cancel streams whose finish reason they have read",
    )
    parser.add_argument("--keep-log", type=Path, metavar="PATH", help="the log, if it crashed")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the result here too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive it
    engines = ("demo", "scripted") if args.engine == "both" else (args.engine,)
    pages, is_well = [], True
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines:
            rng = random.Random(args.seed)
            if engine == "demo":
                load = cancel_storm_requests.demo(rng, args.variety)
            else:
                load = cancel_storm_requests.scripted(rng, 4 * args.variety, Path(folder))
            page, holds = _blow(args, load, engine, args.requests)
            pages.append(page)
            is_well &= holds
            print(page, flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(pages))
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
