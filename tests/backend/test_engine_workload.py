import random

import pytest
from backend.exactness import bytes_for, open_engine
from nereid_backend import SamplingParams


class Faults:
    """Makes some forward passes of a model raise."""

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
    )
    requests, ends, answers = {}, {}, {}
    for number in range(60):
        prompt = [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))]
        # A few beginnings that many share.
        prompt = ([7, 8, 9] * 12)[: rng.choice([0, 9, 30])] + prompt[:12]
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=rng.randint(1, 18))
        requests[str(number)] = (prompt, params)
    faults = Faults(engine._runner._path._model, rng, 0.02)
    pending = list(requests)
    while pending or engine.has_work():
        if pending and rng.random() < 0.4:
            name = pending.pop()
            engine.add_request(name, *requests[name])
            answers[name] = []
        alive = [name for name in answers if name not in ends]
        if alive and rng.random() < 0.03:
            engine.abort(rng.choice(alive))
        for update in engine.step():
            assert update.request_id not in ends
            answers[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                ends[update.request_id] = update.finish_reason
        engine.check()
    faults.handle.remove()
    assert ends.keys() == requests.keys()
    assert engine.num_free_blocks == engine.info.num_blocks
    assert {"abort", "error", "length"} <= set(ends.values())
    assert engine.num_preemptions > 0
    assert engine.num_prefix_cache_hits > 0
    for name, (prompt, params) in requests.items():
        alone = size.generate([prompt], params)[0].outputs[0].token_ids
        whole = ends[name] in ("stop", "length")
        assert answers[name] == (alone if whole else alone[: len(answers[name])])
