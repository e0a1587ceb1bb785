"""Prompts of random tokens. The programs of all compared engines import this module."""

from random import Random

# The first token ids of the models are special tokens: padding, begin and end of a sequence.
_NUM_SPECIAL_TOKENS = 3


def random_prompt(rng: Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` random token ids without special tokens."""
    return [rng.randrange(_NUM_SPECIAL_TOKENS, vocab_size) for _ in range(num_tokens)]
