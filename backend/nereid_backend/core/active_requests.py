# SPDX-License-Identifier: Apache-2.0
"""The requests that have not ended, and the queue of their waiting sequences.

If a request has several sequences, the first sequence (the leader) computes the prompt. Until then,
the other sequences (the followers) are not in the queue. When the prompt is computed, the followers
enter the queue and wait for rows. While the grammar of a request is being compiled, no sequence of
the request is in the queue.
"""

from nereid_backend.core.adapter import Adapter
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.queues.fair_queue import FairQueue
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence


class ActiveRequests:
    """All requests that have not ended.

    Attributes:
        waiting: the queue of sequences that wait for a row. In this queue, clients take turns.
        num_sequences: the number of waiting and running sequences of all requests.
    """

    def __init__(self, tables: BlockTables, *, shares_prompts: bool) -> None:
        """Create an object without requests.

        Args:
            tables: the block tables of all sequences.
            shares_prompts: whether one sequence computes the prompt for all sequences of a request.
                If False, every sequence computes the prompt itself.
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
        """Return whether a request with this id was added and has not ended."""
        return request_id in self._requests

    def of(self, sequence: Sequence) -> Request:
        """Return the request that a sequence belongs to. The sequence must not have ended."""
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
        """Add a new request. If the request is prepared, put it into the waiting queue.

        The caller must set the rank of each sequence before the call, because the queue is sorted
        by rank: the sequence with the lowest rank starts first.

        Args:
            sequences: all sequences of the request.
            is_prepared: False while the grammar of the request is being compiled. The request then
                enters the queue when `start` is called.
        """
        first_sequence = sequences[0]
        request = Request(sequences)
        request.is_prepared = is_prepared
        self._requests[first_sequence.request_id] = request
        self.num_sequences += len(sequences)
        # Register the new sequences before one of them enters the queue, because the queue divides
        # the computing time among the clients with registered sequences.
        self.waiting.register(first_sequence, len(sequences))
        if is_prepared:
            self._enqueue(request)

    def start(self, request_id: str, guide: Guide | None) -> None:
        """Put a request into the waiting queue. `guide` restricts the tokens of the answer.

        A guide limits the next tokens of a sequence to those that a grammar allows. Call this
        method when the grammar is compiled. Do nothing if the request has ended.

        Args:
            request_id: a request that was added with is_prepared=False.
            guide: the guide of the first sequence; None if the request needs no guide. Every other
                sequence gets a copy of `guide`, because a guide advances with its own sequence.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_prepared = True
        first_sequence, *other_sequences = request.sequences.values()
        first_sequence.guide = guide
        for sequence in other_sequences:
            sequence.guide = None if guide is None else guide.fork()
        self._enqueue(request)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence from the waiting queue, because the sequence starts to run."""
        request = self.of(sequence)
        if sequence in request.followers:
            self._remove_from_followers(request, sequence)
        self.waiting.remove(sequence)

    def share_prompt(self, sequence: Sequence) -> None:
        """Let the other sequences of a request reuse the prompt that `sequence` has computed.

        The other sequences (the followers) have waited outside the queue until the prompt was
        computed. Now they enter the queue. Do nothing if they are already in the queue.

        Example: sequence 0 of a request with n=3 has computed the prompt. The sequences 1 and 2
        enter the queue, and the request keeps the blocks of the prompt for these two sequences.
        """
        request = self.of(sequence)
        if request.waits_for_prompt:
            self._tables.share_prompt_blocks(request, sequence)
            self._enqueue_followers(request)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence from its request and from the waiting queue.

        The leader of a request computes the prompt for the other sequences (the followers). If the
        leader ends before the prompt is computed, the next follower becomes the leader.
        """
        request = self.of(sequence)
        if _is_queued(request, sequence):
            self.waiting.remove(sequence)
        # The queue divides the computing time among the clients that have unfinished sequences.
        # Therefore, report to the queue that this sequence has ended.
        self.waiting.unregister(sequence)
        self._remove_from_request(request, sequence)
        if sequence in request.followers:
            self._remove_from_followers(request, sequence)
        elif request.waits_for_prompt:
            # `sequence` was the leader, and it ends before it has computed the prompt. Therefore,
            # another sequence of the request must compute the prompt.
            self._promote_first_follower(request)

    def _remove_from_request(self, request: Request, sequence: Sequence) -> None:
        """Remove a sequence from its request. Also remove the request if no sequence is left."""
        self.num_sequences -= 1
        del request.sequences[sequence.index]
        if not request.sequences:
            del self._requests[sequence.request_id]

    def _promote_first_follower(self, request: Request) -> None:
        """Let the first waiting sequence of a request compute the prompt.

        The sequence that should have computed the prompt (the leader) has ended.
        """
        new_leader = request.followers.pop(0)
        self.waiting.add(new_leader)

    def check(self, num_running: int) -> None:
        """Check that no sequence was lost.

        Every sequence runs, is in the queue, or is held back until its prompt or its grammar is
        ready.

        Args:
            num_running: the number of running sequences.

        Raises:
            AssertionError: if a sequence was lost.
        """
        requests = self._requests.values()
        assert self.num_sequences == sum(len(request.sequences) for request in requests), (
            "`num_sequences` differs from the number of sequences in the requests."
        )
        num_held_back = sum(_num_held_back(request) for request in requests)
        assert self.num_sequences == num_running + len(self.waiting) + num_held_back, (
            "A sequence does not run, is not in the queue and is not held back."
        )
        for sequence in self.waiting:
            assert sequence.row is None, "A waiting sequence has a row."
            assert not any(sequence.block_tables), "A waiting sequence has blocks."

    def _enqueue(self, request: Request) -> None:
        """Put the leader, the sequence that computes the request's prompt, into the waiting queue.

        If sequences do not share prompts, put the followers into the queue, too.
        """
        leader, *request.followers = request.sequences.values()
        self.waiting.add(leader)
        if not self._shares_prompts:
            self._enqueue_followers(request)

    def _enqueue_followers(self, request: Request) -> None:
        """Put the sequences in `request.followers` into the waiting queue."""
        request.has_queued_followers = True
        for follower in request.followers:
            self.waiting.add(follower)

    def _remove_from_followers(self, request: Request, sequence: Sequence) -> None:
        """Remove a sequence from `request.followers`, the sequences that have not had a row yet.

        If no follower is left, release the blocks of the prompt.
        """
        request.followers.remove(sequence)
        if not request.followers:
            self._tables.kept_prompts.drop(request)


def _is_queued(request: Request, sequence: Sequence) -> bool:
    """Return whether a sequence of a request is in the waiting queue."""
    if sequence.row is not None or not request.is_prepared:
        return False
    return request.has_queued_followers or sequence not in request.followers


def _num_held_back(request: Request) -> int:
    """Count the sequences of a request that are neither running nor in the waiting queue."""
    if not request.is_prepared:
        return len(request.sequences)
    return 0 if request.has_queued_followers else len(request.followers)
