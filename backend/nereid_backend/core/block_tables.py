# SPDX-License-Identifier: Apache-2.0
"""Which blocks a request gets: its own, and those that it shares.

Two sequences of one request with a prompt of 2.5 blocks, some steps after the prompt was computed:

    sequence 0   [ 4 ][ 9 ][ 1 ][ 6 ]     computed the prompt, and writes on behind it
    the group    [ 4 ][ 9 ][ 1 ]          holds the prompt for those who have no row yet
    sequence 1   [ 4 ][ 9 ][ 7 ]          7 began as a copy of 1, because it is written to

A full block is never written to, so it may be in any number of tables. A request never shares the
block that its next token goes into.

Where the model does not look back to the beginning (sight.py), what it will not see again is given
back after every step, and in place of blocks for all its tokens a request gets enough to go on.
"""

from collections.abc import Iterator

from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.prefix_cache import PrefixCache
from nereid_backend.core.request import Group, Request
from nereid_backend.core.window import Sight


class BlockTables:
    """Fills the block tables of requests and groups from one pool."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        cache: PrefixCache | None,
        *,
        sight: Sight | None = None,
        most_step_tokens: int | None = None,
    ) -> None:
        """Begin with empty tables.

        Args:
            pool: where blocks come from.
            block_size: tokens in one block.
            cache: finds blocks that were computed already; None computes everything.
            sight: how far back the model looks; None: to the beginning.
            most_step_tokens: most tokens of a request in one step; None: all may come in one.
        """
        self.cache = cache
        self._pool = pool
        self._block_size = block_size
        self._sight = sight
        self._most_step_tokens = most_step_tokens
        self._holding: dict[int, Group] = {}
        self._copies: list[tuple[int, int]] = []

    def try_admit(self, request: Request, group: Group) -> bool:
        """Give a request without blocks enough for all its known tokens, if there is room.

        Where blocks are given back, it is enough for as many as it ever needs at once.

        Mutates: on success the request's table and what is computed of it; a copy may be due.
        """
        if group.block_table and request in group.followers:
            return self._try_share_prompt(request, group)
        found: list[int] = []
        if self.cache is not None and not request.wants_prompt_logprobs:
            found = self.cache.find(request)
        num_new = self._num_blocks(self._num_wanted(request, len(found))) - len(found)
        num_dropped = self._num_null(found)
        held = found[num_dropped:]
        if num_new > self._pool.num_free - self._pool.count_idle(held):
            return False
        self._pool.hold(held)
        request.block_table = found + self._pool.allocate(num_new)
        self._begin(request, len(found) * self._block_size, num_dropped)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_reused_tokens
            if self.cache is not None:
                self.cache.num_queried_tokens += len(request.token_ids)
                self.cache.num_hit_tokens += request.num_reused_tokens
        return True

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks for its first num_tokens tokens."""
        return max(0, self._num_blocks(num_tokens) - len(request.block_table))

    def grow(self, request: Request, num_blocks: int) -> None:
        """Add blocks to a table; the pool has them."""
        if num_blocks > 0:
            request.block_table += self._pool.allocate(num_blocks)

    def remember(self, request: Request) -> None:
        """Let others find what is computed of a request."""
        if self.cache is not None:
            self.cache.add(request)

    def drop_unseen(self, request: Request) -> None:
        """Give back those of a running request's blocks that its next token does not look at."""
        if self._sight is None:
            return
        first = self._sight.first_seen(request.num_computed_tokens) // self._block_size
        old = request.num_dropped_blocks
        # The next token's block is there only once it is planned.
        first = min(first, len(request.block_table))
        if first > old:
            self._pool.release(request.block_table[old:first])
            request.block_table[old:first] = [self._pool.null_block] * (first - old)
            request.num_dropped_blocks = first

    def blocks_of(self, request: Request) -> set[int]:
        """Blocks that it holds, and those that it has given back but that can still be found."""
        blocks = set(request.block_table[request.num_dropped_blocks :])
        if self.cache is not None and request.num_dropped_blocks:
            blocks |= self.cache.blocks_named(request.block_digests)
        return blocks

    def release(self, request: Request) -> None:
        """Take a request's blocks away, and with them what is computed of it."""
        self._pool.release(request.block_table[request.num_dropped_blocks :])
        request.block_table = []
        self._begin(request, 0)

    def hold_prompt(self, group: Group, leader: Request) -> None:
        """Keep the prompt that one sequence has computed for the others."""
        table = leader.block_table[: self._num_blocks(leader.num_prompt_tokens)]
        first = leader.num_dropped_blocks
        if self._sight is not None:
            # The prompt's last token is computed again.
            seen = self._sight.first_seen(leader.num_prompt_tokens - 1) // self._block_size
            table[first:seen] = [self._pool.null_block] * (seen - first)
            first = seen
        self._pool.hold(table[first:])
        group.block_table = table
        self._holding[id(group)] = group
        full = leader.num_prompt_tokens // self._block_size
        for follower in group.followers:
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.block_digests = leader.block_digests[:full]

    def drop_prompt(self, group: Group) -> None:
        """Give up a group's hold on its prompt, if it has one."""
        if self._holding.pop(id(group), None) is not None:
            self._pool.release(group.block_table[self._num_null(group.block_table) :])
            group.block_table = []

    def drop_oldest_prompt(self) -> bool:
        """Give up one group's hold, so that others get room; False if there is none."""
        for group in self._holding.values():
            self.drop_prompt(group)
            return True
        return False

    def drop_prompts_with(self, blocks: set[int]) -> None:
        """Give up the holds of groups on any of these blocks."""
        for group in list(self._holding.values()):
            if not blocks.isdisjoint(group.block_table):
                self.drop_prompt(group)

    def forget(self, blocks: set[int]) -> None:
        """Make sure that nobody finds these blocks any more."""
        if self.cache is not None:
            for block in blocks:
                self.cache.forget(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs of blocks (from, to) to copy before the tables are used; each is returned once."""
        copies, self._copies = self._copies, []
        return copies

    def held_tables(self) -> Iterator[list[int]]:
        """The tables of groups."""
        return (group.block_table for group in self._holding.values())

    def _try_share_prompt(self, request: Request, group: Group) -> bool:
        # The prompt's last token is computed again, for its logits.
        num_reused = request.num_prompt_tokens - 1
        num_shared = num_reused // self._block_size
        num_new = self._num_blocks(len(request.token_ids)) - num_shared
        if num_new > self._pool.num_free:
            return False
        shared = group.block_table[:num_shared]
        num_dropped = self._num_null(shared)
        self._pool.hold(shared[num_dropped:])
        own = self._pool.allocate(num_new)
        if num_reused % self._block_size:
            self._copies.append((group.block_table[num_shared], own[0]))
        request.block_table = shared + own
        self._begin(request, num_reused, num_dropped)
        return True

    def _begin(self, request: Request, num_reused: int, num_dropped: int = 0) -> None:
        request.num_computed_tokens = num_reused
        request.num_reused_tokens = num_reused
        request.num_findable_blocks = num_reused // self._block_size
        request.num_dropped_blocks = num_dropped

    def _num_wanted(self, request: Request, num_found: int) -> int:
        """Tokens for which a request wants blocks, those that were found included."""
        num_known = len(request.token_ids)
        if self._sight is None or self._most_step_tokens is None:
            return num_known
        # What is seen from the first of its tokens on, until the first blocks come back.
        first = self._sight.first_seen(num_found * self._block_size)
        return min(num_known, first + self._sight.most_seen + self._most_step_tokens)

    def _num_null(self, table: list[int]) -> int:
        return 0 if self._sight is None else table.count(self._pool.null_block)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
