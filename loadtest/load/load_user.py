# SPDX-License-Identifier: Apache-2.0
"""The locust user that every scenario is: sends its asks, judges the replies, keeps records."""

import random
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Protocol

import gevent
import grpc.experimental.gevent as grpc_gevent
from gevent.pool import Group
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.client.grpc_client import GrpcDoor
from loadtest.client.http_client import HttpDoor
from loadtest.client.reply import Reply
from loadtest.load import arrivals, records
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.check_reply import Judge
from loadtest.load.load_requests import Ask
from loadtest.load.prompts import Question, plain, recited
from loadtest.load.records import Record

# Locust has patched the standard library by now, and no gRPC object is made yet: its rule.
grpc_gevent.init_gevent()


class _Door(Protocol):
    def send(self, ask: Ask) -> Reply:
        """The reply to an ask."""


class _Run:
    """What all users share: the doors, the judge, and what is under way."""

    def __init__(self, options: Namespace) -> None:
        limit_s = options.request_limit
        self.options = options
        self.choose = recited if options.numbered else plain
        self.judge = Judge()
        self.records: list[Record] = []
        self.num_sent = 0
        self.under_way = Group()
        self.rng = random.Random(options.seed)
        self.doors: dict[str, _Door] = {
            "openai": HttpDoor(options.host, limit_s),
            "triton": HttpDoor(options.triton_url, limit_s),
            "grpc": GrpcDoor(options.grpc_url, limit_s),
        }


_runs: dict[Environment, _Run] = {}


class LoadUser(User):
    """A scenario is a subclass that says what is asked (`asks`) and when (`arrivals`).

    Attributes:
        arrivals: when the next asks come; `--arrivals` replaces them for all scenarios.
        cancel_share: this share of the clients goes away at a random time.
        mean_stay_s: how long those stay on average.
    """

    abstract = True
    arrivals: Arrivals = Closed()
    cancel_share = 0.0
    mean_stay_s = 0.2

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = environment.parsed_options
        if environment not in _runs:
            _runs[environment] = _Run(options)
        self._run = _runs[environment]
        self.options = options
        self.rng = random.Random(self._run.rng.random())
        if options.arrivals:
            self.arrivals = arrivals.named(options.arrivals, options.rate)
        self._gaps_s = self.arrivals.gaps_s(self.rng)
        self._due = 0.0

    def asks(self) -> list[Ask]:
        """What is asked next, all of it at the same moment."""
        raise NotImplementedError

    def question(self) -> Question:
        """A question with one right answer; over and over the same few, in random order."""
        return self._run.choose(self.rng)

    @task
    def arrive(self) -> None:
        """Send what comes next; in a closed loop, wait for the answers."""
        now = time.monotonic()
        self._due = self._due or now
        late_s = now - self._due if self.arrivals.is_open else 0.0
        asks = [self._perhaps_cancelled(ask) for ask in self.asks()]
        self._run.num_sent += len(asks)
        # In greenlets of their own, so that they end in peace when locust stops the user.
        sent = [self._run.under_way.spawn(self._send, ask, late_s) for ask in asks]
        if not self.arrivals.is_open:
            gevent.joinall(sent)

    def wait_time(self) -> float:
        """Seconds until the next arrival."""
        gap_s = next(self._gaps_s)
        if not self.arrivals.is_open:
            return gap_s
        self._due += gap_s
        return max(0.0, self._due - time.monotonic())

    def _perhaps_cancelled(self, ask: Ask) -> Ask:
        if not ask.is_stream or self.rng.random() >= self.cancel_share:
            return ask
        return ask.cancelled(self.rng.expovariate(1 / self.mean_stay_s) + 0.001)

    def _send(self, ask: Ask, late_s: float) -> None:
        reply = self._run.doors[ask.door].send(ask)
        faults = self._run.judge.faults(ask, reply)
        made = records.record(type(self).__name__, ask, reply, faults, late_s)
        self._run.records.append(made)
        self._tell_locust(made)

    def _tell_locust(self, made: Record) -> None:
        """A line in its tables for the whole request, and one each for TTFT and ITL."""
        fire = self.environment.events.request.fire
        common = {"name": made.scenario, "response_length": 0, "context": {}}
        exception = None if made.is_fine else RuntimeError(made.faults[0])
        fire(request_type=made.door, response_time=made.e2e_s * 1000, exception=exception, **common)
        if made.is_stream and made.ttft_s is not None:
            fire(request_type="TTFT", response_time=made.ttft_s * 1000, exception=None, **common)
        if made.is_stream and made.gaps_s:
            mean_s = sum(made.gaps_s) / len(made.gaps_s)
            fire(request_type="ITL", response_time=mean_s * 1000, exception=None, **common)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--triton-url", default="http://127.0.0.1:8000", help="the Triton server's HTTP door")
    add("--grpc-url", default="127.0.0.1:8001", help="the Triton server's gRPC door")
    add("--embedding-model", default="embed", help="its name in the API")
    add("--rerank-model", default="rerank", help="its name in the API")
    add("--max-tokens", type=int, default=48, help="of a usual answer")
    add("--arrivals", choices=["closed", "poisson", "constant"], help="of every scenario")
    add("--rate", type=float, default=0.0, help="requests/s of each user, with --arrivals")
    add("--request-limit", type=float, default=60.0, help="seconds after which a request hangs")
    add("--numbered", action="store_true", help="the server recites numbered tokens")
    add("--seed", type=int, default=0, help="of all chance")
    add("--records", type=Path, help="write a line of JSON for each request there")


@events.quitting.add_listener
def _finish(environment: Environment, **_: object) -> None:
    """Let what is under way end, and write it down.

    The exit code is 1 when a reply was wrong, and 2 when the load generator was: a scenario raised,
    or nobody knows what became of a request.
    """
    run = _runs.get(environment)
    if run is None:
        return
    run.under_way.join(timeout=run.options.request_limit + 10)
    if run.options.records:
        records.write(run.options.records, run.records)
    assert environment.runner is not None
    if environment.runner.exceptions or len(run.records) != run.num_sent:
        print(f"{run.num_sent} requests sent, {len(run.records)} accounted for", file=sys.stderr)
        environment.process_exit_code = 2
    elif any(not one.is_fine for one in run.records):
        environment.process_exit_code = 1
