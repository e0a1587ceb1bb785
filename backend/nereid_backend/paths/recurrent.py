# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of models with recurrent states (the forward path `rows`).

Convolutions and recurrences mix the neighbouring tokens of a row, so a row must contain tokens of
one sequence only. All decodes of a step form one batch with one row for each sequence. Every other
chunk is computed in a forward pass of its own. Keys and values are in blocks (row_keys.py).

    decodes   [a]   keys and values: in blocks
              [b]   states: one cache for the batch
              [c]

A snapshot is a copy of one sequence's state (state_snapshots.py). The scheduler decides when a
state is copied, and which sequences start from a snapshot.

If the next step has the same rows, its decodes use the same cache. Otherwise the cache is split
into the states of the sequences, and the states of the next step's rows are merged into a cache.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import (
    ModelCall,
    extend_to_start,
    join_rows,
    num_bytes,
    token_inputs,
)
from nereid_backend.paths.recurrent_cache import (
    State,
    copy_state,
    merge_states,
    row_state,
    split_states,
)
from nereid_backend.paths.row_keys import RowKeys


class _BatchCache(NamedTuple):
    """The merged states of a batch.

    Attributes:
        rows: the rows of the batch, in order.
        cache: the transformers cache with the states of these rows.
    """

    rows: tuple[int, ...]
    cache: Any


class RowsPath:
    """Computes the forward pass of models that have a recurrent state for each sequence.

    The object owns the states and the KV cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keys: RowKeys,
        *,
        computes_from_start: bool,
        replays_preempted: bool = False,
    ) -> None:
        """Create the object that runs the model's forward passes. No sequence has a state yet.

        Args:
            checkpoint: the model.
            keys: the storage of keys and values.
            computes_from_start: whether every chunk of several tokens is computed from the start of
                its sequence. Some models need this, because they cannot continue a sequence exactly
                by several tokens in one pass.
            replays_preempted: whether a preempted sequence is computed again in the same passes as
                before: first the prompt in one pass, then each output token in its own pass. On
                some models, one pass over all tokens gives different logits.
        """
        self._call = ModelCall(checkpoint.model)
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._adapters = checkpoint.adapters
        self._key_storage = keys
        self._computes_from_start = computes_from_start
        self._replays_preempted = replays_preempted
        # Maps the index of a sequence in the runner's tables (`Sequence.row`) to the sequence's
        # recurrent state. The states of the last batch may be in `_batch_cache` instead.
        self._states: dict[int, State] = {}
        # For each sequence, the number of tokens that the recurrent state covers. The key is
        # `Sequence.row`.
        self._state_lengths: dict[int, int] = {}
        # The recurrent states of the last batch, merged into one cache. The states stay merged
        # after the step, because the next step usually computes the same sequences. None if no
        # states are merged.
        self._batch_cache: _BatchCache | None = None
        # Maps each snapshot id to a stored copy of a sequence's recurrent state. Later sequences
        # with the same prefix start from the copy.
        self._snapshots: dict[int, State] = {}

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return the logits of one step, [num_logits, vocab_size]; see `ForwardPath.forward`.

        A snapshot is a copy of a sequence's recurrent state. Before the computation, new sequences
        with a cached prefix get the state of a snapshot. After the computation, the snapshots that
        the plan requires are saved.

        Args:
            plan: the tokens to compute.
            sampled: must be None. Other paths get here the input tokens of chunks that were planned
                before the tokens were sampled. Steps of this path are never planned so early.
        """
        assert sampled is None, "every input token is in the plan"
        for chunk in plan.chunks:
            if chunk.is_first:
                # An earlier sequence may have had the same row number. If the state of the earlier
                # sequence is still stored, delete this state.
                self._delete_state(_row(chunk))
        if plan.snapshots is None:
            return self._compute_step(plan)
        self._load_snapshots(plan, plan.snapshots)
        logits = self._compute_step(plan)
        for chunk_index, snapshot_id in plan.snapshots.saves:
            row = _row(plan.chunks[chunk_index])
            self._snapshots[snapshot_id] = self._copy_state(row)
        return logits

    def _compute_step(self, plan: StepPlan) -> Tensor:
        """Compute all tokens of a step, and return the logits; see `ForwardPath.forward`.

        A decode is a chunk of one token that continues the state of its sequence. All decodes are
        computed in one forward pass. Every other chunk is a prefill, and is computed in a forward
        pass of its own.
        """
        # The indices of the decodes and of the prefills in `plan.chunks`.
        decodes: list[int] = []
        prefills: list[int] = []
        for index, chunk in enumerate(plan.chunks):
            is_single_token = chunk.num_tokens == 1 and chunk.start > 0
            if is_single_token and self._has_state(chunk):
                decodes.append(index)
            else:
                prefills.append(index)
        # The logits of each chunk, in the order of the chunks in the plan.
        logits_of_chunks: list[Tensor | None] = [None] * len(plan.chunks)
        if decodes:
            logits = self._decode([plan.chunks[index] for index in decodes])
            for index, chunk_logits in zip(decodes, logits, strict=True):
                # If no logits of a chunk are needed, an empty tensor is stored for the chunk.
                logits_of_chunks[index] = chunk_logits[: plan.chunks[index].num_logits]
        for index in prefills:
            logits_of_chunks[index] = self._prefill(plan.chunks[index])
        return join_rows(logits_of_chunks, self._vocab_size)

    @property
    def kv_cache(self) -> KVCache | None:
        """The KV cache of this object; None if the model has no attention layers."""
        return self._key_storage.kv_cache

    @property
    def snapshots(self) -> dict[int, State]:
        """Maps each snapshot id to a stored copy of a sequence's recurrent state."""
        return self._snapshots

    def clear(self, sequence: Sequence) -> None:
        """Delete the state of a sequence and set its blocks to zero; see `ForwardPath.clear`."""
        if sequence.row is not None:
            self._delete_state(sequence.row)
        if self._key_storage.kv_cache is not None:
            self._key_storage.kv_cache.clear(sequence.all_blocks())

    def state_bytes(self) -> int:
        """Return the size of one sequence's recurrent state in bytes.

        At least one sequence must have a state.
        """
        self._split_batch_cache()
        return num_bytes(next(iter(self._states.values())))

    def _load_snapshots(self, plan: StepPlan, snapshots: SnapshotPlan) -> None:
        """Load states of new sequences from snapshots. Delete snapshots that are no longer needed.

        `snapshots` lists the snapshots to load and the snapshots to delete.
        """
        for chunk_index, snapshot_id in snapshots.loads:
            chunk = plan.chunks[chunk_index]
            self._states[_row(chunk)] = copy_state(self._snapshots[snapshot_id])
            self._state_lengths[_row(chunk)] = chunk.start
        for snapshot_id in snapshots.deleted:
            self._snapshots.pop(snapshot_id, None)

    def _copy_state(self, row: int) -> State:
        """Return a copy of one sequence's recurrent state. Later steps do not change the copy."""
        if self._batch_cache is not None and row in self._batch_cache.rows:
            rows, cache = self._batch_cache
            return row_state(cache, rows.index(row), len(rows))
        return copy_state(self._states[row])

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        """Compute one token for each of several sequences, in a single forward pass.

        The sequence of each chunk must already have a state.

        Returns:
            Logits, [num_chunks, 1, vocab_size].
        """
        rows = tuple(_row(chunk) for chunk in chunks)
        # A forward pass that fails may leave partly changed states. The states are therefore
        # removed from this object before the forward pass, and stored again only if the forward
        # pass succeeds.
        cache = self._take_cache(rows)
        lengths = [self._state_lengths.pop(row) for row in rows]
        ids, positions = token_inputs(chunks, self._device)
        logits = self._run_model(chunks, ids, positions, cache, num_logits=1)
        self._batch_cache = _BatchCache(rows, cache)
        for row, length in zip(rows, lengths, strict=True):
            self._state_lengths[row] = length + 1
        return logits

    def _take_cache(self, rows: tuple[int, ...]) -> Any:  # noqa: ANN401 - an untyped cache
        """Remove the states of `rows` from this object. Return a cache that contains the states."""
        if self._batch_cache is not None and self._batch_cache.rows == rows:
            cache = self._batch_cache.cache
            self._batch_cache = None
            return cache
        self._split_batch_cache()
        return self._merged_cache([self._states.pop(row) for row in rows])

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Compute a chunk in one forward pass, or skip a chunk whose tokens a later chunk computes.

        Some models must compute a prompt in one pass. Example: a prompt of 20 tokens is divided
        into the chunks 0 to 15 and 16 to 19. For the first chunk, the result is None. The second
        chunk is extended to the tokens 0 to 19, so that one pass computes the whole prompt.

        A preempted sequence is computed again from its first token. Its first computation needed
        one pass for the prompt and one pass for each output token. On some models, one pass for all
        tokens gives different logits, so the passes are repeated one by one (`_replays_preempted`).

        Returns:
            Logits, [num_logits, vocab_size]. None if a later chunk computes the tokens.
        """
        if self._is_computed_later(chunk):
            return None  # This model must compute the prompt in one pass, with the last chunk.
        if self._can_continue(chunk):  # The stored state covers exactly the tokens before `chunk`.
            return self._continue_state(chunk)
        # The stored state cannot be used, so compute the sequence again from its first token. There
        # are three possible reasons: the state lacks some earlier tokens; the state covers draft
        # tokens that were rejected; or the model can continue a state only by one token, but
        # `chunk` has several tokens.
        whole = extend_to_start(chunk)  # a chunk that also contains all earlier tokens
        prompt_len = whole.sequence.num_prompt_tokens
        has_output_tokens = whole.num_tokens > prompt_len
        if self._replays_preempted and has_output_tokens:
            return self._replay(whole, prompt_len)
        return self._continue_state(whole)

    def _is_computed_later(self, chunk: Chunk) -> bool:
        """Return whether a later chunk of the sequence will compute the tokens of `chunk`, too."""
        has_later_chunk = chunk.start + chunk.num_tokens < len(chunk.sequence.token_ids)
        return self._computes_from_start and has_later_chunk and chunk.num_logits == 0

    def _can_continue(self, chunk: Chunk) -> bool:
        """Return whether the tokens of `chunk` can be computed from the sequence's stored state.

        The state must cover exactly the tokens before the chunk. Some models can continue a state
        only by one token; see the argument `computes_from_start` of the constructor.
        """
        is_exact = chunk.num_tokens == 1 or not self._computes_from_start
        return is_exact and self._has_state(chunk)

    def _replay(self, chunk: Chunk, prompt_len: int) -> Tensor:
        """Compute a sequence again: one pass for the prompt, then one pass for each output token.

        These are the passes of the first computation. On some models, one pass over all tokens
        gives different logits. Example: a sequence with 20 prompt tokens and 2 output tokens is
        computed in three passes, for the tokens 0 to 19, the token 20, and the token 21. `chunk`
        contains all tokens of the sequence, and `prompt_len` is the number of prompt tokens.

        Returns:
            Logits, [num_logits, vocab_size]. The chunk must need at least one logit.
        """
        output_positions = range(prompt_len, chunk.num_tokens)
        num_prompt_logits = max(0, chunk.num_logits - len(output_positions))
        prompt = chunk._replace(num_tokens=prompt_len, num_logits=num_prompt_logits)
        parts = [self._continue_state(prompt)]
        for position in output_positions:
            # `_decode` ignores `num_logits`, and always returns the logits of the one new token.
            decode = chunk._replace(start=position, num_tokens=1)
            parts.append(self._decode([decode])[0])
        # `parts` contains `num_prompt_logits` rows of logits for the prompt, and one row for each
        # output token. Return only the last `chunk.num_logits` rows.
        logits = torch.cat(parts)
        return logits[len(logits) - chunk.num_logits :]

    def _continue_state(self, chunk: Chunk) -> Tensor:
        """Compute the tokens of a chunk in one pass, and update the state of the sequence.

        The pass starts from the stored state, or from an empty state if the chunk contains the
        first token. Afterwards, the new state is stored in `_batch_cache`, as a batch of one
        sequence. The states of all other sequences are in `_states`.

        Returns:
            Logits, [num_logits, vocab_size]; [0, vocab_size] if no logits are needed.
        """
        row = _row(chunk)
        # The state of this sequence may be in the merged cache of the last batch. Split this cache,
        # and store one state for each of its sequences in `_states`.
        self._split_batch_cache()
        # A forward pass that fails may leave a partly changed state. The state is therefore removed
        # from this object before the forward pass, and stored again only if the forward pass
        # succeeds.
        state = self._states.pop(row, None)
        self._state_lengths.pop(row, None)
        earlier_states = [state] if state and chunk.start > 0 else []
        cache = self._merged_cache(earlier_states)
        ids, positions = token_inputs([chunk], self._device)
        # The model always returns the logits of at least one token. If no logits are needed, these
        # logits are dropped below.
        num_logits = max(1, chunk.num_logits)
        logits = self._run_model([chunk], ids, positions, cache, num_logits=num_logits)
        self._batch_cache = _BatchCache((row,), cache)
        self._state_lengths[row] = chunk.start + chunk.num_tokens
        return logits[0, : chunk.num_logits]

    def _run_model(
        self,
        chunks: list[Chunk],
        ids: Tensor,
        positions: Tensor,
        cache: Any,  # noqa: ANN401 - an untyped cache
        num_logits: int,
    ) -> Tensor:
        """Run the model on the tokens of `chunks`, and apply the adapter of each sequence.

        Args:
            chunks: the chunks, one for each row.
            ids: [num_chunks, num_tokens] int64.
            positions: [num_chunks, num_tokens] int64.
            cache: the cache with the states of the rows. Mutated.
            num_logits: the number of last tokens whose logits are returned.

        Returns:
            Logits, [num_chunks, num_logits, vocab_size].
        """
        # Inside `_key_storage.serving`, the attention layers can access the keys and values of
        # `chunks`. `mask` is the attention mask. It is None if the model's attention needs no mask.
        with self._key_storage.serving(chunks, cache) as mask, self._adapters.serving(chunks):
            return self._call(
                ids,
                num_logits=num_logits,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
            )

    def _merged_cache(self, states: list[State]) -> Any:  # noqa: ANN401 - an untyped cache
        """Return a cache that merges the states of a batch of sequences. `states` may be empty."""
        cache = self._key_storage.make_cache()
        if states:
            merge_states(cache, states)
        return cache

    def _has_state(self, chunk: Chunk) -> bool:
        """Return whether a sequence's state covers exactly the tokens before `chunk`."""
        return chunk.start == self._state_lengths.get(_row(chunk), 0)

    def _delete_state(self, row: int) -> None:
        """Delete the state of a row."""
        if self._batch_cache is not None and row in self._batch_cache.rows:
            self._split_batch_cache()
        self._states.pop(row, None)
        self._state_lengths.pop(row, None)

    def _split_batch_cache(self) -> None:
        """Split the cache of the last batch into separate states, one for each sequence."""
        if self._batch_cache is None:
            return
        rows, cache = self._batch_cache
        self._batch_cache = None
        self._states.update(zip(rows, split_states(cache, len(rows)), strict=True))


def _row(chunk: Chunk) -> int:
    """Return the row of a chunk's sequence."""
    assert chunk.sequence.row is not None
    return chunk.sequence.row
