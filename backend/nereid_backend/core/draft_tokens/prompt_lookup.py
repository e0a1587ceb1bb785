# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup decoding, which takes draft tokens from a sequence's own text.

No second model is needed. If the last tokens of a sequence also occur earlier in the sequence, the
tokens that follow the earlier occurrence are proposed as draft tokens. Example with n-grams of 3
tokens: after "a b c d e a b c" the draft is "d e". Answers often quote the prompt, and code often
repeats itself.

Source: prompt lookup decoding (Saxena 2023). The drafts are verified as in speculative decoding
(Leviathan et al. 2023, arXiv:2211.17192).
"""

from collections import abc
from dataclasses import dataclass, field

from nereid_backend.core.draft_tokens.draft_lengths import DraftLengths
from nereid_backend.core.sequence import Sequence

# The length of an n-gram in tokens. The last n-gram of a sequence is searched among the earlier
# n-grams of the same sequence.
_NGRAM = 3


@dataclass(slots=True)
class _Index:
    """The positions at which the n-grams of one sequence end.

    Attributes:
        ends: a mapping from each n-gram to the index of the token that follows the last occurrence
            of the n-gram.
        num_indexed: the number of the sequence's n-grams that are in `ends`.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def add(self, tokens: list[int]) -> None:
        """Index the n-grams that are new since the last call, except the last n-gram.

        No token follows the n-gram at the end yet.
        """
        for end in range(self.num_indexed + _NGRAM, len(tokens)):
            self.ends[tuple(tokens[end - _NGRAM : end])] = end
        self.num_indexed = len(tokens) - _NGRAM


class PromptLookup:
    """Proposes draft tokens from the earlier text of a sequence; see `Drafter`."""

    def __init__(self, num_tokens: int) -> None:
        """Create an object without sequences.

        Args:
            num_tokens: the largest number of draft tokens for one sequence in one step.
        """
        self.lengths = DraftLengths(num_tokens)
        self._indices: dict[Sequence, _Index] = {}

    def prepare(self, sequences: abc.Sequence[Sequence]) -> None:
        """Prepare the next step; see `Drafter.prepare`."""
        self.lengths.begin_step(len(sequences))

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return draft tokens that may follow the last token of a sequence.

        The list is empty if the last tokens of the sequence do not occur earlier in the sequence.

        The call also indexes the tokens that the sequence got since the previous call. Example: the
        tokens of the sequence are [1, 2, 3, 4, 5, 1, 2, 3]. The last three tokens also occur at the
        start, followed by 4 and 5. With limit=2, the result is [4, 5].

        Args:
            sequence: the sequence.
            limit: the largest number of draft tokens.
        """
        limit = min(limit, self.lengths.next_length(sequence))
        if limit <= 0 or len(sequence.token_ids) <= _NGRAM:
            return []
        index = self._indices.setdefault(sequence, _Index())
        tokens = sequence.token_ids
        index.add(tokens)
        continuation = index.ends.get(tuple(tokens[-_NGRAM:]))
        if continuation is None:
            return []
        # If the earlier n-gram is so near the end that fewer than `limit` tokens follow it, the
        # sequence probably repeats those tokens, so the draft repeats them, too. Example: for the
        # tokens 1 2 1 2 1 2 and limit=5, the n-gram 2 1 2 is followed by 1 2, so the draft is 1 2 1
        # 2 1.
        period = tokens[continuation : continuation + limit]
        return (period * (limit // len(period) + 1))[:limit]

    def forget(self, sequence: Sequence) -> None:
        """Delete the index of an ended sequence."""
        self._indices.pop(sequence, None)
        self.lengths.forget(sequence)
