# SPDX-License-Identifier: Apache-2.0
"""Creates short random texts for testing the methods that compute batches of texts.

The module also compares the vectors of these texts.
"""

import random

import torch
from torch import Tensor

from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.loading.load_encoder import Encoder

# A method of computing a batch counts as exact if the relative errors of its outputs (see
# `row_errors`) do not exceed `TOLERANCE`. The expected outputs are the outputs of the same texts
# computed one by one. Each data type has its own limit.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# If a model's code does not support a method or an input, the code raises one of these errors.
MODEL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)
# The number of tokens in each text that is used to test the methods.
_SELF_CHECK_LENS = (5, 5, 13, 21)
# Test texts consist of random tokens from the tokenizer's vocabulary. If the vocabulary has fewer
# than `_MIN_TEST_IDS` tokens, the texts may also contain the other token ids below `_MIN_TEST_IDS`
# that the model accepts.
_MIN_TEST_IDS = 8
# The smallest divisor of a relative error. It prevents a division by zero if all numbers are 0.
_MIN_SCALE = 1e-12


def self_check_lens(max_len: int) -> tuple[int, ...]:
    """Return the length of each test text in tokens. No length exceeds `max_len`."""
    return tuple(min(length, max_len) for length in _SELF_CHECK_LENS)


def random_batch(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Return a batch of texts that consist of random tokens.

    `lens` contains the length of each text. The texts contain no special tokens, except that the
    texts of an encoder-decoder model end with the end-of-sequence token. The texts are the same in
    each call, so that the self-check always has the same result.
    """
    plain_ids = _plain_token_ids(encoder)
    rng = random.Random(0)
    texts = [[rng.choice(plain_ids) for _ in range(length)] for length in lens]
    config = encoder.model.config
    eos_id = getattr(config.get_text_config(), "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(eos_id, int):
        # In an encoder-decoder model, such as BART, a classification head reads the vector of the
        # end-of-sequence token.
        texts = [[*text[:-1], eos_id] for text in texts]
    types: list[list[int] | None] = [None] * len(lens)
    num_types = getattr(config, "type_vocab_size", None) or 0
    if num_types > 1 and "token_type_ids" in encoder.tokenizer.model_input_names:
        # A type id tells the model to which text of a pair a token belongs. Each test text contains
        # both type ids. Otherwise, a method that confuses the two type ids could pass the test.
        types = [[0] * (length // 2) + [1] * (length - length // 2) for length in lens]
    return TokenBatch.of(texts, types, encoder.device)


def _plain_token_ids(encoder: Encoder) -> list[int]:
    """Return the token ids from which random texts are built.

    The result contains the ids of ordinary tokens, or all ids if there are no ordinary tokens.
    """
    # Prefer token ids in the tokenizer's vocabulary, because the embeddings of other ids are often
    # untrained. If the vocabulary is very small, use some of the other ids, too: texts with only a
    # few distinct tokens would not reveal errors.
    size = min(encoder.vocab_size, max(_MIN_TEST_IDS, len(encoder.tokenizer)))
    special_ids = _special_ids(encoder)
    # Leave out the first eighth of the token ids, because in many vocabularies it contains special,
    # reserved and single-byte tokens.
    plain_ids = [token_id for token_id in range(size // 8, size) if token_id not in special_ids]
    return plain_ids or list(range(size))


def _special_ids(encoder: Encoder) -> set[int]:
    """Return the ids of the special tokens in the tokenizer and in the config."""
    special_ids = set(encoder.tokenizer.all_special_ids)
    for config in (encoder.model.config, encoder.model.config.get_text_config()):
        for key, value in config.to_dict().items():
            if key.endswith("token_id") and isinstance(value, int):
                special_ids.add(value)
    return special_ids


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest of the relative errors that `row_errors` computes."""
    return row_errors(actual, expected).max().item()


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return each row's relative error: RMS(actual row - expected row) / RMS(all expected rows).

    RMS is the root mean square. The divisor covers all rows of `expected`. Example: expected
    [[1, 1], [1, 1]] and actual [[1, 1], [1.1, 1.1]] return [0, 0.1].

    Shapes: actual and expected [num_rows, size]; returns [num_rows].
    """
    errors = (actual.float() - expected.float()).square().mean(-1).sqrt()
    scale = expected.float().square().mean().sqrt()
    return errors / scale.clamp(min=_MIN_SCALE)
