import random

import pytest
from backend.scripted_model import BLOCK, EOS, ScriptedModel
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.draft_tokens.prompt_lookup import PromptLookup
from nereid_backend.core.queues.arrival_ranks import AGEING_STEPS
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepResult


def make_scheduler(num_blocks=16, max_num_seqs=4, budget=8, **settings) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **settings,
    )


def make_sequence(name: str, prompt: list[int], max_tokens: int = 5, **params) -> Sequence:
    return Sequence(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=[EOS],
    )


def commit(scheduler, plan, token=9):
    """Commit a step in which `token` is sampled for each chunk that samples. Return the updates."""
    sampled = [Sampled([token], logprobs=[-0.5]) for chunk in plan.chunks if chunk.samples]
    return scheduler.commit(plan, StepResult(sampled))


def summary(plan):
    """Return a tuple for each chunk: request, position of the first token, length and `samples`."""
    return [(c.sequence.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def test_a_long_prompt_is_cut_into_chunks_that_fill_the_budget():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence("a", list(range(2, 22))))
    chunks = []
    for _ in range(3):
        plan = scheduler.plan()
        chunks += summary(plan)
        commit(scheduler, plan)
    assert chunks == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 4, True)]


def test_single_tokens_share_steps_with_chunks_and_come_first():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence("a", [2, 3]))
    commit(scheduler, scheduler.plan())
    scheduler.add(make_sequence("b", list(range(2, 14))))
    plan = scheduler.plan()
    assert summary(plan) == [("a", 2, 1, True), ("b", 0, 7, False)]
    assert plan.num_tokens == 8


def test_requests_wait_when_all_rows_are_taken_and_are_served_in_order():
    scheduler = make_scheduler(max_num_seqs=2, budget=8)
    for name in "abc":
        scheduler.add(make_sequence(name, [2], max_tokens=1))
    plan = scheduler.plan()
    assert [c.sequence.request_id for c in plan.chunks] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    commit(scheduler, plan)
    assert [c.sequence.request_id for c in scheduler.plan().chunks] == ["c"]


def test_the_newest_request_is_preempted_when_no_block_is_free():
    scheduler = make_scheduler(num_blocks=4, budget=16)
    scheduler.add(make_sequence("old", [2] * 8, max_tokens=8))
    scheduler.add(make_sequence("new", [3] * 8, max_tokens=8))
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert summary(plan) == [("old", 8, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (1, 1, 1)
    scheduler.check()


def test_a_preempted_request_computes_its_prompt_and_answer_again():
    scheduler = make_scheduler(num_blocks=4, budget=16, enable_prefix_caching=False)
    scheduler.add(make_sequence("old", [2] * 8, max_tokens=2))
    scheduler.add(make_sequence("new", [3] * 8, max_tokens=8))
    commit(scheduler, scheduler.plan())
    commit(scheduler, scheduler.plan())
    assert summary(scheduler.plan()) == [("new", 0, 9, True)]


def test_a_stop_token_ends_a_request_and_is_reported():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2]))
    (update,) = commit(scheduler, scheduler.plan(), token=EOS)
    assert (update.finish_reason, update.stop_reason, update.new_token_ids) == ("stop", EOS, [EOS])
    assert not scheduler.has_work()
    assert scheduler.pool.num_used == 0


def test_tokens_after_a_stop_token_of_the_same_step_are_dropped():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2]))
    result = StepResult([Sampled([7, EOS, 8], [-1.0, -2.0, -4.0])])
    (update,) = scheduler.commit(scheduler.plan(), result)
    assert update.new_token_ids == [7, EOS]
    assert update.cumulative_logprob == -3.0


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_an_aborted_request_is_reported_once_and_leaves_nothing(steps_before):
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_sequence("a", [2] * 7))
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
    scheduler.add(make_sequence("a", [2]))
    scheduler.add(make_sequence("b", [2]))
    updates = scheduler.fail_step(scheduler.plan(), "broken")
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [("a", "error", "broken")]
    assert summary(scheduler.plan()) == [("b", 0, 1, True)]
    scheduler.check()


def test_an_error_of_one_request_leaves_the_others_running():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2]))
    scheduler.add(make_sequence("b", [2]))
    failure = Sampled(token_ids=[], logprobs=[], error="not finite")
    result = StepResult([failure, Sampled([9], [-0.5])])
    first, second = scheduler.commit(scheduler.plan(), result)
    assert (first.finish_reason, first.error) == ("error", "not finite")
    assert second.finish_reason is None
    assert scheduler.num_running == 1


def test_every_request_ends_within_60_steps_while_new_requests_arrive():
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=8, budget=16)
    model = ScriptedModel(32)
    rng = random.Random(3)
    arrival_steps: dict[str, int] = {}  # of the requests that have not ended
    durations: list[int] = []
    for step in range(600):
        name = f"r{step}"
        if scheduler.num_waiting < 10:
            prompt = [rng.randrange(2, 40) for _ in range(9)]
            scheduler.add(make_sequence(name, prompt, max_tokens=6))
            arrival_steps[name] = step
        plan = scheduler.plan()
        for update in scheduler.commit(plan, model.run(plan)):
            if update.finish_reason is not None:
                durations.append(step - arrival_steps.pop(update.request_id))
    assert max(durations) < 60
    assert all(step > 500 for step in arrival_steps.values())


def sequences(plan):
    """Return the tuples of `summary`, but with the index of the sequence instead of the request."""
    return [(c.sequence.index, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def test_one_sequence_computes_the_prompt_and_the_others_only_its_last_token():
    scheduler = make_scheduler(num_blocks=8, budget=16)
    scheduler.add(make_sequence("a", list(range(2, 12)), n=3))
    plan = scheduler.plan()
    assert sequences(plan) == [(0, 0, 10, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    commit(scheduler, plan)
    plan = scheduler.plan()
    assert sequences(plan) == [(0, 10, 1, True), (1, 9, 1, True), (2, 9, 1, True)]
    first, *others = [chunk.sequence.block_table for chunk in plan.chunks]
    assert all(table[:2] == first[:2] and table[2] != first[2] for table in others)
    assert plan.copies == [(first[2], table[2]) for table in others]
    scheduler.check()


def test_no_block_is_copied_when_the_prompts_last_token_begins_a_block():
    scheduler = make_scheduler(num_blocks=8, budget=16)
    scheduler.add(make_sequence("a", list(range(2, 11)), n=2))
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert sequences(plan) == [(0, 9, 1, True), (1, 8, 1, True)]
    assert plan.copies == []


def test_a_sequence_whose_sibling_ended_at_its_first_token_still_shares_the_prompt():
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=1, budget=16)
    scheduler.add(make_sequence("a", list(range(2, 12)), max_tokens=1, n=2))
    commit(scheduler, scheduler.plan())
    assert sequences(scheduler.plan()) == [(1, 9, 1, True)]
    scheduler.check()


def test_the_sequences_of_a_request_have_different_seeds_and_the_first_keeps_the_given_seed():
    sequence = make_sequence("a", [2], n=4)
    sequence.seed = 2**64 - 1
    seeds = [each.seed for each in sequence.all_sequences()]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_one_sequence_can_be_aborted_and_the_others_go_on():
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence("a", [2, 3, 4], n=3))
    scheduler.abort("a", 0)
    plan = scheduler.plan()
    update, *_ = commit(scheduler, plan)
    assert (update.index, update.finish_reason) == (0, "abort")
    assert sequences(plan) == [(1, 0, 3, True)]
    assert sequences(scheduler.plan()) == [(1, 3, 1, True), (2, 2, 1, True)]


def test_aborting_a_request_reports_each_of_its_sequences_in_order():
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence("a", [2, 3, 4], n=3))
    scheduler.abort("a")
    updates = scheduler.commit(scheduler.plan(), StepResult())
    assert [(u.index, u.finish_reason) for u in updates] == [(i, "abort") for i in range(3)]
    assert not scheduler.has_work()


def test_a_lower_priority_number_goes_first():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("late", 5), ("normal", 0), ("urgent", -5)):
        scheduler.add(make_sequence(name, [2], max_tokens=1, priority=priority))
    order = []
    while scheduler.has_work():
        order += [update.request_id for update in commit(scheduler, scheduler.plan())]
    assert order == ["urgent", "normal", "late"]


def test_a_request_of_low_priority_ends_although_requests_of_higher_priority_arrive():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("patient", [2], max_tokens=1, priority=3))
    for step in range(5 * AGEING_STEPS):
        scheduler.add(make_sequence(f"r{step}", [2], max_tokens=1))
        updates = commit(scheduler, scheduler.plan())
        if updates[0].request_id == "patient":
            break
    assert 2 * AGEING_STEPS < step < 4 * AGEING_STEPS


def test_among_equal_priorities_the_request_with_the_fewest_tokens_to_recompute_is_preempted():
    scheduler = make_scheduler(num_blocks=9, budget=64, enable_prefix_caching=False)
    scheduler.add(make_sequence("first", [2] * 8, max_tokens=30))
    scheduler.add(make_sequence("long", [3] * 15, priority=1))
    scheduler.add(make_sequence("short", [4] * 7, priority=1))
    scheduler.add(make_sequence("better", [5] * 3))
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert scheduler.num_preemptions == 1
    assert [c.sequence.request_id for c in plan.chunks] == ["first", "better", "long"]


def test_forced_tokens_are_computed_together_in_the_next_step():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2, 3], max_tokens=9))
    result = StepResult([Sampled([7, 8, 9], [-1.0, 0.0, 0.0])])
    (update,) = scheduler.commit(scheduler.plan(), result)
    assert update.new_token_ids == [7, 8, 9]
    assert summary(scheduler.plan()) == [("a", 2, 3, True)]


def test_tokens_beyond_the_limit_are_dropped():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2], max_tokens=2))
    (update,) = scheduler.commit(
        scheduler.plan(), StepResult([Sampled([7, 8, 9], [-1.0, -1.0, -1.0], None, list("xyz"))])
    )
    assert (update.new_token_ids, update.logprobs) == ([7, 8], ["x", "y"])
    assert (update.finish_reason, update.cumulative_logprob) == ("length", -2.0)


def test_all_tokens_of_a_prompt_have_logits_if_prompt_logprobs_are_requested():
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_sequence("a", [2, 3, 4, 5, 6, 7], prompt_logprobs=0))
    first = scheduler.plan()
    scheduler.commit(first, StepResult([], {0: ["b", "c", "d", "e"]}))
    second = scheduler.plan()
    assert [first.chunks[0].num_logits, second.chunks[0].num_logits] == [4, 2]
    (update,) = scheduler.commit(second, StepResult([Sampled([9], [-0.5])], {0: ["f"]}))
    assert update.prompt_logprobs == [None, "b", "c", "d", "e", "f"]
    third = scheduler.plan()
    assert third.chunks[0].num_logits == 1
    assert commit(scheduler, third)[0].prompt_logprobs is None


def test_a_prompt_that_cannot_be_divided_gets_its_own_step_if_it_exceeds_the_budget():
    scheduler = make_scheduler(budget=8, whole_prefill=True)
    scheduler.add(make_sequence("a", [2, 3], max_tokens=9))
    commit(scheduler, scheduler.plan())
    scheduler.add(make_sequence("b", [4] * 20, max_tokens=9))
    steps = []
    for _ in range(3):
        plan = scheduler.plan()
        steps.append(summary(plan))
        commit(scheduler, plan)
    assert steps[:2] == [[("a", 2, 1, True)], [("b", 0, 20, True)]]
    assert steps[2] == [("a", 3, 1, True), ("b", 20, 1, True)]


def test_each_sequence_computes_the_prompt_if_blocks_cannot_be_shared():
    scheduler = make_scheduler(budget=16, shares_blocks=False)
    scheduler.add(make_sequence("a", [2, 3, 4], n=2))
    assert sequences(scheduler.plan()) == [(0, 0, 3, True), (1, 0, 3, True)]


class Forks:
    """A guide that counts its forks."""

    def __init__(self):
        self.forks = []

    def fork(self):
        self.forks.append(Forks())
        return self.forks[-1]


def test_a_request_waits_for_its_guide_and_each_sequence_gets_one():
    scheduler = make_scheduler(budget=16)
    sequence = make_sequence("a", [2, 3, 4], n=2)
    scheduler.add(sequence, is_prepared=False)
    assert scheduler.plan().chunks == []
    assert (scheduler.num_waiting, scheduler.is_preparing("a")) == (2, True)
    scheduler.check()
    guide = Forks()
    scheduler.start("a", guide)
    commit(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert [chunk.sequence.guide for chunk in plan.chunks] == [guide, guide.forks[0]]


def test_a_request_whose_guide_cannot_be_created_is_refused_once_for_each_sequence():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2], n=2), is_prepared=False)
    scheduler.end_with_error("a", "regex: unbalanced")
    updates = scheduler.commit(scheduler.plan(), StepResult())
    assert [(u.index, u.finish_reason, u.is_refused, u.error) for u in updates] == [
        (index, "error", True, "regex: unbalanced") for index in range(2)
    ]
    assert not scheduler.has_work()


def test_an_aborted_request_may_still_get_its_guide():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [2]), is_prepared=False)
    scheduler.abort("a")
    scheduler.start("a", Forks())
    (update,) = scheduler.commit(scheduler.plan(), StepResult())
    assert update.finish_reason == "abort"
    assert not scheduler.has_work()


def test_draft_tokens_are_appended_up_to_the_first_wrong_token():
    scheduler = make_scheduler(drafter=PromptLookup(3))
    scheduler.add(make_sequence("a", [2, 3, 4, 5, 6, 2, 3, 4], max_tokens=9))
    commit(scheduler, scheduler.plan(), token=5)
    plan = scheduler.plan()
    sequence = plan.chunks[0].sequence
    assert sequence.draft_token_ids == [6, 2, 3]
    assert (plan.chunks[0].num_tokens, plan.chunks[0].num_logits) == (4, 4)
    (update,) = scheduler.commit(plan, StepResult([Sampled([6, 9], [-0.5, -0.5])]))
    assert update.new_token_ids == [6, 9]
    assert summary(scheduler.plan()) == [("a", 10, 1, True)]
    scheduler.check()


def test_drafts_stop_for_a_request_whose_drafts_are_wrong():
    scheduler = make_scheduler(num_blocks=64, drafter=PromptLookup(2))
    scheduler.add(make_sequence("a", [2, 3, 4] * 4, max_tokens=100))
    step_sizes = []
    for step in range(60):
        plan = scheduler.plan()
        step_sizes.append(plan.num_tokens)
        # Each draft is wrong, because the tokens 2, 3, 4 are followed by another token each time.
        commit(scheduler, plan, token=[2, 3, 4, 100 + step][step % 4])
    assert max(step_sizes[1:24]) > 1
    assert max(step_sizes[30:55]) == 1
