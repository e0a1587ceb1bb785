# SPDX-License-Identifier: Apache-2.0
"""Computes token masks of a grammar in a trial (trial_process.py), to find slow grammars.

A small EBNF grammar can compile at once although xgrammar needs exponential time or memory for a
token mask. Such a grammar would stop the steps of all requests. In a trial, the limits of time and
memory end the child process, and the grammar is refused.
"""

from collections.abc import Sequence

import numpy as np

from nereid_backend.grammar.backend_interface import Compiled
from nereid_backend.grammar.vocabulary import mask_width

_NUM_TOKENS = 32


def try_first_masks(compiled: Compiled, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Compute the token masks for the first 32 tokens of a test answer, and discard the answer.

    The caller limits the time and the memory. A grammar whose masks need more is refused, so that
    the engine never computes masks with this grammar. The test answer consists of the first allowed
    token at each position.

    Args:
        compiled: the grammar.
        vocab_size: the number of tokens in the vocabulary.
        eos_token_ids: the checkpoint's stop tokens. The answer contains none of them, because a
            stop token would end the answer.
    """
    matcher = compiled.matcher()
    mask = np.zeros(mask_width(vocab_size), np.int32)
    for _ in range(_NUM_TOKENS):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        possible = np.setdiff1d(allowed, eos_token_ids)
        if not possible.size:
            return  # The grammar allows no further token.
        is_accepted = matcher.accept(int(possible[0]))
        if not is_accepted:
            return
