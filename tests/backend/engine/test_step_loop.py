"""Tests that overlapping steps give the same results as consecutive steps."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from backend.core.test_scheduler_workload import (
    KINDS,
    NUM_REQUESTS,
    Workload,
    longest_sequence,
)
from backend.exactness import bytes_for, open_engine
from backend.scripted_model import BLOCK, ScriptedModel
from backend.tiny_models import VOCAB_SIZE
from fakes.modular_guide import ModularGuide
from nereid_backend import Engine, EngineConfig, EngineError, SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepPlan, StepResult
from nereid_backend.engine.step_loop import StepLoop
from nereid_backend.sampling import random_sampling, sampler

from backend import shrink

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WRONG_TOKEN = 39  # the last token of the vocabulary of `ScriptedModel`


@dataclass
class ScriptedStep:
    """A step that a `ScriptedRunner` has started. `result` is None until the tokens are sampled."""

    plan: StepPlan
    result: StepResult | None = None


class ScriptedRunner:
    """A fake runner that computes the steps with a `ScriptedModel`, in the order of a real device.

    Attributes:
        wrong: the probability that the next step gets a wrong token.
        faulty: the probability that `sample` fails, and also the probability that `finish` fails.
        num_ahead: the number of steps that began while another step was running.
    """

    def __init__(self, model: ScriptedModel, rng: random.Random, *, wrong=0.0, faulty=0.0):
        self.model, self.rng, self.wrong, self.faulty = model, rng, wrong, faulty
        self.num_ahead = 0
        self.running_steps: list[ScriptedStep] = []

    def start(self, plan, previous=None):
        expected = [previous.plan] if previous else []
        assert [step.plan for step in self.running_steps] == expected
        _check_plan(plan)
        self.model.compute(plan, previous.result.device_token_ids if previous else ())
        step = ScriptedStep(plan)
        self.running_steps.append(step)
        self.num_ahead += previous is not None
        return step

    def sample(self, step, plan):
        step.plan = plan
        self._maybe_fail(step)
        result = self.model.answer(plan)
        device_token_ids = [
            outcome.token_ids[0]
            if outcome.token_ids and self.rng.random() >= self.wrong
            else WRONG_TOKEN
            for outcome in result.sampled
        ]
        step.result = replace(result, device_token_ids=device_token_ids)

    def finish(self, step):
        self._maybe_fail(step)
        self.running_steps.remove(step)
        self.model.clear_broken(step.plan, step.result)
        return step.result

    def _maybe_fail(self, step):
        if self.rng.random() < self.faulty:
            self.running_steps.remove(step)
            for chunk in step.plan.chunks:
                self.model.clear(chunk.sequence)
            raise RuntimeError("a fault made by the test")


class CheckedLoop(StepLoop):
    """A step loop that raises all errors that the test did not cause."""

    def _fail(self, plan, error):
        if "made by the test" not in str(error):
            raise error
        return super()._fail(plan, error)


class OverlappedWorkload(Workload):
    """A workload with asynchronous scheduling: a step starts before the previous step has ended.

    A step samples a wrong token with the probability `wrong` and fails with the probability
    `faulty`.
    """

    def __init__(self, *args, wrong=0.0, faulty=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.runner = ScriptedRunner(self.model, self.rng, wrong=wrong, faulty=faulty)
        self.loop = CheckedLoop(self.scheduler, self.runner, max_step_failures=1000, is_async=True)

    def step(self):
        self.take(self.loop.step())
        if self.loop._running_step is None:
            self.runner.running_steps.clear()


def _check_plan(plan):
    """Check the number of tokens in a plan, and that no sequence has two chunks."""
    assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
    assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
    assert all(plan.chunks[index].num_tokens == 1 for index, _ in plan.pending)


# The kinds of workloads that have no draft tokens and in which sequences can share blocks.
SHARING_KINDS = ["plain", "prefix cache", "windows", "chunks", "groups", "groups with chunks"]


@pytest.mark.parametrize("kind", SHARING_KINDS)
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(10, 8), (16, 3), (60, 8)])
@pytest.mark.parametrize("trouble", [0.0, 0.02])
def test_random_workloads_end_each_sequence_once_with_the_right_answer(
    kind, num_blocks, max_num_seqs, trouble
):
    num_groups = len(KINDS[kind].get("windows", [None]))
    scheduler = Scheduler(
        BlockPool(num_blocks * num_groups),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=13,
        **KINDS[kind],
    )
    longest = longest_sequence(scheduler, step_tokens=13)
    workload = OverlappedWorkload(
        num_blocks, scheduler, longest, broken=trouble, wrong=trouble, faulty=trouble / 8
    )
    workload.run(NUM_REQUESTS, cancelled=0.04)

    workload.check()
    assert {"abort", "length", "stop"} <= set(workload.ends.values())
    assert ("error" in workload.ends.values()) == (trouble > 0)
    assert scheduler.num_preemptions > 0 or num_blocks == 60 or scheduler.windows != (None,)
    assert workload.runner.num_ahead > NUM_REQUESTS / 2
    if scheduler.cache is not None:
        assert scheduler.cache.num_hit_tokens > 0
    assert workload.model.num_copied > 0


@dataclass
class Answer:
    """The reported answer of one sequence."""

    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    cumulative_logprob: float = 0.0
    end: tuple | None = None

    def take(self, update):
        assert self.end is None
        self.token_ids += update.new_token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs += (update.prompt_logprobs or [])[1:]
        self.cumulative_logprob = update.cumulative_logprob
        if update.finish_reason is not None:
            self.end = update.finish_reason, update.stop_reason, update.error

    def check_same(self, other):
        assert (self.token_ids, self.end) == (other.token_ids, other.end)
        # The two answers may come from steps with different tokens, so their rounding may differ.
        assert self.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        for own, others in (
            (self.logprobs, other.logprobs),
            (self.prompt_logprobs, other.prompt_logprobs),
        ):
            assert [report.token_ids[0] for report in own] == [r.token_ids[0] for r in others]
            assert [report.logprobs[0] for report in own] == pytest.approx(
                [report.logprobs[0] for report in others], abs=1e-4
            )


def answers_of(engine, sequences, *, guided=(), aborts=()):
    """Return the answer of each sequence. Before each step, one more request arrives.

    Args:
        engine: an idle engine.
        sequences: the prompt and the parameters of each request, by its name.
        guided: the names of the requests that have a guide.
        aborts: for each request to abort, the number of tokens after which it is aborted.
    """
    aborts = dict(aborts)
    answers = {}
    pending = list(sequences.items())
    while pending or engine.has_work():
        if pending:
            name, (prompt, params) = pending.pop()
            engine.add_request(name, prompt, params)
            if name in guided:
                for sequence in engine._parts.scheduler._requests.sequences_of(name):
                    sequence.guide = ModularGuide(VOCAB_SIZE)
        for update in engine.step():
            answer = answers.setdefault((update.request_id, update.index), Answer())
            answer.take(update)
            if len(answer.token_ids) == aborts.get(update.request_id):
                engine.abort(update.request_id)
        engine.check()
    # No request runs or waits, and no block of the cache is in use.
    assert engine.stats()[:3] == (0, 0, 0)
    return answers


EXTRA_PARAMS = [
    {},
    {},
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.01},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"bad_words_token_ids": [[5, 6], [7]], "min_tokens": 3},
    {"logit_bias": {9: 4.0}, "allowed_token_ids": list(range(0, VOCAB_SIZE, 3))},
]


def make_requests(rng, count):
    """Return random requests for `answers_of`. Some prompts begin with the same tokens."""
    sequences = {}
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(24)]
    for number in range(count):
        prompt = stem[: rng.choice([0, 0, 9, 24])]
        prompt += [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        sequences[str(number)] = (
            prompt,
            SamplingParams(
                temperature=rng.choice([0.0, 0.0, 1.0, 1.5]),
                max_tokens=rng.randint(4, 24),
                seed=number,
                n=rng.choice([1, 1, 1, 3]),
                stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 40])),
                logprobs=rng.choice([None, None, 3]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                priority=rng.choice([0, 0, 1]),
                **rng.choice(EXTRA_PARAMS),
            ),
        )
    return sequences


def record_deferred_rows(monkeypatch):
    """Return a list to which the sampler appends each row whose token it samples again."""
    sample_again, deferred_rows = sampler.Sampler.sample_again, []

    def record_and_sample_again(self, part, rows):
        deferred_rows.extend(rows)
        return sample_again(self, part, rows)

    monkeypatch.setattr(sampler.Sampler, "sample_again", record_and_sample_again)
    return deferred_rows


@pytest.mark.parametrize(
    ("family", "num_tokens"), [("qwen2", 100), ("mistral, sliding window", 64)]
)
@pytest.mark.parametrize("seed", range(2))
def test_answers_are_the_same_with_and_without_async_scheduling(
    checkpoint, family, num_tokens, seed, monkeypatch
):
    monkeypatch.setattr(random_sampling, "_LIKELIEST_DEFERRED", 16)
    rng = random.Random(seed)
    sequences = make_requests(rng, 30)
    guided = rng.sample(sorted(sequences), 6)
    aborts = dict.fromkeys(rng.sample(sorted(sequences), 4), 3)
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 19, "max_model_len": 80}
    engine_for_size = open_engine(checkpoint(family), **settings)
    settings["kv_cache_memory"] = bytes_for(engine_for_size, num_tokens)
    deferred_rows = record_deferred_rows(monkeypatch)

    def answer_all(is_async):
        engine = open_engine(checkpoint(family), async_scheduling=is_async, **settings)
        # The sampler defers uncertain rows, as on a GPU: it samples the tokens of these rows again
        # after the next step has begun.
        engine._parts.runner._sampler.defers = is_async
        answers = answers_of(engine, sequences, guided=guided, aborts=aborts)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_prefix_cache_hits > 0 or family != "qwen2"
        engine.close()
        return answers

    expected, answers = answer_all(is_async=False), answer_all(is_async=True)
    assert len(deferred_rows) > 10
    assert answers.keys() == expected.keys()
    for sequence, answer in answers.items():
        # The two engines may abort a request after a different number of steps, so the aborted
        # answers may differ in length.
        if sequence[0] in aborts and answer.end[0] == "abort":
            length = min(len(answer.token_ids), len(expected[sequence].token_ids))
            assert answer.token_ids[:length] == expected[sequence].token_ids[:length]
        else:
            answer.check_same(expected[sequence])
    assert {answer.end[0] for answer in answers.values()} >= {"stop", "length", "abort"}


def scheduler_of(*sequences, num_blocks=20, **settings):
    """Return a scheduler for 4 sequences, 40 tokens a step and blocks of 4 tokens."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 40, **settings}
    scheduler = Scheduler(BlockPool(num_blocks), block_size=BLOCK, **settings)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def request_of(name, prompt, max_tokens=9, **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(name, prompt, params, max_total_tokens=len(prompt) + max_tokens)


def result_of(plan, token=7, **special_results):
    """Return the result of a step in which `token` is sampled for each chunk that samples.

    `special_results` contains other results for some requests, by the name of the request.
    """
    names = [chunk.sequence.request_id for chunk in plan.chunks if chunk.samples]
    sampled = [special_results.get(name, Sampled([token], logprobs=[-1.0])) for name in names]
    return StepResult(sampled, device_token_ids=[token] * len(sampled))


BROKEN = Sampled(token_ids=[], logprobs=[], error="not finite")


def test_a_step_that_is_planned_ahead_takes_tokens_from_the_previous_step():
    scheduler = scheduler_of(
        request_of("a", [1] * 3), request_of("b", [1] * 50), request_of("c", [2])
    )
    first = scheduler.plan()
    assert [(c.sequence.request_id, c.samples) for c in first.chunks] == [("a", True), ("b", False)]
    second = scheduler.plan_ahead(first)
    assert [(c.sequence.request_id, c.start, c.num_tokens) for c in second.chunks] == [
        ("a", 3, 1),
        ("c", 0, 1),
        ("b", 37, 13),
    ]
    assert second.pending == [(0, 0)]
    assert [len(chunk.sequence.token_ids) for chunk in second.chunks] == [3, 1, 50]
    scheduler.commit(first, result_of(first))
    assert scheduler.settle(second, [7]) is second
    third = scheduler.plan_ahead(second)
    # The second step samples for the sequences in the order a, c, b.
    assert third.pending == [(0, 0), (1, 2), (2, 1)]


def test_a_sequence_that_will_reach_its_length_is_not_planned_ahead():
    scheduler = scheduler_of(request_of("a", [1], max_tokens=1), request_of("b", [1], max_tokens=2))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    assert [chunk.sequence.request_id for chunk in second.chunks] == ["b"]
    scheduler.commit(first, result_of(first))
    assert not scheduler.plan_ahead(scheduler.settle(second, [7, 7])).chunks


def test_a_sequence_aborted_during_a_step_keeps_row_and_blocks_until_the_step_is_committed():
    scheduler = scheduler_of(request_of("a", [1] * 4), request_of("b", [2] * 4))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    scheduler.commit(first, result_of(first))
    scheduler.settle(second, [7, 7])
    scheduler.abort("a")
    scheduler.abort("b")

    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.pool.num_used == 4
    assert scheduler.has_work()
    scheduler.check()

    ended = scheduler.commit(second, result_of(second))
    assert [(u.request_id, u.finish_reason, u.new_token_ids) for u in ended] == [
        ("a", "abort", []),
        ("b", "abort", []),
    ]
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work()
    scheduler.check()


def test_an_error_of_an_aborted_sequence_ends_the_sharing_of_its_blocks():
    shared = list(range(8))  # two blocks
    scheduler = scheduler_of(request_of("a", [*shared, 1]))
    plan = scheduler.plan()
    scheduler.commit(plan, result_of(plan))
    scheduler.add(request_of("b", [*shared, 2]))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    scheduler.commit(first, result_of(first))
    scheduler.settle(second, [7, 7])
    sequence_a, sequence_b = (chunk.sequence for chunk in second.chunks)
    assert sequence_a.block_table[:2] == sequence_b.block_table[:2]

    scheduler.abort("a")
    scheduler.commit(second, result_of(second, a=BROKEN))
    assert sequence_b.block_table == []
    assert scheduler.num_preemptions == 1
    assert scheduler.cache.find(request_of("c", [*shared, 3])) == [[]]
    scheduler.check()


def test_no_block_is_copied_in_a_step_that_is_planned_ahead():
    scheduler = scheduler_of(request_of("a", [1] * 6, n=3))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    scheduler.commit(first, result_of(first))
    third = scheduler.plan_ahead(scheduler.settle(second, [7]))
    # The other two sequences wait, because they copy blocks to which the first sequence writes.
    assert [len(plan.chunks) for plan in (first, second, third)] == [1, 1, 1]
    assert scheduler.must_wait_for_step
    for plan in (second, third):
        scheduler.commit(plan, result_of(plan))
    fourth = scheduler.plan()
    assert len(fourth.chunks) == 3
    assert len(fourth.copies) == 2
    assert not scheduler.must_wait_for_step


def test_no_request_is_preempted_in_a_step_that_is_planned_ahead():
    scheduler = scheduler_of(request_of("a", [1] * 4), request_of("b", [2] * 8), num_blocks=4)
    first = scheduler.plan()
    scheduler.add(request_of("c", [3], priority=-1))
    second = scheduler.plan_ahead(first)
    # Only one block is free. Sequence a gets this block, so b has to wait.
    assert [chunk.sequence.request_id for chunk in second.chunks] == ["a"]
    assert (scheduler.must_wait_for_step, scheduler.num_preemptions) == (True, 0)
    for plan in (first, second):
        scheduler.commit(plan, result_of(plan))
    third = scheduler.plan()
    assert [chunk.sequence.request_id for chunk in third.chunks] == ["a", "c"]
    assert scheduler.num_preemptions == 1
    scheduler.check()


def test_a_chunk_computed_with_a_wrong_token_is_computed_again():
    scheduler = scheduler_of(request_of("a", [1] * 3), request_of("b", [2] * 3))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    scheduler.commit(first, result_of(first, b=Sampled([8], [-1.0])))
    settled = scheduler.settle(second, [7, 7])
    assert [(c.samples, c.num_tokens) for c in settled.chunks] == [(True, 1), (False, 0)]
    third = scheduler.plan_ahead(settled)
    assert third.pending == [(0, 0)]
    assert [(c.start, c.num_tokens) for c in third.chunks] == [(4, 1), (3, 1)]


def test_tokens_after_the_expected_token_are_computed_before_the_next_token_is_sampled():
    scheduler = scheduler_of(request_of("a", [1] * 3))
    first = scheduler.plan()
    second = scheduler.plan_ahead(first)
    scheduler.commit(first, result_of(first, a=Sampled([7, 8, 9], [-1.0, 0.0, 0.0])))
    settled = scheduler.settle(second, [7])
    assert [(c.start, c.num_tokens, c.samples) for c in settled.chunks] == [(3, 1, False)]
    third = scheduler.plan_ahead(settled)
    assert third.pending == []
    assert [(c.start, c.num_tokens, c.samples) for c in third.chunks] == [(4, 2, True)]


def test_a_sequence_whose_logits_are_not_finite_does_not_change_other_sequences(checkpoint):
    # Half of the prompts begin with token 301, whose embedding is NaN, so their logits are NaN.
    sequences = {str(n): ([300 + n % 2, *range(5, 5 + n)], GREEDY) for n in range(1, 9)}

    def answer_all(is_async):
        engine = open_engine(
            checkpoint("qwen2"), max_num_seqs=3, max_model_len=64, async_scheduling=is_async
        )
        with torch.inference_mode():
            engine._parts.runner._path._model.get_input_embeddings().weight[301] = float("nan")
        answers = answers_of(engine, sequences)
        engine.close()
        return answers

    expected, answers = answer_all(is_async=False), answer_all(is_async=True)
    assert [answer.end[0] for answer in answers.values()].count("error") == 4
    for sequence, answer in answers.items():
        answer.check_same(expected[sequence])


@pytest.mark.parametrize("failing_pass", range(1, 6))
def test_a_failed_forward_pass_ends_its_requests_and_the_engine_continues(checkpoint, failing_pass):
    engine = open_engine(checkpoint("qwen2"), max_model_len=64, async_scheduling=True)
    (expected,) = answers_of(engine, {"clean": ([5, 9, 11], GREEDY)}).values()
    pass_numbers = iter(range(1, 99))

    def fail(module, args):
        if next(pass_numbers) == failing_pass:
            raise RuntimeError("out of something")

    hook = engine._parts.runner._path._model.register_forward_pre_hook(fail)
    (broken,) = answers_of(engine, {"broken": ([5, 9, 11], GREEDY)}).values()
    hook.remove()
    assert broken.end[0] == "error"
    assert broken.token_ids == expected.token_ids[: failing_pass - 1]
    (again,) = answers_of(engine, {"again": ([5, 9, 11], GREEDY)}).values()
    again.check_same(expected)
    engine.close()


def test_repeated_failures_of_forward_passes_end_the_engine(checkpoint):
    engine = open_engine(
        checkpoint("qwen2"), max_model_len=64, async_scheduling=True, max_step_failures=2
    )

    def fail(module, args):
        raise RuntimeError("out of something")

    engine._parts.runner._path._model.register_forward_pre_hook(fail)
    engine.add_request("a", [5], GREEDY)
    assert engine.step()[0].finish_reason == "error"
    engine.add_request("b", [5], GREEDY)
    with pytest.raises(EngineError, match="2 consecutive steps have failed"):
        engine.step()
    engine.close()


def test_the_next_pass_begins_before_tokens_are_read_and_updates_come_step_by_step(checkpoint):
    engine = open_engine(checkpoint("qwen2"), max_model_len=64, async_scheduling=True)
    calls = []  # the names of the methods of the runner that a step has called
    runner = engine._parts.runner
    for name in ("start", "sample", "finish"):
        method = getattr(runner, name)

        def record_and_call(*args, name=name, method=method):
            calls.append(name)
            return method(*args)

        setattr(runner, name, record_and_call)

    engine.add_request("a", [5, 9, 11], replace(GREEDY, max_tokens=3))
    calls_and_new_tokens = []
    while engine.has_work():
        calls.clear()
        num_new_tokens = [len(update.new_token_ids) for update in engine.step()]
        calls_and_new_tokens.append((list(calls), num_new_tokens))
    assert calls_and_new_tokens == [
        (["start", "sample", "start", "finish", "sample"], [1]),
        (["start", "finish", "sample"], [1]),
        (["finish"], [1]),
    ]
    engine.close()


def test_speculative_decoding_turns_async_scheduling_off(checkpoint):
    lines = []
    config = EngineConfig(
        str(checkpoint("qwen2")),
        async_scheduling=True,
        num_speculative_tokens=2,
        block_size=4,
        max_model_len=64,
        kv_cache_memory="1MiB",
    )
    engine = Engine(config, lines.append)
    assert not engine._parts.loop._is_async
    assert any(
        line.startswith("Async scheduling is off, because speculative decoding") for line in lines
    )
    engine.close()


def test_a_path_with_recurrent_states_turns_async_scheduling_off(tmp_path):
    engine = open_engine(shrink.save("qwen3_next", tmp_path), async_scheduling=True)
    assert engine.info.path == "rows"
    assert not engine._parts.loop._is_async
    answers_of(engine, {"a": ([5, 6], GREEDY)})
    engine.close()
