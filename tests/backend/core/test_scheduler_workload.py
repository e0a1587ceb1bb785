"""Tests of the scheduler with random requests.

The environment variable NEREID_WORKLOAD_REQUESTS changes the number of requests, for example to
10000.
"""

import os
import random

import pytest
from backend.scripted_model import BLOCK, EOS, ScriptedModel, expected_answer
from nereid_backend import SamplingParams
from nereid_backend.core.blocks import state_snapshots
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.window import AttentionWindow, max_sequence_blocks
from nereid_backend.core.draft_tokens.prompt_lookup import PromptLookup
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence

NUM_REQUESTS = int(os.environ.get("NEREID_WORKLOAD_REQUESTS", "120"))

NUM_STATES = 12  # the number of recurrent states, those of running sequences and snapshots

KINDS = {
    "plain": {"enable_prefix_caching": False},
    "prefix cache": {},
    "guesses": {"drafter": 3},
    "nothing shared": {"shares_blocks": False},
    "snapshots, nothing shared": {"shares_blocks": False, "num_states": NUM_STATES},
    "whole prompts": {"whole_prefill": True},
    "windows": {"windows": [AttentionWindow(((7, None), (None, 8)))]},
    "windows and guesses": {
        "windows": [AttentionWindow(((5, None),))],
        "drafter": 3,
    },
    "chunks": {"windows": [AttentionWindow(((None, 8), (None, 4)))]},
    "windows, nothing shared": {
        "windows": [AttentionWindow(((5, 12),))],
        "shares_blocks": False,
    },
    "windows and snapshots, nothing shared": {
        "windows": [AttentionWindow(((5, None),))],
        "shares_blocks": False,
        "num_states": NUM_STATES,
    },
    "groups": {"windows": [None, AttentionWindow(((5, None),))]},
    "groups of the same window": {
        "windows": [None, AttentionWindow(((5, None),)), AttentionWindow(((5, None),))],
        "drafter": 3,
    },
    "groups with chunks": {
        "windows": [None, AttentionWindow(((None, 8),)), AttentionWindow(((3, None),))]
    },
    "groups without full attention": {
        "windows": [AttentionWindow(((13, None),)), AttentionWindow(((2, None),))]
    },
    "groups without a cache": {
        "windows": [None, AttentionWindow(((5, None),))],
        "enable_prefix_caching": False,
    },
    "groups and snapshots, nothing shared": {
        "windows": [None, AttentionWindow(((5, None),))],
        "shares_blocks": False,
        "num_states": NUM_STATES,
    },
    "windows, whole prompts": {
        "windows": [AttentionWindow(((3, None),))],
        "whole_prefill": True,
    },
}


def longest_sequence(scheduler: Scheduler, step_tokens: int | None) -> int:
    """Return the length of the longest sequence that fits into the pool, at most 80 tokens."""
    return max(
        length
        for length in range(81)
        if max_sequence_blocks(scheduler.windows, length, step_tokens, BLOCK)
        <= scheduler.pool.num_blocks
    )


def has_snapshots(scheduler: Scheduler) -> bool:
    return scheduler.cache is not None and scheduler.cache.snapshots is not None


class Workload:
    """Random requests that start at random times. Some are cancelled, and many share a prefix."""

    def __init__(self, seed: int, scheduler: Scheduler, longest: int, broken: float) -> None:
        self.rng = random.Random(seed)
        self.scheduler = scheduler
        self.longest = longest
        self.model = ScriptedModel(
            scheduler.pool.num_blocks,
            self.rng,
            forced=0.1,
            broken=broken,
            windows=scheduler.windows,
            has_state=has_snapshots(scheduler),
        )
        # The last stem is the first stem without its first block. In prompts with these two stems,
        # the same tokens follow different blocks.
        self.stems = [self.tokens(longest // 2) for _ in range(3)]
        self.stems.append(self.stems[0][BLOCK:])
        self.requests: dict[str, Sequence] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[str, list] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.alive: set[tuple[str, int]] = set()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(EOS + 1, 40) for _ in range(count)]

    def arrive(self) -> None:
        """Add a random request. Its prompt begins with a prefix of one of `stems`."""
        rng, name = self.rng, f"r{len(self.requests)}"
        stem = rng.choice(self.stems)[: rng.randint(0, self.longest // 2)]
        prompt = stem + self.tokens(rng.randint(0 if stem else 1, 2))
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3, 5]),
            priority=rng.choice([0, 0, -3, 2, 1000]),
            max_tokens=rng.randint(1, min(12, self.longest - len(prompt))),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            cache_salt=rng.choice(["", "", "tenant"]),
        )
        sequence = Sequence(
            name,
            prompt,
            params,
            max_total_tokens=len(prompt) + params.max_tokens,
            eos_token_ids=[EOS],
        )
        self.requests[name] = sequence
        for index in range(params.n):
            self.answers[name, index] = []
            self.alive.add((name, index))
        self.scheduler.add(sequence)

    def cancel(self) -> None:
        name, index = self.rng.choice(sorted(self.alive))
        self.scheduler.abort(name, self.rng.choice([None, index]))

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
        assert all(1 <= chunk.num_tokens >= chunk.num_logits for chunk in plan.chunks)
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        try:
            updates = self.scheduler.commit(plan, self.model.run(plan))
        except RuntimeError as error:
            updates = self.scheduler.fail_step(plan, str(error))
        self.take(updates)
        if has_snapshots(self.scheduler):
            num_running = len({chunk.sequence for chunk in plan.chunks})
            assert len(self.model.snapshots) <= NUM_STATES - num_running

    def take(self, updates: list[RequestUpdate]) -> None:
        """Record the updates of a step. A sequence must have no update after its last update."""
        for update in updates:
            key = (update.request_id, update.index)
            assert key in self.alive, "reported after its end"
            if update.prompt_logprobs is not None:
                assert update.index == 0
                assert update.request_id not in self.prompt_logprobs
                self.prompt_logprobs[update.request_id] = update.prompt_logprobs
            self.answers[key] += update.new_token_ids
            if update.finish_reason is not None:
                self.ends[key] = update.finish_reason
                self.alive.remove(key)
        self.scheduler.check()

    def run(self, num_requests: int, cancelled: float) -> None:
        """Add `num_requests` requests over time, and run steps until all of them have ended.

        `cancelled` is the probability that a step is preceded by the cancellation of a request.
        """
        num_steps_left = 200 * num_requests
        while len(self.requests) < num_requests or self.scheduler.has_work():
            if len(self.requests) < num_requests:
                if self.rng.random() < 0.3:
                    self.arrive()
                if self.alive and self.rng.random() < cancelled:
                    self.cancel()
            self.step()
            num_steps_left -= 1
            assert num_steps_left > 0, "a request starved"

    def check(self) -> None:
        """Compare all answers with the answers that the scripted model must generate."""
        assert self.ends.keys() == self.answers.keys()
        assert self.scheduler.pool.num_used == 0
        for (name, index), answer in self.answers.items():
            sequence = self.requests[name]
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            tokens, reason = expected_answer(prompt, sequence.params.max_tokens, index)
            if self.ends[name, index] in ("abort", "error"):
                assert answer == tokens[: len(answer)]
            else:
                assert (answer, self.ends[name, index]) == (tokens, reason)
            is_requested = sequence.params.prompt_logprobs is not None
            if is_requested and self.answers[name, 0]:
                first, *others = self.prompt_logprobs[name]
                assert first is None
                assert [logprobs.token_ids[0] for logprobs in others] == prompt[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(10, 8), (16, 3), (60, 8)])
def test_random_workloads_end_each_sequence_once_with_the_right_answer(
    kind, num_blocks, max_num_seqs, monkeypatch
):
    # The prompts of the workload are short, so snapshots must be allowed at short distances.
    monkeypatch.setattr(state_snapshots, "_INTERVAL", 2)
    monkeypatch.setattr(state_snapshots, "_MIN_DISTANCE", 1)
    settings = dict(KINDS[kind])
    if "drafter" in settings:
        settings["drafter"] = PromptLookup(settings["drafter"])
    num_groups = len(settings.get("windows", [None]))
    scheduler = Scheduler(
        BlockPool(num_blocks * num_groups),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=13,
        **settings,
    )
    # If sequences free blocks while they run, a sequence may have more tokens than the pool.
    longest = longest_sequence(scheduler, None if "whole" in kind else 13)
    workload = Workload(num_blocks, scheduler, longest, broken=0.02)
    workload.run(NUM_REQUESTS, cancelled=0.04)
    workload.check()
    assert {"abort", "error", "length", "stop"} <= set(workload.ends.values())
    assert scheduler.num_preemptions > 0 or num_blocks == 60 or scheduler.windows != (None,)
    if scheduler.cache is not None:
        assert scheduler.cache.num_hit_tokens > 0
    assert (workload.model.num_copied > 0) == ("nothing" not in kind and "whole" not in kind)
    if scheduler.drafter is not None:
        assert scheduler.drafter.lengths.num_accepted > 0
