# SPDX-License-Identifier: Apache-2.0
"""Several texts as one row of tokens, and attention that keeps them apart.

    tokens   a a a | b b b | c c c c c c        lens 3 3 6, groups (0, 2, 3) (6, 1, 6)

Texts of one length lie side by side, so that their attention is one call over a batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.interface import scale_of, sinks_of

# In bfloat16 torch's fused attention on a CPU takes twice the time of matrix products one by one,
# as long as there are not more scores than this.
_FAST_SCORES = 2**23
# Scores of so many at once where they are all written down.
_MAX_SCORES = 2**24
# Fewer queries at a time than this cost more calls than they save work.
_MIN_BLOCK = 128


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts that go through the model together.

    Attributes:
        token_ids: [num_tokens] int64, text after text.
        type_ids: [num_tokens] int64, which part of a pair a token is of; None: the model's default.
        lens: tokens of each text.
    """

    token_ids: Tensor
    type_ids: Tensor | None
    lens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int] | None],
        device: torch.device,
    ) -> "TokenBatch":
        """Put texts in a row; where some have type ids and some not, these are 0."""
        flat = torch.tensor([i for s in sequences for i in s], dtype=torch.int64)
        type_ids = None
        if any(one is not None for one in types):
            rows = (
                one if one is not None else [0] * len(s)
                for s, one in zip(sequences, types, strict=True)
            )
            type_ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64).to(device)
        return cls(flat.to(device), type_ids, tuple(len(s) for s in sequences))

    @property
    def starts(self) -> list[int]:
        """Where each text begins, and at the end where the last one ends."""
        return [0, *itertools.accumulate(self.lens)]

    def groups(self) -> list[tuple[int, int, int]]:
        """Runs of texts of one length: (first token, number of texts, their length)."""
        found, start = [], 0
        for length, run in itertools.groupby(self.lens):
            count = len(list(run))
            found.append((start, count, length))
            start += count * length
        return found

    def positions(self, offset: int) -> Tensor:
        """[num_tokens] int64: each text counts from the offset."""
        starts = torch.tensor(self.starts[:-1], device=self.token_ids.device)
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        first = starts.repeat_interleave(lens)
        return torch.arange(len(self.token_ids), device=self.token_ids.device) - first + offset

    def mask(self) -> Tensor:
        """[num_texts, longest] bool: where a padded batch has tokens."""
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        return torch.arange(max(self.lens), device=lens.device) < lens[:, None]

    def pad(self, values: Tensor, filling: float = 0) -> Tensor:
        """Rows of the packed values [num_tokens, ...] as [num_texts, longest, ...]."""
        mask = self.mask()
        out = values.new_full((*mask.shape, *values.shape[1:]), filling)
        out[mask] = values
        return out


@dataclass(slots=True)
class PackedAttention:
    """Serves the attention calls of one forward pass over a packed batch.

    Attributes:
        groups: of the batch.
        is_causal: whether a token sees only those before it.
        windows: limits of sliding windows that calls came with.
    """

    groups: list[tuple[int, int, int]]
    is_causal: bool
    windows: set[int] = field(default_factory=set)
    _masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """One attention call.

        Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads,
        num_tokens, dim]; returns [1, num_tokens, num_heads, value_dim].
        """
        window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
        if kwargs.get("position_bias") is not None:
            raise ValueError("its attention adds a position bias")
        call = _Call(
            scale=scale_of(module, query, kwargs),
            is_causal=self.is_causal,
            window=window if isinstance(window, int) and window > 0 else None,
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            sinks=sinks_of(kwargs),
            masks=self._masks,
        )
        if call.window is not None:
            self.windows.add(call.window)
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        parts = []
        for start, count, length in self.groups:
            q, k, v = (
                r[start : start + count * length].view(count, length, *r.shape[1:]).transpose(1, 2)
                for r in rows
            )
            parts.append(call.attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention of texts of one length, in one layer.

    Attributes:
        scale: factor on the scores.
        is_causal: whether a token sees only those before it.
        window: a token sees those at less than this distance.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [num_heads], one more score that takes weight and gives nothing.
        masks: that were made before, by their shape and place.
    """

    scale: float
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    masks: dict[tuple[int, int, int, int | None], Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[count, num_heads, length, dim] each; returns the same with the values' dim."""
        length = query.shape[2]
        block = self._block(query)
        parts = []
        for start in range(0, length, block):
            end = min(length, start + block)
            # A window's queries see keys near them only; the rest need not be looked at.
            first, last = 0, length
            if self.window is not None:
                first, last = max(0, start - self.window + 1), min(length, end + self.window - 1)
            last = min(last, end) if self.is_causal else last
            mask = None
            is_cut = self.window is not None and length > self.window
            if is_cut or (self.is_causal and not self._is_whole(query, block)):
                mask = self._mask(start - first, end - start, last - first, query.device)
            taken = (query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
            parts.append(self._one(*taken, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _block(self, query: Tensor) -> int:
        """How many queries go together."""
        count, num_heads, length, _ = query.shape
        if self.window is not None and length > self.window:
            return max(self.window, _MIN_BLOCK)
        if self._is_stepwise(query):
            return max(1, min(length, _MAX_SCORES // (count * num_heads * length)))
        return length

    def _is_whole(self, query: Tensor, block: int) -> bool:
        """Whether one call of the fused attention does it, which knows what causal is."""
        return block >= query.shape[2] and not self._is_stepwise(query)

    def _is_stepwise(self, query: Tensor) -> bool:
        if self.softcap is not None or self.sinks is not None:
            return True
        if query.device.type != "cpu" or query.dtype != torch.bfloat16:
            return False
        return query.shape[0] * query.shape[1] * query.shape[2] ** 2 <= _FAST_SCORES

    def _mask(self, ahead: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """[rows, columns] bool: where a query sees a key; the first query is the key ``ahead``."""
        known = (ahead, rows, columns, self.window)
        mask = self.masks.get(known)
        if mask is None:
            queries = torch.arange(ahead, ahead + rows, device=device)[:, None]
            distance = queries - torch.arange(columns, device=device)
            mask = torch.ones_like(distance, dtype=torch.bool)
            if self.window is not None:
                mask = distance.abs() < self.window
            if self.is_causal:
                mask &= distance >= 0
            self.masks[known] = mask
        return mask

    def _one(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
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
        """Attention by its definition."""
        if query.shape[1] != key.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        scores = (query * self.scale) @ key.transpose(2, 3)
        if self.softcap is not None:
            scores = torch.tanh(scores.float() / self.softcap) * self.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            shape = (*scores.shape[:3], 1)
            column = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(shape)
            weights = torch.cat([scores, column], dim=-1).float().softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.to(value.dtype) @ value
