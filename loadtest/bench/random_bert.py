"""BERT models with random weights, and random texts, for `bench_pooling`."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
)

_MIN_LENGTH, _MAX_LENGTH = 8, 512
_VOCAB_SIZE = 30_522
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_WORDS = [f"w{number}" for number in range(_VOCAB_SIZE - len(_SPECIAL_TOKENS))]


@dataclass(frozen=True)
class BertShape:
    """The shape and the dtype of a BERT model."""

    hidden_size: int
    num_layers: int
    dtype: str

    def save(self, folder: Path, *, has_head: bool) -> str:
        """Save a model with random weights in a subfolder of `folder`, and return its path.

        A model with a head is a reranker, and a model without a head is an embedder. The tokenizer
        maps each word to one token. If the subfolder already contains the model, the model is not
        saved again.
        """
        shape = f"{self.hidden_size}x{self.num_layers}-{_VOCAB_SIZE}"
        path = folder / f"bert-{shape}-{self.dtype}-{'reranker' if has_head else 'embedder'}"
        if (path / "config.json").exists():
            return str(path)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=_VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=4 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            # MiniLM-L6, BERT base and BERT large have these numbers of heads.
            num_attention_heads=max(12, self.hidden_size // 64),
            max_position_embeddings=_MAX_LENGTH,
            num_labels=1,
            initializer_range=0.05,
        )
        model = BertForSequenceClassification(config) if has_head else BertModel(config)
        model.to(getattr(torch, self.dtype)).save_pretrained(path)
        vocabulary = {word: token_id for token_id, word in enumerate([*_SPECIAL_TOKENS, *_WORDS])}
        BertTokenizer(vocab=vocabulary, model_max_length=_MAX_LENGTH).save_pretrained(path)
        return str(path)

    def flops(self, lengths: list[int]) -> float:
        """Return the floating-point operations of all matrix products for texts of these lengths.

        A transformer layer needs 12 * hidden_size**2 multiplications for each token, and its
        attention needs 2 * hidden_size multiplications for each pair of tokens of a text. A
        multiplication and the addition of its result are two operations.
        """
        linear = 2 * 12 * self.hidden_size**2 * sum(lengths)
        attention = 2 * 2 * self.hidden_size * sum(length**2 for length in lengths)
        return float(self.num_layers * (linear + attention))


def random_lengths(count: int, distribution: str) -> list[int]:
    """Return `count` numbers from 8 to 512.

    With the distribution "uniform", all numbers are equally likely. With "log", small numbers are
    more likely: the logarithm of the number is distributed uniformly.
    """
    rng = random.Random(0)
    if distribution == "uniform":
        return [rng.randint(_MIN_LENGTH, _MAX_LENGTH) for _ in range(count)]
    ratio = _MAX_LENGTH / _MIN_LENGTH
    return [round(_MIN_LENGTH * ratio ** rng.random()) for _ in range(count)]


def random_texts(lengths: list[int]) -> list[str]:
    """Return texts for the embedder. Each length includes the two special tokens of the text."""
    rng = random.Random(1)
    return [_random_words(rng, length - 2) for length in lengths]


def random_pairs(lengths: list[int]) -> list[tuple[str, str]]:
    """Return pairs for the reranker. Each length includes the three special tokens of the pair."""
    rng = random.Random(2)
    pairs = []
    for length in lengths:
        query_length = min(8, length - 4)
        query = _random_words(rng, query_length)
        pairs.append((query, _random_words(rng, length - 3 - query_length)))
    return pairs


def _random_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))
