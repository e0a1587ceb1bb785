"""Simulates the scheduler on a list of arrivals, with a cost model instead of a GPU and a model.

The time of a step is

    step_ms + token_ms * tokens in the step + context_ms * cached tokens that attention reads

This cost model is close enough to a real engine to compare settings and policies.
"""

import random
from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepPlan, StepResult

ANSWER_TOKEN = 1  # each simulated answer repeats this token
_PROMPT_TOKENS = range(2, 50_000)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

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
    """The result of one request. Times are in seconds from the start; None if not known.

    Attributes:
        arrival: the request.
        begun_s: the start time of the first step that contains the request.
        first_token_s: the time of the first token.
        num_tokens: the number of generated tokens of all sequences.
    """

    arrival: Arrival
    begun_s: float | None = None
    first_token_s: float | None = None
    num_tokens: int = 0

    def note_start(self, clock_s: float) -> None:
        """Store the start time of a step that contains the request, if the step is the first."""
        if self.begun_s is None:
            self.begun_s = clock_s

    def note_token(self, clock_s: float) -> None:
        """Count a generated token."""
        self.num_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = clock_s

    @property
    def first_token_delay_s(self) -> float:
        """The seconds from the arrival to the first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival.arrival_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a simulation.

    Attributes:
        records: one record for each arrival, in order of arrival.
        num_steps: the number of steps.
        num_preemptions: the number of preemptions.
        hit_rate: the share of prompt tokens that were found in the prefix cache.
    """

    records: list[Record]
    num_steps: int
    num_preemptions: int
    hit_rate: float


class Percentiles(NamedTuple):
    """The 50th, 90th and 99th percentile of some values."""

    p50: float
    p90: float
    p99: float


def percentiles(values: abc.Sequence[float]) -> Percentiles:
    """Return percentiles of `values`. Without values, all percentiles are 0."""
    return Percentiles(*np.percentile(values or [0.0], (50, 90, 99)).tolist())


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
            records[update.request_id].note_token(clock_s)
    return Outcome(
        records=list(records.values()),
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
