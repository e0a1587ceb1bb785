# SPDX-License-Identifier: Apache-2.0
"""Replays arrivals through the scheduler with a model of what steps cost, without a GPU or a model.

    python -m loadtest.bench.scheduler_simulator --requests 2000 --rate 20
    python -m loadtest.bench.scheduler_simulator --trace arrivals.jsonl --max-num-seqs 64

A trace has one JSON object a line: {"arrival_s": 0.1, "prompt_tokens": 300, "output_tokens": 50},
and optionally "n", "priority", and "prefix" with "prefix_tokens": requests that name the same
prefix begin with the same so many tokens. A step takes

    step_ms + token_ms * tokens in the step + context_ms * tokens in the cache that they look at

which is near enough to a real engine to compare settings and policies.
"""

import argparse
import heapq
import json
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.request import Request
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import Sampled, StepPlan, StepResult

_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        arrival_s: when it comes, in seconds from the start.
        prompt_tokens: length of its prompt.
        output_tokens: each of its sequences ends after so many tokens.
        n: number of its sequences.
        priority: as in SamplingParams.
        prefix: requests with the same one begin with the same tokens; empty: with their own.
        prefix_tokens: how many.
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
    """Milliseconds: of any step, of each token in it, and of each cached token it looks at."""

    step_ms: float = 10.0
    token_ms: float = 0.05
    context_ms: float = 0.0001

    def of(self, plan: StepPlan) -> float:
        """Seconds that a plan's step takes."""
        context = sum(chunk.start for chunk in plan.chunks)
        return (self.step_ms + self.token_ms * plan.num_tokens + self.context_ms * context) / 1000


@dataclass(slots=True)
class Record:
    """What became of one request; times in seconds from the start, None if it never happened."""

    arrival: Arrival
    begun_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    num_ended: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulation's results: one record for each arrival, in order, and facts about the whole."""

    records: list[Record]
    elapsed_s: float
    num_steps: int
    num_preemptions: int
    hit_rate: float

    def report(self) -> str:
        """A table of percentiles, as text."""
        ended = [record for record in self.records if record.end_s is not None]
        tokens = sum(record.num_tokens for record in self.records)
        prompts = sum(record.arrival.prompt_tokens for record in ended)
        rows = {
            "queue": [_since(record, record.begun_s) for record in ended],
            "first token": [_since(record, record.first_token_s) for record in ended],
            "whole answer": [_since(record, record.end_s) for record in ended],
        }
        lines = [
            f"{len(ended)} of {len(self.records)} requests ended in {self.elapsed_s:.1f} s and "
            f"{self.num_steps} steps",
            f"{tokens / self.elapsed_s:.0f} output and {prompts / self.elapsed_s:.0f} prompt "
            f"tokens/s, {self.num_preemptions} preemptions, {self.hit_rate:.0%} of prompt tokens "
            "from the prefix cache",
            f"{'seconds':14}" + "".join(f"{name:>9}" for name in ("p50", "p90", "p99", "max")),
        ]
        for name, values in rows.items():
            lines.append(f"{name:14}" + "".join(f"{value:9.3f}" for value in percentiles(values)))
        return "\n".join(lines)


def simulate(arrivals: Iterable[Arrival], scheduler: Scheduler, cost: Cost) -> Outcome:
    """Let requests arrive at their times and run steps until all have ended.

    Args:
        arrivals: in any order; each fits the scheduler's pool when alone.
        scheduler: idle.
        cost: how long steps take.
    """
    records = [Record(arrival) for arrival in sorted(arrivals, key=lambda one: one.arrival_s)]
    pending = [(record.arrival.arrival_s, number) for number, record in enumerate(records)]
    heapq.heapify(pending)
    clock, num_steps = 0.0, 0
    while pending or scheduler.has_work():
        if not scheduler.has_work():
            clock = max(clock, pending[0][0])
        while pending and pending[0][0] <= clock:
            number = heapq.heappop(pending)[1]
            scheduler.add(_request(number, records[number].arrival))
        plan = scheduler.plan()
        for chunk in plan.chunks:
            record = records[int(chunk.request.request_id)]
            record.begun_s = clock if record.begun_s is None else record.begun_s
        clock += cost.of(plan)
        num_steps += 1
        answers = [Sampled([_TOKEN], [0.0]) for chunk in plan.chunks if chunk.samples]
        for update in scheduler.commit(plan, StepResult(answers)):
            _note(records[int(update.request_id)], clock, update.finish_reason is not None)
    cache = scheduler.cache
    queried = cache.num_queried_tokens if cache is not None else 0
    hit_rate = cache.num_hit_tokens / queried if cache is not None and queried else 0.0
    return Outcome(records, clock, num_steps, scheduler.num_preemptions, hit_rate)


def poisson(
    num_requests: int, rate: float, seed: int, priorities: Sequence[int] = (0,)
) -> list[Arrival]:
    """A seeded trace: independent arrivals at so many a second, lengths of which few are long."""
    rng = random.Random(seed)
    clock = 0.0
    arrivals = []
    for _ in range(num_requests):
        clock += rng.expovariate(rate)
        arrivals.append(
            Arrival(
                arrival_s=clock,
                prompt_tokens=min(4000, 1 + int(rng.lognormvariate(5.5, 1.0))),
                output_tokens=min(1000, 1 + int(rng.lognormvariate(4.5, 0.8))),
                priority=rng.choice(priorities),
            )
        )
    return arrivals


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """A trace from its lines.

    Raises:
        ValueError: a line is not an object of the known fields; the message gives its number.
    """
    known = {field.name for field in fields(Arrival)}
    arrivals = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            unknown = sorted(set(entry) - known)
            if unknown:
                raise ValueError(f"unknown fields {', '.join(unknown)}")
            arrivals.append(Arrival(**entry))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of the trace: {error}") from error
    return arrivals


def percentiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """The 50th, 90th and 99th percentile, and the largest value."""
    if len(values) < 2:
        only = values[0] if values else 0.0
        return only, only, only, only
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[89], cuts[98], max(values)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.scheduler_simulator", description="Simulate the scheduler."
    )
    parser.add_argument("--trace", type=Path, help="file of JSON lines; else arrivals are random")
    parser.add_argument("--requests", type=int, default=1000, help="random arrivals")
    parser.add_argument("--rate", type=float, default=10.0, help="random arrivals a second")
    parser.add_argument("--seed", type=int, default=0, help="of the random arrivals")
    parser.add_argument("--num-blocks", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=Cost().step_ms)
    parser.add_argument("--token-ms", type=float, default=Cost().token_ms)
    parser.add_argument("--context-ms", type=float, default=Cost().context_ms)
    args = parser.parse_args(argv)
    if args.trace is None:
        arrivals = poisson(args.requests, args.rate, args.seed)
    else:
        with args.trace.open(encoding="utf-8") as lines:
            arrivals = read_trace(lines)
    longest = max((one.prompt_tokens + one.output_tokens for one in arrivals), default=0)
    if longest > args.num_blocks * args.block_size:
        parser.error(
            f"a request has {longest} tokens; the limit is {args.num_blocks * args.block_size} "
            "(num-blocks times block-size)"
        )
    scheduler = Scheduler(
        BlockPool(args.num_blocks),
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    outcome = simulate(arrivals, scheduler, Cost(args.step_ms, args.token_ms, args.context_ms))
    sys.stdout.write(outcome.report() + "\n")


def _request(number: int, arrival: Arrival) -> Request:
    shared = min(arrival.prefix_tokens, arrival.prompt_tokens) if arrival.prefix else 0
    # Tokens that differ between prompts, so that only named prefixes are found in the cache.
    tokens = random.Random(f"prefix {arrival.prefix}").choices(range(2, 50_000), k=shared)
    own = random.Random(number).choices(range(2, 50_000), k=arrival.prompt_tokens - shared)
    params = SamplingParams(
        n=arrival.n, priority=arrival.priority, max_tokens=arrival.output_tokens
    )
    length = arrival.prompt_tokens + arrival.output_tokens
    return Request(str(number), tokens + own, params, max_total_tokens=length)


def _note(record: Record, clock: float, has_ended: bool) -> None:
    record.num_tokens += 1
    if record.first_token_s is None:
        record.first_token_s = clock
    if has_ended:
        record.num_ended += 1
        if record.num_ended == record.arrival.n:
            record.end_s = clock


def _since(record: Record, time_s: float | None) -> float:
    assert time_s is not None
    return time_s - record.arrival.arrival_s


if __name__ == "__main__":
    main()
