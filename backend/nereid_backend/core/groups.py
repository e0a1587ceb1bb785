# SPDX-License-Identifier: Apache-2.0
"""Requests that were accepted and have not ended, and which of their sequences wait for a row.

Of a request with n sequences one computes the prompt while the others, its followers, wait for
that; then they wait for rows of their own. A request whose guide is being made does not even wait.
"""

from nereid_backend.core.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.ranked_requests import RankedRequests
from nereid_backend.core.request import Group, Request


class Groups:
    """Every sequence in work, by request.

    Attributes:
        waiting: sequences that wait for a row, in order.
        num_sequences: how many there are, waiting or not.
    """

    def __init__(self, tables: BlockTables, *, shares_prompts: bool) -> None:
        """Begin with none.

        Args:
            tables: hold a prompt's blocks for followers.
            shares_prompts: whether one sequence computes the prompt for all.
        """
        self.waiting = RankedRequests()
        self.num_sequences = 0
        self._tables = tables
        self._shares_prompts = shares_prompts
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        """Requests."""
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this name is in work."""
        return request_id in self._groups

    def of(self, request: Request) -> Group:
        """The group of a sequence in work."""
        return self._groups[request.request_id]

    def sequences_of(self, request_id: str) -> list[Request]:
        """The sequences of a request that have not ended; none of an unknown one."""
        group = self._groups.get(request_id)
        return [] if group is None else list(group.sequences.values())

    def is_preparing(self, request_id: str) -> bool:
        """Whether a request's guide is being made."""
        group = self._groups.get(request_id)
        return group is not None and not group.is_prepared

    def add(self, sequences: list[Request], *, is_prepared: bool) -> None:
        """Take a request's sequences in, which have their ranks."""
        self.num_sequences += len(sequences)
        group = self._groups[sequences[0].request_id] = Group(sequences)
        group.is_prepared = is_prepared
        if is_prepared:
            self._enqueue(group)

    def start(self, request_id: str, guide: Guide) -> None:
        """Let a request wait that was added unprepared. Unknown ones are ignored."""
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
        """A waiting sequence has got its blocks."""
        group = self.of(request)
        if request in group.followers:
            self._unfollow(group, request)
        self.waiting.remove(request)

    def share_prompt(self, request: Request) -> None:
        """A sequence has computed its prompt: let those who follow it wait for rows."""
        group = self.of(request)
        if group.followers and not group.is_split:
            self._tables.hold_prompt(group, request)
            self._split(group)

    def remove(self, request: Request) -> None:
        """Forget a sequence that ends."""
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
            # The one that computed the prompt for all is gone: the next one does.
            self.waiting.add(group.followers.pop(0))

    def check(self, num_running: int) -> None:
        """Verify that every sequence runs, waits or is held back.

        Raises:
            AssertionError: one was lost.
        """
        groups = self._groups.values()
        assert self.num_sequences == sum(len(group.sequences) for group in groups)
        num_waiting = len(self.waiting) + sum(map(_num_held_back, groups))
        assert self.num_sequences == num_running + num_waiting
        assert all(r.row is None and not r.block_table for r in self.waiting)

    def _enqueue(self, group: Group) -> None:
        """Let a group's first sequence wait for a row, or all where each computes the prompt."""
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
    """Sequences that do not even wait for a row."""
    if not group.is_prepared:
        return len(group.sequences)
    return 0 if group.is_split else len(group.followers)
