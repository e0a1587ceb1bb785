# SPDX-License-Identifier: Apache-2.0
"""The state of a request in the scheduler. A request consists of one or several sequences."""

from collections import abc

from nereid_backend.core.sequence import Sequence


class Request:
    """The n sequences that are generated for the prompt of one client request.

    One sequence, the leader, computes the prompt. Meanwhile, the other sequences, the followers,
    stay out of the scheduler's queue. When the prompt is computed, the request is split: the
    followers enter the queue and wait for rows of their own, and the request keeps the blocks of
    the prompt for them.

    Attributes:
        sequences: a mapping from indices to the sequences that have not ended.
        followers: the sequences that have not had a row yet, except the leader.
        is_split: whether the followers are in the queue and wait for rows.
        is_prepared: False while the grammar of the request is being compiled.
        block_tables: the blocks of the prompt, in one block table for each group of layers
            (window.py). The request keeps these blocks until the last follower has a row.
    """

    def __init__(self, sequences: abc.Sequence[Sequence]) -> None:
        self.sequences = {sequence.index: sequence for sequence in sequences}
        self.followers = list(sequences[1:])
        self.is_split = False
        self.is_prepared = True
        self.block_tables: list[list[int]] = []
