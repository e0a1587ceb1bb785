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
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from loadtest import command_line
from loadtest.client.ask import Ask
from loadtest.client.traffic import Outcome
from loadtest.faults import cancel_storm_requests
from loadtest.faults.cancel_storm_requests import Load, endpoint_of
from loadtest.faults.fault_rows import Section, make_asker
from loadtest.faults.leftovers import IdleChecks, stop
from loadtest.faults.server_watch import Watch
from loadtest.faults.traffic_report import (
    count_table,
    growing,
    outcomes,
    process_table,
    server_side,
    verdict,
)
from loadtest.server.served import ALONE, Served

_CANCELLED_SHARE = 0.5
_CANCELLED_BY_EVENTS_SHARE = 0.3  # the share of the cancelled streams
_FIRST_GUESS_S = 0.3
_SMOOTHING = 0.9
_RECOVERY_LIMIT_S = 60.0
_PAUSE_AFTER_ERROR_S = 0.2


class Storm:
    """A test of one server with many cancelled requests.

    Attributes:
        counts: the number of requests for each endpoint, kind of request and outcome.
        broken: descriptions of failed checks.
        checks: the checks of the idle server.
    """

    def __init__(self, served: Served, load: Load, rng: random.Random, watch: Watch) -> None:
        self._load = load
        self._rng = rng
        self._watch = watch
        self._asker = make_asker(served)
        self._asks = [ask for group in load.groups for ask in group]
        self._expected = dict(load.known)
        self._typical_s: dict[str, float] = {}  # the usual duration of each kind of request
        self._num_left = 0  # requests that the users must send before the next idle check
        self._failed: list[Outcome] = []
        # The number of requests for each combination of an endpoint, a kind of request and a label
        # of the outcome.
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.broken: list[str] = []
        self.checks = IdleChecks(served, self._asker)

    async def run(self, num_requests: int, check_every: int) -> None:
        """Send requests, and check the idle server after every `check_every` requests."""
        try:
            await self._ask_alone("at the start")
            self.broken += await self.checks.check("at the start")
            started = time.monotonic()
            num_done = 0
            while num_done < num_requests:
                self._num_left = min(check_every, num_requests - num_done)
                num_done += self._num_left
                await asyncio.gather(*(self._user() for _ in range(self._load.num_users)))
                await self._wait_for_restart()
                self.broken += await self.checks.check(f"after {num_done} requests")
                self._check_failures()
                rate = num_done / (time.monotonic() - started)
                print(time.strftime("%H:%M:%S"), self._progress(num_done, rate), flush=True)
            await self._ask_alone("at the end")
        finally:
            await self._asker.close()

    async def _user(self) -> None:
        """Send random requests until all users together have sent `_num_left` requests."""
        rng = random.Random(self._rng.random())
        while self._num_left > 0:
            self._num_left -= 1
            ask = rng.choice(self._asks)
            expected = self._expected[ask.key]
            if ask.kind == cancel_storm_requests.LONG:
                ask = cancel_storm_requests.with_new_prefix(ask, rng)
            outcome = await self._asker.ask(self._perhaps_cancelled(rng, ask), expected)
            self._take(outcome)
            if outcome.kind in ("refused", "lost", "failed"):
                # A well-behaved client does not send the next request at once after an error.
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def _perhaps_cancelled(self, rng: random.Random, ask: Ask) -> Ask:
        """Return a request, or a copy of the request that the client cancels at a random moment."""
        if rng.random() >= _CANCELLED_SHARE:
            return ask
        if ask.is_stream and rng.random() < _CANCELLED_BY_EVENTS_SHARE:
            return replace(ask, cancel_after_events=1 + int(rng.expovariate(0.3)))
        typical_s = self._typical_s.get(ask.kind, _FIRST_GUESS_S)
        return ask.cancelled(0.001 + rng.random() * typical_s)

    def _take(self, outcome: Outcome) -> None:
        """Count a request. An outcome that is never allowed is a failed check."""
        ask, label = outcome.ask, str(outcome.kind)
        if outcome.kind == "cancelled":
            label = "given up half-way" if outcome.reply.times else "given up"
        self.counts[endpoint_of(ask), ask.kind, label] += 1
        if outcome.kind == "ok":
            self._update_typical_time(ask.kind, outcome.reply.ended - outcome.reply.started)
        elif outcome.kind in ("wrong", "hung"):
            self.broken.append(_description(outcome))
        elif outcome.kind != "cancelled":
            self._failed.append(outcome)

    def _update_typical_time(self, kind: str, seconds: float) -> None:
        """Update the smoothed time of complete answers to one kind of request."""
        before_s = self._typical_s.get(kind, seconds)
        self._typical_s[kind] = _SMOOTHING * before_s + (1 - _SMOOTHING) * seconds

    async def _wait_for_restart(self) -> None:
        """Wait until a crashed server has been restarted."""
        deadline = time.monotonic() + _RECOVERY_LIMIT_S
        await asyncio.to_thread(self._watch.look)
        while not all(outage.is_over for outage in self._watch.outages):
            if time.monotonic() > deadline:
                self.broken.append(f"the server did not recover within {_RECOVERY_LIMIT_S:g} s")
                return
            await asyncio.sleep(0.5)
            await asyncio.to_thread(self._watch.look)

    def _check_failures(self) -> None:
        """Add a failed check for each failed request that no outage explains."""
        for outcome in self._failed:
            began, ended = outcome.reply.started, outcome.reply.ended
            if not any(outage.explains(began, ended) for outage in self._watch.outages):
                self.broken.append(_description(outcome))
        self._failed = []

    async def _ask_alone(self, when: str) -> None:
        """Send every request once, one after another, and check the answers."""
        for group in self._load.groups:
            answers = {await self._answer_alone(ask, when) for ask in group}
            if len(answers) > 1:
                self.broken.append(
                    f"{when}: {group[0].kind}: the answers of the endpoints differ: {answers}"
                )

    async def _answer_alone(self, ask: Ask, when: str) -> str:
        """Send a request, and check the answer. Return the expected answer."""
        outcome = await self._asker.ask(ask)
        request = f"{when}: {endpoint_of(ask)}, {ask.kind}"
        if outcome.kind != "ok":
            self.broken.append(f"{request}: {outcome.kind}: {outcome.detail}")
        answer = outcome.reply.answer
        expected = self._expected.setdefault(ask.key, answer)
        if answer != expected:
            self.broken.append(f"{request}: expected the answer {expected}, got {answer}")
        return expected

    def _progress(self, num_done: int, rate: float) -> str:
        return (
            f"{num_done} requests ({rate:.0f}/s): {outcomes(self.counts)}; "
            f"{len(self._watch.outages)} crashes; {len(self.broken)} failed checks"
        )


def _description(outcome: Outcome) -> str:
    ask = outcome.ask
    return f"{endpoint_of(ask)}, {ask.kind}: {outcome.kind}: {outcome.detail[:300]}"


def states(watch: Watch) -> str:
    """Return a sentence with the number of requests that were cancelled in each state.

    Each metric counts the requests that have reached a state. The difference of two counts is the
    number of requests that have ended between the two states.
    """
    totals = watch.totals
    arrived = totals["e2e_request_latency_seconds_count"]
    started = totals["request_queue_time_seconds_count"]
    with_token = totals["time_to_first_token_seconds_count"]
    cancelled = totals["requests_disconnected_total"]
    queued, prefilling = arrived - started, started - with_token
    decoding = max(cancelled - queued - prefilling, 0)
    return (
        f"Of {arrived:,.0f} requests that reached the executor, {cancelled:,.0f} were cancelled "
        f"there: {queued:,.0f} in the queue, {prefilling:,.0f} during prefill, and "
        f"{decoding:,.0f} during decode."
    )


def report(storm: Storm, watch: Watch, title: str, max_crashes: int) -> Section:
    """Return the report as Markdown."""
    broken = [*storm.broken, *growing(watch)]
    if len(watch.outages) > max_crashes:
        broken.append(f"the server crashed {len(watch.outages)} times; the limit is {max_crashes}")
    crashes = [
        f"- The server crashed: {outage.reason}. It recovered within {outage.seconds:.0f} s."
        for outage in watch.outages
    ]
    paragraphs = [
        f"### {title}",
        *verdict(broken, max_lines=30),
        *crashes,
        count_table("Endpoint", storm.counts, part=0),
        count_table("Kind of request", storm.counts, part=1),
        states(watch),
        server_side(watch),
        process_table(storm.checks, watch),
    ]
    return Section("\n\n".join(paragraphs), is_broken=bool(broken))


def serve(load: Load) -> Served:
    """Create a server for a load, but do not start it."""
    flags = [f"--served-model-name={cancel_storm_requests.MODEL}", "--log-level=warning"]
    restarts = ["--max-restarts=1000", "--restart-backoff=0"]
    return Served(environment=load.environment, arguments=[*flags, *ALONE, *restarts])


def _run(args: argparse.Namespace, load: Load, engine: str) -> Section:
    """Test one engine with the settings of the command line."""
    with serve(load) as served, Watch(served) as watch:
        print(f"{engine}: {args.requests} requests, {load.num_users} at a time", flush=True)
        storm = Storm(served, load, random.Random(args.seed), watch)
        asyncio.run(storm.run(args.requests, args.rest))
        watch.look()
        storm.broken += stop(served)
    title = f"{engine} engine, {args.requests} requests, seed {args.seed}"
    return report(storm, watch, title, args.crashes)


def _load(engine: str, seed: int, folder: Path) -> Load:
    """Return the load for an engine. `folder` is for the script of the scripted engine."""
    rng = random.Random(seed)
    if engine == "demo":
        return cancel_storm_requests.demo(rng, variety=8)
    return cancel_storm_requests.scripted(rng, variety=32, folder=folder)


def main() -> int:
    """Run the program. Return 1 if a check failed."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    engines = ("both", "demo", "scripted")
    add("--requests", type=int, default=10000, metavar="N", help="requests on each engine")
    add("--engine", choices=engines, default="both", help="engine to test (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--rest", type=int, default=1000, metavar="N", help="requests between two idle checks")
    add("--crashes", type=int, default=0, metavar="N", help="allowed crashes of each server")
    add("--markdown", type=Path, metavar="PATH", help="also write the report to this file")
    args = parser.parse_args()
    command_line.exit_on_sigterm()
    chosen = ("demo", "scripted") if args.engine == "both" else (args.engine,)
    with tempfile.TemporaryDirectory() as folder:
        sections = [_run(args, _load(engine, args.seed, Path(folder)), engine) for engine in chosen]
    command_line.print_report("\n\n".join(one.text for one in sections), args.markdown)
    return int(any(section.is_broken for section in sections))


if __name__ == "__main__":
    sys.exit(main())
