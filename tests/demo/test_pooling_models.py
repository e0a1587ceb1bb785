import json
from random import Random

import pytest
import torch
from lessons.base import is_held_out
from lessons.retrieval import fixed_library, held_out, random_library
from retrieval_scores import Embedder, Reranker, ndcg
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


def files(folder):
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def test_both_folders_have_every_file_and_are_small_together():
    embed, rerank = files(EMBEDDER), files(RERANKER)
    assert set(embed) == COMMON | SENTENCE_TRANSFORMERS
    assert set(rerank) == COMMON
    assert sum(embed.values()) + sum(rerank.values()) < MAX_BYTES


def test_the_records_are_of_todays_recipe():
    recipe = json.loads(json.dumps(vars(Recipe())))
    record = json.loads((RERANKER / "training.json").read_text())
    assert record["recipe"] == recipe
    record = json.loads((EMBEDDER / "training.json").read_text())
    assert record["recipe"].items() <= recipe.items()


def test_every_question_has_passages_that_answer_it(library):
    for question in library.questions:
        assert question.relevant
        assert max(question.relevant) < len(library.passages)


def test_a_question_about_somebodys_home_is_answered_by_who_says_it(library):
    (question,) = [q for q in library.questions if q.text == "Where does Hugo live?"]
    texts = [library.passages[at] for at in sorted(question.relevant)]
    assert "Hugo lives in Pinemark." in texts
    assert len(texts) == 3
    assert all("Hugo" in text and "Pinemark" in text for text in texts)


def test_the_same_seed_makes_the_same_library():
    assert random_library(Random(4)) == random_library(Random(4))
    assert random_library(Random(4)) != random_library(Random(5))


def test_no_held_out_question_is_one_that_training_asks(library):
    asked = {q.text for q in library.questions if not is_held_out(q.text)}
    questions = held_out(library)
    assert len(questions) > 80
    assert not asked & {q.text for q in questions}


def test_gain_falls_with_the_place_and_is_1_for_the_best_order():
    assert ndcg([3, 1, 0, 2], frozenset({1, 3})) == 1.0
    assert ndcg([0, 2, 1, 3], frozenset({1, 3})) < ndcg([1, 0, 2, 3], frozenset({1, 3})) < 1.0
    assert ndcg(list(range(20)), frozenset({15})) == 0.0


def test_the_embedder_finds_the_passages_at_every_dimension(library, embedder):
    questions = held_out(library)[::4]
    asked = embedder.encode([PROMPTS["query"] + q.text for q in questions])
    written = embedder.encode(library.passages)
    for size in Recipe().dimensions:
        left, right = (
            torch.nn.functional.normalize(vectors[:, :size], dim=-1) for vectors in (asked, written)
        )
        orders = (left @ right.T).argsort(dim=1, descending=True).tolist()
        gains = [ndcg(o, q.relevant) for o, q in zip(orders, questions, strict=True)]
        assert sum(gains) / len(gains) > 0.9


def test_the_reranker_puts_the_passages_that_answer_first(library, reranker):
    questions = held_out(library)[::16]
    gains = []
    for question in questions:
        scores = reranker.score(question.text, library.passages)
        gains.append(ndcg(scores.argsort(descending=True).tolist(), question.relevant))
    assert sum(gains) / len(gains) > 0.85


def test_the_rerankers_scores_are_probabilities(reranker):
    scores = reranker.score(
        "Where does Hugo live?", ["Hugo lives in Pinemark.", "Bram lives in Korvale."]
    )
    assert scores[0] > 0.8
    assert scores[1] < 0.2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers_gives_the_same_vectors(embedder):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(EMBEDDER), device="cpu")
    texts = ["Hugo lives in Pinemark.", "Where does Hugo live?"]
    assert torch.allclose(torch.tensor(model.encode(texts)), embedder.encode(texts), atol=1e-5)
