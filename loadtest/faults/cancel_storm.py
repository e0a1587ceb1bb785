"""Send thousands of requests through every endpoint, and cancel half of them at random moments.

    python -m loadtest.faults.cancel_storm                # 10,000 requests on each engine
    python -m loadtest.faults.cancel_storm --engine demo --requests 2000 --seed 7

The program tests two servers, one after the other. The first one serves the demo model with more
users than sequences can run, a small token budget and a small KV cache. Its requests are cancelled
while they wait, during prefill and decode, after preemption, and with a grammar. The second server
runs the scripted engine, whose answers are fast and known in advance. Clients cancel after a random
time or after a random number of events.
The requests go to chats and completions of the OpenAI API, with and without streaming, and to the
gRPC streams and `generate_stream` of the Triton server. The Triton server's `generate` is left out,
because it does not notice that a client has closed its connection.

The program checks after every --rest requests and at the end:

    Every answer that was not cancelled equals the answer to the same request on an idle server.
    No request, sequence or KV cache block is in use, in the engine or in the frontend.
    No process is a zombie or has more open files, and /dev/shm contains no more than at the start.
    The memory of no process keeps growing (checked for processes that ran for some minutes).
    No request failed, hung or was rejected, except while a crashed server was restarting.
    At the end, every request gets the answer that it got at the start.

Triton server 2.51 can crash if a gRPC client cancels a stream that ends at the same moment. The
report lists each crash. The run fails if there are more than --crashes of them, or if
`nereid serve` did not restart the server. The exit code is 1 if a check failed.
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
from dataclasses import replace
from pathlib import Path

from loadtest import command_line
from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker, Outcome
from loadtest.faults import cancel_storm_requests
from loadtest.faults.cancel_storm_requests import Load, endpoint_of
from loadtest.faults.leftovers import Rests
from loadtest.faults.server_watch import Watch
from loadtest.faults.traffic_report import (
    count_table,
    growing,
    outcomes,
    process_table,
    server_side,
)
from loadtest.server import processes
from loadtest.server.served import ALONE, Served

_SHARE_GIVEN_UP = 0.5
_FIRST_GUESS_S = 0.3
_REMEMBERED = 0.9
_CHECKED_ENDS = ("wrong", "hung")
_HEALING_LIMIT_S = 60.0


class Storm:
    """One run on one server.

    Attributes:
        counts: the number of requests for each endpoint, kind of request and outcome.
        broken: descriptions of failed checks.
        rests: the checks of the idle server.
    """

    def __init__(
        self,
        served: Served,
        load: Load,
        rng: random.Random,
        watch: Watch,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._served = served
        self._load = load
        self._rng = rng
        self._watch = watch
        self._tell = tell
        url = f"http://127.0.0.1:{served.openai_port}"
        self._asker = Asker(url, served.http_url, served.grpc_url)
        self._asks = [ask for group in load.groups for ask in group]
        self._expected = dict(load.known)
        self._typical_s: dict[str, float] = {}
        self._left = 0
        self._suspects: list[Outcome] = []
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.broken: list[str] = []
        self.rests = Rests(served, self._asker)

    async def run(self, num_requests: int, rest_every: int) -> None:
        """Send requests, and check the idle server after every `rest_every` requests."""
        try:
            await self._ask_alone("at the start")
            self.broken += await self.rests.check("at the start")
            started = time.monotonic()
            done = 0
            while done < num_requests:
                part = min(rest_every, num_requests - done)
                await self._part(part)
                done += part
                await self._healed()
                self.broken += await self.rests.check(f"after {done} requests")
                self._judge()
                rate = done / (time.monotonic() - started)
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
            expected = self._expected[ask.key]
            if ask.kind == cancel_storm_requests.LONG:
                ask = cancel_storm_requests.with_new_prefix(ask, rng)
            outcome = await self._asker.ask(self._perhaps_cancelled(rng, ask), expected)
            self._take(outcome)
            if outcome.kind in ("refused", "lost", "failed"):
                await asyncio.sleep(0.2)  # as a well-behaved client does after an error

    def _perhaps_cancelled(self, rng: random.Random, ask: Ask) -> Ask:
        """Return a request, or a copy of the request that the client cancels at a random moment."""
        if rng.random() >= _SHARE_GIVEN_UP:
            return ask
        if ask.is_stream and rng.random() < 0.3:
            return replace(ask, cancel_after_events=1 + int(rng.expovariate(0.3)))
        typical_s = self._typical_s.get(ask.kind, _FIRST_GUESS_S)
        return ask.cancelled(0.001 + rng.random() * typical_s)

    def _take(self, outcome: Outcome) -> None:
        ask, kind = outcome.ask, outcome.kind
        if kind == "cancelled":
            label = "given up half-way" if outcome.reply.times else "given up"
        else:
            label = kind
        self.counts[endpoint_of(ask), ask.kind, label] += 1
        if kind == "ok":
            took_s = outcome.reply.ended - outcome.reply.started
            before_s = self._typical_s.get(ask.kind, took_s)
            self._typical_s[ask.kind] = _REMEMBERED * before_s + (1 - _REMEMBERED) * took_s
        elif kind in _CHECKED_ENDS:
            self.broken.append(_description(outcome))
        elif kind != "cancelled":
            self._suspects.append(outcome)

    async def _healed(self) -> None:
        """Wait until a crashed server has been restarted."""
        deadline = time.monotonic() + _HEALING_LIMIT_S
        await asyncio.to_thread(self._watch.look)
        while any(outage.ended == float("inf") for outage in self._watch.outages):
            if time.monotonic() > deadline:
                self.broken.append(f"the server did not recover within {_HEALING_LIMIT_S:g} s")
                return
            await asyncio.sleep(0.5)
            await asyncio.to_thread(self._watch.look)

    def _judge(self) -> None:
        """Add a failed check for each failed request that no outage explains."""
        for outcome in self._suspects:
            span = (outcome.reply.started, outcome.reply.ended)
            if not any(outage.explains(*span) for outage in self._watch.outages):
                self.broken.append(_description(outcome))
        self._suspects = []

    async def _ask_alone(self, when: str) -> None:
        """Send every request once, one after another, and check the answers."""
        for group in self._load.groups:
            for ask in group:
                outcome = await self._asker.ask(ask)
                request = f"{when}: {endpoint_of(ask)}, {ask.kind}"
                if outcome.kind != "ok":
                    self.broken.append(f"{request}: {outcome.kind}: {outcome.detail}")
                answer = outcome.reply.answer
                expected = self._expected.setdefault(ask.key, answer)
                if answer != expected:
                    self.broken.append(f"{request}: expected the answer {expected}, got {answer}")
            answers = {self._expected[ask.key] for ask in group}
            if len(answers) > 1:
                self.broken.append(
                    f"{when}: {group[0].kind}: the answers of the endpoints differ: {answers}"
                )

    def _line(self, done: int, rate: float) -> str:
        return (
            f"{done} requests ({rate:.0f}/s): {outcomes(self.counts)}; "
            f"{len(self._watch.outages)} crashes; {len(self.broken)} failed checks"
        )


def _description(outcome: Outcome) -> str:
    ask = outcome.ask
    return f"{endpoint_of(ask)}, {ask.kind}: {outcome.kind}: {outcome.detail[:300]}"


def states(watch: Watch) -> str:
    """Return a sentence with the number of requests that were cancelled in each state."""
    arrived, started, first, ended = (
        watch.totals[name]
        for name in (
            "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count",
            "time_to_first_token_seconds_count",
            "requests_disconnected_total",
        )
    )
    queued, prefilling = arrived - started, started - first
    return (
        f"Of {arrived:,.0f} requests that reached the executor, {ended:,.0f} were cancelled there: "
        f"{queued:,.0f} in the queue, {prefilling:,.0f} during prefill, and "
        f"{max(ended - queued - prefilling, 0):,.0f} during decode."
    )


def report(storm: Storm, watch: Watch, title: str, max_crashes: int) -> tuple[str, bool]:
    """Return the report as Markdown, and whether every check passed."""
    broken = [*storm.broken, *growing(watch)]
    if len(watch.outages) > max_crashes:
        broken.append(f"the server crashed {len(watch.outages)} times; the limit is {max_crashes}")
    crashes = [
        f"- The server crashed: {outage.reason}. It recovered within {outage.seconds:.0f} s."
        for outage in watch.outages
    ]
    parts = [
        f"### {title}",
        f"**{f'{len(broken)} checks failed' if broken else 'no check failed'}**",
        *(f"- {line}" for line in broken[:30]),
        *crashes,
        count_table("Endpoint", storm.counts, 0),
        count_table("Kind of request", storm.counts, 1),
        states(watch),
        server_side(watch),
        process_table(storm.rests, watch),
    ]
    return "\n\n".join(parts) + "\n", not broken


def serve(load: Load) -> Served:
    """Create a server for a load, but do not start it."""
    flags = [f"--served-model-name={cancel_storm_requests.MODEL}", "--log-level=warning"]
    restarts = ["--max-restarts=1000", "--restart-backoff=0"]
    return Served(environment=load.environment, arguments=[*flags, *ALONE, *restarts])


def _run(args: argparse.Namespace, load: Load, engine: str, num_requests: int) -> tuple[str, bool]:
    with serve(load) as served, Watch(served) as watch:
        print(f"{engine}: {num_requests} requests, {load.num_users} at a time", flush=True)
        storm = Storm(served, load, random.Random(args.seed), watch, _print)
        asyncio.run(storm.run(num_requests, args.rest))
        watch.look()
        if watch.outages and args.keep_log:
            args.keep_log.write_text(served.server_log)
        if served.stop() != 0:
            storm.broken.append(f"nereid serve did not end with exit code 0: {served.process}")
        storm.broken += [
            f"the shared memory file {name} was not removed"
            for name in processes.shared_memory(served)
        ]
    title = f"{engine} engine, {num_requests} requests, seed {args.seed}"
    return report(storm, watch, title, args.crashes)


def _print(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run the program. Return 1 if a check failed."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    engines = ("both", "demo", "scripted")
    add("--requests", type=int, default=10000, metavar="N", help="requests on each engine")
    add("--engine", choices=engines, default="both", help="engine to test (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--rest", type=int, default=1000, metavar="N", help="requests between two idle checks")
    add("--variety", type=int, default=8, metavar="N", help="prompts of each kind (default: 8)")
    add("--crashes", type=int, default=0, metavar="N", help="allowed crashes of each server")
    add("--keep-log", type=Path, metavar="PATH", help="write the server's log there if it crashed")
    add("--markdown", type=Path, metavar="PATH", help="also write the report to this file")
    args = parser.parse_args()
    # SystemExit leaves the `with` block, which stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = ("demo", "scripted") if args.engine == "both" else (args.engine,)
    pages, has_all_passed = [], True
    with tempfile.TemporaryDirectory() as folder:
        for engine in chosen:
            rng = random.Random(args.seed)
            if engine == "demo":
                load = cancel_storm_requests.demo(rng, args.variety)
            else:
                load = cancel_storm_requests.scripted(rng, 4 * args.variety, Path(folder))
            page, has_passed = _run(args, load, engine, args.requests)
            pages.append(page)
            has_all_passed &= has_passed
            print(page, flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(pages))
    return int(not has_all_passed)


if __name__ == "__main__":
    sys.exit(main())
