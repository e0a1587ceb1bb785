# SPDX-License-Identifier: Apache-2.0
"""The block tables of sequences. Several sequences can share a block.

Example: a request has a prompt of 2.5 blocks and two sequences. Some steps after the prompt was
computed, the block tables are:

    sequence 0   [ 4 ][ 9 ][ 1 ][ 6 ]     computed the prompt; wrote its output to the blocks 1, 6
    the request  [ 4 ][ 9 ][ 1 ]          keeps the prompt for sequences that have no row yet
    sequence 1   [ 4 ][ 9 ][ 7 ]          writes its output to block 7, which is a copy of block 1

A full block is never written again, so any number of block tables can contain the block. Sequences
never share the block that receives the next token.

A sequence has one block table for each group of layers (window.py). If a group has an attention
window, the blocks before the window are freed after every step. A sequence then needs blocks for
the tokens of the window and of one step, but not for all its tokens.
"""

from collections import abc
from collections.abc import Iterator
from itertools import chain

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.blocks.state_snapshots import StateSnapshots
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence


class BlockTables:
    """Allocates and frees the blocks of sequences.

    If a request has several sequences, it can keep the blocks of its prompt until every sequence
    has blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        cache: PrefixCache | None,
        *,
        windows: abc.Sequence[AttentionWindow | None] = (None,),
        max_step_tokens: int | None = None,
    ) -> None:
        """Create the block tables.

        Args:
            pool: the pool that provides the blocks.
            block_size: the number of tokens in one block.
            cache: the prefix cache; None if prefix caching is off.
            windows: the attention window of each group of layers; None for a group with full
                attention.
            max_step_tokens: the largest number of tokens that one step computes for one sequence;
                None if one step may compute all tokens of a sequence.
        """
        self.cache = cache
        self._pool = pool
        self._block_size = block_size
        self._windows = tuple(windows)
        self._max_step_tokens = max_step_tokens
        self._requests_with_prompt: dict[int, Request] = {}
        self._copies: list[tuple[int, int]] = []

    def try_admit(self, sequence: Sequence, request: Request) -> bool:
        """Allocate blocks for all known tokens of a waiting sequence, if enough blocks are free.

        The sequence shares the blocks of its longest cached prefix. If another sequence of the
        request has already computed the prompt, the sequence shares the blocks of the prompt
        instead. In a group with an attention window, the sequence gets only the blocks that it
        needs at the same time.

        Example with one group: block_size is 16, and the sequence has 35 tokens. The cache contains
        the first block of the sequence as block 4, and the pool allocates the blocks 9 and 2. The
        block table becomes [4, 9, 2], and 16 tokens count as computed.

        Returns:
            Whether enough blocks were free. If False, nothing has changed.

        Mutates: the sequence's block tables and its number of computed tokens. The call may add
            block copies, which the next call of `take_copies` returns.
        """
        if request.block_tables and sequence in request.followers:
            return self._try_share_prompt(sequence, request)
        tables = self._find_cached(sequence)
        num_cached = len(tables[0])
        num_reused = num_cached * self._block_size
        num_new = [
            self._num_first_blocks(sequence, num_reused, window) - num_cached
            for window in self._windows
        ]
        num_dropped = self._nums_null(tables)
        shared = _used(tables, num_dropped)
        # `num_free` includes the idle blocks that the sequence shares. These blocks cannot be
        # allocated as new blocks.
        num_available = self._pool.num_free - self._pool.count_idle(shared)
        if sum(num_new) > num_available:
            return False
        self._pool.hold(shared)
        for table, count in zip(tables, num_new, strict=True):
            table += self._pool.allocate(count)
        sequence.block_tables = tables
        self._set_reused(sequence, num_reused, num_dropped)
        if self.snapshots is not None:
            self.snapshots.use(sequence, num_reused)
        self._count_cached_tokens(sequence)
        return True

    def _find_cached(self, sequence: Sequence) -> list[list[int]]:
        """Find the longest cached prefix of a sequence, and return one block table for each group.

        In a group with an attention window, the null block replaces each block before the window.
        """
        # If the request asks for log-probabilities of the prompt, the model must compute the whole
        # prompt, because cached tokens have no logits.
        if self.cache is None or sequence.wants_prompt_logprobs:
            return [[] for _ in self._windows]
        return self.cache.find(sequence)

    @property
    def snapshots(self) -> StateSnapshots | None:
        """The snapshots of recurrent states; None if the engine saves no snapshots."""
        return None if self.cache is None else self.cache.snapshots

    def _count_cached_tokens(self, sequence: Sequence) -> None:
        """Record how many tokens of a sequence were found in the prefix cache.

        Do nothing if the number was already recorded. This happens if the sequence was preempted.
        """
        if sequence.num_cached_tokens is not None:
            return
        sequence.num_cached_tokens = sequence.num_reused_tokens
        if self.cache is not None:
            self.cache.num_queried_tokens += len(sequence.token_ids)
            self.cache.num_hit_tokens += sequence.num_reused_tokens

    def has_block(self, sequence: Sequence, position: int) -> bool:
        """Return whether every block table of a sequence has an entry for the token `position`."""
        return position < sequence.num_tokens_with_blocks

    def num_first_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks that a waiting sequence needs if no block is cached."""
        return sum(self._num_first_blocks(sequence, 0, window) for window in self._windows)

    def try_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Append blocks to the block tables of a sequence until they suffice for `num_tokens`.

        Example with one group and 16 tokens in a block: a sequence has 2 blocks. If `num_tokens` is
        33, the sequence gets 1 more block. If `num_tokens` is 32, it gets no block.

        Returns:
            Whether enough blocks were free. If False, nothing has changed.
        """
        if num_tokens <= sequence.num_tokens_with_blocks:
            return True
        num_blocks = self._num_blocks(num_tokens)
        tables = sequence.block_tables
        # While a prompt is computed, a group of layers with an attention window has fewer blocks
        # than a group with full attention.
        num_missing = sum([max(0, num_blocks - len(table)) for table in tables])
        if num_missing > self._pool.num_free:
            return False
        for table in tables:
            if len(table) < num_blocks:
                table += self._pool.allocate(num_blocks - len(table))
        self._note_change(sequence)
        return True

    def free_blocks_before_window(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence that no later token attends to.

        Example: block_size is 4, the group has a sliding window of 4 tokens, and 10 tokens are
        computed. The next token is at position 10 and attends to positions 7 to 10. Position 7 is
        in the second block, so the block table [8, 3, 6] becomes [null, 3, 6].
        """
        first_needed = 0  # the index of the first block in the window
        previous_window = None
        for group, (window, table) in enumerate(
            zip(self._windows, sequence.block_tables, strict=True)
        ):
            if window is None:
                continue
            # Consecutive groups often have the same window. In this case, compute `first_needed`
            # only once.
            if window is not previous_window:
                first_position = window.first_visible(sequence.num_computed_tokens)
                first_needed = first_position // self._block_size
                previous_window = window
            # The block table may end before the window starts, because the block of the next token
            # is not allocated yet.
            end = min(first_needed, len(table))
            num_dropped = sequence.num_dropped_blocks[group]
            if end > num_dropped:
                self._pool.release(table[num_dropped:end])
                table[num_dropped:end] = [self._pool.null_block] * (end - num_dropped)
                sequence.num_dropped_blocks[group] = end
                sequence.table_version += 1

    def blocks_of(self, sequence: Sequence) -> set[int]:
        """Return the blocks of a sequence, including cached blocks that it has already freed."""
        blocks = set(_used(sequence.block_tables, sequence.num_dropped_blocks))
        if self.cache is not None and any(sequence.num_dropped_blocks):
            blocks |= self.cache.cached_blocks(sequence.block_hashes)
        return blocks

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, and set its number of computed tokens to 0."""
        if self.snapshots is not None:
            self.snapshots.discard(sequence)
        if self.cache is not None and sequence.params.retention_s > 0:
            self.cache.retain(sequence)
        self._pool.release(_used(sequence.block_tables, sequence.num_dropped_blocks))
        sequence.block_tables = [[] for _ in self._windows]
        self._set_reused(sequence, 0, [0] * len(self._windows))

    def hold_prompt(self, request: Request, leader: Sequence) -> None:
        """Keep the prompt blocks of `leader` for the other sequences of the request.

        The leader is the sequence that has computed the prompt. The other sequences are called
        followers. If the model has a recurrent state, the blocks are not kept, because they are not
        sufficient without the state. The followers then use the prefix cache and a snapshot.

        Example with one group: the prompt has 10 tokens, block_size is 4, and the leader's block
        table is [4, 9, 1, 6]. The request keeps the blocks [4, 9, 1], even if the leader ends.
        """
        # The followers have the same prompt as the leader, so they also have the same block hashes
        # and the same number of cached tokens.
        num_full_blocks = leader.num_prompt_tokens // self._block_size
        for follower in request.followers:
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.block_hashes = leader.block_hashes[:num_full_blocks]
        if self.snapshots is not None:
            return
        num_blocks = self._num_blocks(leader.num_prompt_tokens)
        tables = [table[:num_blocks] for table in leader.block_tables]
        for window, table in zip(self._windows, tables, strict=True):
            if window is not None:
                # A follower computes only the last prompt token again, so it needs only the blocks
                # that this token attends to. These blocks still exist, because the leader has just
                # used them for the same token.
                last_position = leader.num_prompt_tokens - 1
                first_needed = window.first_visible(last_position) // self._block_size
                table[:first_needed] = [self._pool.null_block] * first_needed
        self._pool.hold(_used(tables, self._nums_null(tables)))
        request.block_tables = tables
        self._requests_with_prompt[id(request)] = request

    def drop_prompt(self, request: Request) -> None:
        """Release the prompt blocks that a request keeps. Do nothing if the request keeps none."""
        if self._requests_with_prompt.pop(id(request), None) is not None:
            tables = request.block_tables
            self._pool.release(_used(tables, self._nums_null(tables)))
            request.block_tables = []

    def drop_oldest_prompt(self) -> bool:
        """Release the prompt blocks that a request has kept for the longest time.

        Returns:
            False if no request keeps prompt blocks.
        """
        oldest = next(iter(self._requests_with_prompt.values()), None)
        if oldest is None:
            return False
        self.drop_prompt(oldest)
        return True

    def drop_prompts_with(self, blocks: set[int]) -> None:
        """Release the prompt blocks of each request that keeps at least one of `blocks`."""
        for request in list(self._requests_with_prompt.values()):
            if not blocks.isdisjoint(chain(*request.block_tables)):
                self.drop_prompt(request)

    def forget(self, blocks: set[int]) -> None:
        """Remove `blocks` from the prefix cache, so that no new sequence finds them."""
        if self.cache is not None:
            for block in blocks:
                self.cache.forget(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the block copies of the next step as pairs (from, to), and clear the list."""
        copies, self._copies = self._copies, []
        return copies

    def held_tables(self) -> Iterator[list[int]]:
        """Yield the block tables of the requests that keep prompt blocks."""
        return chain(*(request.block_tables for request in self._requests_with_prompt.values()))

    def check(self, running: abc.Iterable[Sequence]) -> None:
        """Check the block tables of the running sequences.

        Every sequence must have one table for each group. Entries of freed blocks must be null
        blocks, and other entries must not be null blocks.

        Raises:
            AssertionError: if a block table is wrong.
        """
        null = self._pool.null_block
        for sequence in running:
            tables = sequence.block_tables
            assert len(tables) == len(sequence.num_dropped_blocks) == len(self._windows)
            assert self._num_tokens(tables) == sequence.num_tokens_with_blocks
            assert sequence.num_computed_tokens <= sequence.num_tokens_with_blocks
            for window, table, num_dropped in zip(
                self._windows, tables, sequence.num_dropped_blocks, strict=True
            ):
                assert all((block == null) == (i < num_dropped) for i, block in enumerate(table))
                first = 0 if window is None else window.first_visible(sequence.num_computed_tokens)
                assert num_dropped * self._block_size <= first, (
                    f"{sequence} has freed {num_dropped} blocks, but attends to position {first}."
                )

    def _try_share_prompt(self, sequence: Sequence, request: Request) -> bool:
        """Give the prompt blocks of a request and new blocks to a sequence of the request.

        Example with one group: block_size is 4, and the prompt has 10 tokens in the blocks
        [4, 9, 1]. The sequence computes the last prompt token again, so it reuses 9 tokens. The
        blocks 4 and 9 are shared. Block 1 is copied to the new block 7, because the sequence writes
        into this block. The block table of the sequence becomes [4, 9, 7].

        Returns:
            Whether the blocks were allocated.
        """
        # The last prompt token is computed again, because its logits are needed.
        num_reused = sequence.num_prompt_tokens - 1
        num_shared = num_reused // self._block_size
        num_new = self._num_blocks(len(sequence.token_ids)) - num_shared
        if num_new * len(self._windows) > self._pool.num_free:
            return False
        tables = [table[:num_shared] for table in request.block_tables]
        num_dropped = self._nums_null(tables)
        self._pool.hold(_used(tables, num_dropped))
        for table, prompt_table in zip(tables, request.block_tables, strict=True):
            table += self._pool.allocate(num_new)
            if num_reused % self._block_size:
                self._copies.append((prompt_table[num_shared], table[num_shared]))
        sequence.block_tables = tables
        self._set_reused(sequence, num_reused, num_dropped)
        return True

    def _set_reused(self, sequence: Sequence, num_reused: int, num_dropped: list[int]) -> None:
        """Set the number of reused tokens and the number of freed blocks of a new sequence."""
        sequence.num_computed_tokens = num_reused
        sequence.num_reused_tokens = num_reused
        sequence.num_findable_blocks = num_reused // self._block_size
        sequence.num_dropped_blocks = num_dropped
        self._note_change(sequence)

    def _note_change(self, sequence: Sequence) -> None:
        """Update the attributes of a sequence that depend on its block tables."""
        sequence.num_tokens_with_blocks = self._num_tokens(sequence.block_tables)
        sequence.table_version += 1

    def _num_tokens(self, tables: list[list[int]]) -> int:
        """Return the number of leading tokens for which every block table has an entry."""
        return min(map(len, tables)) * self._block_size

    def _num_first_blocks(
        self, sequence: Sequence, num_cached: int, window: AttentionWindow | None
    ) -> int:
        """Return the length of the block table that a waiting sequence gets in one group of layers.

        `num_cached` is the number of tokens in cached blocks. In a group with an attention window,
        the first step needs blocks only for the tokens of the window and of the step. Example: a
        sequence has 1000 tokens, and none of them is cached. The window has 64 tokens, and a step
        has 100 tokens. The sequence gets blocks for 164 tokens.
        """
        num_tokens = len(sequence.token_ids)
        if window is not None and self._max_step_tokens is not None:
            first = window.first_visible(num_cached)
            num_tokens = min(num_tokens, first + window.max_visible_tokens + self._max_step_tokens)
        return self._num_blocks(num_tokens)

    def _nums_null(self, tables: list[list[int]]) -> list[int]:
        """Return the number of null blocks in each block table."""
        null = self._pool.null_block
        return [
            0 if window is None else table.count(null)
            for window, table in zip(self._windows, tables, strict=True)
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _used(tables: list[list[int]], num_dropped: list[int]) -> list[int]:
    """Return the entries of all block tables, without the leading null blocks.

    Example: the tables [[4, 9], [null, 3]] and num_dropped=[0, 1] give [4, 9, 3].
    """
    if len(tables) == 1:
        return tables[0][num_dropped[0] :]
    return [
        block for table, first in zip(tables, num_dropped, strict=True) for block in table[first:]
    ]
