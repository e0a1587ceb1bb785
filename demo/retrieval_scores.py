"""The nDCG@10 of the demo's embedder and reranker on held-out questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from lessons.retrieval import Library, Question, fixed_library, held_out
from torch import Tensor
from train_pooling import EMBEDDER, PROMPTS, RERANKER, embed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

FLOORS = {
    "random order": 0.0,
    "embedder": 0.80,
    "reranker": 0.90,
    "embedder, then reranker": 0.90,
}
"""The smallest accepted nDCG@10 of each ranking."""
_DEPTH = 10
_RETRIEVED = 20


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    ranking: str
    ndcg: float
    floor: float


def ndcg(order: Sequence[int], relevant: frozenset[int], depth: int = _DEPTH) -> float:
    """Return the normalised discounted cumulative gain of the first `depth` places.

    The gain of a passage is 1 if it is relevant, otherwise 0.

    Source: Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002.

    Args:
        order: The numbers of the passages, the best one first.
        relevant: The numbers of the relevant passages.
        depth: The number of places.
    """
    discounts = [1 / math.log2(place + 2) for place in range(depth)]
    gain = sum(
        discount for discount, passage in zip(discounts, order, strict=False) if passage in relevant
    )
    return gain / sum(discounts[: len(relevant)])


class Embedder:
    """The embedder, run by transformers."""

    def __init__(self, folder: Path = EMBEDDER) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors [n, hidden_size] float32."""
        batch = self._tokenizer(list(texts), padding=True, return_tensors="pt")
        return torch.nn.functional.normalize(embed(self._model, batch), dim=-1)


class Reranker:
    """The reranker, run by transformers."""

    def __init__(self, folder: Path = RERANKER) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def score(self, query: str, documents: Sequence[str]) -> Tensor:
        """Return for each document the probability that it answers the query, [n] float32."""
        pairs = [query] * len(documents), list(documents)
        batch = self._tokenizer(*pairs, padding=True, return_tensors="pt")
        scores: Tensor = self._model(**batch).logits.squeeze(-1).sigmoid()
        return scores


def table(embedder_folder: Path = EMBEDDER, reranker_folder: Path = RERANKER) -> list[Row]:
    """Return the mean nDCG@10 of each ranking.

    The rankings are a random order, the embedder, the reranker, and the embedder's first 20
    passages ordered by the reranker.
    """
    library = fixed_library()
    questions = held_out(library)
    embedder, reranker = Embedder(embedder_folder), Reranker(reranker_folder)
    question_vectors = embedder.encode([PROMPTS["query"] + question.text for question in questions])
    similarities = question_vectors @ embedder.encode(library.passages).T
    all_passages = list(range(len(library.passages)))
    rng = Random("random order")
    scores: dict[str, list[float]] = {name: [] for name in FLOORS}
    for question, row in zip(questions, similarities, strict=True):
        by_similarity = row.argsort(descending=True).tolist()
        orders = {
            "random order": rng.sample(all_passages, len(all_passages)),
            "embedder": by_similarity,
            "reranker": _reranked(reranker, question, library, all_passages),
            "embedder, then reranker": _reranked(
                reranker, question, library, by_similarity[:_RETRIEVED]
            ),
        }
        for name, order in orders.items():
            scores[name].append(ndcg(order, question.relevant))
    return [Row(name, sum(scores[name]) / len(questions), floor) for name, floor in FLOORS.items()]


def num_questions() -> int:
    """Return the number of questions that the table's means are computed from."""
    return len(held_out(fixed_library()))


def _reranked(
    reranker: Reranker, question: Question, library: Library, passages: Sequence[int]
) -> list[int]:
    """Return the numbers of the passages in the reranker's order."""
    scores = reranker.score(question.text, [library.passages[number] for number in passages])
    return [passages[place] for place in scores.argsort(descending=True).tolist()]
