# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup decoding: proposes draft tokens from a sequence's own text, without a second model.

If the last tokens of a sequence occur earlier in it, the tokens that followed them there are
proposed as draft tokens. Example with n-grams of 3 tokens: after "a b c d e a b c" the draft is
"d e". Answers often quote their prompt, and code repeats itself.

Source: prompt lookup decoding (Saxena 2023). The drafts are verified as in speculative decoding
(Leviathan et al. 2023, arXiv:2211.17192).
"""

from nereid_backend.core.request import Request

# The number of last tokens that must occur earlier in the sequence.
_NGRAM = 3
# The acceptance rate is an exponential moving average with the weight _FORGETTING for the newest
# draft. Below _THRESHOLD, a sequence proposes drafts only once in _RETRY_STEPS steps.
_FORGETTING = 0.2
_THRESHOLD = 0.3
_RETRY_STEPS = 32


class _Index:
    """The positions of the n-grams of one sequence.

    Attributes:
        ends: for each n-gram, the index of the token that follows its last occurrence.
        num_indexed: the number of the sequence's n-grams that are in `ends`.
        acceptance: the moving average of the share of accepted draft tokens.
        pause: the number of steps until the next proposal.
    """

    __slots__ = ("acceptance", "ends", "num_indexed", "pause")

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0
        self.acceptance = 1.0
        self.pause = 0


class PromptLookup:
    """Proposes draft tokens and tracks how many of them are accepted.

    Attributes:
        num_proposed: the number of draft tokens proposed so far, over all sequences.
        num_accepted: how many of them were accepted.
    """

    def __init__(self, num_tokens: int) -> None:
        """Create a proposer of at most `num_tokens` draft tokens for each sequence and step."""
        self.num_proposed = 0
        self.num_accepted = 0
        self._num_tokens = num_tokens
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request, limit: int) -> list[int]:
        """Return draft tokens to follow a sequence's last token, or an empty list.

        The call indexes the tokens that were added since the previous call.

        Args:
            request: the sequence.
            limit: the largest number of draft tokens.
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
        continuation = index.ends.get(tuple(tokens[-_NGRAM:]))
        if continuation is None:
            return []
        # If the continuation is shorter than the limit, the text is assumed to be periodic.
        period = tokens[continuation : continuation + limit]
        return (period * (limit // len(period) + 1))[:limit]

    def learn(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        """Record how many of a sequence's proposed draft tokens were accepted."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        index = self._indices.get(request)
        if index is None:
            return
        share = num_accepted / num_proposed
        index.acceptance += _FORGETTING * (share - index.acceptance)
        if index.acceptance < _THRESHOLD:
            index.pause = _RETRY_STEPS

    def forget(self, request: Request) -> None:
        """Delete the index of a sequence that ended."""
        self._indices.pop(request, None)
