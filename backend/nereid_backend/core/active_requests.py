# SPDX-License-Identifier: Apache-2.0
"""The requests that were accepted and have not ended, and the queue of their waiting sequences.

If a request has several sequences, the first one (the leader) computes the prompt. Meanwhile, the
other sequences (the followers) are not in the queue. When the prompt is computed, the followers
enter the queue and wait for rows of their own. If the grammar of a request is still being compiled,
no sequence of the request is in the queue.
"""

from nereid_backend.core.adapter import Adapter
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.queues.fair_queue import FairQueue
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence


class ActiveRequests:
    """All requests that have not ended, by id.

    Attributes:
        waiting: the queue of sequences that wait for a row. Clients take turns.
        num_sequences: the number of waiting and running sequences of all requests.
    """

    def __init__(self, tables: BlockTables, *, shares_prompts: bool) -> None:
        """Create an object without requests.

        Args:
            tables: the block tables. They keep the blocks of a computed prompt for the followers.
            shares_prompts: whether one sequence computes the prompt for all sequences of a
                request. If False, every sequence computes the prompt itself.
        """
        self.waiting = FairQueue()
        self.num_sequences = 0
        self._tables = tables
        self._shares_prompts = shares_prompts
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        """Return whether `request_id` is the id of an added request that has not ended."""
        return request_id in self._requests

    def of(self, sequence: Sequence) -> Request:
        """Return the request of a sequence. The sequence must not have ended."""
        return self._requests[sequence.request_id]

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that have not ended.

        The list is empty if no request has the id `request_id`.
        """
        request = self._requests.get(request_id)
        return [] if request is None else list(request.sequences.values())

    def adapters(self) -> set[Adapter]:
        """Return the LoRA adapters of all requests that have not ended."""
        sequences = (s for request in self._requests.values() for s in request.sequences.values())
        return {sequence.adapter for sequence in sequences if sequence.adapter is not None}

    def is_preparing(self, request_id: str) -> bool:
        """Return whether the grammar of a request is still being compiled."""
        request = self._requests.get(request_id)
        return request is not None and not request.is_prepared

    def add(self, sequences: list[Sequence], *, is_prepared: bool) -> None:
        """Add all sequences of a new request to the requests that have not ended.

        The caller must set the rank of each sequence before the call.

        Args:
            sequences: all sequences of one request.
            is_prepared: False if the sequences must stay out of the queue until `start` is called.
        """
        self.num_sequences += len(sequences)
        self.waiting.enter(sequences[0], len(sequences))
        request = self._requests[sequences[0].request_id] = Request(sequences)
        request.is_prepared = is_prepared
        if is_prepared:
            self._enqueue(request)

    def start(self, request_id: str, guide: Guide | None) -> None:
        """Attach a guide to a request and put the request into the waiting queue.

        Do nothing if the request has ended.

        Args:
            request_id: a request that was added with is_prepared=False.
            guide: the guide of the first sequence; None if the request has no grammar. Every other
                sequence gets a fork of `guide`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_prepared = True
        leader, *others = request.sequences.values()
        for other in others:
            other.guide = None if guide is None else guide.fork()
        leader.guide = guide
        self._enqueue(request)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence from the waiting queue, because it was given a place in the batch."""
        request = self.of(sequence)
        if sequence in request.followers:
            self._remove_follower(request, sequence)
        self.waiting.remove(sequence)

    def share_prompt(self, sequence: Sequence) -> None:
        """Queue the other sequences of a request after one sequence has computed the shared prompt.

        `sequence` is the sequence that has computed the prompt. Example: sequence 0 of a request
        with n=3 has computed the prompt. The sequences 1 and 2 enter the queue, and the request
        keeps the blocks of the prompt for these two sequences.
        """
        request = self.of(sequence)
        if request.followers and not request.is_split:
            self._tables.hold_prompt(request, sequence)
            self._split(request)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence from the sequences of its request.

        One sequence of a request, the leader, computes the prompt for the other sequences, the
        followers. If the leader ends before that, the next follower becomes the leader.
        """
        self.num_sequences -= 1
        request = self.of(sequence)
        if _is_queued(request, sequence):
            self.waiting.remove(sequence)
        self.waiting.leave(sequence)
        del request.sequences[sequence.index]
        if not request.sequences:
            del self._requests[sequence.request_id]
        if sequence in request.followers:
            self._remove_follower(request, sequence)
        elif request.followers and request.is_prepared and not request.is_split:
            # The leader ended before it computed the prompt. If the grammar of the request is still
            # being compiled, `_enqueue` selects the new leader later.
            new_leader = request.followers.pop(0)
            self.waiting.add(new_leader)

    def check(self, num_running: int) -> None:
        """Raise an AssertionError if a sequence of an accepted request was lost.

        Every sequence either runs, waits in the queue, or is held back until its prompt or its
        grammar is ready.

        Args:
            num_running: the number of running sequences.

        Raises:
            AssertionError: if a sequence was lost.
        """
        requests = self._requests.values()
        assert self.num_sequences == sum(len(request.sequences) for request in requests)
        num_waiting = len(self.waiting) + sum(map(_num_held_back, requests))
        assert self.num_sequences == num_running + num_waiting
        assert all(r.row is None and not any(r.block_tables) for r in self.waiting)

    def _enqueue(self, request: Request) -> None:
        """Put the first sequence of a request, which computes the prompt, into the waiting queue.

        If sequences do not share prompts, put the followers into the queue, too.
        """
        leader, *request.followers = request.sequences.values()
        self.waiting.add(leader)
        if not self._shares_prompts:
            self._split(request)

    def _split(self, request: Request) -> None:
        """Put the sequences that waited for the shared prompt into the waiting queue."""
        request.is_split = True
        for follower in request.followers:
            self.waiting.add(follower)

    def _remove_follower(self, request: Request, sequence: Sequence) -> None:
        """Remove a sequence from the followers of its request.

        If no follower is left, release the blocks of the prompt.
        """
        request.followers.remove(sequence)
        if not request.followers:
            self._tables.drop_prompt(request)


def _is_queued(request: Request, sequence: Sequence) -> bool:
    """Return whether a sequence of a request is in the waiting queue."""
    if sequence.row is not None or not request.is_prepared:
        return False
    return request.is_split or sequence not in request.followers


def _num_held_back(request: Request) -> int:
    """Return how many sequences of a request are neither running nor in the waiting queue."""
    if not request.is_prepared:
        return len(request.sequences)
    return 0 if request.is_split else len(request.followers)
