# SPDX-License-Identifier: Apache-2.0
"""The forward path of an MTP (multi-token prediction) layer. The layer generates draft tokens.

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

from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import join_logits
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.runner import ForwardPath

# The largest number of hidden states that are stored for one sequence. If a hidden state is
# missing, the MTP layer uses zeros instead. Its draft tokens are then accepted less often.
_MAX_STATES = 4096
# New hidden states are appended to the last tensor of a sequence if this tensor contains fewer
# hidden states than this number. A sequence then has only a few tensors.
_MAX_APPENDED = 256


class HiddenStates:
    """Stores hidden states of the large model until the MTP layer reads them.

    The object wraps the forward path of the large model, and records the hidden states that the
    large model computes.
    """

    def __init__(self, path: ForwardPath, decoder: torch.nn.Module) -> None:
        """Wrap `path`, the forward path of the large model, and observe `decoder`, its decoder."""
        self._path = path
        # The outputs of the decoder during the running step.
        self._outputs: list[Tensor] = []
        self._handle = decoder.register_forward_hook(self._record)
        # For each sequence, a list of pairs: the position of the first hidden state, and hidden
        # states [num_tokens, hidden_size]. If two pairs contain the same position, the later pair
        # is valid.
        self._parts: dict[Sequence, list[tuple[int, Tensor]]] = {}

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Compute the logits of a step; see `ForwardPath.forward`."""
        self._outputs.clear()
        logits = self._path.forward(plan, sampled)
        # In a step with images, the decoder may be called several times, or for one sequence at a
        # time. The hidden states of such a step are not stored.
        if len(self._outputs) == 1 and self._outputs[0].shape[:2] == (1, plan.num_tokens):
            self._add(plan.chunks, self._outputs[0][0])
        self._outputs.clear()
        return logits

    def clear(self, sequence: Sequence) -> None:
        """Reset the state of a sequence; see `ForwardPath.clear`."""
        self._parts.pop(sequence, None)
        self._path.clear(sequence)

    def take(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """Copy hidden states of a sequence into `rows`, and delete states that are not needed.

        Example: the hidden states at the positions 4 to 9 are stored, `start` is 2, and `rows` has
        5 rows. The last 3 rows become the hidden states at the positions 4 to 6.

        Args:
            sequence: the sequence.
            start: the position of the first row.
            rows: [num_tokens, hidden_size]. Mutated. Rows whose hidden states are not stored are
                left unchanged.
        """
        end = start + len(rows)
        parts = self._parts.get(sequence, [])
        for first, states in parts:
            begin, stop = max(first, start), min(first + len(states), end)
            if begin < stop:
                rows[begin - start : stop - start] = states[begin - first : stop - first]
        self._parts[sequence] = [part for part in parts if part[0] + len(part[1]) > end]

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

    def _add(self, chunks: list[Chunk], output: Tensor) -> None:
        """Split the hidden states of a step by sequence, and store the hidden states.

        Args:
            chunks: the chunks of the step.
            output: the hidden states of all tokens of the step, [num_tokens, hidden_size].
        """
        step_parts = torch.split(output, [chunk.num_tokens for chunk in chunks])
        for chunk, part in zip(chunks, step_parts, strict=True):
            if chunk.sequence.images is not None:
                continue
            parts = self._parts.setdefault(chunk.sequence, [])
            last_start, last_states = parts[-1] if parts else (chunk.start, part[:0])
            num_kept = chunk.start - last_start
            if 0 <= num_kept <= len(last_states) < _MAX_APPENDED:
                # The tokens after the first `num_kept` tokens were rejected draft tokens, so this
                # part replaces their hidden states.
                parts[-1:] = [(last_start, torch.cat([last_states[:num_kept], part]))]
            else:
                # Copy the hidden states. A view would keep the hidden states of the whole step in
                # memory.
                parts.append((chunk.start, part.clone()))
            while sum(len(each) for _, each in parts[1:]) >= _MAX_STATES:
                del parts[0]


class MtpPath:
    """The forward path of an MTP layer. It implements the interface `ForwardPath`.

    A sequence of this path contains the tokens of a sequence of the large model, from the second
    token on. The first token is left out, because no hidden state precedes it.

    Attributes:
        hidden: the hidden states of the large model.
    """

    def __init__(
        self,
        mtp_model: Any,  # noqa: ANN401 - transformers' class has no types
        hook: AttentionHook,
        layers: list[LayerSpec],
        blocks: tuple[KVCache, BatchBuilder],
        hidden: HiddenStates,
    ) -> None:
        """Create a path without sequences.

        Args:
            mtp_model: an MtpModel of transformers.
            hook: the engine's entry in transformers' attention interface.
            layers: the attention layers of the first MTP layer.
            blocks: the KV cache and the block tables of the MTP layer.
            hidden: the hidden states of the large model.
        """
        self._model = mtp_model
        self._hook = hook
        self._layers = layers
        self._cache, self._builder = blocks
        self.hidden = hidden
        # Maps each sequence of this path to the corresponding sequence of the large model.
        self._targets: dict[Sequence, Sequence] = {}
        # For each sequence, the output of the MTP layer at its last token, [hidden_size].
        self._last_outputs: dict[Sequence, Tensor] = {}

    def follow(self, own: Sequence, target: Sequence) -> None:
        """Use the hidden states of the large model's sequence `target` for the sequence `own`."""
        self._targets[own] = target

    def release(self, own: Sequence) -> None:
        """Delete the state of a sequence."""
        self._targets.pop(own, None)
        self._last_outputs.pop(own, None)

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Compute the logits of a step without pending chunks; see `ForwardPath.forward`."""
        assert sampled is None
        batch = self._builder.build(plan, self._cache.device)
        hidden = torch.cat([self._inputs(chunk) for chunk in plan.chunks])
        attention = PagedForward(self._layers, self._cache, batch.attention)
        with self._hook.serving(attention):
            output = run_layer(self._model, batch.input_ids, hidden, batch.position_ids + 1)
        parts = torch.split(output[0], [chunk.num_tokens for chunk in plan.chunks])
        for chunk, part in zip(plan.chunks, parts, strict=True):
            self._last_outputs[chunk.sequence] = part[-1]
        rows = [
            part[len(part) - c.num_logits :] for c, part in zip(plan.chunks, parts, strict=True)
        ]
        logits: Tensor = self._model._project_to_logits(join_logits(rows, output.shape[-1])[None])
        return logits[0]

    def clear(self, sequence: Sequence) -> None:
        """Fill the blocks of a sequence with zeros; see `ForwardPath.clear`."""
        self._cache.clear(sequence.block_table)

    def _inputs(self, chunk: Chunk) -> Tensor:
        """Return the hidden states that precede the tokens of a chunk.

        The shape is [num_tokens, hidden_size].
        """
        target = self._targets[chunk.sequence]
        # In this path, the last known token of the sequence has the index `num_known - 1`.
        num_known = len(target.token_ids) - 1
        if chunk.start >= num_known:
            return self._last_outputs[chunk.sequence][None]
        weight = self._model.layers[0].eh_proj.weight
        rows: Tensor = weight.new_zeros(chunk.num_tokens, weight.shape[0])
        self.hidden.take(target, chunk.start, rows)
        return rows


def run_layer(mtp_model: Any, input_ids: Tensor, hidden: Tensor, position_ids: Tensor) -> Tensor:  # noqa: ANN401
    """Run the first MTP layer on a row of tokens, and return its hidden states.

    Args:
        mtp_model: an MtpModel of transformers.
        input_ids: [1, num_tokens] int64.
        hidden: [num_tokens, hidden_size], the hidden state before each token.
        position_ids: [1, num_tokens] int64.

    Returns:
        Hidden states, [1, num_tokens, hidden_size].
    """
    output: Tensor = mtp_model.forward_layer(
        0, hidden[None], position_ids, None, input_ids=input_ids
    )
    return output
