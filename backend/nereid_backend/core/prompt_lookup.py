# SPDX-License-Identifier: Apache-2.0
"""Guesses a sequence's next tokens from its own text, without a second model (prompt lookup).

Where the last few tokens stand earlier in the sequence, what followed them there may follow again:
answers quote their prompt, and code repeats itself.

Source: prompt lookup decoding (Saxena 2023); its verification is speculative decoding's (Leviathan
et al. 2023, arXiv:2211.17192).
"""

from nereid_backend.core.request import Request

# So many last tokens must have stood there before.
_NGRAM = 3
# Acceptance is a mean that forgets; below the threshold a request only tries now and then.
_FORGETTING = 0.2
_THRESHOLD = 0.3
_RETRY_STEPS = 32


class _Index:
    """Where each run of tokens of one sequence was seen last.

    Attributes:
        ends: n-gram -> the index behind its last occurrence that something follows.
        num_indexed: so many of the sequence's n-grams are in ends.
        acceptance: share of guesses that turned out right, recent ones first.
        pause: steps until the next try.
    """

    __slots__ = ("acceptance", "ends", "num_indexed", "pause")

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0
        self.acceptance = 1.0
        self.pause = 0


class PromptLookup:
    """Proposes tokens for requests and remembers how good that was.

    Attributes:
        num_proposed: tokens guessed so far, over all requests.
        num_accepted: those of them that were right.
    """

    def __init__(self, num_tokens: int) -> None:
        """Propose at most so many tokens a step for each request."""
        self.num_proposed = 0
        self.num_accepted = 0
        self._num_tokens = num_tokens
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request, limit: int) -> list[int]:
        """Tokens that may follow a request's last one; empty where nothing suggests any.

        Costs time for the tokens that came since the last call, and a dictionary lookup.
        """
        limit = min(limit, self._num_tokens)
        if limit <= 0 or len(request.token_ids) <= _NGRAM:
            return []
        index = self._indices.setdefault(request, _Index())
        if index.pause > 0:
            index.pause -= 1
            return []
        tokens = request.token_ids
        for end in range(index.num_indexed + _NGRAM, len(tokens)):
            index.ends[tuple(tokens[end - _NGRAM : end])] = end
        index.num_indexed = len(tokens) - _NGRAM
        found = index.ends.get(tuple(tokens[-_NGRAM:]))
        if found is None:
            return []
        # Text that repeats itself is taken to go on so: behind its end comes its beginning.
        period = tokens[found : found + limit]
        return (period * (limit // len(period) + 1))[:limit]

    def learn(self, request: Request, num_proposed: int, num_right: int) -> None:
        """Take in how many of a request's guesses were right."""
        self.num_proposed += num_proposed
        self.num_accepted += num_right
        index = self._indices.get(request)
        if index is None:
            return
        share = num_right / num_proposed
        index.acceptance += _FORGETTING * (share - index.acceptance)
        if index.acceptance < _THRESHOLD:
            index.pause = _RETRY_STEPS

    def forget(self, request: Request) -> None:
        """Drop what is remembered of a request that ended."""
        self._indices.pop(request, None)
