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

import heapq
import json
import random
import statistics
import sys
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepPlan, StepResult

from loadtest import command_line

_TOKEN = 1


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
        """Return a table of percentiles as text."""
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
    """Add requests to a scheduler at their arrival times, and run steps until all have ended.

    Args:
        arrivals: requests in any order. Each request must fit into the scheduler's block pool.
        scheduler: a scheduler without requests.
        cost: the cost model of a step.
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
            record = records[int(chunk.sequence.request_id)]
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
    num_requests: int, rate: float, seed: int, priorities: abc.Sequence[int] = (0,)
) -> list[Arrival]:
    """Return a random trace with `rate` arrivals per second on average.

    Arrivals are independent of each other. Lengths follow a log-normal distribution, so that few
    requests are long. The same `seed` gives the same trace.
    """
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
    """Parse the lines of a trace.

    Raises:
        ValueError: a line is not a JSON object, or has unknown fields. The message contains the
            number of the line.
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


def percentiles(values: abc.Sequence[float]) -> tuple[float, float, float, float]:
    """Return the 50th, the 90th and the 99th percentile, and the largest value."""
    if len(values) < 2:
        only = values[0] if values else 0.0
        return only, only, only, only
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[89], cuts[98], max(values)


def main(argv: abc.Sequence[str] | None = None) -> None:
    """Run the simulation that the command line describes, and print a table."""
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


def _request(number: int, arrival: Arrival) -> Sequence:
    shared = min(arrival.prefix_tokens, arrival.prompt_tokens) if arrival.prefix else 0
    # The other tokens are random, so that the cache contains only the shared prefixes.
    tokens = random.Random(f"prefix {arrival.prefix}").choices(range(2, 50_000), k=shared)
    own = random.Random(number).choices(range(2, 50_000), k=arrival.prompt_tokens - shared)
    params = SamplingParams(
        n=arrival.n, priority=arrival.priority, max_tokens=arrival.output_tokens
    )
    length = arrival.prompt_tokens + arrival.output_tokens
    return Sequence(str(number), tokens + own, params, max_total_tokens=length)


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
