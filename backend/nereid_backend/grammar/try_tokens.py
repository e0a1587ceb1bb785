# SPDX-License-Identifier: Apache-2.0
"""Computes the first tokens of an answer in a trial (trial_process.py), as the engine would.

A small EBNF grammar can compile at once although xgrammar needs exponential time or memory for a
token mask. Such a grammar would stop the steps of all requests. In a trial, the limits of time and
memory end the child process, and the grammar is refused.
"""

from collections.abc import Sequence

import numpy as np

from nereid_backend.grammar.backend_interface import Compiled
from nereid_backend.grammar.vocabulary import mask_width

_NUM_TOKENS = 32


def try_first_tokens(compiled: Compiled, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Begin an answer with tokens that the grammar allows, and compute the masks of these tokens.

    Args:
        compiled: the grammar.
        vocab_size: the number of tokens in the vocabulary.
        eos_token_ids: the checkpoint's stop tokens, which would end the answer.
    """
    matcher = compiled.matcher()
    mask = np.zeros(mask_width(vocab_size), np.int32)
    for _ in range(_NUM_TOKENS):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = np.setdiff1d(allowed, eos_token_ids)
        if not allowed.size or not matcher.accept(int(allowed[0])):
            return
