"""A few architectures of every tier; tests/backend/archs.py runs all that there are."""

import dataclasses

import pytest
from backend.exactness import PARAMS, PROMPTS, SITUATIONS, open_engine, reference

from backend import shrink

# By tier, what is particular about them.
TYPES = {
    "packed": [
        "llama",
        "gpt_oss",  # windows, sinks, experts
        "gemma2",  # windows, softcap
        "llama4_text",  # chunked attention
        "deepseek_v3",  # keys and values of different sizes
        "gemma4_text",  # layers of different shapes
        "gpt2",  # learned positions
    ],
    "rows": [
        "qwen3_next",
        "mamba",  # no attention, prompts go whole
        "zamba2",  # state and attention in one layer, one pass differs from single tokens
    ],
    "padded": [
        "bloom",  # positions from the mask
        "deepseek_v32",  # a sparse indexer
    ],
    "single": [
        "bart",  # positions from the cache's length
        "rwkv",  # a state under a name of its own
        "openai-gpt",  # nothing is kept
        "reformer",  # buckets of hashes
    ],
}


@pytest.fixture(scope="module", params=[(t, name) for t, names in TYPES.items() for name in names])
def checkpoint_of_tier(request, tmp_path_factory):
    tier, name = request.param
    folder = shrink.save(name, tmp_path_factory.mktemp(name))
    return folder, tier, reference(folder)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_greedy_tokens_equal_those_of_transformers(checkpoint_of_tier, situation):
    folder, tier, expected = checkpoint_of_tier
    settings, run = SITUATIONS[situation]
    engine = open_engine(folder, **settings)
    # Short sequences may take a better path: an indexer then keeps all there is.
    assert engine.info.path == tier or "max_model_len" in settings
    assert run(engine) == expected
    engine.close()


def test_the_answers_vary_so_that_equality_means_something(checkpoint_of_tier):
    _, _, expected = checkpoint_of_tier
    tokens = [token for answer in expected for token in answer]
    assert len(set(tokens)) > 8


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("guessing", [{}, {"num_speculative_tokens": 4}], ids=["plain", "guessing"])
def test_sequences_that_share_a_prompt_answer_alike(checkpoint_of_tier, guessing):
    folder, _, expected = checkpoint_of_tier
    engine = open_engine(folder, **guessing)
    params = dataclasses.replace(PARAMS, n=3)
    outputs = engine.generate(PROMPTS, params)
    assert [[o.token_ids for o in each.outputs] for each in outputs] == [
        [answer] * 3 for answer in expected
    ]
    engine.close()
