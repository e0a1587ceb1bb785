# SPDX-License-Identifier: Apache-2.0
"""The sampling positions of a step, including the positions that verify draft tokens.

The model computes the last known token of a sequence together with k draft tokens. The forward pass
returns the logits after each of these k + 1 tokens. A token is sampled at each of these positions,
as if the earlier draft tokens were output tokens. Each position has its own random number. The
first sampled token that differs from its draft token replaces the draft token. The tokens that were
sampled at later positions are discarded.

This is rejection sampling in which the draft token is proposed with probability 1. A draft token d
is accepted with the probability p(d), where p is the distribution after the sampling parameters are
applied. If d is rejected, the sampled token has the distribution p without d, renormalised. The
random numbers are the same as without draft tokens, so the sampled tokens are the same, too.
Source: Leviathan et al., arXiv:2211.17192.
"""

from typing import NamedTuple

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan


class Position(NamedTuple):
    """A position in a sequence at which a token is sampled. Known and draft tokens precede it.

    Attributes:
        sequence: the sequence, which contains the known tokens.
        drafts: the draft tokens between the known tokens and this position.
    """

    sequence: Sequence
    drafts: list[int]

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens before this position, including draft tokens."""
        return self.sequence.num_output_tokens + len(self.drafts)

    def last_tokens(self, count: int) -> list[int]:
        """Return the last `count` tokens before this position, including draft tokens.

        `count` must be at least 1. Example: the known tokens are [4, 5], and the draft tokens are
        [8]. The last 2 tokens are [5, 8].
        """
        # Only the last known tokens are copied, because a sequence may be long.
        return (self.sequence.token_ids[-count:] + self.drafts)[-count:]


class Sampling(NamedTuple):
    """The positions of a step at which tokens are sampled.

    Attributes:
        positions: the positions in the order of the plan's chunks. The positions of one sequence
            are ordered from left to right.
        rows: for each position, the index of its row in the step's logits.
        counts: the number of positions of each chunk. Chunks without positions are omitted.
    """

    positions: list[Position]
    rows: list[int]
    counts: list[int]


def sampling_of(plan: StepPlan) -> Sampling:
    """Return the positions at which tokens are sampled in the step that `plan` describes.

    A chunk contains the tokens of one sequence. If a prompt is divided into chunks, only its last
    chunk samples a token. A chunk with k draft tokens (guesses for the next tokens) has k + 1
    positions: one in place of each draft token, and one after the last draft token. A position
    consists of the sequence and the draft tokens before the position.

    Example: the first chunk has 1 row of logits and no draft tokens. The second chunk has 3 rows of
    logits and the draft tokens [8, 9]. The result has 4 positions. Their draft tokens are [], [],
    [8] and [8, 9]. `rows` is [0, 1, 2, 3], and `counts` is [1, 3].
    """
    positions: list[Position] = []
    rows: list[int] = []
    counts: list[int] = []
    end_row = 0  # the index after the last row of logits of the current chunk
    for chunk in plan.chunks:
        end_row += chunk.num_logits
        if not chunk.samples:
            continue
        sequence = chunk.sequence
        drafts = sequence.draft_token_ids
        num_positions = len(drafts) + 1
        if drafts:
            positions += [Position(sequence, drafts[:number]) for number in range(num_positions)]
        else:
            # Most sequences have no drafts. For such a sequence, a call of `append` is faster than
            # the creation of a list with one position.
            positions.append(Position(sequence, drafts))
        # The last rows of logits belong to the positions at which tokens are sampled. The earlier
        # rows belong to prompt tokens, whose log-probabilities are reported.
        rows += range(end_row - num_positions, end_row)
        counts.append(num_positions)
    return Sampling(positions, rows, counts)
