# SPDX-License-Identifier: Apache-2.0
"""Divides the token budget of a step among the clients.

The budget is the largest number of tokens in one step. Example: the budget is 512, and two clients
have long prompts. Each client may compute 256 tokens of its prompts in the step, so the prompts of
one client do not delay the prompts of the other client.
"""

from collections import Counter
from collections.abc import Iterable

from nereid_backend.core.queues.fair_queue import fair_shares
from nereid_backend.core.sequence import Sequence


class PrefillShares:
    """The number of prompt tokens that the current step may still compute for each client.

    If fewer than two clients have uncomputed prompts, there are no shares and therefore no limits.
    """

    def __init__(self) -> None:
        self._remaining: dict[str, int] | None = None  # by client; None if there are no shares

    def clear(self) -> None:
        """Remove the token limits of all clients."""
        self._remaining = None

    def divide(self, budget: int, sequences: Iterable[Sequence]) -> None:
        """Divide a token budget among the clients whose prompts must still be computed.

        The demand of a client is its number of uncomputed tokens in `sequences`. A client whose
        demand is smaller than its share gets only its demand. If fewer than two clients have
        uncomputed prompts, no client has a share, and `take` allows any number of tokens.
        """
        demands: Counter[str] = Counter()
        weights: dict[str, float] = {}
        for sequence in sequences:
            num_uncomputed = len(sequence.token_ids) - sequence.num_computed_tokens
            # A sequence with one uncomputed token needs no part of the divided budget, because
            # `take` always allows one token. The uncomputed token is the last sampled token of a
            # running sequence or the last token of a prompt.
            if num_uncomputed > 1:
                params = sequence.params
                demands[params.client_id] += num_uncomputed
                weights[params.client_id] = params.client_weight
        self._remaining = fair_shares(demands, weights, budget) if len(demands) > 1 else None

    def take(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens a sequence may compute in this step.

        If the budget was divided, the tokens are subtracted from the share of the sequence's
        client. One token is always allowed. Example: the share of the client is 100. The calls with
        80 and 80 tokens return 80 and 20, and a third call returns 1.
        """
        # A single token does not reduce the share, because the planner has already reserved one
        # token of the budget for each running sequence.
        if self._remaining is None or num_tokens <= 1:
            return num_tokens
        client = sequence.params.client_id
        # If the client has no share yet, this call creates a share of `num_tokens` tokens.
        share = self._remaining.get(client, num_tokens)
        num_allowed = min(num_tokens, max(1, share))
        self._remaining[client] = max(0, share - num_allowed)
        return num_allowed
