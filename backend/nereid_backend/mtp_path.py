# SPDX-License-Identifier: Apache-2.0
"""Runs an MTP (multi-token prediction) layer, which generates draft tokens.

An MTP layer belongs to the checkpoint of the large model. Its inputs are a token, and the hidden
state of the large model at the previous token. Example for the tokens a b c (the large model has
computed a and b, and has sampled c):

    entry of the MTP layer    token    hidden state            predicts
    0                         b        large model at a        c
    1                         c        large model at b        x, the first draft token
    2                         x        MTP layer at entry 1    y, the second draft token

The keys and values of each entry are in blocks. Entries with draft tokens are computed again after
the large model has computed these tokens, because the hidden states of the large model are better.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.transformers_hook import AttentionHook, PagedForward
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import join_rows
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.step_runner import ForwardPath

# The largest number of hidden states that are stored for one sequence. If a hidden state is
# missing, the MTP layer uses zeros instead. Its draft tokens are then accepted less often.
_MAX_STATES = 4096
# If the last tensor of a sequence contains fewer than `_MAX_APPENDED` hidden states, new hidden
# states are appended to this tensor instead of being stored in a separate tensor. This limits the
# number of tensors.
_MAX_APPENDED = 256


@dataclass(frozen=True, slots=True)
class _StoredStates:
    """The hidden states of consecutive tokens of one sequence.

    Attributes:
        start: the position of the first token.
        states: [num_tokens, hidden_size].
    """

    start: int
    states: Tensor

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.states)

    def copy_into(self, rows: Tensor, rows_start: int) -> None:
        """Copy the hidden states into `rows`, which has one row for each position. Mutates: `rows`.

        `rows_start` is the position of the first row. Example: the object has the hidden states at
        the positions 4 to 9, and `rows` has 5 rows for the positions 2 to 6. The last 3 rows become
        the hidden states at the positions 4 to 6.
        """
        first = max(self.start, rows_start)
        end = min(self.end, rows_start + len(rows))
        if first < end:
            copied = self.states[first - self.start : end - self.start]
            rows[first - rows_start : end - rows_start] = copied


class HiddenStates:
    """Stores hidden states of the large model until the MTP layer reads them.

    The object wraps the forward path of the large model, and records the hidden states that the
    large model computes.
    """

    def __init__(self, path: ForwardPath, decoder: torch.nn.Module) -> None:
        """Wrap the forward path of the large model, and record the outputs of the decoder."""
        self._path = path
        # The outputs of the decoder during the forward pass that is running.
        self._outputs: list[Tensor] = []
        self._handle = decoder.register_forward_hook(self._record)
        # Maps each sequence to a list. Each item of the list contains the hidden states of
        # consecutive tokens. If two items contain a hidden state for the same position, only the
        # later item is valid.
        self._parts: dict[Sequence, list[_StoredStates]] = {}

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Run the large model, and return the logits; see `ForwardPath.forward`.

        Also store the hidden states that the decoder of the large model computes. The MTP layer
        later reads these hidden states to generate draft tokens.
        """
        # A forward hook of torch calls `_record`, which appends each output of the decoder.
        outputs: list[Tensor] = []
        self._outputs = outputs
        try:
            logits = self._path.forward(plan, sampled)
        finally:
            self._outputs = []
        # In a step with images, the decoder may be called several times, or for one sequence at a
        # time. The hidden states of such a step are not stored.
        ran_once_for_all_tokens = [output.shape[:2] for output in outputs] == [(1, plan.num_tokens)]
        if not ran_once_for_all_tokens:
            return logits
        chunk_states = torch.split(outputs[0][0], [chunk.num_tokens for chunk in plan.chunks])
        for chunk, states in zip(plan.chunks, chunk_states, strict=True):
            if chunk.sequence.images is None:  # Sequences with images get no draft tokens.
                parts = self._parts.setdefault(chunk.sequence, [])
                _append_states(parts, chunk.start, states)
        return logits

    def clear(self, sequence: Sequence) -> None:
        """Delete the hidden states of a sequence, and clear its cache in the large model."""
        self._parts.pop(sequence, None)
        self._path.clear(sequence)

    def take(self, sequence: Sequence, start: int, *, into: Tensor) -> None:
        """Copy hidden states of a sequence into rows. Delete states that are no longer needed.

        The MTP layer reads the hidden states of a sequence from left to right. A part of the stored
        hidden states is no longer needed if all its positions are before the end of the rows.

        Args:
            sequence: the sequence.
            start: the position of the first row.
            into: the rows, [num_tokens, hidden_size]. Mutated. Rows whose hidden states are not
                stored are left unchanged.
        """
        parts = self._parts.get(sequence, [])
        for part in parts:
            part.copy_into(into, start)
        end = start + len(into)
        self._parts[sequence] = [part for part in parts if part.end > end]

    def forget(self, sequence: Sequence) -> None:
        """Delete the hidden states of an ended sequence."""
        self._parts.pop(sequence, None)

    def close(self) -> None:
        """Stop recording."""
        self._handle.remove()
        self._parts.clear()

    def _record(self, module: torch.nn.Module, args: object, output: Any) -> None:  # noqa: ANN401, ARG002
        """Store the output of the decoder. torch calls this method as a forward hook."""
        self._outputs.append(output.last_hidden_state)


def _append_states(parts: list[_StoredStates], start: int, states: Tensor) -> None:
    """Add new hidden states to the stored hidden states of a sequence, and delete old states.

    The new states are appended to the last part if this part is short and reaches the position
    `start`. Older states at or after `start` belong to rejected draft tokens, so they are deleted
    first. Example: the last part has states at the positions 4 to 9, and `states` belong to the
    positions 8 and 9. The last part keeps the old states at 4 to 7, and gets the new states at 8
    and 9. If the new states cannot be appended, they become a new part.

    Args:
        parts: the stored hidden states of the sequence. Mutated. If two parts have a state for the
            same position, only the later part is valid.
        start: the position of the first new state.
        states: [num_tokens, hidden_size].
    """
    if parts and _can_append(parts[-1], start):
        last = parts[-1]
        kept_states = last.states[: start - last.start]
        parts[-1] = _StoredStates(last.start, torch.cat([kept_states, states]))
    else:
        # Copy the hidden states. A view would keep the hidden states of the whole step in memory.
        parts.append(_StoredStates(start, states.clone()))
    _delete_oldest_parts(parts)


def _can_append(part: _StoredStates, start: int) -> bool:
    """Return whether states that begin at the position `start` can be appended to `part`.

    This is possible if the part is short, and if `start` is in the part or directly after its end.
    """
    return len(part.states) < _MAX_APPENDED and part.start <= start <= part.end


def _delete_oldest_parts(parts: list[_StoredStates]) -> None:
    """Delete the oldest parts, but keep at least the newest `_MAX_STATES` states.

    Example: with `_MAX_STATES` 4096, the parts have 300, 4000 and 200 states. The first part is
    deleted, because the other parts contain 4200 states. The second part is kept, because the last
    part alone contains fewer than 4096 states.
    """
    num_stored = sum(len(part.states) for part in parts)
    while num_stored - len(parts[0].states) >= _MAX_STATES:
        num_stored -= len(parts.pop(0).states)


class MtpPath:
    """Runs an MTP (multi-token prediction) layer.

    A sequence of this path contains the tokens of a sequence of the large model, from the second
    token on. The first token is left out, because no hidden state precedes it.

    Attributes:
        hidden: the hidden states of the large model.
    """

    def __init__(
        self,
        mtp_model: Any,  # noqa: ANN401 - transformers' class has no types
        *,
        hook: AttentionHook,
        cache: KVCache,
        builder: BatchBuilder,
        hidden: HiddenStates,
    ) -> None:
        """Create a path without sequences.

        An MTP layer predicts the next token from two inputs: the last token, and the hidden state
        of the large model at the token before it. The predicted tokens are draft tokens.

        Args:
            mtp_model: an MtpModel of transformers.
            hook: Nereid's attention function, which transformers calls in each layer.
            cache: the KV cache of the MTP layer.
            builder: builds the tensors of each pass from the block tables of the sequences.
            hidden: the hidden states of the large model.
        """
        self.hidden = hidden
        self._model = mtp_model
        self._hook = hook
        self._cache = cache
        self._builder = builder
        # Maps each sequence of the MTP layer to the corresponding sequence of the large model.
        self._targets: dict[Sequence, Sequence] = {}
        # Maps each sequence of the MTP layer to the output of this layer for the last token of the
        # sequence, [hidden_size].
        self._last_outputs: dict[Sequence, Tensor] = {}

    def follow(self, own: Sequence, target: Sequence) -> None:
        """Let the sequence `own` of the MTP layer use the hidden states of the sequence `target`.

        The model computes the hidden states of `target`.
        """
        self._targets[own] = target

    def release(self, own: Sequence) -> None:
        """Delete the state of a sequence."""
        self._targets.pop(own, None)
        self._last_outputs.pop(own, None)

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the logits of the MTP layer in one forward pass.

        Args:
            plan: the tokens to compute, as one chunk for each sequence.

        Returns:
            The logits of the last num_logits tokens of each chunk, [num_rows, vocab_size].

        Mutates: `_last_outputs`. The layer needs its own output at the last token of a sequence to
            generate the next draft token.
        """
        output = self._run(plan)  # [num_tokens, hidden_size]
        chunk_outputs = torch.split(output, [chunk.num_tokens for chunk in plan.chunks])
        rows_with_logits = []
        for chunk, chunk_output in zip(plan.chunks, chunk_outputs, strict=True):
            self._last_outputs[chunk.sequence] = chunk_output[-1]
            rows_with_logits.append(chunk_output[chunk.num_tokens - chunk.num_logits :])
        joined = join_rows(rows_with_logits, row_size=output.shape[-1])
        # transformers has no public method that applies only the output layer of an MTP model.
        logits: Tensor = self._model._project_to_logits(joined[None])
        return logits[0]

    def _run(self, plan: StepPlan) -> Tensor:
        """Return the outputs of the MTP layer for all tokens of a plan, [num_tokens, hidden_size].

        The keys and values of the tokens are stored in the KV cache.
        """
        batch = self._builder.build(plan, self._cache.device)
        hidden = torch.cat([self._previous_hidden_states(chunk) for chunk in plan.chunks])
        attention = PagedForward(self._cache, batch.attention)
        with self._hook.serving(attention):
            # The MTP layer skips the first token of each sequence, so its positions begin at 1.
            output = run_layer(self._model, batch.input_ids, hidden, batch.position_ids + 1)
        return output[0]

    def _previous_hidden_states(self, chunk: Chunk) -> Tensor:
        """For each token of a chunk, return the hidden state of the previous token.

        The result is [num_tokens, hidden_size]. A chunk consists of known tokens (tokens of the
        prompt or the answer) or of a single draft token. The hidden states for known tokens come
        from the large model, or are zeros if they are not stored. The hidden state for a draft
        token is the last output of the MTP layer.
        """
        # The MTP layer's sequence lacks the first token of the large model's sequence:
        #
        #     position                         0  1  2
        #     sequence of the large model      A  B  C
        #     sequence of the MTP layer        B  C
        large_model_sequence = self._targets[chunk.sequence]
        num_known_tokens = len(large_model_sequence.token_ids) - 1
        is_draft_token = chunk.start >= num_known_tokens
        if is_draft_token:
            return self._last_outputs[chunk.sequence][None]  # [1, hidden_size]
        # Example: the MTP layer needs the hidden state of the token A to process the token B. The
        # position of B in the MTP layer is 0, and the position of A in the large model is also 0.
        # Therefore, `chunk.start` is also the position of the first needed hidden state.
        weight: Tensor = self._model.layers[0].eh_proj.weight
        hidden_size = weight.shape[0]
        hidden_states = weight.new_zeros(chunk.num_tokens, hidden_size)
        self.hidden.take(large_model_sequence, chunk.start, into=hidden_states)
        return hidden_states


def run_layer(mtp_model: Any, input_ids: Tensor, hidden: Tensor, position_ids: Tensor) -> Tensor:  # noqa: ANN401
    """Run the first MTP layer on consecutive tokens, and return a hidden state for each token.

    An MTP (multi-token prediction) layer combines each token with a hidden state.

    Args:
        mtp_model: an MtpModel of transformers.
        input_ids: [1, num_tokens] int64.
        hidden: [num_tokens, hidden_size], for each token the hidden state of the previous token.
        position_ids: [1, num_tokens] int64.

    Returns:
        Hidden states, [1, num_tokens, hidden_size].
    """
    output: Tensor = mtp_model.forward_layer(
        layer_idx=0,
        last_hidden_states=hidden[None],
        position_ids=position_ids,
        mtp_cache=None,  # The keys and values are stored in the blocks of the engine's KV cache.
        input_ids=input_ids,
    )
    return output
