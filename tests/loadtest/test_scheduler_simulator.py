import json
import subprocess
import sys
from pathlib import Path

import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.queues.arrival_ranks import AGEING_STEPS
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepResult

from loadtest.simulators import scheduler_simulator
from loadtest.simulators.scheduler_simulator import (
    Arrival,
    Cost,
    main,
    poisson,
    read_trace,
    simulate,
)


def make_scheduler(num_blocks=512, max_num_seqs=32, budget=512) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def ttft(outcome, priority=None):
    return [
        record.first_token_s - record.arrival.arrival_s
        for record in outcome.records
        if priority in (None, record.arrival.priority)
    ]


def test_the_time_of_one_request_follows_from_the_cost_model():
    cost = Cost(step_ms=10, token_ms=1, context_ms=0)
    outcome = simulate([Arrival(2.0, 100, 3)], make_scheduler(), cost)
    (record,) = outcome.records
    assert record.begun_s == 2.0
    assert record.first_token_s == pytest.approx(2.0 + 0.110)
    assert record.end_s == pytest.approx(2.0 + 0.110 + 2 * 0.011)
    assert outcome.num_steps == 3


def test_requests_in_an_overload_end_in_order_of_arrival():
    outcome = simulate(poisson(300, rate=200, seed=1), make_scheduler(), Cost())
    assert all(record.num_tokens == record.arrival.output_tokens for record in outcome.records)
    assert outcome.num_preemptions > 0
    begun = [record.begun_s for record in outcome.records]
    assert begun == sorted(begun)


def test_low_priorities_do_not_starve_while_higher_priorities_fill_the_machine():
    arrivals = poisson(600, rate=40, seed=2, priorities=(0, 0, 0, 0, 1))
    scheduler = make_scheduler(max_num_seqs=8)
    outcome = simulate(arrivals, scheduler, Cost())
    better, worse = ttft(outcome, 0), ttft(outcome, 1)
    assert sum(worse) / len(worse) > sum(better) / len(better)
    # A request that is worse by one priority level waits at most `AGEING_STEPS` steps longer.
    longest_step = max(Cost().of(plan) for plan in [_full_plan(scheduler)])
    assert max(worse) < max(better) + AGEING_STEPS * longest_step


def _full_plan(scheduler):
    for number in range(40):
        params = SamplingParams(max_tokens=5)
        scheduler.add(Sequence(f"x{number}", [number] * 500, params, max_total_tokens=505))
    return scheduler.plan()


def test_named_prefixes_are_found_in_the_cache():
    arrivals = [Arrival(i * 10.0, 320, 2, prefix="system", prefix_tokens=160) for i in range(5)]
    outcome = simulate(arrivals, make_scheduler(), Cost())
    assert outcome.hit_rate == pytest.approx(4 * 160 / (5 * 320))


def test_all_sequences_of_a_request_are_counted():
    outcome = simulate([Arrival(0, 50, 7, n=3)], make_scheduler(), Cost())
    assert outcome.records[0].num_tokens == 21


def test_a_trace_is_read_and_a_wrong_line_is_named():
    lines = [json.dumps({"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}), ""]
    assert read_trace(lines) == [Arrival(0, 3, 2)]
    with pytest.raises(ValueError, match="line 1 of the trace: unknown fields promt"):
        read_trace(['{"promt": 3}'])
    with pytest.raises(ValueError, match="line 3 of the trace"):
        read_trace([*lines, "{"])


def test_the_command_prints_percentiles(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 30, "output_tokens": 5}\n' * 3)
    main(["--trace", str(trace)])
    text = capsys.readouterr().out
    assert "3 of 3 requests ended" in text
    assert "first token" in text


def test_the_command_loads_no_torch():
    code = (
        "import sys; from loadtest.simulators.scheduler_simulator import main; "
        "main(['--requests', '20']); sys.exit('torch' in sys.modules)"
    )
    folder = Path(scheduler_simulator.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=folder)


def calls_of_a_plan(num_running: int, num_waiting: int) -> int:
    """Return the number of function calls, Python's and built-in, in one step's plan and commit."""
    scheduler = make_scheduler(num_running * 3, num_running, 4 * num_running)
    for number in range(num_running + num_waiting):
        sequence = Sequence(str(number), [number] * 4, SamplingParams(), max_total_tokens=40)
        scheduler.add(sequence)
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    for step in range(4):
        if step == 3:
            sys.setprofile(note)
        plan = scheduler.plan()
        answers = [Sampled([7], [0.0]) for chunk in plan.chunks if chunk.samples]
        scheduler.commit(plan, StepResult(answers))
    sys.setprofile(None)
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return count


def test_a_steps_work_is_linear_in_running_requests_and_independent_of_waiting_ones():
    assert calls_of_a_plan(20, 3000) == calls_of_a_plan(20, 10)
    small, large = calls_of_a_plan(20, 10), calls_of_a_plan(200, 10)
    assert large < 11 * small
