"""Tests of the prefix cache for models with a recurrent state.

A request whose prompt begins with cached tokens continues from a snapshot of the state.
"""

import dataclasses
import random

import pytest
from backend.exactness import PARAMS, open_engine
from backend.tiny_models import VOCAB_SIZE

CACHED = [
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling2_text",
    "inkling_text",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "zaya",
]
# The engine cannot use snapshots for these models. The state after several single tokens differs
# from the state after the same tokens in one pass, or the model cannot continue a state with
# several tokens at once.
NOT_CACHED = ["falcon_mamba", "jamba", "mamba", "nemotron_h", "zamba", "zamba2"]
_USUAL = ("qwen3_next", "inkling_text", "mamba2", "nemotron_h")


def cases(names):
    return [pytest.param(n, marks=() if n in _USUAL else pytest.mark.long) for n in names]


def random_tokens(rng, count):
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def answer(engine, prompt, **params):
    output = engine.generate([prompt], dataclasses.replace(PARAMS, **params))[0]
    engine.check()
    return output


def answers_of(output):
    """Return the tokens of each answer to a request."""
    return [answer.token_ids for answer in output.outputs]


def compare_turns(folder, rng, num_turns=3, **settings):
    """Run a chat with and without the prefix cache, and compare the answers.

    Returns:
        The number of tokens that each turn found in the prefix cache.
    """
    caching_engine = open_engine(folder, **settings)
    plain_engine = open_engine(folder, enable_prefix_caching=False, **settings)
    prompt = random_tokens(rng, 70)
    num_cached_tokens = []
    for _ in range(num_turns):
        output = answer(caching_engine, prompt)
        assert answers_of(output) == answers_of(answer(plain_engine, prompt))
        num_cached_tokens.append(output.num_cached_tokens)
        prompt = [*prompt, *output.outputs[0].token_ids, *random_tokens(rng, 5)]

    assert caching_engine.stats().num_prefix_cache_hits == sum(num_cached_tokens)
    caching_engine.close()
    plain_engine.close()
    return num_cached_tokens


@pytest.mark.parametrize("model_type", cases(CACHED))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_next_turn_of_a_chat_continues_from_the_end_of_the_answer(saved, model_type):
    # After the first turn, the engine has computed 70 tokens of the prompt and 15 tokens of the
    # answer. With blocks of 4 tokens, 84 of these 85 tokens are in full blocks.
    num_cached_tokens = compare_turns(saved(model_type), random.Random(1))
    assert num_cached_tokens == [0, 84, 104]


@pytest.mark.parametrize("model_type", cases(["qwen3_next", "lfm2"]))
def test_keys_and_values_of_8_bits_do_not_turn_off_the_prefix_cache(saved, model_type):
    num_cached_tokens = compare_turns(saved(model_type), random.Random(1), kv_cache_dtype="int8")
    assert num_cached_tokens == [0, 84, 104]


@pytest.mark.parametrize("model_type", cases(NOT_CACHED))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_whose_state_cannot_be_copied_exactly_has_no_prefix_cache(saved, model_type):
    assert compare_turns(saved(model_type), random.Random(1)) == [0, 0, 0]


@pytest.fixture
def engine(saved):
    engine = open_engine(saved("qwen3_next"))
    yield engine
    engine.close()


def test_the_same_prompt_is_computed_only_from_its_last_block_but_one_on(engine):
    prompt = random_tokens(random.Random(2), 70)
    first, second = answer(engine, prompt), answer(engine, prompt)
    assert answers_of(first) == answers_of(second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)


def test_a_prefix_that_two_requests_had_in_common_is_found_by_the_third(engine):
    rng = random.Random(3)
    prefix = random_tokens(rng, 60)
    prompts = [[*prefix, *random_tokens(rng, 50)] for _ in range(3)]
    assert [answer(engine, prompt).num_cached_tokens for prompt in prompts] == [0, 0, 60]


def test_the_sequences_of_a_request_share_the_computed_prompt(engine):
    prompt = random_tokens(random.Random(4), 70)
    output = answer(engine, prompt, n=3)
    assert len({tuple(tokens) for tokens in answers_of(output)}) == 1
    # The engine counts only the first sequence as a query of the prefix cache. This sequence found
    # no tokens there.
    assert output.num_cached_tokens == engine.stats().num_prefix_cache_hits == 0


def test_a_preempted_sequence_continues_from_its_last_snapshot(engine):
    prompts = [random_tokens(random.Random(seed), 41) for seed in range(3)]
    expected = [answers_of(answer(engine, prompt)) for prompt in prompts]
    small_engine = open_engine(engine.info.model)
    pool = small_engine._parts.pool
    # The 38 free blocks of 4 tokens have space for two sequences of 57 tokens. There are three such
    # sequences, so the engine must preempt one.
    withheld_blocks = pool.allocate(pool.num_free - 38)

    outputs = small_engine.generate(prompts, PARAMS)

    assert [answers_of(output) for output in outputs] == expected
    assert small_engine.stats().num_preemptions > 0
    pool.release(withheld_blocks)
    small_engine.close()


def test_snapshots_never_need_more_memory_than_the_plan_gives_them(saved):
    engine = open_engine(saved("qwen3_next"), max_num_seqs=4, kv_cache_memory="160KiB")
    path, snapshots = engine._parts.runner._path, engine._parts.scheduler.cache.snapshots
    rng = random.Random(5)
    for _ in range(12):
        answer(engine, random_tokens(rng, 40))
        # The forward path deletes a snapshot only in the step after the scheduler has deleted it.
        num_stored = len(path._snapshots) - len(snapshots._deleted)
        assert num_stored == len(snapshots) < snapshots._num_states < 16
    engine.close()
