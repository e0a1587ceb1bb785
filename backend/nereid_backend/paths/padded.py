# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of models that run their own attention code (the path `padded`).

The path passes a cache object to the model. The object writes new keys and values into the blocks
of the KV cache, and returns a copy of all keys and values of the batch (gathered_cache.py).
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.gathered_cache import CacheLayout, GatheredStep, gathered_layer
from nereid_backend.paths.model_call import ModelCall, join_rows, token_inputs
from nereid_backend.paths.position_embeddings import PositionEmbeddings


class PaddedPath:
    """Computes the forward pass of models with their own attention code. Owns the KV cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: CacheLayout,
        cache: KVCache,
        *,
        batches_sequences: bool,
    ) -> None:
        """Create the object that runs the model's forward passes.

        Args:
            checkpoint: the model.
            layout: describes which tensors of the model's own cache are stored in blocks.
            cache: the KV cache, which consists of blocks.
            batches_sequences: whether several sequences may share a forward pass.
        """
        self._call = ModelCall(checkpoint.model)
        # In some models, the embedding layers derive the token positions from the length of the
        # cache. `PositionEmbeddings` passes the correct positions to these layers.
        self._position_embeddings = PositionEmbeddings(checkpoint.model)
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._adapters = checkpoint.adapters
        self._layout = layout
        self._cache = cache
        self._batches_sequences = batches_sequences

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return the logits of one step. `sampled` must be None; see `ForwardPath.forward`."""
        assert sampled is None
        self._cache.copy_blocks(plan.copies)
        logits_of_chunks: list[Tensor | None] = [None] * len(plan.chunks)
        for group in self._group_chunks(plan.chunks):
            group_chunks = [plan.chunks[index] for index in group]
            group_logits = self._compute_group(group_chunks)
            for index, logits in zip(group, group_logits, strict=True):
                num_unneeded = len(logits) - plan.chunks[index].num_logits
                logits_of_chunks[index] = logits[num_unneeded:]
        return join_rows(logits_of_chunks, self._vocab_size)

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache of the path."""
        return self._cache

    def clear(self, sequence: Sequence) -> None:
        """Set the blocks of a sequence to zero; see `ForwardPath.clear`."""
        self._cache.clear(sequence.block_table)

    def _group_chunks(self, chunks: list[Chunk]) -> list[list[int]]:
        """Divide the chunks of a step into groups. One forward pass computes one group.

        Each group is a list of indices of chunks. A decode is a chunk of one token that continues a
        sequence. Decodes share a pass if their positions have the same number of bits, so that
        padding at most doubles the work. Every other chunk is a group of its own. If the model
        cannot compute several sequences in one pass, each decode is a group of its own, too.

        Example: chunks of 1, 1, 1 and 4 tokens that start at 5, 9, 7 and 0 give the groups [[0, 2],
        [1], [3]], because 5 and 7 have 3 bits, and 9 has 4 bits.
        """
        # Maps a number of bits to the decodes whose positions have this number of bits. The decodes
        # are given by their indices in `chunks`.
        decode_groups: dict[int, list[int]] = {}
        single_chunks: list[list[int]] = []
        for index, chunk in enumerate(chunks):
            is_decode = chunk.num_tokens == 1 and chunk.start > 0
            can_share_pass = is_decode and self._batches_sequences
            if can_share_pass:
                decode_groups.setdefault(chunk.start.bit_length(), []).append(index)
            else:
                single_chunks.append([index])
        return [*decode_groups.values(), *single_chunks]

    def _compute_group(self, chunks: list[Chunk]) -> Tensor:
        """Compute the logits of one group of chunks in one forward pass.

        All chunks of a group have the same number of tokens.

        Returns:
            Logits, [num_chunks, n, vocab_size], where n is the largest num_logits of the chunks,
            but at least 1.
        """
        ids, positions = token_inputs(chunks, self._device)
        step = GatheredStep.from_chunks(chunks, self._cache)
        # Request the logits of at least one token, because the model never returns fewer.
        num_logits = max(1, *(chunk.num_logits for chunk in chunks))
        # Some embedding layers ignore the argument `position_ids`, and derive the positions from
        # the length of the cache. `_position_embeddings.using` passes the correct positions to
        # these layers.
        with self._adapters.serving(chunks), self._position_embeddings.using(positions):
            return self._call(
                ids,
                num_logits=num_logits,
                position_ids=positions,
                attention_mask=step.mask,
                cache=self._paged_cache(step),
            )

    def _paged_cache(self, step: "GatheredStep") -> DynamicCache:
        """Return a transformers cache for one forward pass.

        The layers of this cache store keys and values in the blocks of the KV cache.
        """
        cache: Any = DynamicCache()
        # This setting prevents DynamicCache from adding further layers during the forward pass.
        cache.layer_class_to_replicate = None
        cache.layers = [gathered_layer(None, parts, self._cache) for parts in self._layout.parts]
        for layer in cache.layers:
            layer.begin(step)
        return cache
