"""Tests that a running sequence frees the blocks that no layer needs any more."""

import random

import pytest
from backend.exactness import bytes_for, greedy_tokens, open_engine
from backend.scripted_model import BLOCK, ScriptedModel, next_token
from backend.tiny_models import BY_NAME, VOCAB_SIZE
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.layers import LayerSpec, LayerWindow, attention_window_of
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import ConfigError
from transformers import AutoModelForCausalLM

WINDOW_OF_5 = AttentionWindow(((5, None),))
NUM_TOKENS = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("position", "first_visible"), [(0, 0), (4, 0), (5, 0), (7, 0), (8, 4), (13, 8), (15, 8)]
)
def test_the_window_of_a_model_is_that_of_its_widest_layer(position, first_visible):
    # One layer has a window of 5 tokens, and another layer has chunks of 8 tokens.
    attention_window = AttentionWindow(((5, None), (None, 8)))
    assert attention_window.first_visible(position) == first_visible
    assert attention_window.max_visible_tokens == 8


@pytest.mark.parametrize(
    "limits", [((1, None),), ((None, 6),), ((9, 4), (3, None)), ((5, 12), (None, 7))]
)
def test_the_start_of_a_window_never_decreases_and_the_window_is_not_too_long(limits):
    attention_window = AttentionWindow(limits)
    starts = [attention_window.first_visible(position) for position in range(60)]
    assert starts == sorted(starts)
    lengths = [position + 1 - start for position, start in enumerate(starts)]
    assert max(lengths) <= attention_window.max_visible_tokens


def test_one_layer_without_a_window_keeps_every_block():
    narrow = LayerSpec(1, 1, 8, 8, LayerWindow(size=4))
    assert attention_window_of([narrow, narrow]) == AttentionWindow(((4, None),))
    assert attention_window_of([narrow, LayerSpec(1, 1, 8, 8)]) is None
    assert attention_window_of([]) is None


def run(scheduler, model, sequences):
    """Run all sequences, and return the answers and the largest number of used blocks."""
    answers = {sequence.request_id: [] for sequence in sequences}
    max_used_blocks = 0
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work():
        plan = scheduler.plan()
        assert plan.chunks
        for update in scheduler.commit(plan, model.run(plan)):
            answers[update.request_id] += update.new_token_ids
        scheduler.check()
        max_used_blocks = max(max_used_blocks, scheduler.pool.num_used)
    return answers, max_used_blocks


def expected_tokens(prompt, max_tokens):
    """Return `max_tokens` tokens of the scripted model. The model also continues after EOS."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, 0))
    return tokens[len(prompt) :]


def make_sequence(name, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, prompt, params, max_total_tokens=len(prompt) + max_tokens)


def make_scheduler(num_blocks, *, windows=(WINDOW_OF_5,), max_step_tokens=8):
    """Return a scheduler for at most 4 sequences."""
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=max_step_tokens,
        windows=windows,
    )


def test_a_sequence_never_has_more_blocks_than_its_window_and_its_step_need():
    needed_blocks = WINDOW_OF_5.max_blocks(num_tokens=8, block_size=BLOCK)
    scheduler = make_scheduler(needed_blocks, max_step_tokens=8)
    model = ScriptedModel(needed_blocks, windows=[WINDOW_OF_5])
    prompt = [random.Random(0).randrange(2, 40) for _ in range(50)]
    answers, max_used_blocks = run(scheduler, model, [make_sequence("a", prompt, 60)])
    assert answers["a"] == expected_tokens(prompt, 60)
    assert max_used_blocks <= needed_blocks
    assert scheduler.num_preemptions == 0


def test_cached_blocks_are_found_although_the_first_blocks_of_the_prompt_are_gone():
    scheduler = make_scheduler(num_blocks=7)
    model = ScriptedModel(num_blocks=7, windows=[WINDOW_OF_5])
    prompt = [random.Random(1).randrange(2, 40) for _ in range(50)]
    run(scheduler, model, [make_sequence("a", prompt, 1)])
    num_computed_for_first = model.num_computed

    second = make_sequence("b", prompt, 3)
    answers, _ = run(scheduler, model, [second])

    assert second.num_cached_tokens == 48
    assert answers["b"] == expected_tokens(prompt, 3)
    # The model computes the last two tokens of the prompt, and two of the three tokens of the
    # answer, because the last token of an answer is not computed.
    assert model.num_computed - num_computed_for_first == 2 + 2


def test_several_sequences_share_a_pool_that_is_too_small_without_windows():
    scheduler = make_scheduler(num_blocks=8, max_step_tokens=8)
    model = ScriptedModel(num_blocks=8, windows=[WINDOW_OF_5])
    rng = random.Random(2)
    prompts = {str(n): [rng.randrange(2, 40) for _ in range(40 + n)] for n in range(5)}
    sequences = [make_sequence(name, prompt, 30) for name, prompt in prompts.items()]

    answers, max_used_blocks = run(scheduler, model, sequences)

    for name, prompt in prompts.items():
        assert answers[name] == expected_tokens(prompt, 30)
    blocks_of_one_sequence = WINDOW_OF_5.max_blocks(num_tokens=8, block_size=BLOCK)
    assert max_used_blocks > blocks_of_one_sequence, "the sequences ran one after the other"


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """The folder of a tiny checkpoint in which all layers have windows of 12 tokens."""
    return BY_NAME["mistral, sliding window"].save(tmp_path_factory.mktemp("mistral"))


@pytest.mark.parametrize("block_size", [4, 16], ids=["plain torch", "native kernels"])
@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 3}], ids=["plain", "drafts"])
def test_a_model_with_a_window_is_exact_with_a_pool_much_smaller_than_the_sequence(
    mistral, block_size, settings
):
    settings |= {"block_size": block_size, "max_num_batched_tokens": 16}
    measuring_engine = open_engine(mistral, **settings)
    # The cache is large enough for a window of 12 tokens, a step of 16 tokens and two blocks. Each
    # sequence has 160 tokens.
    kv_cache_memory = bytes_for(measuring_engine, num_tokens=28 + 2 * block_size)
    measuring_engine.close()
    engine = open_engine(mistral, kv_cache_memory=kv_cache_memory, **settings)
    assert engine.info.num_blocks * block_size < 160 / 2
    assert engine.info.max_model_len == 256
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(60)] for _ in range(3)]

    answers = {str(number): [] for number in range(3)}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_work():
        for update in engine.step():
            answers[update.request_id] += update.new_token_ids
        engine.check()

    model = AutoModelForCausalLM.from_pretrained(mistral)
    assert list(answers.values()) == greedy_tokens(model, prompts, NUM_TOKENS)
    engine.close()


def test_the_memory_plan_depends_on_whether_blocks_are_freed(mistral, tmp_path):
    def plan_of(folder):
        lines = []
        Engine(EngineConfig(str(folder), num_threads=1), lines.append).close()
        return next(line for line in lines if line.startswith("memory:"))

    assert "blocks are freed when they leave the windows" in plan_of(mistral)
    mixed = BY_NAME["cohere2"].save(tmp_path / "mixed")
    expected = "1 of 2 attention layers have sliding windows, but no block is freed early"
    assert expected in plan_of(mixed)
    full = BY_NAME["llama"].save(tmp_path / "full")
    assert "windows" not in plan_of(full)


def test_a_pool_that_is_too_small_for_a_window_and_a_step_is_refused(mistral):
    with pytest.raises(ConfigError, match=r"kv_cache_memory.*Raise kv_cache_memory or lower"):
        open_engine(mistral, kv_cache_memory="8KiB", max_model_len=200)
