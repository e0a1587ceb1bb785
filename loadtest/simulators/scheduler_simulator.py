"""Simulate the scheduler on a trace of arrivals, with a cost model instead of a GPU and a model.

    python -m loadtest.simulators.scheduler_simulator --requests 2000 --rate 20
    python -m loadtest.simulators.scheduler_simulator --trace arrivals.jsonl --max-num-seqs 64

A trace has one JSON object per line, such as
{"arrival_s": 0.1, "prompt_tokens": 300, "output_tokens": 50}. The optional fields are "n",
"priority", "prefix" and "prefix_tokens". The prompts of requests with the same "prefix" begin with
the same "prefix_tokens" tokens. The time of a step is

    step_ms + token_ms * tokens in the step + context_ms * cached tokens that attention reads

This cost model is close enough to a real engine to compare settings and policies.
"""

import argparse
import json
import random
import sys
from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepPlan, StepResult

from loadtest import command_line

ANSWER_TOKEN = 1  # each simulated answer repeats this token
_PROMPT_TOKENS = range(2, 50_000)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        arrival_s: the time of the arrival, in seconds from the start.
        prompt_tokens: the length of the prompt.
        output_tokens: the number of tokens that each sequence generates.
        n: the number of sequences.
        priority: the priority, as in SamplingParams.
        prefix: a name. Prompts with the same name begin with the same tokens. If the name is empty,
            the prompt shares no tokens with other prompts.
        prefix_tokens: the number of tokens that the prompts with this `prefix` share.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    n: int = 1
    priority: int = 0
    prefix: str = ""
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost model of a step.

    Attributes:
        step_ms: milliseconds of each step.
        token_ms: milliseconds of each token in a step.
        context_ms: milliseconds of each cached token that attention reads in a step.
    """

    step_ms: float = 10.0
    token_ms: float = 0.05
    context_ms: float = 0.0001

    def of(self, plan: StepPlan) -> float:
        """Return the seconds that the step of `plan` takes."""
        context = sum(chunk.start for chunk in plan.chunks)
        return (self.step_ms + self.token_ms * plan.num_tokens + self.context_ms * context) / 1000


@dataclass(slots=True)
class Record:
    """The result of one request. Times are in seconds from the start. None means not yet.

    Attributes:
        arrival: the request.
        begun_s: the start time of the first step that contains the request.
        first_token_s: the time of the first token.
        end_s: the time at which the last sequence ends.
        num_tokens: the number of generated tokens of all sequences.
        num_ended: the number of sequences that have ended.
    """

    arrival: Arrival
    begun_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    num_ended: int = 0

    def note_start(self, clock_s: float) -> None:
        """Store the start time of a step that contains the request, if the step is the first."""
        if self.begun_s is None:
            self.begun_s = clock_s

    def note_token(self, clock_s: float, *, is_last: bool) -> None:
        """Count a generated token. `is_last` states whether the token ends its sequence."""
        self.num_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = clock_s
        if is_last:
            self.num_ended += 1
            if self.num_ended == self.arrival.n:
                self.end_s = clock_s

    def delay_s(self, time_s: float | None) -> float:
        """Return the seconds from the arrival to one of the times of this record."""
        assert time_s is not None
        return time_s - self.arrival.arrival_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a simulation.

    Attributes:
        records: one record for each arrival, in order of arrival.
        elapsed_s: the simulated seconds.
        num_steps: the number of steps.
        num_preemptions: the number of preemptions.
        hit_rate: the share of prompt tokens that were found in the prefix cache.
    """

    records: list[Record]
    elapsed_s: float
    num_steps: int
    num_preemptions: int
    hit_rate: float

    def report(self) -> str:
        """Return a summary and a table of percentiles as text."""
        ended = [record for record in self.records if record.end_s is not None]
        prompt_rate = sum(record.arrival.prompt_tokens for record in ended) / self.elapsed_s
        output_rate = sum(record.num_tokens for record in self.records) / self.elapsed_s
        delays = {
            "queue": [record.delay_s(record.begun_s) for record in ended],
            "first token": [record.delay_s(record.first_token_s) for record in ended],
            "whole answer": [record.delay_s(record.end_s) for record in ended],
        }
        lines = [
            f"{len(ended)} of {len(self.records)} requests ended in {self.elapsed_s:.1f} s and "
            f"{self.num_steps} steps",
            f"{output_rate:.0f} output and {prompt_rate:.0f} prompt tokens/s, "
            f"{self.num_preemptions} preemptions, {self.hit_rate:.0%} of prompt tokens from the "
            "prefix cache",
            f"{'seconds':14}" + "".join(f"{name:>9}" for name in ("p50", "p90", "p99", "max")),
        ]
        for name, values in delays.items():
            lines.append(f"{name:14}" + "".join(f"{value:9.3f}" for value in percentiles(values)))
        return "\n".join(lines)


class Percentiles(NamedTuple):
    """The 50th, 90th and 99th percentile of some values, and the largest value."""

    p50: float
    p90: float
    p99: float
    largest: float


def percentiles(values: abc.Sequence[float]) -> Percentiles:
    """Return percentiles of `values`. Without values, all percentiles are 0."""
    return Percentiles(*np.percentile(values or [0.0], (50, 90, 99, 100)).tolist())


class Step(NamedTuple):
    """A simulated step.

    Attributes:
        plan: the scheduler's plan of the step.
        updates: one update for each token that the step generates.
    """

    plan: StepPlan
    updates: list[RequestUpdate]


def run_step(scheduler: Scheduler) -> Step:
    """Plan and commit one step. Each sampled token is ANSWER_TOKEN."""
    plan = scheduler.plan()
    sampled = [Sampled([ANSWER_TOKEN], [0.0]) for chunk in plan.chunks if chunk.samples]
    return Step(plan, scheduler.commit(plan, StepResult(sampled)))


def simulate(arrivals: Iterable[Arrival], scheduler: Scheduler, cost: Cost) -> Outcome:
    """Add requests to a scheduler at their arrival times, and run steps until all have ended.

    Args:
        arrivals: requests in any order. Each request must fit into the scheduler's block pool.
        scheduler: a scheduler without requests.
        cost: the cost model of a step.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    records = {str(number): Record(arrival) for number, arrival in enumerate(ordered)}
    pending = deque(enumerate(ordered))
    clock_s, num_steps = 0.0, 0
    while pending or scheduler.has_work():
        if not scheduler.has_work():  # an idle scheduler waits for the next arrival
            clock_s = max(clock_s, pending[0][1].arrival_s)
        while pending and pending[0][1].arrival_s <= clock_s:
            scheduler.add(_sequence(*pending.popleft()))
        step = run_step(scheduler)
        for chunk in step.plan.chunks:
            records[chunk.sequence.request_id].note_start(clock_s)
        clock_s += cost.of(step.plan)
        num_steps += 1
        for update in step.updates:
            is_last = update.finish_reason is not None
            records[update.request_id].note_token(clock_s, is_last=is_last)
    return Outcome(
        records=list(records.values()),
        elapsed_s=clock_s,
        num_steps=num_steps,
        num_preemptions=scheduler.num_preemptions,
        hit_rate=_hit_rate(scheduler),
    )


def _hit_rate(scheduler: Scheduler) -> float:
    cache = scheduler.cache
    if cache is None or not cache.num_queried_tokens:
        return 0.0
    return cache.num_hit_tokens / cache.num_queried_tokens


def _sequence(number: int, arrival: Arrival) -> Sequence:
    """Return the sequence for the scheduler. Its request id is `number` as text.

    The tokens of the prefix depend on its name. The other prompt tokens depend on `number`, so the
    prefix cache finds only prefixes.
    """
    num_shared = min(arrival.prefix_tokens, arrival.prompt_tokens) if arrival.prefix else 0
    shared = random_tokens(random.Random(f"prefix {arrival.prefix}"), num_shared)
    own = random_tokens(random.Random(number), arrival.prompt_tokens - num_shared)
    params = SamplingParams(
        n=arrival.n, priority=arrival.priority, max_tokens=arrival.output_tokens
    )
    max_total_tokens = arrival.prompt_tokens + arrival.output_tokens
    return Sequence(str(number), shared + own, params, max_total_tokens=max_total_tokens)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Return `count` random prompt tokens."""
    return rng.choices(_PROMPT_TOKENS, k=count)


def poisson(
    num_requests: int, rate: float, seed: int, priorities: abc.Sequence[int] = (0,)
) -> list[Arrival]:
    """Return a random trace with `rate` arrivals per second on average.

    Arrivals are independent of each other. Lengths follow a log-normal distribution, so that few
    requests are long. The same `seed` gives the same trace.
    """
    rng = random.Random(seed)
    clock_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        clock_s += rng.expovariate(rate)
        # The median is about 245 tokens for prompts and 90 tokens for answers.
        prompt_tokens = min(4000, 1 + int(rng.lognormvariate(mu=5.5, sigma=1.0)))
        output_tokens = min(1000, 1 + int(rng.lognormvariate(mu=4.5, sigma=0.8)))
        priority = rng.choice(priorities)
        arrivals.append(Arrival(clock_s, prompt_tokens, output_tokens, priority=priority))
    return arrivals


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """Parse the lines of a trace. Blank lines are ignored.

    Raises:
        ValueError: a line is not a JSON object, or has unknown fields. The message contains the
            number of the line.
    """
    arrivals = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            arrivals.append(_arrival(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of the trace: {error}") from error
    return arrivals


def _arrival(entry: dict[str, Any]) -> Arrival:
    """Return the request that one JSON object of a trace describes."""
    unknown = sorted(set(entry) - {field.name for field in fields(Arrival)})
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    return Arrival(**entry)


def main(argv: abc.Sequence[str] | None = None) -> None:
    """Run the simulation that the command line describes, and print a table."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.trace is None:
        arrivals = poisson(args.requests, args.rate, args.seed)
    else:
        with args.trace.open(encoding="utf-8") as lines:
            arrivals = read_trace(lines)
    longest = max((one.prompt_tokens + one.output_tokens for one in arrivals), default=0)
    if longest > args.num_blocks * args.block_size:
        parser.error(
            f"the longest request has {longest} tokens, but the KV cache has only "
            f"{args.num_blocks * args.block_size} (--num-blocks times --block-size); increase "
            "--num-blocks"
        )
    scheduler = Scheduler(
        BlockPool(args.num_blocks),
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    outcome = simulate(arrivals, scheduler, Cost(args.step_ms, args.token_ms, args.context_ms))
    sys.stdout.write(outcome.report() + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    cost = Cost()
    add("--trace", type=Path, help="trace file (default: random arrivals)")
    add("--requests", type=int, default=1000, help="number of random arrivals")
    add("--rate", type=float, default=10.0, help="random arrivals per second")
    add("--seed", type=int, default=0, help="seed of the random arrivals")
    add("--num-blocks", type=int, default=8192, help="number of KV cache blocks")
    add("--block-size", type=int, default=16, help="tokens of each KV cache block")
    add("--max-num-seqs", type=int, default=256, help="largest number of running sequences")
    add("--max-num-batched-tokens", type=int, default=2048, help="token budget of a step")
    add("--step-ms", type=float, default=cost.step_ms, help="time of each step")
    add("--token-ms", type=float, default=cost.token_ms, help="time of each token in a step")
    add("--context-ms", type=float, default=cost.context_ms, help="time of each cached token")
    return parser


if __name__ == "__main__":
    main()
