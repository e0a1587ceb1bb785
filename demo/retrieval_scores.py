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

FLOORS = {"embedder": 0.80, "reranker": 0.90, "embedder, then reranker": 0.90}
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
    """
    gains = (1 / math.log2(place + 2) for place, at in enumerate(order[:depth]) if at in relevant)
    best = sum(1 / math.log2(place + 2) for place in range(min(depth, len(relevant))))
    return sum(gains) / best


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
    asked = embedder.encode([PROMPTS["query"] + question.text for question in questions])
    similarities = asked @ embedder.encode(library.passages).T
    orders: dict[str, list[list[int]]] = {name: [] for name in ("random order", *FLOORS)}
    rng = Random("random order")
    for question, row in zip(questions, similarities, strict=True):
        everything = list(range(len(library.passages)))
        orders["random order"].append(rng.sample(everything, len(everything)))
        retrieved = row.argsort(descending=True).tolist()
        orders["embedder"].append(retrieved)
        orders["reranker"].append(_reranked(reranker, question, library, everything))
        orders["embedder, then reranker"].append(
            _reranked(reranker, question, library, retrieved[:_RETRIEVED])
        )
    return [
        Row(name, _mean_ndcg(ranked, questions), FLOORS.get(name, 0.0))
        for name, ranked in orders.items()
    ]


def num_questions() -> int:
    """Return the number of questions that the table's means are computed from."""
    return len(held_out(fixed_library()))


def _reranked(
    reranker: Reranker, question: Question, library: Library, chosen: Sequence[int]
) -> list[int]:
    scores = reranker.score(question.text, [library.passages[at] for at in chosen])
    return [chosen[place] for place in scores.argsort(descending=True).tolist()]


def _mean_ndcg(orders: list[list[int]], questions: list[Question]) -> float:
    values = [ndcg(order, q.relevant) for order, q in zip(orders, questions, strict=True)]
    return sum(values) / len(values)
