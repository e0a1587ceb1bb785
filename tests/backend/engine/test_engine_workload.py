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


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_finished_cancelled_and_failed_requests_leaves_no_block_in_use(checkpoint, seed):
    rng = random.Random(seed)
    size = open_engine(checkpoint("qwen2"), enable_prefix_caching=False)
    engine = open_engine(
        checkpoint("qwen2"),
        max_num_seqs=6,
        max_num_batched_tokens=13,
        max_model_len=60,
        kv_cache_memory=bytes_for(size, 80),
        num_speculative_tokens=seed,
    )
    requests, ends, answers = {}, {}, {}
    for number in range(60):
        prompt = [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))]
        # Many prompts share a prefix of 9 or 30 tokens.
        prompt = ([7, 8, 9] * 12)[: rng.choice([0, 9, 30])] + prompt[:12]
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=rng.randint(1, 18),
            n=rng.choice([1, 1, 3]),
            priority=rng.choice([0, 0, 1]),
        )
        requests[str(number)] = (prompt, params)
    faults = Faults(engine._parts.runner._path._model, rng, 0.02)
    pending = list(requests)
    while pending or engine.has_work():
        if pending and rng.random() < 0.4:
            name = pending.pop()
            engine.add_request(name, *requests[name])
            answers |= {(name, index): [] for index in range(requests[name][1].n)}
        alive = [sequence for sequence in answers if sequence not in ends]
        if alive and rng.random() < 0.03:
            name, index = rng.choice(alive)
            engine.abort(name, rng.choice([None, index]))
        for update in engine.step():
            sequence = (update.request_id, update.index)
            assert sequence not in ends
            answers[sequence] += update.new_token_ids
            if update.finish_reason is not None:
                ends[sequence] = update.finish_reason
        engine.check()
    faults.handle.remove()
    assert ends.keys() == answers.keys()
    assert engine.stats().kv_cache_blocks_used == 0
    assert {"abort", "error", "length"} <= set(ends.values())
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_cache_hits > 0
    for name, (prompt, params) in requests.items():
        for output in size.generate([prompt], params)[0].outputs:
            answer, reason = answers[name, output.index], ends[name, output.index]
            whole = reason in ("stop", "length")
            assert answer == (output.token_ids if whole else output.token_ids[: len(answer)])
