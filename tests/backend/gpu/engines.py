"""A tiny model, a KV cache and a workload for tests of engines with GPU kernels or CUDA graphs."""

import dataclasses
import random

import torch
from backend.tiny_models import BY_NAME, VOCAB_SIZE
from nereid_backend import SamplingParams
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.paths.model_call import Sizes


def with_one_key_head(name, **settings):
    """Return a tiny family whose config is changed to two query heads and one key head.

    The time of the kernels in the interpreter is proportional to the number of key heads.
    `settings` replace further values of the family's config.
    """
    family = BY_NAME[name]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return dataclasses.replace(family, extra={**family.extra, **heads, **settings})


class SkippingCache(KVCache):
    """The reference KV cache, except that `store` skips tokens without a slot.

    The GPU kernel also skips these tokens. A token without a slot has a negative row.
    """

    def __init__(self, layers, *, num_blocks, **options):
        super().__init__(layers, num_blocks=num_blocks + 1, **options)
        self.null_block = num_blocks  # the additional block, which receives the skipped tokens

    def store(self, layer, key, value, rows):
        last_row = self.keys[layer].view(-1, key.shape[-1]).shape[0] - 1
        super().store(layer, key, value, torch.where(rows < 0, last_row, rows))


def sizes_of_engine(engine):
    """Return the sizes of an engine's KV cache and block tables."""
    info = engine.info
    return Sizes(info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len)


def run(engine, seed, *, before_step=None, num_requests=14):
    """Answer random requests that arrive at random times, and return their tokens.

    Args:
        engine: an engine without requests.
        seed: the seed of the random requests.
        before_step: a function that is called with the engine before each step, or None.
        num_requests: the number of requests.

    Returns:
        The generated tokens for each pair of a request id and the index of a choice.
    """
    rng = random.Random(seed)
    waiting_requests = [_random_request(number, rng) for number in range(num_requests)]
    answers = {}
    while waiting_requests or engine.has_work():
        if waiting_requests and rng.random() < 0.4:
            engine.add_request(*waiting_requests.pop())
        if before_step is not None:
            with torch.inference_mode():
                before_step(engine)
        for update in engine.step():
            assert update.error is None
            answers.setdefault((update.request_id, update.index), []).extend(update.new_token_ids)
        engine.check()
    return answers


def _random_request(number, rng):
    """Return the id, the prompt and the sampling parameters of a random request."""
    length = rng.choice([1, 3, 8, 21, 40])
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=number,
        max_tokens=rng.randint(1, 20),
        ignore_eos=True,
        logprobs=rng.choice([None, 2]),
        n=rng.choice([1, 1, 2]),
    )
    return str(number), prompt, params
