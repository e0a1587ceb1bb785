"""The base class of all scenarios: a locust user that sends requests and checks the replies."""

import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

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
from loadtest.command_line import Option, add_options
from loadtest.load import arrivals, records
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.check_reply import ReplyChecker
from loadtest.load.prompts import Question, numbered_question, plain_question
from loadtest.load.records import Record
from loadtest.load.shared_options import SHARED_OPTIONS

# gevent support must be enabled before the first gRPC object is created, and after locust has
# patched the standard library.
grpc_gevent.init_gevent()

# The mean time after which a client cancels its request.
_MEAN_STAY_S = 0.2


class _Run:
    """The state that all users share: the endpoints, the checker of replies, and the records."""

    def __init__(self, options: Namespace) -> None:
        limit_s = options.request_limit
        self.options = options
        self.choose_question = numbered_question if options.numbered else plain_question
        self.checker = ReplyChecker()
        self.records: list[Record] = []
        self.num_sent = 0
        self.greenlets = Group()
        self.rng = random.Random(options.seed)
        self.senders: dict[str, Callable[[Ask], Reply]] = {
            "openai": HttpEndpoint(options.host, limit_s).send,
            "triton": HttpEndpoint(options.triton_url, limit_s).send,
            "grpc": GrpcEndpoint(options.grpc_url, limit_s).send,
        }


_runs: dict[Environment, _Run] = {}


class LoadUser(User):
    """A scenario. A subclass defines the requests (`asks`) and their times (`arrivals`).

    Attributes:
        arrivals: the arrival process. The option `--arrivals` replaces it for all scenarios.
        cancel_share: the share of requests that their clients cancel at a random time.
    """

    abstract = True
    arrivals: Arrivals = Closed()
    cancel_share = 0.0

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = environment.parsed_options
        if environment not in _runs:
            _runs[environment] = _Run(options)
        self._run = _runs[environment]
        self.options = options
        self.rng = random.Random(self._run.rng.random())
        if options.arrivals:
            self.arrivals = arrivals.arrival_process(options.arrivals, options.rate)
        self._due = 0.0

    def asks(self) -> list[Ask]:
        """Return the next requests. All of them are sent at the same moment."""
        raise NotImplementedError

    def question(self) -> Question:
        """Return a random question with one correct answer, from a small set of questions."""
        return self._run.choose_question(self.rng)

    @task
    def arrive(self) -> None:
        """Send the next requests. In a closed loop, wait for the answers."""
        now = time.monotonic()
        self._due = self._due or now
        late_s = now - self._due if self.arrivals.is_open else 0.0
        asks = [self._perhaps_cancelled(ask) for ask in self.asks()]
        self._run.num_sent += len(asks)
        # Requests run in greenlets of their own, so that they finish even if locust stops the user.
        greenlets = [self._run.greenlets.spawn(self._send, ask, late_s) for ask in asks]
        if not self.arrivals.is_open:
            gevent.joinall(greenlets)

    def wait_time(self) -> float:
        """Return the seconds until the next arrival."""
        gap_s = self.arrivals.gap_s(self.rng)
        if not self.arrivals.is_open:
            return gap_s
        self._due += gap_s
        return max(0.0, self._due - time.monotonic())

    def _perhaps_cancelled(self, ask: Ask) -> Ask:
        """Return the request. With the probability `cancel_share`, a client cancels a stream."""
        if not ask.is_stream or self.rng.random() >= self.cancel_share:
            return ask
        return ask.cancelled(self.rng.expovariate(1 / _MEAN_STAY_S) + 0.001)

    def _send(self, ask: Ask, late_s: float) -> None:
        """Send a request, check the reply, and store its record."""
        reply = self._run.senders[ask.endpoint](ask)
        faults = self._run.checker.faults(ask, reply)
        record = records.record(type(self).__name__, ask, reply, faults, late_s)
        self._run.records.append(record)
        self._report_to_locust(record)

    def _report_to_locust(self, record: Record) -> None:
        """Report the time of a request and, for a stream, its TTFT and its mean ITL."""

        def report(line: str, seconds: float, exception: Exception | None = None) -> None:
            self.environment.events.request.fire(
                request_type=line,
                name=record.scenario,
                response_time=seconds * 1000,
                response_length=0,
                exception=exception,
                context={},
            )

        error = None if record.is_fine else RuntimeError(record.faults[0])
        report(record.endpoint, record.e2e_s, error)
        if record.is_stream and record.ttft_s is not None:
            report("TTFT", record.ttft_s)
        if record.is_stream and record.gaps_s:
            report("ITL", statistics.fmean(record.gaps_s))


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    """Add the options of the load test to the command line of locust."""
    add_options(parser, SHARED_OPTIONS)
    add_options(
        parser,
        {
            "--max-tokens": Option(48, "length of an ordinary answer"),
            "--numbered": Option(False, "expect the server to return numbered tokens"),
            "--records": Option(None, "file for the records of requests", value_type=Path),
        },
    )


@events.quitting.add_listener
def _finish(environment: Environment, **_: object) -> None:
    """Wait for the running requests, write the records, and set the exit code.

    The exit code is 1 if a reply was wrong. It is 2 if the load generator failed: a scenario raised
    an exception, or a request has no record.
    """
    run = _runs.get(environment)
    if run is None:
        return
    run.greenlets.join(timeout=run.options.request_limit + 10)
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
