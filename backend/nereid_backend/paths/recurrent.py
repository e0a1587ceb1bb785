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
into the states of the sequences, and the states of the next step's rows are merged into a cache
(`SequenceStates`).
"""

from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import ModelCall, extend_to_start, join_rows, token_inputs
from nereid_backend.paths.recurrent_cache import SequenceStates, State, copy_state
from nereid_backend.paths.row_keys import RowKeys


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
        self._states = SequenceStates(keys.make_cache)
        # Maps the row of each stored state to the sequence that the state belongs to.
        self._sequences: dict[int, Sequence] = {}
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
            sampled: must be None, because the steps of this path are planned after the input
                tokens have been sampled.
        """
        assert sampled is None, "every input token is in the plan"
        self._delete_unused_states()
        for chunk in plan.chunks:
            row = _row(chunk)
            if chunk.is_first:
                # An earlier sequence may have had the same row number. If the state of the earlier
                # sequence is still stored, delete this state.
                self._states.delete(row)
            self._sequences[row] = chunk.sequence
        if plan.snapshots is None:
            return self._compute_step(plan)
        self._load_snapshots(plan, plan.snapshots)
        logits = self._compute_step(plan)
        self._save_snapshots(plan, plan.snapshots)
        return logits

    def _compute_step(self, plan: StepPlan) -> Tensor:
        """Compute all tokens of a step, and return the logits; see `ForwardPath.forward`.

        A decode is a chunk of one token that continues the state of its sequence. All decodes are
        computed in one forward pass. Every other chunk is a prefill, and is computed in a forward
        pass of its own.
        """
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        for chunk in plan.chunks:
            if chunk.num_tokens == 1 and chunk.start > 0 and self._has_state(chunk):
                decodes.append(chunk)
            else:
                prefills.append(chunk)
        logits_of_rows: dict[int, Tensor | None] = {}
        if decodes:
            for chunk, logits in zip(decodes, self._decode(decodes), strict=True):
                # If no logits of a chunk are needed, an empty tensor is stored for the chunk.
                logits_of_rows[_row(chunk)] = logits[: chunk.num_logits]
        for chunk in prefills:
            logits_of_rows[_row(chunk)] = self._prefill(chunk)
        in_order = [logits_of_rows[_row(chunk)] for chunk in plan.chunks]
        return join_rows(in_order, self._vocab_size)

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
            self._states.delete(sequence.row)
        if self._key_storage.kv_cache is not None:
            self._key_storage.kv_cache.clear(sequence.all_blocks())

    def state_bytes(self) -> int:
        """Return the size of one sequence's recurrent state in bytes.

        At least one sequence must have a state.
        """
        return self._states.bytes_per_sequence()

    def _delete_unused_states(self) -> None:
        """Delete the states of sequences that have ended or were preempted.

        The scheduler uses the memory of these states for snapshots. Such a sequence has lost its
        row.
        """
        unused = [row for row, sequence in self._sequences.items() if sequence.row != row]
        for row in unused:
            self._states.delete(row)
            del self._sequences[row]

    def _load_snapshots(self, plan: StepPlan, snapshots: SnapshotPlan) -> None:
        """Load states of new sequences from snapshots. Delete snapshots that are no longer needed.

        `snapshots` lists the snapshots to load and the snapshots to delete.
        """
        for chunk_index, snapshot_id in snapshots.loads:
            chunk = plan.chunks[chunk_index]
            state = copy_state(self._snapshots[snapshot_id])
            self._states.store(_row(chunk), state, num_tokens=chunk.start)
        for snapshot_id in snapshots.deleted:
            self._snapshots.pop(snapshot_id, None)

    def _save_snapshots(self, plan: StepPlan, snapshots: SnapshotPlan) -> None:
        """Save the snapshots (copies of recurrent states) that are listed in `snapshots.saves`.

        Each entry of `snapshots.saves` contains the index of a sequence's chunk in `plan`, and the
        id of the snapshot.
        """
        for chunk_index, snapshot_id in snapshots.saves:
            row = _row(plan.chunks[chunk_index])
            self._snapshots[snapshot_id] = self._states.copy(row)

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        """Compute one token for each of several sequences, in a single forward pass.

        The sequence of each chunk must already have a state.

        Returns:
            Logits, [num_chunks, 1, vocab_size].
        """
        cache = self._states.take([_row(chunk) for chunk in chunks])
        return self._run_model(chunks, cache, num_logits=1)

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Compute a chunk, and return its logits, [num_logits, vocab_size].

        The first true condition determines how the chunk is computed:

            a later chunk computes the tokens, too         nothing is computed; return None
            the model can continue the state exactly       one pass
            all tokens of the chunk follow the prompt,     one pass for each token
            and the state covers all earlier tokens
            otherwise                                      from the first token of the sequence

        Example of the first condition: a model must compute a prompt in one pass. For the tokens 0
        to 15 of a prompt, the result is None. For the tokens 16 to 19, one pass computes 0 to 19.
        """
        if self._is_computed_later(chunk):
            return None
        if self._can_continue(chunk):
            return self._continue_state(chunk)
        if self._has_state(chunk) and chunk.start >= chunk.sequence.num_prompt_tokens:
            # The model can continue the state by only one token at a time, but a grammar has forced
            # several output tokens.
            positions = range(chunk.start, chunk.start + chunk.num_tokens)
            first_needed = chunk.num_tokens - chunk.num_logits
            return torch.cat(self._decode_one_by_one(chunk, positions))[first_needed:]
        return self._compute_from_start(chunk)

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

    def _compute_from_start(self, chunk: Chunk) -> Tensor:
        """Compute a sequence from its first token to the end of `chunk`. Ignore the stored state.

        The stored state cannot be used for one of three reasons:
        - The state lacks some earlier tokens.
        - The state covers draft tokens that were rejected.
        - The model can continue a state only by one token, but `chunk` has several prompt tokens.

        Returns:
            Logits, [num_logits, vocab_size].
        """
        whole = extend_to_start(chunk)  # a chunk that also contains all earlier tokens
        prompt_len = whole.sequence.num_prompt_tokens
        has_output_tokens = whole.num_tokens > prompt_len
        if self._replays_preempted and has_output_tokens:
            # Each output token was first computed in a pass of its own. On some models, one pass
            # over all tokens gives different logits.
            return self._replay(whole, prompt_len)
        return self._compute_from_empty_state(whole)

    def _replay(self, chunk: Chunk, prompt_len: int) -> Tensor:
        """Compute a sequence again: one pass for the prompt, then one pass for each output token.

        These are the passes of the first computation. On some models, one pass over all tokens
        gives different logits. Example: a sequence with 20 prompt tokens and 2 output tokens is
        computed in three passes, for the tokens 0 to 19, the token 20, and the token 21.

        Args:
            chunk: all tokens of the sequence. At least one logit must be needed.
            prompt_len: the number of prompt tokens.

        Returns:
            Logits, [num_logits, vocab_size].
        """
        output_positions = range(prompt_len, chunk.num_tokens)
        # The logits of the last tokens are needed. Each pass computes the logits of at least one
        # token, so `parts` can have more rows than needed.
        num_prompt_logits = max(1, chunk.num_logits - len(output_positions))
        prompt = chunk._replace(num_tokens=prompt_len, num_logits=num_prompt_logits)
        parts = [
            self._compute_from_empty_state(prompt),
            *self._decode_one_by_one(chunk, output_positions),
        ]
        return torch.cat(parts)[-chunk.num_logits :]

    def _decode_one_by_one(self, chunk: Chunk, positions: range) -> list[Tensor]:
        """Compute consecutive tokens of a sequence, each in its own forward pass.

        Return the logits of each token, [1, vocab_size]. The stored state must cover exactly the
        tokens before `positions`.
        """
        parts = []
        for position in positions:
            token = chunk._replace(start=position, num_tokens=1, num_logits=1)
            (logits,) = self._decode([token])
            parts.append(logits)
        return parts

    def _continue_state(self, chunk: Chunk) -> Tensor:
        """Compute the tokens of a chunk in one pass that starts from the state of the sequence.

        Returns:
            Logits, [num_logits, vocab_size]; [0, vocab_size] if no logits are needed.
        """
        if chunk.start == 0:
            return self._compute_from_empty_state(chunk)
        return self._compute_chunk(chunk, self._states.take([_row(chunk)]))

    def _compute_from_empty_state(self, chunk: Chunk) -> Tensor:
        """Compute the first tokens of a sequence in one pass. Ignore and replace its stored state.

        `chunk` starts at the first token. The result is the same as that of `_continue_state`.
        """
        self._states.delete(_row(chunk))
        return self._compute_chunk(chunk, self._key_storage.make_cache())

    def _compute_chunk(self, chunk: Chunk, cache: Any) -> Tensor:  # noqa: ANN401 - an untyped cache
        """Compute a chunk in one pass from the state in `cache`; see `_continue_state`."""
        # The model always returns the logits of at least one token. If no logits are needed, these
        # logits are dropped below.
        logits = self._run_model([chunk], cache, num_logits=max(1, chunk.num_logits))
        return logits[0, : chunk.num_logits]

    def _run_model(
        self,
        chunks: list[Chunk],
        cache: Any,  # noqa: ANN401 - an untyped cache
        *,
        num_logits: int,
    ) -> Tensor:
        """Run the model on the tokens of `chunks`, and store the new states of the sequences.

        Args:
            chunks: the chunks, one for each row. All chunks have the same number of tokens.
            cache: the cache with the states of the rows. Mutated.
            num_logits: the number of last tokens whose logits are returned.

        Returns:
            Logits, [num_chunks, num_logits, vocab_size].
        """
        ids, positions = token_inputs(chunks, self._device)
        with (
            # While the context manager `serving` is active, the attention layers can access the
            # keys and values of `chunks`.
            self._key_storage.serving(chunks, cache) as attention_mask,
            self._adapters.serving(chunks),
        ):
            logits = self._call(
                ids,
                num_logits=num_logits,
                position_ids=positions,
                attention_mask=attention_mask,
                cache=cache,
            )
        self._states.put(
            rows=[_row(chunk) for chunk in chunks],
            cache=cache,
            num_tokens=[chunk.start + chunk.num_tokens for chunk in chunks],
        )
        return logits

    def _has_state(self, chunk: Chunk) -> bool:
        """Return whether a sequence's state covers exactly the tokens before `chunk`."""
        return self._states.num_tokens(_row(chunk)) == chunk.start


def _row(chunk: Chunk) -> int:
    """Return the row of a chunk's sequence."""
    assert chunk.sequence.row is not None
    return chunk.sequence.row
