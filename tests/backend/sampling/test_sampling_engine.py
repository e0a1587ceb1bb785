"""Tests of sampling parameters with a whole engine."""

import random

import pytest
from backend.exactness import bytes_for, open_engine
from nereid_backend import SamplingParams

SETTINGS = [
    {},
    {"top_p": 0.8, "temperature": 1.4},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7, "n": 2},
    {"bad_words_token_ids": [[5, 6], [9]], "min_tokens": 8, "logit_bias": {11: 3.0, 12: -100}},
    {"allowed_token_ids": list(range(3, 60)), "top_k": 20, "logprobs": 2},
    {"min_p": 0.05, "prompt_logprobs": 1, "n": 3},
]


def requests_of(rng):
    """Return two requests (prompt and parameters) with random prompts for each of `SETTINGS`."""
    return [
        (
            [rng.randrange(3, 40) for _ in range(rng.randrange(1, 30))] * rng.choice([1, 2]),
            SamplingParams(seed=number, max_tokens=24, ignore_eos=True, **settings),
        )
        for number, settings in enumerate(SETTINGS * 2)
    ]


def answers(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("cheap_drafts")
def test_a_seed_gives_the_same_tokens_alone_and_among_preempted_requests_with_drafts(
    checkpoint, seed
):
    rng = random.Random(seed)
    requests = requests_of(rng)
    calm = open_engine(checkpoint("qwen3"))
    alone = [answers(calm.generate([prompt], params))[0] for prompt, params in requests]
    assert len({str(answer) for answer in alone}) == len(requests)
    crowded = open_engine(
        checkpoint("qwen3"),
        max_num_seqs=6,
        max_num_batched_tokens=17,
        max_model_len=90,
        num_speculative_tokens=4,
        kv_cache_memory=bytes_for(calm, 240),
    )
    prompts, params = zip(*requests, strict=True)
    assert answers(crowded.generate(list(prompts), list(params))) == alone
    assert crowded.stats().num_preemptions > 0
    assert crowded.stats().num_accepted_tokens > 0


def test_sequences_of_one_request_differ(checkpoint):
    engine = open_engine(checkpoint("qwen3"))
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(n=8, seed=1, max_tokens=20))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 8
