import random

import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import Sampled, StepPlan, StepResult

BLOCK = 4
EOS = 1


class Model:
    """Stands for the model and its cache: remembers which token each slot holds.

    The next token is a hash of the whole sequence as read from the cache, so a wrong block table,
    a lost block or a chunk that was skipped changes the answer.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[int | None] = [None] * (num_blocks * BLOCK)

    def run(self, plan: StepPlan) -> StepResult:
        sampled = []
        for request, start, num_tokens, samples, _, _ in plan.chunks:
            for position in range(start, start + num_tokens):
                self.slots[self._slot(request, position)] = request.token_ids[position]
            if samples:
                cached = [self.slots[self._slot(request, i)] for i in range(len(request.token_ids))]
                sampled.append(Sampled([next_token(cached)], [-0.5]))
        return StepResult(sampled)

    @staticmethod
    def _slot(request: Request, position: int) -> int:
        return request.block_table[position // BLOCK] * BLOCK + position % BLOCK


def next_token(token_ids: list[int]) -> int:
    return random.Random(repr(token_ids)).randrange(EOS, 40)


def expected_answer(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def make_scheduler(num_blocks=16, max_num_seqs=4, budget=8, **settings) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **settings,
    )


def make_request(name: str, prompt: list[int], max_tokens: int = 5) -> Request:
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=[EOS],
    )


def commit(scheduler, plan, token=9):
    sampled = [Sampled([token], [-0.5]) for chunk in plan.chunks if chunk.samples]
    return scheduler.commit(plan, StepResult(sampled))


def summary(plan):
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def test_a_long_prompt_is_cut_into_chunks_that_fill_the_budget():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("a", list(range(2, 22))))
    seen = []
    for _ in range(3):
        plan = scheduler.plan()
        seen += summary(plan)
        commit(scheduler, plan)
    assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 4, True)]


def test_single_tokens_share_steps_with_chunks_and_come_first():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("a", [2, 3]))
    commit(scheduler, scheduler.plan())
    scheduler.add(make_request("b", list(range(2, 14))))
    plan = scheduler.plan()
    assert summary(plan) == [("a", 2, 1, True), ("b", 0, 7, False)]
    assert plan.num_tokens == 8


def test_requests_wait_when_all_rows_are_taken_and_are_served_in_order():
    scheduler = make_scheduler(max_num_seqs=2, budget=8)
    for name in "abc":
        scheduler.add(make_request(name, [2], max_tokens=1))
    plan = scheduler.plan()
    assert [c.request.request_id for c in plan.chunks] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    commit(scheduler, plan)
    assert [c.request.request_id for c in scheduler.plan().chunks] == ["c"]


def test_the_newest_request_gives_its_blocks_back_when_they_run_out():
    scheduler = make_scheduler(num_blocks=4, budget=16)
    scheduler.add(make_request("old", [2] * 8, max_tokens=8))
    scheduler.add(make_request("new", [3] * 8, max_tokens=8))
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert summary(plan) == [("old", 8, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (1, 1, 1)
    scheduler.check()


def test_a_preempted_request_computes_its_prompt_and_answer_again():
    scheduler = make_scheduler(num_blocks=4, budget=16, enable_prefix_caching=False)
    scheduler.add(make_request("old", [2] * 8, max_tokens=2))
    scheduler.add(make_request("new", [3] * 8, max_tokens=8))
    commit(scheduler, scheduler.plan())
    commit(scheduler, scheduler.plan())
    assert summary(scheduler.plan()) == [("new", 0, 9, True)]


def test_a_stop_token_ends_a_request_and_is_reported():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [2]))
    (update,) = commit(scheduler, scheduler.plan(), token=EOS)
    assert (update.finish_reason, update.stop_reason, update.new_token_ids) == ("stop", EOS, [EOS])
    assert not scheduler.has_work()
    assert scheduler.pool.num_used == 0


def test_tokens_after_a_stop_token_of_the_same_step_are_dropped():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [2]))
    result = StepResult([Sampled([7, EOS, 8], [-1.0, -2.0, -4.0])])
    (update,) = scheduler.commit(scheduler.plan(), result)
    assert update.new_token_ids == [7, EOS]
    assert update.cumulative_logprob == -3.0


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_an_aborted_request_is_reported_once_and_leaves_nothing(steps_before):
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", [2] * 7))
    for _ in range(steps_before):
        commit(scheduler, scheduler.plan())
    scheduler.abort("a")
    scheduler.abort("a")
    assert scheduler.has_work()
    plan = scheduler.plan()
    assert plan.chunks == []
    (update,) = commit(scheduler, plan)
    assert (update.request_id, update.finish_reason) == ("a", "abort")
    assert not scheduler.has_work()
    assert scheduler.pool.num_used == 0
    scheduler.check()


def test_aborting_an_unknown_request_does_nothing():
    scheduler = make_scheduler()
    scheduler.abort("nobody")
    assert not scheduler.has_work()


def test_a_failed_step_ends_the_requests_of_its_plan_and_no_other():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", [2]))
    scheduler.add(make_request("b", [2]))
    updates = scheduler.fail(scheduler.plan(), "broken")
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [("a", "error", "broken")]
    assert summary(scheduler.plan()) == [("b", 0, 1, True)]
    scheduler.check()


def test_an_error_of_one_request_leaves_the_others_running():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [2]))
    scheduler.add(make_request("b", [2]))
    result = StepResult([Sampled([], [], "not finite"), Sampled([9], [-0.5])])
    first, second = scheduler.commit(scheduler.plan(), result)
    assert (first.finish_reason, first.error) == ("error", "not finite")
    assert second.finish_reason is None
    assert scheduler.num_running == 1


@pytest.mark.parametrize("seed", range(18))
def test_random_workloads_end_each_request_once_with_the_right_answer(seed):
    rng = random.Random(seed)
    num_blocks, max_num_seqs = [10, 16, 40][seed % 3], [1, 3, 8][seed // 3 % 3]
    scheduler = make_scheduler(num_blocks, max_num_seqs, rng.choice([8, 13, 64]))
    model = Model(num_blocks)
    longest = num_blocks * BLOCK
    prompts: dict[str, tuple[list[int], int]] = {}
    answers: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    alive: list[str] = []
    for _ in range(3000):
        if len(prompts) < 80 and rng.random() < 0.5:
            name = f"r{len(prompts)}"
            prompt = [rng.randrange(2, 40) for _ in range(rng.randint(1, longest // 2))]
            max_tokens = rng.randint(1, longest - len(prompt))
            prompts[name] = (prompt, max_tokens)
            answers[name] = []
            alive.append(name)
            scheduler.add(make_request(name, prompt, max_tokens))
        if alive and rng.random() < 0.02:
            scheduler.abort(rng.choice(alive))
        plan = scheduler.plan()
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
        for update in scheduler.commit(plan, model.run(plan)):
            assert update.request_id not in ends, "reported after its end"
            answers[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                ends[update.request_id] = update.finish_reason
                alive.remove(update.request_id)
        scheduler.check()
        if len(prompts) == 80 and not scheduler.has_work():
            break
    assert ends.keys() == prompts.keys(), "a request starved"
    assert (scheduler.num_preemptions > 0) == (max_num_seqs > 1)
    assert scheduler.pool.num_used == 0
    for name, (prompt, max_tokens) in prompts.items():
        tokens, reason = expected_answer(prompt, max_tokens)
        if ends[name] == "abort":
            assert answers[name] == tokens[: len(answers[name])]
        else:
            assert (answers[name], ends[name]) == (tokens, reason)


def test_every_running_request_moves_within_bounded_steps_while_others_keep_coming():
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=8, budget=16)
    model = Model(32)
    rng = random.Random(3)
    added: dict[str, int] = {}
    waits: list[int] = []
    for step in range(600):
        name = f"r{step}"
        if scheduler.num_waiting < 10:
            scheduler.add(make_request(name, [rng.randrange(2, 40) for _ in range(9)], 6))
            added[name] = step
        plan = scheduler.plan()
        for update in scheduler.commit(plan, model.run(plan)):
            if update.finish_reason is not None:
                waits.append(step - added.pop(update.request_id))
    assert max(waits) < 60
    assert all(step > 500 for step in added.values())
