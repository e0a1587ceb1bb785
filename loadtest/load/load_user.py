"""The base class of all scenarios: a locust user that sends requests and checks the replies."""

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

from loadtest.client.ask import Ask
from loadtest.client.grpc_client import GrpcEndpoint
from loadtest.client.http_client import HttpEndpoint
from loadtest.client.reply import Reply
from loadtest.load import arrivals, records
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.check_reply import ReplyChecker
from loadtest.load.prompts import Question, plain, recited
from loadtest.load.records import Record

# gevent support must be enabled before the first gRPC object is created, and after locust has
# patched the standard library.
grpc_gevent.init_gevent()


class _Endpoint(Protocol):
    def send(self, ask: Ask) -> Reply:
        """Send a request and return the reply."""


class _Run:
    """The state that all users share: the endpoints, the checker of replies, and the records."""

    def __init__(self, options: Namespace) -> None:
        limit_s = options.request_limit
        self.options = options
        self.choose = recited if options.numbered else plain
        self.checker = ReplyChecker()
        self.records: list[Record] = []
        self.num_sent = 0
        self.under_way = Group()
        self.rng = random.Random(options.seed)
        self.endpoints: dict[str, _Endpoint] = {
            "openai": HttpEndpoint(options.host, limit_s),
            "triton": HttpEndpoint(options.triton_url, limit_s),
            "grpc": GrpcEndpoint(options.grpc_url, limit_s),
        }


_runs: dict[Environment, _Run] = {}


class LoadUser(User):
    """A scenario. A subclass defines the requests (`asks`) and their times (`arrivals`).

    Attributes:
        arrivals: the arrival process. The option `--arrivals` replaces it for all scenarios.
        cancel_share: the share of requests that their clients cancel at a random time.
        mean_stay_s: the mean time after which these clients cancel.
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
        """Return the next requests. All of them are sent at the same moment."""
        raise NotImplementedError

    def question(self) -> Question:
        """Return a random question with one correct answer, from a small set of questions."""
        return self._run.choose(self.rng)

    @task
    def arrive(self) -> None:
        """Send the next requests. In a closed loop, wait for the answers."""
        now = time.monotonic()
        self._due = self._due or now
        late_s = now - self._due if self.arrivals.is_open else 0.0
        asks = [self._perhaps_cancelled(ask) for ask in self.asks()]
        self._run.num_sent += len(asks)
        # Requests run in greenlets of their own, so that they finish even if locust stops the user.
        sent = [self._run.under_way.spawn(self._send, ask, late_s) for ask in asks]
        if not self.arrivals.is_open:
            gevent.joinall(sent)

    def wait_time(self) -> float:
        """Return the seconds until the next arrival."""
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
        reply = self._run.endpoints[ask.endpoint].send(ask)
        faults = self._run.checker.faults(ask, reply)
        made = records.record(type(self).__name__, ask, reply, faults, late_s)
        self._run.records.append(made)
        self._tell_locust(made)

    def _tell_locust(self, made: Record) -> None:
        """Report a request to locust: one line for the whole request, one for TTFT, one for ITL."""
        fire = self.environment.events.request.fire
        common = {"name": made.scenario, "response_length": 0, "context": {}}
        exception = None if made.is_fine else RuntimeError(made.faults[0])
        fire(
            request_type=made.endpoint,
            response_time=made.e2e_s * 1000,
            exception=exception,
            **common,
        )
        if made.is_stream and made.ttft_s is not None:
            fire(request_type="TTFT", response_time=made.ttft_s * 1000, exception=None, **common)
        if made.is_stream and made.gaps_s:
            mean_s = sum(made.gaps_s) / len(made.gaps_s)
            fire(request_type="ITL", response_time=mean_s * 1000, exception=None, **common)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    processes = ["closed", "poisson", "constant"]
    add("--triton-url", default="http://127.0.0.1:8000", help="HTTP endpoint of the Triton server")
    add("--grpc-url", default="127.0.0.1:8001", help="gRPC endpoint of the Triton server")
    add("--embedding-model", default="embed", help="name of the embedding model in the API")
    add("--rerank-model", default="rerank", help="name of the reranker in the API")
    add("--max-tokens", type=int, default=48, help="length of an ordinary answer")
    add("--arrivals", choices=processes, help="arrival process that replaces each scenario's")
    add("--rate", type=float, default=0.0, help="requests/s of each user, with --arrivals")
    add("--request-limit", type=float, default=60.0, help="time limit of a request in seconds")
    add("--numbered", action="store_true", help="expect the server to return numbered tokens")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--records", type=Path, help="write one JSON object for each request to this file")


@events.quitting.add_listener
def _finish(environment: Environment, **_: object) -> None:
    """Wait for the running requests, write the records, and set the exit code.

    The exit code is 1 if a reply was wrong. It is 2 if the load generator failed: a scenario raised
    an exception, or a request has no record.
    """
    run = _runs.get(environment)
    if run is None:
        return
    run.under_way.join(timeout=run.options.request_limit + 10)
    if run.options.records:
        records.write(run.options.records, run.records)
    assert environment.runner is not None
    if environment.runner.exceptions or len(run.records) != run.num_sent:
        print(
            f"{run.num_sent} requests were sent, but {len(run.records)} have a record.",
            file=sys.stderr,
        )
        environment.process_exit_code = 2
    elif any(not one.is_fine for one in run.records):
        environment.process_exit_code = 1
