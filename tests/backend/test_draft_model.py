"""Tests that a draft model for speculative decoding does not change the answers of the model."""

import dataclasses
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
)
from backend.mtp_checkpoint import save_with_mtp
from backend.tiny_models import BY_NAME, VOCAB_SIZE
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.errors import ConfigError
from nereid_backend.model.load_draft import check_draft_folder
from scipy.stats import chi2_contingency, chisquare
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("cheap_drafts")

# Families of the forward paths `packed` and `padded`.
NAMES = ["llama", "qwen3", "gpt2"]


def save_noisy(name, folder, noise: float):
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
            folders[name] = save_noisy(name, tmp_path_factory.mktemp(f"draft-{name}"), 0.05)
        return folders[name]

    return folder_of


def greedy(engine):
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


def acceptance(engine) -> float:
    stats = engine.stats()
    return stats.num_accepted_tokens / stats.num_proposed_tokens


@pytest.mark.parametrize("name", [name for name in BY_NAME if name in NAMES])
def test_greedy_tokens_are_those_of_the_model_alone(checkpoint, draft_of, name):
    expected = reference(checkpoint(name))
    engine = open_engine(checkpoint(name), draft_model=str(draft_of(name)))
    assert greedy(engine) == expected
    assert 0.1 < acceptance(engine) < 0.9
    assert engine.stats().num_drafts > 10
    engine.check()
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_every_family_has_the_greedy_tokens_of_the_model_alone(checkpoint, draft_of, name):
    engine = open_engine(checkpoint(name), draft_model=str(draft_of(name)))
    assert greedy(engine) == reference(checkpoint(name))
    assert engine.stats().num_drafts > 10
    engine.close()


def test_a_draft_model_with_the_same_weights_is_always_right(checkpoint):
    engine = open_engine(checkpoint("llama"), draft_model=str(checkpoint("llama")))
    greedy(engine)
    assert acceptance(engine) == 1
    sampled = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, seed=4, n=2)
    engine.generate(PROMPTS, sampled)
    assert acceptance(engine) == 1
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
    calm = open_engine(checkpoint("qwen3"))
    # The draft model has the same shape as the model, so its keys and values need as much memory.
    engine = open_engine(
        checkpoint("qwen3"),
        draft_model=str(draft_of("qwen3")),
        max_model_len=80,
        kv_cache_memory=2 * bytes_for(calm, 100),
    )
    calm.close()
    assert greedy(engine) == expected
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
    answers = []
    for settings in ({}, {"draft_model": str(draft_of("llama"))}):
        engine = open_engine(checkpoint("llama"), **settings)
        outputs = [each for out in engine.generate(PROMPTS, params) for each in out.outputs]
        answers.append([each.token_ids for each in outputs])
        assert all(len(each.logprobs) == len(each.token_ids) for each in outputs)
    assert engine.stats().num_accepted_tokens > 20
    engine.close()
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    """The folders of a model and of a draft model that has other random weights.

    The vocabulary of both models has 8 tokens.
    """
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
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
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
        folders.append(tmp_path_factory.mktemp(f"tiny-{seed}"))
        model.save_pretrained(folders[-1])
    return folders


@pytest.mark.parametrize("source", ["draft", "ngram", "mtp"])
def test_sampling_with_drafts_keeps_the_distribution_of_the_model(
    small_vocabulary, source, tmp_path
):
    target, draft = small_vocabulary
    if source == "mtp":
        target = save_with_mtp(tmp_path, vocab_size=8)
    chosen = {"draft_model": str(draft)} if source == "draft" else {"speculative_method": source}
    engine = open_engine(
        target, max_model_len=32, max_num_seqs=64, num_speculative_tokens=3, **chosen
    )
    prompt = [1, 2, 3, 4, 1, 2]
    params = SamplingParams(temperature=1.0, max_tokens=3, n=64)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(40):
        (output,) = engine.generate([prompt], params)
        counts.update(tuple(each.token_ids) for each in output.outputs)
    assert engine.stats().num_proposed_tokens > 100
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_proposed_tokens
    engine.close()
    num_answers = sum(counts.values())
    probabilities = answer_probabilities(target, prompt)
    assert sum(probabilities.values()) == pytest.approx(1)
    expected = [num_answers * probability for probability in probabilities.values()]
    observed = [counts[answer] for answer in probabilities]
    # The chi-square test requires at least 5 expected answers in each cell, so rarer answers share
    # one cell.
    rare = [index for index, count in enumerate(expected) if count < 5]
    for values in (expected, observed):
        values.append(sum(values[index] for index in rare))
        for index in reversed(rare):
            del values[index]
    assert chisquare(observed, expected).pvalue > 1e-4
    # If the answers had the distribution of the draft model, the test would fail.
    if source == "draft":
        wrong = answer_probabilities(draft, prompt)
        table = [observed, [num_answers * p for i, p in enumerate(wrong.values()) if i not in rare]]
        table[1].append(max(1e-3, num_answers - sum(table[1])))
        assert chi2_contingency(table).pvalue < 1e-9


@torch.inference_mode()
def answer_probabilities(folder, prompt) -> dict[tuple[int, ...], float]:
    """Return the probability of each answer with three tokens, computed with transformers."""
    model = load_float32(folder)
    answers = [(a, b, c) for a in range(8) for b in range(8) for c in range(8)]
    ids = torch.tensor([[*prompt, *answer] for answer in answers])
    logprobs = model(ids).logits.double().log_softmax(-1)
    start = len(prompt) - 1
    rows = torch.arange(len(answers))
    total = sum(logprobs[rows, start + i, ids[:, start + i + 1]] for i in range(3))
    return dict(zip(answers, total.exp().tolist(), strict=True))


def test_a_draft_model_with_another_vocabulary_is_refused(checkpoint, small_vocabulary):
    with pytest.raises(ConfigError, match=f"draft_model: .* 8 tokens.* {VOCAB_SIZE} tokens"):
        open_engine(checkpoint("llama"), draft_model=str(small_vocabulary[0]))


def test_a_draft_model_that_does_not_exist_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"draft_model: .* is not a folder with a file config"):
        open_engine(checkpoint("llama"), draft_model=str(tmp_path / "missing"))


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
    engine.add_request("a", PROMPTS[3], dataclasses.replace(PARAMS, max_tokens=60))
    for _ in range(6):
        engine.step()
    engine.abort("a")
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
    assert greedy(engine) == reference(checkpoint("llama"))
    assert engine.stats().num_drafts == 0
    assert "The engine continues without draft tokens" in caplog.text
    engine.close()


def test_sequences_beyond_the_length_limit_of_the_draft_model_get_no_drafts(checkpoint, tmp_path):
    family = BY_NAME["llama"]
    short = dataclasses.replace(family, extra={**family.extra, "max_position_embeddings": 32})
    folder = short.save(tmp_path)
    engine = open_engine(checkpoint("llama"), draft_model=str(folder))
    assert greedy(engine) == reference(checkpoint("llama"))
    assert 0 < engine.stats().num_drafts < 60
    engine.close()
