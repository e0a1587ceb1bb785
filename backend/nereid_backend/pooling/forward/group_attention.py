# SPDX-License-Identifier: Apache-2.0
"""Computes the attention of texts that have equal lengths, with torch's functions."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_texts import TextAttention

# Attention with separate matrix products is computed in blocks, so that at most `_MAX_SCORES`
# scores are in memory at the same time.
_MAX_SCORES = 2**24
# If attention has a sliding window, each block has at least `_MIN_BLOCK` queries. Smaller blocks
# would compute fewer unnecessary scores, but they would need more calls and more time in total.
_MIN_BLOCK = 128


@dataclass(frozen=True, slots=True)
class GroupAttention:
    """The attention of one layer for texts of the same length.

    Attributes:
        options: the options of the layer.
        masks: a cache of masks. The key of a mask consists of three arguments of `_mask`
            (`first_query`, `num_queries` and `num_keys`) and of the window. The key does not
            contain `is_causal`, because `is_causal` is equal in all layers that share a cache.
    """

    options: TextAttention
    masks: dict[tuple[int, int, int, int | None], Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the attention within each text. All texts have the same length.

        Each text is divided into blocks of consecutive queries. The blocks limit the memory for the
        scores, and each block skips the keys outside its sliding window.

        Shapes: query [count, num_heads, length, key_dim], key [count, num_kv_heads, length,
        key_dim], value [count, num_kv_heads, length, value_dim]; returns [count, num_heads, length,
        value_dim].
        """
        length = query.shape[2]
        block_len = self._choose_block_len(query)
        # In a causal model, a token must not attend to later tokens. If one block contains the
        # whole text, torch's attention function can hide the later keys without a mask. If the text
        # is divided into several blocks, each block needs a mask.
        needs_mask = self._needs_mask(query, block_len)
        hides_later_keys = self.options.is_causal and not needs_mask
        outputs = []
        for start in range(0, length, block_len):
            end = min(length, start + block_len)
            first_key, end_key = self._visible_keys(start, end, length)
            mask = None
            if needs_mask:
                # The position of the first query relative to the first visible key.
                first_query = start - first_key
                mask = self._mask(first_query, end - start, end_key - first_key, query.device)
            output = self._attend_block(
                query[:, :, start:end],
                key[:, :, first_key:end_key],
                value[:, :, first_key:end_key],
                mask,
                hides_later_keys=hides_later_keys,
            )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _visible_keys(self, start: int, end: int, length: int) -> tuple[int, int]:
        """Return the range [first, last) of the keys to which a block of queries can attend.

        The block consists of the queries [start, end). Example: if the window is 3 and the
        attention is not causal, the queries [10, 12) return (8, 14).
        """
        first = 0
        last = length
        if self.options.window is not None:
            first = max(0, start - self.options.window + 1)
            last = min(length, end + self.options.window - 1)
        return first, min(last, end) if self.options.is_causal else last

    def _choose_block_len(self, query: Tensor) -> int:
        """Return the number of queries whose attention is computed in one call."""
        count, num_heads, length, _ = query.shape
        if self.options.window is not None and length > self.options.window:
            return max(self.options.window, _MIN_BLOCK)
        if self._needs_explicit_scores():
            return max(1, min(length, _MAX_SCORES // (count * num_heads * length)))
        return length

    def _needs_mask(self, query: Tensor, block_len: int) -> bool:
        """Return whether the attention of blocks of `block_len` queries needs a mask."""
        length = query.shape[2]
        if self.options.window is not None and length > self.options.window:
            return True
        if not self.options.is_causal:
            return False
        # A single call of torch's fused attention for all queries needs no mask, because the
        # argument `is_causal` hides the later keys (see `_attend_block`).
        is_one_fused_call = block_len >= length and not self._needs_explicit_scores()
        return not is_one_fused_call

    def _needs_explicit_scores(self) -> bool:
        """Return True if the attention has a softcap or sinks, which need the scores of all keys.

        Attention is then computed with separate matrix products instead of torch's fused function.
        """
        return self.options.softcap is not None or self.options.sinks is not None

    def _mask(
        self, first_query: int, num_queries: int, num_keys: int, device: torch.device
    ) -> Tensor:
        """Return the mask for a block of queries, bool [num_queries, num_keys]. Cache the mask.

        True means that the query can attend to the key. Example: with causal attention, first_query
        1, two queries and three keys, the mask is [[True, True, False], [True, True, True]].

        Args:
            first_query: the position of the first query, relative to the position of the first key.
            num_queries: the number of queries in the block.
            num_keys: the number of keys.
            device: the device of the mask.
        """
        # The device is no part of the key, because a cache is used for one forward pass only.
        cache_key = (first_query, num_queries, num_keys, self.options.window)
        mask = self.masks.get(cache_key)
        if mask is None:
            positions = torch.arange(first_query, first_query + num_queries, device=device)
            distance = positions[:, None] - torch.arange(num_keys, device=device)
            mask = self.masks[cache_key] = self._mask_of_distances(distance)
        return mask

    def _mask_of_distances(self, distance: Tensor) -> Tensor:
        """Return a bool mask of the shape of `distance`. True means that a query sees a key.

        `distance` contains the position of each query minus the position of each key.
        """
        mask = torch.ones_like(distance, dtype=torch.bool)
        if self.options.window is not None:
            mask = distance.abs() < self.options.window
        if self.options.is_causal:
            mask &= distance >= 0
        return mask

    def _attend_block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        hides_later_keys: bool,
    ) -> Tensor:
        """Compute the attention of one block. A block contains consecutive queries of each text.

        `mask` contains True for each key that a query can see; None if no mask is needed. If
        `hides_later_keys` is True, torch hides the keys after each query. The block then contains
        whole texts, `mask` is None, and the layer has no softcap and no sinks.

        Shapes: query [count, num_heads, num_queries, key_dim], key [count, num_kv_heads, num_keys,
        key_dim], value [count, num_kv_heads, num_keys, value_dim], mask bool [num_queries,
        num_keys].
        """
        if self._needs_explicit_scores():  # a softcap or sinks, which torch does not support
            return self._attend_with_explicit_scores(query, key, value, mask)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=hides_later_keys,
            scale=self.options.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend_with_explicit_scores(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Compute attention by its definition, with separate matrix products.

        This method is needed for a softcap and for sinks, which torch's own function does not
        support. A softcap limits the scores. A sink is a learned score for each head, which
        increases the divisor of the softmax.
        """
        if query.shape[1] != key.shape[1]:
            queries_per_key_head = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(queries_per_key_head, dim=1)
            value = value.repeat_interleave(queries_per_key_head, dim=1)
        scores = (query * self.options.scale) @ key.transpose(2, 3)
        if self.options.softcap is not None:
            scores = torch.tanh(scores.float() / self.options.softcap) * self.options.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.options.sinks is None:
            return scores.softmax(-1).to(value.dtype) @ value
        # The attention sink is the score of an additional key, which has no value. The score is
        # appended before the softmax, and the weight of the key is removed after the softmax.
        column_shape = (*scores.shape[:3], 1)
        sink_column = self.options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(column_shape)
        weights_and_sink = torch.cat([scores, sink_column], dim=-1).float().softmax(-1)
        return weights_and_sink[..., :-1].to(value.dtype) @ value
