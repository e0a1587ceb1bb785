# SPDX-License-Identifier: Apache-2.0
"""The attention of texts with the same length, computed with torch's functions."""

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
        masks: a cache of masks. The key of a mask consists of the window and of three arguments of
            `_mask`: `ahead`, `rows` and `columns`. The key does not contain `is_causal`, because
            `is_causal` is equal in all layers that share a cache.
    """

    options: TextAttention
    masks: dict[tuple[int, int, int, int | None], Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the attention within each text. All texts have the same length.

        Shapes: query [count, num_heads, length, key_dim], key and value [count, num_kv_heads,
        length, dim]; returns [count, num_heads, length, value_dim].
        """
        length = query.shape[2]
        # The queries are computed in blocks. The blocks limit the memory, and a block skips the
        # keys outside its sliding window.
        block_len = self._block(query)
        needs_mask = self._needs_mask(query, block_len)
        parts = []
        for start in range(0, length, block_len):
            end = min(length, start + block_len)
            first, last = self._visible_keys(start, end, length)
            mask = None
            if needs_mask:
                mask = self._mask(start - first, end - start, last - first, query.device)
            visible_key = key[:, :, first:last]
            visible_value = value[:, :, first:last]
            parts.append(
                self._attend_block(query[:, :, start:end], visible_key, visible_value, mask)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

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

    def _block(self, query: Tensor) -> int:
        """Return the number of queries that one attention call computes."""
        count, num_heads, length, _ = query.shape
        if self.options.window is not None and length > self.options.window:
            return max(self.options.window, _MIN_BLOCK)
        if self._is_stepwise():
            return max(1, min(length, _MAX_SCORES // (count * num_heads * length)))
        return length

    def _needs_mask(self, query: Tensor, block: int) -> bool:
        """Return whether the attention of `block` queries must be computed with a mask."""
        length = query.shape[2]
        if self.options.window is not None and length > self.options.window:
            return True
        if not self.options.is_causal:
            return False
        # One call of torch's fused attention for all queries needs no mask, because its argument
        # is_causal hides the later keys (see _attend_block).
        is_one_fused_call = block >= length and not self._is_stepwise()
        return not is_one_fused_call

    def _is_stepwise(self) -> bool:
        """Return whether attention is computed with separate matrix products."""
        return self.options.softcap is not None or self.options.sinks is not None

    def _mask(self, ahead: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return the mask for a block of queries, bool [rows, columns]. True means a visible key.

        Args:
            ahead: the index of the key that has the same position as the first query.
            rows: the number of queries.
            columns: the number of keys.
            device: the device of the mask.
        """
        cache_key = (ahead, rows, columns, self.options.window)
        mask = self.masks.get(cache_key)
        if mask is None:
            queries = torch.arange(ahead, ahead + rows, device=device)[:, None]
            distance = queries - torch.arange(columns, device=device)
            mask = torch.ones_like(distance, dtype=torch.bool)
            if self.options.window is not None:
                mask = distance.abs() < self.options.window
            if self.options.is_causal:
                mask &= distance >= 0
            self.masks[cache_key] = mask
        return mask

    def _attend_block(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Compute the attention of `query`, which contains consecutive queries of each text.

        The docstring of `attend` describes the shapes.
        """
        if self._is_stepwise():
            return self._stepwise(query, key, value, mask)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=self.options.is_causal and mask is None,
            scale=self.options.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _stepwise(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention by its definition, with separate matrix products.

        `_is_stepwise` selects this method. torch's own function supports neither a softcap nor
        sinks. A softcap limits the scores. A sink is a learned score for each head, which increases
        the divisor of the softmax.
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
        if self.options.sinks is not None:
            # The attention sink is the score of an additional key, which has no value. The score is
            # appended before the softmax, and the weight of the key is removed after the softmax.
            column_shape = (*scores.shape[:3], 1)
            sink_column = self.options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(column_shape)
            weights_and_sink = torch.cat([scores, sink_column], dim=-1).float().softmax(-1)
            weights = weights_and_sink[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.to(value.dtype) @ value
