import random

import pytest
from backend.exactness import bytes_for, open_engine
from nereid_backend import SamplingParams


class Faults:
    """A hook that makes some forward passes of a model raise an error."""

    def __init__(self, model, rng, share):
        self.rng, self.share = rng, share
        self.handle = model.register_forward_pre_hook(self)

    def __call__(self, module, args):
        if self.rng.random() < self.share:
            raise RuntimeError("a fault made by the test")


def random_requests(rng, count=60):
    """Return a dict from the name of each random request to its prompt and parameters."""
    requests = {}
    for number in range(count):
        own_tokens = [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))]
        # Many prompts share a prefix of 9 or 30 tokens.
        prompt = ([7, 8, 9] * 12)[: rng.choice([0, 9, 30])] + own_tokens[:12]
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=rng.randint(1, 18),
            n=rng.choice([1, 1, 3]),
            priority=rng.choice([0, 0, 1]),
        )
        requests[str(number)] = (prompt, params)
    return requests


def run_with_aborts(engine, requests, rng):
    """Answer the requests, abort some sequences, and return the answers and finish reasons.

    The two results are dicts. Each key is a sequence: the pair of the request's name and the index.
    """
    answers, reasons, pending = {}, {}, list(requests)
    while pending or engine.has_work():
        if pending and rng.random() < 0.4:
            name = pending.pop()
            engine.add_request(name, *requests[name])
            answers |= {(name, index): [] for index in range(requests[name][1].n)}
        alive = [sequence for sequence in answers if sequence not in reasons]
        if alive and rng.random() < 0.03:
            name, index = rng.choice(alive)
            engine.abort(name, rng.choice([None, index]))
        for update in engine.step():
            sequence = (update.request_id, update.index)
            assert sequence not in reasons, "an update after the last update"
            answers[sequence] += update.new_token_ids
            if update.finish_reason is not None:
                reasons[sequence] = update.finish_reason
        engine.check()
    return answers, reasons


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_finished_cancelled_and_failed_requests_leaves_no_block_in_use(checkpoint, seed):
    rng = random.Random(seed)
    undisturbed = open_engine(checkpoint("qwen2"), enable_prefix_caching=False)
    engine = open_engine(
        checkpoint("qwen2"),
        max_num_seqs=6,
        max_num_batched_tokens=13,
        max_model_len=60,
        kv_cache_memory=bytes_for(undisturbed, num_tokens=80),  # so little that it preempts
        num_speculative_tokens=seed,
    )
    requests = random_requests(rng)
    faults = Faults(engine._parts.runner._path._model, rng, share=0.02)
    answers, reasons = run_with_aborts(engine, requests, rng)
    faults.handle.remove()

    assert reasons.keys() == answers.keys()
    assert engine.stats().kv_cache_blocks_used == 0
    assert {"abort", "error", "length"} <= set(reasons.values())
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_cache_hits > 0
    for name, (prompt, params) in requests.items():
        for expected in undisturbed.generate([prompt], params)[0].outputs:
            sequence = (name, expected.index)
            is_whole = reasons[sequence] in ("stop", "length")
            num_tokens = len(expected.token_ids) if is_whole else len(answers[sequence])
            assert answers[sequence] == expected.token_ids[:num_tokens]
