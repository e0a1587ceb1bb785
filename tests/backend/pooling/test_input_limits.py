"""Tests that inputs that are too large are refused or cut before they are tokenised."""

import time

import numpy as np
import pytest
from nereid_backend import Embedder, RequestError, Reranker
from nereid_backend.pooling.inputs.prepare_items import ItemPreparer
from nereid_backend.pooling.inputs.text_size import TextLimit
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingItem

# A text that is much longer than all limits of the tiny models. Tokenising it takes seconds.
HUGE = "w1 w2 w3 w4 " * 500_000


@pytest.fixture(scope="module")
def embedder(encoder_of):
    return Embedder(str(encoder_of("bert")), num_threads=1)


@pytest.fixture
def no_long_text(monkeypatch, embedder):
    """Let the tokenizer raise an error for a text of 100,000 characters or more."""
    tokenizer_class = type(embedder._engine._model.preparer._tokenizer)
    tokenise = tokenizer_class.__call__

    def check_and_tokenise(self, *texts, **options):
        # Each argument of a tokenizer is a text, a list of texts or None.
        for argument in filter(None, texts):
            for text in [argument] if isinstance(argument, str) else argument:
                assert len(text) < 100_000
        return tokenise(self, *texts, **options)

    monkeypatch.setattr(tokenizer_class, "__call__", check_and_tokenise)


@pytest.mark.usefixtures("no_long_text")
@pytest.mark.parametrize("text", [HUGE, "ä" * 60_000, "\U0001f600" * 3_000_000])
def test_a_huge_text_is_refused_before_it_is_tokenised(embedder, text):
    start = time.perf_counter()
    message = (
        r"input: the input has at least \d+ bytes, .* at least \d+ tokens, .* 128 \(max_model_len\)"
    )
    with pytest.raises(RequestError, match=message):
        embedder.encode(text)
    assert time.perf_counter() - start < 0.2


@pytest.mark.usefixtures("no_long_text")
def test_the_message_has_the_index_of_the_huge_text(embedder):
    with pytest.raises(RequestError, match=r"input 1: input: the input has at least"):
        embedder.encode(["w1", HUGE])


def test_the_message_of_a_long_text_names_the_value_of_truncate_in_each_api(embedder):
    with pytest.raises(
        RequestError, match=r'send truncate=true \(in Cohere\'s API, truncate="END"'
    ):
        embedder.encode(HUGE)


@pytest.mark.usefixtures("no_long_text")
def test_a_huge_text_is_cut_before_it_is_tokenised(embedder):
    vectors = embedder.encode([HUGE, "ä" * 200_000], truncate=True)
    expected = embedder.encode(HUGE[:3000], truncate=True)
    np.testing.assert_allclose(vectors[:1], expected, atol=1e-6)


@pytest.mark.usefixtures("no_long_text")
def test_the_end_of_a_huge_text_is_kept_if_the_tokenizer_truncates_the_beginning(
    embedder, monkeypatch
):
    model = embedder._engine._model
    tokenizer = model.preparer._tokenizer
    monkeypatch.setattr(tokenizer, "truncation_side", "left")
    preparer = ItemPreparer(
        model._loaded.spec, model.info, tokenizer, text_prompts=None, images=None
    )
    (prepared,) = preparer.prepare([PoolingItem(text=HUGE + "w77", truncate=True)])
    assert len(prepared.token_ids) == 128
    assert tokenizer.decode(prepared.token_ids[-4:]) == "w3 w4 w77 </s>"


@pytest.mark.parametrize(
    ("side", "text", "cut"),
    [
        ("right", "ä" * 40_000, "ä" * 32_768),
        ("right", "a" + "ä" * 40_000, "a" + "ä" * 32_767),
        ("left", "ä" * 40_000 + "a", "ä" * 32_767 + "a"),
        ("left", "ä" * 32_768, "ä" * 32_768),
    ],
)
def test_a_text_is_cut_between_two_characters(side, text, cut):
    assert TextLimit(10, 10, side).truncate(text) == cut


@pytest.mark.usefixtures("no_long_text")
@pytest.mark.parametrize("truncate", [False, True])
def test_a_huge_prompt_is_refused_even_if_the_text_may_be_truncated(embedder, truncate):
    with pytest.raises(RequestError, match=r"prompt: the prompt has at least \d+ bytes"):
        embedder.encode("w1", prompt=HUGE, truncate=truncate)


def test_a_huge_document_is_refused_or_cut_before_it_is_tokenised(encoder_of):
    reranker = Reranker(str(encoder_of("bert", "sequence", num_labels=1)), num_threads=1)
    start = time.perf_counter()
    with pytest.raises(RequestError, match=r"the input has at least \d+ bytes"):
        reranker.score([("w1", HUGE)])
    score_of_cut = reranker.score([("w1", HUGE)], truncate=True)
    assert time.perf_counter() - start < 1.0
    np.testing.assert_allclose(
        score_of_cut, reranker.score([("w1", HUGE[:3000])], truncate=True), atol=1e-5
    )


def test_the_length_of_token_ids_is_checked_before_each_id(embedder):
    ids = [5] * 200 + ["not a token id"]
    with pytest.raises(RequestError, match=r"has 201 tokens, but the limit is 128"):
        embedder.encode([ids])
    assert embedder.encode([ids], truncate=True).shape == (1, 48)


def test_more_inputs_than_the_queue_can_hold_are_refused_before_tokenising(encoder_of):
    engine = PoolingEngine(
        PoolingConfig(str(encoder_of("bert")), num_threads=1, max_num_waiting=3),
        progress=lambda _: None,
    )
    with pytest.raises(
        RequestError, match=r"has 100000 inputs, but the limit is 3 \(max_num_waiting\)"
    ):
        engine.add("a", [PoolingItem(text="w1")] * 100_000)


def test_the_lengths_of_prompts_do_not_fill_the_memory(embedder):
    preparer = embedder._engine._model.preparer
    for number in range(300):
        preparer._prompt_len(f"w{number % 200}: {number}")
    assert len(preparer._prompt_lens) <= 256
