import random
import statistics
import sys

import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.queues.arrival_ranks import AGEING_STEPS
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence

from loadtest.simulators.scheduler_simulator import Arrival, Cost, run_step, simulate

HIGH, LOW = 0, 1  # priorities, of which the smaller number goes first


def make_scheduler(num_blocks=512, max_num_seqs=32, max_num_batched_tokens=512) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def random_arrivals(count, rate, seed, low_priority_share=0.0):
    """Yield `count` arrivals, `rate` in a second on average. Few of the requests are long."""
    rng = random.Random(seed)
    clock_s = 0.0
    for _ in range(count):
        clock_s += rng.expovariate(rate)
        yield Arrival(
            arrival_s=clock_s,
            prompt_tokens=min(4000, 1 + int(rng.lognormvariate(mu=5.5, sigma=1.0))),
            output_tokens=min(1000, 1 + int(rng.lognormvariate(mu=4.5, sigma=0.8))),
            priority=LOW if rng.random() < low_priority_share else HIGH,
        )


def first_token_delays_s(outcome, priority):
    """Return the times to the first token of the requests with a priority."""
    records = [record for record in outcome.records if record.arrival.priority == priority]
    return [record.first_token_delay_s for record in records]


def test_the_time_of_one_request_follows_from_the_cost_model():
    cost = Cost(step_ms=10, token_ms=1, context_ms=0)
    arrival = Arrival(arrival_s=2.0, prompt_tokens=100, output_tokens=3)
    outcome = simulate([arrival], make_scheduler(), cost)
    (record,) = outcome.records
    assert record.begun_s == 2.0
    assert record.first_token_s == pytest.approx(2.0 + (10 + 100) / 1000)
    assert outcome.num_steps == 3


def test_requests_in_an_overload_start_in_order_of_arrival_and_all_end():
    outcome = simulate(random_arrivals(300, rate=200, seed=1), make_scheduler(), Cost())
    assert all(record.num_tokens == record.arrival.output_tokens for record in outcome.records)
    assert outcome.num_preemptions > 0
    starts_s = [record.begun_s for record in outcome.records]
    assert starts_s == sorted(starts_s)


def test_low_priorities_do_not_starve_while_higher_priorities_fill_the_machine():
    arrivals = random_arrivals(600, rate=40, seed=2, low_priority_share=0.2)
    scheduler = make_scheduler(max_num_seqs=8)
    outcome = simulate(arrivals, scheduler, Cost())
    high_s, low_s = first_token_delays_s(outcome, HIGH), first_token_delays_s(outcome, LOW)
    assert statistics.fmean(low_s) > statistics.fmean(high_s)
    # A request that is worse by one priority level waits at most `AGEING_STEPS` steps longer.
    longest_step_s = Cost().of(full_plan(scheduler))
    assert max(low_s) < max(high_s) + AGEING_STEPS * longest_step_s


def full_plan(scheduler):
    """Return the plan of a step that uses the whole token budget."""
    for number in range(40):
        params = SamplingParams(max_tokens=5)
        scheduler.add(Sequence(f"x{number}", [number] * 500, params, max_total_tokens=505))
    return scheduler.plan()


def test_named_prefixes_are_found_in_the_cache():
    arrivals = [
        Arrival(10.0 * number, 320, output_tokens=2, prefix="system", prefix_tokens=160)
        for number in range(5)
    ]
    outcome = simulate(arrivals, make_scheduler(), Cost())
    assert outcome.hit_rate == pytest.approx(4 * 160 / (5 * 320))  # the first prompt finds nothing


def test_all_sequences_of_a_request_are_counted():
    arrival = Arrival(arrival_s=0, prompt_tokens=50, output_tokens=7, n=3)
    outcome = simulate([arrival], make_scheduler(), Cost())
    assert outcome.records[0].num_tokens == 3 * 7


def num_calls_of_a_step(num_running: int, num_waiting: int) -> int:
    """Return the number of function calls, Python's and built-in, in one step's plan and commit."""
    scheduler = make_scheduler(
        num_blocks=3 * num_running,
        max_num_seqs=num_running,
        max_num_batched_tokens=4 * num_running,
    )
    for number in range(num_running + num_waiting):
        prompt = [number] * 4
        scheduler.add(Sequence(str(number), prompt, SamplingParams(), max_total_tokens=40))
    for _ in range(3):  # the first steps start the sequences and fill caches
        run_step(scheduler)
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    run_step(scheduler)
    sys.setprofile(None)
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return num_calls


def test_a_steps_work_is_linear_in_running_requests_and_independent_of_waiting_ones():
    assert num_calls_of_a_step(20, 3000) == num_calls_of_a_step(20, 10)
    assert num_calls_of_a_step(200, 10) < 11 * num_calls_of_a_step(20, 10)
