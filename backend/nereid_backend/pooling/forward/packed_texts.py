# SPDX-License-Identifier: Apache-2.0
"""Packs several texts into one row of tokens. Attention is computed within each text.

    tokens   a a a | b b b | c c c c c c        lens 3 3 6, groups (0, 2, 3) (6, 1, 6)

Neighbouring texts of the same length form a group. One call computes the attention of a group. Here
the texts a and b form a group that begins at token 0 and has 2 texts of 3 tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.interface import scale_of, sinks_of

# On a CPU, bfloat16 attention with at most `_MAX_STEPWISE_SCORES` scores is computed with separate
# matrix products. For so few scores, torch's fused attention takes twice as long.
_MAX_STEPWISE_SCORES = 2**23
# Attention with separate matrix products is computed in blocks, so that at most `_MAX_SCORES`
# scores are in memory at the same time.
_MAX_SCORES = 2**24
# If attention has a sliding window, each block has at least `_MIN_BLOCK` queries. With smaller
# blocks, fewer unnecessary scores would be computed, but the additional calls would take more time
# than this saves.
_MIN_BLOCK = 128


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The packed tokens of several texts.

    Attributes:
        token_ids: the tokens of all texts one after another, int64 [num_tokens].
        type_ids: one number for each token, int64 [num_tokens]. The number is 0 in the first text
            of a pair, and 1 in the second text. None means the model's default.
        lens: the number of tokens of each text.
        attended_lens: one number n for each text. All tokens of the text attend only to its first n
            tokens. None means that the tokens attend to the whole text.
    """

    token_ids: Tensor
    type_ids: Tensor | None
    lens: tuple[int, ...]
    attended_lens: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int] | None],
        device: torch.device,
    ) -> "TokenBatch":
        """Pack several texts into a batch.

        If only some texts have type ids, the tokens of the other texts get the type id 0. Example:
        [[5, 6], [7]] returns a batch with the token_ids [5, 6, 7] and the lens (2, 1).
        """
        flat_ids = [token_id for ids in sequences for token_id in ids]
        token_ids = torch.tensor(flat_ids, dtype=torch.int64).to(device)
        lens = tuple(len(ids) for ids in sequences)
        if all(text_types is None for text_types in types):
            return cls(token_ids, None, lens)
        flat_types: list[int] = []
        for length, text_types in zip(lens, types, strict=True):
            flat_types += [0] * length if text_types is None else text_types
        return cls(token_ids, torch.tensor(flat_types, dtype=torch.int64).to(device), lens)

    @property
    def starts(self) -> list[int]:
        """The index of each text's first token, followed by the total number of tokens.

        Example: the lens (2, 1) give [0, 2, 3].
        """
        return [0, *itertools.accumulate(self.lens)]

    def groups(self) -> list[tuple[int, int, int]]:
        """Return the groups of neighbouring texts with the same length.

        Each group is (index of the group's first token, number of texts, length of each text).
        Example: texts with 5, 5 and 13 tokens return [(0, 2, 5), (10, 1, 13)].
        """
        groups = []
        first_token = 0
        for length, equal_lens in itertools.groupby(self.lens):
            num_texts = len(list(equal_lens))
            groups.append((first_token, num_texts, length))
            first_token += num_texts * length
        return groups

    def split(self) -> list["TokenBatch"]:
        """Return a separate batch for each text."""
        types = self.type_ids
        return [
            TokenBatch(
                self.token_ids[start:end],
                None if types is None else types[start:end],
                (end - start,),
            )
            for start, end in itertools.pairwise(self.starts)
        ]

    def positions(self, offset: int) -> Tensor:
        """Return the position id of each token, int64 [num_tokens].

        The first token of each text has the position id `offset`. Example: the lens (2, 1) and the
        offset 5 return [5, 6, 5].
        """
        starts = torch.tensor(self.starts[:-1], device=self.token_ids.device)
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        first = starts.repeat_interleave(lens)
        return torch.arange(len(self.token_ids), device=self.token_ids.device) - first + offset

    def mask(self) -> Tensor:
        """Return the mask of a padded batch, bool [num_texts, longest]. False means padding."""
        return self._mask_of(self.lens)

    def attention_mask(self) -> Tensor:
        """Return the mask of a padded batch, bool [num_texts, longest].

        True means that the tokens of the text attend to this token.
        """
        return self._mask_of(self.attended_lens or self.lens)

    def _mask_of(self, lens: tuple[int, ...]) -> Tensor:
        """Return a mask [num_texts, longest] that is True for the first lens[i] tokens of text i.

        `longest` is the number of tokens of the longest text.
        """
        ends = torch.tensor(lens, device=self.token_ids.device)
        return torch.arange(max(self.lens), device=ends.device) < ends[:, None]

    def pad(self, values: Tensor, filling: float = 0) -> Tensor:
        """Convert packed values [num_tokens, ...] to a padded batch [num_texts, longest, ...].

        Example: the lens (2, 1) and the values [5, 6, 7] return [[5, 6], [7, 0]].
        """
        mask = self.mask()
        out = values.new_full((*mask.shape, *values.shape[1:]), filling)
        out[mask] = values
        return out


@dataclass(slots=True)
class PackedAttention:
    """Computes the attention of all layers in one forward pass with a packed batch.

    Attributes:
        groups: the groups of the batch (see TokenBatch.groups).
        is_causal: whether a token attends only to itself and to earlier tokens.
        windows: the sizes of the sliding windows that have been used so far.
    """

    groups: list[tuple[int, int, int]]
    is_causal: bool
    windows: set[int] = field(default_factory=set)
    _masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Compute the attention of one layer.

        Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads,
        num_tokens, dim]; returns [1, num_tokens, num_heads, value_dim].
        """
        attention = self._group_attention(module, query, kwargs)
        if attention.window is not None:
            self.windows.add(attention.window)
        parts = []
        for group in self.groups:
            output = attention.attend(
                _texts_of_group(query, group),
                _texts_of_group(key, group),
                _texts_of_group(value, group),
            )
            # The new part has the shape [count * length, num_heads, value_dim].
            parts.append(output.transpose(1, 2).flatten(0, 1))
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return packed.unsqueeze(0)

    def _group_attention(
        self, module: torch.nn.Module, query: Tensor, kwargs: dict[str, object]
    ) -> "_GroupAttention":
        """Return an object that computes the attention of one layer.

        `kwargs` contains the options that transformers passes to the attention of a layer.

        Raises:
            ValueError: the layer uses an option that is not supported.
        """
        if kwargs.get("position_bias") is not None:
            raise ValueError("its attention adds a position bias")
        window = kwargs.get("sliding_window")
        softcap = kwargs.get("softcap")
        return _GroupAttention(
            scale=scale_of(module, query, kwargs),
            is_causal=self.is_causal,
            window=window if isinstance(window, int) and window > 0 else None,
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            sinks=sinks_of(kwargs),
            masks=self._masks,
        )


def _texts_of_group(tensor: Tensor, group: tuple[int, int, int]) -> Tensor:
    """Select the queries, keys or values of one group, [count, num_heads, length, dim].

    Args:
        tensor: the queries, keys or values of all texts, [1, num_heads, num_tokens, dim].
        group: the first token, the number of texts, and their length (see TokenBatch.groups).
    """
    start, count, length = group
    tokens = tensor[0, :, start : start + count * length]
    return tokens.view(tokens.shape[0], count, length, tokens.shape[2]).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _GroupAttention:
    """The attention of one layer for texts of the same length.

    Attributes:
        scale: the factor of the scores.
        is_causal: whether a token attends only to itself and to earlier tokens.
        window: the size of the sliding window. A token attends only to tokens whose distance is
            smaller than `window`. None means no window.
        softcap: if set, scores s become softcap * tanh(s / softcap).
        sinks: an additional score for each head, [num_heads]. The value that belongs to this score
            is 0.
        masks: a cache of masks. The key of a mask consists of the window and of three arguments of
            `_mask`: `ahead`, `rows` and `columns`. The key does not contain `is_causal`, because
            `is_causal` is equal in all layers that share a cache.
    """

    scale: float
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    masks: dict[tuple[int, int, int, int | None], Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the attention within each text of a group.

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
        if self.window is not None:
            first = max(0, start - self.window + 1)
            last = min(length, end + self.window - 1)
        return first, min(last, end) if self.is_causal else last

    def _block(self, query: Tensor) -> int:
        """Return the number of queries that one attention call computes."""
        count, num_heads, length, _ = query.shape
        if self.window is not None and length > self.window:
            return max(self.window, _MIN_BLOCK)
        if self._is_stepwise(query):
            return max(1, min(length, _MAX_SCORES // (count * num_heads * length)))
        return length

    def _needs_mask(self, query: Tensor, block: int) -> bool:
        """Return whether attention calls need a mask if each call computes `block` queries."""
        length = query.shape[2]
        if self.window is not None and length > self.window:
            return True
        if not self.is_causal:
            return False
        # One call of torch's fused attention for all queries needs no mask, because its argument
        # is_causal hides the later keys (see _attend_block).
        is_one_fused_call = block >= length and not self._is_stepwise(query)
        return not is_one_fused_call

    def _is_stepwise(self, query: Tensor) -> bool:
        """Return whether attention is computed with separate matrix products."""
        if self.softcap is not None or self.sinks is not None:
            return True
        if query.device.type != "cpu" or query.dtype != torch.bfloat16:
            return False
        return query.shape[0] * query.shape[1] * query.shape[2] ** 2 <= _MAX_STEPWISE_SCORES

    def _mask(self, ahead: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return the mask of a block, bool [rows, columns]. True means a visible key.

        Args:
            ahead: the index of the key that has the same position as the first query.
            rows: the number of queries.
            columns: the number of keys.
            device: the device of the mask.
        """
        cache_key = (ahead, rows, columns, self.window)
        mask = self.masks.get(cache_key)
        if mask is None:
            queries = torch.arange(ahead, ahead + rows, device=device)[:, None]
            distance = queries - torch.arange(columns, device=device)
            mask = torch.ones_like(distance, dtype=torch.bool)
            if self.window is not None:
                mask = distance.abs() < self.window
            if self.is_causal:
                mask &= distance >= 0
            self.masks[cache_key] = mask
        return mask

    def _attend_block(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Compute the attention of a block of queries.

        The docstring of `attend` describes the shapes.
        """
        if self._is_stepwise(query):
            return self._stepwise(query, key, value, mask)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=self.is_causal and mask is None,
            scale=self.scale,
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
        scores = (query * self.scale) @ key.transpose(2, 3)
        if self.softcap is not None:
            scores = torch.tanh(scores.float() / self.softcap) * self.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            # Append the sink as the score of an additional key, and remove the weight of this key.
            column_shape = (*scores.shape[:3], 1)
            sink_column = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(column_shape)
            weights_and_sink = torch.cat([scores, sink_column], dim=-1).float().softmax(-1)
            weights = weights_and_sink[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.to(value.dtype) @ value
