"""A tiny model, a KV cache and a workload for tests of engines with GPU kernels or CUDA graphs."""

import dataclasses
import random

import torch
from backend.tiny_models import BY_NAME, VOCAB_SIZE
from nereid_backend import SamplingParams
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.paths.model_call import Sizes


def with_one_key_head(name, **more):
    """Return a variant of a tiny family with two query heads and one key head.

    The time of the kernels in the interpreter is proportional to the number of key heads.
    """
    family = BY_NAME[name]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return dataclasses.replace(family, extra={**family.extra, **heads, **more})


class SkippingCache(KVCache):
    """The reference KV cache, except that `store` skips tokens without a slot.

    The GPU kernel also skips these tokens. A token without a slot has a negative row.
    """

    def __init__(self, layers, *, num_blocks, **options):
        super().__init__(layers, num_blocks=num_blocks + 1, **options)
        self.null_block = num_blocks  # the additional block, which receives the skipped tokens

    def store(self, layer, key, value, rows):
        last = self.keys[layer].view(-1, key.shape[-1]).shape[0] - 1
        super().store(layer, key, value, torch.where(rows < 0, last, rows))


def sizes_of_engine(engine):
    info = engine.info
    return Sizes(info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len)


def run(engine, seed, *, poisoned=None, count=14):
    """Answer random requests that arrive at random times, and return their tokens.

    Args:
        engine: an engine without requests.
        seed: the seed of the random requests.
        poisoned: a function that is called with the engine before each step, or None.
        count: the number of requests.

    Returns:
        The generated tokens for each pair of a request id and the index of a choice.
    """
    rng = random.Random(seed)
    waiting = []
    for number in range(count):
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
        waiting.append((str(number), prompt, params))
    answers = {}
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.4:
            engine.add_request(*waiting.pop())
        if poisoned is not None:
            with torch.inference_mode():
                poisoned(engine)
        for update in engine.step():
            assert update.error is None
            answers.setdefault((update.request_id, update.index), []).extend(update.new_token_ids)
        engine.check()
    return answers
