"""Tests that vision-language models embed and rerank with the same results as transformers."""

import numpy as np
import pytest
import torch
from backend.pooling.tiny_images import (
    PAGE_MODELS,
    answer_logits,
    last_vectors,
    picture,
    png,
    save_page_model,
    save_vision_language,
    user,
)
from nereid_backend import Embedder, RequestError, Reranker
from nereid_backend.vision.load_processor import load_processor
from transformers import AutoConfig

# One vision-language type of each of three families. `make test-long` tests all of them.
TYPES = ("qwen3_vl", "llava", pytest.param("qwen2_vl", marks=pytest.mark.long))
TEXTS = ["a page about birds", "b", "what is in this picture?"]


@pytest.fixture(scope="module", params=TYPES)
def folder(request, tmp_path_factory):
    """The folder of a tiny vision-language checkpoint with a chat template."""
    return save_vision_language(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def embedder(folder):
    return Embedder(str(folder), num_threads=1)


def test_vectors_of_texts_images_and_both_equal_those_of_transformers(embedder, folder):
    assert embedder.info.accepts_images
    first_image, second_image = picture(1), picture(2, (40, 72))
    vectors = embedder.encode(
        [
            TEXTS[0],
            {"image": png(first_image)},
            {"text": TEXTS[1], "image": png(second_image)},
            {"text": TEXTS[2]},
        ]
    )
    chats = [
        [user(TEXTS[0])],
        [user(first_image)],
        [user(second_image, TEXTS[1])],
        [user(TEXTS[2])],
    ]
    np.testing.assert_allclose(vectors, last_vectors(folder, chats), atol=2e-4)
    # The vector depends on the pixels.
    other_image = picture(3, (40, 72))
    (other_vector,) = embedder.encode({"text": TEXTS[1], "image": png(other_image)})
    assert np.abs(other_vector - vectors[2]).max() > 1e-3


def test_a_prompt_is_a_system_message(embedder, folder):
    image = picture(4)
    vector = embedder.encode({"image": png(image)}, prompt="Represent it.")
    system = {"role": "system", "content": [{"type": "text", "text": "Represent it."}]}
    expected = last_vectors(folder, [[system, user(image)]])
    np.testing.assert_allclose(vector, expected, atol=2e-4)


def test_scores_of_images_and_texts_equal_those_of_transformers(folder):
    reranker = Reranker(str(folder), num_threads=1)
    image = picture(5)
    scores = reranker.score([(TEXTS[0], png(image)), (TEXTS[0], TEXTS[1])], activation="none")
    expected = answer_logits(folder, TEXTS[0], [image, TEXTS[1]])
    assert abs(expected[0] - expected[1]) > 1e-3
    np.testing.assert_allclose(scores, expected, atol=2e-3)


def test_a_query_cannot_choose_the_place_of_an_image(folder):
    # In an earlier version, the marker for an image was always the same. A query could contain it.
    query = "what is mark7image7mark?"
    reranker = Reranker(str(folder), num_threads=1)
    image = picture(5)
    scores = reranker.score([(query, png(image)), (query, query)], activation="none")
    np.testing.assert_allclose(scores, answer_logits(folder, query, [image, query]), atol=2e-3)


def test_a_text_with_a_placeholder_for_an_image_is_an_error_of_the_input(folder, embedder):
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    with pytest.raises(RequestError, match=r"^input: the checkpoint's processor cannot prepare"):
        embedder.encode({"text": f"a{processor.image_token}b"})


def test_a_broken_or_large_image_is_refused_and_the_next_one_works(embedder):
    with pytest.raises(RequestError, match="image: the file is not an image"):
        embedder.encode({"image": b"no image"})
    with pytest.raises(RequestError, match="One side may be at most"):
        embedder.encode({"image": png(picture(1, (2000, 1)))})
    assert len(embedder.encode({"image": png(picture(1))})) == 1


def test_the_second_use_of_an_image_runs_no_encoder(embedder):
    features = embedder._engine._model._image_forward.features
    num_encoded, num_reused = features.num_encoded, features.num_reused
    inputs = [{"image": png(picture(seed)), "text": text} for seed in (21, 22) for text in TEXTS]
    vectors = embedder.encode(inputs)
    assert features.num_encoded == num_encoded + 2
    assert features.num_reused == num_reused + 4
    for image_and_text, vector in zip(inputs, vectors, strict=True):
        np.testing.assert_array_equal(embedder.encode(image_and_text)[0], vector)
    assert features.num_encoded == num_encoded + 2


# One type of model is enough, because the check of the length is the same for all types.
@pytest.mark.parametrize("folder", TYPES[:1], indirect=True)
def test_an_input_that_is_too_long_is_refused(folder):
    embedder = Embedder(str(folder), num_threads=1, max_model_len=16)
    with pytest.raises(RequestError, match="the limit is 16"):
        embedder.encode({"text": "a long text about this picture " * 4})


@pytest.fixture(scope="module", params=PAGE_MODELS)
def retrieval(request, tmp_path_factory):
    """The folder of a tiny checkpoint for pages, and the model and processor of transformers."""
    name = request.param
    folder = tmp_path_factory.mktemp(f"{name}-retrieval")
    return folder, *save_page_model(name, tmp_path_factory.mktemp(name), folder)


@pytest.fixture(scope="module")
def page_embedder(retrieval):
    return Embedder(str(retrieval[0]), num_threads=1)


@torch.inference_mode()
def test_queries_and_pages_of_transformers(page_embedder, retrieval):
    _, model, processor = retrieval
    assert page_embedder.info.kinds == ("multi_vector",)
    assert page_embedder.info.dimension == 16
    first_query, second_query = TEXTS[:2]
    first_page, second_page = picture(1), picture(2, (40, 72))

    vectors = page_embedder.encode_multi(
        [first_query, {"image": png(first_page)}, {"image": png(second_page)}, second_query]
    )

    inputs = [
        processor.process_queries(text=[first_query]),
        processor.process_images(images=[first_page]),
        processor.process_images(images=[second_page]),
        processor.process_queries(text=[second_query]),
    ]
    for vectors_of_input, processed in zip(vectors, inputs, strict=True):
        expected = model(**processed).embeddings[0].numpy()
        np.testing.assert_allclose(vectors_of_input, expected, atol=2e-4)
    # The vectors of a page depend on its pixels, so two different pages have different vectors.
    assert vectors[1].shape != vectors[2].shape or np.abs(vectors[1] - vectors[2]).max() > 1e-3


def test_a_query_with_an_image_or_a_prompt_is_refused_by_a_model_for_pages(page_embedder):
    with pytest.raises(RequestError, match="either a query"):
        page_embedder.encode_multi([{"text": "a", "image": png(picture(1))}])
    with pytest.raises(RequestError, match="dense"):
        page_embedder.encode({"image": png(picture(1))})
