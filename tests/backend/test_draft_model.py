"""Tests that a draft model for speculative decoding does not change the answers of the model."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from backend.exactness import (
    PARAMS,
    PROMPTS,
    bytes_for,
    load_float32,
    open_engine,
    reference,
    run_staggered,
    run_together,
    share_of_accepted_tokens,
)
from backend.mtp_checkpoint import save_with_mtp
from backend.tiny_models import BY_NAME, VOCAB_SIZE
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.errors import ConfigError, ModelError
from nereid_backend.model.load_draft import check_draft_folder
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("cheap_drafts")

# Families of the forward paths `packed` and `padded`.
NAMES = ["llama", "qwen3", "gpt2"]


def save_noisy(name, folder, *, noise: float):
    """Save a tiny model with random numbers added to its weights.

    The standard deviation of these numbers is `noise` times the standard deviation of a weight.
    """
    model = BY_NAME[name].make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                scale = noise * parameter.std()
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft_of(tmp_path_factory):
    """A function that returns the folder of a draft model for a family.

    The draft model has noise in its weights, so that it proposes right and wrong tokens.
    """
    folders = {}

    def folder_of(name):
        if name not in folders:
            folder = tmp_path_factory.mktemp(f"draft-{name}")
            folders[name] = save_noisy(name, folder, noise=0.05)
        return folders[name]

    return folder_of


@pytest.mark.parametrize("name", [name for name in BY_NAME if name in NAMES])
def test_greedy_tokens_are_those_of_the_model_alone(checkpoint, draft_of, name):
    expected = reference(checkpoint(name))
    engine = open_engine(checkpoint(name), draft_model=str(draft_of(name)))
    assert run_together(engine) == expected
    assert 0.1 < share_of_accepted_tokens(engine) < 0.9
    assert engine.stats().num_drafts > 10
    engine.check()
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_every_family_has_the_greedy_tokens_of_the_model_alone(checkpoint, draft_of, name):
    engine = open_engine(checkpoint(name), draft_model=str(draft_of(name)))
    assert run_together(engine) == reference(checkpoint(name))
    assert engine.stats().num_drafts > 10
    engine.close()


def test_a_draft_model_with_the_same_weights_is_always_right(checkpoint):
    engine = open_engine(checkpoint("llama"), draft_model=str(checkpoint("llama")))
    run_together(engine)
    assert share_of_accepted_tokens(engine) == 1
    sampled = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, seed=4, n=2)
    engine.generate(PROMPTS, sampled)
    assert share_of_accepted_tokens(engine) == 1
    engine.close()


def test_requests_that_arrive_later_are_drafted_in_the_same_batch(checkpoint, draft_of):
    expected = reference(checkpoint("qwen3"))
    engine = open_engine(
        checkpoint("qwen3"), draft_model=str(draft_of("qwen3")), max_num_batched_tokens=9
    )
    assert run_staggered(engine) == expected
    assert engine.stats().num_accepted_tokens > 10
    engine.close()


def test_preempted_requests_are_drafted_again(checkpoint, draft_of):
    expected = reference(checkpoint("qwen3"))
    max_model_len = 80
    measuring_engine = open_engine(checkpoint("qwen3"))
    # The cache has space for one sequence of the largest length and 20 tokens of another sequence.
    # The memory is doubled, because the keys and values of the draft model need the same memory as
    # those of the model.
    kv_cache_memory = 2 * bytes_for(measuring_engine, num_tokens=max_model_len + 20)
    measuring_engine.close()
    engine = open_engine(
        checkpoint("qwen3"),
        draft_model=str(draft_of("qwen3")),
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
    )

    assert run_together(engine) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_accepted_tokens > 0
    engine.close()


def test_sampled_tokens_are_those_of_the_model_alone(checkpoint, draft_of):
    params = SamplingParams(
        temperature=0.7,
        top_k=30,
        frequency_penalty=0.4,
        seed=3,
        max_tokens=40,
        ignore_eos=True,
        n=2,
        logprobs=1,
        bad_words_token_ids=[[7], [8, 9]],
    )

    def sampled_tokens(engine):
        outputs = [
            answer for output in engine.generate(PROMPTS, params) for answer in output.outputs
        ]
        assert all(len(answer.logprobs) == len(answer.token_ids) for answer in outputs)
        return [answer.token_ids for answer in outputs]

    plain_engine = open_engine(checkpoint("llama"))
    drafting_engine = open_engine(checkpoint("llama"), draft_model=str(draft_of("llama")))

    assert sampled_tokens(drafting_engine) == sampled_tokens(plain_engine)
    assert drafting_engine.stats().num_accepted_tokens > 20
    plain_engine.close()
    drafting_engine.close()


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    """The folders of a model and of a draft model that has other random weights.

    The vocabulary of both models has 8 tokens.
    """
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
        folders.append(tmp_path_factory.mktemp(f"tiny-{seed}"))
        model.save_pretrained(folders[-1])
    return folders


def count_sampled_answers(folder, prompt, settings) -> Counter[tuple[int, ...]]:
    """Sample 2560 answers of three tokens with drafts. Return how often each answer was sampled."""
    engine = open_engine(
        folder, max_model_len=32, max_num_seqs=64, num_speculative_tokens=3, **settings
    )
    params = SamplingParams(temperature=1.0, max_tokens=3, n=64)
    answer_counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(40):
        (output,) = engine.generate([prompt], params)
        answer_counts.update(tuple(answer.token_ids) for answer in output.outputs)

    stats = engine.stats()
    assert stats.num_proposed_tokens > 100
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens
    engine.close()
    return answer_counts


def cells_of_test(answer_counts, probabilities) -> tuple[list[int], list[float]]:
    """Return the observed and the expected number of answers in each cell of a chi-square test.

    A chi-square test requires at least 5 expected answers in each cell. An answer that is expected
    at least 5 times has its own cell, and all rarer answers share the last cell.
    """
    num_answers = answer_counts.total()
    expected = {answer: num_answers * share for answer, share in probabilities.items()}
    common = [answer for answer, count in expected.items() if count >= 5]
    observed_counts = [answer_counts[answer] for answer in common]
    expected_counts = [expected[answer] for answer in common]
    observed_counts.append(num_answers - sum(observed_counts))
    expected_counts.append(num_answers - sum(expected_counts))
    return observed_counts, expected_counts


@pytest.mark.parametrize("source", ["draft", "ngram", "mtp"])
def test_sampling_with_drafts_keeps_the_distribution_of_the_model(
    small_vocabulary, source, tmp_path
):
    target, draft = small_vocabulary
    if source == "mtp":
        target = save_with_mtp(tmp_path, vocab_size=8)
    settings = {"draft_model": str(draft)} if source == "draft" else {"speculative_method": source}
    prompt = [1, 2, 3, 4, 1, 2]

    answer_counts = count_sampled_answers(target, prompt, settings)

    probabilities = answer_probabilities(target, prompt)
    assert sum(probabilities.values()) == pytest.approx(1)
    observed, expected = cells_of_test(answer_counts, probabilities)
    assert chisquare(observed, expected).pvalue > 1e-4


def test_the_answers_of_the_model_do_not_have_the_distribution_of_the_draft_model(small_vocabulary):
    """Check that the chi-square test can tell the model from the draft model.

    The test above would be useless if it also accepted answers of the draft model.
    """
    target, draft = small_vocabulary
    prompt = [1, 2, 3, 4, 1, 2]
    answer_counts = count_sampled_answers(target, prompt, {"draft_model": str(draft)})
    observed, expected = cells_of_test(answer_counts, answer_probabilities(draft, prompt))
    assert chisquare(observed, expected).pvalue < 1e-9


@torch.inference_mode()
def answer_probabilities(folder, prompt) -> dict[tuple[int, ...], float]:
    """Return the probability of each answer with three tokens, computed with transformers."""
    model = load_float32(folder)
    answers = list(itertools.product(range(8), repeat=3))
    ids = torch.tensor([[*prompt, *answer] for answer in answers])
    logprobs = model(ids).logits.double().log_softmax(-1)
    rows = torch.arange(len(answers))
    # The logits at one position predict the token at the next position.
    positions = range(len(prompt), len(prompt) + 3)
    answer_logprobs = sum(logprobs[rows, i - 1, ids[:, i]] for i in positions)
    return dict(zip(answers, answer_logprobs.exp().tolist(), strict=True))


def test_a_draft_model_with_another_vocabulary_is_refused(checkpoint, small_vocabulary):
    with pytest.raises(ConfigError, match=f"draft_model: .* 8 tokens.* {VOCAB_SIZE} tokens"):
        open_engine(checkpoint("llama"), draft_model=str(small_vocabulary[0]))


def test_a_draft_model_that_does_not_exist_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"draft_model: .* is not a folder with a file config"):
        open_engine(checkpoint("llama"), draft_model=str(tmp_path / "missing"))
    # This test also runs as root, who may read every file. The path is therefore too long, which
    # the system refuses in the same way as a path that a user may not read.
    with pytest.raises(ConfigError, match=r"draft_model: .* cannot be read \(File name too long\)"):
        open_engine(checkpoint("llama"), draft_model="/" + "a" * 300)


def test_the_error_of_a_damaged_draft_model_names_the_setting(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"draft_model: .* has no \.safetensors files"):
        open_engine(checkpoint("llama"), draft_model=str(tmp_path))


def test_models_with_a_recurrent_state_are_refused(tmp_path_factory, checkpoint):
    from backend import shrink

    folder = shrink.save("mamba", tmp_path_factory.mktemp("mamba"))
    with pytest.raises(ConfigError, match="draft_model: the forward path rows"):
        open_engine(folder, draft_model=str(checkpoint("llama")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_method": "draft"}, "requires the setting draft_model"),
        ({"speculative_method": "ngram", "draft_model": "/d"}, "uses no draft model"),
        ({"speculative_method": "eagle"}, "must be 'ngram', 'draft' or 'mtp'"),
        ({"draft_model": ""}, "draft_model: the value must be the path of a checkpoint"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("/m", **settings)


@pytest.mark.parametrize("content", ['{"architectures": 5}', "[]", "[" * 100_000])
def test_a_damaged_config_of_the_draft_model_is_reported_when_the_model_is_loaded(
    content, tmp_path
):
    (tmp_path / "config.json").write_text(content)
    check_draft_folder(EngineConfig("/m", draft_model=str(tmp_path)))


def test_zero_tokens_turn_speculation_off():
    assert EngineConfig("/m").max_draft_tokens == 4
    assert EngineConfig("/m", speculative_method="ngram").max_draft_tokens == 4
    assert EngineConfig("/m", draft_model="/d").max_draft_tokens == 4
    assert EngineConfig("/m", draft_model="/d", num_speculative_tokens=0).max_draft_tokens == 0
    assert EngineConfig("/m", num_speculative_tokens=2).max_draft_tokens == 2


def test_all_rows_and_blocks_of_the_draft_model_are_released(checkpoint, draft_of):
    engine = open_engine(checkpoint("llama"), draft_model=str(draft_of("llama")))

    engine.generate(PROMPTS, dataclasses.replace(PARAMS, n=3))
    engine.add_request("aborted", PROMPTS[3], dataclasses.replace(PARAMS, max_tokens=60))
    for _ in range(6):
        engine.step()
    engine.abort("aborted")
    while engine.has_work():
        engine.step()

    draft = engine._parts.draft
    assert sorted(draft._free_rows) == list(range(engine.info.max_num_seqs))
    pool: BlockPool = draft._tables._pool
    assert pool.num_used == 0
    pool.check([])
    engine.close()


def test_a_failing_draft_model_does_not_end_requests(checkpoint, draft_of, caplog):
    engine: Engine = open_engine(checkpoint("llama"), draft_model=str(draft_of("llama")))

    def fail(_plan):
        raise RuntimeError("out of memory")

    engine._parts.draft._path.forward = fail
    assert run_together(engine) == reference(checkpoint("llama"))
    assert engine.stats().num_drafts == 0
    assert "The engine continues without draft tokens" in caplog.text
    engine.close()


def test_sequences_beyond_the_length_limit_of_the_draft_model_get_no_drafts(checkpoint, tmp_path):
    family = BY_NAME["llama"]
    short = dataclasses.replace(family, extra={**family.extra, "max_position_embeddings": 32})
    folder = short.save(tmp_path)
    engine = open_engine(checkpoint("llama"), draft_model=str(folder))
    assert run_together(engine) == reference(checkpoint("llama"))
    assert 0 < engine.stats().num_drafts < 60
    engine.close()
