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
from itertools import cycle, islice
from weakref import WeakValueDictionary

from nereid_backend.core.draft_tokens.draft_lengths import DraftLengths
from nereid_backend.core.sequence import Sequence

# The number of tokens in an n-gram. The last n-gram of a sequence is compared with the earlier
# n-grams of the sequence.
_NGRAM = 3


@dataclass(slots=True, weakref_slot=True)
class _Index:
    """A lookup table of the n-grams that occur in one sequence, or in the prompt of a request.

    Attributes:
        ends: maps an n-gram to the end of its last occurrence, which is the index of the token that
            follows the n-gram.
        num_indexed: the number of n-grams that were added to this index or to `prompt_index`.
        prompt_index: the index of the prompt, which all sequences of a request share; None if this
            object is the index of a prompt.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    prompt_index: "_Index | None" = None

    def add(self, tokens: list[int]) -> None:
        """Add the new n-grams of a sequence to the index.

        The n-gram at the end of the sequence is not added, because no token follows it yet.
        """
        for end in range(self.num_indexed + _NGRAM, len(tokens)):
            self.ends[tuple(tokens[end - _NGRAM : end])] = end
        self.num_indexed = max(0, len(tokens) - _NGRAM)

    def find(self, ngram: tuple[int, ...]) -> int | None:
        """Return the end of the last occurrence of an n-gram; None if there is no occurrence."""
        end = self.ends.get(ngram)
        if end is None and self.prompt_index is not None:
            return self.prompt_index.ends.get(ngram)
        return end


class PromptLookup:
    """Proposes draft tokens from the earlier text of a sequence; see `Drafter`."""

    def __init__(self, num_tokens: int, *, accepts_images: bool = True) -> None:
        """Create an object without sequences.

        Args:
            num_tokens: the largest number of draft tokens for one sequence in one step.
            accepts_images: whether sequences with images get draft tokens. False if their forward
                path cannot verify draft tokens.
        """
        self.lengths = DraftLengths(num_tokens)
        self._accepts_images = accepts_images
        self._indices: dict[Sequence, _Index] = {}
        # Maps a request id to the index of the prompt. All sequences of a request share this index.
        # If a prompt has 128,000 tokens, 64 separate indices would need 1 GB of memory, and the
        # step that creates them would take 11 s.
        self._prompt_indices: WeakValueDictionary[str, _Index] = WeakValueDictionary()

    def prepare(self, sequences: abc.Sequence[Sequence]) -> None:
        """Prepare the next step; see `Drafter.prepare`."""
        self.lengths.begin_step(len(sequences))

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Predict the next tokens of a sequence. Return at most `limit` draft tokens.

        The list is empty if the last tokens of the sequence do not occur earlier in the sequence.

        Example: the tokens of the sequence are [1, 2, 3, 4, 5, 1, 2, 3]. The last three tokens also
        occur at the start, where the tokens 4 and 5 follow. With limit=2, the result is [4, 5].

        If only a few tokens follow the earlier occurrence, they are repeated. Example: the tokens
        are [1, 2, 1, 2, 1, 2]. Only the tokens [1, 2] follow the first occurrence of [2, 1, 2]. The
        result with limit=5 is [1, 2, 1, 2, 1].

        Mutates: the index of the sequence's n-grams, to which the new n-grams are added.
        """
        if sequence.images is not None and not self._accepts_images:
            return []
        # `take_length` limits the draft to a length that probably saves time.
        num_drafts = min(limit, self.lengths.take_length(sequence))
        token_ids = sequence.token_ids
        if num_drafts <= 0 or len(token_ids) <= _NGRAM:
            return []
        index = self._index_of(sequence)
        index.add(token_ids)
        # `start` is the index of the token after the earlier n-gram.
        start = index.find(tuple(token_ids[-_NGRAM:]))
        if start is None:
            return []
        following_tokens = token_ids[start : start + num_drafts]
        # If the earlier n-gram is close to the end of the sequence, `following_tokens` has fewer
        # than `num_drafts` tokens. In this case, the sequence is probably a repetition of these
        # tokens. Therefore, the draft repeats them until it has `num_drafts` tokens.
        return list(islice(cycle(following_tokens), num_drafts))

    def _index_of(self, sequence: Sequence) -> _Index:
        """Return the index of a sequence. If no index exists, create and store one.

        The index of the sequence contains only the n-grams that the index of the prompt lacks.
        """
        index = self._indices.get(sequence)
        if index is None:
            prompt_index = self._index_of_prompt(sequence)
            index = _Index(num_indexed=prompt_index.num_indexed, prompt_index=prompt_index)
            self._indices[sequence] = index
        return index

    def _index_of_prompt(self, sequence: Sequence) -> _Index:
        """Return the index of a sequence's prompt, which all sequences of the request share.

        If no index exists, create and store one.
        """
        prompt_index = self._prompt_indices.get(sequence.request_id)
        if prompt_index is None:
            prompt_index = _Index()
            prompt_index.add(sequence.token_ids[: sequence.num_prompt_tokens])
            self._prompt_indices[sequence.request_id] = prompt_index
        return prompt_index

    def forget(self, sequence: Sequence) -> None:
        """Delete the index of an ended sequence."""
        self._indices.pop(sequence, None)
        self.lengths.forget(sequence)
