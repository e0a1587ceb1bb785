# SPDX-License-Identifier: Apache-2.0
"""The state of a sequence in the scheduler. A sequence is one of the n outputs of a request."""

import copy
from collections import abc

from nereid_backend.core.adapter import Adapter
from nereid_backend.core.grammar import Guide
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sampling_params import SamplingParams

# The difference between the seeds of two consecutive sequences of a request. The random number
# generator SplitMix64 uses the same increment. The number is odd, so no two sequences have the same
# seed.
_SEED_STEP = 0x9E3779B97F4A7C15
_NUM_SEEDS = 2**64  # seeds have 64 bits


class Sequence:
    """The state of one sequence, which is one of the n outputs of a request.

    Only the scheduler changes a sequence. A waiting sequence has no row and no blocks. A running
    sequence has a row and blocks. Example of a running sequence with 16 tokens in a block:

        token_ids            30 prompt tokens, followed by 5 output tokens
        num_computed_tokens  34, because the next step computes the last token
        draft_token_ids      2 tokens, which the next step computes, too
        block_tables         [[7, 2, 9]], the blocks of the tokens 0 to 15, 16 to 31, and 32 to 47

    Attributes:
        token_ids: prompt tokens followed by output tokens.
        num_prompt_tokens: the number of prompt tokens in `token_ids`.
        max_total_tokens: the length of `token_ids` at which the sequence ends.
        stop_token_ids: the tokens that end the sequence.
        seed: the 64-bit seed of the sequence's random numbers.
        adapter: the LoRA adapter that the request uses; None if the request uses no adapter.
        images: the images of the prompt; None if the prompt has no images.
        index: the number of this sequence among the n sequences of its request, from 0.
        rank: the scheduling order. The sequence with the lowest rank is scheduled first. The
            scheduler sets the rank.
        guide: the grammar state that limits the next tokens; None allows every token. Only the
            sampler changes the grammar state.
        draft_token_ids: the draft tokens, which are guesses for the tokens after the last known
            token. The next step computes the draft tokens and accepts those that are correct.
        num_computed_tokens: the number of leading `token_ids` whose keys and values are in the
            blocks of the sequence.
        num_reused_tokens: the number of computed tokens that were found in the prefix cache.
        num_cached_tokens: the number of prompt tokens that were found in the prefix cache when the
            sequence first got a row; None before that.
        block_tables: one block table for each group of layers (window.py), each with the ids of the
            sequence's blocks in token order. The tables of a waiting sequence are empty.
        num_null_blocks: for each block table, the number of null blocks at its start. The null
            block is a placeholder for a block that was freed or never needed, because no later
            token attends to it.
        num_tokens_with_blocks: the number of leading tokens for which every block table has an
            entry.
        table_version: a number that changes whenever a block table changes.
        block_hashes: the hashes of the leading full blocks. A hash is appended when it is first
            needed.
        num_blocks_in_cache: the number of leading full blocks whose hashes are in the prefix cache.
        snapshot_id: the snapshot of a recurrent state with which the sequence starts; None if the
            sequence starts without a snapshot. The attributes about snapshots are used only for
            models with a recurrent state (state_snapshots.py).
        unsaved_snapshot_id: the snapshot that the running step saves; None if there is none.
        num_snapshot_tokens: the number of leading tokens before the snapshot that the sequence
            loaded or saved last.
        end_of_cached_blocks: the number of leading tokens whose blocks were cached when the
            sequence got its row. Fewer tokens are reused if no snapshot was saved at this position.
        prompt_logprobs: the log-probabilities of the prompt tokens that are computed so far, from
            the second token on.
        was_reported: whether an update of this sequence has been returned.
        row: the index of the sequence in the runner's tables; None while the sequence waits.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        eos_token_ids: abc.Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """Create the first sequence of a request. The sequence has index 0 and no blocks.

        Args:
            request_id: the id of the request.
            prompt_token_ids: the tokens of the prompt.
            params: the parameters of the request.
            max_total_tokens: the length, including the prompt, at which the sequence ends.
            eos_token_ids: the end-of-sequence tokens of the model, which end the sequence unless
                `params.ignore_eos` is true.
            seed: the 64-bit seed of the sequence's random numbers.
        """
        self.request_id = request_id
        self.index = 0
        self.params = params
        self.max_total_tokens = max_total_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids).union(eos)
        self.seed = seed
        # The engine sets these attributes if the request has a LoRA adapter, images or a grammar.
        self.adapter: Adapter | None = None
        self.images: ImageInputs | None = None
        self.guide: Guide | None = None
        # The scheduler sets these attributes: the position in the order of scheduling, and the
        # index in the runner's tables while the sequence runs.
        self.rank: tuple[int, ...] = ()
        self.row: int | None = None
        self._set_initial_state(prompt_token_ids)

    def _set_initial_state(self, prompt_token_ids: abc.Sequence[int]) -> None:
        """Initialise the attributes whose values change while the sequence runs.

        A new sequence contains only the tokens of its prompt, and none of these tokens is computed.
        """
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.draft_token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.was_reported = False  # No update has reported the sequence to the client.
        self.num_computed_tokens = 0
        self.num_reused_tokens = 0
        self.num_cached_tokens: int | None = None  # unknown until the sequence gets a row
        self._set_initial_blocks()
        self._set_initial_snapshots()

    def _set_initial_blocks(self) -> None:
        """Initialise the attributes about blocks of the KV cache. A new sequence has no blocks."""
        self.block_tables: list[list[int]] = [[]]
        self.num_null_blocks: list[int] = [0]
        self.num_tokens_with_blocks = 0
        self.table_version = 0  # The version changes whenever a block table changes.
        self.block_hashes: list[bytes] = []
        self.num_blocks_in_cache = 0

    def _set_initial_snapshots(self) -> None:
        """Initialise the attributes about snapshots (saved copies) of the recurrent state.

        A new sequence has no snapshots. `num_snapshot_tokens` and `end_of_cached_blocks` are
        numbers of tokens, counted from the start of the sequence.
        """
        self.snapshot_id: int | None = None
        self.unsaved_snapshot_id: int | None = None
        self.num_snapshot_tokens = 0  # the tokens before the last snapshot
        self.end_of_cached_blocks = 0  # the tokens whose blocks are in the prefix cache

    @property
    def block_table(self) -> list[int]:
        """The block table of the first group of layers. Most models have only this group."""
        return self.block_tables[0]

    @block_table.setter
    def block_table(self, blocks: list[int]) -> None:
        self.block_tables = [blocks]
        self.table_version += 1

    @property
    def num_blocks(self) -> int:
        """The total number of blocks that the sequence uses in all its block tables."""
        return sum(map(len, self.block_tables)) - sum(self.num_null_blocks)

    def all_blocks(self) -> list[int]:
        """Return all entries of all block tables. An entry is a block id or a placeholder."""
        return [block for table in self.block_tables for block in table]

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were requested and are not complete yet."""
        return (
            self.params.prompt_logprobs is not None
            and self.index == 0
            and len(self.token_ids) == self.num_prompt_tokens
        )

    def all_sequences(self) -> list["Sequence"]:
        """Return the n sequences of the request, which generate n different outputs.

        The first sequence is this sequence, with index 0. The others are copies with the indices 1
        to n - 1 and with other seeds.
        """
        copies = [self._copy(index) for index in range(1, self.params.n)]
        return [self, *copies]

    def _copy(self, index: int) -> "Sequence":
        """Return a copy of this new sequence, with another index and another seed.

        The sequence must not have been scheduled yet, so its only tokens are those of the prompt.
        """
        new_sequence = copy.copy(self)
        new_sequence.index = index
        new_sequence.seed = self._seed_of_copy(index)
        # The lists of tokens and blocks must not be shared.
        new_sequence._set_initial_state(self.token_ids)
        return new_sequence

    def _seed_of_copy(self, index: int) -> int:
        """Return the seed of copy `index`. No two sequences of the request have the same seed."""
        # The seeds are different, because `_SEED_STEP` is odd and `_NUM_SEEDS` is a power of two.
        return (self.seed + index * _SEED_STEP) % _NUM_SEEDS

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.index}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens"
            f", {self.num_computed_tokens} computed, {self.num_blocks} blocks)"
        )
