# SPDX-License-Identifier: Apache-2.0
"""The requests that were accepted and have not ended, and the queue of sequences without a row.

If a request has several sequences, the first one (the leader) computes the prompt. Meanwhile, the
other sequences (the followers) are not in the queue. When the prompt is computed, the followers
enter the queue and wait for rows of their own. If the grammar of a request is still being compiled,
no sequence of the request is in the queue.
"""

from nereid_backend.core.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.ranked_requests import RankedRequests
from nereid_backend.core.request import Group, Request


class Groups:
    """The groups of all requests that have not ended.

    Each group contains the sequences of one request.

    Attributes:
        waiting: the queue of sequences that wait for a row, in scheduling order.
        num_sequences: the number of waiting and running sequences of all requests.
    """

    def __init__(self, tables: BlockTables, *, shares_prompts: bool) -> None:
        """Create an object without groups.

        Args:
            tables: the block tables, which keep the blocks of a prompt for followers.
            shares_prompts: whether one sequence computes the prompt for all sequences of a
                request. If False, every sequence computes the prompt itself.
        """
        self.waiting = RankedRequests()
        self.num_sequences = 0
        self._tables = tables
        self._shares_prompts = shares_prompts
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request with the id `request_id` was added and has not ended."""
        return request_id in self._groups

    def of(self, request: Request) -> Group:
        """Return the group that contains a sequence. The sequence must not have ended."""
        return self._groups[request.request_id]

    def sequences_of(self, request_id: str) -> list[Request]:
        """Return the sequences of a request that have not ended.

        The list is empty if no request has the id `request_id`.
        """
        group = self._groups.get(request_id)
        return [] if group is None else list(group.sequences.values())

    def is_preparing(self, request_id: str) -> bool:
        """Return whether the grammar of a request is still being compiled."""
        group = self._groups.get(request_id)
        return group is not None and not group.is_prepared

    def add(self, sequences: list[Request], *, is_prepared: bool) -> None:
        """Add the sequences of a new request. Their ranks must be set.

        Args:
            sequences: all sequences of one request.
            is_prepared: False if the sequences must stay out of the queue until `start` is called.
        """
        self.num_sequences += len(sequences)
        group = self._groups[sequences[0].request_id] = Group(sequences)
        group.is_prepared = is_prepared
        if is_prepared:
            self._enqueue(group)

    def start(self, request_id: str, guide: Guide) -> None:
        """Attach a guide to a request and put the request into the waiting queue.

        Do nothing if the request has ended.

        Args:
            request_id: a request that was added with is_prepared=False.
            guide: the guide of the first sequence. Every other sequence gets a fork of `guide`.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        group.is_prepared = True
        leader, *others = group.sequences.values()
        for other in others:
            other.guide = guide.fork()
        leader.guide = guide
        self._enqueue(group)

    def admit(self, request: Request) -> None:
        """Remove a sequence that has just got its blocks from the waiting queue."""
        group = self.of(request)
        if request in group.followers:
            self._unfollow(group, request)
        self.waiting.remove(request)

    def share_prompt(self, request: Request) -> None:
        """Put the followers of a sequence that has computed the prompt into the waiting queue."""
        group = self.of(request)
        if group.followers and not group.is_split:
            self._tables.hold_prompt(group, request)
            self._split(group)

    def remove(self, request: Request) -> None:
        """Remove a sequence that has ended.

        If the sequence was the leader and had not computed the prompt yet, the next follower
        becomes the leader.
        """
        self.num_sequences -= 1
        group = self.of(request)
        is_follower = request in group.followers
        if request.row is None and group.is_prepared and (group.is_split or not is_follower):
            self.waiting.remove(request)
        del group.sequences[request.index]
        if not group.sequences:
            del self._groups[request.request_id]
        if is_follower:
            self._unfollow(group, request)
        elif group.followers and not group.is_split and group.is_prepared:
            # The leader has ended before the prompt was computed, so a follower becomes the leader.
            self.waiting.add(group.followers.pop(0))

    def check(self, num_running: int) -> None:
        """Verify that every sequence either runs, waits in the queue, or is kept out of the queue.

        Args:
            num_running: the number of running sequences.

        Raises:
            AssertionError: if a sequence was lost.
        """
        groups = self._groups.values()
        assert self.num_sequences == sum(len(group.sequences) for group in groups)
        num_waiting = len(self.waiting) + sum(map(_num_held_back, groups))
        assert self.num_sequences == num_running + num_waiting
        assert all(r.row is None and not r.block_table for r in self.waiting)

    def _enqueue(self, group: Group) -> None:
        """Put the leader of a group into the waiting queue.

        If sequences do not share prompts, put the followers into the queue too.
        """
        leader, *group.followers = group.sequences.values()
        self.waiting.add(leader)
        if not self._shares_prompts:
            self._split(group)

    def _split(self, group: Group) -> None:
        group.is_split = True
        for follower in group.followers:
            self.waiting.add(follower)

    def _unfollow(self, group: Group, request: Request) -> None:
        group.followers.remove(request)
        if not group.followers:
            self._tables.drop_prompt(group)


def _num_held_back(group: Group) -> int:
    """Return the number of sequences of a group that are neither running nor in the queue."""
    if not group.is_prepared:
        return len(group.sequences)
    return 0 if group.is_split else len(group.followers)
