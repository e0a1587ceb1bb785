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

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.kept_prompts import KeptPrompts
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.blocks.state_snapshots import StateSnapshots
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence


class BlockTables:
    """Allocates and frees the blocks of sequences.

    A sequence has one block table for each group of layers. In a group with an attention window, no
    token attends to the blocks before the window. The null block (a placeholder) replaces these
    blocks.

    Attributes:
        cache: the prefix cache; None if prefix caching is off.
        kept_prompts: the prompt blocks that requests with several sequences keep for their waiting
            sequences.
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
        """Create an object that allocates and frees the blocks of sequences.

        Args:
            pool: the pool that provides the blocks.
            block_size: the number of tokens in one block.
            cache: the prefix cache; None if prefix caching is off.
            windows: the attention window of each group of layers; None for a group with full
                attention. The default is one group with full attention, as in most models.
            max_step_tokens: the largest number of tokens that one step computes for one sequence;
                None if one step may compute all tokens of a sequence.
        """
        self.cache = cache
        # If a request has several sequences, its first sequence computes the prompt. The request
        # then keeps the blocks of the prompt for the sequences that have not started yet.
        self.kept_prompts = KeptPrompts(pool, block_size, windows)
        self._pool = pool
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._windows = tuple(windows)
        self._groups_of_window = _groups_by_window(windows)
        # The pairs (from, to) of blocks that must be copied before the next step.
        self._copies: list[tuple[int, int]] = []

    def try_admit(self, sequence: Sequence, request: Request) -> bool:
        """Allocate the blocks that a waiting sequence needs to start, if enough blocks are free.

        If another sequence of the request has already computed the prompt, the sequence shares the
        blocks of the prompt. Otherwise, the sequence shares the blocks of its longest cached
        prefix.

        Returns:
            Whether enough blocks were free. If False, nothing has changed.

        Mutates: the block tables of `sequence`, its number of computed tokens, and its snapshot.
            The call may add block copies, which the next call of `take_copies` returns.
        """
        request_keeps_prompt = bool(request.block_tables)
        if request_keeps_prompt and sequence in request.followers:
            return self._try_share_prompt(sequence, request)
        return self._try_share_cached_prefix(sequence)

    def _try_share_cached_prefix(self, sequence: Sequence) -> bool:
        """Build a sequence's block tables from its longest cached prefix and from new blocks.

        A sequence has one block table for each group of layers. Example with one group: block_size
        is 16, and the sequence has 35 tokens. The cache contains the first block of the sequence as
        block 4, and the pool allocates the blocks 9 and 2. The block table becomes [4, 9, 2], and
        16 tokens count as computed.

        Returns:
            Whether enough blocks were free. If False, nothing has changed.
        """
        tables = self._find_cached(sequence)
        num_cached_blocks = len(tables[0])  # All tables have the same length.
        num_cached_tokens = num_cached_blocks * self._block_size
        num_new_blocks = [
            self._num_entries_to_start(sequence, num_cached_tokens, window) - num_cached_blocks
            for window in self._windows
        ]
        shared_blocks = _without_null_blocks(tables, self._count_null_blocks(tables))
        # `num_free` includes the idle blocks: cached blocks that no sequence uses. If this sequence
        # shares an idle block, the block cannot be allocated as a new block.
        num_allocatable = self._pool.num_free - self._pool.count_idle(shared_blocks)
        if sum(num_new_blocks) > num_allocatable:
            return False
        sequence.block_tables = self._complete_tables(tables, num_new_blocks)
        self._record_new_tables(sequence, num_cached_tokens)
        if self.snapshots is not None:
            # The cached prefix of a recurrent model always ends at a saved state.
            self.snapshots.start_from(sequence, num_cached_tokens)
        self._count_cached_tokens(sequence)
        return True

    def _complete_tables(self, tables: list[list[int]], num_new: list[int]) -> list[list[int]]:
        """Acquire the blocks in `tables`, and append new blocks. Return the complete block tables.

        Each table belongs to one group of layers and gets its own number of new blocks. The pool
        must have enough free blocks.
        """
        # Null blocks have no reference counts, so they are not acquired.
        self._pool.acquire(_without_null_blocks(tables, self._count_null_blocks(tables)))
        return [
            [*table, *self._pool.allocate(num_blocks)]
            for table, num_blocks in zip(tables, num_new, strict=True)
        ]

    def _find_cached(self, sequence: Sequence) -> list[list[int]]:
        """Return the block tables (one per group of layers) of a sequence's longest cached prefix.

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
        """Store how many tokens of a sequence were found in the prefix cache.

        Do nothing if the number was already recorded. This happens if the sequence was preempted.
        """
        if sequence.num_cached_tokens is not None:
            return
        sequence.num_cached_tokens = sequence.num_reused_tokens
        if self.cache is not None:
            self.cache.num_queried_tokens += len(sequence.token_ids)
            self.cache.num_hit_tokens += sequence.num_reused_tokens

    def num_blocks_to_start(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence needs to start, assuming that no block is cached."""
        return sum(self._num_entries_to_start(sequence, 0, window) for window in self._windows)

    def try_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Append blocks to each block table until the table has blocks for `num_tokens` tokens.

        A sequence has one block table for each group of layers; most models have one group.
        Example with one group and 16 tokens in a block: a sequence has 2 blocks. If `num_tokens` is
        33, the sequence gets 1 more block. If `num_tokens` is 32, it gets no block.

        Returns:
            Whether enough blocks were free. If False, nothing has changed.
        """
        if num_tokens <= sequence.num_tokens_with_blocks:
            return True
        num_blocks = self._num_blocks(num_tokens)
        tables = sequence.block_tables
        # The tables can have different lengths. While a prompt is computed, a group of layers with
        # an attention window has fewer blocks than a group with full attention.
        nums_missing = [max(0, num_blocks - len(table)) for table in tables]
        if sum(nums_missing) > self._pool.num_free:
            return False
        for table, num_missing in zip(tables, nums_missing, strict=True):
            if num_missing:
                table += self._pool.allocate(num_missing)
        self._update_after_table_change(sequence)
        return True

    def free_blocks_before_window(self, sequence: Sequence) -> None:
        """For a running sequence, free the blocks that end before the attention window begins.

        Only groups of layers with an attention window have such blocks. The null block (a
        placeholder) replaces each freed block in the block table of the group.

        Example: block_size is 4, the group has a sliding window of 4 tokens, and 10 tokens are
        computed. The next token is at position 10 and attends to positions 7 to 10. Position 7 is
        in the second block, so the block table [8, 3, 6] becomes [null, 3, 6].
        """
        for window, groups in self._groups_of_window.items():
            first_position = window.first_visible(sequence.num_computed_tokens)
            first_needed_block = first_position // self._block_size
            for group in groups:
                num_freed = sequence.num_null_blocks[group]
                if first_needed_block > num_freed:
                    self._free_leading_blocks(sequence, group, first_needed_block)

    def _free_leading_blocks(self, sequence: Sequence, group: int, num_blocks: int) -> None:
        """Free the first `num_blocks` blocks of a sequence in one group of layers.

        The null block replaces each freed block in the block table of the group.
        """
        table = sequence.block_tables[group]
        # Start after the blocks that earlier calls have freed and replaced by null blocks.
        start = sequence.num_null_blocks[group]
        # The block table may end before the window starts, because the block of the next token is
        # not allocated yet.
        end = min(num_blocks, len(table))
        if end > start:
            self._pool.release(table[start:end])
            table[start:end] = [self._pool.null_block] * (end - start)
            sequence.num_null_blocks[group] = end
            # If the version of a sequence's block tables has changed, the forward path copies the
            # tables again.
            sequence.table_version += 1

    def blocks_of(self, sequence: Sequence) -> set[int]:
        """Return the blocks of a sequence, including freed blocks that are still cached.

        The sequence has freed the blocks before its attention window, but their hashes show which
        of them are still in the prefix cache.
        """
        blocks = set(_without_null_blocks(sequence.block_tables, sequence.num_null_blocks))
        if self.cache is not None and any(sequence.num_null_blocks):
            blocks |= self.cache.cached_blocks(sequence.block_hashes)
        return blocks

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, and set its number of computed tokens to 0."""
        if self.snapshots is not None:
            self.snapshots.close(sequence)
        if self.cache is not None and sequence.params.retention_s > 0:
            self.cache.retain(sequence)
        self._pool.release(_without_null_blocks(sequence.block_tables, sequence.num_null_blocks))
        sequence.block_tables = [[] for _ in self._windows]
        self._record_new_tables(sequence, num_reused=0)

    def share_prompt_blocks(self, request: Request, leader: Sequence) -> None:
        """Let the other sequences of `request` use the prompt blocks that `leader` has computed.

        The leader is the sequence that has computed the prompt. The other sequences are called
        followers. The request keeps the blocks of the prompt (`kept_prompts`) until every follower
        has started to run.

        If the model has a recurrent state, the request does not keep the blocks, because the blocks
        are not sufficient without the state. Each follower then looks up the prompt in the prefix
        cache, which also has a copy of the state.

        Mutates: the followers, which get the block hashes of the prompt, and `request`.
        """
        num_full_blocks = leader.num_prompt_tokens // self._block_size
        for follower in request.followers:
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.block_hashes = leader.block_hashes[:num_full_blocks]
        if self.snapshots is None:  # The model has no recurrent state.
            self.kept_prompts.keep(request, leader)

    def forget(self, blocks: set[int]) -> None:
        """Remove `blocks` from the prefix cache, so that no new sequence finds them."""
        if self.cache is not None:
            for block in blocks:
                self.cache.forget(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pairs (from, to) of blocks that the next step copies, and clear the list."""
        copies = self._copies
        self._copies = []
        return copies

    def check(self, running: abc.Iterable[Sequence]) -> None:
        """Check that the block tables of the running sequences are complete.

        Every sequence must have one table for each group of layers, and the tables must have
        entries for all computed tokens. An entry may be the null block (a placeholder) only before
        the attention window of the next token.

        Raises:
            AssertionError: if a block table is wrong.
        """
        for sequence in running:
            tables = sequence.block_tables
            assert len(tables) == len(sequence.num_null_blocks) == len(self._windows), (
                f"{sequence} does not have one block table for each group of layers."
            )
            assert self._num_tokens_with_blocks(tables) == sequence.num_tokens_with_blocks, (
                f"{sequence} has a wrong number of tokens with blocks."
            )
            assert sequence.num_computed_tokens <= sequence.num_tokens_with_blocks, (
                f"{sequence} has computed tokens without blocks."
            )
            for group in range(len(tables)):
                self._check_null_blocks(sequence, group)

    def _check_null_blocks(self, sequence: Sequence, group: int) -> None:
        """Check that a sequence has freed only blocks that its next token does not attend to.

        In the block table of the group, a null block replaces each freed block. Null blocks must be
        at the start of the table, before the attention window of the next token.
        """
        window = self._windows[group]
        num_freed = sequence.num_null_blocks[group]
        for index, block in enumerate(sequence.block_tables[group]):
            is_null = block == self._pool.null_block
            assert is_null == (index < num_freed), f"{sequence} has a null block in a wrong place."
        first = 0 if window is None else window.first_visible(sequence.num_computed_tokens)
        assert num_freed * self._block_size <= first, (
            f"{sequence} has freed {num_freed} blocks, but attends to position {first}."
        )

    def _try_share_prompt(self, sequence: Sequence, request: Request) -> bool:
        """Build a sequence's block tables from prompt blocks of its request and from new blocks.

        A block that the sequence writes to cannot be shared. If the reused tokens end within a
        block, the sequence gets a copy of this block. The copy is added to `_copies`.

        Example with one group of layers: block_size is 4, and the prompt has 10 tokens in the
        blocks [4, 9, 1]. The sequence computes the last prompt token again, so it reuses 9 tokens.
        The blocks 4 and 9 are shared, and block 1 is copied to the new block 7. The block table of
        the sequence becomes [4, 9, 7].

        Returns:
            Whether enough blocks were free. If False, nothing has changed.
        """
        # The last prompt token is computed again, because its logits are needed.
        num_reused_tokens = sequence.num_prompt_tokens - 1
        # A block is shared only if the sequence reuses every token in the block.
        num_shared, num_tokens_in_copy = divmod(num_reused_tokens, self._block_size)
        num_new = self._num_blocks(len(sequence.token_ids)) - num_shared
        num_groups = len(request.block_tables)
        if num_new * num_groups > self._pool.num_free:
            return False
        shared_tables = [table[:num_shared] for table in request.block_tables]
        tables = self._complete_tables(shared_tables, [num_new] * num_groups)
        if num_tokens_in_copy > 0:
            # The first new block becomes a copy of the block with the last prompt token.
            for table, prompt_table in zip(tables, request.block_tables, strict=True):
                self._copies.append((prompt_table[num_shared], table[num_shared]))
        sequence.block_tables = tables
        self._record_new_tables(sequence, num_reused_tokens)
        return True

    def _record_new_tables(self, sequence: Sequence, num_reused: int) -> None:
        """Update the counters of a sequence after `sequence.block_tables` was replaced.

        Args:
            sequence: the sequence.
            num_reused: the number of leading tokens whose keys and values are already in the
                blocks, because they were computed earlier, for example for another sequence; 0 if
                the sequence has released its blocks.
        """
        sequence.num_computed_tokens = num_reused
        sequence.num_reused_tokens = num_reused
        # The full blocks of reused tokens are already in the prefix cache.
        sequence.num_blocks_in_cache = num_reused // self._block_size
        sequence.num_null_blocks = self._count_null_blocks(sequence.block_tables)
        self._update_after_table_change(sequence)

    def _update_after_table_change(self, sequence: Sequence) -> None:
        """Update the attributes of a sequence that depend on its block tables.

        The forward path copies the tables of a sequence again if `table_version` has changed.
        """
        sequence.num_tokens_with_blocks = self._num_tokens_with_blocks(sequence.block_tables)
        sequence.table_version += 1

    def _num_tokens_with_blocks(self, tables: list[list[int]]) -> int:
        """Return the number of leading tokens for which every block table has an entry."""
        return min(map(len, tables)) * self._block_size

    def _num_entries_to_start(
        self, sequence: Sequence, num_cached: int, window: AttentionWindow | None
    ) -> int:
        """Return how many block table entries a starting sequence needs in one group of layers.

        An entry is a block or, before the attention window, a placeholder. With full attention, the
        sequence needs entries for all its tokens. In a group with an attention window, the blocks
        before the window are freed after each step. Therefore, the sequence needs entries only up
        to the last token of its next step.

        Example: a block has 16 tokens, and a sequence has 1000 tokens, of which none is cached. The
        window has 64 tokens, and a step has at most 100 tokens. The sequence needs entries for 164
        tokens, which are 11 entries.

        Args:
            sequence: the waiting sequence.
            num_cached: the number of leading tokens that are in cached blocks.
            window: the attention window of the group; None for full attention.
        """
        num_tokens = len(sequence.token_ids)
        if window is None or self._max_step_tokens is None:  # One step may compute all tokens.
            return self._num_blocks(num_tokens)
        # The window of the first uncomputed token starts at `window_start`. The distance from
        # `window_start` to the end of the next step is at most the length of a window plus the
        # length of a step.
        window_start = window.first_visible(num_cached)
        max_step_end = window_start + window.max_visible_tokens + self._max_step_tokens
        return self._num_blocks(min(num_tokens, max_step_end))

    def _count_null_blocks(self, tables: list[list[int]]) -> list[int]:
        """For each block table, count the null blocks. A null block is only a placeholder."""
        null = self._pool.null_block
        return [
            0 if window is None else table.count(null)
            for window, table in zip(self._windows, tables, strict=True)
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need, rounded up."""
        return -(-num_tokens // self._block_size)


def _groups_by_window(
    windows: abc.Sequence[AttentionWindow | None],
) -> dict[AttentionWindow, list[int]]:
    """Map each attention window to the indices of the layer groups that have this window.

    `windows` contains the window of each group; None for a group with full attention.
    """
    groups: dict[AttentionWindow, list[int]] = {}
    for group, window in enumerate(windows):
        if window is not None:
            groups.setdefault(window, []).append(group)
    return groups


def _without_null_blocks(tables: list[list[int]], num_null_blocks: list[int]) -> list[int]:
    """Return the entries of all block tables, without the null blocks at the start of each table.

    Example: the tables [[4, 9], [null, 3]] and num_null_blocks=[0, 1] give [4, 9, 3].
    """
    if len(tables) == 1:
        return tables[0][num_null_blocks[0] :]
    used_blocks: list[int] = []
    for table, num_null in zip(tables, num_null_blocks, strict=True):
        used_blocks += table[num_null:]
    return used_blocks
