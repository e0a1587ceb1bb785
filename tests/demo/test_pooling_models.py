import json
import statistics
from random import Random

import pytest
import torch
from lessons.retrieval import fixed_library, held_out, random_library, trained
from retrieval_scores import Embedder, Reranker, ndcg
from torch.nn.functional import normalize
from train_pooling import EMBEDDER, PROMPTS, RERANKER, Recipe

MAX_BYTES = 10_000_000
COMMON = {
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json",
}  # fmt: skip
SENTENCE_TRANSFORMERS = {
    "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json",
    "sentence_bert_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return fixed_library()


@pytest.fixture(scope="module")
def embedder():
    return Embedder()


@pytest.fixture(scope="module")
def reranker():
    return Reranker()


def file_sizes(folder):
    """Return the size of each file by its path in the folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def test_both_folders_have_every_file_and_are_small_together():
    embed, rerank = file_sizes(EMBEDDER), file_sizes(RERANKER)
    assert set(embed) == COMMON | SENTENCE_TRANSFORMERS
    assert set(rerank) == COMMON
    assert sum(embed.values()) + sum(rerank.values()) < MAX_BYTES


def test_the_records_are_of_todays_recipe():
    recipe = vars(Recipe())
    recipe["dimensions"] = list(recipe["dimensions"])
    reranker_record = json.loads((RERANKER / "training.json").read_text())
    assert reranker_record["recipe"] == recipe
    embedder_record = json.loads((EMBEDDER / "training.json").read_text())
    assert embedder_record["recipe"].items() <= recipe.items()


def test_every_question_has_passages_that_answer_it(library):
    for question in library.questions:
        assert question.relevant
        assert max(question.relevant) < len(library.passages)


def test_a_question_about_somebodys_home_is_answered_by_who_says_it(library):
    (question,) = [q for q in library.questions if q.text == "Where does Hugo live?"]
    passages = [library.passages[number] for number in question.relevant]
    assert "Hugo lives in Pinemark." in passages
    assert len(passages) == 3
    assert all("Hugo" in passage and "Pinemark" in passage for passage in passages)


def test_the_same_seed_makes_the_same_library():
    assert random_library(Random(4)) == random_library(Random(4))
    assert random_library(Random(4)) != random_library(Random(5))


def test_no_held_out_question_is_one_that_training_asks(library):
    training_texts = {question.text for question in trained(library)}
    held_out_texts = {question.text for question in held_out(library)}
    assert len(held_out_texts) > 80
    assert not training_texts & held_out_texts


def test_gain_falls_with_the_place_and_is_1_for_the_best_order():
    relevant = frozenset({1, 3})
    assert ndcg([3, 1, 0, 2], relevant) == 1.0
    assert ndcg([0, 2, 1, 3], relevant) < ndcg([1, 0, 2, 3], relevant) < 1.0
    assert ndcg(list(range(20)), frozenset({15})) == 0.0


@pytest.mark.parametrize("size", Recipe().dimensions)
def test_the_embedder_finds_the_passages_at_every_dimension(library, embedder, size):
    questions = held_out(library)[::4]
    question_vectors = embedder.encode([PROMPTS["query"] + q.text for q in questions])
    passage_vectors = embedder.encode(library.passages)
    similarities = normalize(question_vectors[:, :size]) @ normalize(passage_vectors[:, :size]).T
    orders = similarities.argsort(dim=1, descending=True).tolist()
    gains = [ndcg(order, q.relevant) for order, q in zip(orders, questions, strict=True)]
    assert statistics.mean(gains) > 0.9


def test_the_reranker_puts_the_passages_that_answer_first(library, reranker):
    gains = []
    for question in held_out(library)[::16]:
        scores = reranker.score(question.text, library.passages)
        gains.append(ndcg(scores.argsort(descending=True).tolist(), question.relevant))
    assert statistics.mean(gains) > 0.85


def test_the_rerankers_scores_are_probabilities(reranker):
    right, wrong = reranker.score(
        "Where does Hugo live?", ["Hugo lives in Pinemark.", "Bram lives in Korvale."]
    )
    assert 0.8 < right < 1
    assert 0 < wrong < 0.2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers_gives_the_same_vectors(embedder):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(EMBEDDER), device="cpu")
    texts = ["Hugo lives in Pinemark.", "Where does Hugo live?"]
    assert torch.allclose(torch.tensor(model.encode(texts)), embedder.encode(texts), atol=1e-5)
