# SPDX-License-Identifier: Apache-2.0
"""The state of a request in the scheduler. A request has one or more sequences."""

from collections import abc

from nereid_backend.core.sequence import Sequence


class Request:
    """The n sequences of one request.

    The first sequence (the leader) computes the prompt. Until then, the other sequences (the
    followers) are not in the queue of the scheduler. When the prompt is computed, the followers
    enter the queue and wait for rows. The request keeps the blocks of the prompt for the followers.

    Attributes:
        sequences: maps the index of a sequence to the sequence. Ended sequences are removed.
        followers: the sequences that have not had a row yet, except the leader.
        has_queued_followers: whether the followers have entered the queue.
        is_prepared: False while the grammar of the request is being compiled.
        block_tables: one block table for each group of layers (window.py), with the blocks of the
            prompt. The request keeps these blocks until every follower has a row.
    """

    def __init__(self, sequences: abc.Sequence[Sequence]) -> None:
        self.sequences = {sequence.index: sequence for sequence in sequences}
        self.followers = list(sequences[1:])
        self.has_queued_followers = False
        self.is_prepared = True
        self.block_tables: list[list[int]] = []

    @property
    def waits_for_prompt(self) -> bool:
        """Whether sequences of this request wait until another sequence has computed the prompt."""
        return self.is_prepared and bool(self.followers) and not self.has_queued_followers
